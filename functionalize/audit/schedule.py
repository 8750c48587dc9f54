"""Which calls of a program are audited: the option `audit` of `capture`.

    audit="auto"      its calls 8, 17, 34, 67, 132, 261 and 518, then every 1,003rd; a difference is logged
    audit="raise"     the same calls; a difference raises `AuditError` after the step has run
    audit=n           every n-th call; 1: every call
    audit=False       none; so does None

The calls of each program are counted from its capture. Call 2**k is audited k - 3 calls later, and the long distance is
odd: a value that changes with a period of 2, 4 or 8 calls would have its recorded value at every call 2**k or 1000 * k.
Invariant: the schedule depends on the program's own calls alone. Ranks that vote audit together if one of them is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AuditOption = bool | int | Literal["auto", "raise"] | None

_FIRST, _LAST = 3, 9  # the exponents of the early calls
_EARLY = frozenset(2**k + k - _FIRST for k in range(_FIRST, _LAST + 1))
_EVERY = 1003


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

    def is_due(self, call: int) -> bool:
        """Whether call number `call` of a program is audited; the first call after its capture is number 1."""
        if self.every is None:
            return call in _EARLY or (call > 2**_LAST and call % _EVERY == 0)
        return self.every > 0 and call % self.every == 0
