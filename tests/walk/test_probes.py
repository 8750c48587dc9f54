"""The fast test of Python state: true while nothing has changed, by identity; no tensor is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import functionalize as fz
from functionalize.recorder.recorder import Recorder
from functionalize.util.unchanged import Unchanged
from functionalize.walk.walker import walked, walked_again
from tests.walk.cases import HELD, READ, Case, Settings


class Holder:
    """Everything that the probes look at in another way."""

    scale = 1.0

    def __init__(self) -> None:
        self.settings, self.items, self.table = Settings(), [1.0, Settings()], {"a": 1.0}
        self.layer = nn.Linear(2, 2)
        self.layer.register_forward_hook(lambda *args: None)
        self.layer.notes = [1.0]  # type: ignore[assignment]
        self.optimizer = torch.optim.SGD(self.layer.parameters(), 0.1)
        self.batch, self.unread = torch.ones(2), 1.0
        self.sampler = SequentialSampler([1, 2])

    def step(self, x: Any) -> Any:
        held = self.settings, self.items, self.table, self.layer, self.optimizer, self.batch
        sampler = self.sampler
        return x * self.scale, [each.scale for each in held], SPACE, self.later, sampler

    later: Any = None


SPACE = {"a": 1}


def rebound(holder: Holder) -> None:
    holder.step = lambda x: x  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "an attribute": lambda h: setattr(h.settings, "scale", 2.0),
    "a new attribute": lambda h: setattr(h, "later", 2.0),
    "all attributes": lambda h: setattr(h.settings, "__dict__", {**vars(h.settings)}),
    "all attributes of a module": lambda h: setattr(h.layer, "__dict__", {**vars(h.layer)}),
    "an attribute of the class": lambda h: setattr(Holder, "scale", 2.0),
    "an element": lambda h: h.items.__setitem__(0, 2.0),
    "an element's attribute": lambda h: setattr(h.items[1], "scale", 2.0),
    "a length": lambda h: h.items.append(1),
    "a key": lambda h: h.table.update(b=h.table.pop("a")),
    "a module's list": lambda h: h.layer.notes.append(2.0),  # type: ignore[union-attr, operator]
    "a hook": lambda h: h.layer._forward_hooks.update(dict.fromkeys(h.layer._forward_hooks, print)),
    "an optimizer's attribute": lambda h: setattr(h.optimizer, "step", print),
    "an optimizer's number": lambda h: h.optimizer.state[h.layer.weight].update(n=1),
    "a library's attribute": lambda h: setattr(h.sampler, "data_source", [3]),
    "a class": lambda h: setattr(h, "__class__", type("Other", (Holder,), {})),
    "a global": lambda h: SPACE.update(a=2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "scale", 1.0)
    SPACE["a"] = 1
    holder = Holder()
    step = holder.step
    state = walked(step)
    probes = walked_again(step, (), state, is_replay=True).probes
    assert probes.hold(())
    holder.unread = 2.0
    assert probes.hold(()), "no code reads it"
    CHANGES[name](holder)
    assert not probes.hold(())


@pytest.mark.parametrize("case", [*READ.values(), *HELD.values()], ids=[*READ, *HELD])
def test_the_probes_agree_with_the_walk(case: Case) -> None:
    make, number, change = case
    value = make()
    box = {"value": value}
    step = lambda x: number(box["value"])  # noqa: E731
    state = walked(step)
    probes = walked_again(step, (), state, is_replay=True).probes
    assert change is not None
    changed = change(value)
    box["value"] = value if changed is None else changed
    same = walked_again(step, (), state, is_replay=True).facts == state.facts
    assert same or not probes.hold(())


def test_what_a_recording_replaces_in_torch_and_restores_is_no_change() -> None:
    step = Holder().step
    state, facts = walked(step), Unchanged()
    probes = walked_again(step, (), state, is_replay=True).probes
    probes.note_in(facts)
    facts.freeze()
    with Recorder():
        torch.ones(1)
    assert probes.hold(()) and facts.hold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sin", torch.cos)
        assert not probes.hold(()) and not facts.hold()


def test_a_set_is_compared_by_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module has one; to look for the parts of all takes longer than all other comparisons."""
    box = {"names": {"a"}, "none": set()}
    step = lambda x: len(box["names"]) + len(box["none"])  # noqa: E731
    state, facts = walked(step), Unchanged()
    walked_again(step, (), state, is_replay=True).probes.note_in(facts)
    monkeypatch.setattr("functionalize.walk.probes.parts_of", None)
    facts.freeze()
    assert facts.hold()
    for name in box:
        box[name].add("b")
        assert not facts.hold()
        box[name].remove("b")
        assert facts.hold()


def test_no_tensor_is_kept_alive() -> None:
    holder: Any = Holder()
    holder.items.append(torch.ones(3))
    state = walked(holder.step)
    probes = walked_again(holder.step, (), state, is_replay=True).probes
    refs = [weakref.ref(holder.batch), weakref.ref(holder.items.pop())]
    state.roots.tensors.clear()  # sources of inputs, which keep what the capture found
    holder.batch = torch.ones(2)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert not probes.hold(())


def test_an_object_behind_a_weak_reference_is_not_kept_alive() -> None:
    settings = Settings()
    reference = weakref.ref(settings)

    def step(x: Any) -> Any:
        found = reference()
        return x * (3.0 if found is None else found.scale)

    captured = fz.capture(step)
    for number in (1.0, 1.0, 1.0, 2.0, 2.0):
        settings.scale = number
        assert captured(torch.ones(1)).item() == number
    assert captured.stats.replays >= 2
    del settings
    gc.collect()
    assert reference() is None
    assert captured(torch.ones(1)).item() == 3.0


