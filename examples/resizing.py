"""Sections 1 to 4: one storage is shrunk, grown, grown and shrunk, and grown and shrunk around a matmul.

In sections 3 and 4 nothing of the mutation is visible to the caller afterwards, so a functional
program has no mutating op left at all, and never reads the empty input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from examples.resize_program import R, leaf, program, refill_with, values, z

# 1. Down: data in, storage of 0 bytes out.


def down(a: Tensor) -> Tensor:
    out = a.sin()
    R(a, 0)
    return out


def down_weight(x: Tensor, w: Tensor) -> Tensor:
    out = x @ w.t()
    R(w, 0)
    return out


def down_one_of_two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    out = a * b
    R(a, 0)
    return out, b.exp()


def down_through_alias(a: Tensor, flat: Tensor) -> Tensor:
    out = a + 1
    R(flat, 0)
    return out


def _matrix_and_flat() -> tuple[Tensor, Tensor]:
    flat = values(8)
    return flat.view(2, 4), flat


DOWN = (
    program(
        1,
        "saved for backward, then freed; refilled before backward",
        lambda: (leaf(8),),
        down,
        refill=refill_with(lambda: values(8)),
    ),
    program(1, "the same without a gradient", lambda: (values(8),), down, name="down_inference"),
    program(
        1,
        "a weight is freed after its matmul",
        lambda: (leaf(3, 4, seed=1), leaf(5, 4)),
        down_weight,
        refill=refill_with(None, lambda: values(5, 4)),
    ),
    program(
        1,
        "one of two inputs is freed",
        lambda: (leaf(8), leaf(8, seed=1)),
        down_one_of_two,
        refill=refill_with(lambda: values(8)),
    ),
    program(1, "freed through another view of it", _matrix_and_flat, down_through_alias),
)

# 2. Up: storage of 0 bytes in, data out.


def up(a: Tensor) -> Tensor:
    R(a, 32)
    with torch.no_grad():
        a.copy_(torch.ones(8))
    return a + 1


def up_saved(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    with torch.no_grad():
        a.copy_(src)
    return a.sin() * a


def up_fill(a: Tensor) -> Tensor:
    R(a, 32)
    a.fill_(3.0)
    a.add_(1)
    return a.sqrt()


def up_in_halves(a: Tensor, low: Tensor, high: Tensor) -> Tensor:
    R(a, 32)
    a[:4].copy_(low)
    a[4:].copy_(high)
    return a * 2


def up_casting(a: Tensor, src: Tensor) -> Tensor:
    R(a, 16)
    with torch.no_grad():
        a.copy_(src)
    return a.float() + 1


def up_returns_nothing(a: Tensor, src: Tensor) -> None:
    R(a, 32)
    a.copy_(src)


def up_returning_slice(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    with torch.no_grad():
        a.copy_(src)
    return a[2:4]


def up_returning_input(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    with torch.no_grad():
        a.copy_(src)
    return a


def up_returning_views(a: Tensor, src: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    R(a, 32)
    a.copy_(src)
    return a, a.t(), a[1].view(2, 2)[:, 1], a.split(1)


def _empty_and_source() -> tuple[Tensor, Tensor]:
    return z(8), values(8, seed=1)


UP = (
    program(2, "grown, written, read", lambda: (z(8, grad=True),), up, grad=True),
    program(
        2,
        "stays grown, so backward reads it without a refill",
        lambda: (z(8, grad=True), values(8, seed=1)),
        up_saved,
        grad=True,
    ),
    program(2, "defined by fill_, then mutated", lambda: (z(8),), up_fill),
    program(
        2,
        "defined by two partial writes",
        lambda: (z(8), values(4, seed=1), values(4, seed=2)),
        up_in_halves,
    ),
    program(
        2,
        "written from another dtype",
        lambda: (z(8, grad=True, dtype=torch.bfloat16), values(8, seed=1)),
        up_casting,
        grad=True,
    ),
    program(2, "an effect and no output", _empty_and_source, up_returns_nothing),
    program(2, "the output is a part of what was empty", _empty_and_source, up_returning_slice),
    program(
        2,
        "the same with a gradient",
        lambda: (z(8, grad=True), values(8)),
        up_returning_slice,
        name="up_returning_slice_grad",
        grad=True,
    ),
    program(
        2,
        "the output is the input that was empty",
        lambda: (z(8, grad=True), values(8)),
        up_returning_input,
        grad=True,
    ),
    program(
        2,
        "the input and views of it",
        lambda: (z(2, 4), values(2, 4)),
        up_returning_views,
    ),
)

# 3. Up, then down: 0 bytes in, 0 bytes out.


def up_down(a: Tensor) -> Tensor:
    R(a, 32)
    with torch.no_grad():
        a.copy_(torch.ones(8))
    out = a.sin()
    R(a, 0)
    return out


def up_down_from_input(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    a.copy_(src)
    out = a.view(2, 4).t() * 2
    R(a, 0)
    return out


def up_down_unused(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    a.copy_(src)
    R(a, 0)
    return src + 1


def up_down_mutated(a: Tensor, src: Tensor) -> Tensor:
    R(a, 32)
    a.copy_(src)
    a[::2].mul_(3)
    out = a.cos()
    R(a, 0)
    return out


UP_DOWN = (
    program(
        3,
        "backward reads the parameter again, refilled",
        lambda: (z(8, grad=True),),
        up_down,
        refill=refill_with(lambda: torch.ones(8)),
    ),
    program(3, "without a gradient", lambda: (z(8),), up_down, name="up_down_inference"),
    program(3, "read through a view chain", _empty_and_source, up_down_from_input),
    program(3, "written and never read", _empty_and_source, up_down_unused),
    program(3, "mutated through a view while grown", _empty_and_source, up_down_mutated),
)

# 4. FSDP around a matmul: what is saved for backward is the parameter itself.


def fsdp_matmul(p: Tensor, buf: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        torch._foreach_copy_([p], [buf])
    out = p @ p
    R(p, 0)
    return out


def fsdp_linear(x: Tensor, w: Tensor, buf: Tensor) -> Tensor:
    R(w, 80)
    with torch.no_grad():
        torch._foreach_copy_([w], [buf])
    out = torch.nn.functional.linear(x, w)
    R(w, 0)
    return out


def fsdp_two_layers(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
    R(w1, 64)
    with torch.no_grad():
        torch._foreach_copy_([w1], [b1])
    h = torch.relu(x @ w1.t())
    R(w1, 0)
    R(w2, 64)
    with torch.no_grad():
        torch._foreach_copy_([w2], [b2])
    out = h @ w2.t()
    R(w2, 0)
    return out


FSDP_MATMUL = (
    program(
        4,
        "forward saves p, backward recomputes its transpose",
        lambda: (z(4, 4, grad=True), values(4, 4)),
        fsdp_matmul,
        refill=refill_with(lambda: values(4, 4)),
    ),
    program(
        4,
        "a linear layer whose input needs a gradient too",
        lambda: (leaf(3, 4, seed=1), z(5, 4, grad=True), values(5, 4)),
        fsdp_linear,
        refill=refill_with(None, lambda: values(5, 4)),
    ),
    program(
        4,
        "two layers, never grown at once",
        lambda: (
            leaf(3, 4, seed=1),
            *(z(4, 4, grad=True), z(4, 4, grad=True)),
            *(values(4, 4, seed=2), values(4, 4, seed=3)),
        ),
        fsdp_two_layers,
        refill=refill_with(None, lambda: values(4, 4, seed=2), lambda: values(4, 4, seed=3)),
    ),
)

PROGRAMS = DOWN + UP + UP_DOWN + FSDP_MATMUL
