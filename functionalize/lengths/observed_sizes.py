"""A run of a step in which the sizes that Python asks for are live numbers: what the step learns of sizes.

    with ObservedSizes(sizes) as observed:
        result = observed.settled(fn(*args))
    observed.facts()          a `SizeFacts`; text: what Python asked that is not known

A run in two parts, a forward and later its backward, is observed in two such blocks: the sizes that the first one has
left in Python objects are plain when it ends, as for any run.

    x.shape[1] > 512          a plain bool, and a fact about s0
    x.view(x.shape[0], -1)    torch gets plain integers, and runs the ops that it always runs
    range(x.shape[1])         Python needs the plain integer: a fact that no other size has

A size is a live number (`scalars/live_scalars.py`) on the leaf `Size`, if one function of the sizes of arguments alone
has its value in this call (`signature_template.py` has the functions of all sizes in the step). Functions of torch get
plain integers, without a fact: what torch decides by a size is no business of this file, see `coverage.py`. An integer
that the step has computed (`x.shape[1] // 4 * 4`) and passes to one is a use, which `SizeFacts` keeps.
Invariant: every plain value that Python derives from a size that varies is a fact or a use, or the run is `lost`.
Not live are the sizes that torch's own code asks for outside of `torch.nn`: it belongs to torch.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from functionalize._compat.autograd import engine_entry
from functionalize._compat.dispatch import current_modes, has_torch_function_of_types
from functionalize.ir.scalars import ScalarInput, is_expression
from functionalize.lengths.size_facts import Size, SizeFacts
from functionalize.scalars.escaped_numbers import replace_escaped, settle_escaped
from functionalize.scalars.live_scalars import SYMBOLIC, as_live, is_live, plain
from functionalize.scalars.live_text import learn_texts
from functionalize.scalars.scalar_log import Number, ScalarLog
from functionalize.templates.fitting import Formula
from functionalize.util import structure
from functionalize.util.number_uses import may_need_exact_number
from functionalize.util.patching import Patch, Patches

_TORCH = str(Path(torch.__file__).parent) + os.sep
_ASKS_OF_SIZES = _TORCH + "nn" + os.sep
_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """The sizes of all tensors in a step at one call.

    varying: for each value that one function alone has, the function. constant: values that never vary. In neither are
    values that several functions have.
    """

    varying: Mapping[int, Formula]
    constant: frozenset[int]


class SizeLog(ScalarLog):
    """The facts about sizes of one run. A size that meets a number of the recording becomes plain."""

    yields = True


class ObservedSizes(TorchFunctionMode):
    """One run. lost: why not all that Python asks of sizes is known."""

    def __init__(self, known: KnownSizes) -> None:
        super().__init__()
        self.log = SizeLog(self.lose)
        self.lost: str | None = None
        self._known = known
        self._leaves: dict[int, ScalarInput] = {}
        self._uses: dict[Any, int] = {}
        self._exact: dict[Any, bool] = {}
        self._inside = 0  # functions of torch that run, as seen from Python
        self._earlier: list[tuple[Any, Any]] = []  # facts of earlier parts of the run

    def __enter__(self) -> Self:
        if not self.log.active:
            self._earlier, self.log, self._leaves = self._facts(), SizeLog(self.lose), {}
        OBSERVERS.add(self)
        PATCHES.install()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            PATCHES.remove()
            OBSERVERS.remove()
            if self.log.active:  # the step has raised
                replace_escaped(self.log)
                self.log.close()

    def learn(self, known: KnownSizes) -> None:
        """Sizes are known from now on that ops have made."""
        self._known = known

    def lose(self, why: str) -> None:
        """Note something about sizes that Python learns and that is not known."""
        self.lost = self.lost or why

    def settled(self, result: Any) -> Any:
        """The result of the step with plain numbers; the run has ended."""
        leaves, spec = structure.flatten(result, result=True)
        found = [self._plain(leaf) for leaf in leaves]
        if any(new is not was for new, was in zip(found, leaves, strict=True)):
            result = structure.unflatten(found, spec)
        del leaves, found
        learn_texts(self.log)
        settle_escaped(self.log, ())
        self.log.close()
        return result

    def facts(self) -> SizeFacts | str:
        """What the step has learned of sizes; text: what is not known."""
        if self.lost is not None:
            return self.lost
        return SizeFacts.of(self._facts(), self._uses)

    def _facts(self) -> list[tuple[Any, Any]]:
        return [*self._earlier, *((f.expression, f.value) for f in self.log.facts.values())]

    # -- sizes that Python asks for --------------------------------------------------------------

    def asks(self, frame: FrameType | None) -> bool:
        """Whether a size that the function of a frame asks for now is live."""
        return not self._inside and frame is not None and _asks(frame.f_code.co_filename)

    def sizes(self, tensor: Tensor, sizes: Any, frame: FrameType) -> Any:
        """The sizes of a tensor, live where they vary."""
        if not self.varies(tensor, sizes):
            return sizes
        live = [self._live(size, frame) for size in sizes]
        return torch.Size(live) if any(map(is_live, live)) else sizes

    def varies(self, tensor: Tensor, sizes: Any) -> bool:
        """Whether sizes of a tensor vary, and all of them are known; loses the run if one is unknown."""
        known, kind = self._known, type(tensor)
        if kind is Parameter or known.constant.issuperset(sizes):
            return False
        for size in sizes:
            if size not in known.varying and size not in known.constant:
                self.lose(f"which of the sizes in the step is {size}")
                return False
        if kind is not Tensor:
            self.lose(f"the sizes of a {kind.__name__}")
            return False
        return True

    def _live(self, size: int, frame: FrameType) -> Any:
        formula = self._known.varying.get(size)
        if formula is None:
            return size
        if size not in self._leaves:
            self._leaves[size] = ScalarInput(Size(formula), str(formula), size)  # type: ignore[arg-type]
        live = as_live(Number(self._leaves[size], size, self.log))
        return plain(live) if may_need_exact_number(frame, self._exact) else live

    # -- functions of torch ----------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._inside += 1
        try:
            values = (*args, *kwargs.values()) if kwargs else args
            if not any(map(_may_hold_live, map(type, values))):  # most calls
                return func(*args, **kwargs) if kwargs else func(*args)
            return func(
                *[self._plain(a) for a in args],
                **{k: self._plain(a) for k, a in (kwargs or {}).items()},
            )
        finally:
            self._inside -= 1

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """A context in which a function of torch runs code of the user: hooks, custom and recomputed functions."""
        before, self._inside = self._inside, 0
        try:
            if not before:
                yield
            else:  # the mode is off
                with _Again(self):
                    yield
        finally:
            self._inside = before

    def _plain(self, value: Any) -> Any:
        """A value with plain integers in the places of live sizes."""
        if isinstance(value, Tensor):
            return value
        if is_live(value):
            return self._used(value) if value.node.log is self.log else value
        kind = type(value)
        if kind is list or kind is tuple or kind is torch.Size:
            if not any(map(_may_hold_live, map(type, value))):
                return value
            found = [self._plain(each) for each in value]
            return kind(found) if any(map(_is_other, found, value)) else value
        if kind is dict:
            return {key: self._plain(each) for key, each in value.items()}
        if kind is slice:
            return slice(*map(self._plain, (value.start, value.stop, value.step)))
        return value

    def _used(self, live: Any) -> Any:
        number: Number = live.node
        if not number.alive or number.kind is not int:
            return number.settle()
        if is_expression(number.expression) and not isinstance(number.expression, ScalarInput):
            self._uses[number.expression] = number.left_behind()
        return number.left_behind()


@lru_cache(maxsize=4096)
def _may_hold_live(kind: type) -> bool:
    """Whether an argument of this type may be a live size, or a container in which `_plain` looks for one."""
    return kind in SYMBOLIC or kind in (list, tuple, dict, slice, torch.Size)


class _Again(TorchFunctionMode):
    """The mode of an observer once more, while a function runs for which it is off."""

    def __init__(self, observed: ObservedSizes) -> None:
        super().__init__()
        self._observed = observed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._observed.__torch_function__(func, types, args, kwargs)


def _is_other(new: Any, was: Any) -> bool:
    return new is not was


@lru_cache(maxsize=4096)
def _asks(filename: str) -> bool:
    """Whether code of this file decides by sizes on its own: that of the user, of libraries, and of `torch.nn`."""
    if filename.startswith(_TORCH):
        return filename.startswith(_ASKS_OF_SIZES)
    return not filename.startswith((_OWN, "<frozen"))


# -- replacements of torch's methods while a step is observed --------------------------------------


class _Observers:
    """The observer of each thread; autograd's own threads, to which modes are passed on, have that of the step."""

    def __init__(self) -> None:
        self._found: dict[int, ObservedSizes] = {}

    def add(self, observed: ObservedSizes) -> None:
        self._found[threading.get_ident()] = observed

    def remove(self) -> None:
        self._found.pop(threading.get_ident(), None)

    def here(self) -> ObservedSizes | None:
        """The observer of this thread."""
        found = self._found.get(threading.get_ident())
        if found is None and self._found and current_modes():
            return next(reversed(self._found.values()))
        return found


