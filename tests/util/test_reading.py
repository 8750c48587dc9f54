"""Elements of containers are read without a method of the user's class, and without a change."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest

from functionalize.util.reading import item_of
from functionalize.util.unchanged import Unchanged


class Loud(dict[Any, Any]):
    """A dict whose own methods must not be called."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("called")

    def get(self, *key: Any) -> Any:
        """As above."""
        raise AssertionError("called")

    def __missing__(self, key: Any) -> Any:
        raise AssertionError("called")


class LoudList(list[Any]):
    """A list whose own methods must not be called."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("called")


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ({"a": 1}, "a"),
        (OrderedDict(a=1), "a"),
        (defaultdict(int, a=1), "a"),
        (Loud(a=1), "a"),
        (MappingProxyType({"a": 1}), "a"),
        ([0, 1], 1),
        (LoudList([0, 1]), 1),
        ((0, 1), 1),
        (Pair(0, 1), 1),
    ],
)
def test_an_element(container: Any, key: Any) -> None:
    assert item_of(container, key) == 1


@pytest.mark.parametrize(
    ("container", "key"),
    [({}, "a"), (defaultdict(list), "a"), (Loud(), "a"), ([], 0), (LoudList(), 0), ((), 0)],
)
def test_no_element(container: Any, key: Any) -> None:
    with pytest.raises(LookupError):
        item_of(container, key)
    assert not len(container)


@pytest.mark.parametrize("container", [defaultdict(list, a=[]), Loud(a=[])])
def test_facts_about_an_entry_make_none(container: dict[str, Any]) -> None:
    facts = Unchanged()
    facts.entry(container, "a")
    facts.freeze()
    assert facts.hold()
    del container["a"]
    assert not facts.hold() and not len(container)
