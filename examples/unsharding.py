"""Sections 5 to 7: other ways to fill a parameter, several cycles, cycles across a graph break."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.resize_program import (
    Args,
    R,
    leaf,
    preserve_version,
    program,
    refill_parameter,
    refill_with,
    values,
    z,
)

# 5. Filled through a view, through out= ops, from one flat buffer.


def copy_to_flat_view(p: Tensor, buf: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        p.view(-1).copy_(buf)
    out = p @ p
    R(p, 0)
    return out


def out_op(p: Tensor, buf: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        torch.mul(buf, 2, out=p)
    out = p @ p
    R(p, 0)
    return out


def cat_out(p: Tensor, shard0: Tensor, shard1: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        torch.cat([shard0, shard1], out=p.view(-1))
    out = p @ p
    R(p, 0)
    return out


def cat_split(p: Tensor, q: Tensor, shard0: Tensor, shard1: Tensor) -> Tensor:
    R(p, 64)
    R(q, 32)
    with torch.no_grad():
        parts = torch.cat([shard0, shard1]).split([16, 8])
        torch._foreach_copy_([p.view(-1), q.view(-1)], list(parts))
    out = (p @ q).relu()
    R(p, 0)
    R(q, 0)
    return out


def split_copy_out(p: Tensor, q: Tensor, flat: Tensor) -> Tensor:
    R(p, 64)
    R(q, 32)
    with torch.no_grad():
        torch.split_with_sizes_copy(flat, [16, 8], out=[p.view(-1), q.view(-1)])
    out = (p @ q).relu()
    R(p, 0)
    R(q, 0)
    return out


def interleaved_ranks(p: Tensor, q: Tensor, gathered: Tensor) -> Tensor:
    """Two ranks' buffers hold half of each parameter: the copy-out of FSDP2."""
    R(p, 64)
    R(q, 32)
    with torch.no_grad():
        out = [p.view(2, -1), q.view(2, -1)]
        torch.split_with_sizes_copy(gathered.view(2, -1), [8, 4], dim=1, out=out)
    y = p @ q
    R(p, 0)
    R(q, 0)
    return y


def one_flat_storage(flat: Tensor, p: Tensor, q: Tensor, src: Tensor) -> Tensor:
    R(flat, 96)
    with torch.no_grad():
        flat.copy_(src)
    out = p @ q
    R(flat, 0)
    return out


def _pair(*rest: Tensor) -> Args:
    return z(4, 4, grad=True), z(4, 2, grad=True), *rest


def _refill_pair(args: Args) -> None:
    flat = values(24)
    refill_parameter(args[0], flat[:16].view(4, 4))
    refill_parameter(args[1], flat[16:].view(4, 2))


def _refill_interleaved(args: Args) -> None:
    rows = values(24).view(2, 12)
    refill_parameter(args[0], rows[:, :8].reshape(4, 4))
    refill_parameter(args[1], rows[:, 8:].reshape(4, 2))


def _flat_args() -> Args:
    flat = torch.zeros(24)
    p = flat[:16].view(4, 4).detach().requires_grad_()
    q = flat[16:].view(4, 2).detach().requires_grad_()
    flat.untyped_storage().resize_(0)
    return flat, p, q, values(24)


def _refill_flat(args: Args) -> None:
    flat, p, q = args[:3]
    with torch.no_grad(), preserve_version((flat, p, q)):
        flat.untyped_storage().resize_(96)
        flat.copy_(values(24))


FILLED = (
    program(
        5,
        "the copy's target is p.view(-1)",
        lambda: (z(4, 4, grad=True), values(16)),
        copy_to_flat_view,
        refill=refill_with(lambda: values(16).view(4, 4)),
    ),
    program(
        5,
        "mul.out into the parameter",
        lambda: (z(4, 4, grad=True), values(4, 4)),
        out_op,
        refill=refill_with(lambda: values(4, 4) * 2),
    ),
    program(
        5,
        "cat.out of two shards into a flat view",
        lambda: (z(4, 4, grad=True), values(8, seed=1), values(8, seed=2)),
        cat_out,
        refill=refill_with(lambda: torch.cat([values(8, seed=1), values(8, seed=2)]).view(4, 4)),
    ),
    program(
        5,
        "cat of shards, split into two parameters",
        lambda: _pair(*(values(24)[:12].clone(), values(24)[12:].clone())),
        cat_split,
        refill=_refill_pair,
    ),
    program(
        5,
        "split_with_sizes_copy.out from one flat buffer",
        lambda: _pair(values(24)),
        split_copy_out,
        refill=_refill_pair,
    ),
    program(
        5,
        "each rank's buffer holds a part of every parameter",
        lambda: _pair(values(24)),
        interleaved_ranks,
        refill=_refill_interleaved,
    ),
    program(
        5,
        "two parameters are views of one flat storage",
        _flat_args,
        one_flat_storage,
        refill=_refill_flat,
    ),
)

