"""The host's time of a replay around its ops: before them (guards, inputs) and after them (outputs, slots).

    python -m benchmarks.around [--layers 4 16] [--runs 30] [--passes NAMES] [--forward] [--loop] [--profile N]

    before      from the call to the first op: arguments flattened, guards, inputs
    ops         the program's ops
    after       from the last op to the return: epilogue, gradients wrapped, slots, effects
    ops/floor   the ops by the default runner, to the same ops called from C++ by TorchScript's interpreter

A Llama of `examples.llama` of width 64 under FSDP2, in fp32, on a gloo mesh of one rank; fused AdamW; gradients stay
until the next step. CPU time of the calling thread. Eager and replay alternate step by step in one process; medians.
`--forward`: `capture(forward, backward=True)` instead, whose backward's `before` and `after` are added.
`--loop`: the step also counts, sums and keeps its losses, prints a line to `os.devnull` and steps a scheduler.
`--profile N`: the functions with the most time of their own, over N replays.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import math
import os
import pstats
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.machine import machine
from examples.llama import Llama, Shape
from functionalize._compat.autograd import below_autograd
from functionalize.analysis.dead_code import is_number
from functionalize.ir.commit import is_commit
from functionalize.run.boxed import boxed

WIDTH, VOCABULARY = 64, 256
PARTS = ("before", "ops", "after")
now = time.thread_time


def ops_to_floor(program: Any, inputs: list[Any], runs: int) -> float:
    """The time of a program's ops by the default runner to that by TorchScript's interpreter; alternating, medians.

    Of the ops before the first number that Python reads: the interpreter keeps none for a later call.
    """
    graph, nodes = fx.Graph(), list(program.graph.nodes)
    ends = [i for i, n in enumerate(nodes) if n.op == "output" or is_number(n) or is_commit(n)]
    first, later = nodes[: ends[0]], set(nodes[ends[0] :])
    copies: dict[fx.Node, fx.Node] = {}
    for node in first:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(
        tuple(copies[n] for n in first if n.op == "call_function" and n.users.keys() & later)
    )
    part = replace(
        program, graph=graph, stage="FUNCTIONAL", value_guards=(), outputs=(), epilogue=()
    )
    run, found = boxed(part), {"boxed": [], "script": []}  # type: ignore[var-annotated]
    tensors = [t.detach() for t in inputs]
    with torch.no_grad(), below_autograd(), torch.jit.optimized_execution(False):
        script = torch.jit.trace(
            fx.GraphModule(dict(part.constants), graph),
            tuple(tensors),
            check_trace=False,
            strict=False,
        )
        for _ in range(runs):
            for name, call in (
                ("boxed", lambda: run(list(tensors))),
                ("script", lambda: script(*tensors)),
            ):
                begin = now()
                results = call()
                found[name].append(now() - begin)
                del results
    return statistics.median(found["boxed"]) / statistics.median(found["script"])


class Marks:
    """The times at which the ops of programs began and ended, during one step."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.inputs: list[Any] | None = None  # those of the next program, if it is an empty list
        self._watched: set[int] = set()

    def watch(self, program: Any) -> None:
        """Note when the ops of a program begin and end. Programs already watched are skipped."""
        if id(program) in self._watched:
            return
        self._watched.add(id(program))
        program.prepare()
        run = program._run

        def watched(*args: Any) -> Any:
            if self.inputs == []:
                self.inputs += args[0]
            self.at.append(now())
            results = run(*args)
            self.at.append(now())
            return results

        program._run = watched


def model_of(layers: int) -> nn.Module:
    """A model of random weights, each layer and the rest sharded."""
    torch.manual_seed(0)
    model = Llama(Shape(layers, WIDTH, 176, 4, 2))
    model.embedding = nn.Embedding(VOCABULARY, WIDTH)
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


class Loop:
    """What a script does in Python in each step: a scheduler, a counter, an average, a list of losses, a line."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
        self.steps, self.total = 0, 0.0
        self.losses: list[float] = []

    def after(self, loss: Tensor) -> None:
        """The end of a step."""
        self.scheduler.step()
        self.steps += 1
        value = loss.item()
        self.total += value
        self.losses.append(value)
        print(f"step {self.steps}: {value:.4f}, {self.total / self.steps:.4f}")


def step_of(
    model: nn.Module, forward: Callable[..., Tensor], marks: Marks | None, has_loop: bool = False
) -> Callable[[Tensor], Tensor]:
    """A training step around `forward`; with marks, the borders of its outer parts are noted as well."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loop = Loop(optimizer) if has_loop else None

    def note() -> None:
        if marks is not None:
            marks.at.append(now())

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        note()
        loss = forward(tokens)
        note()
        loss.backward()
        note()
        optimizer.step()
        if loop is not None:
            loop.after(loss.detach())
        return loss.detach()

    return step


