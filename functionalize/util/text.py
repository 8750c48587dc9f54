"""Numbers, units, nouns and tables in messages.

    counted(1, "program")     1 program
    counted(0, "program")     0 programs
    without_numbers("`n` is 5, was 4")     `n` is #, was #
    human_bytes(28020000000)  26.1 GiB
    human_seconds(0.0123)     12.3 ms
    with_article("AdamW")     an AdamW
    without_article("the code of f")     code of f

Invariant of `counted`: the number comes first, as its digits; the plural of the last word ends in `s`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def counted(count: int, what: str) -> str:
    """`count` and the noun `what`, in the plural unless `count` is 1."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def with_article(noun: str) -> str:
    """The noun with `a` or `an`."""
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def without_article(noun: str) -> str:
    """A noun that may begin with `a`, `an` or `the`, without that word."""
    return re.sub(r"^(an?|the) ", "", noun)


def without_numbers(text: str) -> str:
    """The kind of a message: equal for messages that differ in their numbers alone."""
    return re.sub(r"-?\d[\d.e+-]*", "#", text)


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as lines; the first columns, so many, stand at the left, and the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def human_bytes(nbytes: float) -> str:
    """Bytes with three digits and a binary unit: `26.1 GiB`."""
    size, unit = float(nbytes), 0
    while abs(size) >= 999.5 and unit < len(BYTES) - 1:  # 1,000 KiB would need four digits
        size, unit = size / 1024, unit + 1
    return f"{_digits(size)} {BYTES[unit]}" if unit else f"{size:.0f} B"


def human_seconds(seconds: float) -> str:
    """Seconds with three digits and a unit: `12.3 ms`."""
    if seconds == 0:
        return "0 s"
    name, unit = next((u for u in SECONDS if abs(seconds) >= 0.9995 * u[1]), SECONDS[-1])
    return f"{_digits(seconds / unit)} {name}"


def _digits(x: float) -> str:
    """A number with three digits, or with all its integer digits if it has more."""
    size = abs(x)
    return f"{x:.2f}" if size < 9.995 else f"{x:.1f}" if size < 99.95 else f"{x:,.0f}"
