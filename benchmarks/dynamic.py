"""Lengths that change from call to call, on two gloo ranks: eager, every kind recorded at once, lengths that return
(`dynamic=False`), the defaults, programs predicted from the first recordings on (`dynamic=True`), and each layer
under `torch.compile(dynamic=True)`.

    python -m benchmarks.dynamic [--calls 60] [--layers 2] [--hidden 32] [--passes default] [--stream new] [--json]
    python -m benchmarks.dynamic --calls 200 --stream long --model llama gpt2 bert mixtral t5 --way dynamic
    python -m benchmarks.dynamic --calls 300 --stream same --model looping --way defaults      sizes that are computed
    python -m benchmarks.dynamic --one-length 40      what the default costs a step of one length

Hugging Face models with random weights under FSDP2, built once for each way; the ways take turns at each call, on the
same tokens. Each rank draws its own lengths. The streams: `new` (no length returns), `long` (drawn from 96), `few`
(drawn from 4), `same` (always 96). Losses, parameters and optimizer states are compared with eager bit by bit after
every call, apart from those of `torch.compile`, whose kernels round otherwise.
Total seconds of all calls, first ones included, and of the last third; ratios to eager. `known`: the time of calls of
six lengths that return, after the passes of their class and a garbage collection, to that of programs recorded at each.

`--one-length`: a step of `benchmarks.capture` in one process, captured with the default and with `dynamic=False` in
turn; which of a pair comes first alternates. CPU time of the call that is kept, and of 20 replays: the median of the
ratios of the pairs, with its 95 % interval.
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.capture import Subject
from benchmarks.machine import machine
from benchmarks.provenance import interval
from examples import demo

LONGEST = 128
STREAMS: dict[str, Callable[[int, torch.Generator], int]] = {
    "new": lambda i, _: 4 + i,
    "long": lambda _, g: 4 + int(torch.randint(96, (1,), generator=g)),
    "few": lambda _, g: 8 * (1 + int(torch.randint(4, (1,), generator=g))),
    "same": lambda _, g: 96,
}
LOOPING = "looping"  # Mixtral whose experts run on the tokens that chose them, as many as there are
MODELS = ["llama", "gpt2", "bert", "mixtral", "t5", LOOPING]
COMPILED = "compiled layers"
WAYS = ["recorded at once", "side by side", "defaults", "dynamic", COMPILED]
_KNOWN = 6
_BEFORE_STEADY, _STEADY = 480, 240  # calls; passes run after 256 replays, or 64 of one length
Row = dict[str, Any]


def config_of(model: str, options: demo.Options) -> tuple[Any, str]:
    """The configuration of a small model, and the class that is built of it."""
    hidden, layers = options.hidden, options.layers
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": LONGEST}
    if model == "gpt2":
        narrow = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": LONGEST}
        return transformers.GPT2Config(**narrow, vocab_size=256), "GPT2LMHeadModel"
    if model == "bert":
        return transformers.BertConfig(**sizes, **heads), "BertForMaskedLM"
    if model in ("mixtral", LOOPING):
        experts: Row = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
        if model == LOOPING:  # with a loss that keeps all experts in use
            balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
            experts |= {"experts_implementation": "eager"} | balanced
        return transformers.MixtralConfig(**sizes, **heads, **experts), "MixtralForCausalLM"
    if model == "t5":
        shape = {"d_model": hidden, "d_kv": hidden // 4, "d_ff": 2 * hidden, "num_heads": 4}
        start = {"vocab_size": 256, "num_layers": layers, "decoder_start_token_id": 0}
        return transformers.T5Config(**shape, **start), "T5ForConditionalGeneration"
    return transformers.LlamaConfig(**sizes, **heads, num_key_value_heads=2), "LlamaForCausalLM"


def build(
    model: str, options: demo.Options, is_compiled: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with random weights, sharded layer by layer, and its optimizer. is_compiled: each layer is."""
    torch.manual_seed(0)
    config, kind = config_of(model, options)
    made = getattr(transformers, kind)(config)
    lists = [name for name, part in made.named_modules() if isinstance(part, nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{outer}.") for outer in lists):
            for layer in made.get_submodule(name):
                if is_compiled:
                    layer.compile(dynamic=True)
                fully_shard(layer)
    fully_shard(made)
    made.train()
    return made, torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)


def is_equal(one: Any, other: Any) -> bool:
    """Whether two models and their optimizers are in the same state on this rank."""
    states = zip(demo.state(*one).values(), demo.state(*other).values(), strict=True)
    return all(all(map(torch.equal, a, b)) for a, b in states)


def measure(
    stream: str, model: str, options: demo.Options, calls: int, passes: str, chosen: list[str]
) -> list[Row]:
    """The seconds of each way on one stream. chosen: the ways beside eager."""
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda step: step,
        "recorded at once": lambda step: fz.capture(
            step, passes=passes, allowance=None, on_uncapturable="eager", dynamic=False
        ),
        "side by side": lambda step: fz.capture(step, passes=passes, dynamic=False),
        "defaults": lambda step: fz.capture(step, passes=passes),
        "dynamic": lambda step: fz.capture(step, passes=passes, dynamic=True),
        COMPILED: lambda step: step,
    }
    steps, trained = {}, {}
    for name, way in ways.items():
        if name == "eager" or name in chosen:
            trained[name] = build(model, options, name == COMPILED)
            steps[name] = way(demo.training_step(*trained[name]))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    lengths = []
    gc.collect()  # else that of what the imports and the models have made falls on one of the ways
    for i in range(calls):
        length = STREAMS[stream](i, generator)
        lengths.append(length)
        tokens = torch.randint(0, 256, (options.batch, length), generator=generator)
        losses = {}
        for name, step in steps.items():
            torch.manual_seed(i)  # dropout
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step(tokens)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
        for name in steps.keys() - {COMPILED}:
            assert torch.equal(losses[name], losses["eager"]), (model, stream, name, i)
            assert is_equal(trained[name], trained["eager"]), (model, stream, name, i)
    rows = []
    for name, step in steps.items():
        stats = getattr(step, "stats", None)
        rows.append(
            {
                "model": model,
                "stream": stream,
                "way": name,
                "seconds": sum(seconds[name]),
                "ratio": sum(seconds[name]) / sum(seconds["eager"]),
                "last third": sum(seconds[name][-calls // 3 :])
                / sum(seconds["eager"][-calls // 3 :]),
                "known": 0,
                "recorded": stats.warmups + stats.captures if stats else 0,
                "compared": stats.predictions if stats else 0,
                "unseen": stats.instances if stats else 0,
                "replayed": stats.replays if stats else 0,
            }
        )
    for row in rows:
        if row["way"] == "dynamic" and model != LOOPING:
            row["known"] = steady(model, options, steps["dynamic"], lengths, passes)
    return rows


def steady(
    model: str, options: demo.Options, dynamic: Any, lengths: list[int], passes: str
) -> float:
    """The time of calls of known lengths, to that of a step with a program recorded at each of them.

    dynamic: a step that has had `lengths`.
    """
    eager = demo.training_step(*build(model, options))
    fixed = fz.capture(eager, passes=passes, allowance=None, dynamic=False)
    known = [n for n, count in Counter(lengths).items() if count > 1][:_KNOWN] or lengths[-_KNOWN:]
    seconds: dict[Any, list[float]] = {dynamic: [], fixed: []}
    for i in range(_BEFORE_STEADY + _STEADY):
        if i == _BEFORE_STEADY:
            gc.collect()  # else that of the recordings and passes falls on one of the two
        tokens = torch.zeros(options.batch, known[i % len(known)], dtype=torch.int64)
        for step, found in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens)
            dist.barrier()
            found.append(time.perf_counter() - start)
    ours, theirs = (sum(found[-_STEADY:]) for found in seconds.values())
    return ours / theirs


def of_one_length(pairs: int, passes: str) -> None:
    """Print what the default costs a step whose length never changes."""
    subject = Subject(2)
    ratios: list[list[float]] = [[], []]
    for pair in range(pairs + 2):
        found = {}
        for dynamic in ("auto", False) if pair % 2 else (False, "auto"):
            step = fz.capture(subject.step, passes=passes, dynamic=dynamic)
            step(subject.tokens)
            found[dynamic] = [_seconds(step, subject, 1), _seconds(step, subject, 20)]
            assert (step.stats.captures, step.stats.warmups) == (1, 1)
        if pair >= 2:
            for several, mine, other in zip(ratios, found["auto"], found[False], strict=True):
                several.append(mine / other)
    for what, several in zip(("recorded and kept", "20 replays"), ratios, strict=True):
        low, high = interval(several)
        print(f"{what}: {statistics.median(several):.3f} ({low:.3f} to {high:.3f}), {pairs} pairs")


def _seconds(step: Any, subject: Subject, calls: int) -> float:
    gc.collect()
    gc.disable()
    began = time.thread_time()
    for _ in range(calls):
        step(subject.tokens)
    seconds = time.thread_time() - began
    gc.enable()
    return seconds


def run(rank: int, folder: str, options: demo.Options, args: argparse.Namespace) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("functionalize").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = [
        row
        for model in args.model
        for stream in args.stream
        for row in measure(stream, model, options, args.calls, args.passes, args.way)
    ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--passes", default="default")
    parser.add_argument(
        "--stream", nargs="+", choices=list(STREAMS), default=["new", "long", "few"]
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama"])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one-length", type=int, metavar="PAIRS", default=0)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = demo.Options(layers=args.layers, hidden=args.hidden, sequence=LONGEST)
    if args.one_length:
        torch.set_num_threads(1)
        print(machine())
        of_one_length(args.one_length, args.passes)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, options, args), nprocs=2)
        rows = json.loads(Path(folder, "rows.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(
        f"{args.layers} layers, width {args.hidden}, two gloo ranks, {args.calls} calls, passes={args.passes!r}"
    )
    print(
        f"{'model':<8} {'stream':<7} {'way':<17} {'seconds':>8} {'to eager':>9} {'last third':>11} {'known':>6} "
        f"{'recorded':>9} {'compared':>9} {'unseen':>7} {'replayed':>9}"
    )
    for row in rows:
        print(
            f"{row['model']:<8} {row['stream']:<7} {row['way']:<17} {row['seconds']:8.2f} {row['ratio']:9.2f} "
            f"{row['last third']:11.2f} {row['known']:6.2f} {row['recorded']:9} {row['compared']:9} {row['unseen']:7} "
            f"{row['replayed']:9}"
        )


if __name__ == "__main__":
    main()
