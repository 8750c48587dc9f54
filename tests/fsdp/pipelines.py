"""Trainers with a schedule of torch.distributed.pipelining, beside their eager twins."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import functionalize as fz
from tests.allowance import ample_allowance
from tests.fsdp.models import Block

D, MICROBATCHES, CALLS = 8, 4, 16
# The last rank hands tensors on to itself.
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


class Trainer:
    """The stages of this rank under a schedule. sharded: over the other dimension of a mesh of 2 x 2 ranks.

    captured: the names of the methods that are.
    """

    captured = ("step",)

    def __init__(self, kind, sharded):
        group, shards = None, None
        if sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
            group, shards = mesh["pp"].get_group(), mesh["dp"]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.kind, self.group = getattr(schedules, kind), group
        self.is_multi = issubclass(self.kind, schedules.PipelineScheduleMulti)
        self.numbers = [rank, rank + ranks] if self.is_multi else [rank]
        if kind in V_SHAPED:
            self.numbers[1] = 2 * ranks - 1 - rank
        self.count = ranks * len(self.numbers)
        self.models = []
        for number in self.numbers:
            torch.manual_seed(number)
            model = nn.Sequential(Block(D), Block(D))
            if sharded:
                for block in model:
                    fully_shard(block, mesh=shards)
                fully_shard(model, mesh=shards)
            self.models.append(model)
        self.schedule = self.new_schedule()
        self.parameters = [p for model in self.models for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-2)

    def new_schedule(self, microbatches=MICROBATCHES):
        """A schedule with stages of its own, around the models of this rank."""
        cpu = torch.device("cpu")
        stages = [
            PipelineStage(
                model,
                number,
                self.count,
                cpu,
                group=self.group,
                **self.shapes(number, microbatches),
            )
            for model, number in zip(self.models, self.numbers, strict=True)
        ]
        return self.kind(
            stages if self.is_multi else stages[0], microbatches, loss_fn=nn.functional.mse_loss
        )

    def shapes(self, number, microbatches):
        """What a stage is told of its input and output: nothing, so that stages ask each other."""
        return {}

    def run(self, call, x, target):
        losses = []
        inputs = (x,) if 0 in self.numbers else ()
        is_last = self.count - 1 in self.numbers
        wanted = {"target": target, "losses": losses} if is_last else {}
        call(*inputs, return_outputs=False, **wanted)
        return torch.stack(losses).mean().detach() if losses else None

    def update(self):
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def call(self, number, x, target):
        return self.step(x, target)

    def step(self, x, target):
        loss = self.run(self.schedule.step, x, target)
        self.update()
        return loss


class Accumulating(Trainer):
    """Two runs of the schedule for one step of the optimizer, in one call."""

    def step(self, x, target):
        self.run(self.schedule.step, x.flip(0), target)
        return super().step(x, target)


class ByCalls(Trainer):
    """The same in two calls."""

    captured = ("runs",)

    def call(self, number, x, target):
        return self.runs(x, target, number % 2 == 1)

    def runs(self, x, target, is_last):
        loss = self.run(self.schedule.step, x, target)
        if is_last:
            self.update()
        return loss


class WithShortBatches(Trainer):
    """Some batches have half of the microbatches: torch fixes their number and sizes for a schedule."""

    def __init__(self, *args):
        super().__init__(*args)
        self.short = self.new_schedule(MICROBATCHES // 2)

    def call(self, number, x, target):
        return super().call(
            number, *(each[:4] if number % 5 == 4 else each for each in (x, target))
        )

    def step(self, x, target):
        loss = self.run((self.schedule if len(x) == 8 else self.short).step, x, target)
        self.update()
        return loss


class Evaluating(Trainer):
    """Every third batch is evaluated, too, by a schedule of its own."""

    captured = ("step", "evaluate")

    def __init__(self, *args):
        super().__init__(*args)
        self.for_evaluation = self.new_schedule()

    def call(self, number, x, target):
        evaluated = self.evaluate(x, target) if number % 3 == 2 else None
        loss = self.step(x, target)
        return loss if evaluated is None else loss + evaluated

    def evaluate(self, x, target):
        with torch.no_grad():
            return self.run(self.for_evaluation.eval, x, target)


class ForLong(WithShortBatches, Evaluating):
    """Short batches and evaluations in between."""

    def call(self, number, x, target):
        if number % 5 == 4:
            return self.step(x[:4], target[:4])
        return Evaluating.call(self, number, x, target)


class EvaluatingByTheSame(Evaluating):
    def __init__(self, *args):
        super().__init__(*args)
        self.for_evaluation = self.schedule


class ShapesGiven:
    """Stages that ask for no shapes: whether all do, their ranks find out by a tensor, of which each reads a number."""

    def shapes(self, number, microbatches):
        x = torch.empty(8 // microbatches, D, device="meta", requires_grad=True)
        return {"input_args": (x if number else x.detach(),), "output_args": (x,)}


class KnownShapes(ShapesGiven, Trainer):
    pass


class KnownShapesAndEvaluation(ShapesGiven, EvaluatingByTheSame):
    pass


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def are_equal(a, b):
    return (a is None and b is None) or torch.equal(a, b)


def trained(kind, sharded, made=Trainer, calls=CALLS, **options):
    """For each captured function, its share of replays among its calls, and what it explains."""
    eager, trainer = made(kind, sharded), made(kind, sharded)
    captured = []
    for name in made.captured:
        with ample_allowance():
            captured.append(fz.capture(getattr(trainer, name), **options))
        setattr(trainer, name, captured[-1])
    generator = torch.Generator().manual_seed(5 + (dist.get_rank() // 2 if sharded else 0))
    for number in range(calls):
        x, target = torch.randn(2, 8, D, generator=generator)
        assert are_equal(trainer.call(number, x, target), eager.call(number, x, target))
        ours, theirs = (map(local, each.parameters) for each in (trainer, eager))
        assert all(map(torch.equal, ours, theirs))
    stats = [each.stats for each in captured]
    shares = [s.replays / (s.replays + s.audits + s.captures + s.warmups + s.eager) for s in stats]
    return shares, "\n".join(each.explain() for each in captured)
