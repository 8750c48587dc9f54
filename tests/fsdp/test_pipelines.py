"""Schedules of torch.distributed.pipelining in captured steps, their stages under FSDP2 or not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import functionalize as fz
from tests.fsdp.models import Block
from tests.ranks import run_on_ranks

D, MICROBATCHES, CALLS = 8, 4, 16


class Trainer:
    """The stages of this rank under a schedule. sharded: over the other dimension of a mesh of 2 x 2 ranks."""

    def __init__(self, kind, sharded):
        group, shards = None, None
        if sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
            group, shards = mesh["pp"].get_group(), mesh["dp"]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        schedule = getattr(schedules, kind)
        is_multi = issubclass(schedule, schedules.PipelineScheduleMulti)
        numbers = [rank, rank + ranks] if is_multi else [rank]
        count = ranks * len(numbers)
        self.models, self.is_first, self.is_last = [], 0 in numbers, count - 1 in numbers
        for number in numbers:
            torch.manual_seed(number)
            model = nn.Sequential(Block(D), Block(D))
            if sharded:
                for block in model:
                    fully_shard(block, mesh=shards)
                fully_shard(model, mesh=shards)
            self.models.append(model)
        cpu = torch.device("cpu")
        stages = [
            PipelineStage(model, number, count, cpu, group=group)
            for model, number in zip(self.models, numbers, strict=True)
        ]
        self.schedule = schedule(
            stages if is_multi else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
        )
        self.parameters = [p for model in self.models for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-2)

    def step(self, x, target):
        self.optimizer.zero_grad()
        losses = []
        inputs = (x,) if self.is_first else ()
        wanted = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, return_outputs=False, **wanted)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def trained(kind, sharded, **options):
    eager, trainer = Trainer(kind, sharded), Trainer(kind, sharded)
    step = fz.capture(trainer.step, **options)
    generator = torch.Generator().manual_seed(5 + (dist.get_rank() // 2 if sharded else 0))
    for _ in range(CALLS):
        x, target = torch.randn(2, 8, D, generator=generator)
        loss, wanted = step(x, target), eager.step(x, target)
        assert (loss is None and wanted is None) or torch.equal(loss, wanted)
        ours, theirs = (map(local, each.parameters) for each in (trainer, eager))
        assert all(map(torch.equal, ours, theirs))
    return step.stats.replays, step.explain()


def sharded(kind, passes):
    return trained(kind, True, passes=passes)


def split():
    return trained("ScheduleInterleavedZeroBubble", False, audit=False)


KINDS = ["ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS", "ScheduleInterleaved1F1B"]
SHARDED = ["Schedule1F1B", "ScheduleInterleaved1F1B"]
TABLE = [(KINDS, ""), (SHARDED, ", stages under `fully_shard` on a 2×2 mesh")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule(kind):
    """The first call exchanges shapes, and is a warm-up."""
    for replays, text in run_on_ranks(trained, kind, False, world=2):
        assert replays >= 0.7 * CALLS, text


def test_a_schedule_that_splits_the_backward():
    """Gradients stay on the stages' buffers. Eager runs those of weights in an order that audits find to vary."""
    for replays, text in run_on_ranks(split, world=2):
        assert replays >= 0.7 * CALLS, text


@pytest.mark.long
@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("kind", SHARDED)
def test_a_schedule_of_sharded_stages(kind, passes):
    for replays, text in run_on_ranks(sharded, kind, passes, world=4):
        assert replays >= 0.7 * CALLS, text
