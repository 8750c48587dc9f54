"""Plans of a model, an optimizer and a batch of this process: figures of scripts, and objects that stay as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import PlanError
from tests.planner.sweep.nets import WIDTH, Net, adam, figures, shard, step


def by_functions(is_sharded: bool, **given: Any) -> Any:
    def build() -> Any:
        model = Net()
        if is_sharded:
            shard(model)
        return model, adam(model)

    return fz.plan(build, step, inputs=lambda: torch.randn(4, WIDTH), **given)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_figures_are_those_of_functions(device: str, is_sharded: bool) -> None:
    with torch.device(device):
        model, batch = Net(), torch.randn(4, WIDTH)
    given = {"shard": shard} if is_sharded else {}
    found = fz.plan(model, adam(model), batch, world=4, **given)
    assert figures(found) == figures(by_functions(is_sharded, world=4))


def test_the_objects_stay_as_they_are() -> None:
    model, batch = Net(), torch.randn(4, WIDTH)
    optimizer = adam(model)
    step(model, optimizer, batch)  # the optimizer has state
    model(batch)["loss"].backward()
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers(), batch]
    values = [t.clone() for t in held]
    state = copy.deepcopy(optimizer.state_dict())
    found = fz.plan(model, optimizer, batch, shard=shard, world=4)
    assert figures(found) == figures(by_functions(True, world=4))
    assert all(map(torch.equal, held, values)) and not dist.is_initialized()
    assert [p.grad for p in model.parameters()] == held[len(held) // 2 - 1 : -2]
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_state_that_an_optimizer_begins_with_is_sharded() -> None:
    def build() -> Any:
        model = Net()
        shard(model)
        return model, torch.optim.Adagrad(model.parameters())

    given: dict[str, Any] = {"world": 4, "target": "cpu"}
    expected = fz.plan(build, step, inputs=lambda: torch.randn(4, WIDTH), **given)
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters())
    found = fz.plan(model, optimizer, torch.randn(4, WIDTH), shard=shard, **given)
    assert figures(found) == figures(expected)


def test_another_step_and_a_function_of_batches() -> None:
    model = Net()

    def batches(rows: int = 1) -> dict[str, Any]:
        return {"x": torch.randn(rows, WIDTH), "scale": 2.0}

    def twice(model: nn.Module, optimizer: Any, x: Tensor, scale: float) -> list[Tensor]:
        return [step(model, optimizer, x) for _ in range(2)]

    grid = {"rows": [1, 4]}
    once, more = (
        fz.plan(model, adam(model), batches, grid=grid, world=1, **given)
        for given in ({}, {"step": twice})
    )
    assert [a["flops"] * 2 for a in figures(once)] == [b["flops"] for b in figures(more)]
    assert once.largest("rows", limit=2e9) > 1000


def test_refusals() -> None:
    model, batch = Net(), torch.randn(4, WIDTH)
    optimizer = adam(model)
    given: dict[str, Any] = {"world": 2}

    def refused(text: str, *objects: Any, **more: Any) -> None:
        with pytest.raises(PlanError, match=text):
            fz.plan(*objects, **given, **more)

    refused("after a model comes its optimizer, of torch.optim, not function", model, step, batch)
    refused("`shard` is a function, not bool", model, optimizer, batch, shard=True)
    refused("AdamW has none of the parameters of Linear", nn.Linear(2, 2), optimizer, batch)
    logits = nn.Linear(WIDTH, 2)
    trained = torch.optim.SGD(logits.parameters())
    refused(r"Linear returns a tensor of \(4, 2\), which has no loss: give", logits, trained, batch)
    logits.iterator = iter(x for x in ())
    refused("what is planned cannot be copied: cannot pickle 'generator'", logits, trained, batch)
    refused("no function accepts `lenght`", model, optimizer, batch, lenght=3)


def test_a_forward_that_holds_the_original_is_refused() -> None:
    model, batch = Net(), torch.randn(4, WIDTH)
    original = model.forward
    model.forward = lambda x: original(x)
    with pytest.raises(PlanError, match="a copy of Net computes with the parameters of the origin"):
        fz.plan(model, adam(model), batch, world=2)
    assert all(p.grad is None for p in model.parameters())
