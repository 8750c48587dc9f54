"""Replacements of torch's functions that return numbers to Python or accept them, used while a capture runs.

    tensor.item()                       torch returns a bare `torch.SymFloat`: wrapped as a `LiveFloat`
    torch._fused_adamw_(..., lr=lr)     converts `lr` to a C++ double: see Note [Carried numbers] in scalar_arguments.py
    clip_grad_norm_(..., max_norm)      calls `float`, which returns a plain number: replaced in its module, and in that
                                        of batch norms, which divide by the number of their calls (`momentum=None`)
    min(number, 1.0)                    a program has the comparison, not its answer
    math.exp(number), math.isnan(number)  C code that reads the number: the result is live, or a fact
    buffer[i] = number                  C++ makes a tensor of the number without an op: made by `torch.full` instead
    torch.tensor([number, 1.0])         converts to plain numbers: calls `torch.full` instead, which accepts live ones
    json.dumps({"loss": number})        C code that accepts Python's own types only: receives the plain number
    sum([number, 1.0, 2.0])             since Python 3.12 C adds up floats in another way: an expression of its own
    math.sumprod([number], [2.0])       the same: receives plain numbers
    statistics.mean([number, 1.0])      makes a result of the type of its elements: `type` is replaced in the module
    F.interpolate(x, scale_factor=n)    its C++ op accepts no symbolic int: receives the plain number
    tensor._wrapped_number              see Note [Wrapped numbers]
    tensor ** number                    receives the plain number: see Note [Numbers in formulas]
    torch.sub(a, b, alpha=number), special.zeta(number, x)  the same, if autograd may differentiate them
    torch.ctc_loss(..., [5, 4], [2, 1]) C++ makes a tensor of the lengths without an op: made in Python instead
    F.one_hot(labels, 10)               C++ reads the least and the greatest label: they are compared in Python instead
    lengths.tolist()                    the integers are read one by one, if they are few
    x.tensor_split(tensor), lstm(packed)  C++ reads indices and lengths without an op: read by .item() first
    torch.jit.script                    looks up torch's functions by identity: replacements are mapped to originals

Each calls the original if no recording with live numbers is active.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import batchnorm
from torch.nn.utils import clip_grad

from functionalize._compat.autograd import forward_mode_is_on
from functionalize._compat.compilers import script_builtins
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize._compat.modules import fused_optimizer_functions, packed_sequence_functions
from functionalize.ir.scalars import OF_MATH
from functionalize.scalars.live_scalars import (
    DECISIONS,
    as_live,
    for_live,
    is_live,
    live_sum,
    of_extremes,
    plain,
    settled,
)
from functionalize.scalars.scalar_arguments import has_live

_NUMBERS = frozenset({bool, int, float})
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_WITHOUT_ALPHA = 2  # arguments by position; where there are more, `alpha` is among them
# Integers that `.tolist()` reads one by one, numbers of which `torch.tensor` makes elements.
_FEW = 64
_LISTED = "Python reads a tensor that the step computes by .tolist(), in place of which it may call .item(),"


def patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement). recorders: returns the recorders active in this thread, innermost first."""
    yield torch.Tensor, "item", _item(torch.Tensor.item)
    yield torch.Tensor, "_wrapped_number", property(_get_wrapped_number, _set_wrapped_number)
    scripted: dict[int, Any] = {}  # id of a replacement -> the original
    for name in ("tensor", "as_tensor", "from_numpy"):
        made = _tensor_from_array(recorders, original := getattr(torch, name))
        made = made if name == "from_numpy" else _tensor_from_number(made)
        scripted[id(made)] = original
        yield torch, name, made
    yield torch.Tensor, "__setitem__", _set_item(recorders, torch.Tensor.__setitem__)
    made = _lengths_as_tensors(recorders, torch.ctc_loss)
    scripted[id(made)] = torch.ctc_loss
    yield torch, "ctc_loss", made
    for owner in (torch, torch.Tensor):
        split = _split_by_numbers(recorders, owner.tensor_split)
        scripted[id(split)] = owner.tensor_split
        yield owner, "tensor_split", split
    for owner, name in packed_sequence_functions():
        yield owner, name, _of_read_lengths(recorders, getattr(owner, name))
    yield clip_grad, "float", _as_float
    yield batchnorm, "float", _as_float
    for name in (*OF_MATH, *DECISIONS):
        yield math, name, for_live(getattr(math, name))
    reductions = {"min": of_extremes(builtins.min), "max": of_extremes(builtins.max)}
    if sys.version_info >= (3, 12):
        reductions["sum"] = live_sum
    for name, made in reductions.items():
        # Not what a script has put into its place.
        if isinstance(getattr(builtins, name), BuiltinFunctionType):
            yield builtins, name, made
    if sys.version_info >= (3, 12):
        for owner in (math, statistics):
            yield owner, "sumprod", _of_plain_elements(owner.sumprod)
    made = _batch_norm(recorders, torch.batch_norm)
    scripted[id(made)] = torch.batch_norm
    yield torch, "batch_norm", made
    yield json.JSONEncoder, "default", _as_json(json.JSONEncoder.default)
    for name in ("encode", "iterencode"):
        yield json.JSONEncoder, name, _of_plain(getattr(json.JSONEncoder, name))
    yield statistics, "type", _type_of
    yield F, "interpolate", _of_plain(F.interpolate)
    made = _one_hot(recorders, F.one_hot)
    scripted[id(made)] = F.one_hot
    yield F, "one_hot", made
    for owner, name in fused_optimizer_functions():
        yield owner, name, _fused_optimizer(recorders, name, getattr(owner, name))
    for owner, name, arguments in numbers_in_formulas():
        made = _of_constants(original := getattr(owner, name), arguments)
        scripted[id(made)] = original
        yield owner, name, made
    of_script = script_builtins()
    yield of_script, "_find_builtin", _original_builtin(scripted, of_script._find_builtin)


