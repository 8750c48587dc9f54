"""`write_snapshot`: read back by torch's own tools, and in the terms of its viewer."""

from __future__ import annotations

import base64
import pickle
import pickletools
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz as viz

from functionalize.cost.categories import Category
from functionalize.planner.allocator.alloc_conf import MIB
from functionalize.planner.allocator.allocator import Reserved, Settings, fsdp2_streams, simulate
from functionalize.planner.allocator.snapshot import snapshot, write_snapshot
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, Op, Timeline
from tests.planner.timelines import large, step_of

CONFS = {
    "segments": Settings(),
    "expandable": Settings(expandable_segments=True),
    "limited": Settings(limit=700 * MIB, expandable_segments=True),
}
# What the viewer's own reader of pickles knows (torch/utils/viz/MemoryViz.js).
READ_BY_THE_VIEWER = """
    APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST EMPTY_TUPLE
    FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO SETITEM SETITEMS
    SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""


def step(conf: str = "segments") -> tuple[Timeline, Reserved]:
    timeline = step_of(3)[0]
    return timeline, simulate(timeline, CONFS[conf], fsdp2_streams)


def written(
    path: Path, timeline: Timeline, reserved: Reserved | None = None, at: int | None = None
) -> dict[str, Any]:
    write_snapshot(path, timeline, reserved, at)
    with path.open("rb") as file:
        found: dict[str, Any] = pickle.load(file)
    return found


def size(nbytes: float) -> str:
    return str(viz.Bytes(nbytes))


@pytest.mark.parametrize("conf", CONFS)
def test_torch_sums_up_what_was_simulated(conf: str, tmp_path: Path) -> None:
    timeline, reserved = step(conf)
    at = reserved.peak_at
    text = viz.segsum(written(tmp_path / "s.pickle", timeline, reserved, at))
    assert f"total_reserved: {size(reserved.peak)}\n" in text
    assert f"total_allocated: {size(timeline.bytes[at])}\n" in text
    assert f"segments: {len(reserved.segments_at(at))}\n" in text


@pytest.mark.parametrize("conf", CONFS)
def test_the_trace_adds_up_to_the_timeline(conf: str, tmp_path: Path) -> None:
    timeline, reserved = step(conf)
    (trace,) = written(tmp_path / "s.pickle", timeline, reserved)["device_traces"]
    sign = {"alloc": 1, "free_completed": -1}
    changes = [sign[e["action"]] * e["size"] for e in trace if e["action"] in sign]
    assert list(accumulate(changes)) == timeline.bytes
    sign = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    total = list(accumulate(sign[e["action"]] * e["size"] for e in trace if e["action"] in sign))
    assert (max(total), total[-1]) == (reserved.peak, reserved.bytes[-1])
    assert [e["time_us"] for e in trace] == sorted(e["time_us"] for e in trace)


def test_torch_prints_the_trace(tmp_path: Path) -> None:
    timeline, reserved = step()
    text = viz.trace(written(tmp_path / "s.pickle", timeline, reserved))
    segments = [action for action in reserved.log if action.kind == "segment_alloc"]
    assert len(re.findall(r"^\w+ = cudaMalloc\(\d+, ", text, re.MULTILINE)) == len(segments)
    assert len(re.findall(r"^\w+ = \w+\[\d+:", text, re.MULTILINE)) == len(timeline.allocations)
    assert text.count("\ndel ") == sum(not event.made for event in timeline.events)
    assert "MEM[" not in text  # every allocation lies in a segment


@pytest.mark.parametrize("verb", [viz.segments, viz.memory])
def test_torch_draws_flames(verb: Any, tmp_path: Path) -> None:
    timeline, reserved = step()
    at = reserved.peak_at
    lines = verb(
        written(tmp_path / "s.pickle", timeline, reserved, at), format_flamegraph=str
    ).splitlines()
    weights = {line.rsplit(" ", 1)[0]: 0 for line in lines}
    for line in lines:
        weights[line.rsplit(" ", 1)[0]] += int(line.rsplit(" ", 1)[1])
    assert sum(weights.values()) == reserved.peak
    live = sum(
        n for stack, n in weights.items() if ";active_allocated;" in stack and "<gaps>" not in stack
    )
    assert live == timeline.bytes[at]
    assert any(
        re.search(r"model.py:\d+:\w+;module:0:layers.0;forward:\d+:", stack) for stack in weights
    )


def test_torch_plots_the_file(tmp_path: Path) -> None:
    timeline, reserved = step()
    found = written(tmp_path / "s.pickle", timeline, reserved)
    for page in (
        viz.trace_plot(found),
        viz.trace_plot(found, plot_segments=True),
        viz.segment_plot(found),
    ):
        inside = re.search(r'"base64": "([^"]+)"', page)
        assert inside is not None
        assert pickle.loads(base64.b64decode(inside[1])) == found


def test_torch_compares_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, reserved = step()
    before, after = (
        written(tmp_path / "s.pickle", timeline, reserved, at) for at in (0, reserved.peak_at)
    )
    text = viz.compare(before["segments"], after["segments"], format_flamegraph=str)
    assert capsys.readouterr().out.startswith("only_before = []")
    assert "only_after;" in text


def test_the_viewer_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    timeline, reserved = step("limited")
    (trace,) = written(path, timeline, reserved)["device_traces"]
    assert path.read_bytes()[1] <= 4  # the protocol
    assert {op.name for op, _, _ in pickletools.genops(path.read_bytes())} <= set(
        READ_BY_THE_VIEWER.split()
    )
    # it fails on categories without this one
    assert "unknown" in {entry["category"] for entry in trace}
    assert {entry["category"] for entry in trace} - {"unknown"} == {
        each.value for each in timeline.stacked()
    } - {"padding"}
    # it makes one event of a free that is completed at once
    kinds = [entry["action"] for entry in trace]
    frees = [i for i, kind in enumerate(kinds) if kind == "free_requested"]
    assert all(
        kinds[i + 1] == "free_completed" and trace[i]["addr"] == trace[i + 1]["addr"] for i in frees
    )


def test_an_entry_says_where_it_is_from() -> None:
    op = Op(
        "aten.mm.default",
        "forward",
        "layers.0.mlp",
        "at /home/me/train.py:31, in step: loss = model(x)",
    )
    made = Allocation(1000, Category.SAVED_ACTIVATIONS, "mm", 0, None, 0, "bf16[50, 10]", 24)
    (trace,) = snapshot(Timeline("eager", [op], [made], [Event(0, made, True)]))["device_traces"]
    assert [entry["action"] for entry in trace] == ["segment_alloc", "alloc"]
    entry = trace[1]
    assert [viz._frame_fmt(frame) for frame in entry["frames"]] == [
        "forward:0:aten.mm.default",
        "module:0:layers.0.mlp",
        "train.py:31:step",
    ]
    assert entry["frames"][0]["fx_node_name"] == "aten.mm.default"
    assert entry["frames"][0]["fx_original_trace"] == op.line
    assert (entry["size"], entry["category"]) == (1000, "saved activations")
    assert entry["user_metadata"] == "mm bf16[50, 10]: saved activations, 24 bytes of it padding"


@pytest.mark.parametrize(
    ("line", "frame"),
    [
        ("train.py:31", "train.py:31:line"),
        ("train.py:31 in step", "train.py:31:step"),
        ("nowhere", "nowhere:0:line"),
    ],
)
def test_lines_of_any_form(line: str, frame: str) -> None:
    made = Allocation(1, Category.TEMPORARIES, "x", 0, None, 0)
    found = snapshot(Timeline("eager", [Op("mm", "", "", line)], [made], [Event(0, made, True)]))
    frames = found["device_traces"][0][1]["frames"]
    assert [viz._frame_fmt(each) for each in frames] == ["step:0:mm", frame]


def test_what_existed_before_has_a_frame_too() -> None:
    made = Allocation(1, Category.SHARDED_PARAMETERS, "w", BEFORE, None, BEFORE)
    found = snapshot(Timeline("eager", [], [made], [Event(BEFORE, made, True)]))
    (segment,) = found["segments"]
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert segment["blocks"][0]["frames"][0]["name"] == "before the step"
    assert (segment["requested_size"], segment["allocated_size"], segment["total_size"]) == (
        1,
        512,
        2 * MIB,
    )


def test_an_empty_timeline(tmp_path: Path) -> None:
    found = written(tmp_path / "s.pickle", Timeline("eager", [], [], []))
    assert (found["segments"], found["device_traces"]) == ([], [[]])
    assert "total_reserved: 0.0B" in viz.segsum(found)


def test_a_hundred_thousand_events_make_a_small_file(tmp_path: Path) -> None:
    """The entries of an op share its frames, those of an allocation its description."""
    timeline, path = large()[0], tmp_path / "s.pickle"
    found = written(path, timeline)
    assert path.stat().st_size < 160 * len(timeline.events)
    (trace,) = found["device_traces"]
    of_op: dict[int, set[int]] = {}
    for entry in trace:
        of_op.setdefault(entry["time_us"], set()).add(id(entry["frames"]))
    assert all(len(shared) == 1 for shared in of_op.values())
