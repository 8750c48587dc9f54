"""Which calls of a program are audited: the option `audit` of `capture`.

    audit="auto"      calls 8, 17, 34, 67, 132, 261, 518, 1,031 and 2,056, then every 4,001st; a difference is logged
    audit="raise"     the same calls; a difference raises `AuditError` after the step has run
    audit=n           every n-th call; 1: every call
    audit=False       none; so does None

The calls of each program are counted from its capture. Call 2**k is audited k - 3 calls later, and the long distance
is a prime: a value that changes with a period of 2, 4 or 8 calls would have its recorded value at every call 2**k or
4000 * k. The distance bounds the cost: 33 audits in 100,000 calls are less than 0.3 % of the replays, as long as a late
audit takes less than eight of them, 6 to 7.6 are measured (`benchmarks/audit.py`), and an early one thirteen, 10.2 to
11.7. Each of them compares results, too, where these can be compared: that is the smaller part of its time.
What the step changed in Python, and effects that only a profile function sees, cost as much again: of the default
schedule the early calls alone are compared so (`is_thorough`), 9 of the 33, and all calls of a schedule of one's own.
A captured forward and its backward are recorded for an audit, which takes 12 to 14 replays, an early one 13 to 16:
every 8,009th call of them is audited late.
Invariant: the schedule depends on the program's own calls alone. Ranks that vote audit together if one of them is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AuditOption = bool | int | Literal["auto", "raise"] | None

_FIRST, _LAST = 3, 11  # the exponents of the early calls
_EARLY = frozenset(2**k + k - _FIRST for k in range(_FIRST, _LAST + 1))
_EVERY, _EVERY_PAIR = 4001, 8009


@dataclass(frozen=True, slots=True)
class AuditSchedule:
    """The checked option. every: the distance of audited calls; 0: none; None: the default schedule.

    raises: whether a difference raises `AuditError`.
    """

    every: int | None
    raises: bool = False

    @staticmethod
    def of(option: AuditOption) -> AuditSchedule:
        """Raises `ValueError` for an option that is none of those above."""
        if option is None or option is False:
            return AuditSchedule(0)
        if option is True or option == "auto":
            return AuditSchedule(None)
        if option == "raise":
            return AuditSchedule(None, raises=True)
        if isinstance(option, int) and option >= 1:
            return AuditSchedule(option)
        raise ValueError(
            f"audit is 'auto', 'raise', False, or a number n >= 1 (every n-th call), not {option!r}"
        )

    def is_due(self, call: int, is_pair: bool = False) -> bool:
        """Whether call number `call` of a program is audited; the first call after its capture is number 1.

        is_pair: whether the program is a forward with a backward.
        """
        if self.every is None:
            every = _EVERY_PAIR if is_pair else _EVERY
            return call in _EARLY or (call > 2**_LAST and call % every == 0)
        return self.every > 0 and call % self.every == 0

    def is_thorough(self, call: int) -> bool:
        """Whether what such a call changes in Python, and all its effects, are looked at."""
        return self.every is not None or call in _EARLY
