"""A timeline as a memory snapshot: the file that PyTorch's memory viewer (pytorch.org/memory_viz) opens.

    write_snapshot("step.pickle", timeline)                    placed by a simulated allocator with torch's defaults
    write_snapshot("step.pickle", timeline, reserved)          as placed by `reserved = simulate(timeline, settings)`
    python -m torch.cuda._memory_viz trace_plot step.pickle    the same file in torch's own tools

        device_traces   the actions in order: alloc, free_requested, free_completed, segment_alloc, segment_map, …
        segments        the segments and blocks after the last event, or after event `at`, where the trace then ends

The trace also allocates the tensors that existed before the step, so that the viewer has their category.
An entry's frames, innermost first, as the viewer prints them (file:line:name):
    forward:12:mm                    phase, index of the op in the step, op; the `fx_node_*` fields repeat them
    module:0:layers.0.mlp            the module, if any
    train.py:31:train_step           the user's line, if known
An entry's `category` is that of the timeline, its `user_metadata` the name and shape of the allocation; its `time_us`
counts ops.
Invariant: the running sum of the entries' bytes equals the timeline's bytes; the segments sum up to the bytes reserved.
Linear in events. Frames that several entries share are pickled once.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

from functionalize.planner.allocator.allocator import Action, Reserved, Segment, simulate
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Op, Timeline

_PROTOCOL = 4  # the highest pickle protocol that the viewer reads
_LINE = re.compile(
    r"(?:at )?(?P<file>.+?):(?P<line>\d+)(?:,? in (?P<name>[^:]+))?(?::.*)?$", re.DOTALL
)
_NO_POOL = (0, 0)

Frames = list[dict[str, Any]]


def write_snapshot(
    path: str | os.PathLike[str],
    timeline: Timeline,
    reserved: Reserved | None = None,
    at: int | None = None,
) -> None:
    """Write a timeline as a snapshot. at: the index of the event to end with; None: the last one."""
    with Path(path).open("wb") as file:
        pickle.dump(snapshot(timeline, reserved, at), file, protocol=_PROTOCOL)


def snapshot(
    timeline: Timeline, reserved: Reserved | None = None, at: int | None = None
) -> dict[str, Any]:
    """A timeline as the value that `torch.cuda.memory._snapshot()` returns."""
    reserved = reserved or simulate(timeline)
    at = len(timeline.events) - 1 if at is None else at
    writer = _Writer(timeline)
    trace: list[dict[str, Any]] = []
    for action in reserved.log:
        if action.event > at:
            break
        trace += writer.entries(action)
    segments = [writer.segment(segment) for segment in reserved.segments_at(at)]
    return {"segments": segments, "device_traces": [trace], "external_annotations": []}


class _Writer:
    """Makes entries and blocks. Entries of one op share their list of frames; equal frames are one object."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._frames: dict[int, Frames] = {}
        self._callers: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._described: dict[int, str] = {}

    def entries(self, action: Action) -> list[dict[str, Any]]:
        """The entries of an action in order: a free is requested, and at once completed."""
        kinds = ("free_requested", "free_completed") if action.kind == "free" else (action.kind,)
        op = self.timeline.events[action.event].op
        owner = action.owner
        # Once any entry has a category, the viewer needs one of the category "unknown": it raises otherwise, because of
        # a misspelt name in its script.
        category = owner.category.value if owner is not None else "unknown"
        return [
            {
                "action": kind,
                "addr": action.address,
                "size": action.nbytes,
                "stream": action.stream,
                "time_us": op - BEFORE,
                "frames": self.frames(op),
                "category": category,
                "user_metadata": self.described(owner) if owner is not None else "",
            }
            for kind in kinds
        ]

    def segment(self, segment: Segment) -> dict[str, Any]:
        """A segment with its blocks."""
        blocks = [
            {
                "address": block.address,
                "size": block.nbytes,
                "requested_size": block.requested,
                "state": "inactive" if block.owner is None else "active_allocated",
                "frames": [] if block.owner is None else self.frames(block.owner.made),
                "user_metadata": "" if block.owner is None else self.described(block.owner),
            }
            for block in segment.blocks
        ]
        used = sum(block.nbytes for block in segment.blocks if block.owner is not None)
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.nbytes,
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(block.requested for block in segment.blocks),
            "stream": segment.stream,
            "segment_type": "small" if segment.small else "large",
            "segment_pool_id": _NO_POOL,
            "is_expandable": segment.expandable,
            "frames": [],
            "blocks": blocks,
        }

    def frames(self, op: int) -> Frames:
        """The frames of an op, innermost first."""
        found = self._frames.get(op)
        if found is None:
            found = _frames(op, self.timeline.ops[op] if op != BEFORE else None)
            found[1:] = [self._callers.setdefault(_frame_key(each), each) for each in found[1:]]
            self._frames[op] = found
        return found

    def described(self, allocation: Allocation) -> str:
        """The name, shape, category and padding of an allocation."""
        text = self._described.get(id(allocation))
        if text is None:
            padding = f", {allocation.padding} bytes of it padding" if allocation.padding else ""
            text = (
                f"{allocation.name} {allocation.shape}".rstrip()
                + f": {allocation.category}{padding}"
            )
            self._described[id(allocation)] = text
        return text


def _frame_key(frame: dict[str, Any]) -> tuple[Any, ...]:
    return frame["filename"], frame["line"], frame["name"]


def _frames(place: int, op: Op | None) -> Frames:
    """The frames of the op at index `place`; op None: for allocations that existed before the step."""
    if op is None:
        return [{"filename": "before the step", "line": 0, "name": "before the step"}]
    frames: Frames = [
        {
            "filename": op.phase or "step",
            "line": place,
            "name": op.name,
            "fx_node_op": "call_function",
            "fx_node_name": op.name,
            "fx_node_target": op.name,
        }
    ]
    if op.module:
        frames.append({"filename": "module", "line": 0, "name": op.module})
    if op.line:
        found = _LINE.match(op.line)
        file, line, name = found.groups() if found is not None else (op.line, 0, "")
        frames.append({"filename": file, "line": int(line), "name": name or "line"})
        frames[0]["fx_original_trace"] = op.line
    return frames
