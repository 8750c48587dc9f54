"""The rest of a step that was given up, since its programs were dropped one after the other without a replay.

    rest.begin()             calls that no program covers run eagerly, the next `FIRST_REST` of them
    rest.takes_call()        whether this call is one of them
    rest.is_vain(replays)    whether a few recordings after a rest were of no use either: the next rest is twice as long

Invariant: a recording costs some six eager steps, so what the recordings between two rests cost is below two percent
of the calls of a rest.
"""

from __future__ import annotations

FIRST_REST = 1024  # calls
_RECORDINGS = 3  # after a rest, before the next one: of most steps the first recording is not kept


class Rest:
    """Which calls of a step that was given up run eagerly."""

    def __init__(self) -> None:
        self._left = 0  # calls
        self._length = FIRST_REST
        # Since the last rest; None: there was none, or a program was of use after it.
        self._recordings: int | None = None
        self._replays = 0  # before the last rest

    @property
    def length(self) -> int:
        """The number of calls of the next rest."""
        return self._length

    def begin(self, replays: int) -> None:
        """Give the step up. replays: of its programs so far."""
        self._left, self._length = self._length, 2 * self._length
        self._recordings, self._replays = 0, replays

    def takes_call(self) -> bool:
        """Whether this call is a part of the rest; counts it."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def is_vain(self, replays: int) -> bool:
        """Whether a call that no program covers is not worth a recording; counts the recordings after a rest."""
        if self._recordings is None:
            return False
        if replays > self._replays:  # a program was of use
            self._recordings = None
            return False
        self._recordings += 1
        return self._recordings > _RECORDINGS
