"""Shared by the text, the pictures and the page: colours, the stretches of phases, the peak in words.

    forward forward backward recompute backward -> Stretch(forward, 0, 2), Stretch(backward, 2, 3), ...
    Peak.of(timeline)              bytes, op, phase, module, and the largest categories and allocations

Invariants: categories that a picture stacks on one another differ in lightness or hue, also for colour-blind readers (a
test simulates the three kinds); this file does not import matplotlib. Linear in events.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.cost.categories import Category
from functionalize.errors import PictureError
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Op, Timeline, by_category
from functionalize.util.text import human_bytes

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
# The colours of a schedule: compute by phase, communication by kind of collective.
COMPUTE_COLOURS: Mapping[str, str] = MappingProxyType(
    {FORWARD: "#5f9fd8", BACKWARD: "#1b4f8a", RECOMPUTE: "#5fc4a4", OPTIMIZER: "#6b6b6b"}
)
STREAM_COLOURS: Mapping[str, str] = MappingProxyType(
    {"gather": "#f7a850", "scatter": "#d79fd0", "reduce": "#6d2a72"}
)
OTHER_STREAM = "#a38a00"
NO_PHASE = "other"

_NUMBERS = re.compile(r"\d+")


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


# -- the peak --------------------------------------------------------------------------------------


class AllocationGroup(NamedTuple):
    """Allocations whose names differ in numbers only, such as those of a model's layers: `layers.*.wq`."""

    category: Category
    name: str
    members: int
    nbytes: int


def pattern(name: str) -> str:
    """A name with its numbers replaced: `layers.*.wq`."""
    return _NUMBERS.sub("*", name)


def groups(allocations: Iterable[Allocation]) -> list[AllocationGroup]:
    """Allocations grouped by category and `pattern` of the name, largest first; a group of one keeps the name."""
    found: dict[tuple[Category, str], list[Allocation]] = {}
    for each in allocations:
        found.setdefault((each.category, pattern(each.name)), []).append(each)
    made = (
        AllocationGroup(
            c, name if len(some) > 1 else some[0].name, len(some), sum(a.nbytes for a in some)
        )
        for (c, name), some in found.items()
    )
    return sorted(made, key=lambda group: -group.nbytes)


def brief(name: str) -> str:
    """A name without namespace and default overload: `aten.mm.default layers.0` as `mm layers.0`."""
    return (
        name.replace("aten.", "", 1).replace(".default", "", 1)
        if name.startswith("aten.")
        else name
    )


def check_held(held: Sequence[int], timeline: Timeline) -> None:
    """Raise `PictureError` unless there is one number of the device's bytes per event of the timeline."""
    if len(held) != len(timeline.events):
        raise PictureError(
            f"The device's bytes at {len(held):,} moments do not match the {len(timeline.events):,} events of "
            f"`{timeline.name}`. Pass one number per event, as `Memory.held()` returns them."
        )


class Peak(NamedTuple):
    """The peak of a timeline.

    event: the index of the event after which it is reached. op: the op of that event; None before the step.
    live: the allocations that are live then, largest first.
    """

    nbytes: int
    event: int
    op: Op | None
    live: list[Allocation]
    categories: dict[Category, int]

    def __repr__(self) -> str:
        return f"<Peak: {self.words()}>"

    @classmethod
    def of(cls, timeline: Timeline) -> Peak:
        """The first event after which the most bytes are live."""
        live = timeline.live_at(timeline.peak_at) if timeline.events else []
        op = timeline.peak_op
        return cls(timeline.peak, timeline.peak_at, op, live, by_category(live))

    def where(self) -> str:
        """`in forward, while aten.mm.default runs in layers.3.mlp`."""
        if self.op is None:
            return "before the step"
        module = f" in {self.op.module}" if self.op.module else ""
        return f"in {self.op.phase or NO_PHASE}, while {self.op.name} runs{module}"

    def largest(self, count: int = 3) -> list[tuple[Category, int]]:
        """The categories with the most bytes."""
        return sorted(self.categories.items(), key=lambda item: -item[1])[:count]

    def words(self) -> str:
        """One sentence: the bytes, the op, the largest categories."""
        share = max(self.nbytes, 1)
        of = ", ".join(
            f"{c.value} {human_bytes(n)} ({100 * n / share:.0f}%)" for c, n in self.largest()
        )
        return f"{human_bytes(self.nbytes)} {self.where()}" + (f": {of}" if of else "") + "."
