"""Section 10: no resize. Views and mutations over inputs that share storages in many ways."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.resize_program import Args, leaf, program, values


def overlapping(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return b * 2


def overlapping_both_ways(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.mul_(b.sum())
    b.add_(a.mean())
    return a + 1, b - 1


def interleaved(even: Tensor, odd: Tensor) -> Tensor:
    even.add_(odd)
    odd.sub_(even)
    return even * odd


def two_dtypes(a: Tensor, bits: Tensor) -> Tensor:
    bits.bitwise_and_(0x7FFFFFFF)
    return a.sqrt()


def complex_and_real(c: Tensor, parts: Tensor) -> Tensor:
    parts[..., 1].mul_(-1)
    return c * 2


def storage_offset(a: Tensor) -> Tensor:
    a.mul_(2)
    return a.sum()


def view_of_other(a: Tensor, v: Tensor) -> Tensor:
    v.t()[1].fill_(7.0)
    return a + 1


def base_of_other(a: Tensor, v: Tensor) -> Tensor:
    a.add_(1)
    v.mul_(2)
    a.sub_(3)
    return v.cos()


def same_tensor_twice(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    return a * b


def output_is_view(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.view(-1), a[1:]


def output_is_mutated_input(a: Tensor) -> tuple[Tensor, Tensor]:
    a.mul_(2)
    return a, a.t()


def outputs_share(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = a * 2
    v = h.view(-1)
    v[0].add_(5)
    return h, v, h[1]


def view_chain(a: Tensor) -> Tensor:
    a.view(2, 2, 4).transpose(0, 2)[1, :, 1:].unsqueeze(0).mul_(3)
    return a + 0


def diagonal_and_select(a: Tensor, v: Tensor) -> Tensor:
    a.diagonal().fill_(1.0)
    a.select(1, 2).add_(v)
    return a @ a


def as_strided_write(a: Tensor) -> Tensor:
    a.as_strided((3, 2), (4, 1), 1).add_(10)
    return a * 1


def out_into_view(x: Tensor, y: Tensor) -> Tensor:
    torch.add(x, 1, out=y[1])
    torch.cat([x[:2], x[2:]], out=y[0])
    return y.sum(0)


def out_resizes(x: Tensor) -> Tensor:
    """An out= buffer made inside, of the wrong shape: the op resizes it."""
    buffer = torch.empty(0)
    torch.add(x, 1, out=buffer)
    return buffer * 2


def foreach(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    torch._foreach_add_([a, c], [c, c])
    torch._foreach_mul_([a, c], 2.0)
    return b + 1


def indexed_writes(a: Tensor, index: Tensor, src: Tensor) -> Tensor:
    a[index] = src
    a.view(-1).index_add_(0, index, src[:, 0])
    a.masked_fill_(a > 1, -1.0)
    return a.clamp_(min=-0.5)


def in_place_views(a: Tensor) -> Tensor:
    h = a.clone()
    h.t_().unsqueeze_(0)
    h[:, 0].zero_()
    return h.squeeze_(0)


def expanded_read(row: Tensor, a: Tensor) -> Tensor:
    wide = row.expand(3, 4)
    row.add_(1)
    a.copy_(wide)
    return wide + a


def grad_through_views(w: Tensor) -> Tensor:
    h = w * 1
    h[1:].mul_(2)
    h.view(-1)[::3].add_(h.sum())
    return h.sin()


def buffer_beside_grad(x: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    seen.add_(1)
    return (x @ w) / seen


def batch_norm(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return torch.nn.functional.batch_norm(x, mean, var, training=True)


def no_elements(a: Tensor, b: Tensor) -> Tensor:
    """`a` has no bytes because it has no elements: reading it is fine."""
    a.add_(1)
    return torch.cat([a, b]) * 2


def detached_alias(a: Tensor) -> Tensor:
    d = a.detach()
    d.add_(1)
    return a * d


def nan_and_signed_zero(a: Tensor) -> Tensor:
    a[0] = float("nan")
    a[1] = -0.0
    return a * 0.0


def _slices() -> Args:
    base = values(8)
    return base[:6], base[2:]


def _even_and_odd() -> Args:
    base = values(8)
    return base[::2], base[1::2]


def _float_and_bits() -> Args:
    a = values(8)
    return a, a.view(torch.int32)


def _complex_and_parts() -> Args:
    c = torch.view_as_complex(values(4, 2))
    return c, torch.view_as_real(c)


def _tensor_and_view() -> Args:
    a = values(8)
    return a, a.view(2, 4)


def _one_tensor_twice() -> Args:
    a = values(8)
    return a, a


def _two_of_three_aliased() -> Args:
    a = values(8)
    return a, a[2:6], values(8, seed=1)


PROGRAMS = (
    program(10, "a write seen through an overlapping input", _slices, overlapping),
    program(10, "each mutated from the other", _slices, overlapping_both_ways),
    program(10, "disjoint strided views of one storage", _even_and_odd, interleaved),
    program(10, "float32 and int32 views of one storage", _float_and_bits, two_dtypes),
    program(10, "complex and real views of one storage", _complex_and_parts, complex_and_real),
    program(10, "an input in the middle of its storage", lambda: (values(8)[3:7],), storage_offset),
    program(
        10, "one input is a view of the other; the view is written", _tensor_and_view, view_of_other
    ),
    program(10, "writes through base and view in turn", _tensor_and_view, base_of_other),
    program(10, "one tensor as two arguments", _one_tensor_twice, same_tensor_twice),
    program(10, "outputs are views of an input", lambda: (values(4, 4),), output_is_view),
    program(
        10,
        "outputs are a mutated input and its view",
        lambda: (values(2, 4),),
        output_is_mutated_input,
    ),
    program(10, "outputs share a fresh storage", lambda: (values(2, 4),), outputs_share),
    program(10, "in place at the end of a view chain", lambda: (values(4, 4),), view_chain),
    program(
        10,
        "diagonal and column writes",
        lambda: (values(4, 4), values(4, seed=1)),
        diagonal_and_select,
    ),
    program(10, "a write through as_strided", lambda: (values(12),), as_strided_write),
    program(10, "out= into rows", lambda: (values(4), values(2, 4, seed=1)), out_into_view),
    program(10, "out= that resizes its buffer", lambda: (values(4),), out_resizes),
    program(10, "foreach over aliased and separate tensors", _two_of_three_aliased, foreach),
    program(
        10,
        "indexed, scattered and masked writes",
        lambda: (values(4, 3), torch.tensor([2, 0]), values(2, 3, seed=1)),
        indexed_writes,
    ),
    program(10, "in-place view ops on a fresh tensor", lambda: (values(2, 3),), in_place_views),
    program(
        10, "a stale expanded view", lambda: (values(1, 4), values(3, 4, seed=1)), expanded_read
    ),
    program(
        10, "gradient through writes to views", lambda: (leaf(3, 4),), grad_through_views, grad=True
    ),
    program(
        10,
        "a counter mutated in a differentiable function",
        lambda: (leaf(2, 4), leaf(4, 3, seed=1), torch.ones(())),
        buffer_beside_grad,
        grad=True,
    ),
    program(
        10,
        "running statistics",
        lambda: (leaf(5, 3), torch.zeros(3), torch.ones(3)),
        batch_norm,
        grad=True,
    ),
    program(
        10, "an input without elements", lambda: (torch.zeros(0, 4), values(2, 4)), no_elements
    ),
    program(10, "a write through detach", lambda: (values(8),), detached_alias),
    program(10, "NaN and -0.0 are compared as bits", lambda: (values(4),), nan_and_signed_zero),
)
