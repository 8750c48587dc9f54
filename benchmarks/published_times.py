"""Published training throughput of GPUs, against what a plan models for the same step from published efficiencies.

    python -m benchmarks.published_times [--only TEXT] [--json]

The shares of the peaks are those of `functionalize/cost/machines/presets.py`. One of them, `sustained`, is the
mean over the runs of MPT at length 2048 (published by modelled rate without it), so these are no test; nothing was
adjusted to the runs below them. `--alone` leaves it out: kernels as fast as when they run alone. The machine of
torchtitan's H100 runs is the card that they name (HBM2e of 2.4 TB/s, 500 W; the power limit is not modelled). Only
runs without torch.compile and without float8 are there. Of a model, 3 and 5 layers are planned, and the seconds of the
others follow from the difference.

    torchtitan     github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, and docs/performance.md
                   of August 2024 (A100): Llama in bfloat16, reduced in float32, AdamW, length 8192 (Llama 2: 4096)
    llm-foundry    github.com/mosaicml/llm-foundry, scripts/train/benchmarking: MPT, length 2048, full shards
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import functionalize as fz
from functionalize.cost.machines.efficiency import SUSTAINED
from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES

# torchtitan's H100: "96GB HBM2e with 2.4 TB/sec peak memory bandwidth".
HBM2E = replace(MACHINES["h100"], memory_bandwidth=2.4e12)
aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. gated: Llama, with rotary positions; else MPT, with learned ones and biases nowhere."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int
    gated: bool = True


@dataclass(frozen=True)
class Run:
    """A published run.

    saved: "all", "op" (every second matmul is recomputed) or "none". rate: tokens/s and GPU. test: whether nothing of
    the model follows from it; the others are the source of the presets' `sustained`.
    """

    name: str
    machine: Machine
    shape: Shape
    world: int
    batch: int
    length: int
    saved: str
    rate: float
    source: str
    test: bool = True


LLAMA3_8B = Shape(32, 4096, 14_336, 32, 8, 128_256)
LLAMA3_70B = Shape(80, 8192, 28_672, 64, 8, 128_256)
LLAMA2_13B = Shape(40, 5120, 13_824, 40, 40, 32_000)


def mpt(layers: int, width: int, heads: int) -> Shape:
    """A model of llm-foundry."""
    return Shape(layers, width, 4 * width, heads, heads, 50_368, gated=False)


TITAN, FOUNDRY = "torchtitan", "llm-foundry"
H100, A100 = MACHINES["h100"], MACHINES["a100"]
MPT_1B, MPT_3B = mpt(24, 2048, 16), mpt(32, 2560, 20)
MPT_7B, MPT_13B = mpt(32, 4096, 32), mpt(40, 5120, 40)
RUNS = (
    Run("MPT 1B, 16 H100", H100, MPT_1B, 16, 20, 2048, "all", 46037, FOUNDRY, False),
    Run("MPT 1B, 64 H100", H100, MPT_1B, 64, 20, 2048, "all", 44402, FOUNDRY, False),
    Run("MPT 7B, 8 H100", H100, MPT_7B, 8, 6, 2048, "all", 10643, FOUNDRY, False),
    Run("MPT 13B, 8 H100", H100, MPT_13B, 8, 2, 2048, "all", 4792, FOUNDRY, False),
    Run("MPT 13B, 64 H100", H100, MPT_13B, 64, 2, 2048, "all", 4800, FOUNDRY, False),
    Run("MPT 1B, 8 A100", A100, MPT_1B, 8, 14, 2048, "all", 20513, FOUNDRY, False),
    Run("MPT 3B, 8 A100", A100, MPT_3B, 8, 10, 2048, "all", 10811, FOUNDRY, False),
    Run("MPT 7B, 8 A100", A100, MPT_7B, 8, 6, 2048, "all", 4641, FOUNDRY, False),
    Run("MPT 13B, 8 A100", A100, MPT_13B, 8, 2, 2048, "all", 2262, FOUNDRY, False),
    Run("Llama 3.1 8B, 8 H100", HBM2E, LLAMA3_8B, 8, 2, 8192, "op", 5762, TITAN),
    Run("Llama 3.1 8B, 128 H100", HBM2E, LLAMA3_8B, 128, 2, 8192, "op", 5605, TITAN),
    Run("MPT 7B of length 8192, 8 H100", H100, MPT_7B, 8, 8, 8192, "none", 6935, FOUNDRY),
    Run("MPT 13B of length 4096, 8 H100", H100, MPT_13B, 8, 10, 4096, "none", 4717, FOUNDRY),
    Run("Llama 2 13B, 64 A100", A100, LLAMA2_13B, 64, 2, 4096, "all", 2162, TITAN),
    Run("Llama 3 8B, 64 A100", A100, LLAMA3_8B, 64, 1, 8192, "op", 2973, TITAN),
    Run("Llama 3 70B, 64 A100", A100, LLAMA3_70B, 64, 1, 8192, "none", 331, TITAN),
    Run("MPT 7B of length 8192, 8 A100", A100, MPT_7B, 8, 8, 8192, "none", 3206, FOUNDRY),
)


class Attention(nn.Module):
    """Grouped-query attention as torchtitan has it: keys repeated, rotary positions as complex float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.repeats = shape.width // shape.heads, shape.heads // shape.key_heads
        sizes = (shape.heads, shape.key_heads, shape.key_heads)
        self.parts = nn.ModuleList(
            nn.Linear(shape.width, heads * self.size, bias=False) for heads in sizes
        )
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in self.parts)
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        if self.repeats > 1:
            k, v = (t.repeat_interleave(self.repeats, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).contiguous().flatten(2))


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions by the multiplication of complex numbers, in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3).type_as(x)


