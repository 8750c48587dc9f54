"""Write pending resizes and copies back to inputs after a substituted call.

    plain, fake, make_fx       resize_storage_bytes_(x, n); x.copy_(value)        dispatched like any other op
    under AOTAutograd          the same on the tensor inside: see Note [Epilogue below functionalization]

Invariant: the epilogue leaves version counters as the function's own ops have set them (autograd increments them
above the mode).
Refusal: bytes written under AOTAutograd that no input covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functionalize._compat.autograd import KeptVersions
from functionalize._compat.dispatch import no_dispatch, plain_resize
from functionalize._compat.functional_tensor import (
    FunctionalTensor,
    functional_inside,
    functional_needs_storage,
    functional_put_inside,
    functional_remake,
    functional_sync,
    functional_was_written,
)
from functionalize._compat.graphs import below_functionalization, last_traced, proxy_mode
from functionalize.discharge.byte_ranges import Extent
from functionalize.discharge.epilogue_actions import actions_of
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import Emitter
from functionalize.errors import UnsupportedOpError
from functionalize.ir.epilogue import Copy, Resize, window
from functionalize.ir.ops import Geometry, geometry_of

aten = torch.ops.aten
# Key in the meta of an epilogue `copy_`: whether it must not increment the version counter of its target.
UNCOUNTED = "functionalize_uncounted"


def is_functional(tensor: Tensor) -> bool:
    """Whether AOTAutograd functionalizes this tensor."""
    return isinstance(tensor, FunctionalTensor)


def inner(tensor: Tensor) -> Tensor:
    """The tensor inside AOTAutograd's wrapper, with every pending write applied."""
    functional_sync(tensor)
    return functional_inside(tensor)


def was_written(tensor: Tensor) -> bool:
    """Whether AOTAutograd saw a write to a functional tensor's storage."""
    return functional_was_written(tensor)


def nbytes_of(tensor: Tensor) -> int:
    """The size of a tensor's storage in bytes; for a FunctionalTensor, of the storage of the tensor inside."""
    if is_functional(tensor):
        tensor = functional_inside(tensor)
    return int(tensor.untyped_storage().nbytes())


class EntrySizes:
    """The sizes that storages had when a function was first run on them.

    AOTAutograd runs a function twice on the same fakes. Making a view of a fake with an empty storage grows that
    storage (the cache of FakeTensorMode rebuilds views by `set_`), so the second run cannot read the entry size.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def of(self, tensor: Tensor) -> int:
        """The size on entry of a tensor's storage, in bytes."""
        if not is_functional(tensor):
            return nbytes_of(tensor)
        storage = functional_inside(tensor).untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known[0].expired():
            known = StorageWeakRef(storage), int(storage.nbytes())
            self._known[storage._cdata] = known
        return known[1]


def resize_for_real(storage: torch.UntypedStorage, nbytes: int) -> None:
    """`storage.resize_(nbytes)`, hidden from every recorder."""
    plain_resize(storage, nbytes)


def geometry(tensor: Tensor) -> Geometry:
    """The geometry of a tensor in plain integers; converting a symbolic size adds a guard."""
    g = geometry_of(tensor)
    size, stride = tuple(int(s) for s in g.size), tuple(int(s) for s in g.stride)
    return g._replace(size=size, stride=stride, offset=int(g.offset))


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor covers, and the end of the last one."""
    g = geometry(tensor)
    return g.start, g.end


def number_at(tensor: Tensor, at: int) -> Tensor:
    """One element of a one-dimensional tensor, one-dimensional."""
    return aten.slice.Tensor(tensor, 0, at, at + 1)


class LiveStorage:
    """One real storage during a substituted call.

    serial: its number in the engine.
    name: of the first argument on it, for messages.
    nbytes: its size on entry.
    is_input: whether an argument is on it.
    tensors: the tensors on it.
    insides: for each tensor, the tensor inside its FunctionalTensor on entry; None for a plain tensor.
    """

    def __init__(
        self, serial: int, name: str, nbytes: int, device: torch.device, is_input: bool
    ) -> None:
        self.serial, self.name, self.nbytes = serial, name, nbytes
        self.device, self.is_input = device, is_input
        self.tensors: list[Tensor] = []
        self.insides: list[Tensor | None] = []
        self._versions: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """Add a tensor on this storage."""
        if not any(tensor is t for t in self.tensors):
            self.tensors.append(tensor)
            self.insides.append(inner(tensor) if is_functional(tensor) else None)
            self._versions.append(0 if tensor.is_inference() else tensor._version)

    @property
    def uncounted(self) -> bool:
        """Whether the version counters are unchanged, as after FSDP fills a parameter."""
        now = (0 if t.is_inference() else t._version for t in self.tensors)
        return all(a == b for a, b in zip(now, self._versions, strict=True))

    @property
    def mixed(self) -> bool:
        """Whether functional tensors of several dtypes are on this storage, which AOTAutograd refuses."""
        return self.insides[0] is not None and len({t.dtype for t in self.tensors}) > 1

    def value(self, tensor: Tensor) -> Tensor:
        """The current contents of `tensor`, in a tensor that `_undo` does not change."""
        if is_functional(tensor) and was_written(tensor):
            return FunctionalTensor.to_functional(inner(tensor))
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor inside a wrapper is on this storage."""
        address = inner(tensor).untyped_storage()._cdata
        return any(t is not None and t.untyped_storage()._cdata == address for t in self.insides)

    def widest(self) -> Tensor:
        """The tensor that covers most of the storage, preferably without gaps."""

        def coverage(tensor: Tensor) -> tuple[bool, int]:
            g = geometry(tensor)
            return g.is_dense and not g.conj and not g.neg, g.end - g.start

        return max(self.tensors, key=coverage)

    def replace_by_alias(self, tensor: Tensor) -> MovedInput | None:
        """Put an alias in the place of `tensor`, which `set_` is about to move to another storage."""
        for i, known in enumerate(self.tensors):
            if known is tensor:
                self.tensors[i] = aten.detach.default(tensor)
                return MovedInput(self.name, self.tensors[i], self.insides[i])
        return None


