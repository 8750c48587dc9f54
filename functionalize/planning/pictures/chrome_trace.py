"""A plan as a trace in the Trace Event Format, the JSON that ui.perfetto.dev and chrome://tracing open.

    write_trace("step.json", [Run("", [eager, program], time.spans, reached(program.graph, time.spans))])

    process `modelled schedule`     a thread per stream: a complete event (`X`) per op and per collective
                                    a thread `compute waits`: when communication runs and compute does not
    process `memory of eager`       a counter (`C`) per category, and one of all: requested bytes after each event
    process `memory of program`     the same with the program's lifetimes

Memory lies under the schedule. The program's events are placed where the compute stream reaches their op; several of
one op are spread over it. Eager's ops have no modelled time: its events are placed on the program's phase by phase, and
evenly in between. A timeline that no schedule places counts ops, one per microsecond, and has a thread of its ops.
What existed before the step is there at 0. Times are whole nanoseconds, written in microseconds.
Invariants: complete events of one thread do not overlap; a counter's times do not decrease; the largest value of `all`
is the timeline's peak. Refuses: nothing to write. Linear in events and spans (after sorting).
Source: Google's document "Trace Event Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from functionalize.errors import PictureError
from functionalize.planning.report.display import anchors, first_event, placed
from functionalize.planning.report.memory_figures import PROGRAM
from functionalize.planning.report.rows import COMPUTE, Interval, exposed, rows_of
from functionalize.planning.report.spans import Span
from functionalize.planning.timeline.timeline import BEFORE, Timeline, parts

WAITS = "compute waits"
ALL = "all"
_OP = 1e-6  # seconds of an op in a timeline that no schedule places

Json = dict[str, Any]


class Run(NamedTuple):
    """What one trace shows of one plan. name: told apart by, if there are several.

    reached: when the compute stream reaches each op of the timeline called `program`, as `reached` tells.
    """

    name: str
    timelines: Sequence[Timeline]
    spans: Sequence[Span] = ()
    reached: Sequence[Interval] = ()


def reached(graph: fx.Graph, spans: Sequence[Span]) -> list[Interval]:
    """From when to when the compute stream is at each node, in seconds; at its end for what runs after the graph."""
    found: list[Interval] = []
    times = {span.name: (span.start, span.end) for span in spans if span.stream == COMPUTE}
    at = 0.0
    for node in graph.nodes:
        start, at = times.get(node.name, (at, at))
        found.append((start, at))
    return [*found, (at, at)]


def write_trace(path: str | Path, runs: Sequence[Run]) -> None:
    """Write the trace. Raises `PictureError` if there is nothing in it."""
    events = [event for i, run in enumerate(runs) for event in _events(run, 1000 * i)]
    if not events:
        raise PictureError(
            f"{path} would be empty: there is no timeline with events and no span. Capture the step with memory=True."
        )
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def _events(run: Run, pid: int) -> Iterator[Json]:
    """The events of one run: those of its schedule, then those of each timeline, in processes of their own."""
    title = f" {run.name}".rstrip()
    if run.spans:
        pid += 1
        yield _metadata("process", pid, f"modelled schedule{title}")
        waits = [Span(WAITS, WAITS, start, end) for start, end in exposed(run.spans)]
        for tid, (stream, row) in enumerate(rows_of([*run.spans, *waits]).items(), 1):
            yield _metadata("thread", pid, stream, tid)
            yield from (_complete(pid, tid, span) for span in row)
    program = next((t for t in run.timelines if t.name == PROGRAM and run.reached), None)
    for timeline in run.timelines:
        if timeline.events:
            pid += 1
            yield from _memory(timeline, program, run.reached, pid, title)


# -- memory ----------------------------------------------------------------------------------------


def _memory(
    timeline: Timeline, program: Timeline | None, reached: Sequence[Interval], pid: int, title: str
) -> Iterator[Json]:
    if program is None:
        yield _metadata("process", pid, f"memory of {timeline.name}{title} (1 µs is 1 op)")
        yield _metadata("thread", pid, "ops", 1)
        for i, op in enumerate(timeline.ops):
            yield _complete(pid, 1, Span("", op.name, i * _OP, (i + 1) * _OP, op.phase, op.module))
        ops = [(i * _OP, (i + 1) * _OP) for i in range(len(timeline.ops))]
        yield from _counters(timeline, _times(timeline, ops), pid)
        return
    yield _metadata("process", pid, f"memory of {timeline.name}{title}")
    times = _times(program, reached)
    if timeline is not program:
        times = _laid(timeline, program, times)
    yield from _counters(timeline, times, pid)


def _times(timeline: Timeline, ops: Sequence[Interval]) -> list[float]:
    """When each event happens, if its op runs in an interval: several of one op are spread over it."""
    found: list[float] = []
    for op, events in groupby(timeline.events, key=lambda event: event.op):
        count = sum(1 for _ in events)
        start, end = (0.0, 0.0) if op == BEFORE else ops[op]
        found += [start + (end - start) * i / count for i in range(count)]
    return list(accumulate(found, max))


def _laid(timeline: Timeline, program: Timeline, times: Sequence[float]) -> list[float]:
    """When each event of a timeline happens, laid over the program's phase by phase."""
    step = range(first_event(timeline), len(timeline.events))
    found = [0.0] * first_event(timeline)
    for x in placed(anchors(timeline, program), step):
        i = min(int(x), len(times) - 1)
        after = times[min(i + 1, len(times) - 1)]
        found.append(times[i] + (x - i) * (after - times[i]))
    return list(accumulate(found, max))


def _counters(timeline: Timeline, times: Sequence[float], pid: int) -> Iterator[Json]:
    """A counter per category, told when it changes, and one of all. What is there before the step is told once."""
    start = first_event(timeline)
    now: dict[str, int] = {}
    total = 0
    for i, (event, at) in enumerate(zip(timeline.events, times, strict=True)):
        sign = 1 if event.made else -1
        total += event.nbytes
        changed = {category.value: sign * nbytes for category, nbytes in parts(event.allocation)}
        for name, nbytes in changed.items():
            now[name] = now.get(name, 0) + nbytes
        if i >= start:
            names = now if i == start else changed
            yield from (_counter(pid, name, at, now[name]) for name in names)
            yield _counter(pid, ALL, at, total)


# -- events ----------------------------------------------------------------------------------------


def _us(seconds: float) -> float:
    """Microseconds, of whole nanoseconds: what ends when another thing begins does so in any reader's rounding."""
    return round(seconds * 1e9) / 1000


def _metadata(what: str, pid: int, name: str, tid: int = 0) -> Json:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, span: Span) -> Json:
    start, end = round(span.start * 1e9), round(span.end * 1e9)
    told: Mapping[str, Any] = {
        "phase": span.phase,
        "module": span.module,
        "bytes sent": span.nbytes,
    }
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.phase or "other",
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": {key: value for key, value in told.items() if value},
    }


def _counter(pid: int, name: str, at: float, nbytes: int) -> Json:
    return {"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {"bytes": nbytes}}
