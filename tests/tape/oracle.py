"""What anomaly mode says of every op of a backward, beside what a recording says of it.

    rows = compared(step)       [Row(op="aten.mm.default", node="MmBackward0", eager=frames, ours=frames), ...]

Under `detect_anomaly` autograd keeps the Python stack of each node's making in `node.metadata["traceback_"]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.autograd import SEES_FUNCTIONS
from functionalize._compat.stacks import CapturedTraceback
from functionalize.ir.ops import OpRecord
from functionalize.recorder.recorder import Recorder
from functionalize.tape.ownership import ownership_of
from functionalize.util.user_stack import is_internal, user_frames

Frame = tuple[str, int, str]  # file, line, function
_LINE = re.compile(r'  File "(.*)", line (\d+), in (.*)\n')


class Row(NamedTuple):
    """One op of a backward. eager: the user's frames by autograd's own account; None: it has none."""

    op: str
    node: str
    eager: list[Frame] | None
    ours: list[Frame] | None


class Oracle:
    """An observer of a recorder that asks autograd about the running node."""

    def __init__(self) -> None:
        self.said: dict[int, Any] = {}

    def attach(self, records: list[OpRecord]) -> None:
        self.records = records

    def start(self, recorder: Recorder) -> None: ...

    def stop(self) -> None: ...

    def storage_seen(self, info: Any, storage: Any) -> None: ...

    def storage_resized(self, serial: int, nbytes: int) -> None: ...

    def recorded(self, record: OpRecord, args: tuple[Any, ...]) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            self.said[id(record)] = node.metadata.get("traceback_")


def compared(step: Callable[[], Any]) -> list[Row]:
    """The ops of the backwards of a step that ran inside a node."""
    oracle = Oracle()
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        Recorder(ignore_fake=True, observer=oracle) as recorder,
    ):
        step()
    ownership, rows = ownership_of(recorder.tape), []
    for record in recorder.records:
        if record.autograd_node is None:
            continue
        maker = ownership.maker(record)
        ours = None if maker is None else frames_of(maker.traceback)
        said = oracle.said[id(record)]
        eager = None if said is None else _parsed(said)
        rows.append(Row(str(record.target), record.autograd_node, eager, ours))
    return rows


def differing(rows: list[Row]) -> list[Row]:
    """The rows in which the two accounts differ. Where `Function.apply` is C++, its nodes have no maker."""
    known = [r for r in rows if SEES_FUNCTIONS or r.node[-1].isdigit() or r.ours is not None]
    return [row for row in known if row.eager != row.ours]


def frames_of(traceback: CapturedTraceback | None) -> list[Frame]:
    found = traceback.summary() if traceback is not None else ()
    return [(f.filename, f.lineno or 0, f.name) for f in user_frames(found)]


def _parsed(said: list[str]) -> list[Frame]:
    found = [match.groups() for text in said if (match := _LINE.match(text))]
    assert len(found) == len(said), said
    return [(file, int(line), name) for file, line, name in found if not is_internal(file)]


def seeded(*shape: int, grad: bool = False) -> Tensor:
    """A random tensor."""
    return torch.randn(*shape, requires_grad=grad)
