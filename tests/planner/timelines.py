"""Timelines and schedules of a real FSDP2 step, and of their shape at any depth, without running one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from benchmarks.capture import Transformer
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category
from functionalize.cost.machines.presets import MACHINES
from functionalize.ir.phases import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from functionalize.planner.report.rows import Span
from functionalize.planner.time.communication import members_of
from functionalize.planner.time.step_time import StepTime, step_time
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, Op, Timeline
from functionalize.program.program import Program
from tests.steps import make_loss_step


class Maker:
    """Makes and frees allocations, op by op."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []

    def op(self, name: str, phase: str, module: str = "") -> int:
        """The next op."""
        line = f"model.py:{40 + len(module)}" if module else ""
        self.ops.append(Op(name, phase, module, line))
        return len(self.ops) - 1

    def make(self, nbytes: int, category: Category, name: str, padding: int = 0) -> Allocation:
        """An allocation by the current op; before the first, by none."""
        op = len(self.ops) - 1 if self.ops else BEFORE
        made = Allocation(nbytes, category, name, op, None, op, f"bf16[{nbytes // 2}]", padding)
        self.allocations.append(made)
        self.events.append(Event(op, made, True))
        return made

    def free(self, allocation: Allocation) -> None:
        """The current op frees it."""
        op = len(self.ops) - 1
        allocation.freed = allocation.last_use = op
        self.events.append(Event(op, allocation, False))

    def timeline(self, name: str) -> Timeline:
        """What was made."""
        return Timeline(name, self.ops, self.allocations, self.events)


