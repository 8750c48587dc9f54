"""Whether replays pay: a step whose replays take longer than the step itself runs eagerly.

    pace.runs_eagerly()            whether this call runs eagerly: its time is wanted, or other calls were slower
    pace.ran(seconds)              such a call has run
    pace.looked(looked, acted)     the seconds in which another call looked at guards, and those in which it then ran,
                                   while calls are timed

The ledger counts what each kind of work costs by constants. These hold where an eager step has enough to do: of a step
of a few small ops, the guards may take longer than the ops, and an object that is made anew before each call makes all
objects be looked at again. So time is asked where it may matter: once guards that took more than half as long as what
they guard have taken a second in all, four replays and four eager calls are timed in turn. If the replays were slower,
64 calls run eagerly, then as many are timed again, and each rest is twice as long as the one before.

Only of a process by itself: ranks do alike what their counts say, not their clocks. Not where the user asks for more
replays than pay (`allowance=None`) or for audits of each call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from functionalize.util.text import counted

most_seconds = 1.0  # in guards, before calls are timed
_TIMED = 4  # of each kind
_SLOWER = 1.05
_FIRST_REST, _LONGEST_REST = 64, 4096  # calls
_LATER = 4  # as many seconds as before, where they were not


class Pace:
    """The times of the calls of one step.

    seconds: those that guards have taken which took more than half as long as what followed; above `limit` the step
    begins to time its calls. is_timing: whether it does. asks: whether it asks `runs_eagerly` before each call.
    A replay only reads and adds to these: it calls nothing.
    warn: called once with how many times slower calls are that ask programs.
    """

    def __init__(
        self, warn: Callable[[float], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock, self._warn = clock, warn
        self.seconds, self.limit = 0.0, most_seconds
        self._eager: list[float] = []
        self._asking: list[float] = []
        self.is_timing = self.asks = self._times_eager = self._has_warned = False
        self._rest, self._left = _FIRST_REST, 0

    @property
    def left(self) -> int:
        """The number of calls that run eagerly before replays are timed again."""
        return self._left

    @property
    def why(self) -> str:
        """What the next call does for its sake; empty: nothing."""
        if self._left:
            return f"runs eagerly, as will {counted(self._left, 'call')}: replays take longer than the step itself"
        return ""

    def runs_eagerly(self) -> bool:
        """Whether this call runs eagerly."""
        self._times_eager = False
        if self._left:
            self._left -= 1
            return True
        self._times_eager = self.is_timing and len(self._eager) < len(self._asking)
        return self._times_eager

    def ran(self, seconds: float) -> None:
        """A call that runs eagerly has taken so long."""
        if self._times_eager:
            self._eager.append(seconds)
            if len(self._eager) == _TIMED:
                self._compare()

    def looked(self, looked: float, acted: float) -> None:
        """A call that asked programs has taken so long, before the replay or the eager run, and for that."""
        self._asking.append(looked + acted)

    def _compare(self) -> None:
        slower = statistics.median(self._asking) / statistics.median(self._eager)
        self._eager.clear()
        self._asking.clear()
        if slower > _SLOWER:
            self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
            if not self._has_warned:
                self._has_warned = True
                self._warn(slower)
            return
        self.is_timing = self.asks = False
        self.seconds, self._rest = 0.0, _FIRST_REST
        self.limit *= _LATER
