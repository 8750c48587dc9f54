"""`plan`: a table of the points of a sweep, the largest value that fits; as text, CSV and trace."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import functionalize as fz
from functionalize.errors import PlanError, UsageError
from functionalize.planner.cli.console import Out, error_text, fits, plain, table_of
from functionalize.planner.cli.memory import brief
from functionalize.planner.cli.recorded import Job, wants
from functionalize.planner.cli.scripts import (
    DEFAULT_WORLD,
    Script,
    as_usage,
    check_files,
    opened,
    writing,
)
from functionalize.planner.pictures.chrome_trace import TraceRun, write_trace
from functionalize.planner.report.rows import reached
from functionalize.planner.sweep.points import points
from functionalize.planner.sweep.summary import Plan, Sweep, label, short, varying
from functionalize.planner.sweep.training import Training
from functionalize.util.text import human_bytes

# Columns that are left out in a narrow terminal, in this order, by the ends of their heads.
_OPTIONAL_COLUMNS = ("planned in", "exposed", "sent", "program", "reserved", "MFU", "/s/rank")
_SEARCH_END = 1 << 20  # the largest value that `--largest` tries


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command.

    grid: the values of each key to combine. pipeline, machine, alloc_conf: for all points.
    largest: a key whose largest value that fits in `limit` (bytes of the device) is searched.
    training: a run whose days and cost are asked for. csv, trace: files to write. stages: as of `fz.plan`.
    """

    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pipeline: str | None = None
    machine: str | None = None
    alloc_conf: str | None = None
    largest: str | None = None
    limit: int | None = None
    csv: str | None = None
    trace: str | None = None
    training: Training | None = None
    stages: bool = False

    def check(self, job: Job) -> None:
        """Raises `UsageError` for options that are invalid or contradict each other."""
        if job.is_file:
            raise UsageError(
                f"{job.source} is one recorded graph: plan takes a script, to record others"
            )
        if self.largest is not None and self.limit is None:
            raise UsageError("--largest needs --limit: within how many bytes?")
        check_files(self.csv, self.trace)
        twice = sorted({*self.grid} & {*self.fixed(job)})
        if twice:
            raise UsageError(f"`{twice[0]}` has one value and is in --grid, too: leave one out")

    def fixed(self, job: Job) -> dict[str, Any]:
        """The keys that have one value at all points."""
        own = {
            "world": job.world,
            "mesh": job.mesh,
            "rank": job.rank or None,
            "target": job.target if job.target != "cuda" else None,
            "passes": self.pipeline,
            "machine": self.machine,
            "alloc_conf": self.alloc_conf,
        }
        found = {
            **job.parameters,
            **{key: value for key, value in own.items() if value is not None},
        }
        if not {"world", "mesh"} & {*found, *self.grid}:
            found = {"world": DEFAULT_WORLD, **found}
        return found


def plan(out: Out, job: Job, options: PlanOptions) -> int:
    """Plan a step at every point of a grid; return exit code 1 if there is a limit and no point fits."""
    options.check(job)
    fixed = options.fixed(job)
    with opened(job.source, job.names) as script:
        every = list(points({**{key: [value] for key, value in fixed.items()}, **options.grid}))
        wants(script, [*options.grid, *fixed, *filter(None, [options.largest])], every)
        if options.largest is not None and options.largest not in {*options.grid, *fixed}:
            fixed[options.largest] = _default(script, options.largest)
        with as_usage(PlanError), out.counting() as count:
            axes = [axis for axis, values in options.grid.items() if len(values) > 1]
            sweep = fz.plan(
                script.build,
                script.step,
                options.grid,
                inputs=script.inputs,
                stages=options.stages,
                progress=lambda done, of, point: count(done, of, label(point, axes)),
                **fixed,
            )
        if options.limit is not None:
            sweep = sweep.within(options.limit)
        if options.training is not None:
            sweep = sweep.over(options.training)
        largest = None
        if options.largest is not None and options.limit is not None:
            with out.working(f"searching the largest {options.largest}"):
                largest = sweep.largest(options.largest, options.limit, most=_SEARCH_END)
    files = _write(sweep, options)
    is_missing = options.trace is not None and options.trace not in files

    def data() -> dict[str, Any]:
        found = {"key": options.largest, "value": largest, "limit": options.limit}
        return {
            "script": job.source,
            "keys": list(sweep.axes),
            "items": sweep.items,
            "points": json.loads(sweep.to_json()),
            "largest": found if options.largest is not None else None,
            "files": files,
        }

    def show(console: Console) -> None:
        _show(console, job.source, sweep, options.limit)
        if largest is not None:
            limit = human_bytes(options.limit or 0)
            plain(
                console,
                f"\nthe largest {options.largest} that fits in {limit}: {_more(largest)}{_rest(sweep)}",
            )
        for file in files:
            plain(console, f"wrote {file}")

    out.emit(data, show)
    if is_missing:
        out.note(f"no point has a time, so {options.trace} cannot be drawn: not written")
    failed = sum(each.error is not None for each in sweep.plans)
    if failed:
        out.note(f"{failed} of {len(sweep.plans)} points could not be planned")
    return int(is_missing or (largest is None and options.limit is not None and not _within(sweep)))


