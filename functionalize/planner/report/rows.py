"""What lies along an axis: the rows of a schedule, the stretches of phases, the times of events, and their colours.

    rows_of(spans)              {'compute': [...], 'all-gather 0': [...]}, each in order of time
    exposed(spans)              the intervals in which communication runs and compute is idle
    forward forward backward recompute backward -> Stretch(forward, 0, 2), Stretch(backward, 2, 3), ...
    intervals = reached(program.graph, time.spans)       per node, when the compute stream runs it
    event_times([eager, program], intervals)             {"eager": [0.0, ...], ...}: the seconds of each event

An event of the program has the time at which the compute stream reaches its op; several events of one op are spread
evenly over the op. Eager's ops have no modelled time: its events are aligned with the program's at the borders of
phases, and evenly in between. Allocations from before the step are made at 0.
Invariants: the times of a timeline do not decrease; categories that a picture stacks on one another differ in
lightness or hue, also for colour-blind readers (a test simulates the three kinds). This file does not import
matplotlib. Linear in events, and in spans after sorting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from torch import fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.cost.categories import Category
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.timeline.timeline import (
    BEFORE,
    PROGRAM,
    Timeline,
)


class Span(NamedTuple):
    """An op on a stream.

    stream: `compute`, or a communication stream such as `all-gather 0` (kind and process group).
    start, end: modelled seconds since the start of the step.
    nbytes: the bytes that a collective sends per rank; 0 for other ops.
    """

    stream: str
    name: str
    start: float
    end: float
    phase: str = ""
    module: str = ""
    nbytes: int = 0


# -- the rows of a schedule ------------------------------------------------------------------------


COMPUTE = "compute"
Interval = tuple[float, float]
T = TypeVar("T")


def rows_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each stream in order of time; compute first, then by name."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.stream, []).append(span)
    names = sorted(rows, key=lambda name: (name != COMPUTE, name))
    return {name: sorted(rows[name], key=lambda span: span.start) for name in names}


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order, without empty ones."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def outside(
    parts: Iterable[tuple[float, float, T]], others: Sequence[Interval]
) -> Iterator[tuple[float, float, T]]:
    """The parts of some intervals that lie in none of the others; both are sorted and without overlaps.

    Each interval has a value, as the phase that it is in, which its parts have, too.
    """
    i = 0
    for start, end, value in parts:
        while i < len(others) and others[i][1] <= start:
            i += 1
        at, j = start, i
        while j < len(others) and others[j][0] < end:
            if others[j][0] > at:
                yield at, others[j][0], value
            at = max(at, others[j][1])
            j += 1
        if at < end:
            yield at, end, value


def exposed(spans: Iterable[Span]) -> list[Interval]:
    """The intervals in which communication runs and compute is idle."""
    spans = list(spans)
    busy = merged((s.start, s.end) for s in spans if s.stream == COMPUTE)
    sent = merged((s.start, s.end) for s in spans if s.stream != COMPUTE)
    return [(a, b) for a, b, _ in outside(((start, end, None) for start, end in sent), busy)]


# -- colours ---------------------------------------------------------------------------------------


# Families: blue is state, grey inputs and buffers, orange and brown unsharded parameters, purple unsharded gradients,
# green activations, yellow temporaries. The members of a family differ in lightness.
COLOURS: Mapping[Category, str] = MappingProxyType(
    {
        Category.SHARDED_PARAMETERS: "#174593",
        Category.OPTIMIZER_STATE: "#6395d4",
        Category.SHARDED_GRADIENTS: "#a9e0f3",
        Category.BUFFERS: "#616175",
        Category.INPUTS: "#a59999",
        Category.PADDING: "#e6ddce",
        Category.UNSHARDED_PARAMETERS: "#ae540a",
        Category.CAST_PARAMETERS: "#662200",
        Category.ALL_GATHER_BUFFERS: "#f4a246",
        Category.UNSHARDED_GRADIENTS: "#632071",
        Category.REDUCE_SCATTER_BUFFERS: "#db99da",
        Category.SAVED_ACTIVATIONS: "#0a7a50",
        Category.RECOMPUTED: "#5bce9a",
        Category.TEMPORARIES: "#f4da60",
        Category.SCRATCH: "#ad8500",
        Category.RNG_STATE: "#434b6a",
        Category.UNKNOWN: "#d6023f",
    }
)
PHASE_COLOURS: Mapping[str, str] = MappingProxyType(
    {FORWARD: "#e4eff8", BACKWARD: "#fadebb", RECOMPUTE: "#add4c8", OPTIMIZER: "#dbcafa"}
)
OTHER_PHASE = "#c9c9c9"
NO_PHASE = "other"


# -- phases ----------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """Consecutive events of one phase: indices from `start` up to but not including `end`."""

    phase: str
    start: int
    end: int


def first_event(timeline: Timeline) -> int:
    """The last event before the step: after it everything from before the step is live, and a picture starts there."""
    first = next((i for i, e in enumerate(timeline.events) if e.op != BEFORE), len(timeline.events))
    return max(first - 1, 0)


def stretches(timeline: Timeline) -> list[Stretch]:
    """The stretches of a timeline in order; the last event before the step belongs to the first stretch."""
    found: list[Stretch] = []
    start = first_event(timeline)
    last, phase = BEFORE, ""
    for i in range(start, len(timeline.events)):
        op = timeline.events[i].op
        if op == BEFORE:
            continue
        if op != last:
            last, phase = op, timeline.ops[op].phase or NO_PHASE
        if not found:
            found.append(Stretch(phase, start, i + 1))
        elif found[-1].phase != phase:
            found.append(Stretch(phase, i, i + 1))
        else:
            found[-1] = found[-1]._replace(end=i + 1)
    return found


def coarse(found: Sequence[Stretch]) -> list[Stretch]:
    """The stretches with backward and the recomputation inside it merged into one."""
    merged: list[Stretch] = []
    inside = (BACKWARD, RECOMPUTE)
    for each in found:
        last = merged[-1] if merged else None
        if last is not None and (last.phase == each.phase or {last.phase, each.phase} <= {*inside}):
            merged[-1] = Stretch(
                BACKWARD if each.phase in inside else each.phase, last.start, each.end
            )
        else:
            merged.append(each)
    return merged


def anchors(of: Timeline, on: Timeline) -> list[tuple[int, int]]:
    """Pairs (event of timeline `of`, event of timeline `on`) that are drawn at one place: the starts of phases.

    Between two pairs events are spread evenly. If passes moved ops between phases, so that the sequences of phases
    differ, the pairs are the first stretches of each phase. Ops without a phase (the epilogue) belong to the stretch
    before them.
    """
    mine, others = _with_phases(stretches(of)), _with_phases(stretches(on))
    # From the finest match to the coarsest: all stretches, backward as one, the first stretch of each phase.
    for a, b in ((mine, others), (coarse(mine), coarse(others)), _beginnings(mine, others)):
        if a and [s.phase for s in a] == [s.phase for s in b]:
            pairs = [(x.start, y.start) for x, y in zip(a, b, strict=True)]
            return [*pairs, (mine[-1].end, others[-1].end)]
    return [(first_event(of), first_event(on)), (len(of.events), len(on.events))]


def _with_phases(found: Sequence[Stretch]) -> list[Stretch]:
    """The stretches, those without a phase merged into the one before them (a first one stays)."""
    merged: list[Stretch] = []
    for each in found:
        if merged and each.phase in (NO_PHASE, merged[-1].phase):
            merged[-1] = merged[-1]._replace(end=each.end)
        else:
            merged.append(each)
    return merged


def _beginnings(a: Sequence[Stretch], b: Sequence[Stretch]) -> tuple[list[Stretch], list[Stretch]]:
    """The first stretch of each phase that both have; the first pair starts where both timelines start."""
    firsts = [{s.phase: s for s in reversed(coarse(found))} for found in (a, b)]
    common = [phase for phase in PHASE_COLOURS if all(phase in first for first in firsts)]
    x, y = (sorted((first[phase] for phase in common), key=lambda s: s.start) for first in firsts)
    if x and y:
        x[0], y[0] = x[0]._replace(start=a[0].start), y[0]._replace(start=b[0].start)
    return x, y


def placed(pairs: Sequence[tuple[int, int]], events: Iterable[int]) -> list[float]:
    """Events of one timeline as (fractional) events of the other. pairs: the result of `anchors`."""
    starts = [a for a, _ in pairs]
    found = []
    for event in events:
        i = min(max(bisect_right(starts, event) - 1, 0), len(pairs) - 2)
        (a0, b0), (a1, b1) = pairs[i], pairs[i + 1]
        found.append(b0 + (event - a0) * (b1 - b0) / max(a1 - a0, 1))
    return found


# -- the times of events ---------------------------------------------------------------------------


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