def _item(original: Any) -> Any:
    def item(self: torch.Tensor) -> Any:
        number = as_live(original(self))
        if not is_live(number) or number.node.log.is_live_for(sys._getframe(1)):
            return number
        return plain(number)

    item.__doc__ = original.__doc__
    return item


def _tensor_from_number(original: Any) -> Any:
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        known = kwargs.keys() <= {"dtype", "device"} and not args
        found = _elements(data) if known and has_live(data) else None
        if found is None:
            return original(data, *args, **kwargs)
        shape, numbers = found
        has_float = any(isinstance(each, float) for each in numbers)
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if has_float else torch.int64)
        made = [_scalar_tensor(n, dtype, kwargs.get("device")) for n in numbers]
        return made[0] if not shape else torch.stack(made).reshape(shape)

    make.__doc__ = original.__doc__
    return make


def _scalar_tensor(number: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor of one number, as `torch.tensor` rounds it: what is too large for a float32 is infinite."""
    if dtype is not torch.float32:
        return torch.full((), number, dtype=dtype, device=device)
    return torch.full((), number, dtype=torch.float64, device=device).to(dtype)  # `full` raises


def _elements(data: Any) -> tuple[tuple[int, ...], list[Any]] | None:
    """The shape and the numbers of a number, or of equally long lists of numbers; None: others, or too many."""
    if not isinstance(data, (list, tuple)):
        return ((), [data]) if type(data) in _NUMBERS or is_live(data) else None
    parts = [_elements(each) for each in data]
    if not parts or None in parts or len({shape for shape, _ in parts}) > 1:  # type: ignore[misc]
        return None
    numbers = [number for _, found in parts for number in found]  # type: ignore[misc]
    return ((len(data), *parts[0][0]), numbers) if len(numbers) <= _FEW else None  # type: ignore[index]


def _tensor_from_array(recorders: Callable[[], list[Any]], original: Any) -> Any:
    """A converter of arrays: of one that is an argument, by ops on the tensor that is an input."""
    copies = original.__name__ == "tensor"

    def convert(data: Any, *args: Any, **kwargs: Any) -> Any:
        found = (recorder.arrays.get(id(data)) for recorder in recorders())
        tensor = next((each for each in found if each is not None), None)
        if tensor is None:
            with ExitStack() as stack:
                for recorder in recorders():
                    if recorder.other_arrays is not None:
                        stack.enter_context(recorder.other_arrays.converting(data))
                return original(data, *args, **kwargs)
        return _converted(tensor.detach(), copies, *args, **kwargs)

    convert.__name__, convert.__doc__ = original.__name__, original.__doc__
    return convert


def _converted(
    tensor: Any,
    copies: bool,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> Any:
    """What torch makes of an array, made of the tensor on its memory. copies: as `torch.tensor` does."""
    device, dtype = device or tensor.device, dtype or tensor.dtype
    if copies:
        tensor = tensor.to(device, dtype, copy=True)  # with the strides of a dense array
        tensor = tensor.pin_memory() if pin_memory else tensor
        return tensor.requires_grad_() if requires_grad else tensor
    return tensor.to(device, dtype)


def _set_item(recorders: Callable[[], list[Any]], original: Any) -> Any:
    """C++ converts a number to a tensor of the dtype of `self`, as `torch.full` does, and copies it."""

    def __setitem__(self: Any, index: Any, value: Any) -> None:
        is_number = type(value) in _NUMBERS or is_live(value)
        if is_number and type(self) in _PLAIN_TENSORS and _reads(recorders, self):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        original(self, index, value)

    __setitem__.__doc__ = original.__doc__
    return __setitem__


def _lengths_as_tensors(recorders: Callable[[], list[Any]], original: Any) -> Any:
    def ctc_loss(log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(log_probs, torch.Tensor) and log_probs.device.type == "cpu" and recorders():
            args = tuple(map(_as_lengths, args))
            kwargs = {k: _as_lengths(v) for k, v in kwargs.items()}
        return original(log_probs, targets, *args, **kwargs)

    ctc_loss.__doc__ = original.__doc__
    return ctc_loss


def _one_hot(recorders: Callable[[], list[Any]], original: Any) -> Any:
    def one_hot(tensor: Any, num_classes: Any = -1) -> Any:
        if (
            type(tensor) is not torch.Tensor
            or (tensor.dtype, tensor.device.type) != (torch.int64, "cpu")
            or (type(num_classes) is not int or num_classes < 1 or not tensor.numel())
            or not recorders()
            or tensor.min().item() < 0
            or tensor.max().item() >= num_classes
        ):
            return original(tensor, num_classes)  # it raises for labels out of range
        zeros = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    one_hot.__doc__ = original.__doc__
    return one_hot


def _as_lengths(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.int64) if isinstance(value, (list, tuple)) else value


def _numbers_in(lengths: torch.Tensor) -> Any:
    """The numbers of a tensor of indices, read one by one, with a guard on each."""
    if lengths.dim() == 0:
        return int(lengths.item())
    return [int(each.item()) for each in lengths.reshape(-1).unbind()]


def listed(recorders: Sequence[Any], tensor: Any) -> list[Any] | None:
    """`tensor.tolist()` of a few integers, read one by one: all must follow from arguments; None: others."""
    is_few = isinstance(tensor, torch.Tensor) and 0 < tensor.numel() <= _FEW and tensor.dim() > 0
    if not is_few or tensor.is_floating_point() or tensor.is_complex():
        return None
    if not _reads(lambda: list(recorders), tensor):
        return None
    numbers = []
    for each in tensor.reshape(-1).unbind():
        numbers.append(plain(each.item()))
        for recorder in recorders:
            recorder.checks.sized_by(recorder, _LISTED)
    return _nested(iter(numbers), tensor.shape)


def _nested(numbers: Iterator[Any], shape: Sequence[int]) -> list[Any]:
    if len(shape) == 1:
        return [next(numbers) for _ in range(shape[0])]
    return [_nested(numbers, shape[1:]) for _ in range(shape[0])]


def _reads(recorders: Callable[[], list[Any]], value: Any) -> bool:
    """Whether a recording of a step would miss what C++ reads of, or makes for, this tensor."""
    real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return real and any(r.checks is not None and r.checks.for_real for r in recorders())


def _split_by_numbers(recorders: Callable[[], list[Any]], original: Any) -> Any:
    def tensor_split(self: Any, *args: Any, **kwargs: Any) -> Any:
        def read(value: Any) -> Any:
            return _numbers_in(value) if _reads(recorders, value) else value

        return original(self, *map(read, args), **{k: read(v) for k, v in kwargs.items()})

    tensor_split.__doc__ = original.__doc__
    return tensor_split


def _of_read_lengths(recorders: Callable[[], list[Any]], original: Any) -> Any:
    """A function of a packed sequence or of its lengths, the second argument, on which sizes depend."""

    def of_lengths(*args: Any, **kwargs: Any) -> Any:
        lengths: Any = args[1] if len(args) > 1 else None
        if _reads(recorders, lengths) and not lengths.is_floating_point():
            _numbers_in(lengths)
            for recorder in recorders():
                if recorder.checks is not None:
                    what = f"{original.__name__}() gives a result whose size depends on data"
                    recorder.checks.sized_by(recorder, what)
            if original.__name__ in _PACKS:
                return original(*args, **kwargs)[0], _other_way(lengths)
        return original(*args, **kwargs)

    of_lengths.__name__, of_lengths.__doc__ = original.__name__, original.__doc__
    return of_lengths


_PACKS = ("_pack_padded_sequence", "_pad_packed_sequence")


def _other_way(lengths: torch.Tensor) -> torch.Tensor:
    """Of the lengths of sequences how many are longer than 0, 1, ..., and of these numbers the lengths.

    C++ fills such a tensor without an op, beside a result of what the step computes.
    """
    most = torch.arange(int(lengths[0].item()))
    return (lengths > most.unsqueeze(1)).sum(1)


def _as_float(value: Any) -> Any:
    number = as_live(value.item()) if isinstance(value, torch.Tensor) else value
    return torch.sym_float(number) if is_live(number) else float(number)


def _batch_norm(recorders: Callable[[], list[Any]], original: Any) -> Any:
    """Its momentum is a C++ double: see Note [Carried numbers]. It is live with `momentum=None`."""

    def batch_norm(*args: Any, **kwargs: Any) -> Any:
        momentum = args[6] if len(args) > 6 else None
        found = (recorder.scalar_arguments for recorder in recorders())
        scalars = next((each for each in found if each is not None), None)
        if scalars is None or not is_live(momentum):
            return original(*args, **kwargs)
        # Of its numbers momentum alone is not in the formula of the backward: `eps` is a constant, by `settled`.
        with scalars.carry("aten::native_batch_norm", {"momentum": momentum}) as carried:
            return original(*args[:6], carried["momentum"], *settled(args[7:]), **kwargs)

    batch_norm.__doc__ = original.__doc__
    return batch_norm


def _as_json(original: Any) -> Any:
    def default(self: json.JSONEncoder, value: Any) -> Any:
        return plain(value) if is_live(value) else original(self, value)

    default.__doc__ = original.__doc__
    return default


def _of_plain(original: Any) -> Any:
    """`original`, called with plain numbers in the place of live ones, also of those in containers."""

    def of_plain(*args: Any, **kwargs: Any) -> Any:
        return original(
            *map(_plain_inside, args), **{k: _plain_inside(v) for k, v in kwargs.items()}
        )

    of_plain.__name__, of_plain.__doc__ = original.__name__, original.__doc__
    return of_plain


def _plain_inside(value: Any) -> Any:
    """`value` itself, or a copy in dicts, lists and tuples if a live number is inside."""
    return _copied(value) if _has_inside(value, frozenset()) else value


def _has_inside(value: Any, above: frozenset[int]) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return is_live(value)
    if id(value) in above:
        return False
    above = above | {id(value)}
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(_has_inside(v, above) for v in inside)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {_copied(k): _copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(v) for v in value]
    return plain(value)


def _of_plain_elements(original: Any) -> Any:
    """A function of iterables of numbers that C reads."""

    def call(*iterables: Any) -> Any:
        return original(*([plain(each) for each in iterable] for iterable in iterables))

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


def _type_of(value: Any) -> type:
    kind: type = value.__class__ if is_live(value) else type(value)
    return kind


def _set_wrapped_number(tensor: torch.Tensor, number: Any) -> None:
    """Note [Wrapped numbers]

    In `tensor * number` torch converts the number to a tensor. For a symbolic number that tensor holds NaN, and the
    number is its attribute `_wrapped_number`, which a dispatch mode on real tensors must read. Autograd saves the
    tensor for the backward, which may run when no mode is active. So the attribute is a property while a capture
    runs, and its setter writes the plain value of the number into the tensor.
    """
    if is_live(number):
        hint = number.node.left_behind()  # the attribute keeps the expression
        # The tensor does not keep the user's own object alive, which would seem to outlive the step.
        number = (torch.SymFloat if type(hint) is float else torch.SymInt)(number.node)
        kind = ctypes.c_double if type(hint) is float else ctypes.c_int64
        kind.from_address(tensor.data_ptr()).value = hint
    tensor.__dict__["_wrapped_number"] = number


def _get_wrapped_number(tensor: torch.Tensor) -> Any:
    try:
        return tensor.__dict__["_wrapped_number"]
    except KeyError:
        raise AttributeError("_wrapped_number") from None


def _fused_optimizer(recorders: Callable[[], list[Any]], name: str, original: Any) -> Any:
    def fused(*args: Any, **kwargs: Any) -> Any:
        found = (recorder.scalar_arguments for recorder in recorders())
        scalars = next((each for each in found if each is not None), None)
        if scalars is None or not any(map(is_live, kwargs.values())):
            return original(*args, **kwargs)
        with scalars.carry(f"aten::{name}", kwargs) as carried:
            return original(*args, **carried)

    fused.__doc__ = original.__doc__
    return fused


def numbers_in_formulas() -> Iterator[tuple[Any, str, str | None]]:
    """(owner, name, argument): functions with whose numbers autograd computes in C++; None: with any number.

    Note [Numbers in formulas]
    The backward of some ops computes with a number in C++, which torch does not implement for symbolic ones: it raises
    "NYI negate symbolic float" when the backward runs, long after the call. Up to torch 2.14 autograd converts an
    exponent to a plain number. Since 2.15 it uses another formula for symbolic exponents, on tensors of the base's
    dtype, which rounds differently from eager's. So if autograd may differentiate such a call, the number is a constant
    of the program, on all releases. `tests/scalars/test_numbers_in_formulas.py` asks torch, op by op, which ops these
    are, and fails if the table lacks one.
    """
    yield from _functions_of(
        None,
        "pow float_power _foreach_pow _foreach_pow_",
        "pow pow_ __pow__ __ipow__ float_power float_power_",
    )
    # `-alpha`; the subtrahend may be live.
    yield from _functions_of(
        "alpha", "sub subtract rsub _foreach_sub _foreach_sub_", "sub sub_ subtract subtract_"
    )
    yield torch.special, "zeta", None


def _functions_of(
    argument: str | None, functions: str, methods: str
) -> Iterator[tuple[Any, str, str | None]]:
    for owner, names in ((torch, functions), (torch.Tensor, methods)):
        yield from ((owner, name, argument) for name in names.split())


def _of_constants(original: Any, argument: str | None) -> Any:
    """`original` with plain numbers, if it may be differentiated. argument: see `numbers_in_formulas`."""

    def of_constants(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if any(map(has_live, values)) and _is_differentiated(values):
            if argument is None or len(args) > _WITHOUT_ALPHA:
                args = settled(args)
            which = kwargs if argument is None else kwargs.keys() & {argument}
            kwargs = {k: settled(v) if k in which else v for k, v in kwargs.items()}
        return original(*args, **kwargs)

    of_constants.__doc__ = original.__doc__
    return of_constants


def _is_differentiated(args: Any) -> bool:
    if forward_mode_is_on():
        return True
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in pytree.tree_leaves(args))


def _original_builtin(scripted: dict[int, Any], original: Any) -> Any:
    def find_builtin(function: Any) -> Any:
        return original(scripted.get(id(function), function))

    find_builtin.__doc__ = original.__doc__
    return find_builtin