# -- objects that are made anew --------------------------------------------------------------------


class Phase:
    def __init__(self, scale: float, name: str = "a") -> None:
        self.scale, self.name = scale, name


class Loud(Phase):
    @property  # type: ignore[override]
    def scale(self) -> float:
        return LOUD["scale"]

    @scale.setter
    def scale(self, value: float) -> None:
        LOUD["scale"] = value


LOUD: dict[str, float] = {}
HOLDERS: Any = SimpleNamespace(a=None, b=None)


def scaled(x: Tensor) -> Tensor:
    a, b = HOLDERS.a, HOLDERS.b
    return x * a.scale * (2.0 if b is a else b.scale) + (a.name == "b")


def same() -> None:
    HOLDERS.a = HOLDERS.b = Phase(3.0)


ANEW: dict[str, Callable[[int], None]] = {
    "one": lambda i: setattr(HOLDERS, "a", Phase(3.0)),
    "one whose number changes": lambda i: setattr(HOLDERS, "a", Phase(3.0 + (i > 12))),
    "one whose number is zero or minus zero": lambda i: setattr(
        HOLDERS, "a", Phase(-0.0 if i > 12 else 0.0)
    ),
    "one whose text changes": lambda i: setattr(HOLDERS, "a", Phase(3.0, "ab"[i > 12])),
    "one that both hold": lambda i: same(),
    "one that both hold at first": lambda i: (
        same() if i < 12 else setattr(HOLDERS, "a", Phase(3.0))
    ),
    "two, and then one": lambda i: same() if i > 12 else setattr(HOLDERS, "a", Phase(3.0)),
    "the other's": lambda i: setattr(HOLDERS, "a", HOLDERS.b if i > 12 else Phase(3.0)),
    "one that is changed, too": lambda i: (
        setattr(HOLDERS, "a", Phase(3.0)),
        setattr(HOLDERS.a, "scale", i // 12),
    ),
    "one with a property": lambda i: setattr(HOLDERS, "a", Loud(3.0 + (i > 12))),
    "one of another class": lambda i: setattr(HOLDERS, "a", (Loud if i > 12 else Phase)(3.0)),
    "a namespace": lambda i: setattr(HOLDERS, "a", SimpleNamespace(scale=3.0, name="a", unread=i)),
    "a number": lambda i: (
        setattr(HOLDERS, "a", Phase(float("2.5"))),
        setattr(HOLDERS.b, "scale", float("0.5")),
    ),
}


@pytest.mark.parametrize("name", ANEW)
def test_an_object_that_is_made_anew_before_each_call(name: str) -> None:
    HOLDERS.a, HOLDERS.b = Phase(1.0), Phase(2.0)
    step = fz.capture(scaled, audit=False)
    for i in range(24):
        ANEW[name](i)
        x = torch.arange(3.0) - i
        expected = scaled(x)
        assert torch.equal(step(x), expected), i
        assert torch.equal(step(x).signbit(), expected.signbit())


@pytest.mark.parametrize(
    "change",
    [lambda h: h.append(1.0), lambda h: h.__setitem__(3, -0.0), lambda h: h.__setitem__(3, False)],
)
def test_many_numbers_are_one_fact(change: Callable[[list[Any]], Any]) -> None:
    holder = SimpleNamespace(history=[0.0] * 20_000)

    def step(x: Tensor) -> Tensor:
        return (
            x
            * (1.0 + sum(holder.history[:10]) + len(holder.history))
            * (2 if holder.history[3] is False else 1)
        )

    state = walked(step, ())
    assert len(state.facts) < 20
    captured = fz.capture(step, audit=False)
    for i in range(12):
        if i == 6:
            change(holder.history)
        x = torch.arange(3.0)
        assert torch.equal(captured(x), step(x))
    assert captured.stats.captures == 2


class Sentinel:
    a = 2.0


def told(mark: Any, known: Any = Sentinel()) -> bool:  # noqa: B008 - the default is what is compared
    return mark is known


PLACES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "in a tuple": (lambda t, arg: t.c is t.pair[1], lambda t, arg: t.pair[1]),
    "a key": (lambda t, arg: t.table[t.c] == 2, lambda t, arg: list(t.table)[1]),
    "a default": (lambda t, arg: told(t.c), lambda t, arg: told.__defaults__[0]),  # type: ignore[index]
    "an argument": (lambda t, arg: t.c is arg, lambda t, arg: arg),
    "in a set": (lambda t, arg: t.c in t.frozen, lambda t, arg: next(iter(t.frozen))),
    "in a group": (
        lambda t, arg: t.c is t.optimizer.param_groups[0]["tag"],
        lambda t, arg: t.optimizer.param_groups[0]["tag"],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_an_equal_object_that_stands_elsewhere_too(name: str) -> None:
    """Code compares objects by identity: an equal one is another one."""
    asks, find = PLACES[name]
    first, arg = Sentinel(), Sentinel()
    t = SimpleNamespace(c=first, pair=(Sentinel(), Sentinel()), frozen=frozenset([Sentinel()]))
    t.table = {first: 1, Sentinel(): 2}
    t.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    t.optimizer.param_groups[0]["tag"] = Sentinel()

    def step(x: Tensor, given: Any) -> Tensor:
        return x * (2.0 if asks(t, given) else 1.0)

    captured = fz.capture(step, audit=False, allowance=None)
    for i in range(12):
        t.c = find(t, arg) if 5 < i < 9 else first
        x = torch.arange(3.0)
        assert torch.equal(captured(x, arg), step(x, arg)), i
