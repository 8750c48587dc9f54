"""What an audit has found: nothing, a difference, or that no program would have been replayed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """The result of an audit. missed: a guard on a number does not hold, so that nothing can be said."""

    difference: str | None = None
    missed: str | None = None

    def message(self, name: str, number: int) -> str | None:
        """How the step differed from the program; None: it did not, or that is not known.

        name: of the step. number: which call of the program this was.
        """
        if self.difference is None:
            return None
        return (
            f"an audit of {name}: call {number} of a program differs from eager, and the program is dropped "
            f"(the call itself ran eagerly): {self.difference}"
        )