# 6. Several cycles: each use sees the data of its own cycle.


def two_cycles(p: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    R(p, 32)
    with torch.no_grad():
        p.copy_(first)
    out1 = p + 1
    R(p, 0)
    R(p, 32)
    with torch.no_grad():
        p.copy_(second)
    out2 = p * 2
    R(p, 0)
    return out1, out2


def two_cycles_saved(p: Tensor, first: Tensor, second: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad(), preserve_version(p):
        torch._foreach_copy_([p], [first])
    h = p @ p
    R(p, 0)
    R(p, 64)
    with torch.no_grad(), preserve_version(p):
        torch._foreach_copy_([p], [second])
    out = h @ p
    R(p, 0)
    return out


def three_cycles(p: Tensor, src: Tensor) -> Tensor:
    total = torch.zeros(8)
    for scale in (1.0, 2.0, 3.0):
        R(p, 32)
        p.view(2, 4).copy_(src.view(2, 4) * scale)
        total = total + p.sin()
        R(p, 0)
    return total


def cycle_feeds_cycle(p: Tensor, src: Tensor) -> Tensor:
    R(p, 32)
    p.copy_(src)
    h = p.exp()
    R(p, 0)
    R(p, 32)
    p.copy_(h)
    out = p + h
    R(p, 0)
    return out


def cycle_then_up(p: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    R(p, 32)
    p.copy_(first)
    out1 = p + 1
    R(p, 0)
    R(p, 32)
    p.copy_(second)
    return out1, p * 2


def down_then_cycle(p: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    out1 = p.sin()
    R(p, 0)
    R(p, 32)
    p.copy_(src)
    out2 = p.sin()
    R(p, 0)
    return out1, out2


def down_then_up(p: Tensor, src: Tensor) -> Tensor:
    out = p.sin()
    R(p, 0)
    R(p, 32)
    p.copy_(src)
    return out + p


def _two_sources() -> Args:
    return z(8), values(8, seed=1), values(8, seed=2)


CYCLES = (
    program(
        6,
        "two uses, two contents",
        lambda: (z(8, grad=True), values(8, seed=1), values(8, seed=2)),
        two_cycles,
        grad=True,
    ),
    program(
        6,
        "both uses save the parameter; backward reads what the refill wrote",
        lambda: (z(4, 4, grad=True), values(4, 4, seed=1), values(4, 4, seed=2)),
        two_cycles_saved,
        refill=refill_with(lambda: values(4, 4, seed=2)),
    ),
    program(6, "three cycles in a loop", lambda: (z(8), values(8)), three_cycles),
    program(
        6, "a cycle is filled from the one before", lambda: (z(8), values(8)), cycle_feeds_cycle
    ),
    program(6, "a cycle, then left grown", _two_sources, cycle_then_up),
    program(6, "data in, 0 bytes out", lambda: (values(8), values(8, seed=1)), down_then_cycle),
    program(
        6, "freed and refilled: same size, new data", lambda: (values(8), values(8)), down_then_up
    ),
)

# 7. A graph break: two or more functions in a row, linked by the storage alone.


def break_up(p: Tensor, buf: Tensor) -> None:
    R(p, 64)
    with torch.no_grad():
        torch._foreach_copy_([p], [buf])


def break_use_down(p: Tensor, buf: Tensor) -> Tensor:
    out = p @ p
    R(p, 0)
    return out


def break_grow(p: Tensor, buf: Tensor) -> Tensor:
    R(p, 64)
    return buf + 1


def break_fill(p: Tensor, buf: Tensor) -> Tensor:
    with torch.no_grad():
        p.copy_(buf)
    return p * 2


def break_use(p: Tensor, buf: Tensor) -> Tensor:
    return p.view(-1).sin()


def break_down(p: Tensor, buf: Tensor) -> None:
    R(p, 0)


def break_down_first(p: Tensor, buf: Tensor) -> Tensor:
    out = p.exp()
    R(p, 0)
    return out


BREAKS = (
    program(
        7,
        "unsharded by one function, used and resharded by the next",
        lambda: (z(4, 4, grad=True), values(4, 4)),
        *(break_up, break_use_down),
        name="break_between",
        refill=refill_with(lambda: values(4, 4)),
    ),
    program(
        7,
        "grow, fill, use and free are four functions; the first leaves undefined contents",
        lambda: (z(4, 4), values(4, 4)),
        *(break_grow, break_fill, break_use, break_down),
        name="break_in_four",
    ),
    program(
        7,
        "freed by one function, refilled by the next",
        lambda: (leaf(4, 4, seed=1), values(4, 4)),
        *(break_down_first, break_up),
        name="break_down_up",
        grad=True,
    ),
)

PROGRAMS = FILLED + CYCLES + BREAKS
