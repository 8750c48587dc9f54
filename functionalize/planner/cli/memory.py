"""`memory`: the memory of a step at its peak and over time; pictures, a page, files for other viewers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from functionalize.cost.machines.machine import Machine
from functionalize.errors import UsageError
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.allocator.allocator import fsdp2_streams
from functionalize.planner.allocator.snapshot import write_snapshot
from functionalize.planner.cli.console import Out, plain, table, wrapped
from functionalize.planner.cli.graphs import check_pipeline, headline, show_notes
from functionalize.planner.cli.recorded import Job, recorded
from functionalize.planner.cli.recorded_step import Recorded
from functionalize.planner.cli.scripts import as_usage, check_files, check_picture, writing
from functionalize.planner.machines.constants import declared
from functionalize.planner.machines.files import machine_of
from functionalize.planner.pictures.chrome_trace import TraceRun, write_trace
from functionalize.planner.pictures.page import Table, write_page
from functionalize.planner.pictures.pictures import memory_picture
from functionalize.planner.report.figures import StorageRow
from functionalize.planner.report.rows import event_times, reached
from functionalize.planner.report.text import (
    Memory,
    category_rows,
    largest_rows,
    level_rows,
    short_line,
)
from functionalize.planner.sweep.points import target_on
from functionalize.planner.time.step_time import step_time
from functionalize.planner.timeline.timeline import EAGER, PROGRAM
from functionalize.util.text import human_bytes

_COMMON = re.compile(r"\b(?:aten|inductor|profiler)\.|\.default\b|\._RecordFunction\b")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class MemoryOptions:
    """The options of the command.

    top: rows of each table. of: the timeline whose peak is broken down, `eager` or `program`.
    limit: bytes of the device. png, html, snapshot, trace: files to write. time_axis: of the picture.
    """

    top: int = 10
    of: str | None = None
    pipeline: str | None = None
    machine: str | None = None
    alloc_conf: str = ""
    limit: int | None = None
    png: str | None = None
    html: str | None = None
    snapshot: str | None = None
    trace: str | None = None
    time_axis: bool = False

    def settings(self) -> Settings:
        """Check the options (raises `UsageError`); return the settings of the simulated allocator, without limit."""
        check_pipeline(self.pipeline)
        check_machine(self.machine)
        check_picture(self.png)
        if self.time_axis and self.png is None:
            raise UsageError("--time-axis is of the picture: add --png")
        check_files(self.png, self.html, self.snapshot, self.trace)
        if self.of not in (None, EAGER, PROGRAM):
            raise UsageError(f"--of {self.of}: write {EAGER} or {PROGRAM}")
        return check_alloc_conf(self.alloc_conf)


def check_machine(machine: str | int | None) -> None:
    """Raises `UsageError` for an unknown machine."""
    with as_usage():
        machine_of(machine)


def check_alloc_conf(text: str | None) -> Settings:
    """The allocator's settings; raises `UsageError` for a text that torch refuses."""
    with as_usage():
        return Settings.parse(text or "")


def memory(out: Out, job: Job, options: MemoryOptions) -> int:
    """Report on the memory of a step; return exit code 1 if it does not fit in the limit."""
    settings = options.settings()
    if not job.is_file:
        with as_usage():
            job = replace(job, target=target_on(job.target, options.machine))
    eagerly = options.pipeline is None and options.of != PROGRAM and options.trace is None
    with out.working() as say, recorded(job, say, eagerly) as raw:
        found = raw.after(options.pipeline, say)
        say("measuring")
        machine = machine_of(options.machine, found.target)
        constants, on_device = declared(machine, len(found.groups)), found.target == "cuda"
        streams = fsdp2_streams if on_device else None
        replayed = found.timeline() if found.made is not None else None
        report = Memory(found.eager, replayed, constants, settings, streams, on_device, found.host)
        of = options.of or (EAGER if found.eager is not None else PROGRAM)
        report.timeline(of)
        fit = report.fit(options.limit, of) if options.limit is not None else None
        refused = fit.refused if fit is not None else None
        files = _write(found, report, of, options, machine, say)

    def data() -> dict[str, Any]:
        content = report.to_json(options.top)
        limit = {"bytes": options.limit, "fits": refused is None, "error": refused}
        about = {"source": found.name, "world": found.world, "target": found.target}
        return {**about, **content, "notes": list(found.notes), "limit": limit, "files": files}

    def show(console: Console) -> None:
        plain(console, headline(found))
        _show_levels(console, report)
        _show_categories(console, report)
        _show_peak(console, report, of, options.top)
        plain(console, "")
        show_notes(console, found)
        if report.uncounted is not None:
            plain(console, brief(report.uncounted))
        if options.pipeline is None and (more := _more(report)) is not None:
            wrapped(console, more)
        for file in files:
            plain(console, f"wrote {file}")
        if fit is not None and options.limit is not None and refused is None:
            device = human_bytes(fit.nbytes)
            plain(console, f"fits: {device} of {human_bytes(options.limit)} ({of})")

    out.emit(data, show)
    if refused is not None:
        out.errors.print(f"[bold red]does not fit:[/] {refused}")
    return 0 if refused is None else 1


# -- files -----------------------------------------------------------------------------------------


