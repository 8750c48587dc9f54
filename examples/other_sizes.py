"""Sections 8 and 9: mutated then freed, other sizes, `set_`, DTensor; and plain Python resizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from examples.resize_program import Args, R, leaf, program, refill_with, values, z

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# 8. More than one effect on one storage.


def mutate_then_down(a: Tensor) -> None:
    a.mul_(2)
    R(a, 0)


def mutate_read_down(a: Tensor) -> Tensor:
    a.mul_(2)
    out = a.sin()
    R(a, 0)
    return out


def down_returning_input(a: Tensor) -> Tensor:
    a.mul_(2)
    R(a, 0)
    return a


def up_to_third_size(a: Tensor, src: Tensor) -> Tensor:
    R(a, 48)
    a.copy_(src)
    return a + 1


def up_through_two_sizes(a: Tensor, head: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    a.copy_(src)
    R(a, 16)
    return head + 1


def grow_nonzero(a: Tensor) -> Tensor:
    a.add_(1)
    R(a, 48)
    return a * 2


def up_to_third_size_returning_view(a: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    R(a, 48)
    with torch.no_grad():
        a.copy_(src)
    return a[1], a * 2


def grow_returning_view(a: Tensor) -> Tensor:
    a.add_(1)
    R(a, 48)
    a.mul_(2)
    return a[2:4]


def shrink_returning_view(a: Tensor) -> Tensor:
    R(a, 16)
    return a[2:4]


def shrink_nonzero(a: Tensor) -> Tensor:
    R(a, 32)
    return a * 2


def shrink_then_grow(a: Tensor, whole: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    a.mul_(2)
    R(a, 64)
    whole[8:].copy_(src)
    return whole + 1


def third_size_between(a: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    R(a, 96)
    out1 = a.sin()
    a.copy_(src)
    out2 = a.sin()
    R(a, 32)
    return out1, out2


def down_then_set(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        R(a, 0)
        a.set_(b)  # type: ignore[call-overload]
    return b + 1


def up_then_set(a: Tensor, b: Tensor, src: Tensor) -> Tensor:
    with torch.no_grad():
        R(a, 32)
        a.copy_(src)
        out = a * 2
        R(a, 0)
        a.set_(b)  # type: ignore[call-overload]
        a.mul_(3)
    return out


def set_then_down(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        out = b + 1
        a.set_(b)  # type: ignore[call-overload]
        R(a, 0)
    return out


def dtensor_up_down(p: DTensor, buf: Tensor) -> Tensor:
    with torch.no_grad():
        R(p.to_local(), 64)
        p.to_local().copy_(buf)
        out = p * 2
        R(p.to_local(), 0)
    return out


def dtensor_down(p: DTensor) -> Tensor:
    with torch.no_grad():
        out = p.sin()
        R(p.to_local(), 0)
    return out


def _dtensor(local: Tensor) -> Tensor:
    """A DTensor on a mesh of one rank; the first call makes that rank's (fake) process group."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)], run_check=False)


def _empty_dtensor_and_source() -> Args:
    local = torch.zeros(4, 4)
    p = _dtensor(local)
    local.untyped_storage().resize_(0)
    return p, values(4, 4)


def _empty_and_head() -> Args:
    a = torch.zeros(8)
    head = a[:4]
    a.untyped_storage().resize_(0)
    return a, head, values(8)


def _half_of_storage() -> Args:
    return (values(16)[:8],)


def _half_and_whole() -> Args:
    whole = values(16)
    return whole[:8], whole, values(8, seed=1)


