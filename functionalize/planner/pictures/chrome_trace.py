"""A plan as a trace in the Trace Event Format, the JSON that ui.perfetto.dev and chrome://tracing open.

    write_trace("step.json", [TraceRun("", [eager, program], time.spans, reached(program.graph, time.spans))])

    process `modelled schedule`     a thread per stream: a complete event (`X`) per op and per collective
                                    a thread `compute waits`: when communication runs and the compute stream is idle
    process `memory of eager`       a counter (`C`) per category, and one (`all`) of their sum: requested bytes
                                    after each event
    process `memory of program`     the same with the program's lifetimes

Memory and schedule have one time axis (`event_times.py`). A timeline without a schedule counts ops, one per
microsecond, and has a thread of its ops. Times are whole nanoseconds, written in microseconds.
Invariants: complete events of one thread do not overlap; a counter's times do not decrease; the largest value of `all`
is the timeline's peak. Refuses: a trace without any event. Linear in events and spans (after sorting).
Source: Google's document "Trace Event Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from functionalize.errors import PictureError
from functionalize.planner.report.rows import (
    Interval,
    Span,
    event_times,
    exposed,
    first_event,
    rows_of,
    times_of,
)
from functionalize.planner.timeline.timeline import Timeline, parts

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


def write_trace(path: str | Path, runs: Sequence[TraceRun]) -> None:
    """Write the trace. Raises `PictureError` if it would have no event.

    >>> from functionalize.planner.pictures.chrome_trace import TraceRun
    >>> step = fz.record_memory(lambda x: (x * 2).sum())
    >>> _ = step(torch.ones(1024))
    >>> fz.planner.write_trace("trace.json", [TraceRun("", [*step.memory.timelines.values()])])
    """
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
    times = event_times(run.timelines, run.reached)
    for timeline in run.timelines:
        if timeline.events:
            pid += 1
            yield from _memory(timeline, times.get(timeline.name), pid, title)


# -- memory ----------------------------------------------------------------------------------------


def _memory(
    timeline: Timeline, times: Sequence[float] | None, pid: int, title: str
) -> Iterator[Json]:
    if times is None:
        yield _metadata("process", pid, f"memory of {timeline.name}{title} (1 µs is 1 op)")
        yield _metadata("thread", pid, "ops", 1)
        for i, op in enumerate(timeline.ops):
            yield _complete(pid, 1, Span("", op.name, i * _OP, (i + 1) * _OP, op.phase, op.module))
        ops = [(i * _OP, (i + 1) * _OP) for i in range(len(timeline.ops))]
        yield from _counters(timeline, times_of(timeline, ops), pid)
        return
    yield _metadata("process", pid, f"memory of {timeline.name}{title}")
    yield from _counters(timeline, times, pid)


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
