"""Stock torch and functionalize on the same programs, compared with eager bit for bit.

    python -m benchmarks.side_by_side [--only NAME ...] [--section N ...] [--columns ...]
                                      [--jobs 2] [--timeout 120] [--width 46] [--json]

Each program of `examples.programs` runs through `aot_function` as torch ships it and through
`fz.functions.aot_function`, and through `torch.compile` with backend `aot_eager` and with `functionalize`.
Every run is a forked process of its own, since some end in a segmentation fault. A cell says one of

    equal                        outputs, inputs, storage sizes, aliasing and gradients match eager
    WRONG: what                  it ran, and something differs
    raises Type: first line      it raised
    SEGFAULT (signal 11)         the process died (other signals by number)
    TIMEOUT                      it ran past --timeout seconds and was ended

Both `aot_function`s get `keep_inference_input_mutations=True`, without which torch's has no way to
express a resize of an input. `torch.compile` gets `fullgraph=True`; where Dynamo itself refuses
that, it runs again with graph breaks and the cell ends in "(graph breaks)": part of it then ran in
eager.

The parent imports torch before it forks and runs no op, so that a child starts in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import functorch.compile  # type: ignore[import-untyped]
import torch
import torch._dynamo

from examples import compare
from examples.programs import PROGRAMS, ResizeProgram

# The second argument requests one whole graph; only torch.compile has this option.
Runner = Callable[[ResizeProgram, bool], compare.Outcome]


def _stock_aot(program: ResizeProgram, whole: bool) -> compare.Outcome:
    return compare.run_aot_function(
        program, functorch.compile.aot_function, keep_inference_input_mutations=True
    )


def _fz_aot(program: ResizeProgram, whole: bool) -> compare.Outcome:
    return compare.run_aot_function(program, keep_inference_input_mutations=True)


def _fz_trace(program: ResizeProgram, whole: bool) -> compare.Outcome:
    return compare.run_trace(program)


def _compile_aot_eager(program: ResizeProgram, whole: bool) -> compare.Outcome:
    return compare.run_compile(program, "aot_eager", fullgraph=whole)


def _compile_functionalize(program: ResizeProgram, whole: bool) -> compare.Outcome:
    return compare.run_compile(program, "functionalize", fullgraph=whole)


# name -> (how it runs, whether gradients are compared)
COLUMNS: dict[str, tuple[Runner, bool]] = {
    "aot_function": (_stock_aot, True),
    "fz.functions.aot_function": (_fz_aot, True),
    "compile aot_eager": (_compile_aot_eager, True),
    "compile functionalize": (_compile_functionalize, True),
    "fz.functions.trace": (_fz_trace, False),
}
DEFAULT_COLUMNS = tuple(COLUMNS)[:4]


@dataclass(frozen=True)
class Cell:
    """One program through one column."""

    program: str
    section: int
    column: str
    outcome: str
    seconds: float


def judge(program: ResizeProgram, column: str, *, whole: bool = True) -> str:
    """Run eager and the column in this process; everything but a dead process becomes a string."""
    run, grads = COLUMNS[column]
    expected = compare.run_eager(program)
    try:
        actual = run(program, whole)
        compare.assert_bitwise_equal(actual, expected, grads=grads)
    except compare.Mismatch as error:
        return f"WRONG: {error}"
    except torch._dynamo.exc.Unsupported as error:
        if whole:
            return f"{judge(program, column, whole=False)} (graph breaks)"
        return _raised(error)
    except Exception as error:  # the outcome is the point, whatever it is
        return _raised(error)
    return "equal"


def _raised(error: BaseException) -> str:
    """The type and first line; what a backend raised in place of "backend=... raised:"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("raised:"):
        return f"raises {lines[1]}"
    return f"raises {type(error).__name__}: {lines[0] if lines else ''}"


@dataclass
class _Child:
    program: ResizeProgram
    column: str
    pid: int
    pipe: int
    started: float
    said: bytes = b""


