"""What is found about a class is kept as long as the class lives."""

from __future__ import annotations

import functools
import gc
import logging
import math
import weakref
from typing import Any

from functionalize.util.by_class import by_class
from functionalize.walk.code_names import NameFilter
from functionalize.walk.parts import OwnNames, parts_of, slot_names


def test_it_is_found_once() -> None:
    asked: list[type] = []

    @by_class
    def name(kind: type) -> str:
        """Its name."""
        asked.append(kind)
        return kind.__name__

    assert [name(int), name(bool), name(int)] == ["int", "bool", "int"]
    assert asked == [int, bool] and name.__doc__ == "Its name."


def test_a_class_that_was_walked_is_collected() -> None:
    def made() -> Any:
        class Handler(logging.Handler):
            __slots__ = ("level_of_user",)

        class Lines(list[int]):
            __slots__ = ("tag",)

        for value in (Handler(), Lines()):
            parts_of(value, NameFilter())
        assert "tag" in slot_names(Lines)
        return [weakref.ref(Handler), weakref.ref(Lines)]

    kinds = made()
    gc.collect()
    assert [kind() for kind in kinds] == [None, None]


def test_a_method_that_wraps_a_function_of_c() -> None:
    """Its code is that of no Python function."""

    class Log(logging.Logger):
        @functools.wraps(math.floor)
        def floor(self) -> int:
            return 0

    Log.__module__ = "logging"  # as of a library
    assert "level" not in OwnNames(Log, NameFilter())
