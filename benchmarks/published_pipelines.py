"""Published pipelines on GPUs: what interleaving gains, published and in a plan of all stages.

    python -m benchmarks.published_pipelines [--layers N] [--microbatches 8]

    torchtitan     github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5: Llama 3.1
                   405B on 512 H100 (8 stages, FSDP over 8, tensor parallelism over 8), 32 sequences of 8192 a
                   replica, all layers recomputed: 100 tokens/s and GPU by 1F1B, 128 by Interleaved1F1B

These runs have torch.compile, float8 and asynchronous tensor parallelism, which a plan of an eager step has not: their
ratio is compared, not their rates. Microbatches were not published; the trainer of that time makes as many as there are
stages. Layers beyond a multiple of the stages (126 of 16) are left out.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from benchmarks.published_times import HBM2E, Block, Shape
from functionalize.util.text import human_bytes, human_seconds

STAGES, SHARDS, TENSOR, BATCH, LENGTH = 8, 8, 8, 32, 8192
LLAMA3_405B = Shape(126, 16_384, 53_248, 128, 8, 128_256)
PUBLISHED = {"1F1B": 100.0, "Interleaved1F1B": 128.0}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAN = {
    **{f"attention.parts.{n}": ColwiseParallel() for n in range(3)},
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "gate": ColwiseParallel(),
    "down": RowwiseParallel(),
}


class Stage(nn.Module):
    """Some layers of the model; the first stage has the embedding, the last one the head."""

    def __init__(self, layers: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        shape, size = LLAMA3_405B, LLAMA3_405B.width // LLAMA3_405B.heads
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if is_first else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.width) if is_last else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if is_last else None
        turns = torch.ones(LENGTH, size // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, self.turns, use_reentrant=False)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def build(schedule: str, layers: int, microbatches: int) -> Any:
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh("cpu", (STAGES, SHARDS, TENSOR), mesh_dim_names=names)
    pipe, own = mesh["pp"], mesh["pp"].get_local_rank()
    numbers = [own] if schedule == "1F1B" else [own, own + STAGES]
    count, stages, models = STAGES * len(numbers), [], []
    rows = BATCH // microbatches
    hidden = torch.empty(
        rows, LENGTH, LLAMA3_405B.width, device="meta", dtype=torch.bfloat16, requires_grad=True
    )
    tokens = torch.empty(rows, LENGTH, device="meta", dtype=torch.int64)
    logits = torch.empty(
        rows, LENGTH, LLAMA3_405B.vocabulary, device="meta", dtype=torch.bfloat16
    ).requires_grad_()
    for number in numbers:
        model = Stage(layers // count, number == 0, number == count - 1)
        outer: dict[str, Any] = {}
        if number == 0:
            outer["embedding"] = RowwiseParallel(input_layouts=Replicate())
        if number == count - 1:
            outer["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], outer)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"], mp_policy=BF16, reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], mp_policy=BF16, reshard_after_forward=False)
        taken = tokens if number == 0 else hidden
        made = logits if number == count - 1 else hidden
        stages.append(
            PipelineStage(
                model,
                number,
                count,
                torch.device("cpu"),
                input_args=(taken,),
                output_args=(made,),
                group=pipe.get_group(),
            )
        )
        models.append(model)
    if schedule == "1F1B":
        plan: Any = Schedule1F1B(stages[0], microbatches, loss_fn=loss_of)
    else:
        plan = ScheduleInterleaved1F1B(stages, microbatches, loss_fn=loss_of)
    modules = nn.ModuleList(models)
    return modules, torch.optim.AdamW(modules.parameters(), lr=1e-4, fused=True), plan, own


def inputs() -> Tensor:
    return torch.randint(0, LLAMA3_405B.vocabulary, (BATCH, LENGTH))


def step(
    modules: nn.Module, optimizer: torch.optim.Optimizer, plan: Any, own: int, tokens: Tensor
) -> None:
    last = {"target": tokens, "return_outputs": False} if own == STAGES - 1 else {}
    plan.step(*((tokens,) if own == 0 else ()), **last)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Plan both schedules on all stages, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=LLAMA3_405B.layers // 16 * 16)
    parser.add_argument("--microbatches", type=int, default=STAGES)
    args = parser.parse_args()
    target = fz.planner.Target("cuda", capability=HBM2E.capability, attention="flash")
    sweep = fz.plan(
        build,
        step,
        {"schedule": list(PUBLISHED)},
        inputs=inputs,
        world=STAGES * SHARDS * TENSOR,
        machine=HBM2E,
        target=target,
        layers=args.layers,
        microbatches=args.microbatches,
        stages=True,
    )
    for note in sweep.notes():
        print(note)
    print("| schedule | rank | peak | step | waiting |\n| --- | --- | --- | --- | --- |")
    seconds = {}
    for row in sweep.rows(program=False):
        schedule, waits = row["schedule"], f"{row['waiting'] / row['step']:.0%}"
        seconds[schedule] = row["step"]
        peak, time = human_bytes(row["peak"]), human_seconds(row["step"])
        print(f"| {schedule} | {row['rank']} | {peak} | {time} | {waits} |")
    modelled = seconds["1F1B"] / seconds["Interleaved1F1B"]
    published = PUBLISHED["Interleaved1F1B"] / PUBLISHED["1F1B"]
    print(f"what interleaving gains: modelled {modelled:.2f}, published {published:.2f}")


if __name__ == "__main__":
    main()
