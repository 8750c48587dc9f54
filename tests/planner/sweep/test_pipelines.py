"""Plans of pipelines: all stages from one of them, bubbles by hand, schedules of torch, refusals with what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import functionalize as fz
from functionalize.cost.machines.efficiency import Efficiency
from functionalize.cost.machines.machine import Machine
from functionalize.errors import PlanError
from functionalize.planner.sweep.summary import Sweep

WIDTH, STAGES = 64, 4
# Messages take no time, so that only the other ranks' work is waited for.
FREE_LINKS = Machine(1e9, 1e12, 1e15, 0.0, 0.0)


def by_hand(microbatches: int = 6, batch: int = 32) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def batches(batch: int = 32) -> Tensor:
    return torch.ones(batch, WIDTH)


def forwards(
    model: nn.Module, tokens: Tensor, microbatches: int = 6, batch: int = 32
) -> list[Tensor]:
    """Every stage computes each microbatch and hands it on."""
    rank, sent, made = dist.get_rank(), [], []
    with torch.no_grad():
        for _ in range(microbatches):
            x = tokens
            if rank:
                x = torch.empty(batch, WIDTH)
                dist.recv(x, rank - 1)
            made.append(model(x))
            if rank < STAGES - 1:
                sent.append(dist.isend(made[-1], rank + 1))
    for work in sent:
        work.wait()
    return made


def planned(**keys) -> Sweep:
    options = {"world": STAGES, "machine": FREE_LINKS, "inputs": batches, "stages": True, **keys}
    return fz.plan(by_hand, forwards, **options)


@pytest.mark.parametrize("rank", [0, 2])
def test_all_stages_are_planned_from_one_and_wait_as_by_hand(rank: int) -> None:
    rows = planned(rank=rank, microbatches=6).rows()
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    alone = planned(stages=False, microbatches=6).rows()[0]
    one = alone["step"] / 6
    for row in rows:
        assert row["step"] == pytest.approx((6 + STAGES - 1) * one)
        assert row["waiting"] == pytest.approx((STAGES - 1) * one)


def test_the_slowest_link_decides_where_nothing_else_does() -> None:
    slow = replace(FREE_LINKS, link_bandwidth=32 * WIDTH * 4 / 1.0)  # a second for each message
    rows = planned(microbatches=5, machine=slow).rows()
    # The last message is the fifth of the last pair of ranks; those of different pairs move at the same time.
    assert rows[0]["step"] == pytest.approx(5 + STAGES - 2, rel=0.01)


def test_ranks_of_a_grid_wait_for_each_other_and_some_of_them_do_not() -> None:
    every = planned(stages=False, grid={"rank": [3, 1, 0, 2]})
    assert {row["step"] for row in every.rows()} == {planned().rows()[0]["step"]}
    some = planned(stages=False, grid={"rank": [0, 1]})
    assert all("waiting" not in row for row in some.rows())
    assert "(rank 2 is one): plan these, by `stages=True`" in some.text()


def test_the_largest_fits_on_all_stages() -> None:
    sweep = planned(batch=2**12)
    devices = [row["device"] for row in sweep.rows()]
    assert min(devices) < max(devices)
    limit = max(devices)
    best = sweep.largest("batch", limit, low=2**12, most=2**12 + 64)
    after = [row["device"] for row in planned(batch=best + 1).rows()]
    assert best >= 2**12 and max(after) > limit


# -- schedules of torch ----------------------------------------------------------------------------


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def build(schedule="1f1b", microbatches=8, batch=4096, shapes=True):
    mesh = init_device_mesh("cpu", (STAGES, 2), mesh_dim_names=("pp", "dp"))
    pipe, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()

    def stage(number: int, count: int) -> tuple[nn.Module, PipelineStage]:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8 // count)])
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
        x = torch.empty(batch // microbatches, WIDTH, device="meta", requires_grad=True)
        known = {"input_args": (x if number else x.detach(),), "output_args": (x,)}
        own = PipelineStage(
            model, number, count, torch.device("cpu"), group=pipe, **(known if shapes else {})
        )
        return model, own

    if schedule == "interleaved":
        models, stages = zip(*(stage(n, 2 * STAGES) for n in (rank, rank + STAGES)), strict=True)
        made = ScheduleInterleaved1F1B([*stages], microbatches, loss_fn=loss_of)
    else:
        model, own = stage(rank, STAGES)
        models, made = (model,), Schedule1F1B(own, microbatches, loss_fn=loss_of)
    return nn.ModuleList(models), made, rank


def inputs(batch=4096) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def step(models, schedule_of, rank, x, target):
    last = {"target": target, "return_outputs": False} if rank == STAGES - 1 else {}
    schedule_of.step(*((x,) if rank == 0 else ()), **last)
    for parameter in models.parameters():
        parameter.grad = None


# The first layer computes no gradient of its input: less work than the others have.
@pytest.mark.parametrize("schedule, virtual", [("1f1b", 1), ("interleaved", 2)])
def test_bubbles_are_those_of_the_schedule(schedule: str, virtual: int) -> None:
    machine = replace(FREE_LINKS, efficiency=Efficiency())
    sweep = fz.plan(
        build,
        step,
        inputs=inputs,
        world=2 * STAGES,
        machine=machine,
        schedule=schedule,
        stages=True,
    )
    assert [row["rank"] for row in sweep.rows()] == [0, 2, 4, 6]
    for row in sweep.rows()[1:]:
        bubble = row["waiting"] / (row["step"] - row["waiting"])
        assert bubble == pytest.approx((STAGES - 1) / (virtual * 8), rel=0.15)


def test_stages_that_would_ask_each_other_for_shapes_are_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="inputs metadata required"):
        fz.plan(build, step, inputs=inputs, world=2 * STAGES, rank=2, shapes=False)


def test_messages_that_nobody_receives_are_named() -> None:
    def lonely(model: nn.Module) -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(4), 1).wait()
        else:
            dist.isend(torch.ones(4), 0).wait()

    with pytest.raises(PlanError, match="one message, `send to rank 1`, has no other half"):
        _ = fz.plan(by_hand, lonely, world=2, stages=True).rows()
