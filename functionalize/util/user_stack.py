"""The user's line that ran an op: the stack is captured cheaply, and formatted only for a message.

located(error, record)   'aten.sin.default reads `a` ...'  +  'at train.py:12, in step: out = a.sin()'
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from functionalize._compat.stacks import CapturedTraceback
from functionalize.errors import FunctionalizeError

_ROOT = Path(__file__).resolve().parents[2]
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
_FOLDERS = (Path(torch.__file__).parent, _ROOT / "functionalize", _ROOT / "passes")
_INTERNAL = (
    *(f"{folder}{os.sep}" for folder in _FOLDERS),
    "<frozen",
    "<functionalize",  # generated runners of programs
    "<string>",
)


def user_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are neither torch's nor this library's, outermost first."""
    return [f for f in frames if not is_internal(f.filename)]


def trace_and_update(captured: CapturedTraceback | None) -> tuple[str | None, bool]:
    """(the user's frames in the form FX keeps in `node.meta["stack_trace"]`, whether `torch.optim` ran the op).

    A closure that an optimizer calls, and an optimizer of the user's own, are the user's.
    """
    if captured is None:
        return None, False
    all_frames = list(captured.summary())
    frames = user_frames(all_frames)
    inner = (f.filename for f in reversed(all_frames))
    last = next((f for f in inner if f.startswith(_OPTIMIZERS) or not f.startswith(_INTERNAL)), "")
    text = "".join(traceback.StackSummary.from_list(frames).format()) if frames else None
    return text, last.startswith(_OPTIMIZERS)


def line_of(captured: CapturedTraceback | None) -> str:
    """The innermost line of the user's code, as 'at file:line, in function: code'."""
    return _innermost(captured.summary() if captured is not None else [])


def line_or_empty(captured: CapturedTraceback | None) -> str:
    """The same as 'file:line, in function: code'; empty where no frame is the user's."""
    frames = user_frames(captured.summary()) if captured is not None else []
    return _text(frames[-1]) if frames else ""


def line_after(captured: CapturedTraceback | None, begins: Callable[[str, int], bool]) -> str:
    """The same of the frames inside the last one for which `begins(file, line)` holds; of all, if there is none."""
    frames = list(captured.summary()) if captured is not None else []
    starts = [i for i, f in enumerate(frames) if begins(f.filename, f.lineno or 0)]
    inside = user_frames(frames[starts[-1] + 1 :] if starts else frames)
    return _text(inside[-1]) if inside else ""


def line_of_traceback(found: TracebackType | None) -> str:
    """The same for an exception's traceback."""
    return _innermost(traceback.extract_tb(found))


def line_of_frame(frame: FrameType) -> str:
    """The line that a frame runs, in the same form."""
    code = frame.f_code
    return f"at {_text(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))}"


def _innermost(all_frames: Iterable[traceback.FrameSummary]) -> str:
    frames = user_frames(all_frames)
    if not frames:
        return "at an unknown line (no user frame was on the stack, as in autograd's own threads)"
    return f"at {_text(frames[-1])}"


def _text(f: traceback.FrameSummary) -> str:
    return f"{f.filename}:{f.lineno}, in {f.name}: {(f.line or '').strip()}"


class UserLine(NamedTuple):
    """A line of the user's code by its instruction offset: stands in for a `CapturedTraceback` of one frame."""

    code: CodeType
    instruction: int

    def summary(self) -> traceback.StackSummary:
        """A summary of the one frame."""
        lines = (n for start, end, n in self.code.co_lines() if start <= self.instruction < end)
        line = next(lines, None) or self.code.co_firstlineno
        frame = traceback.FrameSummary(self.code.co_filename, line, self.code.co_name)
        return traceback.StackSummary.from_list([frame])


@cache
def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch or to this library, and not to the user."""
    return filename.startswith(_INTERNAL)


@cache
def is_own(filename: str) -> bool:
    """Whether a file belongs to this library."""
    return filename.startswith(_INTERNAL[1:3])


class LocatedOp(Protocol):
    """An op with the Python stack of its call."""

    @property
    def target(self) -> Any: ...

    @property
    def traceback(self) -> CapturedTraceback | None: ...


def located(error: FunctionalizeError, record: LocatedOp) -> FunctionalizeError:
    """`error` with the op before its message and the user's line after it."""
    if getattr(error, "is_located", False):
        return error
    new = type(error)(f"{record.target} {error}\n  {line_of(record.traceback)}")
    new.is_located = True  # type: ignore[attr-defined]
    return new
