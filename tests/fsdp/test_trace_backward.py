"""`trace_backward` of FSDP2 models on real gloo ranks: a trace leaves every shard and FSDP2 as they were; the program
leaves them as eager's backward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch.distributed.tensor import DTensor

import functionalize as fz
from functionalize.util.torch_release import minor_of
from tests.fsdp.feature import parameters
from tests.fsdp.features import FEATURES, GROUPS
from tests.fsdp.sharded import build_mlp
from tests.fsdp.twins import (
    differences,
    flat,
    grown_storages,
    hidden_of,
    layouts_of,
    models_differ,
    python_state_of,
    run,
    state_of,
    unequal,
)
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

HERE = {name: row for name, row in FEATURES.items() if not row.eager}
HERE = {name: row for name, row in HERE.items() if name not in ("no_grad", "inference_mode")}
FIRST = {name: HERE[name] for group in GROUPS.values() for name in [*group][:1] if name in HERE}


class State:
    """Everything of a model, at one moment."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors = {**state_of(model, optimizer), **hidden_of(model)}
        self.tensors = {name: t.clone() for name, t in tensors.items()}
        self.words = {**layouts_of(model), **python_state_of(model), "grown": grown_storages(model)}

    def differs(self, step: Any, other: State) -> list[str]:
        found = differences(step, self.tensors, other.tensors)
        return found + unequal(step, self.words, other.words)


@contextmanager
def going_backward(by: Callable[..., None]) -> Iterator[None]:
    """`tensor.backward()` calls `by` instead."""
    own = torch.Tensor.backward
    torch.Tensor.backward = by  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = own  # type: ignore[method-assign]


def feature(name: str) -> list[str]:
    row = FEATURES[name]
    eager, ours = row.build(), row.build()
    found: list[str] = []

    traces = 0

    def traced(loss: Tensor, gradient: Tensor | None = None, **_: Any) -> None:
        nonlocal traces
        traces += 1
        before = State(*ours)
        program = fz.functions.trace_backward(loss, gradient=gradient)
        found.extend(State(*ours).differs("after a trace", before))
        program()

    steps = row.make_step(*eager), row.make_step(*ours)
    for i, batch in enumerate(row.batches()[:3]):
        torch.manual_seed(i)
        expected, drawn = run(steps[0], batch), torch.get_rng_state()
        torch.manual_seed(i)
        with going_backward(traced):
            actual = run(steps[1], batch)
        found += differences(i, flat(actual), flat(expected))
        found += differences(i, {"rng": torch.get_rng_state()}, {"rng": drawn})
        found += models_differ(i, *ours, *eager)
    return found if traces else ["no backward was traced"]


@pytest.mark.parametrize("name", parameters(FIRST))
def test_feature(name: str) -> None:
    assert run_on_ranks(feature, name, world=FIRST[name].world) == [[]] * FIRST[name].world


def reduced(by: Callable[[Tensor], Any]) -> tuple[list[bool], list[str]]:
    """Of each parameter, whether its gradient is sharded after a second backward; storages that stayed unsharded."""
    model, optimizer = build_mlp()
    for backward in (torch.Tensor.backward, by):
        optimizer.zero_grad()
        backward(model(torch.ones(4, 8)).square().mean())
    sharded = [isinstance(p.grad, DTensor) for p in model.parameters()]
    return sharded, grown_storages(model)


def compiled_autograd(loss: Tensor) -> None:
    with _enable(lambda graph: graph):
        loss.backward()


def side_by_side() -> list[tuple[list[bool], list[str]]]:
    ours = reduced(lambda loss: fz.functions.trace_backward(loss)())
    return [reduced(torch.Tensor.backward), ours, reduced(compiled_autograd)]


@pytest.mark.skipif(minor_of(torch.__version__) != minor_of("2.13"), reason="known of torch 2.13")
def test_beside_compiled_autograd() -> None:
    """Of torch's, the last block of the backward stays unsharded, and its gradient is not reduced."""
    for eager, ours, theirs in run_on_ranks(side_by_side, world=2):
        assert ours == eager
        assert all(ours[0]) and not ours[1]
        assert not all(theirs[0]) and theirs[1]