def _spawn(program: ResizeProgram, column: str) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    started = time.perf_counter()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Child(program, column, pid, reading, started)
    status = 1
    try:
        os.close(reading)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        os.write(writing, judge(program, column).encode()[:4096])
        status = 0
    finally:
        os._exit(status)


def _reap(child: _Child) -> Cell:
    os.close(child.pipe)
    _, status = os.waitpid(child.pid, 0)
    seconds = time.perf_counter() - child.started
    died = os.waitstatus_to_exitcode(status)
    outcome = child.said.decode(errors="replace")
    if died == -signal.SIGSEGV:
        outcome = f"SEGFAULT (signal {signal.SIGSEGV.value})"
    elif died < 0:
        outcome = outcome or f"DIED (signal {-died})"
    elif not outcome:
        outcome = "DIED: eager itself failed"
    return Cell(child.program.name, child.program.section, child.column, outcome, round(seconds, 3))


def run_cells(
    programs: Sequence[ResizeProgram],
    columns: Sequence[str] = DEFAULT_COLUMNS,
    *,
    jobs: int = 1,
    timeout: float = 120.0,
) -> Iterator[Cell]:
    """Cells as they finish, at most `jobs` processes at a time."""
    waiting = [(p, c) for p in reversed(programs) for c in reversed(columns)]
    running: list[_Child] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_spawn(*waiting.pop()))
        ready, _, _ = select.select([child.pipe for child in running], [], [], 0.2)
        for child in list(running):
            if child.pipe in ready:
                chunk = os.read(child.pipe, 4096)
                child.said += chunk
                if chunk:
                    continue
            elif time.perf_counter() - child.started < timeout:
                continue
            else:
                child.said = b"TIMEOUT"
                os.kill(child.pid, signal.SIGKILL)
            running.remove(child)
            yield _reap(child)


def header() -> dict[str, str]:
    """What the table was made on."""
    cpu = platform.processor() or platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{cpu}, {os.cpu_count()} CPUs, {platform.system()}",
    }


def table(cells: Sequence[Cell], columns: Sequence[str], width: int = 46) -> str:
    """One row per program in catalogue order, and a last row that counts the equal cells."""
    found = {(c.program, c.column): c for c in cells}
    programs = [p for p in PROGRAMS if any(c.program == p.name for c in cells)]
    rows = [["program", *columns]]
    for p in programs:
        shown = [found[p.name, column].outcome for column in columns]
        rows.append([f"{p.section}. {p.name}", *(_shorten(text, width) for text in shown)])
    rows.append(["equal", *(_count([c for c in cells if c.column == col]) for col in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [" | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
    rule = "-+-".join("-" * w for w in widths)
    return "\n".join(line.rstrip() for line in [lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _count(cells: Sequence[Cell]) -> str:
    whole = sum(c.outcome == "equal" for c in cells)
    broken = sum(c.outcome == "equal (graph breaks)" for c in cells)
    return f"{whole} of {len(cells)}" + (f", {broken} more with graph breaks" if broken else "")


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Stock torch and functionalize side by side.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs to run")
    parser.add_argument("--section", nargs="+", type=int, metavar="N", help="sections to run")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=DEFAULT_COLUMNS)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per run")
    parser.add_argument("--width", type=int, default=46, help="longest outcome in the table")
    parser.add_argument("--json", action="store_true", help="print JSON with whole outcomes")
    args = parser.parse_args(argv)
    unknown = set(args.only or ()) - {p.name for p in PROGRAMS}
    if unknown:
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print; 0 unless no program was selected."""
    args = _parse(argv)
    programs = [
        p
        for p in PROGRAMS
        if (not args.only or p.name in args.only)
        and (not args.section or p.section in args.section)
    ]
    cells = list(run_cells(programs, args.columns, jobs=args.jobs, timeout=args.timeout))
    if args.json:
        print(json.dumps({**header(), "cells": [asdict(c) for c in cells]}, indent=1))
    else:
        print("  ".join(f"{key}: {value}" for key, value in header().items()), end="\n\n")
        print(table(cells, args.columns, args.width))
    return 0 if programs else 1


if __name__ == "__main__":
    sys.exit(main())
