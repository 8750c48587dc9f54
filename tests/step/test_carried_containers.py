"""Containers of tensors that a step leaves for its next call: numbers in them, and one container in several places."""

from __future__ import annotations

import dataclasses
import functools
import gc
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError
from functionalize.walk.live_places import contents, held_elsewhere
from functionalize.walk.parts import Held

pytestmark = pytest.mark.usefixtures("ample_allowance")


class Carried(NamedTuple):
    h: Tensor
    n: Any


@dataclasses.dataclass
class Record:
    h: Tensor
    n: Any


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("h", "n")
    h: Tensor
    n: Any


Pack = Callable[[Tensor, Any], Any]
Open = Callable[[Any], tuple[Tensor, Any]]
PACKS: dict[str, tuple[Pack, Open]] = {
    "dict": (lambda h, n: {"h": h, "n": n}, lambda s: (s["h"], s["n"])),
    "odd keys": (lambda h, n: {"key": h, "container": n}, lambda s: (s["key"], s["container"])),
    "tuple": (lambda h, n: (h, n), lambda s: s),
    "list": (lambda h, n: [h, n], tuple),
    "named": (Carried, tuple),
    "dataclass": (Record, lambda s: (s.h, s.n)),
    "slots": (Slotted, lambda s: (s.h, s.n)),
    "namespace": (lambda h, n: types.SimpleNamespace(h=h, n=n), lambda s: (s.h, s.n)),
    "nested": (
        lambda h, n: {"a": [(h, n)], "m": {"n": n, "t": h}},
        lambda s: s["a"][0],
    ),
}


class Space:
    """What a step changes: a and b hold packed states from the start, c none."""

    def __init__(self, pack: Pack, opened: Open) -> None:
        self.pack, self.opened = pack, opened
        self.a, self.b, self.c = pack(torch.zeros(3), 1), pack(torch.zeros(3), 1), None

    def next(self, y: Tensor, n: Any) -> Any:
        return self.pack(self.opened(self.a)[0] * 0.5 + y, n)


def counter(s: Any, y: Tensor) -> Any:
    n = s.opened(s.a)[1]
    s.a = s.next(y, n + 1)
    return y.sum() * n


def average(s: Any, y: Tensor) -> Any:
    n = s.opened(s.a)[1]
    s.a = s.next(y, n * 0.9 + y.mean().item())
    return y.sum() * n


def two_places(s: Any, y: Tensor) -> Any:
    s.a = s.b = s.next(y, s.opened(s.a)[1] + 1)
    return y.sum() * s.opened(s.b)[1]


def two_places_that_are_read(s: Any, y: Tensor) -> Any:
    h, n = s.opened(s.b)
    s.a = s.b = s.next(y + h, n + 1)
    return y.sum() * n


def result(s: Any, y: Tensor) -> Any:
    s.a = s.next(y, s.opened(s.a)[1] + 1)
    return s.a


def result_without_a_number(s: Any, y: Tensor) -> Any:
    s.a = s.next(y, 7)
    return s.a


def parts_of_the_result(s: Any, y: Tensor) -> Any:
    s.a = s.b = s.next(y, s.opened(s.a)[1] + 1)
    return {"loss": y.sum(), "state": s.a, "again": [(s.b, 1)]}


def made_by_the_first_call(s: Any, y: Tensor) -> Any:
    if s.c is None:
        s.c = s.pack(y * 0, 0)
    h, n = s.opened(s.c)
    s.c = s.pack(h * 0.5 + y, n + 1)
    return y.sum() * n


def inside_of_others(s: Any, y: Tensor) -> Any:
    inner = [s.opened(s.a)[0] * 0.5 + y]
    s.a, s.b = s.pack(inner[0], s.opened(s.a)[1] + 1), {"i": inner, "j": (inner, inner)}
    s.c = inner
    return y.sum()


def flag(s: Any, y: Tensor) -> Any:
    n = s.opened(s.a)[1]
    s.a = s.next(y, n is not True)
    return y.sum() * (2 if n is True else 3)


def text(s: Any, y: Tensor) -> Any:
    phase = s.opened(s.a)[1]
    s.a = s.next(y, "hot" if phase == "warm" else "warm")
    return y.sum() * (2 if phase == "warm" else 3)