def _write(
    found: Recorded, report: Memory, of: str, options: MemoryOptions, machine: Machine, say: Any
) -> list[str]:
    """Write the files that the options name; return their names."""
    every = (options.png, options.html, options.snapshot, options.trace)
    files = [file for file in every if file is not None]
    if not files:
        return files
    main = report.timeline(of)
    timelines = [main, *(t for t in report.timelines.values() if t is not main)]
    held = report.held(of, options.limit)
    title = f"Memory of {found.name}: {found.world}"
    has_time = (options.trace is not None or options.time_axis) and found.made is not None
    time = step_time(found.program, machine, groups=found.groups) if has_time else None
    spans = time.spans if time is not None else ()
    steps = reached(found.program.graph, spans) if found.made is not None else []
    times = event_times(timelines, steps) if spans else {}
    with writing(*files):
        if options.png is not None:
            say(f"drawing {options.png}")
            memory_picture(
                timelines,
                options.png,
                title=title,
                held=held,
                limit=options.limit,
                times=times if options.time_axis else {},
            )
        if options.html is not None:
            say(f"writing {options.html}")
            write_page(
                options.html,
                title=title,
                timelines=timelines,
                tables=tables(report, of, options.top),
                facts=_facts(found, report, of),
                held={of: held},
                limit=options.limit,
            )
        if options.snapshot is not None:
            say(f"writing {options.snapshot}")
            write_snapshot(options.snapshot, main, report.simulated(of))
        if options.trace is not None:
            say(f"writing {options.trace}")
            write_trace(options.trace, [TraceRun("", timelines, spans, steps)])
    return files


def tables(report: Memory, of: str, top: int) -> list[Table]:
    """The breakdowns of a peak, for the page."""
    rows = [
        (r.category.value, r.name, r.shape, r.nbytes, r.made, r.module, r.last_use, r.freed)
        for r in report.top(top, of)
    ]
    heads = ("category", "name", "shape", "bytes", "made", "module", "last use", "freed")
    breakdowns = (
        ("module", report.by_module(of)),
        ("op", report.by_op(of)),
        ("line", report.by_line(of)),
    )
    return [
        *(
            Table(f"Peak of {of}, by {name}", (name, "bytes"), list(found.items()), is_folded=True)
            for name, found in breakdowns
        ),
        Table(f"The largest storages at the peak of {of}", heads, rows, is_folded=True),
    ]


def _facts(found: Recorded, report: Memory, of: str) -> dict[str, Any]:
    levels = report.levels(of)
    facts = {"world": found.world, "target": found.target}
    facts |= {"nodes": f"{found.made.nodes():,}"} if found.made is not None else {}
    return {
        **facts,
        **{name: human_bytes(nbytes) for name, nbytes in levels._asdict().items()},
        "device": human_bytes(levels.device),
    }


# -- text ------------------------------------------------------------------------------------------


def _show_levels(console: Console, report: Memory) -> None:
    names = list(report.timelines)
    rows = [(name, *cells, how) for name, cells, how in level_rows(report)]
    table(console, ("peak", *names, ""), rows, left=(0, len(names) + 1))
    console.print()


def _more(report: Memory) -> str | None:
    """A line if the program as recorded needs more of the device than eager; None if not, or if one is unknown."""
    if len(report.timelines) < 2:
        return None
    eager, program = (report.levels(name).device for name in (EAGER, PROGRAM))
    if program <= eager:
        return None
    return (
        f"The program as recorded needs {human_bytes(program)}, {human_bytes(program - eager)} more than eager: passes "
        "shorten the lives of its values (--passes default)."
    )


def _show_categories(console: Console, report: Memory) -> None:
    difference = ["difference"] if len(report.timelines) == 2 else []
    table(console, ("at the peak", *report.timelines, *difference), category_rows(report))
    console.print()


def _show_peak(console: Console, report: Memory, of: str, top: int) -> None:
    wrapped(console, f"Peak of {of}: {brief(report.peak_of(of).words())}")
    if top < 1:
        return
    plain(console, "\nThe largest of it", "dim")
    console.print(_storages(report.top(top, of)))
    for title, found in (
        ("module", layers(report.by_module(of))),
        ("op", report.by_op(of)),
        ("line", {short_line(line): n for line, n in report.by_line(of).items()}),
        ("phase", report.by_phase(of)),
    ):
        rows = [(nbytes, brief(name)) for name, nbytes in largest_rows(found, top)]
        console.print()
        table(console, ("bytes", f"by {title}"), rows, left=(1,))


def layers(found: Mapping[str, int]) -> dict[str, int]:
    """Sum up modules whose names differ only in numbers, as the layers of a model: `blocks.* (x32)`."""
    together: dict[str, list[str]] = {}
    for name in found:
        together.setdefault(_NUMBERS.sub("*", name), []).append(name)
    sums = {
        f"{pattern} (x{len(names)})" if len(names) > 1 else names[0]: sum(found[n] for n in names)
        for pattern, names in together.items()
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _storages(rows: Iterable[StorageRow]) -> RichTable:
    """Storages, each with category, name and shape; the ops that made, last used and freed it; the user's line."""
    made = RichTable.grid("", "", padding=(0, 2, 0, 0))
    made.columns[0].justify = "right"
    for row in rows:
        used = f"last used {row.last_use}, " if row.last_use != row.freed else ""
        life = f"made {brief(row.made)}; {brief(used)}freed {brief(row.freed)}"
        what = Text(f"{row.category.value}: {row.name} {row.shape}")
        made.add_row(human_bytes(row.nbytes), what)
        for text in filter(None, (life, short_line(row.line))):
            made.add_row("", Text(text, "dim"))
    return made


def brief(text: str) -> str:
    """Remove the prefixes and suffixes that most op names share, as `aten.` and `.default`."""
    return _COMMON.sub("", text)
