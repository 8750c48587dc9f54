"""A plan as a trace in the Trace Event Format, the JSON that ui.perfetto.dev and chrome://tracing open.

    write_trace("step.json", [TraceRun("", [eager, program], time.spans, reached(program.graph, time.spans))])

    process `modelled schedule`     a thread per stream: a complete event (`X`) per op and per collective
                                    a thread `compute waits`: when communication runs and the compute stream is idle
    process `memory of eager`       a counter (`C`) per category, and one (`all`) of their sum: requested bytes
                                    after each event
    process `memory of program`     the same with the program's lifetimes

Memory and schedule have one time axis. An event of the program has the time at which the compute stream reaches its op;
several events of one op are spread evenly over the op. Eager's ops have no modelled time: its events are aligned with
the program's at the borders of phases, and evenly in between. A timeline without a schedule counts ops, one per
microsecond, and has a thread of its ops. Allocations from before the step are shown at 0. Times are whole nanoseconds,
written in microseconds.
Invariants: complete events of one thread do not overlap; a counter's times do not decrease; the largest value of `all`
is the timeline's peak. Refuses: a trace without any event. Linear in events and spans (after sorting).
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
_OP = 1e-6  # seconds per op in a timeline without a schedule

Json = dict[str, Any]


class TraceRun(NamedTuple):
    """The data of one plan in a trace.

    name: distinguishes the plans of one trace; may be empty if there is only one.
    reached: for each op of the timeline named `program`, the interval returned by the function `reached`.
    """

    name: str
    timelines: Sequence[Timeline]
    spans: Sequence[Span] = ()
    reached: Sequence[Interval] = ()


def reached(graph: fx.Graph, spans: Sequence[Span]) -> list[Interval]:
    """Per node, (start, end) in seconds on the compute stream; the last entry is for events after the graph."""
    found: list[Interval] = []
    times = {span.name: (span.start, span.end) for span in spans if span.stream == COMPUTE}
    at = 0.0
    for node in graph.nodes:
        start, at = times.get(node.name, (at, at))
        found.append((start, at))
    return [*found, (at, at)]


def write_trace(path: str | Path, runs: Sequence[TraceRun]) -> None:
    """Write the trace. Raises `PictureError` if it would have no event."""
    events = [event for i, run in enumerate(runs) for event in _events(run, 1000 * i)]
    if not events:
        raise PictureError(
            f"{path} would be empty: there is no timeline with events and no span. Capture the step with memory=True."
        )
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def _events(run: TraceRun, pid: int) -> Iterator[Json]:
    """The events of one run: its schedule and each of its timelines is a process of the trace."""
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
        times = _aligned_times(timeline, program, times)
    yield from _counters(timeline, times, pid)


def _times(timeline: Timeline, ops: Sequence[Interval]) -> list[float]:
    """The time of each event. ops: the interval of each op; several events of one op are spread evenly over it."""
    found: list[float] = []
    for op, events in groupby(timeline.events, key=lambda event: event.op):
        count = sum(1 for _ in events)
        start, end = (0.0, 0.0) if op == BEFORE else ops[op]
        found += [start + (end - start) * i / count for i in range(count)]
    return list(accumulate(found, max))


def _aligned_times(timeline: Timeline, program: Timeline, times: Sequence[float]) -> list[float]:
    """The time of each event of a timeline, aligned with the program's events (at `times`) phase by phase."""
    step = range(first_event(timeline), len(timeline.events))
    found = [0.0] * first_event(timeline)
    for x in placed(anchors(timeline, program), step):
        i = min(int(x), len(times) - 1)
        after = times[min(i + 1, len(times) - 1)]
        found.append(times[i] + (x - i) * (after - times[i]))
    return list(accumulate(found, max))


def _counters(timeline: Timeline, times: Sequence[float], pid: int) -> Iterator[Json]:
    """A counter per category, written when it changes, and one of the sum.

    Events before the step are summed up and written once, with its first event.
    """
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
    """Microseconds, rounded to whole nanoseconds, so that consecutive events do not overlap after a reader rounds."""
    return round(seconds * 1e9) / 1000


def _metadata(what: str, pid: int, name: str, tid: int = 0) -> Json:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(pid: int, tid: int, span: Span) -> Json:
    start, end = round(span.start * 1e9), round(span.end * 1e9)
    args: Mapping[str, Any] = {
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
        "args": {key: value for key, value in args.items() if value},
    }


def _counter(pid: int, name: str, at: float, nbytes: int) -> Json:
    return {"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {"bytes": nbytes}}
