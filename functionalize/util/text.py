"""Numbers and nouns in messages.

    counted(1, "program")     1 program
    counted(0, "program")     0 programs
    without_numbers("`n` is 5, was 4")     `n` is #, was #
    with_article("AdamW")     an AdamW
    without_article("the code of f")     code of f

Invariant of `counted`: the number comes first, as its digits; the plural of the last word ends in `s`.
"""

from __future__ import annotations

import re


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
