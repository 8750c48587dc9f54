"""Audits on real ranks: alone where ranks need not agree, together where a vote decides; and in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz
from tests.allowance import ample_allowance
from tests.audit.unguarded import unguarded
from tests.fsdp.sharded import build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import differences, state_of
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

MERGED = "bucket_gathers{mb=0.003, across=true, apart_kb=none}"


@ample_allowance()
def trained(kind: str, audits: list[Any], changes_on: int | None) -> tuple[list[str], Any]:
    """Twins, one of them captured; on one rank a number that is frozen in the program changes before call 8."""
    rank, scripts = dist.get_rank(), []
    for _ in range(2):
        model, optimizer = build_mlp()
        config = {"scale": 1.0}

        def step(
            x: Tensor,
            y: Tensor,
            model: Any = model,
            optimizer: Any = optimizer,
            config: dict[str, float] = config,
        ) -> Tensor:
            loss = F.mse_loss(model(x), y) * config["scale"]
            if kind == "numbers" and loss.item() > 1e6:
                raise ValueError("the loss is too large")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        scripts.append((model, optimizer, step, config))
    (twin, twin_optimizer, eager, _), (model, optimizer, mine, config) = scripts
    options = {"passes": MERGED} if kind == "passes" else {}
    captured = fz.capture(mine, audit=audits[rank], **options)
    found: list[str] = []
    with unguarded():
        for i, batch in enumerate(pairs(13)):
            if i == 8 and rank == changes_on:
                scripts[0][3]["scale"] = config["scale"] = 0.5
            found += differences(i, {"loss": captured(*batch)}, {"loss": eager(*batch)})
            found += differences(i, state_of(model, optimizer), state_of(twin, twin_optimizer))
    return found, captured.stats


@pytest.mark.parametrize("kind", ["plain", "numbers", "passes"])
def test_one_rank_that_is_due_is_audited_and_all_ranks_stay_as_eager(kind: str) -> None:
    (found, first), (second_found, second) = run_on_ranks(trained, kind, [3, False], None)
    assert found == second_found == []
    assert first.audits >= 3
    assert first.audit_failures == second.audit_failures == 0
    together = first.audits if kind != "plain" else 0  # a rank without audits runs eagerly with it
    assert second.audits == together
    assert first.captures == second.captures == 1


@pytest.mark.parametrize("kind", ["plain", "numbers", "passes"])
def test_a_difference_on_one_rank(kind: str) -> None:
    (found, first), (second_found, second) = run_on_ranks(trained, kind, [1, 1], 1)
    assert found == second_found == []
    assert (first.audit_failures, second.audit_failures) == (0, 1)
    assert "argument 1 of aten.mul.Tensor is 0.5, the program has 1.0" in second.differences[0]
    assert second.captures == 2
    assert first.captures == (1 if kind == "plain" else 2)  # those that vote record together


def saved_and_loaded(path: str, changes: bool) -> Any:
    """A step is saved by one captured step and loaded by another one, whose calls are all audited."""
    model, optimizer = build_mlp()
    config = {"scale": 1.0}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) * config["scale"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first, second = fz.capture(step), fz.capture(step, audit=1)
    batches = pairs(8)
    for batch in batches[:4]:
        first(*batch)
    first.save(path)
    second.load(path)
    with unguarded():
        for i, batch in enumerate(batches[4:]):
            if changes and i == 2:
                config["scale"] = 0.5
            second(*batch)
    return second.stats


@pytest.mark.parametrize("changes", [False, True])
def test_a_loaded_program_is_audited_by_its_saved_op_stream(changes: bool, tmp_path: Path) -> None:
    for stats in run_on_ranks(saved_and_loaded, str(tmp_path / "step.fzp"), changes):
        assert (stats.captures, stats.audit_failures) == (0, int(changes))
        assert stats.audits == (3 if changes else 4)
        if changes:
            assert "aten.mul.Tensor is 0.5, the program has 1.0" in stats.differences[0]


@ample_allowance()
def forwards(audit: Any, changes_on: int | None) -> tuple[list[str], Any]:
    """Twins, of one of which forward and backward are captured; two microbatches per step, of other rows on each rank.

    On one rank a number that a hook of the backward reads changes before step 4.
    """
    rank, twins = dist.get_rank(), []
    for _ in range(2):
        model, optimizer = build_mlp()
        config = {"scale": 1.0}

        def loss_of(
            x: Tensor, y: Tensor, model: Any = model, config: dict[str, float] = config
        ) -> Tensor:
            out = model(x)
            out.register_hook(lambda gradient: gradient * config["scale"])
            return F.mse_loss(out, y)

        twins.append((model, optimizer, loss_of, config))
    captured = fz.capture(twins[1][2], backward=True, audit=audit, on_uncapturable="eager")
    found: list[str] = []
    with unguarded():
        for i, (x, y) in enumerate(pairs(10)):
            if i == 4 and rank == changes_on:
                twins[0][3]["scale"] = twins[1][3]["scale"] = 0.5
            states = []
            for (model, optimizer, eager, _), forward in zip(twins, (None, captured), strict=True):
                for rows in (len(x) - (i + rank) % 2, len(x)):
                    (forward or eager)(x[:rows], y[:rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
                states.append(state_of(model, optimizer))
            found += differences(i, *states)
    return found, captured.stats


def test_forwards_under_fsdp2_are_audited_together() -> None:
    (found, first), (second_found, second) = run_on_ranks(forwards, 3, None)
    assert found == second_found == []
    for stats in (first, second):
        assert (stats.audit_failures, stats.reruns) == (0, 0)
        assert stats.audits >= 2
        assert stats.backwards >= 4
    assert first.audits == second.audits


def test_a_hook_that_differs_on_one_rank_under_fsdp2() -> None:
    (found, first), (second_found, second) = run_on_ranks(forwards, 1, 1)
    assert found == second_found == []
    assert (first.audit_failures, second.audit_failures) == (0, 3)  # of three kinds of microbatches
    assert "argument 1 of aten.mul.Tensor is 0.5, the program has 1.0" in second.differences[0]