class Block(nn.Module):
    """A layer of either family."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm
        if not shape.gated:
            norm = functools.partial(nn.LayerNorm, bias=False)
        self.norm1, self.norm2 = norm(shape.width), norm(shape.width)
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False) if shape.gated else None

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        if self.gate is None:
            return x + self.down(F.gelu(self.up(y)))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Tokens to the loss. saved: what a layer keeps for its backward."""

    def __init__(self, shape: Shape, saved: str, length: int) -> None:
        super().__init__()
        self.saved, self.size = saved, shape.width // shape.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width) if shape.gated else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer(
            "turns", torch.ones(length, self.size // 2, dtype=torch.complex64), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, turns = self.embedding(tokens), self.turns
        if self.positions is not None:
            x, turns = x + self.positions(torch.arange(tokens.size(1))), None
        for block in self.blocks:
            if self.saved == "all":
                x = block(x, turns)
            elif self.saved == "none":
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                contexts = functools.partial(create_selective_checkpoint_contexts, _op_policy())
                x = checkpoint(block, x, turns, use_reentrant=False, context_fn=contexts)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _op_policy() -> Callable[..., CheckpointPolicy]:
    """torchtitan's selective checkpointing "op": attention and every other matmul are saved."""
    counts = {False: 0, True: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = "scaled_dot_product" in str(func)
        if func is aten.mm.default:
            counts[ctx.is_recompute] += 1
            keep = counts[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def planned(run: Run, layers: int) -> tuple[float, float, float]:
    """Modelled seconds of a run with so many layers: the middle, the fastest, the slowest."""
    shape = replace(run.shape, layers=layers)

    def build() -> Any:
        model = Model(shape, run.saved, run.length)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def inputs() -> Any:
        return (torch.randint(0, shape.vocabulary, (run.batch, run.length)),)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    target = fz.planner.Target("cuda", capability=run.machine.capability, attention="flash")
    sweep = fz.plan(build, step, inputs=inputs, world=run.world, machine=run.machine, target=target)
    figures = sweep.plans[0].figures
    assert figures is not None
    fast, slow = figures.time_range
    return figures.time.seconds, fast, slow


def alone(machine: Machine) -> Machine:
    """The machine with kernels as fast as when they run alone."""
    curves = tuple(each for each in machine.efficiency.curves if each[0] != SUSTAINED)
    return replace(machine, efficiency=replace(machine.efficiency, curves=curves))


def predicted(run: Run) -> dict[str, Any]:
    """Tokens/s and GPU of a run: modelled, at both ends of the range, published."""
    few, more = (planned(run, layers) for layers in (3, 5))
    layers = run.shape.layers
    seconds, fast, slow = (a + (b - a) / 2 * (layers - 3) for a, b in zip(few, more, strict=True))
    tokens = run.batch * run.length
    return {
        "run": run.name,
        "source": run.source,
        "saved": run.saved,
        "test": run.test,
        "modelled": tokens / seconds,
        "range": [tokens / slow, tokens / fast],
        "published": run.rate,
        "error": tokens / seconds / run.rate - 1,
    }


def main() -> None:
    """Plan, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = [run for run in RUNS if args.only in f"{run.source} {run.name}"]
    if args.alone:
        runs = [replace(run, machine=alone(run.machine)) for run in runs]
    rows = [predicted(run) for run in runs]
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print("| run | source | modelled tokens/s and GPU | over the range | published | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        low, high = row["range"]
        print(
            f"| {row['run']} | {row['source']} | {row['modelled']:,.0f} | {low:,.0f} to {high:,.0f} | "
            f"{row['published']:,.0f} | {row['error']:+.0%} |"
        )
    for test, name in ((False, "source"), (True, "test")):
        found = [row for row in rows if row["test"] is test]
        if found:
            ratios = [row["published"] / row["modelled"] for row in found]
            near = sum(abs(row["error"]) <= 0.2 for row in found)
            inside = sum(row["range"][0] <= row["published"] <= row["range"][1] for row in found)
            share, ends = statistics.mean(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{name}: published by modelled rate {share:.3f} ({ends}),")
            print(f"{near} of {len(found)} within 20 %, {inside} inside of their range")


if __name__ == "__main__":
    main()
