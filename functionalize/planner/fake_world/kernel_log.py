"""Which kernels a target device is assumed to run, how often, and why: the report of a plan's assumptions.

    choices.rows        [Choice("scaled_dot_product_attention", "cudnn", "the first in the order of sm_90", 64), ...]
    print(choices.text())

Rows are in the order of their first call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """An op ran a kernel `count` times for one reason."""

    op: str
    kernel: str
    reason: str
    count: int


class Choices:
    """The choices so far. target: the name of the target."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._counts: dict[tuple[str, str, str], int] = {}

    def __repr__(self) -> str:
        return f"<Choices for {self.target}: {len(self._counts)} kernels>"

    def __str__(self) -> str:
        return self.text()

    def note(self, op: str, kernel: str, reason: str) -> None:
        """Count one more call of `op`."""
        key = op, kernel, reason
        self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def rows(self) -> list[Choice]:
        """A row per op, kernel and reason."""
        return [Choice(*key, count) for key, count in self._counts.items()]

    def kernels(self, op: str) -> dict[str, int]:
        """How often each kernel of an op ran."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.op == op:
                found[row.kernel] = found.get(row.kernel, 0) + row.count
        return found

    def text(self) -> str:
        """One line per choice."""
        if not self._counts:
            return f"for {self.target}: no op had a choice of kernels"
        lines = [
            f"  {row.op} -> {row.kernel} ({row.count} times): {row.reason}" for row in self.rows
        ]
        return "\n".join([f"for {self.target}:", *lines])
