"""The text of a live number: no fact where it goes into a call that every replay makes again, with the number of then.

    print(f"loss {loss:.3f}")        `taken` by the replaced `print`: ("loss ", Formatted(loss, ".3f"))
    print(", ".join(f"{v:.3f}" for v in losses))   the same: an element of the joined text for each number
    print("%.3f" % loss)             the same, where C code asks for the value of the number (`is_formatted`)
    return f"loss {loss:.3f}"        a fact: a guard on the text

Python sees the real text in either case. Whether the text goes into such a call and nowhere else is read from the
bytecode (`call_sites.py`); such a call is one of a function with the attribute `TAKES_TEXT`.

Invariant: a text that no call has taken when the recording ends is a fact.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from functionalize._compat.stacks import CapturedTraceback
from functionalize.scalars.call_sites import (
    ELEMENT,
    TAKES_TEXT,
    CallSite,
    Text,
    callee_of,
    site_at,
)
from functionalize.scalars.scalar_log import Number, ScalarLog, learned, learned_at
from functionalize.util.bytecode import running

_LOGGING = logging.info.__code__.co_filename
# Functions of `logging` that pass their message on to a method of the root logger.
_FORWARDERS = frozenset(
    id(getattr(logging, name))
    for name in ("debug", "info", "warning", "error", "critical", "fatal", "log")
)
_ENOUGH = 2  # ways: more than one is too many
_LONGEST = 2_000  # characters


@dataclass(frozen=True, slots=True, eq=False)
class Formatted:
    """A number as text: `function(number, *args)`, then formatted by `then`. text: that of the recording."""

    number: Number
    function: Callable[..., str]
    args: tuple[Any, ...]
    then: str
    text: str

    def of(self, number: Any) -> str:
        """The text of another number."""
        return format(self.function(number, *self.args), self.then)

    @property
    def recorded(self) -> str:
        """The text of the number while the step was recorded."""
        return str(self.number.shown_by(self.of))


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A text that no call has taken yet. at: the position of the step that formatted it, in the frame `frame`.

    learned: the function and its arguments, whose result Python has.
    element: for an element that a comprehension makes, its frame, its text, and the position of the formatting there;
    `frame` and `at` are then those of the call during which it runs, or of the list that it makes in line.
    """

    frame: FrameType
    at: int
    site: CallSite
    piece: Formatted
    learned: tuple[Callable[..., Any], tuple[Any, ...]]
    traceback: CapturedTraceback
    element: tuple[FrameType, Text, int] | None = None


Template = tuple[str | Formatted, ...]


def text_of(number: Number, function: Callable[..., str], *args: Any) -> str:
    """The text `function(number, *args)`: with a fact, unless a call that is repeated receives it."""
    if not number.alive:
        return str(number.shown_by(function, *args))
    frame = _formatting(sys._getframe(2))
    if frame is None or not _is_pending(number, frame, function, args):
        return str(learned(function, number, *args))
    return str(number.shown_by(function, *args))


def is_formatted(number: Number, function: Callable[..., Any]) -> bool:
    """Whether C code asks for `function(number)` to format it by `%` for a call that is repeated, and is no fact."""
    frame = sys._getframe(2)
    if not number.alive or running(frame).op != "binary":
        return False
    return _is_pending(number, frame, function, ())


def _is_pending(
    number: Number, frame: FrameType, function: Callable[..., Any], args: tuple[Any, ...]
) -> bool:
    """Whether only a call that is repeated receives the text that the instruction of a frame formats."""
    at, learned = running(frame).at, (function, args)
    site, element = site_at(frame.f_code, at), None
    inner, inside = site, at
    if inner is not None and inner.callee is ELEMENT and inner.args[0] and frame.f_back is not None:
        element = frame, inner.args[0], at
        if inner.made_at is not None:  # in line: Python 3.12 and newer
            at = inner.made_at
        else:
            frame = frame.f_back
            at = running(frame).at
        site = site_at(frame.f_code, at)
    if site is None or inner is None or not _takes_text(callee_of(site, frame)):
        return False
    if inside in inner.formats:
        function, args = inner.formats[inside].__mod__, ()
    try:
        text = number.shown_by(function, *args)
    except (TypeError, ValueError):  # more than one value is formatted
        return False
    piece = Formatted(number, function, args, inner.conversions.get(inside, ""), text)
    texts: list[_Pending] = number.log.texts
    made_here = (p for p in texts if p.frame is frame and p.at == at)
    own = None if element is None else element[0]
    for stale in [p for p in made_here if p.element is None or p.element[0] is not own]:
        texts.remove(
            stale
        )  # an exception ended the call that was to receive it, or it is one of several numbers
        _learn(stale)
    trace = CapturedTraceback.extract()
    texts.append(_Pending(frame, at, site, piece, learned, trace, element))
    return True


