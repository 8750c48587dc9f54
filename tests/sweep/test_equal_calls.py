"""Calls that are alike are done once: the plan is equal, event for event, to one in which each is done alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from examples import llama
from functionalize.ir import fakes
from functionalize.planning.time import call_costs
from functionalize.sweep.summary import Figures
from functionalize.util import user_stack
from tests.steps import train

WIDTH = 32


class Layer(nn.Module):
    """A layer of which `kind` says how it differs from the others."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        hidden = 3 * WIDTH if kind == "wide" else 2 * WIDTH
        self.kind = kind
        self.gates = nn.Linear(WIDTH, 2) if kind == "experts" else None
        ways = 2 if kind == "experts" else 1
        self.ups = nn.ModuleList(nn.Linear(WIDTH, hidden) for _ in range(ways))
        self.downs = nn.ModuleList(nn.Linear(hidden, WIDTH) for _ in range(ways))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "recomputed":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        outs = [
            down(F.gelu(up(x)) * x.mean()) for up, down in zip(self.ups, self.downs, strict=True)
        ]
        if self.gates is not None:
            shares = self.gates(x).softmax(-1)
            outs = [out * shares[:, i : i + 1] for i, out in enumerate(outs)]
        out = sum(outs)
        return F.dropout(out, 0.1) if self.kind == "dropout" else out


def _squares(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * out.detach().square().mean()


KINDS = ("", "wide", "dropout", "hooked", "recomputed", "experts", "", "wide")


def build(kinds: tuple[str, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(Layer(kind) for kind in kinds))
    for layer in model:
        if layer.kind == "hooked":
            layer.register_forward_hook(_squares)
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch: int = 8) -> Tensor:
    return torch.randn(batch, WIDTH)


def layers_that_differ() -> list[Any]:
    given = {"world": 4, "kinds": KINDS, "machine": "h100"}
    return fz.plan(build, train, grid={"batch": [8, 12]}, inputs=inputs, **given).plans


def small_llama() -> list[Any]:
    given = {"world": 512, "size": "8B", "layers": 3, "length": 256, "accumulate": 2}
    return fz.plan(llama.build, llama.step, inputs=llama.inputs, **given).plans


def everything(figures: Figures) -> Any:
    """All that a plan knows, as plain values."""
    memory = figures.memory
    events = [
        [(event.op, event.made, id_of(timeline)[id(event.allocation)]) for event in timeline.events]
        for timeline in memory.timelines.values()
    ]
    texts = [
        [str(each).replace(" at 0x", "") for each in timeline.allocations]
        for timeline in memory.timelines.values()
    ]
    nodes = [(n.name, {k: str(v) for k, v in n.meta.items()}) for n in figures.program.graph.nodes]
    return {
        "row": figures.row,
        "times": figures.times,
        "spans": figures.time.to_json(spans=True),
        "memory": memory.to_json(timelines=True),
        "work": figures.work,
        "traffic": figures.traffic,
        "events": events,
        "allocations": texts,
        "nodes": nodes,
        "tape": str(figures.program.tape()),
    }


def id_of(timeline: Any) -> dict[int, int]:
    return {id(each): i for i, each in enumerate(timeline.allocations)}


def _no_key(*given: Any) -> Any:
    raise fakes._Uncacheable


def _no_cost_key(*given: Any) -> Any:
    raise call_costs._HasNoKey


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no two calls, and no two stacks, be alike."""
    monkeypatch.setattr(fakes, "_key", _no_key)
    for name in ("of", "is_plain_view"):
        monkeypatch.setattr(call_costs._Keys, name, _no_cost_key)
    numbers = itertools.count()

    def read(self: user_stack.StackTexts, stack: Any) -> user_stack._Read:
        return user_stack._read(user_stack.symbolized([stack])[0], next(numbers))

    monkeypatch.setattr(user_stack.StackTexts, "_of", read)


@pytest.mark.parametrize("plans", [layers_that_differ, small_llama])
def test_a_plan_is_equal_to_the_long_way(plans: Callable[[], list[Any]]) -> None:
    found = []
    for patches in (lambda patch: None, one_by_one):
        with pytest.MonkeyPatch.context() as patch:
            patches(patch)
            found.append([everything(plan.figures) for plan in plans()])
    for at_once, alone in zip(*found, strict=True):
        for key, value in at_once.items():
            assert value == alone[key], key


def test_equal_layers_are_costed_once() -> None:
    (four,) = fz.plan(build, train, inputs=inputs, world=4, kinds=("",) * 4).plans
    (eight,) = fz.plan(build, train, inputs=inputs, world=4, kinds=("",) * 8).plans
    costed = [len(set(map(id, p.figures._costs.values()))) for p in (four, eight)]
    assert costed[0] == costed[1] < len(four.figures._costs) / 2
