"""Replaced functions whose calls a replay makes again: while a step is recorded, a call is noted with its arguments.

    interceptor = Interceptors(recorders, step_of).interceptor(builtins.print, "prints", PrintInterceptor())

A call of the step runs with plain numbers, unrecorded. If a replay could not make it again, it runs as it is, and the
step is refused by name.

Note [The file of an interceptor]
`logging` and `warnings` name the line that calls them: the first frame outside of themselves, and outside of frames of
Python's import system. An interceptor's code claims to be such a frame, so that they name the line of the user.

Invariants: a call has its effects once, returns what it returns, and raises what it raises. Calls inside of a call that
is noted are a part of it. A call that a replay has made, and whose step runs again, is only noted: it returns None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, NamedTuple, Protocol

from functionalize.calls.call_arguments import CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.scalars.call_sites import TAKES_TEXT
from functionalize.util.user_stack import line_of_frame

_TRANSPARENT = "<frozen importlib._bootstrap>"
ORIGINAL = "__functionalize_original__"


def is_transparent(file: str) -> bool:
    """Whether `logging` and `warnings` leave out the frames of a file: Note [The file of an interceptor]."""
    return "importlib" in file and "_bootstrap" in file


class Cause(NamedTuple):
    """What causes an effect. named: the frame to name. once: whether a cached function does: later calls do not.

    is_own: whether the user's code does, and not a library's.
    """

    named: FrameType
    once: bool
    is_own: bool


class Repeated(NamedTuple):
    """A call that a replay makes again. effect: makes it. arguments: those of the recording."""

    effect: Any
    arguments: CallArguments


class Interceptor(Protocol):
    """What is particular about one function.

    Some have `of_own_code`: calls by libraries are not noted. Some have `for_original(frame, args, keywords)`: the
    arguments with which an interceptor calls the function.
    """

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        """The call as one that a replay makes again; text: what it does that a replay cannot; None: it does nothing."""
        ...


class Interceptors:
    """Makes interceptors.

    recorders: returns the recorders of this thread. step_of: see `effects.py`, Note [Whose effect].
    """

    def __init__(
        self,
        recorders: Callable[[], list[Any]],
        step_of: Callable[[FrameType], Cause | None],
    ) -> None:
        self._recorders, self._step_of = recorders, step_of

    def interceptor(self, original: Any, what: str, of: Interceptor) -> Any:
        """A replacement of `original`. what: for messages, "prints"."""
        begin = self._begin

        def interceptor(*args: Any, **kwargs: Any) -> Any:
            call = begin(sys._getframe(1), original, what, of, args, kwargs)
            try:
                result = None if call.was_made else original(*call.args, **call.keywords)
            except BaseException as error:
                call.end(error)
                raise
            call.end(None)
            return result

        assert isinstance(interceptor, FunctionType)
        interceptor.__code__ = interceptor.__code__.replace(co_filename=_TRANSPARENT)
        interceptor.__name__ = getattr(original, "__name__", "interceptor")
        interceptor.__doc__ = original.__doc__
        setattr(interceptor, TAKES_TEXT, True)
        setattr(interceptor, ORIGINAL, original)
        return interceptor

    def _begin(
        self, frame: FrameType, original: Any, what: str, of: Interceptor, args: Any, keywords: Any
    ) -> _Call:
        recorders = self._recorders()
        found = [r for r in recorders if r.checks.for_real and not r.checks.in_effect]
        step = self._step_of(frame) if found else None
        call = _Call(args, keywords, recorders)
        if (for_original := getattr(of, "for_original", None)) is not None:
            call.args, call.keywords = for_original(frame, args, keywords)
        if step is not None and not step.is_own and hasattr(of, "of_own_code"):
            step = None
        if step is not None:
            line = line_of_frame(step.named)
            repeated: Repeated | str | None = what
            if len(found) == 1 and not step.once:
                try:
                    repeated = of.repeated(found[0], frame, original, args, keywords)
                except Exception as error:  # the call itself says what is wrong with them
                    repeated = f"{what} with arguments that cannot be read ({type(error).__name__})"
            if isinstance(repeated, Repeated):
                call.args, call.keywords = repeated.arguments.plain
                call.is_noted(found[0], repeated, f"{what} {line}", getattr(of, "after", None))
            elif repeated is not None:
                for each in found:
                    each.checks.note_effect(repeated, line, once=step.once)
        call.begin()
        return call


class _Call:
    """A call that goes through an interceptor."""

    def __init__(self, args: Any, keywords: Any, recorders: list[Any]) -> None:
        self.args, self.keywords = args, keywords
        self._recorders = recorders
        self.was_made = False
        self._noted: tuple[CallRecorder, Repeated, str] | None = None
        self._after: Callable[[CallRecorder, Any], str | None] | None = None

    def is_noted(self, recording: CallRecorder, repeated: Repeated, label: str, after: Any) -> None:
        """A replay makes the call again. label: what it does, and the line. after: called when it has returned."""
        self._noted, self._after = (recording, repeated, label), after
        self.was_made = recording.calls.were_made

    def begin(self) -> None:
        """What it does from now on is the same effect; what a replay does again is not recorded."""
        for each in self._recorders:
            each.checks.in_effect += 1
        if self._noted is not None:
            self._quiet = self._noted[0].quiet()
            self._quiet.__enter__()

    def end(self, error: BaseException | None) -> None:
        """The function has returned, or raised `error`."""
        for each in self._recorders:
            each.checks.in_effect -= 1
        if self._noted is None:
            return
        self._quiet.__exit__(None, None, None)
        recording, repeated, label = self._noted
        refused = None if self._after is None else self._after(recording, repeated)
        if refused is not None:
            recording.checks.note(f"{label}, which a replay would not: {refused}")
        if error is None:
            value = (label, repeated.arguments.values)
            recording.python_effects.append((repeated.effect, value))
            recording.checks.repeated.append(label)
        else:
            raised = f"{label}, which raises {type(error).__name__}"
            text = (
                f"{raised}, and a replay would raise after the whole step: do so outside the step"
            )
            recording.checks.note(text)