def _formatting(frame: FrameType) -> FrameType | None:
    """The frame whose instruction asks for the text: that around `Tensor.__format__`, for the text of a tensor."""
    return frame.f_back if frame.f_code is Tensor.__format__.__code__ else frame


def _takes_text(function: Any) -> bool:
    return hasattr(function, TAKES_TEXT) or id(function) in _FORWARDERS


def taken(
    log: ScalarLog, frame: FrameType, args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[int | str, Template]:
    """The arguments of the call that `frame` makes that are texts of live numbers, by position or name.

    They are no facts from now on. If the place of a number in a text is not certain, they stay facts, and none is
    returned.
    """
    while frame.f_code.co_filename == _LOGGING and frame.f_back is not None:
        frame = frame.f_back
    at = running(frame).at
    mine = [p for p in log.texts if p.frame is frame and p.site.at == at]
    if not mine:
        return {}
    site = mine[0].site
    pieces: dict[int, list[_Pending]] = {}
    for each in mine:
        pieces.setdefault(each.at, []).append(each)
    found: dict[int | str, Template] = {}
    wanted: list[tuple[int | str, Text | None]] = [*enumerate(site.args), *site.keywords.items()]
    values: list[tuple[int | str, Any]] = [*enumerate(args), *keywords.items()]
    for key, text in wanted:
        if text is None or pieces.keys().isdisjoint(text.parts):
            continue
        template = _template(text, pieces, dict(values).get(key))
        if template is None:
            return {}
        found[key] = template
    for each in mine:
        log.texts.remove(each)
    return found


def learn_texts(log: ScalarLog) -> None:
    """Make facts of the texts that no call has taken."""
    for pending in log.texts:
        _learn(pending)
    log.texts.clear()


def _learn(pending: _Pending) -> None:
    function, args = pending.learned
    learned_at(pending.traceback, function, pending.piece.number, *args)


def _pieces(at: int, pieces: Mapping[int, list[_Pending]]) -> list[str | Formatted | None]:
    """What an instruction formats: a number, or elements that are joined, with unknown texts between them."""
    found = pieces.get(at, [])
    parts: list[str | Formatted | None] = [None]
    for each in found:
        if each.element is None:
            return [each.piece]
        _, text, inside = each.element
        parts += [
            p if isinstance(p, str) else each.piece if p == inside else None for p in text.parts
        ]
        parts.append(None)
    return parts


def _template(text: Text, pieces: Mapping[int, list[_Pending]], value: Any) -> Template | None:
    """The parts of a text, which is `value` now; None if a number may be at more than one place in it.

    Parts between the numbers may be unknown: they are texts of constants of the step.
    """
    if type(value) is not str:
        return None
    if any(len({p.element[2] for p in found if p.element}) > 1 for found in pieces.values()):
        return None  # of which elements the numbers are is not known
    parts: list[str | Formatted | None] = []
    for each in text.parts:
        parts += [each] if isinstance(each, str) else _pieces(each, pieces)
    places = _places(parts, value)
    if len(places) != 1:
        return None
    found: list[str | Formatted] = []
    end = 0
    for part, start in zip((p for p in parts if isinstance(p, Formatted)), places[0], strict=True):
        found += [value[end:start], part]
        end = start + len(part.recorded)
    return (*found, value[end:])


def _places(parts: Sequence[Any], value: str) -> list[tuple[int, ...]]:
    """Where the numbers can be in a text: for each way, their positions; at most two ways. None: an unknown text."""

    @functools.cache
    def ways(at: int, start: int) -> tuple[tuple[int, ...], ...]:
        if at == len(parts):
            return ((),) if start == len(value) else ()
        part = parts[at]
        if part is None:
            ends = range(start, len(value) + 1)
            found = dict.fromkeys(way for end in ends for way in ways(at + 1, end))
            return tuple(found)[:_ENOUGH]
        text = part if isinstance(part, str) else part.recorded
        if not value.startswith(text, start):
            return ()
        rest = ways(at + 1, start + len(text))
        return rest if isinstance(part, str) else tuple((start, *way) for way in rest)

    return list(ways(0, 0)) if len(value) <= _LONGEST else []
