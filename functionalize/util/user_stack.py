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

from functionalize._compat.references import address
from functionalize._compat.stacks import CapturedTraceback, symbolized
from functionalize.errors import FunctionalizeError
from functionalize.util.packages import is_standard_file

_ROOT = Path(__file__).resolve().parents[2]
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
_OWN = f"{_ROOT / 'functionalize'}{os.sep}"
_INTERNAL = (
    f"{Path(torch.__file__).parent}{os.sep}",
    _OWN,
    "<frozen",
    "<functionalize",  # generated runners of programs
    "<string>",
)


def user_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are neither torch's nor this library's, outermost first."""
    return [f for f in frames if not is_internal(f.filename)]


def trace_of(captured: CapturedTraceback | None) -> str | None:
    """The user's frames in the form FX keeps in `node.meta["stack_trace"]`; None if no frame is the user's."""
    return StackTexts().trace(captured)


class _Frame(NamedTuple):
    """A frame of the user's."""

    filename: str
    line: int
    name: str


class _Read(NamedTuple):
    """What was read of stacks with the same frames. users: those of the user's, innermost first.

    updates: whether `torch.optim` ran the op. first: of the stacks.
    """

    users: tuple[_Frame, ...]
    updates: bool
    first: CapturedTraceback


class StackTexts:
    """The texts of the stacks of a recording: many have the same frames, more the same frames of the user's."""

    def __init__(self, stacks: Iterable[CapturedTraceback | None] = ()) -> None:
        """stacks: those that will be asked for; others are read one by one."""
        # By the address of a stack, which is held.
        self._known: dict[int, tuple[CapturedTraceback, _Read]] = {}
        self._traces: dict[tuple[_Frame, ...], str | None] = {(): None}
        self._lines: dict[tuple[_Frame, ...], str] = {(): ""}
        self._after: dict[tuple[int, Any], str] = {}
        self._learn(list({address(each): each for each in stacks if each is not None}.values()))

    def _learn(self, stacks: list[CapturedTraceback]) -> None:
        found = symbolized(stacks)
        read: dict[tuple[int, ...], _Read] = {}
        for stack, frames in zip(stacks, found, strict=True):
            key = tuple(map(address, frames))  # equal frames are one object
            if key not in read:
                read[key] = _read(frames, stack)
            self._known[address(stack)] = stack, read[key]

    def _of(self, stack: CapturedTraceback) -> _Read:
        if address(stack) not in self._known:
            self._learn([stack])
        return self._known[address(stack)][1]

    def shared(self, stack: CapturedTraceback | None) -> CapturedTraceback | None:
        """The first of the stacks with the same frames: each takes most of a kilobyte."""
        return self._of(stack).first if stack is not None else None

    def trace(self, stack: CapturedTraceback | None) -> str | None:
        """`trace_of` of one of the stacks."""
        if stack is None:
            return None
        users = self._of(stack).users
        if users not in self._traces:
            summaries = [traceback.FrameSummary(*frame) for frame in reversed(users)]
            self._traces[users] = "".join(traceback.StackSummary.from_list(summaries).format())
        return self._traces[users]

    def is_update(self, stack: CapturedTraceback | None) -> bool:
        """Whether `torch.optim` ran the op of one of the stacks.

        A closure that an optimizer calls, and an optimizer of the user's own, are the user's.
        """
        return stack is not None and self._of(stack).updates

    def line_or_empty(self, stack: CapturedTraceback | None) -> str:
        """`line_or_empty` of one of the stacks."""
        users = self._of(stack).users[:1] if stack is not None else ()
        if users not in self._lines:
            self._lines[users] = _text(traceback.FrameSummary(*users[0]))
        return self._lines[users]

    def line_after(
        self, stack: CapturedTraceback | None, begins: Callable[[str, int], bool]
    ) -> str:
        """`line_after` of one of the stacks."""
        if stack is None:
            return ""
        key = address(self._of(stack).first), begins
        if key not in self._after:
            self._after[key] = line_after(stack, begins)
        return self._after[key]


def _read(frames: Iterable[dict[str, Any]], first: CapturedTraceback) -> _Read:
    """Read frames, innermost first. first: of the stacks that have them."""
    users, updates = [], None
    for frame in frames:
        filename = frame["filename"]
        if not is_internal(filename):
            users.append(_Frame(filename, frame["line"], frame["name"]))
            updates = updates or False
        elif updates is None and filename.startswith(_OPTIMIZERS):
            updates = True
    return _Read(tuple(users), bool(updates), first)


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


def is_of_import(frame: FrameType) -> bool:
    """Whether Python's import system has called a function: a finder of modules."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith("<frozen importlib")


def line_of_frame(frame: FrameType) -> str:
    """The line that a frame runs, in the same form."""
    code = frame.f_code
    return f"at {_text(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))}"


def _innermost(all_frames: Iterable[traceback.FrameSummary]) -> str:
    frames = user_frames(all_frames)
    if not frames:
        return "at an unknown line (no user frame was on the stack, as in autograd's own threads)"
    # Not the line of `copy.deepcopy` or `statistics.mean`, but the user's that has called it.
    own = [each for each in frames if not is_standard_file(each.filename)]
    return f"at {_text((own or frames)[-1])}"


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
    return filename.startswith(_OWN)


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


def user_line(trace: str) -> str:
    """The innermost frame of an FX `stack_trace`, as `train.py:12, in step: out = a.sin()`; empty without frames."""
    at = trace.rfind('  File "')
    if at < 0:
        return ""
    frame, _, code = trace[at + 8 :].partition("\n")
    path, _, rest = frame.partition('", line ')
    line, _, function = rest.partition(", in ")
    return f"{path}:{line}, in {function}: {code.strip()}"