def _within(sweep: Sweep) -> bool:
    """Whether any point fits in the limit of the sweep."""
    return any(row.get("fits") for row in sweep.rows(program=False))


def _default(script: Script, key: str) -> Any:
    """The default value of a parameter in the first function that has one; else 1."""
    for function in filter(None, (script.build, script.inputs, script.step)):
        found = inspect.signature(function).parameters.get(key)
        if found is not None and found.default is not found.empty:
            return found.default
    return 1


def _more(largest: int) -> str:
    return f"{largest:,}" + (", and no larger one was tried" if largest >= _SEARCH_END else "")


def _rest(sweep: Sweep) -> str:
    """A remark on the values of the other keys in the search, if there are several points."""
    if len(sweep.plans) == 1:
        return ""
    return " (else as in the first row)"


# -- text ------------------------------------------------------------------------------------------


def _show(console: Console, name: str, sweep: Sweep, limit: int | None) -> None:
    heads, *found = sweep.cells()
    keys = heads.index("peak")
    # The row of a failed point has its error instead of figures; `_errors` prints it in full below.
    rows = [row if len(row) == len(heads) else row[:keys] for row in found]
    same = {axis: sweep.plans[0].point[axis] for axis in sweep.axes if axis not in heads[:keys]}
    plain(console, ", ".join([name, *(f"{key} {short(value)}" for key, value in same.items())]))
    left_out = _show_table(console, heads, rows)
    if left_out:
        plain(console, f"(no room for {', '.join(left_out)}: a wider terminal, or --json)", "dim")
    for each, error in _errors(sweep):
        plain(console, f"{label(each.point, heads[:keys]) or 'the point'}: {error}")
    large = (
        []
        if limit is None
        else [
            label(each.point, heads[:keys])
            for each, row in zip(sweep.plans, sweep.rows(program=False), strict=True)
            if not row.get("fits", True)
        ]
    )
    if large:
        plain(console, f"more than {human_bytes(limit or 0)}: {'; '.join(large)}")
    for note in sweep.notes():
        plain(console, brief(note))


def _errors(sweep: Sweep) -> Iterator[tuple[Plan, str]]:
    """The failed points and their errors: in full where an error occurs first, then in short."""
    seen: set[str] = set()
    for each in sweep.plans:
        if each.cause is not None:
            text = error_text(each.cause)
            yield each, (each.error or "") if text in seen else text
            seen.add(text)


def _show_table(console: Console, heads: list[str], rows: list[list[str]]) -> list[str]:
    """Print the table with as many columns as fit; return the names of the columns left out."""
    left_out: list[str] = []
    while True:
        shown = [i for i, head in enumerate(heads) if head not in left_out]
        whole = [row + ["-"] * (len(heads) - len(row)) for row in rows]
        cells = [[row[i] for i in shown] for row in whole]
        names = [heads[i] for i in shown]
        more = [head for end in _OPTIONAL_COLUMNS for head in names if head.endswith(end)]
        made = table_of(names, cells, left=())
        if fits(console, made) or not more:
            console.print(made, crop=False)
            return left_out
        left_out.append(more[0])


# -- files -----------------------------------------------------------------------------------------


def _write(sweep: Sweep, options: PlanOptions) -> list[str]:
    """Write the files; return their names. A trace needs a point that has a time."""
    timed = any(each.figures is not None for each in sweep.plans)
    trace = options.trace if timed else None
    files = [file for file in (options.csv, trace) if file is not None]
    with writing(*files):
        if options.csv is not None:
            Path(options.csv).write_text(sweep.to_csv(), encoding="utf-8")
        if trace is not None:
            write_trace(trace, _runs(sweep))
    return files


def _runs(sweep: Sweep) -> list[TraceRun]:
    """The planned points as runs of a trace."""
    found = []
    for each in sweep.plans:
        if (figures := each.figures) is not None:
            timelines, spans = [*figures.memory.timelines.values()], figures.time.spans
            name = label(each.point, varying(sweep))
            found.append(TraceRun(name, timelines, spans, reached(figures.program.graph, spans)))
    return found