@dataclass(frozen=True)
class MovedInput:
    """An input that `set_` moved to another storage.

    alias: a tensor on the storage that the input had before.
    inside: the tensor inside the input's FunctionalTensor; None for a plain tensor.
    """

    name: str
    alias: Tensor
    inside: Tensor | None


@dataclass(frozen=True)
class Move:
    """A `set_` of an input that the graph has to run.

    source: the tensor whose storage and geometry the input gets.
    before: whether it runs before the resizes and copies.
    """

    moved: MovedInput
    source: Tensor
    before: bool

    def emit_set(self) -> None:
        """Emit the `set_` into the graph; nothing is emitted in a run that is not traced."""
        if self.moved.inside is not None and proxy_mode() is not None:
            with below_functionalization():
                aten.set_.source_Tensor(self.moved.inside, self.source)


def onto_storage_of(wrapper: Tensor, source: Tensor) -> None:
    """After `set_`, move the wrapper of a FunctionalTensor to the storage of the tensor inside; torch does not."""
    with no_dispatch():
        aten.set_.source_Tensor(wrapper, source)


def write_back(live: LiveStorage, storage: FunctionalStorage, emit: Emitter) -> None:
    """Emit the resizes and copies that are pending for one storage (under `no_grad`, above every mode)."""
    if live.insides[0] is None:
        _write_back_plainly(live, storage, emit)
    elif live.is_input:
        _write_back_below(live, storage, emit)
    elif storage.nbytes and storage.written:  # a temporary: the caller cannot observe its size
        live.widest().copy_(storage.read(geometry(live.widest()), emit))


def _write_back_plainly(live: LiveStorage, storage: FunctionalStorage, emit: Emitter) -> None:
    target, values = live.widest(), []

    def slot(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    with KeptVersions([target]):
        for action in actions_of(storage, 0, emit, slot):
            if isinstance(action, Resize):
                RESIZE_STORAGE(target, action.nbytes)
            elif isinstance(action, Copy):
                window(target, action.geometry).copy_(values[action.slot])


def _write_back_below(live: LiveStorage, storage: FunctionalStorage, emit: Emitter) -> None:
    values: list[Any] = []

    def slot(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    actions = actions_of(storage, 0, emit, slot)
    copies = [
        (to, inner(value))
        for action in actions
        if isinstance(action, Copy)
        for to, value in _copies(live, storage, emit, action, values[action.slot])
    ]
    if copies or storage.nbytes == 0:
        for tensor, inside in zip(live.tensors, live.insides, strict=True):
            _undo(tensor, inside)
    if not actions or proxy_mode() is None:
        return  # AOTAutograd's first run only collects metadata of outputs
    target = next(t for t in live.insides if t is not None)
    with below_functionalization():
        for action in actions:
            if isinstance(action, Resize):
                RESIZE_STORAGE(target, action.nbytes)
        for to, value in copies:
            aten.copy_.default(to, value)
            last_traced().meta[UNCOUNTED] = live.uncounted


def remake(live: LiveStorage, view: Tensor, nbytes: int) -> None:
    """Make a returned view again after the epilogue: in the graph, it may have been made of an empty input.

    nbytes: the size of the storage after the epilogue.
    """
    g = geometry(view)
    if not live.is_input:
        return
    if g.end > nbytes:
        if functional_needs_storage(view):
            raise UnsupportedOpError(
                f"returns a view ({g}) of `{live.name}`, whose storage is left with {nbytes} bytes: "
                "AOTAutograd makes such a view again at exit, which fails; return the argument itself"
            )
        return
    inner(
        view
    )  # apply pending writes first, otherwise applying them later would make the view a third time
    address = view.untyped_storage()._cdata
    for tensor, inside in zip(live.tensors, live.insides, strict=True):
        if inside is not None and tensor.untyped_storage()._cdata == address:
            with below_functionalization():
                functional_remake(view, inside)
            return


def _undo(tensor: Tensor, inside: Tensor | None) -> None:
    """Hide the writes of an input from AOTAutograd, which would otherwise copy them itself."""
    if inside is not None and was_written(tensor):
        functional_put_inside(tensor, inside)


def _copies(
    live: LiveStorage, storage: FunctionalStorage, emit: Emitter, action: Copy, value: Any
) -> Iterator[tuple[Tensor, Any]]:
    """The (target, value) pairs that implement one copy: AOTAutograd allows writes of whole inputs only."""
    known = [(geometry(t), i) for t, i in zip(live.tensors, live.insides, strict=True)]
    seen = Extent()
    for g, inside in known:
        if g == action.geometry and inside is not None:
            yield inside, value
            return
        if g.is_dense:
            seen.add(g.start, g.end)
    if not seen.covers(action.geometry.start, action.geometry.end):
        raise UnsupportedOpError(
            f"writes bytes {action.geometry.start} to {action.geometry.end} of the storage of "
            f"`{live.name}`, some of which no argument sees: pass a tensor that sees them all"
        )
    for g, inside in known:
        if inside is not None:
            yield inside, storage.read(g, emit)
