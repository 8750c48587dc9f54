"""The classes of a step whose sizes the step computes, by the kind of their calls.

    classes.learn(key, reference, sources, observer)     a recorded call; key: of the call, without computed sizes
    kind = classes.of(key)                               None: no such call was recorded
    kind.turn()                                          what the next call of this kind does

A replay that meets a size that does not fit costs its own time beside that of the call. So a kind of which more than
`_MOST_MISSES` of the last `_WINDOW` replays did runs eagerly for a while, and then tries again.
Refusals: a kind of which `_MOST_APART` recordings are no one program, as of a step that decides by what it computes how
many ops it runs; the error says where they part.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize.errors import UncapturableError
from functionalize.late_sizes.late_class import LateClass
from functionalize.late_sizes.late_observer import LateObserver
from functionalize.lengths.coverage import THINNEST
from functionalize.lengths.recorded_calls import RecordedCall
from functionalize.templates.call_keys import open_key
from functionalize.templates.template import first_difference

_MOST_APART = 4  # recordings of as many classes, none of which has a template
_MOST_KINDS = 64
_MOST = 14  # recordings of a kind before replays have returned their time
_REPLAYS = 64  # a recording takes as long as so many replays return
_WINDOW, _MOST_MISSES = 32, 8  # a replay returns a third of what one that misses costs
_FIRST_REST = 128  # calls that run eagerly before replays are tried again


class Turn(enum.Enum):
    """What a call does."""

    REPLAY = enum.auto()
    RECORD = enum.auto()
    REST = enum.auto()


@dataclass(slots=True, eq=False)
class LateKind:
    """One kind of call. every: one in so many calls is recorded. is_left: whether it is not recorded any more.

    new: calls since the last recording. gap: after so many the next one is recorded. rest: calls that run eagerly.
    """

    every: int
    classes: list[LateClass] = field(default_factory=list)
    new: int = 0
    gap: int = 0
    rest: int = 0
    is_left: bool = False
    _next_rest: int = _FIRST_REST
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def group(self) -> LateClass:
        """The class that is replayed, or that most recordings are of."""
        return max(self.classes, key=lambda each: (each.is_ready, each.replays, each.recorded))

    @property
    def recorded(self) -> int:
        """The number of recordings."""
        return sum(each.recorded for each in self.classes)

    @property
    def may_record(self) -> bool:
        """Whether the time of another recording has been saved by replays."""
        replays = sum(each.replays for each in self.classes)
        return self.group.lost is None and self.recorded < _MOST + replays // _REPLAYS

    def turn(self) -> Turn:
        """What the next call does; counts it."""
        if not self.group.is_ready:
            self.is_left = not self.may_record
            return Turn.REST if self.is_left else Turn.RECORD
        if self.rest:
            self.rest -= 1
            return Turn.REST
        self.new += 1
        if self.new < self.gap:
            return Turn.REPLAY
        self.gap = min(2 * self.gap, THINNEST * self.every)
        return Turn.RECORD

    def replayed(self, group: LateClass, fits: bool) -> None:
        """A replay has run its graph. fits: whether all sizes did, on all ranks."""
        group.replays += fits
        group.misses += not fits
        self._recent.append(fits)
        if self._recent.count(False) > _MOST_MISSES:
            self._recent.clear()
            self.rest, self._next_rest = self._next_rest, 2 * self._next_rest


class LateClasses:
    """every: one in so many calls is recorded, and compared."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._kinds: dict[Hashable, LateKind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[LateClass]:
        return (each for kind in self._kinds.values() for each in kind.classes)

    def of(self, key: Any) -> LateKind | None:
        """The kind of a call; None: none with computed sizes was recorded."""
        return self._kinds.get(open_key(key)) if self._kinds else None

    def learn(
        self,
        key: Any,
        reference: RecordedCall,
        sources: Sequence[str | None],
        observer: LateObserver | None,
    ) -> None:
        """Add a recorded call. sources: of each size of a result, what gives it; None: it is known early.

        Raises `UncapturableError` if recordings of this kind are no one program.
        """
        kind = self.of(key)
        if kind is None:
            kind = self._kinds[open_key(key)] = LateKind(self._every, gap=self._every)
            if len(self._kinds) > _MOST_KINDS:
                for each in self._kinds.pop(next(iter(self._kinds))).classes:
                    each.templates = each.instances = None  # its programs are dropped
        kind.new = 0
        tokens = hash((reference.tokens, open_key(reference.key)))
        found = next((each for each in kind.classes if each.tokens == tokens), None)
        if found is None:
            found = LateClass(tokens, self._every)
            kind.classes.append(found)
        found.add(reference, [text is not None for text in sources], observer)
        why = _why_apart(kind, reference)
        if why is not None:
            text = next(text for text in sources if text is not None)
            raise UncapturableError(f"{text}, and {why}")


def _why_apart(kind: LateKind, latest: RecordedCall) -> str | None:
    """Where recordings of a kind part, if as many with arguments of one size are no one program; None: they may be."""
    shapes = latest.shapes[:-1]
    alike = [each for each in kind.classes if any(r.shapes[:-1] == shapes for r in each.references)]
    if len(alike) < _MOST_APART or any(each.templates is not None for each in kind.classes):
        return None
    first = next(r for each in alike for r in each.references if r.shapes[:-1] == shapes)
    difference = first_difference(first.leaves[0], latest.leaves[0])
    where = ": ".join(difference) if difference is not None else "a size is 0 or 1 in some of them"
    return f"{len(alike)} recorded calls are no one program, at {where}"
