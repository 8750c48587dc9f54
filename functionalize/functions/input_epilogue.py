"""Storages whose owner is owed something at the end of a live call, and how that is paid.

    plain, fake, make_fx       resize_storage_bytes_(x, n); x.copy_(value)        ops like any other
    under AOTAutograd          the same on the tensor inside: see Note [Paying below functionalization]

Invariant: version counters are left as the function's own ops have set them (autograd counts above the mode).
Refusal: bytes written under AOTAutograd that none of the inputs can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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
# In the meta of a `copy_` of the epilogue: whether it must leave the version counter of its target alone.
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
    """The size of a tensor's storage in bytes; a wrapper's own storage does not tell."""
    if is_functional(tensor):
        tensor = functional_inside(tensor)
    return int(tensor.untyped_storage().nbytes())


class EntrySizes:
    """The sizes that storages had when a function was first run on them.

    AOTAutograd runs it twice on the same fakes, and a view of a fake with an empty storage makes that storage
    grow (the cache of FakeTensorMode rebuilds views by `set_`): from then on its size tells nothing.
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
    """`storage.resize_(nbytes)`, seen by no recorder."""
    plain_resize(storage, nbytes)


def geometry(tensor: Tensor) -> Geometry:
    """The geometry of a tensor in plain numbers; a symbolic one is guarded on."""
    g = geometry_of(tensor)
    size, stride = tuple(int(s) for s in g.size), tuple(int(s) for s in g.stride)
    return g._replace(size=size, stride=stride, offset=int(g.offset))


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor reaches over."""
    g = geometry(tensor)
    return g.start, g.end


def number_at(tensor: Tensor, at: int) -> Tensor:
    """One element of a one-dimensional tensor, one-dimensional."""
    return aten.slice.Tensor(tensor, 0, at, at + 1)


class Debtor:
    """One storage: its size on entry, the tensors on it, and for those that are functional what was inside.

    is_input: it came in with an argument. moved: a tensor of it was moved to another storage.
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
        """One more tensor on this storage."""
        if not any(tensor is t for t in self.tensors):
            self.tensors.append(tensor)
            self.insides.append(inner(tensor) if is_functional(tensor) else None)
            self._versions.append(0 if tensor.is_inference() else tensor._version)

    @property
    def uncounted(self) -> bool:
        """Whether the function left the version counters alone, as FSDP does when it fills a parameter."""
        now = (0 if t.is_inference() else t._version for t in self.tensors)
        return all(a == b for a, b in zip(now, self._versions, strict=True))

    @property
    def mixed(self) -> bool:
        """Whether functional tensors of several dtypes are on this storage, which AOTAutograd refuses."""
        return self.insides[0] is not None and len({t.dtype for t in self.tensors}) > 1

    def value(self, tensor: Tensor) -> Tensor:
        """What `tensor` holds now, which stays if AOTAutograd is made to forget that it was written."""
        if is_functional(tensor) and was_written(tensor):
            return FunctionalTensor.to_functional(inner(tensor))
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor inside a wrapper is on this storage."""
        address = inner(tensor).untyped_storage()._cdata
        return any(t is not None and t.untyped_storage()._cdata == address for t in self.insides)

    def widest(self) -> Tensor:
        """The tensor that sees most of the storage without gaps."""

        def reach(tensor: Tensor) -> tuple[bool, int]:
            g = geometry(tensor)
            return g.is_dense and not g.conj and not g.neg, g.end - g.start

        return max(self.tensors, key=reach)

    def let_go(self, tensor: Tensor) -> Held | None:
        """`tensor` is about to be moved to another storage: an alias takes its place."""
        for i, known in enumerate(self.tensors):
            if known is tensor:
                self.tensors[i] = aten.detach.default(tensor)
                return Held(self.name, self.tensors[i], self.insides[i])
        return None


@dataclass(frozen=True)
class Held:
    """An input that was moved by `set_`: an alias of what it was, and the tensor inside it."""

    name: str
    alias: Tensor
    inside: Tensor | None


@dataclass(frozen=True)
class Move:
    """A `set_` that the graph owes to an input; `before`: ahead of the resizes."""

    held: Held
    source: Tensor
    before: bool

    def pay(self) -> None:
        """Emit it, in the run that is traced."""
        if self.held.inside is not None and proxy_mode() is not None:
            with below_functionalization():
                aten.set_.source_Tensor(self.held.inside, self.source)


def onto_storage_of(wrapper: Tensor, source: Tensor) -> None:
    """After `set_`, put a functional tensor's wrapper where its inside is; torch leaves it where it was."""
    with no_dispatch():
        aten.set_.source_Tensor(wrapper, source)


