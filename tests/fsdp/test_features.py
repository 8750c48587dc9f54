"""Every feature of `features.py` on real gloo ranks, bit for bit like eager; ranks that part for a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_fsdp import MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functionalize as fz
from tests.fsdp import steps, upstream
from tests.fsdp.feature import parameters
from tests.fsdp.features import FEATURES, GROUPS, table
from tests.fsdp.models import adamw, wrapped
from tests.fsdp.twins import Verdict, compare_twins
from tests.ranks import run_on_ranks

REPLAYED = {name: row for name, row in FEATURES.items() if not row.eager}
IMPOSSIBLE = {name: row for name, row in FEATURES.items() if row.eager}


def feature(name: str) -> Verdict:
    row = FEATURES[name]
    return compare_twins(row.build, row.make_step, row.batches())


@pytest.mark.parametrize("name", parameters(REPLAYED))
def test_feature(name: str) -> None:
    verdicts = run_on_ranks(feature, name, world=REPLAYED[name].world)
    for verdict in verdicts:
        assert verdict.differences == []
        assert (verdict.captures, verdict.guard_failures) == (1, [])
        assert verdict.replays >= 5
        assert verdict.collectives == verdicts[0].collectives
        assert "resize" not in verdict.program


def feature_through_passes(name: str) -> Verdict:
    row = FEATURES[name]
    return compare_twins(row.build, row.make_step, row.batches(), passes="default", allowance=None)


FIRST = {name: GROUPS[group][name] for group in GROUPS for name in [next(iter(GROUPS[group]))]}


@pytest.mark.parametrize("name", parameters(FIRST))
def test_feature_through_the_default_pipeline(name: str) -> None:
    for verdict in run_on_ranks(feature_through_passes, name, world=FEATURES[name].world):
        assert verdict.differences == []
        assert verdict.replays >= 5


class Works(TorchDispatchMode):
    """Collects what collectives return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.found += [
                dist.Work.unbox(x) for x in tree_leaves(out) if not isinstance(x, Tensor)
            ]
        return out


def eagerly(name: str) -> str:
    row = FEATURES[name]
    step, works = row.make_step(*row.build()), Works()
    try:
        with works:
            step(*row.batches()[0])
    except RuntimeError as error:
        # A later collective of the backward may not have failed yet. Gloo's barrier, with which every call of the
        # ranks ends, would raise its error: barriers wait for the works that have begun.
        for work in works.found:
            with contextlib.suppress(RuntimeError):
                work.wait()
        return f"{len(works.found)} collectives: {error}"
    return "it runs"


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_eager_cannot_do_on_gloo(name: str) -> None:
    for message in run_on_ranks(eagerly, name, world=IMPOSSIBLE[name].world):
        number, _, text = message.partition(" collectives: ")
        assert int(number) >= 2 and text.startswith(IMPOSSIBLE[name].eager)


def test_the_table_has_every_row() -> None:
    text = table()
    assert all(row.title in text for row in FEATURES.values())
    assert all(f"| {group} |" in text for group in GROUPS)


# -- the comparison sees what it is for ------------------------------------------------------------


def unequal_twins(what: str) -> Verdict:
    made = []

    def build() -> Any:
        model, optimizer = wrapped()()
        made.append(model)
        second = len(made) == 2
        if second and what == "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        if second and what == "buffer":
            model.register_buffer("extra", torch.zeros(1))
        return model, optimizer

    return compare_twins(build, steps.plain, steps.pairs(3))


@pytest.mark.parametrize("what", ["rate", "buffer"])
def test_twins_that_differ_are_seen(what: str) -> None:
    for verdict in run_on_ranks(unequal_twins, what):
        assert verdict.differences


# -- ranks that do not do the same in one step -----------------------------------------------------


def another_shape_on_one_rank(name: str) -> Verdict:
    """The last rank alone meets another shape in the sixth step: it records while the others replay."""
    row = FEATURES[name]
    batches = list(row.batches())
    if dist.get_rank() == dist.get_world_size() - 1:
        x, y = batches[5]
        batches[5] = torch.cat([x, x]), torch.cat([y, y])
    return compare_twins(row.build, row.make_step, batches)


@pytest.mark.parametrize(
    "name", ["blocks_and_root", "hsdp", "all_gather_by_lists", "reduce_by_all_to_all"]
)
def test_a_rank_that_records_works_beside_one_that_replays(name: str) -> None:
    *others, last = run_on_ranks(another_shape_on_one_rank, name, world=FEATURES[name].world)
    for verdict in others:
        assert (verdict.differences, verdict.guard_failures, verdict.captures) == ([], [], 1)
    assert last.differences == []
    assert last.guard_failures[0] == "`x` is float32[8, 8], was float32[4, 8]"


def reading(what: str) -> Callable[..., Any]:
    """A step that branches on a number: of its argument alone, or of a loss that all ranks computed."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            number = y[0, 0] if what == "argument" else loss.detach()
            if bool((number > 1e3).item()):
                loss = loss * 0.5
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return make


def number_on_one_rank(what: str) -> Verdict:
    """Rank 1 alone reads another number in the fifth step."""
    batches = steps.pairs(8)
    if dist.get_rank() == 1:
        batches[4][1][0, 0] = 1e4
    return compare_twins(wrapped(), reading(what), batches)


def test_a_loss_that_differs_on_one_rank_does_not_part_the_ranks() -> None:
    """It is known after the collectives ran: both ranks run the step again, together."""
    first, second = run_on_ranks(number_on_one_rank, "loss")
    for verdict in (first, second):
        assert verdict.differences == []
        assert verdict.replays >= 3
    assert first.guard_failures[0] == "a number that Python reads differs on another rank"
    assert second.guard_failures[0].startswith("a tensor's value read at ")
    assert first.replays == second.replays


def test_an_argument_that_differs_on_one_rank_does_not_part_the_ranks() -> None:
    """It is known before: that rank alone records, beside the one that replays."""
    first, second = run_on_ranks(number_on_one_rank, "argument")
    for verdict in (first, second):
        assert verdict.differences == []
        assert verdict.replays >= 3
    assert second.guard_failures[0].startswith("a tensor's value read at ")


# -- against a model that is not sharded, by torch's own check -------------------------------------


def parity(name: str) -> int:
    """Train a replicated model beside the captured one; gradients are averaged by hand."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return MLPStack(8) if name == "MLPStack" else Transformer(ModelArgs(dropout_p=0.0))

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x) if name == "MLPStack" else model(x[:, :-1]).flatten(0, 1)
        return (
            out.square().sum() if name == "MLPStack" else F.cross_entropy(out, x[:, 1:].flatten())
        )

    reference = make()
    model, optimizer = upstream.mlp_stack() if name == "MLPStack" else upstream.transformer(0.0)
    reference_optimizer = adamw(reference.parameters())

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = fz.capture(train_step)
    for batch in upstream.sequences() if name == "MLPStack" else upstream.tokens():
        reference_optimizer.zero_grad()
        expected = loss_of(reference, *batch)
        expected.backward()
        for p in reference.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        reference_optimizer.step()
        torch.testing.assert_close(captured(*batch), expected.detach())
        check_sharded_parity(TestCase(), reference, model)
    return captured.stats.replays


@pytest.mark.parametrize("name", ["MLPStack", "Transformer"])
def test_parity_with_a_replicated_model(name: str) -> None:
    for replays in run_on_ranks(parity, name):
        assert replays >= 5
