"""The memory model alone: reads, writes, stale views, widening, extents. Values are words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functionalize.discharge.byte_ranges import Extent, check_bounds
from functionalize.discharge.rules.views import step_of
from functionalize.discharge.values import ViewCall
from functionalize.errors import (
    EmptyStorageError,
    InvariantError,
    OutOfBoundsError,
    OverlappingMutationError,
    UndefinedContentsError,
)
from functionalize.ir.ops import Geometry
from tests.discharge.words import Words, floats, storage_of

aten = torch.ops.aten
ROOT = floats(4, 6)
ROWS = floats(2, 6, offset=6)


def rows_of(storage: object) -> None:
    step = step_of(ViewCall(aten.slice.Tensor, (0, 1, 3)), ROOT, ROWS)
    storage.add_view(ROOT, ROWS, step)  # type: ignore[attr-defined]


def test_the_root_is_its_base() -> None:
    storage, emit = storage_of(ROOT), Words()
    assert storage.read(ROOT, emit) == "a"
    assert emit.calls == 0


def test_a_view_is_read_once_per_version() -> None:
    storage, emit = storage_of(ROOT), Words()
    rows_of(storage)
    assert storage.read(ROWS, emit) == "slice(a, 0, 1, 3)"
    assert storage.read(ROWS, emit) == "slice(a, 0, 1, 3)"
    assert emit.calls == 1


def test_a_stale_view_is_regenerated() -> None:
    storage, emit = storage_of(ROOT), Words()
    rows_of(storage)
    storage.read(ROWS, emit)
    storage.write(ROOT, "b", emit)
    assert storage.version == 1
    assert storage.read(ROWS, emit) == "slice(b, 0, 1, 3)"


def test_a_write_through_a_view() -> None:
    storage, emit = storage_of(ROOT), Words()
    rows_of(storage)
    storage.write(ROWS, "b", emit)
    assert storage.whole(emit) == "slice_scatter(a, b, 0, 1, 3)"
    assert storage.read(ROWS, emit) == "b"
    assert storage.written


def test_the_first_way_to_a_view_stays() -> None:
    storage, emit = storage_of(ROOT), Words()
    rows_of(storage)
    other = step_of(ViewCall(aten.narrow.default, (0, 1, 2)), ROOT, ROWS)
    assert other is None  # composite: torch makes it a slice
    storage.add_view(ROOT, ROWS, step_of(ViewCall(aten.view.default, ([2, 6],)), ROOT, ROWS))
    assert storage.read(ROWS, emit) == "slice(a, 0, 1, 3)"


def test_a_view_that_no_op_was_seen_to_make() -> None:
    storage, emit = storage_of(ROOT), Words()
    assert storage.read(floats(24), emit) == "view(a, [24])"
    storage.write(floats(3, offset=2), "b", emit)
    assert storage.whole(emit) == "view(slice_scatter(view(a, [24]), b, 0, 2, 5), [4, 6])"


def test_a_full_write_does_not_read() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(floats(24), "b", emit)
    assert storage.whole(emit) == "view(b, [4, 6])"


def test_a_write_of_nothing() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(floats(0, 6), "b", emit)
    assert (storage.version, storage.whole(emit), emit.calls) == (0, "a", 0)
    assert storage.read(floats(0, 6), emit) == "empty([0, 6])"


def test_widening() -> None:
    """The window was written; what is around it is as on entry."""
    storage, emit = storage_of(floats(2, offset=1), nbytes=20), Words()
    storage.write(floats(2, offset=1), "b", emit)
    want = "slice_scatter(whole_0([5]), b, 0, 1, 3)"
    assert storage.read(floats(5), emit) == want
    assert storage.read(floats(2, offset=1), emit) == "b"


def test_widening_of_what_was_not_written() -> None:
    storage, emit = storage_of(floats(2, offset=1), nbytes=20), Words()
    assert storage.read(floats(3, offset=2), emit) == "slice(whole_0([5]), 0, 2, 5)"


def test_widening_of_what_was_born_inside() -> None:
    storage, emit = storage_of(floats(2, offset=1), nbytes=20, external=False), Words()
    assert storage.peek(floats(5), emit) == "slice_scatter(empty([5]), a, 0, 1, 3)"


def test_gaps_are_kept_by_widening() -> None:
    gaps = Geometry((2,), (2,), 0, torch.float32)
    storage, emit = storage_of(gaps, nbytes=16), Words()
    storage.write(gaps, "b", emit)
    storage.read(floats(2), emit)
    assert storage.root == floats(4)
    assert storage.whole(emit).startswith("slice_scatter(whole_0([4]), as_strided_scatter(")


def test_forgotten_contents() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.forget()
    with pytest.raises(UndefinedContentsError) as error:
        storage.read(ROOT, emit)
    assert str(error.value) == (
        "reads `a` (float32[4, 6]), whose storage was grown to 96 bytes and some of these bytes "
        "were not written since: write to all of them first"
    )


def test_a_partial_write_of_forgotten_contents() -> None:
    storage, emit = storage_of(ROOT), Words()
    rows_of(storage)
    storage.forget()
    storage.write(ROWS, "b", emit)
    assert storage.whole(emit) == "slice_scatter(empty([4, 6]), b, 0, 1, 3)"
    assert storage.read(ROWS, emit) == "b"
    with pytest.raises(UndefinedContentsError):
        storage.read(ROOT, emit)
    storage.write(floats(6), "c", emit)
    storage.write(floats(6, offset=18), "d", emit)
    assert storage.read(ROOT, emit).startswith("view(slice_scatter(")


def test_a_kept_prefix() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.read(floats(24), emit)
    storage.keep_prefix(48)
    assert storage.read(floats(12), emit) == "slice(view(a, [24]), 0, 0, 12)"
    with pytest.raises(UndefinedContentsError):
        storage.read(floats(13), emit)


def test_bounds() -> None:
    check_bounds("a", floats(4), 16, 16, "reads")
    with pytest.raises(EmptyStorageError) as empty:
        check_bounds("a", floats(4), 0, 16, "reads")
    assert str(empty.value) == (
        "reads `a` (float32[4]), whose storage holds 0 bytes here and would need 16: grow it and write to "
        "it first"
    )
    with pytest.raises(OutOfBoundsError) as outside:
        check_bounds("a", floats(4, offset=1), 16, 32, "writes")
    assert str(outside.value) == (
        "writes `a` (float32[4] offset 1), which reaches to byte 20 of a storage that holds 16 bytes here "
        "(it held 32 on entry): grow it first, or look at what is left"
    )


def test_overlap() -> None:
    storage = storage_of(ROOT)
    with pytest.raises(OverlappingMutationError) as error:
        storage.write(Geometry((3, 4), (0, 1), 0, torch.float32), "b", Words())
    assert str(error.value) == (
        "writes `a` (float32[3, 4] stride [0, 1]), in which several elements share one memory location: "
        "clone() it before writing"
    )


def test_a_bug_of_ours_is_told_as_one() -> None:
    storage = storage_of(ROOT)
    storage.version += 1
    with pytest.raises(InvariantError, match="the base is older than the storage"):
        storage.peek(ROOT, Words())


SIZE = 24
SPANS = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE))
CHANGES = st.lists(st.one_of(SPANS, st.integers(0, SIZE)), max_size=12)


@given(CHANGES, SPANS)
def test_an_extent_is_a_bitmap(
    changes: list[tuple[int, int] | int], asked: tuple[int, int]
) -> None:
    extent, bitmap = Extent(), [False] * SIZE
    for change in changes:
        if isinstance(change, int):
            extent.truncate(change)
            bitmap[change:] = [False] * (SIZE - change)
        else:
            start, end = change
            extent.add(start, end)
            bitmap[start:end] = [True] * max(0, end - start)
    marked = [any(s <= i < e for s, e in extent.spans) for i in range(SIZE)]
    assert marked == bitmap
    assert extent.covers(*asked) == all(bitmap[slice(*asked)])
    edges = [edge for span in extent.spans for edge in span]
    assert edges == sorted(set(edges)), "spans are disjoint, ascending, and never touch"


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 3), st.integers(1, 3))
def test_an_extent_of_views(offsets: list[int], rows: int, step: int) -> None:
    extent, bitmap = Extent(), [False] * 64
    for offset in offsets:
        g = Geometry((rows, 2), (step + 1, 1), offset, torch.int16)
        places = [2 * (offset + r * (step + 1) + c) for r in range(rows) for c in range(2)]
        covered = all(bitmap[p] and bitmap[p + 1] for p in places)
        assert extent.covers_view(g) == covered
        extent.add_view(g)
        for p in places:
            bitmap[p] = bitmap[p + 1] = True
        assert extent.covers_view(g)
    assert [any(s <= i < e for s, e in extent.spans) for i in range(64)] == bitmap
