"""`plan`: a table of what-if points, the largest that fits, and the same as CSV, picture, page and trace."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import functionalize as fz
from functionalize.cli.console import Out, fits, plain, table_of, told
from functionalize.cli.graphs import check_pipeline
from functionalize.cli.memory import brief, check_machine, check_picture
from functionalize.cli.recorded import DEFAULT_WORLD, Job, wants
from functionalize.cli.scripts import Script, opened
from functionalize.errors import SaveError, UsageError
from functionalize.planning.pictures.chrome_trace import TraceRun, reached, write_trace
from functionalize.planning.pictures.page import Table, write_page
from functionalize.planning.pictures.pictures import tradeoff_picture
from functionalize.planning.report.display import human_bytes
from functionalize.planning.report.spans import Span
from functionalize.planning.timeline.timeline import Timeline
from functionalize.sweep.summary import Plan, Sweep, short

_LEAST = (
    "planned in",
    "exposed",
    "sent",
    "MFU",
    "program",
)  # what a narrow terminal does without, in order
_MOST = 1 << 20  # of what is searched
_DRAWN = 6  # timelines of a page, at most


@dataclass(frozen=True)
class Asked:
    """What is asked for. grid: the axes. largest: a key, searched within `limit` bytes of the device."""

    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pipeline: str | None = None
    machine: str | None = None
    largest: str | None = None
    limit: int | None = None
    csv: str | None = None
    html: str | None = None
    png: str | None = None
    trace: str | None = None

    def check(self, job: Job) -> None:
        """Raises `UsageError` for what cannot be planned."""
        if job.is_file:
            raise UsageError(
                f"{job.source} is one recorded graph: plan takes a script, to record others"
            )
        if self.largest is not None and self.limit is None:
            raise UsageError("--largest needs --limit: within how many bytes?")
        for machine in (self.machine, *self.grid.get("machine", ())):
            check_machine(machine)
        for pipeline in (self.pipeline, *self.grid.get("passes", ())):
            check_pipeline(pipeline or None)
        check_picture(self.png)
        twice = sorted({*self.grid} & {*self.fixed(job)})
        if twice:
            raise UsageError(f"`{twice[0]}` has one value and is in --grid, too: leave one out")

    def fixed(self, job: Job) -> dict[str, Any]:
        """The keys with one value."""
        own = {
            "world": job.world,
            "mesh": job.mesh,
            "rank": job.rank or None,
            "target": job.target if job.target != "cuda" else None,
            "passes": self.pipeline,
            "machine": self.machine,
        }
        found = {**job.given, **{key: value for key, value in own.items() if value is not None}}
        if not {"world", "mesh"} & {*found, *self.grid}:
            found = {"world": DEFAULT_WORLD, **found}
        return found


def plan(out: Out, job: Job, asked: Asked) -> int:
    """Plan a step at every point of a grid; 1 if there is a limit, and no point is within it."""
    asked.check(job)
    fixed = asked.fixed(job)
    with opened(job.source, job.names) as script:
        wants(script, [*asked.grid, *fixed, *filter(None, [asked.largest])])
        if asked.largest is not None and asked.largest not in {*asked.grid, *fixed}:
            fixed[asked.largest] = _default(script, asked.largest)
        with out.counting() as count:
            axes = [axis for axis, values in asked.grid.items() if len(values) > 1]
            sweep = fz.plan(
                script.build,
                script.step,
                asked.grid,
                inputs=script.inputs,
                progress=lambda done, of, point: count(done, of, label(point, axes)),
                **fixed,
            )
        largest = None
        if asked.largest is not None and asked.limit is not None:
            with out.working(f"searching the largest {asked.largest}"):
                largest = sweep.largest(asked.largest, asked.limit, most=_MOST)
    files = _write(sweep, job, asked)

    def data() -> dict[str, Any]:
        found = {"key": asked.largest, "value": largest, "limit": asked.limit}
        return {
            "script": job.source,
            "points": json.loads(sweep.to_json()),
            "largest": found if asked.largest is not None else None,
            "files": files,
        }

    def show(console: Console) -> None:
        _show(console, job.source, sweep, asked.limit)
        if largest is not None:
            limit = human_bytes(asked.limit or 0)
            plain(
                console,
                f"\nthe largest {asked.largest} that fits in {limit}: {_more(largest)}{_rest(sweep)}",
            )
        for file in files:
            plain(console, f"wrote {file}")

    out.emit(data, show)
    failed = sum(each.error is not None for each in sweep.plans)
    if failed:
        out.note(f"{failed} of {len(sweep.plans)} points could not be planned")
    return int(largest is None and asked.limit is not None and not _within(sweep, asked.limit))


def _within(sweep: Sweep, limit: int) -> bool:
    """Whether a point fits."""
    return any(
        each.figures is not None and each.figures.row["device"] <= limit for each in sweep.plans
    )


def _default(script: Script, key: str) -> Any:
    """The value of a parameter that is not given."""
    for function in filter(None, (script.build, script.inputs, script.step)):
        found = inspect.signature(function).parameters.get(key)
        if found is not None and found.default is not found.empty:
            return found.default
    return 1


def label(point: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`batch 4, world 64`"""
    return ", ".join(f"{key} {short(point[key])}" for key in keys)


