"""What a run's ranks logged with `FUNCTIONALIZE_REPORT=DIR`, on one offline HTML page.

    run = read_run("DIR")
    run.steps[0].first_replay            seconds from the first call of the step on this rank to its first replay
    write_run_page("report.html", run)

The page has three figures over one time axis (replays per call, seconds of a call by what it was, memory of each rank)
and tables of the steps, their programs, and what was missed or refused. Its time begins with the first call of the run;
the clocks of the ranks' hosts are taken as they are. `functionalize/step/call_log.py` writes the lines.
Refuses: a folder without such files. A line that a killed process left unfinished is counted, and not read.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from functionalize.errors import PictureError
from functionalize.planner.pictures.page import Figure, Table, write_page

Line = Mapping[str, Any]
BINS = 200  # of the time axis, in which replays per call are counted
_POINTS = 5_000  # rows of calls that are drawn of one kind; of more, each n-th and the longest
_COLOURS = {
    "replay": "#2a78b5",
    "record": "#d1495b",
    "warm-up": "#edae49",
    "audit": "#66a182",
    "eager": "#8d96a3",
    "raised": "#1c1c1c",
}
_LAYOUT: Mapping[str, Any] = {
    "template": "none",
    "height": 760,
    "margin": {"l": 80, "r": 20, "t": 30, "b": 50},
    "hovermode": "closest",
    "xaxis": {"title": {"text": "seconds since the first call"}, "anchor": "y3"},
    "yaxis": {"title": {"text": "replays per call"}, "domain": [0.72, 1], "range": [-0.05, 1.05]},
    "yaxis2": {"title": {"text": "seconds of a call"}, "domain": [0.36, 0.66], "type": "log"},
    "yaxis3": {"title": {"text": "GiB"}, "domain": [0, 0.3], "rangemode": "tozero"},
}


@dataclass
class RunStep:
    """One step on one rank. rows: its lines of calls, in order of time. programs: its lines of programs."""

    rank: int
    name: str
    rows: list[Line] = field(default_factory=list)
    programs: list[Line] = field(default_factory=list)

    def calls(self, what: str | None = None) -> int:
        """The number of calls that were `what`; None: of all."""
        return sum(row["calls"] for row in self.rows if what in (None, row["what"]))

    def seconds(self, what: str) -> float | None:
        """Seconds of one call that was `what`, on average; None: there was none."""
        rows = [row for row in self.rows if row["what"] == what]
        return sum(row["seconds"] for row in rows) / self.calls(what) if rows else None

    @property
    def _first(self) -> Line | None:
        return next((row for row in self.rows if row["what"] == "replay"), None)

    @property
    def first_replay(self) -> float | None:
        """Seconds from the begin of the first call to that of the first replay; None: no call was replayed."""
        return self._first["at"] - self.rows[0]["at"] if self._first is not None else None

    @property
    def calls_before(self) -> int | None:
        """The number of calls before the first replay."""
        return self._first["first"] - 1 if self._first is not None else None


@dataclass
class Run:
    """What all ranks logged. logs: lines of misses, refusals, audits and sizes. unread: lines that are not whole."""

    begin: float
    steps: Sequence[RunStep]
    logs: Sequence[Line]
    unread: int
    is_full: bool

    def memory(self) -> Iterator[tuple[int, int, int | None]]:
        """Of each rank: the most resident bytes that were seen, the most bytes that torch has had on its device."""
        rows = defaultdict[int, list[Line]](list)
        for step in self.steps:
            rows[step.rank] += step.rows
        for rank, found in sorted(rows.items()):
            device = [row["device_peak"] for row in found if "device_peak" in row]
            yield rank, max(row.get("resident", 0) for row in found), max(device, default=None)

    def misses(self) -> list[tuple[str, int, int, float, str]]:
        """What the logs said: log, times, ranks, seconds of the first, text; the most frequent first."""
        found = defaultdict[tuple[str, str], list[Line]](list)
        for line in self.logs:
            found[line["log"], line["text"]].append(line)
        rows = [
            (
                log,
                len(lines),
                len({each["rank"] for each in lines}),
                lines[0]["at"] - self.begin,
                text,
            )
            for (log, text), lines in found.items()
        ]
        return sorted(rows, key=lambda row: (-row[1], row[3]))


def read_run(folder: str | Path) -> Run:
    """Read what all ranks of a run have logged. Raises `PictureError` if there is no call in the folder."""
    lines: list[Line] = []
    unread = 0
    for path in sorted(Path(folder).glob("rank*.jsonl")):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                unread += 1
    steps: dict[tuple[int, str], RunStep] = {}
    for line in lines:
        if line["kind"] in ("calls", "program"):
            step = steps.setdefault(
                (line["rank"], line["step"]), RunStep(line["rank"], line["step"])
            )
            (step.rows if line["kind"] == "calls" else step.programs).append(line)
    found = [step for _, step in sorted(steps.items()) if step.rows]
    if not found:
        raise PictureError(
            f"{folder} has no calls of a run: set FUNCTIONALIZE_REPORT={folder} for all ranks, and run it"
        )
    for step in found:
        step.rows.sort(key=lambda row: row["at"])
    logs = sorted((line for line in lines if line["kind"] == "log"), key=lambda line: line["at"])
    begin = min(step.rows[0]["at"] for step in found)
    return Run(begin, found, logs, unread, any(line["kind"] == "full" for line in lines))


def write_run_page(path: str | Path, run: Run, title: str = "A run") -> None:
    """Write the page. Raises `PictureError` without plotly."""
    ranks = {step.rank for step in run.steps}
    facts: dict[str, Any] = {"ranks": len(ranks)}
    if run.unread:
        facts["lines that are not whole"] = run.unread
    if run.is_full:
        facts["full"] = "a file has reached its limit: later calls are not in it"
    write_page(path, title=title, tables=[*_tables(run)], facts=facts, figure=run_figure(run))


def step_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row for each step of each rank; the names of the columns are `STEP_COLUMNS`."""
    for step in run.steps:
        counts = (step.calls(what) for what in ("replay", "record", "warm-up", "audit", "eager"))
        seconds = step.seconds("replay"), step.seconds("eager")
        yield (
            step.name,
            step.rank,
            step.calls(),
            *counts,
            step.calls_before,
            step.first_replay,
            *seconds,
        )


