"""Numbers in messages.

    counted(1, "program")     1 program
    counted(0, "program")     0 programs

Invariant: the number comes first, as its digits; the plural of the last word ends in `s`.
"""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """`count` and the noun `what`, in the plural unless `count` is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