MIXED = (
    program(8, "the mutation is lost with the data", lambda: (values(8),), mutate_then_down),
    program(8, "read between mutation and free", lambda: (values(8),), mutate_read_down),
    program(8, "the freed input is the output", lambda: (values(8),), down_returning_input),
    program(8, "0 to more than its shape needs", lambda: (z(8), values(8)), up_to_third_size),
    program(
        8,
        "the same, and a row of it is returned",
        lambda: (z(2, 4, grad=True), values(2, 4)),
        up_to_third_size_returning_view,
        grad=True,
    ),
    program(8, "grown, and a part is returned", lambda: (values(8),), grow_returning_view),
    program(8, "shrunk, and a part is returned", lambda: (values(8),), shrink_returning_view),
    program(8, "0 to full to half; a view reads the half", _empty_and_head, up_through_two_sizes),
    program(8, "grown from one size to another", lambda: (values(8),), grow_nonzero),
    program(8, "shrunk to the bytes one input sees", _half_of_storage, shrink_nonzero),
    program(8, "half the data survives, half is rewritten", _half_and_whole, shrink_then_grow),
    program(
        8,
        "larger for a while; the size on exit is that on entry",
        lambda: (values(8), values(8, seed=1)),
        third_size_between,
    ),
    program(
        8,
        "freed, then moved onto the storage of another input",
        lambda: (values(8), values(4, seed=1)),
        down_then_set,
    ),
    program(
        8,
        "a cycle, then moved and mutated there",
        lambda: (z(8), values(8, seed=1), values(8, seed=2)),
        up_then_set,
    ),
    program(
        8,
        "moved, then freed under both",
        lambda: (values(8), values(8, seed=1)),
        set_then_down,
    ),
    program(
        8,
        "the local tensor of a DTensor comes and goes",
        _empty_dtensor_and_source,
        dtensor_up_down,
    ),
    program(
        8, "the local tensor of a DTensor is freed", lambda: (_dtensor(values(4, 4)),), dtensor_down
    ),
)

# 9. `untyped_storage().resize_` in plain Python: it does not reach the dispatcher.


def plain_down(a: Tensor) -> Tensor:
    out = a.sin()
    a.untyped_storage().resize_(0)
    return out


def plain_up(a: Tensor, src: Tensor) -> Tensor:
    a.untyped_storage().resize_(32)
    with torch.no_grad():
        a.copy_(src)
    return a + 1


def plain_up_down(a: Tensor, src: Tensor) -> Tensor:
    a.untyped_storage().resize_(a.numel() * a.element_size())
    with torch.no_grad():
        a.copy_(src)
    out = a.sin()
    a.untyped_storage().resize_(0)
    return out


def plain_matmul(p: Tensor, buf: Tensor) -> Tensor:
    storage = p.untyped_storage()
    storage.resize_(64)
    with torch.no_grad():
        torch._foreach_copy_([p], [buf])
    out = p @ p
    storage.resize_(0)
    return out


def _alloc(t: Tensor) -> None:
    nbytes = t.numel() * t.element_size()
    storage = t.untyped_storage()
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def _free(t: Tensor) -> None:
    storage = t.untyped_storage()
    if storage.size() != 0:
        storage.resize_(0)


def plain_if_needed(p: Tensor, buf: Tensor) -> Tensor:
    """Looks at the size before each resize, as FSDP2's helpers do."""
    _alloc(p)
    with torch.no_grad():
        p.copy_(buf)
    out = p.exp()
    _free(p)
    return out


PLAIN = (
    program(
        9,
        "freed",
        lambda: (leaf(8),),
        plain_down,
        refill=refill_with(lambda: values(8)),
    ),
    program(
        9,
        "grown and written",
        lambda: (z(8, grad=True), values(8)),
        plain_up,
        grad=True,
    ),
    program(
        9,
        "grown, written, read, freed",
        lambda: (z(8, grad=True), values(8)),
        plain_up_down,
        refill=refill_with(lambda: values(8)),
    ),
    program(
        9,
        "the matmul of section 4, holding the storage object",
        lambda: (z(4, 4, grad=True), values(4, 4)),
        plain_matmul,
        refill=refill_with(lambda: values(4, 4)),
    ),
    program(
        9,
        "branches on the storage's size",
        lambda: (z(8), values(8)),
        plain_if_needed,
    ),
)

PROGRAMS = MIXED + PLAIN
