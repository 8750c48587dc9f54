"""Every type of the standard library's modules of state is guarded, has no state, or is refused."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import pytest

from functionalize.walk import parts
from tests.walk import standard_types as types_of

_IS_TABLES = sys.version_info[:2] == (3, 11)  # another Python has other types


@pytest.mark.parametrize("module", types_of.MODULES)
def test_a_walk_notices_every_change_of_every_type_or_refuses_it(module: str) -> None:
    rows = types_of.rows(module)
    missed = {f"{row.module}.{row.name}": row.unnoticed for row in rows if row.unnoticed}
    assert not missed
    assert rows
    if _IS_TABLES:
        not_made = [(row.name, row.verdict) for row in rows if row.verdict.startswith("not made")]
        assert not not_made, "add a recipe, or a reason to `NOT_MADE`"


@pytest.mark.skipif(not _IS_TABLES, reason="another Python has other types")
def test_the_table_in_the_docs_is_current() -> None:
    page = types_of.PART.text
    assert types_of.PART.put_into(page, types_of.table()) == page, (
        "python -m tests.walk.standard_types --write"
    )


def test_every_exception_is_of_a_change_that_is_tried() -> None:
    """A type of which a walk notices the change again needs no exception."""
    for name, change in types_of.UNCHANGED | types_of.KNOWN_GAPS:
        module, _, kind = name.rpartition(".")
        value = types_of.RECIPES[name]()
        texts = {types_of.text_of(m, a): (r, m, a) for r, m, a in types_of.changes(value)}
        read, method, args = texts[change]
        assert module in types_of.MODULES and kind
        assert types_of.noticed(value, read, partial(getattr(value, method), *args)) == "nothing"


def test_an_attribute_that_no_walk_looks_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration fails for a type whose attributes nobody looks at."""

    def blind(value: Any, names: Any) -> Any:
        return parts.Parts(type(value))

    monkeypatch.setitem(parts._READERS, random.Random, blind)
    row = types_of.verdict("random", "Random", random.Random)
    assert {"__setattr__('k', 7)", "seed(7)"} <= {*row.unnoticed}
