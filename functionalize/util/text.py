"""Numbers in what people read.

    counted(1, "program")     1 program
    counted(0, "program")     0 programs

Invariant: the number comes first, as its digits; the plural of the last word ends in `s`.
"""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """How many of a thing there are."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
