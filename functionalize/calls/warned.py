"""`warnings.warn` in a step: a replay warns again, as the line that has warned.

    warnings.warn(f"loss {loss.item():.3f}")
    warnings.warn("no mask", RuntimeWarning, stacklevel=2)

Filters are those of the replay, and what was shown already is what that line's module says: by default a text is shown
once. Not repeated: a warning inside of a `catch_warnings` of the step, and one of a library. These are shown while the
step is recorded; most are about how a function is called, which does not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from functionalize.calls.call_arguments import ArgumentForm, CallArguments
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.interceptors import Repeated, is_transparent
from functionalize.ir.inputs import Call
from functionalize.util.user_stack import is_own

_NAMES = ("message", "category", "stacklevel", "source")
_MESSAGE, _CATEGORY, _LEVEL = range(len(_NAMES) - 1)


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning.

    file, line, module: of the line that has warned. namespace: of that module, which says what was shown already; of a
    program that was loaded one of its own, since a file looks nothing up by a name.
    """

    category: type[Warning]
    file: str
    line: int
    module: str
    form: ArgumentForm
    what: str = "warns"
    namespace: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def repeat(self, call: Call, value: Any) -> None:
        """Warn with the numbers of a replay."""
        (message,), _ = self.form.filled(value[1])
        shown = self.namespace.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, self.category, self.file, self.line, self.module, shown)


class WarningInterceptor:
    """See `Interceptor`."""

    of_own_code = True

    def for_original(
        self, frame: FrameType, args: Sequence[Any], keywords: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The arguments with which an interceptor calls `warnings.warn`: there are more frames than in eager."""
        level = args[_LEVEL] if len(args) > _LEVEL else keywords.get("stacklevel", 1)
        if not isinstance(level, int):
            return args, keywords
        level += 1 + _found(frame, level)[1]
        if len(args) > _LEVEL:
            return (*args[:_LEVEL], level, *args[_LEVEL + 1 :]), keywords
        return args, {**keywords, "stacklevel": level}

    def repeated(
        self, recording: CallRecorder, frame: FrameType, original: Any, args: Any, keywords: Any
    ) -> Repeated | str | None:
        given = dict(zip(_NAMES, args, strict=False)) | keywords
        is_made = bool(args) and isinstance(args[_MESSAGE], Warning)
        category = type(args[_MESSAGE]) if is_made else given.get("category") or UserWarning
        level = given.get("stacklevel", 1)
        place = _found(frame, level)[0] if isinstance(level, int) else None
        is_known = given.keys() <= {*_NAMES} and isinstance(category, type)
        now = warnings.filters, warnings.showwarning
        is_filtered = any(a is not b for a, b in zip(now, recording.calls.filters, strict=True))
        if not args or not is_known or place is None or is_filtered:
            return None
        # A text inside of a `Warning` is guarded where it is made: it is no argument of this call.
        message, first = ((str(args[_MESSAGE]),), len(_NAMES)) if is_made else (args[:1], 0)
        found = CallArguments.of(recording, frame, message, {}, first)
        if isinstance(found, str):
            return None
        shown = args[:1] if is_made else found.plain[0]
        plain = self.for_original(frame, (*shown, *args[_CATEGORY:]), keywords)
        namespace = place.f_globals
        where = place.f_code.co_filename, place.f_lineno, str(namespace.get("__name__"))
        effect = Warned(category, *where, found.form, namespace=namespace)
        return Repeated(effect, CallArguments(found.form, found.values, plain))


def _found(frame: FrameType, level: int) -> tuple[FrameType | None, int]:
    """The frame that a `stacklevel` means, and how many frames it leaves out: ours, and those of imports."""
    found: FrameType | None = frame
    left_out = 0
    while found is not None and (level > 1 or _is_left_out(found)):
        if _is_left_out(found):
            left_out += 1
        else:
            level -= 1
        found = found.f_back
    return found, left_out


def _is_left_out(frame: FrameType) -> bool:
    """Whether `warnings` does not count a frame, or eager does not have it."""
    file = frame.f_code.co_filename
    return is_own(file) or is_transparent(file)
