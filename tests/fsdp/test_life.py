"""A captured step in a real training script: what changes between its calls, in every order, against eager.

One step function that trains or evaluates, accumulates, and is called with two lengths; between calls the script
loads and saves checkpoints, replaces the optimizer, changes rates, flags and frozen weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.allowance import ample_allowance
from tests.fsdp.twins import (
    checkpoint_of,
    checkpoints_differ,
    differences,
    flat,
    grown_storages,
    hidden_of,
    layouts_of,
    state_of,
    unequal,
)
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

Action = Callable[["Script"], None]


class Script:
    """What a user's training script holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8))]
        blocks += [nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))]
        self.model = nn.Sequential(*blocks, nn.Linear(8, 3))
        for block in blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.saved: Any = None
        self.generator = torch.get_rng_state()

    def step(self, x: Tensor, y: Tensor, last: bool = True) -> dict[str, Any]:
        if not self.model.training:
            with torch.no_grad():
                return {"loss": F.mse_loss(self.model(x), y)}
        self.model.set_requires_gradient_sync(last)
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        norm = None
        if last:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss.item(), "norm": norm}


def train(script: Script) -> None:
    script.model.train()


def evaluate(script: Script) -> None:
    script.model.eval()


def halve_the_rate(script: Script) -> None:
    for group in script.optimizer.param_groups:
        group["lr"] /= 2


def another_decay(script: Script) -> None:
    for group in script.optimizer.param_groups:
        group["weight_decay"] += 0.05


def save(script: Script) -> None:
    script.saved = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))


def load(script: Script) -> None:
    model, optimizer = copy.deepcopy(script.saved)
    script.model.load_state_dict(model)
    script.optimizer.load_state_dict(optimizer)


def replace_the_optimizer(script: Script) -> None:
    script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.05, momentum=0.9)


def freeze(script: Script) -> None:
    script.model[2].bias.requires_grad_(False)


def unfreeze(script: Script) -> None:
    script.model[2].bias.requires_grad_(True)


def keep_unsharded(script: Script) -> None:
    script.model.set_reshard_after_forward(False)


def reshard(script: Script) -> None:
    script.model.reshard()


def more_dropout(script: Script) -> None:
    script.model[0][2].p = 0.4


Call = tuple[int, bool]  # rows, the last microbatch


@ample_allowance()
def life(phases: list[tuple[list[Action], list[Call]]]) -> tuple[list[str], Any, str]:
    ours, eager = Script(), Script()
    captured = fz.capture(ours.step)
    draw = torch.Generator().manual_seed(dist.get_rank())
    found: list[str] = []
    for number, (actions, calls) in enumerate(phases):
        for action in actions:
            action(eager), action(ours)
        for i, (rows, last) in enumerate(calls):
            x, y = (torch.randn(rows, n, generator=draw) for n in (8, 3))
            results = []
            for script, step in ((eager, eager.step), (ours, captured)):
                torch.set_rng_state(script.generator)
                results.append(step(x, y, last))
                script.generator = torch.get_rng_state()
            found += compare(f"{number}.{i}", results, eager, ours)
    found += checkpoints_differ(
        checkpoint_of(ours.model, ours.optimizer), checkpoint_of(eager.model, eager.optimizer)
    )
    return found, captured.stats, captured.explain()


def compare(at: str, results: list[Any], eager: Script, ours: Script) -> list[str]:
    expected, actual = results
    states = [state_of(s.model, s.optimizer) for s in (ours, eager)]
    found = differences(at, flat(actual), flat(expected))
    found += unequal(at, {"loss": repr(actual["loss"])}, {"loss": repr(expected["loss"])})
    found += differences(at, {"rng": ours.generator}, {"rng": eager.generator})
    found += differences(at, *states)
    found += differences(at, hidden_of(ours.model), hidden_of(eager.model))
    found += unequal(at, layouts_of(ours.model), layouts_of(eager.model))
    if grown_storages(ours.model) != grown_storages(eager.model):
        found.append(f"step {at}: left grown {grown_storages(ours.model)}")
    return found


WHOLE: list[Call] = [(4, True)] * 5
MICRO: list[Call] = [(4, False), (4, False), (4, True)] * 4
BOTH: list[Call] = [(4, True), (6, True)] * 4

PHASES: list[tuple[list[Action], list[Call]]] = [
    ([], WHOLE),
    ([evaluate], WHOLE),
    ([train], WHOLE),
    ([halve_the_rate], WHOLE),
    ([save], BOTH),
    ([load], BOTH),
    ([], MICRO),
    ([evaluate], [(4, True)] * 3),
    ([train], WHOLE),
    ([evaluate, reshard], [(6, True)] * 4),
    ([train, another_decay], WHOLE),
    ([another_decay], WHOLE),
    ([more_dropout], WHOLE),
    ([freeze], WHOLE),
    ([unfreeze], WHOLE),
    ([replace_the_optimizer], WHOLE),
    ([keep_unsharded], WHOLE),
    ([evaluate], WHOLE),
]


def test_a_life() -> None:
    for found, stats, text in run_on_ranks(life, PHASES):
        assert found == []
        assert stats.eager == 0, text
        assert stats.replays >= 60, text
        for missed in (
            "training = False",
            "p = 0.4",
            "no longer requires",
            "`self.optimizer` is a",
        ):
            assert any(missed in failure for failure in stats.guard_failures), text


def test_train_and_eval_in_turn() -> None:
    """After an evaluation the root enters unsharded: other programs, each found again."""
    phases: list[Any] = [([evaluate if i % 2 else train], [(4, True)] * 2) for i in range(16)]
    for found, stats, text in run_on_ranks(life, phases):
        assert found == []
        assert stats.captures == 4, text
        assert stats.replays >= 20, text
