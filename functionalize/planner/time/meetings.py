"""Where two ranks meet: a message moves when both have come to it, so the schedules of several ranks run together.

    rank 0   forward 0 ─ send ─┐ forward 1 ─ send ─┐         waiting       backward 0 …
    rank 1      waiting        └ forward 0 ────────└ forward 1 ─ backward 0 ─ send

    half = meetings.post(pair, tag, sends, Posted(at, seconds, "send to rank 1"))      a schedule comes to its half
    run_together([schedule.steps(), ...])                         until all have ended

A schedule goes on when it has posted its half, and yields where its compute stream waits for a message whose other half
is not posted yet. The n-th send of a pair of ranks meets their n-th receive. It starts when both halves are ready and
the one before it, of the same pair in the same direction, has ended; messages of other pairs and the other direction
share no link with it.
Invariant: what comes out does not depend on the order in which the schedules are run.
Refuses: messages of which the other half never comes (`PlanError`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from functionalize.errors import PlanError


@dataclass(slots=True, eq=False)
class Posted:
    """One half of a message. ready: when its rank has come to it. start, end: of the message; -1: not known yet.

    stream: in words, of this rank.
    """

    ready: float
    seconds: float
    stream: str
    start: float = -1.0
    end: float = -1.0

    @property
    def is_known(self) -> bool:
        """Whether the other rank has come to its half, too."""
        return self.end >= 0.0


class Meetings:
    """The messages between some ranks, in the order of each pair."""

    def __init__(self) -> None:
        self._open: dict[tuple[Hashable, int, bool], deque[Posted]] = {}
        self._free: dict[Hashable, float] = {}

    def post(self, pair: Hashable, tag: int, sends: bool, half: Posted) -> Posted:
        """Add the next half of a pair's messages. sends: whether it is that of the sender; else the receiver's."""
        others = self._open.get((pair, tag, not sends))
        if not others:
            self._open.setdefault((pair, tag, sends), deque()).append(half)
            return half
        other = others.popleft()
        start = max(half.ready, other.ready, self._free.get(pair, 0.0))
        end = start + max(half.seconds, other.seconds)
        self._free[pair] = end
        for each in (half, other):
            each.start, each.end = start, end
        return half


class Alone(Meetings):
    """The messages of one rank whose others are not planned: each is taken to be where it is waited for."""

    def post(self, pair: Hashable, tag: int, sends: bool, half: Posted) -> Posted:
        half.start = max(half.ready, self._free.get(pair, 0.0))
        self._free[pair] = half.end = half.start + half.seconds
        return half


def run_together(schedules: Sequence[Iterator[Posted]]) -> None:
    """Run schedules to their end, each as far as the others let it. Each yields the halves that it waits for."""
    waits = [next(each, None) for each in schedules]
    while any(wait is not None for wait in waits):
        is_stuck = True
        for number, schedule in enumerate(schedules):
            while (wait := waits[number]) is not None and wait.is_known:
                waits[number], is_stuck = next(schedule, None), False
        if is_stuck:
            text = next(wait.stream for wait in waits if wait is not None)
            raise PlanError(
                f"the ranks do not meet: one message, `{text}`, has no other half in the steps that were planned. "
                "Plan all ranks that exchange messages, with equal numbers of microbatches"
            )
