"""The cost of passes: per node in a small and a large graph, from a step to a compiled program, and in eager steps.

    python -m benchmarks.passes [--nodes 2000 50000] [--layers 4 16 64 126] [--steps 4 16 48]
                                [--only fold_views,verify] [--skip-passes] [--skip-compile] [--json]

First table: microseconds per node of every registered pass, and of what runs around each (copy, lint, verify), on the
captured FSDP2 step of a transformer (width 16, fused AdamW, every block wrapped) with as many blocks as give that many
nodes. A ratio of 1 is linear. Second table: seconds from a step to a program (the capture itself), to its metadata, to
an optimised and to a compiled program. Third table: CPU time of `default` and `fast`, with the metadata, the copy and
`verify`, as a ratio to an eager step, by number of blocks (RMSNorm, SwiGLU, width 64), the least of `--best` runs, with
eager steps between them. One process of a fake process group of two: no data is exchanged, and none of this depends on
data. Else medians, each run started from a clean garbage collector. Inductor finds kernels of one depth in its cache at
the next: to measure it cold, pass one depth and an empty TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks import capture as subjects
from benchmarks.machine import machine
from functionalize import passes
from functionalize.errors import PassError
from functionalize.passes.base import FUNCTIONAL
from functionalize.passes.verify import verify
from functionalize.util.gc_pause import only_young_collections

WIDTH = 16
OPTIONS: Mapping[str, str] = {}  # pass -> how it is written here, if not with its defaults
BEFORE: Mapping[str, str] = {
    "PARTITIONED": "partition",
    "INPLACE": "reinplace",
}  # how a stage is reached
Row = dict[str, Any]


class Step:
    """A training step of `layers` blocks under `fully_shard`, captured. kind: makes a block of a width."""

    def __init__(
        self, layers: int, width: int = WIDTH, kind: Callable[[int], nn.Module] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = subjects.Transformer(layers, width)
        if kind is not None:
            self.model.blocks = nn.ModuleList(kind(width) for _ in range(layers))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        shape = (subjects.BATCH, subjects.SEQUENCE)
        self.tokens = torch.randint(0, subjects.VOCABULARY, shape)
        self.step(self.tokens), self.step(self.tokens)  # the optimizer's state, FSDP2's buffers
        captured = fz.capture(self.step, audit=False, allowance=None)
        captured(self.tokens)
        self.seconds = _seconds(lambda: captured(self.tokens))
        assert captured.program is not None
        self.program = captured.program

    def recorded(self) -> fz.Program:
        """A program as it was recorded, without metadata: no passes have run."""
        captured = fz.capture(self.step, passes="", audit=False, allowance=None)
        captured(self.tokens), captured(self.tokens)
        assert captured.program is not None
        return captured.program

    def step(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _seconds(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    gc.collect()
    start = clock()
    run()
    return clock() - start


def of_size(nodes: int) -> fz.Program:
    """The program of a step with about that many nodes."""
    few, more = (Step(n).program.nodes() for n in (2, 4))
    per = (more - few) / 2
    return Step(max(1, round((nodes - few) / per + 2))).program


# -- passes ----------------------------------------------------------------------------------------


def ways(only: str | None) -> dict[str, Callable[[fz.Program], Callable[[], Any]]]:
    """What is measured: each returns, for a program, a function to time, which may change its own copy."""
    found: dict[str, Callable[[fz.Program], Callable[[], Any]]] = {
        "copy": lambda p: p.copy,
        "lint": lambda p: p.graph.lint,
        "check": lambda p: lambda: verify(p),
        "recompile": lambda p: p.copy().graph_module.recompile,
        "run (no pass)": lambda p: lambda: passes.run(p, []),
    }
    for name, kind in passes.PASSES.items():
        (each,) = passes.parse(OPTIONS.get(name, name))
        stage = FUNCTIONAL if FUNCTIONAL in kind.accepts else kind.accepts[0]
        found[name] = lambda p, each=each, stage=stage: _applied(p, each, stage)  # type: ignore[misc]
    wanted = only.split(",") if only else list(found)
    return {name: way for name, way in found.items() if name in wanted}


def _applied(program: fz.Program, each: passes.Pass, stage: str) -> Callable[[], Any]:
    new = program.copy() if stage == FUNCTIONAL else passes.run(program, BEFORE[stage])

    def apply() -> int:
        with only_young_collections():  # as `passes.run` does
            return each.apply(new)

    return apply


def per_node(sizes: list[int], repeat: int, only: str | None) -> list[Row]:
    """Microseconds per node of every way, for each size; the rewrites at the largest."""
    programs = [of_size(size) for size in sizes]
    print(f"programs: {time.perf_counter():.0f}", file=sys.stderr)
    for program in programs:
        program.describe()
    print(f"metadata: {time.perf_counter():.0f}", file=sys.stderr)
    rows: list[Row] = []
    for name, way in ways(only).items():
        try:
            result = way(programs[0])()  # first-use costs
            times = [
                _median(way, program, repeat if program is programs[-1] else 3 * repeat)
                for program in programs
            ]
        except PassError as error:
            rows.append({"name": name, "refused": str(error).splitlines()[0]})
            continue
        print(f"{name}: {time.perf_counter():.0f}", file=sys.stderr)
        count = result if isinstance(result, int) else None
        rows.append({"name": name, "per_node": times, "rewrites": count})
    for row in rows:
        row["nodes"] = [program.nodes() for program in programs]
    return rows


def _median(
    way: Callable[[fz.Program], Callable[[], Any]], program: fz.Program, runs: int
) -> float:
    return statistics.median(_seconds(way(program)) for _ in range(runs)) / program.nodes()


def table_of_passes(rows: list[Row]) -> str:
    """A line per way."""
    nodes = rows[0]["nodes"]
    heads = "".join(f"{f'us/node at {n:,}':>20}" for n in nodes)
    lines = [f"{'':<18}{heads} {'ratio':>7} {f'rewrites at {nodes[0]:,}':>19}"]
    for row in rows:
        if "refused" in row:
            lines.append(f"{row['name']:<18} refused: {row['refused'][:90]}")
            continue
        times = row["per_node"]
        cells = "".join(f"{t * 1e6:20.2f}" for t in times)
        count = "" if row["rewrites"] is None else row["rewrites"]
        lines.append(f"{row['name']:<18}{cells} {times[-1] / times[0]:7.2f} {count:>19}")
    return "\n".join(lines)


# -- from a step to a compiled program -------------------------------------------------------------


def stages(layers: int, compiled: bool) -> Row:
    """Seconds of each part of the way."""
    subject = Step(layers)
    program = subject.program
    row: Row = {"layers": layers, "nodes": program.nodes(), "program": subject.seconds}
    row["metadata"] = _seconds(lambda: program.graph_module)
    found: list[fz.Program] = []
    row["optimised"] = _seconds(lambda: found.append(passes.run(program, "default")))
    if compiled:
        row["compiled"] = _seconds(lambda: compile_and_run(found[0], subject.tokens))
    return row


# -- in eager steps --------------------------------------------------------------------------------


class SwigluBlock(nn.Module):
    """A block of Llama's kind, without rotations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        y, heads = self.norm1(x), (b, s, subjects.HEADS, w // subjects.HEADS)
        q, k, v = (each(y).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def in_eager_steps(layers: int, best: int) -> Row:
    """Seconds of an eager step, and the CPU time of each pipeline as a ratio to it: the least of so many runs."""
    subject = Step(layers, 64, SwigluBlock)
    step = partial(subject.step, subject.tokens)
    times: dict[str, list[float]] = {"eager": [], "default": [], "fast": []}
    for _ in range(best):
        times["eager"] += [_seconds(step, time.process_time) for _ in range(4)]
        for pipeline in ("default", "fast"):
            run = partial(passes.run, subject.recorded(), pipeline)
            times[pipeline].append(_seconds(run, time.process_time))
    eager = min(times.pop("eager"))
    ratios = {pipeline: min(found) / eager for pipeline, found in times.items()}
    return {"layers": layers, "eager": eager, "nodes": subject.program.nodes(), **ratios}


def table_of_steps(rows: list[Row]) -> str:
    """A line per depth."""
    lines = [f"{'layers':>6} {'nodes':>7} {'eager ms':>9} {'default':>8} {'fast':>8}  x eager"]
    for row in rows:
        cells = f"{row['eager'] * 1e3:9.1f} {row['default']:8.1f} {row['fast']:8.1f}"
        lines.append(f"{row['layers']:>6} {row['nodes']:>7} {cells}")
    return "\n".join(lines)


def compile_and_run(program: fz.Program, tokens: Tensor) -> None:
    """Compile with Inductor, and run once: some of it is compiled when it first runs."""
    from functionalize.run import runner

    call = program.resolve([tokens])
    if isinstance(call, str):
        raise RuntimeError(call)
    program.runner = runner("inductor")
    program.run(list(call.inputs))


def table_of_stages(rows: list[Row]) -> str:
    """A line per depth; each column without those before it."""
    names = [n for n in ("program", "metadata", "optimised", "compiled") if n in rows[0]]
    heads = "".join(f"{f'{n} s':>13}" for n in names)
    lines = [f"{'layers':>6} {'nodes':>7}{heads} {'us/node, all':>13}"]
    for row in rows:
        total = sum(row[n] for n in names)
        cells = "".join(f"{row[n]:13.3f}" for n in names)
        lines.append(
            f"{row['layers']:>6} {row['nodes']:>7}{cells} {total / row['nodes'] * 1e6:13.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2000, 50000])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 16, 64, 126])
    parser.add_argument("--steps", type=int, nargs="*", default=[4, 16, 48])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--best", type=int, default=8, help="runs of the third table")
    parser.add_argument("--only", help="names of the first table, separated by commas")
    parser.add_argument("--skip-passes", action="store_true")
    parser.add_argument("--skip-compile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    first = [] if options.skip_passes else per_node(options.nodes, options.repeat, options.only)
    Step(1)
    if options.layers and not options.skip_compile:
        torch.compile(torch.sin)(torch.ones(2))  # imports, the C++ compiler's first use
    second = [stages(n, not options.skip_compile) for n in options.layers]
    third = [in_eager_steps(n, options.best) for n in options.steps]
    if options.json:
        results = {"passes": first, "stages": second, "steps": third}
        print(json.dumps({"machine": machine(), **results}))
        return
    print(machine())
    if first:
        print(table_of_passes(first))
    if second:
        print(table_of_stages(second))
    if third:
        print(table_of_steps(third))


if __name__ == "__main__":
    main()
