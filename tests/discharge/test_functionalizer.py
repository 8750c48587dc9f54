"""The engine on op streams written by hand: no model is run, no tensor is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functionalize.discharge.functionalizer import Functionalizer
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import (
    EmptyStorageError,
    ForeignStorageError,
    InvariantError,
    UndefinedContentsError,
)
from functionalize.ir.ops import Geometry, OpRecord, TensorRef
from tests.discharge.words import CPU, Words, floats

aten = torch.ops.aten


def engine_with(*storages: tuple[str, Geometry, int]) -> tuple[Functionalizer, list[TensorRef]]:
    engine, refs = Functionalizer(Words()), []
    for serial, (name, geometry, nbytes) in enumerate(storages):
        ref = TensorRef(serial, geometry)
        engine.declare(ref, nbytes, CPU, name, name, external=True)
        refs.append(ref)
    return engine, refs


def born(serial: int, geometry: Geometry) -> dict[str, Any]:
    return {"outputs": TensorRef(serial, geometry), "meta": {"born": {serial: (geometry.end, CPU)}}}


def test_pure() -> None:
    engine, (a, b) = engine_with(("a", floats(4), 16), ("b", floats(4), 16))
    engine.run(OpRecord(aten.add.Tensor, (a, b), {"alpha": 2}, **born(2, floats(4))))
    assert engine.read(TensorRef(2, floats(4))) == "add(a, b, alpha=2)"


def test_view() -> None:
    engine, (a,) = engine_with(("a", floats(4, 2), 32))
    part = TensorRef(0, floats(2, 2, offset=2))
    engine.run(OpRecord(aten.slice.Tensor, (a, 0, 1, 3), {}, part))
    assert engine.emit.calls == 0
    assert engine.read(part) == "slice(a, 0, 1, 3)"


def test_views_of_a_split() -> None:
    engine, (a,) = engine_with(("a", floats(4, 2), 32))
    parts = [TensorRef(0, floats(2, 2)), TensorRef(0, floats(2, 2, offset=4))]
    engine.run(OpRecord(aten.split.Tensor, (a, 2), {}, parts))
    engine.run(OpRecord(aten.mul_.Tensor, (parts[1], 3), {}, parts[1]))
    want = "slice_scatter(a, mul(getitem(split(a, 2), 1), 3), 0, 2, 4, 1)"
    assert engine.read(a) == want


def test_mutation() -> None:
    engine, (a,) = engine_with(("a", floats(4), 16))
    engine.run(OpRecord(aten.mul_.Tensor, (a, 2), {}, a))
    engine.run(OpRecord(aten.sin_.default, (a,), {}, a))
    assert engine.read(a) == "sin(mul(a, 2))"
    assert engine.storage(0).version == 2


def test_out() -> None:
    sizes = ("a", floats(2, 2), 16), ("b", floats(2, 2), 16), ("o", floats(2, 2), 16)
    engine, (a, b, o) = engine_with(*sizes)
    engine.run(OpRecord(aten.mm.out, (a, b), {"out": o}, o))
    assert engine.read(o) == "mm(a, b)"


def test_out_of_another_type() -> None:
    wide = floats(4)._replace(dtype=torch.float64)
    engine, (a, o) = engine_with(("a", floats(4), 16), ("o", wide, 32))
    engine.run(OpRecord(aten.sin.out, (a,), {"out": o}, o))
    assert engine.read(o) == "_to_copy(sin(a), dtype=torch.float64)"


def test_lists() -> None:
    engine, (a, b) = engine_with(("a", floats(4), 16), ("b", floats(2), 8))
    engine.run(OpRecord(aten._foreach_add_.Scalar, ([a, b], 1), {}))
    assert engine.read(b) == "getitem(_foreach_add(['a', 'b'], 1), 1)"


def test_a_layer_of_fsdp() -> None:
    """Grown, gathered into, used through a view, freed; and used again after the second gather."""
    engine, (w, x, g) = engine_with(
        ("w", floats(2, 2), 0), ("x", floats(2, 2), 16), ("g", floats(2, 2), 16)
    )
    flat = TensorRef(0, floats(4))
    columns = TensorRef(0, Geometry((2, 2), (1, 2), 0, torch.float32))
    for serial in (3, 4):
        engine.run(OpRecord(RESIZE_STORAGE, (flat, 16), {}))
        engine.run(OpRecord(aten.copy_.default, (w, g), {}, w))
        if serial == 3:
            engine.run(OpRecord(aten.t.default, (w,), {}, columns))
        product = born(serial, floats(2, 2))
        engine.run(OpRecord(aten.mm.default, (x, columns), {}, **product))
        engine.run(OpRecord(RESIZE_STORAGE, (flat, 0), {}))
        engine.run(OpRecord(aten.mul_.Tensor, (g, 2), {}, g))
    read = [engine.read(TensorRef(serial, floats(2, 2))) for serial in (3, 4)]
    clone = "clone({}, memory_format=torch.contiguous_format)"
    assert read[0] == f"mm(x, t({clone.format('g')}))"
    assert read[1] == f"mm(x, t({clone.format('mul(g, 2)')}))"
    assert engine.storage(0).base == "w"


def test_growth_on_the_way() -> None:
    """`resized` is told by the recorder, and comes before the op's own writes."""
    engine, (a, o) = engine_with(("a", floats(4), 16), ("o", floats(0), 0))
    grown = TensorRef(1, floats(4))
    engine.run(OpRecord(aten.sin.out, (a,), {"out": grown}, grown, resized=((1, 16),)))
    assert engine.read(grown) == "sin(a)"
    assert engine.storage(1).nbytes == 16
    assert engine.read(o) == "empty([0])"


def test_several_outputs() -> None:
    engine, (a,) = engine_with(("a", floats(4), 16))
    values, indices = floats(4), floats(4)._replace(dtype=torch.int64)
    outputs = [TensorRef(1, values), TensorRef(2, indices)]
    meta = {"born": {1: (16, CPU), 2: (32, CPU)}}
    engine.run(OpRecord(aten.sort.default, (a,), {}, outputs, meta=meta))
    assert engine.read(outputs[1]) == "getitem(sort(a), 1)"


def test_errors_name_the_op() -> None:
    engine, (a, b) = engine_with(("a", floats(4), 0), ("b", floats(4), 16))
    where = "at an unknown line (no user frame was on the stack, as in autograd's own threads)"
    cases = [
        (OpRecord(aten.add.Tensor, (a, b), {}), EmptyStorageError, "aten.add.Tensor reads `a` "),
        (OpRecord(aten.mul_.Tensor, (a, 2), {}), EmptyStorageError, "aten.mul_.Tensor writes `a` "),
        (
            OpRecord(aten.sin.default, (TensorRef(9, floats(4)),), {}),
            ForeignStorageError,
            "aten.sin.default uses storage s9, which belongs to no tensor of the program",
        ),
    ]
    for record, kind, text in cases:
        with pytest.raises(kind) as error:
            engine.run(record)
        assert str(error.value).startswith(text)
        assert str(error.value).endswith(where)
    engine.run(OpRecord(RESIZE_STORAGE, (a, 16), {}))
    with pytest.raises(UndefinedContentsError, match=r"aten.sin.default reads `a`"):
        engine.run(OpRecord(aten.sin.default, (a,), {}))


def test_an_alias_of_nothing_is_a_bug() -> None:
    engine, (a, _) = engine_with(("a", floats(4), 16), ("b", floats(4), 16))
    with pytest.raises(InvariantError, match="returned no value for its output s2"):
        engine.run(OpRecord(aten.sin_.default, (a,), {}, TensorRef(2, floats(4))))
