"""`print` in a step: a replay prints again.

    print("loss", loss.item(), flush=True)
    print(f"loss {loss.item():.3f}", file=sys.stderr)

Refusals: another stream than `sys.stdout` and `sys.stderr`, or than those at the begin of the step; a function that
replaces Python's `print`.
"""

from __future__ import annotations

import builtins
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType
from typing import Any

from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.interceptors import ORIGINAL, Repeated
from functionalize.ir.inputs import Call


@dataclass(frozen=True, slots=True)
class PrintFact:
    """`print` is Python's own."""

    function: Any

    def failure(self, call: Call) -> str | None:
        """Why a replay may not print, or None."""
        now = getattr(builtins.print, ORIGINAL, builtins.print)
        return None if now is self.function else "`print` is another function"


@dataclass(frozen=True, slots=True)
class StreamFact:
    """`sys.stdout` or `sys.stderr` is the stream that the step has printed to."""

    name: str
    stream: Any

    def failure(self, call: Call) -> str | None:
        """Why a replay may not print, or None."""
        same = getattr(sys, self.name) is self.stream
        return None if same else f"sys.{self.name} is another stream"


@dataclass(frozen=True, slots=True)
class Printed:
    """A call of `print`. stream: the name of the stream in `sys`; None: the default."""

    form: ArgumentForm
    stream: str | None
    what: str = "prints"

    def repeat(self, call: Call, value: Any) -> None:
        """Print with the numbers and tensors of a replay."""
        args, keywords = self.form.filled(value[1])
        if self.stream is not None:
            keywords["file"] = getattr(sys, self.stream)
        print(*args, **keywords)


class PrintInterceptor:
    """See `Interceptor`."""

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        if not isinstance(original, BuiltinFunctionType):
            return "prints by a function that replaces `print`"
        if (sys.stdout, sys.stderr) != recording.calls.streams:
            return "prints, where the step has replaced sys.stdout or sys.stderr,"
        facts: list[Any] = [PrintFact(original)]
        stream = keywords.get("file")
        others = {k: v for k, v in keywords.items() if k != "file"}
        name = None
        if stream is not None:
            names = [n for n in ("stdout", "stderr") if getattr(sys, n) is stream]
            if not names:
                return "prints to another stream than sys.stdout and sys.stderr"
            name = names[0]
            facts.append(StreamFact(name, stream))
        found = CallArguments.of(recording, frame, args, others)
        if isinstance(found, str):
            return f"prints {found}"
        for fact in facts:
            recording.calls.guard(fact)
        if name is not None:
            found.plain[1]["file"] = stream
        return Repeated(Printed(found.form, name), found)