def pay(debtor: Debtor, storage: FunctionalStorage, emit: Emitter) -> None:
    """Emit what one storage owes (under `no_grad`, above every mode)."""
    if debtor.insides[0] is None:
        _pay_plainly(debtor, storage, emit)
    elif debtor.is_input:
        _pay_inside(debtor, storage, emit)
    elif storage.nbytes and storage.written:  # made inside: its size is nobody's business
        debtor.widest().copy_(storage.read(geometry(debtor.widest()), emit))


def _pay_plainly(debtor: Debtor, storage: FunctionalStorage, emit: Emitter) -> None:
    home, values = debtor.widest(), []

    def slot(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    with torch.autograd._unsafe_preserve_version_counter(home):
        for action in actions_of(storage, 0, emit, slot):
            if isinstance(action, Resize):
                RESIZE_STORAGE(home, action.nbytes)
            elif isinstance(action, Copy):
                window(home, action.geometry).copy_(values[action.slot])


def _pay_inside(debtor: Debtor, storage: FunctionalStorage, emit: Emitter) -> None:
    values: list[Any] = []

    def slot(value: Any) -> int:
        values.append(value)
        return len(values) - 1

    actions = actions_of(storage, 0, emit, slot)
    copies = [
        (to, inner(value))
        for action in actions
        if isinstance(action, Copy)
        for to, value in _copies(debtor, storage, emit, action, values[action.slot])
    ]
    if copies or storage.nbytes == 0:
        for tensor, inside in zip(debtor.tensors, debtor.insides, strict=True):
            _undo(tensor, inside)
    if not actions or proxy_mode() is None:
        return  # nothing is traced in a first run, which is for what it tells of outputs
    home = next(t for t in debtor.insides if t is not None)
    with below_functionalization():
        for action in actions:
            if isinstance(action, Resize):
                RESIZE_STORAGE(home, action.nbytes)
        for to, value in copies:
            aten.copy_.default(to, value)
            last_traced().meta[UNCOUNTED] = debtor.uncounted


def remake(debtor: Debtor, view: Tensor, nbytes: int) -> None:
    """Make a view anew that is returned: its first making, in the graph, may be of an empty input.

    nbytes: what the storage holds now that it has been paid.
    """
    g = geometry(view)
    if not debtor.is_input:
        return
    if g.end > nbytes:
        if functional_needs_storage(view):
            raise UnsupportedOpError(
                f"returns a view ({g}) of `{debtor.name}`, whose storage is left with {nbytes} bytes: "
                "AOTAutograd takes such a view again when all is done, and cannot; return the argument itself"
            )
        return
    inner(view)  # applies what is pending, or that would make it a third time
    address = view.untyped_storage()._cdata
    for tensor, inside in zip(debtor.tensors, debtor.insides, strict=True):
        if inside is not None and tensor.untyped_storage()._cdata == address:
            with below_functionalization():
                functional_remake(view, inside)
            return


def _undo(tensor: Tensor, inside: Tensor | None) -> None:
    """Make AOTAutograd believe that an input was never written: what is to be written, the epilogue has."""
    if inside is not None and was_written(tensor):
        functional_put_inside(tensor, inside)


def _copies(
    debtor: Debtor, storage: FunctionalStorage, emit: Emitter, action: Copy, value: Any
) -> Iterator[tuple[Tensor, Any]]:
    """The writes that make up one: AOTAutograd lets a graph write its inputs only as they are."""
    known = [(geometry(t), i) for t, i in zip(debtor.tensors, debtor.insides, strict=True)]
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
            f"`{debtor.name}`, some of which no argument sees: pass a tensor that sees them all"
        )
    for g, inside in known:
        if inside is not None:
            yield inside, storage.read(g, emit)