def text_by_number(s: Any, y: Tensor) -> Any:
    n = s.opened(s.b)[1]
    s.b = s.next(y, n + 1)
    s.a = s.next(y, ("warm", "hot", "cold")[min(n // 6, 2)])
    return y.sum() * (2 if s.opened(s.a)[1] == "hot" else 3)


CHANGES = [
    *(
        counter,
        average,
        two_places,
        two_places_that_are_read,
        result,
        result_without_a_number,
        parts_of_the_result,
    ),
    *(made_by_the_first_call, inside_of_others, flag, text, text_by_number),
]


def picture(value: Any, known: dict[int, int]) -> Any:
    """Types, contents, and which containers are one object."""
    if isinstance(value, Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, (bool, int, float, str, type(None))):
        return type(value), repr(value)
    number = known.setdefault(id(value), len(known))
    if isinstance(value, dict):
        found = list(value.items())
    elif isinstance(value, (list, tuple)):
        found = list(enumerate(value))
    else:
        found = [(k, getattr(value, k)) for k in ("h", "n")]
    return number, type(value), [(k, picture(each, known)) for k, each in found]


def run(pack: str, change: Callable[[Any, Tensor], Any], capture: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    model, space = nn.Linear(3, 3), Space(*PACKS[pack])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor) -> Any:
        y = model(x)
        loss = (y + space.opened(space.a)[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return change(space, y.detach())

    captured, found = capture(step), []
    for i in range(20):
        left = captured(torch.randn(3))
        found.append(picture([left, space.a, space.b, space.c], {}))
        if i == 12 and change not in (flag, text, text_by_number):  # from outside
            space.a = space.pack(torch.ones(3), 100)
        if i == 17:  # no longer one object with the other
            space.b = space.pack(torch.full((3,), 2.0), 50)
    return found, captured


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("pack", PACKS)
def test_as_eager(pack: str, change: Callable[[Any, Tensor], Any]) -> None:
    (expected, _), (found, step) = run(pack, change, lambda s: s), run(pack, change, fz.capture)
    assert found == expected
    assert step.stats.replays > 8, step.explain()
    assert not step.stats.audit_failures


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_audited(change: Callable[[Any, Tensor], Any]) -> None:
    (expected, _), (found, step) = (
        run("nested", change, lambda s: s),
        run("nested", change, functools.partial(fz.capture, audit=2)),
    )
    assert found == expected
    assert step.stats.audits > 3 and not step.stats.audit_failures


def _phases(phase: Callable[[Any, Any], str], capture: Callable[[Any], Any]) -> Any:
    space: Any = types.SimpleNamespace(state={"h": torch.zeros(2), "phase": "warm"}, n=0, mode="a")

    def step(x: Tensor, given: str) -> Tensor:
        scale = {"warm": 2.0, "hot": 3.0}.get(space.state["phase"], 5.0)
        space.n += 1
        space.state = {"h": space.state["h"] * 0.5 + x * scale, "phase": phase(space, given)}
        return space.state["h"].sum()

    captured, found = capture(step), []
    for i in range(32):
        if i % 8 == 3:
            space.mode = "ab"[i % 16 > 8]
        loss = captured(torch.full((2,), float(i)), "hot" if i // 4 % 2 else "warm")
        found += [loss.item(), space.state["phase"], *space.state["h"].tolist()]
        if i == 20:  # from outside
            space.state["phase"] = "other"
    return found, captured


@pytest.mark.parametrize(
    "phase",
    [
        lambda s, given: given,
        lambda s, given: "hot" if s.state["phase"] == "warm" else "warm",
        lambda s, given: s.mode,
        lambda s, given: s.state["phase"],
        lambda s, given: "hot" if s.n > 12 else "warm",
    ],
    ids=["of an argument", "alternates", "guarded", "stays", "by a number"],
)
def test_text_in_container(phase: Callable[[Any, Any], str]) -> None:
    (expected, _), (found, step) = _phases(phase, lambda s: s), _phases(phase, fz.capture)
    assert found == expected
    assert step.stats.replays > 8, step.explain()
    assert not step.stats.audit_failures


def test_computed_text_is_refused() -> None:
    """It may have a number in it that no guard knows."""
    (expected, _), (found, step) = (
        _phases(lambda s, given: f"step {s.n}", capture) for capture in (lambda s: s, fz.capture)
    )
    assert found == expected
    error = str(next(iter(step.core.refused.values())))
    assert "`space.state.phase` is 'step " in error, error
    assert "make it outside the step" in error and f"{__file__}:" in error, error
    assert not step.stats.replays

    space: Any = types.SimpleNamespace(state={"h": torch.zeros(2), "phase": "step 0"})

    def edited(x: Tensor) -> Tensor:
        space.state = {"h": space.state["h"] * 0.5 + x, "phase": "done"}
        return space.state["h"].sum()

    captured, twin = fz.capture(edited, on_uncapturable="raise"), torch.zeros(2)
    for i in range(16):
        twin = twin * 0.5 + i
        assert torch.equal(captured(torch.full((2,), float(i))), twin.sum())
        assert space.state["phase"] == "done"
        space.state["phase"] = "step"
    assert captured.stats.replays > 8


def test_what_the_caller_changes_is_carried() -> None:
    """The result and the state are one dict: the next call reads what the caller has put there."""

    def losses(capture: Callable[[Any], Any]) -> tuple[list[float], Any]:
        space = types.SimpleNamespace(state={"h": torch.zeros(2), "n": 0})

        def step(x: Tensor) -> Any:
            space.state = {"h": space.state["h"] * 0.5 + x, "n": space.state["n"] + 1}
            return space.state

        captured, found = capture(step), []
        for i in range(16):
            left = captured(torch.full((2,), float(i)))
            assert left is space.state
            if i % 3 == 0:
                left["h"], left["n"] = torch.full((2,), 3.0), 50
            found += [*left["h"].tolist(), left["n"]]
        return found, captured

    (expected, _), (found, step) = losses(lambda s: s), losses(fz.capture)
    assert found == expected and step.stats.replays > 8


def test_no_live_number_is_left_after_an_exception() -> None:
    """Neither in the container of the entry nor in one that the step had put there when it raised."""
    space: Any = types.SimpleNamespace(
        a=(torch.zeros(2), 1), b={"h": torch.zeros(2), "n": 1}, stop=[]
    )

    def step(x: Tensor) -> Tensor:
        space.a = (space.a[0] + x, space.a[1] + 1)
        if space.stop:
            raise ValueError("stop")
        space.b = {"h": space.b["h"] + x, "n": space.b["n"] + 1}
        return space.a[0].sum()

    captured = fz.capture(step)
    for i in range(9):
        if i == 2:  # a recording with live numbers
            space.stop.append(1)
            with pytest.raises(ValueError, match="stop"):
                captured(torch.ones(2))
            space.stop.clear()
        else:
            captured(torch.ones(2))
        assert type(space.a[1]) is int and type(space.b["n"]) is int, i
    assert (space.a[1], space.b["n"]) == (10, 9)


def test_tuple_that_the_step_leaves_stays_the_same_object() -> None:
    space: Any = types.SimpleNamespace(a=(torch.zeros(2), 1))

    def step(x: Tensor, moves: bool) -> Tensor:
        if moves:
            space.a = (space.a[0] + x, space.a[1] + 1)
        return (space.a[0] * space.a[1]).sum()

    captured = fz.capture(step)
    for i in range(24):
        before, moves = space.a, i % 4 != 3
        captured(torch.ones(2), moves)
        assert (space.a is before) is not moves and type(space.a[1]) is int, i
    assert space.a[1] == 19 and captured.stats.replays > 8


def test_number_that_is_written_out_is_refused() -> None:
    space: Any = types.SimpleNamespace(a={"h": torch.zeros(2), "n": 1})
    numbers = iter(range(100))

    def step(x: Tensor) -> Tensor:
        space.a = {"h": space.a["h"] + x, "n": next(numbers)}
        return space.a["h"].sum()

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError, match=r"`.*a\.n` is \d, was \d: compute it of what was there"
    ):
        for _ in range(9):
            captured(torch.ones(2))


def test_who_holds_a_container() -> None:
    inner = [torch.zeros(1)]
    space = types.SimpleNamespace(a={"i": inner}, b=(inner, inner))
    places = [Held(space, "a"), Held(space, "b")]
    at, first = id(inner), id(space.a)
    assert held_elsewhere(contents(places)) == ({at}, {first})
    del inner
    gc.collect()
    assert held_elsewhere(contents(places)) == (set(), {at, first})
    assert held_elsewhere(contents(places[:1])) == ({at}, {first})
    assert held_elsewhere(contents(places), kept={first}) == ({at}, {first})
