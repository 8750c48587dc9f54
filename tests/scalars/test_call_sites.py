# ruff: noqa: UP031, UP032 (texts are formatted in every way)
"""Where the text of a formatted value goes, read from the bytecode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from functionalize.scalars.call_sites import (
    CallSite,
    callee_of,
    drops_result,
    site_at,
)
from functionalize.util.bytecode import running


class Value:
    """Notes the site of each of its texts."""

    def __init__(self) -> None:
        self.sites: list[CallSite | None] = []
        self.callees: list[Any] = []

    def _note(self) -> None:
        frame = sys._getframe(2)
        site = site_at(frame.f_code, running(frame).at)
        self.sites.append(site)
        self.callees.append(site and callee_of(site, frame))

    def __format__(self, spec: str) -> str:
        self._note()
        return format(1.5, spec)

    def __repr__(self) -> str:
        self._note()
        return "1.5"


def say(*texts: str, **named: str) -> None:
    pass


class Owner:
    """Has methods and attributes."""

    def __init__(self) -> None:
        self.inner: Any = self

    def say(self, *texts: str) -> None:
        pass

    @property
    def other(self) -> Any:
        return self


OWNER = Owner()
percent = "%s"


def closed() -> Callable[[Value], None]:
    talk = say
    return lambda v: talk(f"{v}")


def stores(v: Value) -> None:
    text = f"{v}" + "b"
    say(text)


def stores_below(v: Value) -> None:
    text = "%s" % v
    if v is not None:
        OWNER.say("a", text)


CALLED = [
    (lambda v: say(f"{v}"), say),
    (lambda v: say(f"a {v:.2f} b {3}", 3, name="x"), say),
    (lambda v: say("a", name=f"{v!r:>9}"), say),
    (lambda v: say("a " + "b", str(2), f"{v:{'>'}9}"), say),
    (lambda v: OWNER.say(f"{v}"), Owner.say),
    (lambda v: OWNER.inner.inner.say(f"{len([1, 2])} {v}"), Owner.say),
    (lambda v: print(f"{v}", end=""), print),
    (closed(), say),
    (lambda v: say(f"{v}" + "b"), say),
    (lambda v: say("a" + f"{3}" + str(v), name="x"), say),
    (lambda v: say("%s b" % v), say),
    (lambda v: say("{:.1f} {}".format(v, "b")), say),
    (stores, say),
    (stores_below, Owner.say),
]


@pytest.mark.parametrize(("run", "callee"), CALLED)
def test_a_text_that_one_call_receives(run: Callable[[Value], Any], callee: Any) -> None:
    value = Value()
    run(value)
    assert value.callees == [callee]


def loops(v: Value) -> None:
    for text in [f"{v}"]:
        say(text)


def stores_twice(v: Value) -> None:
    text = ""
    if v is not None:
        text = f"{v}"
    say(text)


def stores_in_a_loop(v: Value) -> None:
    for _ in range(1):
        text = f"{v}"
        say(text)


def uses_twice(v: Value) -> None:
    text = f"{v}"
    say(text, text)


def closes_over(v: Value) -> None:
    text = f"{v}"
    (lambda: say(text))()


def calls_a_variable(v: Value) -> None:
    talk = say
    text = f"{v}"
    talk(text)


def looks_at_locals(v: Value) -> None:
    text = f"{v}"
    say(text, *locals())


ELSEWHERE = [
    stores_twice,
    stores_in_a_loop,
    uses_twice,
    closes_over,
    calls_a_variable,
    looks_at_locals,
    lambda v: say("{!s:>9}".format(v)),
    lambda v: say(percent % v),
    loops,
    lambda v: f"{v}",
    lambda v: say(f"{v}".upper()),
    lambda v: say(f"{v}"[:2]),
    lambda v: say(*[f"{v}"]),
    lambda v: say(**{"a": f"{v}"}),
    lambda v: say([f"{v}"]),  # type: ignore[arg-type]
    lambda v: say(f"{v}" if v else "a"),
    lambda v: say(f"{v}" or "a"),
    lambda v: say(f"{3:{f'{v}'[:1]}}"),
    lambda v: say(repr(v)),
    lambda v: [say, say][0](f"{v}"),
]


@pytest.mark.parametrize("run", ELSEWHERE)
def test_a_text_that_may_go_elsewhere(run: Callable[[Value], Any]) -> None:
    value = Value()
    run(value)
    assert value.sites == [None]


def test_a_callee_that_takes_code_to_find_is_not_known() -> None:
    value = Value()
    OWNER.other.say(f"{value}")
    assert value.callees == [None]


def test_the_parts_of_a_text() -> None:
    value = Value()
    say(f"a {value:.1f} b {value!r:>5}", 3, end=f"{value}")  # type: ignore[arg-type]
    first, second, third = value.sites
    assert first == second == third is not None
    (text, other), (end,) = first.args, first.keywords.values()
    assert other is None
    assert text is not None and end is not None
    assert [part for part in text.parts if isinstance(part, str)] == ["a ", " b "]
    assert len(text.parts) == 4
    assert len(end.parts) == 1
    assert list(first.conversions.values()) == [">5"]


def test_whether_a_result_is_dropped() -> None:
    found = []

    def ask() -> bool:
        found.append(drops_result(sys._getframe(1)))
        return True

    ask()
    kept = ask()
    if ask():
        del kept
    assert found == [True, False, False]