def _more(largest: int) -> str:
    return f"{largest:,}" + (", and no larger one was tried" if largest >= _MOST else "")


def _rest(sweep: Sweep) -> str:
    """Where the search was, if there are several points."""
    if len(sweep.plans) == 1:
        return ""
    return " (else as in the first row)"


# -- text ------------------------------------------------------------------------------------------


def _show(console: Console, name: str, sweep: Sweep, limit: int | None) -> None:
    heads, *found = sweep.cells()
    keys = heads.index("peak")
    rows = [
        row if len(row) == len(heads) else row[:keys] for row in found
    ]  # one that failed tells why
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
            for each in sweep.plans
            if each.figures is not None and each.figures.row["device"] > limit
        ]
    )
    if large:
        plain(console, f"more than {human_bytes(limit or 0)}: {'; '.join(large)}")
    for note in sweep.notes():
        plain(console, brief(note))


def _errors(sweep: Sweep) -> Iterator[tuple[Plan, str]]:
    """What failed, and why: with the line and what to do, the first time."""
    seen: set[str] = set()
    for each in sweep.plans:
        if each.cause is not None:
            text = told(each.cause)
            yield each, (each.error or "") if text in seen else text
            seen.add(text)


def _show_table(console: Console, heads: list[str], rows: list[list[str]]) -> list[str]:
    """The table with as many columns as there is room for; those that are left out."""
    left_out: list[str] = []
    while True:
        shown = [i for i, head in enumerate(heads) if head not in left_out]
        whole = [row + ["-"] * (len(heads) - len(row)) for row in rows]
        cells = [[row[i] for i in shown] for row in whole]
        names = [heads[i] for i in shown]
        more = [head for head in _LEAST if head in names]
        made = table_of(names, cells, left=())
        if fits(console, made) or not more:
            console.print(made, crop=False)
            return left_out
        left_out.append(more[0])


# -- files -----------------------------------------------------------------------------------------


def _write(sweep: Sweep, job: Job, asked: Asked) -> list[str]:
    every = (asked.csv, asked.html, asked.png, asked.trace)
    files = [file for file in every if file is not None]
    try:
        if asked.csv is not None:
            Path(asked.csv).write_text(sweep.to_csv(), encoding="utf-8")
        if asked.png is not None:
            title = f"{job.source}: {len(sweep.plans)} points"
            names = {"step": "step, modelled seconds", "device": "device bytes"}
            keys = (*sweep.axes, *names)
            rows = [{names.get(k, k): row[k] for k in keys if k in row} for row in sweep.rows()]
            x, y = names.values()
            tradeoff_picture(rows, asked.png, x=x, y=y, limit=asked.limit, title=title)
        if asked.html is not None:
            _page(asked.html, sweep, job, asked)
        if asked.trace is not None:
            write_trace(asked.trace, _runs(sweep))
    except OSError as error:
        raise SaveError(f"{error.filename} cannot be written: {error.strerror}") from error
    return files


def _page(path: str, sweep: Sweep, job: Job, asked: Asked) -> None:
    rows = sweep.rows()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    units = {"peak", "program", "allocated", "reserved", "device", "sent"}
    seconds = {"step", "exposed"}
    heads = [f"{c} bytes" if c in units else f"{c} seconds" if c in seconds else c for c in columns]
    cells = [[row.get(column) for column in columns] for row in rows]
    planned = [each for each in sweep.plans if each.figures is not None]
    timelines: list[Timeline] = []
    spans: Sequence[Span] = ()
    for each in planned[:_DRAWN]:
        figures = each.figures
        assert figures is not None
        for timeline in figures.memory.timelines.values():
            named = label(each.point, _varying(sweep))
            timelines.append(replace(timeline, name=f"{timeline.name} {named}".strip()))
    if len(planned) == 1 and planned[0].figures is not None:
        spans = planned[0].figures.time.spans
    write_page(
        path,
        title=f"Plan of {job.source}",
        timelines=timelines,
        spans=spans,
        tables=[Table("Points", heads, cells, "; ".join(sweep.notes()))],
        facts={"points": len(rows), "kept to": ", ".join(_same(sweep))},
        limit=asked.limit,
    )


def _runs(sweep: Sweep) -> list[TraceRun]:
    """Each point that could be planned, for a trace."""
    found = []
    for each in sweep.plans:
        if (figures := each.figures) is not None:
            timelines, spans = [*figures.memory.timelines.values()], figures.time.spans
            name = label(each.point, _varying(sweep))
            found.append(TraceRun(name, timelines, spans, reached(figures.program.graph, spans)))
    return found


def _varying(sweep: Sweep) -> list[str]:
    return [a for a in sweep.axes if len({str(p.point[a]) for p in sweep.plans}) > 1]


def _same(sweep: Sweep) -> list[str]:
    varying, first = _varying(sweep), sweep.plans[0]
    return [f"{axis} {short(first.point[axis])}" for axis in sweep.axes if axis not in varying]