class Step(Maker):
    """A checkpointed transformer, `small` temporaries per layer and pass; `scale` bytes per unit."""

    def __init__(
        self, layers: int, small: int = 4, scale: int = 1 << 20, early: bool = False
    ) -> None:
        super().__init__()
        self.small, self.scale, self.early = small, scale, early
        for layer in range(layers):
            self.make(4 * scale, Category.SHARDED_PARAMETERS, f"layers.{layer}.w", scale // 8)
            self.make(8 * scale, Category.OPTIMIZER_STATE, f"layers.{layer}.w: exp_avg")
        self.make(scale, Category.BUFFERS, "rope.cache")
        self.make(scale // 2, Category.INPUTS, "tokens")
        self.make(5056, Category.RNG_STATE, "generator")
        self.saved = [self.forward(layer) for layer in range(layers)]
        self.op("aten.nll_loss_forward.default", FORWARD, "loss")
        logits = self.make(60 * scale, Category.SAVED_ACTIVATIONS, "logits")
        self.op("aten._log_softmax_backward_data.default", BACKWARD, "loss")
        gradient = self.make(60 * scale, Category.TEMPORARIES, "grad of logits")
        self.free(logits)
        if early:
            self.free(gradient)
        self.gradients = [self.backward(layer) for layer in reversed(range(layers))]
        if not early:
            self.free(gradient)
        self.optimizer()

    def gather(self, layer: int, phase: str) -> Allocation:
        """The all-gather of a layer's weights: its buffer is freed when they are copied out."""
        self.op("c10d.allgather_", phase, f"layers.{layer}")
        buffer = self.make(32 * self.scale, Category.ALL_GATHER_BUFFERS, f"layers.{layer}: buffer")
        self.op("fsdp.split_with_sizes_copy.default", phase, f"layers.{layer}")
        full = self.make(32 * self.scale, Category.UNSHARDED_PARAMETERS, f"layers.{layer}.w: full")
        self.free(buffer)
        return full

    def inside(self, layer: int, phase: str, category: Category) -> None:
        """Small temporaries, each with scratch, the next made before the last one is freed."""
        last = None
        for i in range(self.small):
            self.op("aten.mm.default" if i % 2 else "aten.mul.Tensor", phase, f"layers.{layer}.mlp")
            new = self.make((3 + i % 5) * self.scale, category, f"layers.{layer}.mlp: tmp {i}")
            self.free(self.make(self.scale, Category.SCRATCH, "workspace"))
            if last is not None:
                self.free(last)
            last = new
        if last is not None:
            self.free(last)

    def forward(self, layer: int) -> Allocation:
        """Unshard, run, keep the block's input, reshard."""
        full = self.gather(layer, FORWARD)
        saved = self.make(6 * self.scale, Category.SAVED_ACTIVATIONS, f"layers.{layer}: input")
        self.inside(layer, FORWARD, Category.TEMPORARIES)
        self.free(full)
        return saved

    def backward(self, layer: int) -> Allocation:
        """Unshard, run again, differentiate, reduce."""
        full = self.gather(layer, BACKWARD)
        self.op("aten.mm.default", RECOMPUTE, f"layers.{layer}")
        again = self.make(24 * self.scale, Category.RECOMPUTED, f"layers.{layer}: again")
        self.inside(layer, RECOMPUTE, Category.RECOMPUTED)
        self.op("aten.mm.default", BACKWARD, f"layers.{layer}")
        grads = self.make(
            32 * self.scale, Category.UNSHARDED_GRADIENTS, f"layers.{layer}.w.grad: full"
        )
        self.inside(layer, BACKWARD, Category.TEMPORARIES)
        self.free(again)
        self.free(full)
        self.free(self.saved[layer])
        self.op("c10d.reduce_scatter_", BACKWARD, f"layers.{layer}")
        buffer = self.make(
            32 * self.scale, Category.REDUCE_SCATTER_BUFFERS, f"layers.{layer}: grads"
        )
        self.free(grads)
        shard = self.make(4 * self.scale, Category.SHARDED_GRADIENTS, f"layers.{layer}.w.grad")
        self.free(buffer)
        return shard

    def optimizer(self) -> None:
        """A foreach update: a temporary per layer, all at once."""
        self.op("aten._foreach_sqrt.default", OPTIMIZER)
        roots = [
            self.make(4 * self.scale, Category.TEMPORARIES, f"sqrt {i}")
            for i, _ in enumerate(self.gradients)
        ]
        self.op("aten._foreach_addcdiv_.Scalar", OPTIMIZER)
        for root in roots:
            self.free(root)
        self.op("zero_grad", OPTIMIZER)
        for gradient in self.gradients:
            self.free(gradient)


def step_of(layers: int, small: int = 4, scale: int = 1 << 20) -> list[Timeline]:
    """The same step with eager's lifetimes and with the program's."""
    return [
        Step(layers, small, scale).timeline("eager"),
        Step(layers, small, scale, early=True).timeline("program"),
    ]


@cache
def large() -> list[Timeline]:
    """One with more than 100,000 events and the depth of a model of 405 billion parameters."""
    return step_of(126, small=66, scale=1 << 25)


class Captured(NamedTuple):
    """Two timelines and the program of a step that was captured. groups: the ranks of its process groups."""

    eager: Timeline
    program: Timeline
    step: Program
    groups: Mapping[str, Sequence[int]]


@cache
def captured() -> Captured:
    """A checkpointed transformer under FSDP2 with mixed precision."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with fake_process_group(0, 4):
        torch.manual_seed(0)
        model = Transformer(2, 16)
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        found = fz.capture(make_loss_step(model, optimizer), memory=True)
        for _ in range(3):
            found(torch.randint(0, 64, (2, 8)))
        assert found.stats.replays
        program, memory = found.program, found.memory
        return Captured(memory.eager, memory.program, program, members_of(program))


@cache
def real() -> tuple[Timeline, Timeline, StepTime]:
    """Eager, program, schedule of that step."""
    found = captured()
    time = step_time(found.step, MACHINES["h100"], groups=found.groups)
    return found.eager, found.program, time


def schedule_of(layers: int, small: int = 4) -> list[Span]:
    """A schedule with prefetched all-gathers, of which part is exposed."""
    spans: list[Span] = []
    compute = gather = scatter = 0.0
    for phase, order in ((FORWARD, range(layers)), (BACKWARD, reversed(range(layers)))):
        for layer in order:
            module = f"layers.{layer}"
            start = max(gather, compute - 4e-3)
            gather = start + 3e-3 + (4e-3 if layer % 5 == 0 else 0)
            spans.append(
                Span(
                    "all-gather 0", "all_gather_into_tensor", start, gather, phase, module, 32 << 20
                )
            )
            compute = max(compute, gather)
            for i in range(small):
                end = compute + (1 if phase == FORWARD else 2) * 4e-3 / small
                spans.append(Span("compute", f"mm_{i}", compute, end, phase, f"{module}.mlp"))
                compute = end
            if phase == BACKWARD:
                start = max(scatter, compute)
                scatter = start + 5e-3
                spans.append(
                    Span(
                        "reduce-scatter 0",
                        "reduce_scatter_tensor",
                        start,
                        scatter,
                        phase,
                        module,
                        32 << 20,
                    )
                )
    start = max(scatter, compute)
    spans.append(Span("compute", "_fused_adamw_", start, start + 1e-3 * layers, OPTIMIZER))
    return spans
