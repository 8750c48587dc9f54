"""Work is linear in what was recorded: the calls that Python makes, counted, in an engine run and in every pass.

Times are measured in `benchmarks/passes.py`; counts are the same on every machine. What a call into C does inside
(`list.index`) is not seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize import passes
from tests.laws.counting import SLACK, calls
from tests.ranks import run_on_ranks
from tests.steps import make_step

pytestmark = pytest.mark.long

FEW, MANY = 3, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def captured(layers: int) -> tuple[Any, int]:
    """A step of so many layers, and the calls that its capture took."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(layers)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = fz.capture(make_step(model, optimizer))

    step(torch.randn(4, 8))  # recorded, not kept
    number = calls(lambda: step(torch.randn(4, 8)))
    assert step.stats.captures == 1
    return step, number


def counted() -> dict[str, list[tuple[int, int]]]:
    """(size, calls) of few and of many layers: of the capture, by ops, and of each pass, by nodes and edges."""
    found: dict[str, list[tuple[int, int]]] = {}
    for layers in (FEW, MANY):
        step, number = captured(layers)
        found.setdefault("capture", []).append((step.stats.ops, number))
        program = step.program
        program.describe()
        size = sum(1 + len(n.all_input_nodes) for n in program.graph.nodes)
        for name, kind in passes.PASSES.items():
            copy = program.copy()
            number = calls(lambda copy=copy, kind=kind: kind().apply(copy))
            found.setdefault(name, []).append((size, number))
    return found


@pytest.fixture(scope="module")
def counts() -> dict[str, list[tuple[int, int]]]:
    return run_on_ranks(counted, timeout=300)[0]


@pytest.mark.parametrize("name", ["capture", *sorted(passes.PASSES)])
def test_work_is_linear(counts: dict[str, list[tuple[int, int]]], name: str) -> None:
    (small, few), (large, many) = counts[name]
    assert large > 3 * small
    assert many / large <= SLACK * few / small, counts[name]
