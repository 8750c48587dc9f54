"""Writes of parts of a storage: they wait until something needs the base."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import functionalize as fz
from functionalize.discharge.emitters import TensorEmitter
from functionalize.discharge.rules.views import step_of, straight
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import ViewCall
from functionalize.errors import UndefinedContentsError
from functionalize.ir.ops import Geometry
from tests.discharge.eager import same_as_eager
from tests.discharge.words import CPU, Words, floats, storage_of

aten = torch.ops.aten
ROOT = floats(4, 2)
ROWS = [floats(2, offset=2 * i) for i in range(4)]


def row(storage: FunctionalStorage, i: int) -> Geometry:
    step = step_of(ViewCall(aten.select.int, (0, i)), ROOT, ROWS[i])
    assert step is not None
    storage.add_view(ROOT, ROWS[i], step)
    return ROWS[i]


def test_parts_that_make_up_the_whole() -> None:
    storage, emit = storage_of(ROOT), Words()
    for i in (2, 0, 3, 1):
        storage.write(row(storage, i), f"r{i}", emit)
    assert emit.calls == 0
    assert storage.read(ROWS[3], emit) == "r3"
    assert storage.read(ROOT, emit) == "view(cat(['r0', 'r1', 'r2', 'r3']), [4, 2])"
    assert storage.whole(emit) == storage.base
    assert [storage.read(r, emit) for r in ROWS] == ["r0", "r1", "r2", "r3"]
    assert emit.calls == 2


def test_many_parts_with_gaps() -> None:
    storage, emit = storage_of(floats(9)), Words()
    for i in range(4):
        storage.write(floats(1, offset=2 * i + 1), f"w{i}", emit)
    gaps = [f"slice(a, 0, {i}, {i + 1})" for i in (0, 2, 4, 6, 8)]
    pieces = [gaps[0], "w0", gaps[1], "w1", gaps[2], "w2", gaps[3], "w3", gaps[4]]
    assert storage.whole(emit) == f"cat({pieces})"


def test_few_parts_with_gaps() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(row(storage, 2), "b", emit)
    storage.write(row(storage, 0), "c", emit)
    want = "select_scatter(select_scatter(a, b, 0, 2), c, 0, 0)"
    assert storage.read(ROOT, emit) == want


def test_a_part_written_again() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(row(storage, 1), "b", emit)
    storage.write(ROWS[1], "c", emit)
    assert storage.whole(emit) == "select_scatter(a, c, 0, 1)"
    storage.write(floats(1, offset=2), "d", emit)
    storage.write(ROWS[1], "e", emit)  # covers `d`
    assert storage.read(ROOT, emit) == "select_scatter(select_scatter(a, c, 0, 1), e, 0, 1)"


def test_a_part_that_runs_into_another() -> None:
    storage, emit = storage_of(floats(8)), Words()
    storage.write(floats(4), "b", emit)
    storage.write(floats(4, offset=2), "c", emit)
    first = "slice_scatter(a, b, 0, 0, 4)"
    assert storage.read(floats(4), emit) == f"slice(slice_scatter({first}, c, 0, 2, 6), 0, 0, 4)"


def test_what_lies_elsewhere_stays_current() -> None:
    storage, emit = storage_of(ROOT), Words()
    want = storage.read(row(storage, 3), emit)
    storage.write(row(storage, 0), "b", emit)
    assert storage.read(ROWS[3], emit) == want
    assert emit.calls == 1


def test_what_lies_elsewhere_is_read_from_the_base() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(row(storage, 0), "b", emit)
    assert storage.read(row(storage, 3), emit) == "select(a, 0, 3)"
    assert storage.read(floats(2, 2, offset=2), emit) == (
        "view(slice(view(a, [8]), 0, 2, 6), [2, 2])"
    )
    both = storage.read(floats(4), emit)  # meets the part
    assert "select_scatter(a, b, 0, 0)" in both


def test_a_view_of_a_part() -> None:
    storage, emit = storage_of(ROOT), Words()
    row(storage, 1)
    column = floats(2, 1, offset=2)
    step = step_of(ViewCall(aten.unsqueeze.default, (1,)), ROWS[1], column)
    assert step is not None
    storage.add_view(ROWS[1], column, step)
    storage.write(ROWS[1], "b", emit)
    assert storage.read(column, emit) == "unsqueeze(b, 1)"


def test_outputs_of_one_call() -> None:
    storage, emit, call = storage_of(ROOT), Words(), ViewCall(aten.unbind.int, (0,))
    for i, g in enumerate(ROWS):
        step = step_of(call, ROOT, g, i)
        assert step is not None
        storage.add_view(ROOT, g, step)
    assert [storage.read(g, emit) for g in ROWS[:2]] == [
        "getitem(unbind(a, 0), 0)",
        "getitem(unbind(a, 0), 1)",
    ]
    assert emit.calls == 3
    storage.write(ROWS[1], "b", emit)
    assert storage.read(ROWS[2], emit) == "getitem(unbind(a, 0), 2)"
    assert emit.calls == 4
    storage.write(ROOT, "c", emit)
    assert [storage.read(g, emit) for g in ROWS[1:3]] == [
        "getitem(unbind(c, 0), 1)",
        "getitem(unbind(c, 0), 2)",
    ]
    assert emit.calls == 7


def test_outputs_of_one_call_go_with_the_base() -> None:
    storage, call = storage_of(ROOT), ViewCall(aten.unbind.int, (0,))
    emit = TensorEmitter(lambda _: torch.zeros(8))
    for i, g in enumerate(ROWS):
        step = step_of(call, ROOT, g, i)
        assert step is not None
        storage.add_view(ROOT, g, step)
    base = torch.arange(8.0).view(4, 2)
    data = StorageWeakRef(base.untyped_storage())
    storage.write(ROOT, base, emit)
    assert torch.equal(storage.read(ROWS[0], emit), base[0])
    del base
    storage.write(ROWS[0], torch.ones(2), emit)
    assert not data.expired()
    assert storage.whole(emit).sum() == 29
    assert data.expired()


def test_a_full_write_and_a_resize_drop_parts() -> None:
    storage, emit = storage_of(ROOT), Words()
    storage.write(row(storage, 1), "b", emit)
    storage.write(ROOT, "c", emit)
    assert storage.read(ROWS[1], emit) == "select(c, 0, 1)"
    storage.write(ROWS[1], "d", emit)
    storage.forget()
    with pytest.raises(UndefinedContentsError):
        storage.read(ROWS[1], emit)
    storage.write(row(storage, 0), "e", emit)
    assert storage.whole(emit) == "select_scatter(empty([4, 2]), e, 0, 0)"


def test_parts_and_a_prefix() -> None:
    storage, emit = storage_of(floats(8)), Words()
    storage.write(floats(4, offset=2), "b", emit)
    storage.keep_prefix(16)
    storage.write(floats(4, offset=4), "c", emit)
    first = "slice_scatter(a, b, 0, 2, 6)"
    assert storage.read(floats(8), emit) == f"slice_scatter({first}, c, 0, 4, 8)"


SIZE = 12
WINDOWS = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(1, 3)).map(
    lambda w: Geometry((min(w[1], -(-(SIZE - w[0]) // w[2])),), (w[2],), w[0], torch.float32)
)


@given(st.lists(st.tuples(WINDOWS, st.booleans()), max_size=20), st.booleans())
def test_reads_and_writes_are_those_of_memory(
    changes: list[tuple[Geometry, bool]], two_dimensional: bool
) -> None:
    root = floats(3, 4) if two_dimensional else floats(SIZE)
    memory = torch.arange(float(SIZE))
    base = memory.clone().view(root.size)
    storage = FunctionalStorage(0, root, CPU, base, root.end, "a", straight, True)
    emit = TensorEmitter(lambda _: base)
    for n, (g, writes) in enumerate(changes):
        window = memory.as_strided(g.size, g.stride, g.offset)
        if writes:
            value = torch.empty_strided(g.size, g.stride).copy_(torch.arange(g.size[0]) + 100.0 * n)
            window.copy_(value)
            storage.write(g, value, emit)
        else:
            assert torch.equal(storage.read(g, emit), window)
    assert torch.equal(storage.whole(emit).reshape(-1), memory)
    assert torch.equal(base.view(-1), torch.arange(float(SIZE)))


def test_a_flat_buffer_of_many_tensors() -> None:
    def fn(flat: Tensor, given: list[Tensor]) -> Tensor:
        parts = flat.split(4)
        torch._foreach_copy_(parts, given)
        torch._foreach_mul_(parts, 2.0)
        return flat.sum()

    program = same_as_eager(fn, torch.zeros(32), [torch.randn(4) for _ in range(8)], times=2)
    ops = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert ops.count("aten.cat.default") == 1
    assert not any("scatter" in op for op in ops)
    assert isinstance(program, fz.Program)
