"""Sums over the rows of a table: by kind, by group, by module, or by any of their keys.

    summed(rows, "kind", "phase")      one row for every kind in every phase, in the order of the first of each

A row is a frozen dataclass: the fields in its `KEYS` identify a row, the others are added up. A key that is not among
the arguments keeps its value if all summed rows have the same, and is empty (`""`, 0) if they differ.
Refuses (`ValueError`): a key that rows do not have.
Linear in rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, ClassVar, Protocol, TypeVar


class SummableRow(Protocol):
    """A row of a table. KEYS: the names of the fields that identify a row."""

    KEYS: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=SummableRow)


def summed(rows: Iterable[R], *keys: str) -> list[R]:
    """The rows summed up by these keys; without any, one row, or none if there are none."""
    found: dict[tuple[Any, ...], R] = {}
    for row in rows:
        unknown = [key for key in keys if key not in row.KEYS]
        if unknown:
            raise ValueError(f"rows have no key `{unknown[0]}`; theirs are {', '.join(row.KEYS)}")
        at = tuple(getattr(row, key) for key in keys)
        found[at] = row if at not in found else _sum(found[at], row)
    return list(found.values())


def _sum(a: R, b: R) -> R:
    changes: dict[str, Any] = {}
    for each in fields(a):
        x, y = getattr(a, each.name), getattr(b, each.name)
        if each.name not in a.KEYS:
            changes[each.name] = x + y
        elif x != y:
            changes[each.name] = type(x)()
    return replace(a, **changes)
