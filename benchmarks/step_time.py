"""The time of a training step, on two gloo ranks: eager FSDP2, and its captured step.

    python -m benchmarks.step_time [--only NAME ...] [--runs 20] [--device cuda] [--json]

    eager       FSDP2 as it is
    layers      FSDP2, each layer under torch.compile
    boxed       fz.capture(step)
    default     fz.capture(step, passes="default")
    fast        fz.capture(step, passes="fast")
    inductor    fz.capture(step, passes="fast", compile="inductor")

Every way has its own model with the same weights and fused AdamW; the ways alternate step by step. Medians, and
ratios to eager. `--device cuda` uses one NCCL rank and adds `cudagraphs`; it has not been run on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.capture import VOCABULARY, Transformer
from benchmarks.machine import machine

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its batch. family: `llama` and `gpt2` of Hugging Face, or the transformer of `benchmarks.capture`."""

    layers: int
    width: int
    batch: int
    sequence: int
    family: str = "transformer"

    def model(self) -> tuple[nn.Module, list[nn.Module]]:
        """The model with random weights, and its layers."""
        torch.manual_seed(0)
        if self.family == "transformer":
            transformer = Transformer(self.layers, self.width)
            return transformer, list(transformer.blocks)
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        if self.family == "gpt2":
            gpt2 = GPT2LMHeadModel(
                GPT2Config(
                    n_embd=self.width,
                    n_layer=self.layers,
                    n_head=4,
                    vocab_size=VOCABULARY,
                    n_positions=self.sequence,
                )
            )
            return gpt2, list(gpt2.transformer.h)
        config = LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=self.sequence,
        )
        llama = LlamaForCausalLM(config)
        return llama, list(llama.model.layers)

    def step(self, device: str, compile_layers: bool) -> Step:
        """A training step under FSDP2, one unit for each layer and one for the rest."""
        return self.training(*self.sharded(device, compile_layers))

    def sharded(
        self, device: str, compile_layers: bool = False
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model under FSDP2, and its optimizer."""
        model, layers = self.model()
        model.to(device)
        for layer in layers:
            if compile_layers:
                layer.compile()
            fully_shard(layer)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss(self, model: nn.Module) -> Step:
        """The loss of a batch."""
        if self.family == "transformer":
            return model
        return lambda tokens: model(input_ids=tokens, labels=tokens).loss

    def training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        zeros_first: bool = False,
        loss_of: Step | None = None,
    ) -> Step:
        """A training step of a model that is wrapped already. zeros_first: `zero_grad` comes first, not last."""
        loss_of = loss_of or self.loss(model)

        def step(tokens: Tensor) -> Tensor:
            if zeros_first:
                optimizer.zero_grad()
            loss = loss_of(tokens)
            loss.backward()
            optimizer.step()
            if not zeros_first:
                optimizer.zero_grad()
            detached: Tensor = loss.detach()
            return detached

        return step


SUBJECTS = {
    "overhead, 4 layers": Subject(4, 128, 2, 16),
    "overhead, 16 layers": Subject(16, 128, 2, 16),
    "compute, width 512": Subject(4, 512, 4, 64),
    "Llama, 4 layers": Subject(4, 128, 2, 32, "llama"),
}
WAYS: dict[str, Callable[[Subject, str], Step]] = {
    "eager": lambda s, device: s.step(device, False),
    "layers": lambda s, device: s.step(device, True),
    "boxed": lambda s, device: fz.capture(s.step(device, False), audit=False),
    "default": lambda s, device: fz.capture(  # allowance: all is recorded at once
        s.step(device, False), passes="default", audit=False, allowance=None
    ),
    "fast": lambda s, device: fz.capture(s.step(device, False), passes="fast", audit=False),
    "inductor": lambda s, device: fz.capture(
        s.step(device, False), passes="fast", compile="inductor", audit=False
    ),
    "cudagraphs": lambda s, device: fz.capture(
        s.step(device, False), passes="fast", compile="cudagraphs", audit=False
    ),
}


def measure(subject: Subject, device: str, runs: int) -> dict[str, float]:
    """Median seconds of a step in every way; all have trained equally long."""
    names = [name for name in WAYS if device == "cuda" or name != "cudagraphs"]
    steps = {name: WAYS[name](subject, device) for name in names}
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-5, runs):
        tokens = torch.randint(
            VOCABULARY, (subject.batch, subject.sequence), generator=generator
        ).to(device)
        gc.collect()
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens).item()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    for name, step in steps.items():
        stats: Any = getattr(step, "stats", None)
        assert stats is None or stats.replays >= runs, f"{name} did not replay"
    return {name: statistics.median(each) for name, each in times.items()}


def run(rank: int, folder: str, names: list[str], device: str, world: int, runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {name: measure(SUBJECTS[name], device, runs) for name in names}
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def table(results: dict[str, dict[str, float]]) -> str:
    """A row for each model: eager's milliseconds, and the other ways' ratios to it."""
    ways = [name for name in next(iter(results.values())) if name != "eager"]
    rows = [f"{'':<20} {'eager ms':>9} " + " ".join(f"{way:>10}" for way in ways)]
    for name, times in results.items():
        ratios = " ".join(f"{times[way] / times['eager']:10.2f}" for way in ways)
        rows.append(f"{name:<20} {times['eager'] * 1e3:9.1f} {ratios}")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = 1 if args.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args.only, args.device, world, args.runs), nprocs=world)
        results = json.loads(Path(folder, "results.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "ranks": world, "seconds": results}))
        return
    print(machine())
    print(f"{world} ranks, one thread each; ratios to eager FSDP2")
    print(table(results))


if __name__ == "__main__":
    main()
