"""Messages of `logging` in a step: a replay logs again, as the line that has logged.

    logger.info("loss %.3f", loss.item())        a new record, with this step's number
    logging.warning(f"loss {loss.item():.3f}")
    logger.debug(model)                          not logged: a replay needs that it is not logged then, either

Level, filters and handlers are those of the replay. Refusals: exceptions and stacks in a message; loggers that
`logging.getLogger` does not return; classes of loggers with another `_log` or `findCaller`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.interceptors import Repeated, is_transparent
from functionalize.ir.inputs import Call
from functionalize.scalars.live_text import taken
from functionalize.util.user_stack import is_own

_OWN_FILE = logging.info.__code__.co_filename
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "fatal": logging.CRITICAL,
    "log": None,
}
LOGGING_METHODS = tuple(_LEVELS)


@dataclass(frozen=True, slots=True)
class SilentFact:
    """A logger does not log messages of a level."""

    logger: logging.Logger
    level: int

    def failure(self, call: Call) -> str | None:
        """Why a replay may not leave the message out, or None."""
        if not self.logger.isEnabledFor(self.level):
            return None
        return f"the logger `{self.logger.name}` logs messages of level {self.level}, it did not"


@dataclass(frozen=True, slots=True)
class Logged:
    """A message. file, line, function: of the line that has logged it."""

    logger: logging.Logger
    level: int
    file: str
    line: int
    function: str
    form: ArgumentForm
    what: str = "logs"

    def repeat(self, call: Call, value: Any) -> None:
        """Log the message with the numbers and tensors of a replay."""
        if not self.logger.isEnabledFor(self.level):
            return
        (message, *args), keywords = self.form.filled(value[1])
        record = self.logger.makeRecord(
            self.logger.name,
            self.level,
            self.file,
            self.line,
            message,
            tuple(args),
            None,
            self.function,
            keywords.get("extra"),
            None,
        )
        self.logger.handle(record)


@dataclass(frozen=True, slots=True)
class LogInterceptor:
    """See `Interceptor`. level: of the method's messages; None: its first argument."""

    level: int | None

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        count = 2 if self.level is not None else 3
        if len(args) < count or not keywords.keys() <= {
            "extra",
            "stacklevel",
            "exc_info",
            "stack_info",
        }:
            return "logs"
        logger, level = args[0], args[1] if self.level is None else self.level
        if not isinstance(level, int):
            return "logs"
        if not logger.isEnabledFor(level):
            if recording.scalar_log is not None:
                taken(recording.scalar_log, frame, args[1:], {})
            recording.calls.guard(SilentFact(logger, level))
            return None
        if keywords.get("exc_info") or keywords.get("stack_info"):
            return "logs an exception or a stack"
        known = logger.manager.loggerDict.get(logger.name) is logger or logger is logging.root
        kind = type(logger)
        own = kind._log is logging.Logger._log and kind.findCaller is logging.Logger.findCaller
        if not (known and own):
            return "logs by a logger of its own"
        where = _caller(frame, keywords.get("stacklevel", 1))
        if where is None:
            return "logs with a `stacklevel` outside of the step"
        extra = {k: v for k, v in keywords.items() if k == "extra"}
        found = self._arguments(recording, frame, args, extra)
        if isinstance(found, str):
            return f"logs {found}"
        effect = Logged(logger, level, *where, form=found.form)
        plain, others = found.plain
        ahead = args[:1] if self.level is not None else args[:2]
        rest = {k: v for k, v in keywords.items() if k != "extra"}
        for_call = CallArguments(found.form, found.values, ((*ahead, *plain), {**rest, **others}))
        return Repeated(effect, for_call)

    def _arguments(
        self, recording: CallRecorder, frame: FrameType, args: Any, keywords: Any
    ) -> CallArguments | str:
        """The message and its arguments."""
        ahead = 1 if self.level is not None else 2
        return CallArguments.of(recording, frame, args[ahead:], keywords, ahead - 1)


def _caller(frame: FrameType, level: Any) -> tuple[str, int, str] | None:
    """File, line and function of the caller, as `Logger.findCaller` finds it; None: it is outside of the step."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if is_own(file):
            return None
        if file != _OWN_FILE and not is_transparent(file):
            level -= 1
            if level <= 0:
                return file, found.f_lineno, found.f_code.co_name
        found = found.f_back
    return None


def log_interceptors() -> Iterator[tuple[str, LogInterceptor]]:
    """The methods of `logging.Logger` that log: name, interceptor."""
    for name, level in _LEVELS.items():
        yield name, LogInterceptor(level)