def subject(
    layers: int, passes: str, is_forward: bool, has_loop: bool = False
) -> tuple[Any, Any, Marks, int]:
    """An eager step, a step that is captured or whose forward is, the marks of the latter, the number of parameters."""
    eager_model, model, marks = model_of(layers), model_of(layers), Marks()
    eager = step_of(eager_model, eager_model, None, has_loop)
    if is_forward:
        forward = fz.capture(model, backward=True, passes=passes, audit=False)
        return eager, (step_of(model, forward, marks), forward), marks, len([*model.parameters()])
    captured = fz.capture(step_of(model, model, None, has_loop), passes=passes, audit=False)
    return eager, (captured, captured), marks, len([*model.parameters()])


def measure(
    layers: int, passes: str, is_forward: bool, runs: int, has_loop: bool = False
) -> dict[str, Any]:
    """Median seconds of the eager step, of the replay and of its parts."""
    eager, (step, captured), marks, parameters = subject(layers, passes, is_forward, has_loop)
    found: dict[str, list[float]] = {name: [] for name in ("eager", "replay", *PARTS)}
    generator = torch.Generator().manual_seed(1)
    for i in range(-8, runs):
        tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
        if i == 0:
            for program in (*captured.programs, *getattr(captured, "backward_programs", ())):
                marks.watch(program)
            replays = captured.stats.replays
        gc.disable()
        start = now()
        eager(tokens)
        middle = now()
        marks.at.clear()
        begin = now()
        step(tokens)
        end = now()
        gc.enable()  # collections would count for whichever step runs then
        if i < 0:
            continue
        # Begin and end of the captured call or calls, and of the ops in each.
        borders = marks.at if is_forward else [begin, *marks.at, end]
        if is_forward:  # begin, ops, end of the forward, which is the begin of the backward
            a, b, c, d, e, f, g = borders
            borders = [a, b, c, d, d, e, f, g]
        spans = [
            [borders[k + 1] - borders[k] for k in (j, j + 1, j + 2)]
            for j in range(0, len(borders), 4)
        ]
        times = [middle - start, end - begin, *map(sum, zip(*spans, strict=True))]
        for name, each in zip(found, times, strict=True):
            found[name].append(each)
    assert captured.stats.replays == replays + runs
    medians = {name: statistics.median(each) for name, each in found.items()}
    nodes = sum(program.nodes() for program in captured.programs)
    if not is_forward:
        marks.inputs = []
        step(tokens)
        medians["floor"] = ops_to_floor(captured.program, marks.inputs, runs)
    return {"layers": layers, "parameters": parameters, "nodes": nodes, **medians}


def profile(layers: int, passes: str, is_forward: bool, runs: int) -> None:
    """Print where a replay spends its time."""
    _, (step, _), _, _ = subject(layers, passes, is_forward)
    tokens = torch.randint(VOCABULARY, (2, 16))
    for _ in range(8):
        step(tokens)
    profiler = cProfile.Profile(now)
    profiler.enable()
    for _ in range(runs):
        step(tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--passes")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.passes = args.passes or ("default" if args.forward else "fast")
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        if args.profile:
            profile(args.layers[0], args.passes, args.forward, args.profile)
            return
        out = open(os.devnull, "w") if args.loop else contextlib.nullcontext(sys.stdout)  # noqa: SIM115
        with out as stream, contextlib.redirect_stdout(stream):
            results = [
                measure(n, args.passes, args.forward, args.runs, args.loop) for n in args.layers
            ]
        dist.destroy_process_group()
    if args.json:
        print(json.dumps({"machine": machine(), "seconds": results}))
        return
    print(machine())
    print(
        f"{'':<10} {'eager ms':>9} {'replay':>8} "
        + " ".join(f"{n:>8} {'us/par.':>8}" for n in PARTS)
        + f" {'nodes':>6} {'ops/floor':>9}"
    )
    for each in results:
        parts = " ".join(
            f"{each[n] / each['eager']:8.3f} {each[n] / each['parameters'] * 1e6:8.1f}"
            for n in PARTS
        )
        ratio = each["replay"] / each["eager"]
        start = f"{each['layers']:>3} layers {each['eager'] * 1e3:9.1f} {ratio:8.3f} {parts}"
        print(f"{start} {each['nodes']:6} {each.get('floor', math.nan):9.2f}")


if __name__ == "__main__":
    main()
