"""The main job: a Hugging Face Llama under FSDP2, captured as one functional graph and replayed bit for bit.

    make demo                                  or: python -m examples.demo --layers 4 --steps 8

Starts two gloo processes. Each builds the same model twice (random weights), wraps both layer by layer with
`fully_shard`, trains one twin eagerly and the other through `functionalize.capture`, and compares losses,
parameters and optimizer states bit by bit after every step. No line of FSDP2 or of the model is changed.
Then a few features of `docs/features.md` are run the same way, with the code of their tests.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
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

WORLD = 2


@dataclass(frozen=True)
class Options:
    """Sizes of the model, and how many steps to compare and to time."""

    layers: int = 4
    hidden: int = 64
    batch: int = 2
    sequence: int = 32
    steps: int = 8
    timed: int = 15
    out: str = "build/demo_program.txt"


def build(options: Options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama with random weights, sharded layer by layer, and its optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=options.sequence,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """An ordinary training step."""

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """This rank's shard of every parameter and optimizer state."""

    def local(t: Any) -> Tensor:
        return t.to_local() if hasattr(t, "to_local") else t

    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return {
        "parameters": [local(p.detach()) for p in model.parameters()],
        "optimizer": [local(v) for s in states for v in s.values()],
    }


def bits_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit on every rank."""
    same = len(a) == len(b) and all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        if x.dim()
        else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )
    flag = torch.tensor(int(same))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def compare(options: Options, say: Callable[[str], None]) -> tuple[Any, Any, Any]:
    """Train both twins and print them side by side; returns eager step, captured step, batches."""
    model_a, optimizer_a = build(options)
    model_b, optimizer_b = build(options)
    eager = training_step(model_a, optimizer_a)
    step_b = training_step(model_b, optimizer_b)
    captured = fz.capture(step_b, passes="default", allowance=None)  # the second call is kept
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> Tensor:
        return torch.randint(0, 256, (options.batch, options.sequence), generator=generator)

    say(f"{'step':>4}  {'eager loss':>11}  {'ours':>11}  {'ran as':<9} bitwise equal on both ranks")
    failures = 0
    stats = captured.stats
    while stats.replays + stats.audits < options.steps:
        before, audits = (stats.warmups, stats.captures), stats.audits
        tokens = batch()
        loss_a, loss_b = eager(tokens), captured(tokens)
        a, b = state(model_a, optimizer_a), state(model_b, optimizer_b)
        equal = {"loss": bits_equal([loss_a], [loss_b])}
        equal |= {key: bits_equal(a[key], b[key]) for key in a}
        failures += not all(equal.values())
        kind = "replay" if stats.audits == audits else "audit"
        if (stats.warmups, stats.captures) != before:
            kind = "capture" if stats.captures > before[1] else "warm-up"
        shown = ", ".join(f"{k}: {'yes' if v else 'NO'}" for k, v in equal.items())
        step = stats.warmups + stats.captures + stats.replays + stats.audits - 1
        say(f"{step:>4}  {loss_a:>11.7f}  {loss_b:>11.7f}  {kind:<9} {shown}")
    if failures:
        raise SystemExit(f"{failures} steps were not bitwise equal")
    return eager, captured, batch


def timing(eager: Any, captured: Any, batch: Any, runs: int) -> tuple[float, float]:
    """Median seconds of an eager step and of a replay, interleaved."""
    times: dict[str, list[float]] = {"eager": [], "replay": []}
    for _ in range(runs):
        tokens = batch()
        for name, step in (("eager", eager), ("replay", captured)):
            dist.barrier()
            start = time.perf_counter()
            step(tokens)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return statistics.median(times["eager"]), statistics.median(times["replay"])


def excerpt(text: str, lines: int = 14) -> str:
    """The first all-gather of a program and what follows it, and the end."""
    rows = text.splitlines()
    start = next(i for i, row in enumerate(rows) if "all_gather" in row)
    cut = [row if len(row) < 110 else row[:107] + "..." for row in rows]
    return "\n".join([*cut[start - 2 : start + lines], "    ...", *cut[-4:]])


def report(captured: Any, options: Options, say: Callable[[str], None]) -> None:
    """What was captured, and the program itself."""
    stats, program = captured.stats, captured.program
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(stats.collectives.items()))
    text = program.print_readable(print_output=False)
    say("\nWhat was captured")
    say(f"  ops seen               {stats.ops}")
    say(f"  resizes recorded       {stats.resizes} (none is left in the program)")
    say(f"  nodes                  {stats.nodes_recorded} before passes, {stats.nodes} after")
    for line in program.history:
        say(f"  pass                   {line}")
    say(f"  collectives            {kinds}")
    say(f"  inputs                 {stats.inputs}, found again at every call by where they live")
    guards = Counter(type(guard).__name__ for guard in (*program.facts, *program.guards))
    say(f"  guards                 {', '.join(f'{n} {kind}' for kind, n in guards.items())}")
    say(f"  epilogue               {len(program.epilogue)} actions")
    if dist.get_rank() == 0:
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    say(f"\nThe program is in {options.out} ({len(text.splitlines())} lines); an excerpt:\n")
    say(excerpt(text))


QUICK = (
    "nested",
    "uneven_shards",
    "keep_unsharded",
    "bf16",
    "cpu_offload",
    "no_sync",
    "tied_in_a_group",
    "frozen_block",
    "two_forwards",
    "clip_grad_norm",
    "gathered_in_int8",
    "no_grad",
)


def features(say: Callable[[str], None]) -> None:
    """A quick part of the table of features: each captured, replayed, compared with an eager twin."""
    from tests.fsdp.features import FEATURES, GROUPS
    from tests.fsdp.twins import compare_twins

    say(f"\nFeatures ({len(QUICK)} of {len(FEATURES)} rows; all: make test ARGS=tests/fsdp)")
    chosen = [(g, rows[name]) for name in QUICK for g, rows in GROUPS.items() if name in rows]
    for group, row in chosen:
        verdict = compare_twins(row.build, row.make_step, row.batches())
        equal = torch.tensor(int(not verdict.differences))
        dist.all_reduce(equal, dist.ReduceOp.MIN)
        say(
            f"  {'✓' if equal else '✗'} {group + ':':<16} {row.title:<42} "
            f"{verdict.replays} replays, {verdict.captures} capture(s)"
        )
        if not equal:
            raise SystemExit(f"{row.title}: {verdict.differences[:5]}")


def run(rank: int, rendezvous: str, options: Options) -> None:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=WORLD)
    say = print if rank == 0 else (lambda line: None)
    say(
        f"Llama: {options.layers} layers, hidden size {options.hidden}, "
        f"{options.batch} x {options.sequence} tokens per rank; torch {torch.__version__}, "
        f"{WORLD} gloo ranks, {os.cpu_count()} cores\n"
    )
    eager, captured, batch = compare(options, say)
    report(captured, options, say)
    a, b = timing(eager, captured, batch, options.timed)
    say(
        f"\nTime per step (median of {options.timed}, interleaved): "
        f"eager {a * 1e3:.1f} ms, replay {b * 1e3:.1f} ms, ratio {b / a:.2f}"
    )
    features(say)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the options and start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in vars(Options()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = Options(**vars(parser.parse_args()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (os.path.join(folder, "rendezvous"), options), nprocs=WORLD)


if __name__ == "__main__":
    main()