OBSERVERS = _Observers()


def _observed_shape(original: Any) -> Any:
    def shape(self: Tensor) -> Any:
        observed, found = OBSERVERS.here(), original.__get__(self)
        frame = sys._getframe(1)
        return observed.sizes(self, found, frame) if observed and observed.asks(frame) else found

    return property(shape)


def _observed_size(original: Any) -> Any:
    def size(self: Tensor, dim: Any = None) -> Any:
        observed, frame = OBSERVERS.here(), sys._getframe(1)
        found = original(self) if dim is None else original(self, dim)
        if not observed or not observed.asks(frame):
            return found
        if dim is None:
            return observed.sizes(self, found, frame)
        return observed.sizes(self, original(self), frame)[dim]

    size.__doc__ = original.__doc__
    return size


def _observed_count(original: Any) -> Any:
    def numel(self: Tensor) -> Any:
        observed, frame = OBSERVERS.here(), sys._getframe(1)
        if not observed or not observed.asks(frame):
            return original(self)
        total = 1
        for size in observed.sizes(self, Tensor.size(self), frame):
            total = total * size
        return total

    numel.__doc__ = original.__doc__
    return numel


def _observed_length(original: Any) -> Any:
    def __len__(self: Tensor) -> Any:
        observed, frame = OBSERVERS.here(), sys._getframe(1)
        found = original(self)
        if observed and observed.asks(frame):
            return observed.sizes(self, Tensor.size(self), frame)[0]
        return found

    __len__.__doc__ = original.__doc__
    return __len__


