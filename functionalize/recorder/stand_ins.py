"""Tensors that a traced function uses but does not receive as arguments: from its closure, globals, or modules.

    w = torch.ones(3)
    trace(lambda a: a * w, a)       `w` becomes an input of the program, `Captured(w)`

During the trace a fake stands in for each of them, so that no tensor of the caller is written.

Invariant: after the run each tensor is unchanged, its `.grad` included.
Refusals: changes to such a tensor object, as opposed to its contents, because a replay could not repeat them: another
size, another storage, an assignment to `.data` or `.grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from functionalize._compat.dispatch import is_traceable_wrapper_subclass_type
from functionalize._compat.fakes import FakeTensor, FakeTensorMode
from functionalize.errors import UncapturableError
from functionalize.ir.fake_mode import fake_like
from functionalize.ir.ops import TensorRef, geometry_of
from functionalize.recorder.op_kinds import check_plain, storage_of
from functionalize.recorder.storage_table import StorageTable
from functionalize.util.tensor_wrappers import plain_tensors


def fake_of(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake of a tensor, on a storage of the same size: that of `fake_like` ends where the tensor ends."""
    for real in plain_tensors(tensor):
        check_plain(real)
    fake: Tensor = fake_like(mode, tensor)
    for made, real in zip(plain_tensors(fake), plain_tensors(tensor), strict=True):
        nbytes = storage_of(real).nbytes()
        if storage_of(made).nbytes() != nbytes:
            storage_of(made).resize_(nbytes)
    return fake


def restore_strides(fake: Tensor, before: TensorRef) -> None:
    """Restore the strides of an `out=` tensor of the right size: eager keeps them, some meta kernels do not."""
    g = before.geometry
    if fake.shape == g.size and fake.stride() != g.stride:
        fake.as_strided_(g.size, g.stride, g.offset)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a fake; for a wrapper subclass, whether all its inner tensors are."""
    return all(isinstance(t, FakeTensor) for t in plain_tensors(tensor))


@dataclass(frozen=True, slots=True)
class StandIn:
    """A tensor that is no argument, and its fake.

    ref: the storage and geometry of the fake at its first use, None for a wrapper subclass.
    grad: the tensor's `.grad` at its first use.
    """

    name: str
    real: Tensor
    fake: Tensor
    ref: TensorRef | None
    grad: Tensor | None


class StandIns:
    """The stand-ins of one trace. names: names of tensors for messages, by id."""

    def __init__(self, mode: FakeTensorMode, names: dict[int, str]) -> None:
        self.mode = mode
        self.found: dict[int, StandIn] = {}
        self._names = names

    def stand_in(self, tensor: Tensor, storages: StorageTable) -> Tensor:
        """The fake of a real tensor. At its first use the fake becomes an external tensor of the recording."""
        known = self.found.get(id(tensor))
        if known is not None:
            return known.fake
        name = self._names.get(id(tensor), f"captured_{len(self.found)}")
        plain = not is_traceable_wrapper_subclass_type(type(tensor))
        if plain and storages.info_of(tensor) is not None:
            raise UncapturableError(
                f"finds `{name}` on a storage that the program made: its `.data` was assigned. Pass the "
                "tensor as an argument, or copy_ into it"
            )
        grad = tensor.grad if tensor.is_leaf else None
        fake = fake_of(self.mode, tensor)
        ref = storages.bring_in(fake, name) if plain else None
        self.found[id(tensor)] = StandIn(name, tensor, fake, ref, grad)
        return fake

    def restore(self) -> str | None:
        """Restore the `.grad` of every tensor. Returns the name of a tensor whose `.grad` was changed, or None."""
        changed = None
        for each in self.found.values():
            if each.real.is_leaf and each.real.grad is not each.grad:
                each.real.grad, changed = each.grad, each.name
        return changed

    def check(self, storages: StorageTable) -> None:
        """Raise `UncapturableError` if a fake has another geometry or another storage than at its first use."""
        for each in self.found.values():
            if each.ref is None:
                continue
            info = storages.info_of(each.fake)
            now = geometry_of(each.fake)
            if info is None or (info.serial, now) != each.ref:
                raise UncapturableError(
                    f"turns `{each.name}` from {each.ref.geometry} into {now}, or moves it to another "
                    "storage, though it is not an argument: pass it as an argument"
                )
