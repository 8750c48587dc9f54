"""What a guard reads is what the fast test compares: each holder that it has read is changed, and the test fails.

The steps are real ones after some replays. The guards of their programs are asked with a `ReadLog`; then one noted read
after the other is made to find something else, by the holder and the key that the log says.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.ir.inputs import Call
from functionalize.util.reader import ReadLog
from functionalize.util.unchanged import Unchanged
from tests.steps import make_step

X = torch.ones(4, 4)


class Net(nn.Module):
    """Registered places that hold None, statistics, a mode, numbers, hooks, a child."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
        self.register_buffer("mask", None)
        self.register_buffer("seen", torch.zeros(()))
        self.register_parameter("scale", None)
        self.register_module("late", None)
        self.width = 4

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.mask is not None:
            y = y * self.mask
        if self.scale is not None:
            y = y * self.scale
        return y if self.late is None else self.late(y)


def plain() -> Any:
    torch.manual_seed(0)
    model = Net()
    return make_step(model, torch.optim.AdamW(model.parameters(), 0.01))


def hooked() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
    model.register_forward_hook(lambda module, args, out: out + 1)
    return make_step(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


STEPS = {"plain": plain, "hooked": hooked}


class Notes(ReadLog):
    """Keeps what it notes."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Any, ...]] = []

    def settle(self) -> bool:
        notes = self._notes
        is_noted = super().settle()
        self.kept += notes if is_noted else ()
        return is_noted


@contextmanager
def entry_changed(table: Any, key: Any, value: Any) -> Iterator[None]:
    was = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = was


@contextmanager
def longer(items: Any) -> Iterator[None]:
    new = object()
    (items.append if hasattr(items, "append") else items.add)(new)
    try:
        yield
    finally:
        items.remove(new)


@contextmanager
def more(table: Any) -> Iterator[None]:
    table["one more"] = None
    try:
        yield
    finally:
        del table["one more"]


@contextmanager
def attribute_changed(owner: Any, name: str) -> Iterator[None]:
    was = getattr(owner, name)
    changed: Any = torch.zeros_like(owner) if name == "grad" and was is None else None
    changed = collections.OrderedDict() if was is None and "hooks" in name else changed
    changed = not was if type(was) is bool else changed
    changed = torch.bfloat16 if isinstance(was, torch.dtype) else changed
    changed = dict(was) if name == "__dict__" else changed
    changed = {} if changed is None and isinstance(was, dict) else changed
    setattr(owner, name, changed)
    try:
        yield
    finally:
        setattr(owner, name, was)


def change(note: tuple[Any, ...]) -> Any:
    """A change of what a note is about, for a while; None: there is none that a script can make."""
    kind, *args = note
    if kind in (Unchanged.attribute, Unchanged.presence):
        owner, name = args
        if name in ("grad_fn", "_local_tensor"):
            return None
        return attribute_changed(owner, name)
    if kind is Unchanged.entry:
        return entry_changed(*args, object())
    if kind in (Unchanged.elements, Unchanged.emptiness):
        return longer(*args)
    if kind in (Unchanged.table, Unchanged.keys):
        return more(*args)
    if kind is Unchanged.kinds:
        (table,) = args
        return entry_changed(table, next(iter(table)), object()) if table else more(table)
    if kind is Unchanged.states:
        (optimizer,) = args
        state = next(iter(optimizer.state.values()), None)
        return more(state) if state is not None else None
    return None  # a function that reads, a count of references, a window


def noted(step: Any) -> tuple[Notes, Any]:
    """The notes of all guards and sources of the program that was replayed last, and that program."""
    program = step.core.cache.latest.program
    log, call = Notes(), program.resolve_slowly([X])
    assert isinstance(call, Call)
    call.reader = log
    for each in (*program.facts, *program.guards):
        if getattr(each, "is_read_by_reader", False):
            for part in each.parts() if hasattr(each, "parts") else (each,):
                assert part.failure(call) is None
                log.settle()
    for spec in program.inputs:
        log.find(spec.source, call)
        log.settle()
    log.facts.freeze()
    return log, program


@pytest.mark.parametrize("name", STEPS)
def test_each_holder_that_a_guard_has_read_is_compared(name: str) -> None:
    step = fz.capture(STEPS[name](), audit=False)
    for _ in range(6):
        step(X)
    assert step.stats.replays
    log, program = noted(step)
    assert log.facts.hold()
    changed: collections.Counter[str] = collections.Counter()
    for note in log.kept:
        change_of = change(note)
        if change_of is None:
            continue
        with ExitStack() as stack:
            try:
                stack.enter_context(change_of)
            except (RuntimeError, TypeError):  # torch refuses it
                continue
            assert not log.facts.hold(), note
            assert program.known([X]) is None, note
        changed[note[0].__name__] += 1
        assert log.facts.hold(), f"not after {note} was undone"
    assert len(changed) >= 6 and sum(changed.values()) > 50, changed


CHANGES: dict[str, Callable[[Net, torch.optim.Optimizer], Any]] = {
    "a buffer that was None": lambda m, o: m.register_buffer("mask", torch.full((4,), 2.0)),
    "a parameter that was None": lambda m, o: setattr(m, "scale", nn.Parameter(torch.ones(4) * 2)),
    "a module that was None": lambda m, o: setattr(m, "late", nn.Linear(4, 4)),
    "a mode": lambda m, o: m.body[2].train(False),
    "a number": lambda m, o: setattr(m, "width", 5),
    "a buffer of another class": lambda m, o: m._buffers.update(seen=nn.Buffer(torch.zeros(()))),
    "a list of hyperparameters, in place": lambda m, o: o.param_groups[0]["scales"].append(3.0),
    "a dict of hyperparameters, in place": lambda m, o: o.param_groups[0]["at"].update(b=3.0),
}


class Scaled(torch.optim.SGD):
    """Reads hyperparameters that are lists and dicts."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(sum(group["scales"]) + sum(group["at"].values()))
        super().step(closure)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen_by_the_next_replay(name: str) -> None:
    def twin(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = Net()
        groups = {"params": list(model.parameters()), "scales": [1.0, 0.5], "at": {"a": 0.5}}
        optimizer = Scaled([groups], 0.01)
        step, found = wrap(make_step(model, optimizer)), []
        for i in range(14):
            if i == 9:
                torch.manual_seed(1)
                CHANGES[name](model, optimizer)
            found.append(step(X * (i % 3)).item())
            found.append([p.detach().clone() for p in model.parameters()])
        return found, step

    eager, _ = twin(lambda fn: fn)
    captured, step = twin(lambda fn: fz.capture(fn, audit=False))
    assert step.stats.replays >= 5
    for now, right in zip(captured, eager, strict=True):
        if isinstance(right, list):
            assert all(map(torch.equal, now, right))
        else:
            assert now == right
