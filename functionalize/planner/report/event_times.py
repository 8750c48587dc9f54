"""When each event of a step's memory happens, by the modelled schedule: memory and schedule on one time axis.

    intervals = reached(program.graph, time.spans)       per node, when the compute stream runs it
    event_times([eager, program], intervals)             {"eager": [0.0, ...], ...}: the seconds of each event

An event of the program has the time at which the compute stream reaches its op; several events of one op are spread
evenly over the op. Eager's ops have no modelled time: its events are aligned with the program's at the borders of
phases, and evenly in between. Allocations from before the step are made at 0.
Invariant: the times of a timeline do not decrease. Linear in events.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

from torch import fx

from functionalize.planner.report.display import anchors, first_event, placed
from functionalize.planner.report.memory_figures import PROGRAM
from functionalize.planner.report.rows import COMPUTE, Interval
from functionalize.planner.report.spans import Span
from functionalize.planner.timeline.timeline import BEFORE, Timeline


def reached(graph: fx.Graph, spans: Sequence[Span]) -> list[Interval]:
    """Per node, (start, end) in seconds on the compute stream; the last entry is for events after the graph."""
    found: list[Interval] = []
    times = {span.name: (span.start, span.end) for span in spans if span.stream == COMPUTE}
    at = 0.0
    for node in graph.nodes:
        start, at = times.get(node.name, (at, at))
        found.append((start, at))
    return [*found, (at, at)]


def event_times(
    timelines: Sequence[Timeline], intervals: Sequence[Interval]
) -> dict[str, list[float]]:
    """The seconds of each event of each timeline; empty without a schedule, or without the program's timeline.

    intervals: the result of `reached` for the graph of the timeline named `program`.
    """
    program = next((t for t in timelines if t.name == PROGRAM and intervals), None)
    if program is None:
        return {}
    times = times_of(program, intervals)
    return {
        each.name: times if each is program else _aligned(each, program, times)
        for each in timelines
    }


def times_of(timeline: Timeline, ops: Sequence[Interval]) -> list[float]:
    """The time of each event. ops: the interval of each op; several events of one op are spread evenly over it."""
    found: list[float] = []
    for op, events in groupby(timeline.events, key=lambda event: event.op):
        count = sum(1 for _ in events)
        start, end = (0.0, 0.0) if op == BEFORE else ops[op]
        found += [start + (end - start) * i / count for i in range(count)]
    return list(accumulate(found, max))


def _aligned(timeline: Timeline, program: Timeline, times: Sequence[float]) -> list[float]:
    """The time of each event of a timeline, aligned with the program's events (at `times`) phase by phase."""
    step = range(first_event(timeline), len(timeline.events))
    found = [0.0] * first_event(timeline)
    for x in placed(anchors(timeline, program), step):
        i = min(int(x), len(times) - 1)
        after = times[min(i + 1, len(times) - 1)]
        found.append(times[i] + (x - i) * (after - times[i]))
    return list(accumulate(found, max))