def _unknown(name: str, original: Any) -> Any:
    """A method or property that tells Python something about the sizes of a tensor that no function is known of."""

    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        observed, frame = OBSERVERS.here(), sys._getframe(1)
        if observed and observed.asks(frame) and observed.varies(self, Tensor.size(self)):
            observed.lose(f"`{name}` of a tensor of that size")
        return original.__get__(self) if is_property else original(self, *args, **kwargs)

    is_property = not callable(original)
    return property(asked) if is_property else asked


def _observed_engine(original: Any) -> Any:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        observed = OBSERVERS.here()
        if observed is None:
            return original(*args, **kwargs)
        with observed.resumed():
            return original(*args, **kwargs)

    return _engine_run_backward


def _patches() -> Iterator[Patch]:
    yield Tensor, "shape", _observed_shape(Tensor.shape)
    yield Tensor, "size", _observed_size(Tensor.size)
    for name in ("numel", "nelement"):
        yield Tensor, name, _observed_count(getattr(Tensor, name))
    yield Tensor, "__len__", _observed_length(Tensor.__len__)
    for name in ("stride", "storage_offset", "nbytes", "untyped_storage", "storage", "data_ptr"):
        yield Tensor, name, _unknown(name, getattr(Tensor, name))
    owner, name = engine_entry()
    yield owner, name, _observed_engine(getattr(owner, name))
    # Fast paths of `torch.nn` are not taken under a mode, which is not the step's.
    yield torch.overrides, "has_torch_function", has_torch_function_of_types


PATCHES = Patches(_patches)
