"""Formats of numbers and texts that a file holds: they are short, and they fit what is formatted.

    check_spec("8.3f", LoadError)               f"{loss:8.3f}"
    check_spec("999999999d", LoadError)         LoadError: its width is the file's, and so is the memory for it
    check_template("%6d %s", (1, ""), ...)      "%6d %s" % (step, name)
    check_template("%(a)d", (1,), ...)          LoadError: that is an error of every call

Invariant: a text takes no more characters than what is counted here, and Python formats it without an error, as far as
that does not depend on the numbers of a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from functionalize.errors import FunctionalizeError

# Of a number in a text, without the width and the precision of its format.
NUMBER_LENGTH = 32
_SPEC = re.compile(
    r"(?:.?[<>=^])?[-+ ]?z?#?0?(?P<width>\d{0,3})[,_]?(?:\.(?P<precision>\d{1,3}))?[,_]?[a-zA-Z%]?",
    re.DOTALL,
)
_CONVERSION = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?[#0\- +]*(?P<width>\*|[0-9]*)(?:\.(?P<precision>\*|[0-9]*))?[hlL]?"
    r"(?P<kind>.)",
    re.DOTALL,
)
_KINDS = frozenset("diouxXeEfFgGcrsa%")
_DIGITS = 3
# In braces: an attribute or an element, a long number in a specification.
_FIELD = re.compile(r"\{\w*([.\[]|(![rsa])?:[^{}]*\d{4})")


def check_spec(
    spec: Any, kind: type[FunctionalizeError], examples: tuple[Any, ...] = (1, 1.0)
) -> int:
    """The characters that `format(value, spec)` takes at most beside those of the value.

    Raises an error of this kind for a long width or precision, and for a specification that formats no example.
    """
    found = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if found is None or not any(_is_formatted(each, spec) for each in examples):
        raise kind(f"prints a number in a format that no file may have ({spec!r:.40})")
    return _number(found["width"]) + _number(found["precision"])


def _is_formatted(value: Any, spec: str) -> bool:
    try:
        format(value, spec)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _number(digits: str | None) -> int:
    return int(digits) if digits else 0


def check_template(
    template: Any,
    args: tuple[Any, ...] | Mapping[str, Any],
    kind: type[FunctionalizeError],
    most: int,
    of_others: int = NUMBER_LENGTH,
) -> int:
    """The characters that `template % args` takes at most; raises an error of this kind above `most`, or if it fails.

    args: constants, and in the places of values that differ from call to call 1, which every conversion takes.
    of_others: the characters of a value that is no text.
    """
    if not isinstance(template, str):
        raise kind("puts values into a template that is no constant text, which a file cannot hold")
    count, at = len(template), 0
    for found in _CONVERSION.finditer(template):
        numbers = found["width"], found["precision"] or ""
        if found["kind"] not in _KINDS or any(n == "*" or len(n) > _DIGITS for n in numbers):
            raise kind(f"formats by {found[0]!r:.40}, which no file may: write a width below 1000")
        value = None
        if isinstance(args, Mapping):
            value = args.get(found["key"])
        elif found["kind"] != "%" and at < len(args):
            value, at = args[at], at + 1
        count += sum(map(_number, numbers)) + _length(value, found["kind"], of_others)
        if count > most:
            raise kind("makes a text that is too long for a file")
    try:
        template % args
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise kind(f"has {template!r:.40} for other values than it takes ({error})") from None
    return count


def _length(value: Any, conversion: str, of_others: int) -> int:
    if isinstance(value, str):
        return len(value) if conversion == "s" else length_of(value)
    return length_of(value) if isinstance(value, bytes) else of_others


def length_of(constant: str | bytes) -> int:
    """The characters that a constant takes in a text at most, with escapes."""
    return 10 * len(constant)


def check_braces(template: str, kind: type[FunctionalizeError]) -> None:
    """Raise an error of this kind for fields of `str.format` that read attributes or take a long width.

    Python's own log records do not format by braces, those of a program may.
    """
    if _FIELD.search(template):
        raise kind(f"has {template!r:.40}, whose braces no file may have beside arguments")
