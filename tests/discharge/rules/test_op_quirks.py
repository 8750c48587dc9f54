"""Batch norm, whose schema hides what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import OpRecord
from tests.discharge.eager import same_as_eager, text_of
from tests.discharge.engines import engine_with

aten = torch.ops.aten


def train(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return torch.nn.functional.batch_norm(x, mean, var, w, b, True, 0.1)


def stats() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4)]


def test_training(expect: Callable[[str, str], None]) -> None:
    program = same_as_eager(train, torch.randn(5, 4), *stats(), torch.tensor(0), times=3)
    expect("training", text_of(program))


def test_training_with_statistics_in_one_tensor() -> None:
    def fn(x: Tensor, s: Tensor) -> Any:
        return torch.native_batch_norm(x, None, None, s[0], s[1], True, 0.1, 1e-5)

    same_as_eager(fn, torch.randn(5, 4, 3), torch.rand(2, 4), times=2)


def test_no_statistics_and_evaluation() -> None:
    _, _, mean, var = stats()
    bn = torch.nn.functional.batch_norm
    same_as_eager(lambda x: bn(x, None, None, training=True), torch.randn(5, 4))
    same_as_eager(lambda x, m, v: bn(x, m, v), torch.randn(5, 4), mean, var)


@pytest.mark.parametrize("op", [aten.native_batch_norm, aten._native_batch_norm_legit])
@pytest.mark.parametrize("training", [False, True])
def test_out(op: Any, training: bool) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor, outs: list[Tensor]) -> None:
        names = ("out", "save_mean", "save_invstd")
        op.out(x, w, b, m, v, training, 0.1, 1e-5, **dict(zip(names, outs, strict=True)))

    saved = 4 if training else 0
    outs = [torch.zeros(5, 4), torch.zeros(saved), torch.zeros(saved)]
    same_as_eager(fn, torch.randn(5, 4), *stats(), outs, times=2)
    columns = torch.zeros(4, 5).t()
    for x, out in ((torch.randn(5, 4), columns), (columns, outs[0])):
        with pytest.raises(
            UnsupportedOpError, match="is not contiguous: compute without out=, then"
        ):
            fz.functions.trace(fn, x, *stats(), [out, *outs[1:]])


def test_declared_forms() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> Any:
        first = aten._native_batch_norm_legit(x, w, b, m, v, True, 0.1, 1e-5)
        return first, aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5)[:3]

    same_as_eager(fn, torch.randn(5, 4, 3), *stats(), times=2)


def test_modules() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ReLU(inplace=True))
    state = {k: v.clone() for k, v in module.state_dict().items()}

    def fn(state: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(module, state, (x,))

    same_as_eager(fn, state, torch.randn(2, 3, 4, 4), times=3)


def test_vendor_kernels() -> None:
    """No GPU is needed to see that they are refused in training, and pure otherwise."""
    engine, refs = engine_with((5, 4), (4,), (4,), (4,), (4,))
    op = aten.cudnn_batch_norm.default
    with pytest.raises(
        UnsupportedOpError, match="updates `running_mean` and `running_var` although"
    ):
        engine.step(OpRecord(op, (*refs, True, 0.1, 1e-5), {}))
    assert engine.step(OpRecord(op, (*refs, False, 0.1, 1e-5), {})).target is op
    none = (*refs[:3], None, None, True, 0.1, 1e-5)
    assert engine.step(OpRecord(op, none, {})).target is op


def test_record_stream() -> None:
    """It is a hint to the allocator: nothing is written, nothing emitted."""
    engine, (ref,) = engine_with((4,))
    before = len(engine.emit.graph.nodes)
    engine.step(OpRecord(aten.record_stream.default, (ref, None), {}))
    assert len(engine.emit.graph.nodes) == before
    assert engine.storage(0).version == 0