STEP_COLUMNS = (
    *("step", "rank", "calls", "replayed", "recorded", "warm-ups", "audited", "eager"),
    *("calls before a replay", "seconds to it", "seconds of a replay", "seconds of an eager call"),
)


def _tables(run: Run) -> Iterator[Table]:
    yield Table("Steps", STEP_COLUMNS, [*step_rows(run)])
    programs = [
        (
            step.name,
            step.rank,
            line["number"],
            *(line[key] for key in ("nodes", "inputs", "guards")),
            sum(
                row["calls"]
                for row in step.rows
                if (row["what"], row["program"]) == ("replay", line["number"])
            ),
            line["reason"],
        )
        for step in run.steps
        for line in step.programs
    ]
    of_programs = ("nodes", "inputs", "guards", "replays", "recorded because of")
    yield Table("Programs", ("step", "rank", "program", *of_programs), programs)
    if run.logs:
        of_logs = ("log", "times", "ranks", "first after seconds", "what")
        yield Table("Misses, refusals, audits and sizes", of_logs, run.misses())
    of_ranks = ("rank", "resident bytes at most", "device bytes at most")
    yield Table("Memory", of_ranks, [*run.memory()])


# -- the figure ------------------------------------------------------------------------------------


def run_figure(run: Run) -> Figure:
    """Replays per call, seconds of calls, and memory over the seconds of the run."""
    traces = [*_shares(run), *_durations(run), *_memory(run)]
    return {"data": traces, "layout": {**_LAYOUT}}


def _shares(run: Run) -> Iterator[dict[str, Any]]:
    """Of each step and rank, the replays per call in each part of the time."""
    end = max(row["ended"] for step in run.steps for row in step.rows)
    width = (end - run.begin) / BINS or 1.0
    for step in run.steps:
        bins = defaultdict[int, list[int]](lambda: [0, 0])
        for row in step.rows:
            found = bins[int((row["at"] - run.begin) / width)]
            found[0] += row["calls"] * (row["what"] == "replay")
            found[1] += row["calls"]
        yield {
            "type": "scatter",
            "mode": "lines+markers",
            "line": {"shape": "hv", "width": 1},
            "marker": {"size": 4},
            "name": html.escape(f"{step.name}, rank {step.rank}"),
            "x": [at * width for at in sorted(bins)],
            "y": [bins[at][0] / bins[at][1] for at in sorted(bins)],
        }


def _durations(run: Run) -> Iterator[dict[str, Any]]:
    """Seconds of a call, a trace for each kind of call."""
    for what, colour in _COLOURS.items():
        rows = [(step, row) for step in run.steps for row in step.rows if row["what"] == what]
        if len(rows) > _POINTS:
            longest = max(rows, key=lambda each: each[1]["longest"])
            rows = [*rows[:: len(rows) // _POINTS + 1], longest]
        if rows:
            yield {
                "type": "scatter",
                "mode": "markers",
                "yaxis": "y2",
                "name": what,
                "marker": {"color": colour, "size": 6},
                "x": [row["at"] - run.begin for _, row in rows],
                "y": [row["seconds"] / row["calls"] for _, row in rows],
                "text": [html.escape(_hover(step, row)) for step, row in rows],
                "hovertemplate": "%{text}<br>%{y:.3g} s<extra></extra>",
            }


def _hover(step: RunStep, row: Line) -> str:
    last = row["first"] + row["calls"] - 1
    calls = f"call {last}" if row["calls"] == 1 else f"calls {row['first']} to {last}"
    program = f", program {row['program']}" if row["program"] is not None else ""
    return f"{step.name}, rank {step.rank}, {calls}: {row['what']}{program}"


def _memory(run: Run) -> Iterator[dict[str, Any]]:
    """Resident and device bytes of each rank."""
    for key, name in (("resident", "resident"), ("device", "device")):
        by_rank = defaultdict[int, list[Line]](list)
        for step in run.steps:
            by_rank[step.rank] += [row for row in step.rows if key in row]
        for rank, rows in sorted(by_rank.items()):
            rows.sort(key=lambda row: row["ended"])
            if rows:
                yield {
                    "type": "scatter",
                    "mode": "lines",
                    "yaxis": "y3",
                    "name": f"{name}, rank {rank}",
                    "x": [row["ended"] - run.begin for row in rows],
                    "y": [row[key] / 2**30 for row in rows],
                }
