"""What pictures and pages have in common: units, phases, the peak in words, colours that every eye can tell apart."""

from __future__ import annotations

import itertools

import pytest

from functionalize.cost.categories import Category
from functionalize.planner.report.figures import Peak, groups
from functionalize.planner.report.rows import (
    COLOURS,
    PHASE_COLOURS,
    anchors,
    coarse,
    first_event,
    placed,
    stretches,
)
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, Op, Timeline
from functionalize.util.text import human_bytes, human_seconds
from tests.planner.timelines import Maker, step_of

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1 << 20, "1.00 MiB"),
        (28_024_897_536, "26.1 GiB"),
        (999 << 30, "999 GiB"),
        (1023 << 30, "1.00 TiB"),
        (-(3 << 20), "-3.00 MiB"),
        (5000 << 50, "5,000 PiB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(nbytes, text):
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (59, "59.0 s"), (0.99996, "1.00 s"), (3e-11, "0.03 ns")],
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert human_seconds(seconds) == text


def test_phases_are_stretches_of_events():
    timeline = step_of(2)[0]
    start, end = first_event(timeline), len(timeline.events)
    assert timeline.events[start].op == BEFORE and timeline.events[start + 1].op == 0
    found = stretches(timeline)
    assert [s.phase for s in found] == [
        "forward",
        *["backward", "recompute"] * 2,
        "backward",
        "optimizer",
    ]
    assert (found[0].start, found[-1].end) == (start, end)
    assert all(a.end == b.start for a, b in itertools.pairwise(found))
    for phase, a, b in found:
        ops = [event.op for event in timeline.events[a:b] if event.op != BEFORE]
        assert {timeline.ops[op].phase for op in ops} == {phase}
    assert [s.phase for s in coarse(found)] == ["forward", "backward", "optimizer"]


def test_a_timeline_is_laid_over_another_phase_by_phase():
    long, short = step_of(3, small=9)[0], step_of(3, small=2)[1]
    pairs = anchors(short, long)
    assert len(pairs) == len(stretches(long)) + 1
    for (phase, start, _), mine in zip(stretches(short), stretches(long), strict=True):
        assert (phase, placed(pairs, [start])) == (mine.phase, [mine.start])
    at = placed(pairs, range(first_event(short), len(short.events)))
    assert at == sorted(at) and at[0] == first_event(long) and at[-1] < len(long.events)


def with_phases(timeline, change) -> Timeline:
    """The same, each op in the phase that `change` says."""
    ops = [op._replace(phase=change(i, op)) for i, op in enumerate(timeline.ops)]
    return Timeline("other", ops, timeline.allocations, timeline.events)


def test_timelines_whose_phases_differ_meet_at_their_ends():
    a = step_of(2)[0]
    other = with_phases(a, lambda i, op: "x")
    assert anchors(a, other) == [(first_event(a),) * 2, (len(a.events),) * 2]
    assert placed(anchors(a, other), [50]) == [50]


def test_an_epilogue_belongs_to_the_optimizer():
    a = step_of(2)[0]
    other = with_phases(a, lambda i, op: "" if i >= len(a.ops) - 2 else op.phase)
    assert stretches(other)[-1].phase == "other"
    assert anchors(other, a) == [(s.start,) * 2 for s in stretches(a)] + [(len(a.events),) * 2]


def test_timelines_with_ops_in_other_phases_meet_where_each_phase_begins():
    a = step_of(4)[0]
    backward = next(i for i, op in enumerate(a.ops) if op.phase == "backward")
    other = with_phases(a, lambda i, op: "forward" if i == backward + 20 else op.phase)
    starts = {s.phase: s.start for s in reversed(coarse(stretches(a)))}
    assert [p for p, _ in anchors(other, a)] == [*sorted(starts.values()), len(a.events)]
    assert all(x == y for x, y in anchors(other, a))


def test_nothing_happens_in_a_step():
    timeline = Timeline("eager", [], [], [])
    assert stretches(timeline) == [] and anchors(timeline, timeline) == [(0, 0), (0, 0)]
    assert placed([(0, 0), (0, 0)], [0]) == [0]
    assert Peak.of(timeline).words() == "0 B before the step."


def test_the_peak_in_words():
    maker = Maker()
    maker.make(10 << 20, Category.SHARDED_PARAMETERS, "w")
    assert Peak.of(maker.timeline("eager")).words() == (
        "10.0 MiB before the step: sharded parameters 10.0 MiB (100%)."
    )
    maker.op("aten.mm.default", "forward", "layers.0")
    maker.make(30 << 20, Category.TEMPORARIES, "mm", padding=5 << 20)
    assert Peak.of(maker.timeline("eager")).words() == (
        "40.0 MiB in forward, while aten.mm.default runs in layers.0: temporaries 25.0 MiB (62%), "
        "sharded parameters 10.0 MiB (25%), padding 5.00 MiB (12%)."
    )


def test_layers_are_one_group():
    def made(nbytes, name, category=Category.SHARDED_PARAMETERS):
        return Allocation(nbytes, category, name, BEFORE, None, BEFORE)

    found = groups(
        [made(4, "a.0.w"), made(5, "a.11.w"), made(1, "head.2"), made(1, "a.1.w", Category.INPUTS)]
    )
    assert [tuple(group) for group in found] == [
        (Category.SHARDED_PARAMETERS, "a.*.w", 2, 9),
        (Category.SHARDED_PARAMETERS, "head.2", 1, 1),
        (Category.INPUTS, "a.1.w", 1, 1),
    ]


# -- colours ---------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009): what eyes without one kind of cone see, in linear RGB.
EYES = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def lab(colour: str, eyes) -> np.ndarray:
    """CIELAB (D65) of a colour as these eyes see it."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    linear = np.clip(np.array(eyes) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", EYES)
def test_colours_can_be_told_apart(eyes):
    assert set(COLOURS) == set(Category)
    seen = {category: lab(colour, EYES[eyes]) for category, colour in COLOURS.items()}
    for (a, x), (b, y) in itertools.combinations(seen.items(), 2):
        near = abs(list(Category).index(a) - list(Category).index(b)) <= 2  # may lie on one another
        assert np.linalg.norm(x - y) > (20 if near else 8), (a, b)
    for x, y in itertools.combinations(PHASE_COLOURS.values(), 2):
        assert np.linalg.norm(lab(x, EYES[eyes]) - lab(y, EYES[eyes])) > 9


def test_an_event_of_an_op_without_a_phase():
    allocation = Allocation(4, Category.TEMPORARIES, "t", 0, None, 0)
    timeline = Timeline("eager", [Op("mul", "")], [allocation], [Event(0, allocation, True)])
    assert [tuple(s) for s in stretches(timeline)] == [("other", 0, 1)]
    assert "in other, while mul runs" in Peak.of(timeline).words()
