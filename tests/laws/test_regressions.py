"""What the fuzz found, each shrunk to a few lines and named after what went wrong.

Every program is run in eager, traced and replayed, lowered and run, and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from examples.compare import assert_bitwise_equal, run_eager, run_trace
from examples.resize_program import Args, R, program, values, z
from functionalize.errors import EmptyStorageError, OutOfBoundsError, UndefinedContentsError
from tests.graphs import lowered


def windows(*dtypes_sizes_strides_offsets: tuple[Any, ...], nbytes: int) -> Args:
    """Tensors on one storage of small whole numbers."""
    storage = torch.UntypedStorage(nbytes)
    torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.arange(nbytes) % 7)
    return tuple(
        torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        for dtype, size, stride, offset in dtypes_sizes_strides_offsets
    )


def _emptied_pair() -> Args:
    made = windows((torch.complex64, (3,), (1,), 0), (torch.int32, (2, 2), (2, 1), 3), nbytes=28)
    made[0].untyped_storage().resize_(0)
    return made


# -- where a value lies in its memory --------------------------------------------------------------


def scatter_keeps_the_offset(a: Tensor) -> tuple[Tensor, Tensor]:
    """`slice_scatter` gives its result the storage offset of its input: no value is known to start at 0."""
    a[1:3].mul_(2)
    return a.as_strided((2,), (2,), 3), a + 1


def outputs_of_a_base_with_an_offset(a: Tensor) -> tuple[Tensor, Tensor]:
    b = torch.cat([a, a])[2:6].view(2, 2).t()
    b[0].add_(1)
    return b, b[1:]


def input_moved_into_a_result(a: Tensor, b: Tensor) -> Tensor:
    fresh = b * 2
    fresh[1:].add_(1)
    a.set_(fresh[2:])  # type: ignore[call-overload]
    return fresh[1:]


# -- the base does not hold what is asked for ------------------------------------------------------


def input_with_gaps_is_the_base(even: Tensor, odd: Tensor) -> Tensor:
    even.add_(1)
    odd.mul_(2)
    return even * odd


def bytes_of_another_dtype_that_are_not_aligned(small: Tensor, large: Tensor) -> Tensor:
    small.add_(1)
    large.mul_(3)
    return small.sum() + large.sum()


def storage_is_no_whole_number_of_elements(a: Tensor, b: Tensor) -> Tensor:
    first, last = a.unbind(0)
    first.mul_(3)
    b.add_(1)
    return last + 1


def result_is_no_whole_number_of_elements(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a + 1
    part = b[2:14].view(torch.float32)
    part[1:].zero_()
    part[:2].view(torch.int16)[1:].mul_(2)
    return b * 2, part[:1] + 1


def emptied_input_is_no_whole_number_of_elements(a: Tensor) -> Tensor:
    R(a, 28)
    a[:14].zero_()
    part = a[2:14].view(torch.float32)
    part[1:].fill_(2)
    return part + 1


def whole_storage_is_no_whole_number_of_larger_elements(a: Tensor, b: Tensor) -> Tensor:
    """The base became the whole storage before elements of another size were seen."""
    b.add_(1)
    pairs = a[:12].view(torch.complex64)
    pairs[1:].fill_(2)
    return torch.view_as_real(pairs) + 1


def larger_elements_of_a_new_base_with_an_offset(a: Tensor, b: Tensor) -> Tensor:
    """The base begins in the middle of a complex number of `b`."""
    c = torch.view_as_complex(b)
    a.zero_()
    c.detach().view(-1).copy_(c.view(-1) + 1)
    return c.view(-1)[:2] * 2


def unusual_stride_in_a_dimension_of_size_one(a: Tensor, whole: Tensor) -> Tensor:
    a.fill_(3)
    return whole[:6] + 1


def unusual_stride_of_a_row_of_one(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    b.copy_(c.select(1, 0))
    return a + 2


def unusual_stride_of_an_element_in_parts(a: Tensor, c: Tensor, b: Tensor) -> Tensor:
    """torch looks at the strides of dimensions of size 1 when it makes one element of several."""
    parts = a.view(torch.uint8).t()
    parts.copy_(parts + 1)
    torch.view_as_real(c).t().copy_(b)
    column = b.t()
    column.t().copy_(b + 1)
    return a * 2 + torch.view_as_real(c) + torch.view_as_real(torch.view_as_complex(column))


def parts_of_an_element_beside_a_window(a: Tensor, c: Tensor) -> None:
    """The base begins in the middle of an element of `c`: no view of it, and none of its views, can be read there."""
    torch.mul(a.view(-1), 2, out=a)
    parts = c.real.view(-1)
    parts.copy_(parts)


def shrunk_before_the_window(a: Tensor) -> None:
    a.add_(1)
    R(a, 7)


def shrunk_inside_an_element(a: Tensor) -> None:
    a.add_(1)
    R(a, 14)


def grown_then_seen_whole(a: Tensor) -> Tensor:
    a.add_(1)
    R(a, 64)
    rest = a.as_strided((8,), (1,), 8)
    rest.fill_(2)
    return a.as_strided((16,), (1,), 0) * 2


def stale_base_after_grow_and_shrink(a: Tensor, b: Tensor) -> Tensor:
    """What an input held is not its base any more once it was freed, whatever sizes come then."""
    R(a, 0)
    R(a, 32)
    R(a, 16)
    a.as_strided((4,), (1,), 0).copy_(b)
    R(a, 32)
    a.as_strided((4,), (1,), 4).copy_(b)
    return a + 1


# -- writes through views --------------------------------------------------------------------------


def write_of_one_of_several_views_of_one_element(a: Tensor) -> Tensor:
    first, second = a[:1].expand(2).unbind(0)
    second.mul_(3)
    return first + 1


def write_of_the_only_row(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """It covers all that a write of a part left pending."""
    a[:, 1:3].add_(5)
    a[0].copy_(b)
    c = a * 2
    c[:, 1:3].add_(5)
    c.unbind(0)[0].fill_(1)
    d = c[:, :1]
    d[:, 0].add_(1)
    d.diagonal().mul_(3)
    return a + 1, c + 1


def lazy_conjugate_written_back(c: Tensor) -> Tensor:
    torch.conj(c).add_(1j)
    return torch.view_as_real(c) + 1


def lazy_negative_written_back(c: Tensor) -> Tensor:
    torch.conj(c).imag.mul_(3)
    return torch.view_as_real(c) + 1


def result_with_a_conjugate_bit(c: Tensor) -> Tensor:
    d = torch.conj(c * 2)
    d.add_(1)
    return d


def conjugate_of_what_was_grown(c: Tensor, d: Tensor) -> Tensor:
    """torch copies a conjugate before it writes to it, also where the copied bytes hold nothing yet."""
    R(c.detach(), 24)
    torch.conj(c.detach()).zero_()
    R(d, 0)
    d.untyped_storage().resize_(24)
    torch.add(c, 2, out=torch.conj(d))
    return torch.view_as_real(d) + torch.view_as_real(c)


def parts_of_a_conjugate_of_what_was_emptied(c: Tensor) -> Tensor:
    R(c, 0)
    c.untyped_storage().resize_(24)
    t = torch.conj(c)
    t.imag.fill_(2)
    t.real.copy_(t.imag)
    return torch.view_as_real(c) + 1


def copy_of_a_conjugate_that_is_written(c: Tensor, d: Tensor) -> Tensor:
    R(c, 24)
    a, b = torch.conj(c).clone(), c.unsqueeze(0).conj().expand(2, -1).reshape(-1)
    a.copy_(d)
    b.zero_()
    R(c, 0)
    return torch.view_as_real(a) + torch.view_as_real(b[:3])


def columns_of_complex_numbers_chosen(c: Tensor) -> Tensor:
    """Nothing is computed, so no loop over the elements rounds differently."""
    columns = c.t()
    columns.masked_fill_(columns == 5, 3)
    torch.where(columns == columns, columns, columns, out=columns)
    return torch.view_as_real(c) + 1


def foreach_over_different_layouts(a: Tensor, b: Tensor) -> Tensor:
    torch._foreach_add_([a, b.t()], 1)
    return a.sum() + b


def out_grown_from_nothing(a: Tensor) -> Tensor:
    made = torch.mul(a, 2, out=torch.empty(0))
    made[1:].add_(1)
    return made


def result_that_is_defined_in_part(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a + 1
    R(b, 64)
    rest = b.as_strided((2,), (1,), 12)
    rest.zero_()
    return b, rest


def strided_write_defines_no_gaps(a: Tensor, b: Tensor) -> Tensor:
    R(a, 32)
    a[::2].copy_(b)
    out = a[::2] * 2
    R(a, 0)
    return out


def part_of_a_view_that_reaches_past_the_end(a: Tensor, b: Tensor) -> None:
    """The way back to the base does not go through a view that the storage is too small for."""
    R(a, 72)
    part = b.view(-1)[2:3]
    R(a, 24)
    part.fill_(1)
    a.view(torch.int32)[:5].fill_(2)


def nothing_of_what_was_freed(a: Tensor) -> tuple[Tensor, Tensor]:
    b = a + 1
    none, others = b[:0], b[4:4]
    R(b, 0)
    return none, others


# -- sizes and places ------------------------------------------------------------------------------


def view_of_an_emptied_input(a: Tensor) -> Tensor:
    """A view of a fake tensor grew its storage, and the size was read wrong."""
    a.view(2, 4).detach()
    out = torch.tensor(a.untyped_storage().size())
    R(a, 32)
    a.fill_(1)
    return out + a


def inputs_that_swap_storages(a: Tensor, b: Tensor) -> Tensor:
    c = torch.empty(0).set_(a)  # type: ignore[call-overload]
    a.set_(b)  # type: ignore[call-overload]
    b.set_(c)  # type: ignore[call-overload]
    b.add_(1)
    return a * 2


def moved_onto_what_is_freed(a: Tensor, b: Tensor) -> Tensor:
    a.set_(b[2:])  # type: ignore[call-overload]
    out = a + 1
    R(b, 0)
    return out


def result_is_a_view_of_what_is_freed(a: Tensor) -> Tensor:
    part = a[2:6]
    R(a, 0)
    return part


def data_of_another_dtype(a: Tensor, b: Tensor) -> Tensor:
    a.data = b.to(torch.float64)
    a.add_(1)
    return a * 2


def constant_handed_out(a: Tensor) -> tuple[Tensor, Tensor]:
    b = torch.tensor([1.0, 2.0])
    return b[1:], a + b[0]


CASES: tuple[tuple[Callable[..., Any], Callable[[], Args]], ...] = (
    (scatter_keeps_the_offset, lambda: (values(10)[3:7],)),
    (outputs_of_a_base_with_an_offset, lambda: (values(4),)),
    (input_moved_into_a_result, lambda: (values(3), values(8, seed=1))),
    (
        input_with_gaps_is_the_base,
        lambda: windows((torch.int32, (4,), (2,), 0), (torch.int32, (4,), (2,), 1), nbytes=32),
    ),
    (
        bytes_of_another_dtype_that_are_not_aligned,
        lambda: windows((torch.int16, (2, 5), (1, 2), 2), (torch.int64, (1,), (1,), 2), nbytes=24),
    ),
    (
        storage_is_no_whole_number_of_elements,
        lambda: windows((torch.int32, (2, 2), (2, 1), 3), (torch.int32, (4,), (2,), 0), nbytes=30),
    ),
    (
        storage_is_no_whole_number_of_elements,
        lambda: windows((torch.int32, (2, 2), (2, 1), 3), (torch.uint8, (28,), (1,), 2), nbytes=30),
    ),
    (result_is_no_whole_number_of_elements, lambda: (values(15, dtype=torch.int16),)),
    (emptied_input_is_no_whole_number_of_elements, lambda: (z(15, dtype=torch.int16),)),
    (
        whole_storage_is_no_whole_number_of_larger_elements,
        lambda: windows((torch.int16, (12,), (1,), 0), (torch.int32, (4,), (1,), 3), nbytes=28),
    ),
    (
        larger_elements_of_a_new_base_with_an_offset,
        lambda: windows(
            (torch.float32, (7,), (1,), 1), (torch.float32, (3, 2), (2, 1), 2), nbytes=32
        ),
    ),
    (
        unusual_stride_in_a_dimension_of_size_one,
        lambda: windows((torch.int64, (1,), (2,), 0), (torch.uint8, (13,), (1,), 3), nbytes=16),
    ),
    (
        unusual_stride_of_a_row_of_one,
        lambda: (
            *windows((torch.int16, (16,), (1,), 0), (torch.float64, (1,), (1,), 3), nbytes=32),
            values(1, 6),
        ),
    ),
    (
        unusual_stride_of_an_element_in_parts,
        lambda: (
            values(1, 2, dtype=torch.int32),
            torch.view_as_complex(values(1, 2)),
            values(2, 1, seed=1),
        ),
    ),
    (
        parts_of_an_element_beside_a_window,
        lambda: windows(
            (torch.float32, (7,), (1,), 1), (torch.complex64, (3,), (1,), 1), nbytes=32
        ),
    ),
    (shrunk_before_the_window, lambda: (values(8)[2:],)),
    (shrunk_inside_an_element, lambda: (values(8),)),
    (grown_then_seen_whole, lambda: (values(8),)),
    (stale_base_after_grow_and_shrink, lambda: (values(8), values(4, seed=1))),
    (write_of_one_of_several_views_of_one_element, lambda: (values(4),)),
    (write_of_the_only_row, lambda: (values(1, 8), values(8, seed=1))),
    (lazy_conjugate_written_back, lambda: (torch.view_as_complex(values(3, 2)),)),
    (lazy_negative_written_back, lambda: (torch.view_as_complex(values(3, 2)),)),
    (result_with_a_conjugate_bit, lambda: (torch.view_as_complex(values(3, 2)),)),
    (
        conjugate_of_what_was_grown,
        lambda: (z(3, dtype=torch.complex64), torch.view_as_complex(values(3, 2))),
    ),
    (parts_of_a_conjugate_of_what_was_emptied, lambda: (torch.view_as_complex(values(3, 2)),)),
    (
        copy_of_a_conjugate_that_is_written,
        lambda: (z(3, dtype=torch.complex64), torch.view_as_complex(values(3, 2))),
    ),
    (columns_of_complex_numbers_chosen, lambda: (torch.view_as_complex(values(3, 2, 2)),)),
    (part_of_a_view_that_reaches_past_the_end, _emptied_pair),
    (nothing_of_what_was_freed, lambda: (values(4),)),
    (foreach_over_different_layouts, lambda: (values(5), values(2, 3, seed=1))),
    (out_grown_from_nothing, lambda: (values(4),)),
    (result_that_is_defined_in_part, lambda: (values(8),)),
    (strided_write_defines_no_gaps, lambda: (z(8), values(4))),
    (view_of_an_emptied_input, lambda: (z(8),)),
    (inputs_that_swap_storages, lambda: (values(3), values(4, seed=1))),
    (moved_onto_what_is_freed, lambda: (values(3), values(8, seed=1))),
    (result_is_a_view_of_what_is_freed, lambda: (values(8),)),
    (data_of_another_dtype, lambda: (values(4), values(3, seed=1))),
    (constant_handed_out, lambda: (values(2),)),
)


@pytest.mark.parametrize("fn, make_args", CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_replay_is_eager(fn: Callable[..., Any], make_args: Callable[[], Args]) -> None:
    each = program(8, "found by the fuzz", make_args, fn)
    expected = run_eager(each)
    assert_bitwise_equal(run_trace(each), expected, grads=False)


# `as_strided` has no view of a whole storage that is no whole number of elements, see `lower.py`.
EVEN = [c for c in CASES if c[0] is not storage_is_no_whole_number_of_elements]


@pytest.mark.parametrize("fn, make_args", EVEN, ids=lambda x: getattr(x, "__name__", ""))
def test_lowered_is_eager(fn: Callable[..., Any], make_args: Callable[[], Args]) -> None:
    each = program(8, "found by the fuzz", make_args, fn)
    assert_bitwise_equal(run_trace(each, lowered), run_eager(each), grads=False)


# -- what must be refused --------------------------------------------------------------------------


def test_undefined_bytes_under_a_view_that_was_written_in_part() -> None:
    """The write of a part made the whole current; current is not the same as defined."""

    def fn(a: Tensor) -> Tensor:
        R(a, 32)
        pair = a.view(2, 4)
        pair[0].fill_(1)
        return pair + 1

    with pytest.raises(UndefinedContentsError):
        fz.functions.trace(fn, z(8))


def test_gaps_of_a_strided_write_stay_undefined() -> None:
    def fn(a: Tensor) -> Tensor:
        R(a, 32)
        a[::2].fill_(1)
        return a + 1

    with pytest.raises(UndefinedContentsError):
        fz.functions.trace(fn, z(8))


@pytest.mark.parametrize(
    "use",
    [lambda t: t.add_(1), lambda t: t.imag.mul_(2), lambda t: t.clone() + 1, lambda t: t.clone()],
    ids=["write", "part", "copy", "output"],
)
def test_conjugate_of_undefined_bytes_that_is_read(use: Callable[[Tensor], Any]) -> None:
    """The copy that torch makes of a conjugate before a write is as undefined as what it is a copy of."""

    def fn(c: Tensor) -> Any:
        R(c, 24)
        return use(torch.conj(c))

    with pytest.raises(UndefinedContentsError, match=r"reads `c` .* grown to 24 bytes"):
        fz.functions.trace(fn, z(3, dtype=torch.complex64))


def test_resize_op_on_a_conjugate() -> None:
    """torch resizes a copy of it: the storage stays as it is, and of a freed one eager would read freed memory."""

    def fn(c: Tensor) -> None:
        R(torch.conj(c), 64)

    c = torch.view_as_complex(values(3, 2))
    fz.functions.trace(fn, c)(c)
    assert c.untyped_storage().nbytes() == 24
    with pytest.raises(EmptyStorageError):
        fz.functions.trace(fn, z(3, dtype=torch.complex64))


def test_view_of_what_was_freed() -> None:
    """Eager refuses it; fakes do not look, and would give a program that reads past the end."""

    def fn(a: Tensor) -> Tensor:
        R(a, 0)
        return a[2:]

    with pytest.raises(EmptyStorageError):
        fz.functions.trace(fn, values(8))


def test_view_past_the_end() -> None:
    with pytest.raises(OutOfBoundsError):
        fz.functions.trace(lambda a: a.as_strided((4,), (3,)) + 1, values(8))


# -- identity --------------------------------------------------------------------------------------


def test_outputs_are_objects_of_their_own() -> None:
    """One object returned twice is one object; two tensors that look alike are two."""

    def fn(a: Tensor) -> tuple[Tensor, ...]:
        b = a + 1
        return b, b, b.detach(), a, a.detach()

    replay = fz.functions.trace(fn, values(3))
    a = values(3)
    first, again, other, same, alias = replay(a)
    assert first is again and other is not first and other.data_ptr() == first.data_ptr()
    assert same is a and alias is not a and alias.data_ptr() == a.data_ptr()


def test_a_constant_is_not_the_callers_to_change() -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0])[1:]

    replay = fz.functions.trace(fn, values(3))
    replay(values(3)).add_(5)
    assert replay(values(3)).item() == 2.0


def test_tensors_of_the_closure() -> None:
    """Read, written, returned, seen through a view of the program's: the object itself each time."""
    outsider = values(4)
    start = outsider.clone()

    def fn(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outsider.add_(1)
        return a * outsider, outsider, outsider[1:]

    replay = fz.functions.trace(fn, torch.ones(4))
    assert torch.equal(outsider, start)
    product, same, part = replay(torch.ones(4))
    assert same is outsider and torch.equal(outsider, start + 1) and torch.equal(product, outsider)
    assert part.data_ptr() == outsider.data_ptr() + 4


def test_closure_and_argument_on_one_storage() -> None:
    outsider = values(4)

    def fn(a: Tensor) -> Tensor:
        a.add_(1)
        return outsider * 2

    replay = fz.functions.trace(fn, outsider[1:])
    expected = outsider.clone()
    expected[1:] += 1
    assert torch.equal(replay(outsider[1:]), expected * 2)
    with pytest.raises(fz.errors.FunctionalizeError, match="no longer do"):
        replay(values(4)[1:])
