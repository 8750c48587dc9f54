"""A captured method of a library's object: what it reads of the object is guarded, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functionalize as fz

CALLS, CHANGED_AT = 8, 4
LIBRARY = "installed_trainer"
SOURCE = """
import functools
import torch

def scale_of(trainer):
    return trainer.scale

class Base:
    def base_scale(self):
        return self.scale

class Trainer(Base):
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.step_count, self.scale, self.table = 0, 1.0, {"scale": 1.0}

    def train(self, x, scale):
        loss = self.model(x).mean() * scale
        loss.backward()
        return loss.detach()

    @property
    def now(self):
        return self.scale

    def method(self):
        return self.scale

    def reads_nothing(self, x): return self.train(x, 1.0)
    def reads(self, x): return self.train(x, self.scale)
    def calls_a_method(self, x): return self.train(x, self.method())
    def reads_a_property(self, x): return self.train(x, self.now)
    def passes_itself_on(self, x): return self.train(x, scale_of(self))
    def stores_itself(self, x):
        trainer = self
        return self.train(x, trainer.scale)
    def in_a_lambda(self, x): return self.train(x, (lambda: self.scale)())
    def by_super(self, x): return self.train(x, super().base_scale())
    def by_name(self, x): return self.train(x, getattr(self, "scale"))
    def by_data(self, x): return self.train(x, getattr(self, "".join(["sc", "ale"])))
    def in_vars(self, x): return self.train(x, vars(self)["scale"])
    def in_a_table(self, x): return self.train(x, self.table["scale"])
    def counts(self, x):
        self.step_count += 1
        return self.train(x, 1.0)

class Dynamic(Trainer):
    def __getattr__(self, name):
        if name == "computed": return self.scale
        raise AttributeError(name)
    def reads_what_is_computed(self, x): return self.train(x, self.computed)
"""
READERS = [
    *(
        "reads",
        "calls_a_method",
        "reads_a_property",
        "passes_itself_on",
        "stores_itself",
        "in_a_lambda",
    ),
    *("by_super", "by_name", "by_data", "in_vars", "in_a_table", "reads_what_is_computed"),
]


def change(trainer: Any) -> None:
    trainer.scale = 3.0
    trainer.table["scale"] = 3.0


def replace_method(trainer: Any) -> None:
    trainer.method = lambda: 3.0


def replace_in_class(trainer: Any) -> None:
    type(trainer).method = lambda self: 3.0


def compared(library: Any, name: str, changes: Callable[[Any], None]) -> Any:
    """Steps of a trainer by eager and by a captured step, which must agree at every call."""
    eager, ours = library.Dynamic(), library.Dynamic()
    step = fz.capture(getattr(ours, name), on_uncapturable="eager")
    for i in range(CALLS):
        eager.step_count = ours.step_count = 10 * i
        if i == CHANGED_AT:
            changes(eager)
            changes(ours)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        results = [getattr(eager, name)(x.clone()), step(x.clone())]
        assert torch.equal(*results), (name, i, step.explain())
        for each in (eager, ours):
            each.model.zero_grad()
    assert ours.step_count == eager.step_count
    return step


@pytest.mark.parametrize("name", ["reads_nothing", "reads", "calls_a_method", "reads_a_property"])
def test_a_counter_that_the_method_does_not_read_is_no_fact(library: Any, name: str):
    step = compared(library, name, lambda trainer: None)
    assert step.stats.captures == 1 and step.stats.replays >= CALLS - 3, step.explain()


@pytest.mark.parametrize("name", READERS)
def test_what_the_method_reads_in_any_way_is_a_fact(library: Any, name: str):
    compared(library, name, change)


@pytest.mark.parametrize("changes", [replace_method, replace_in_class])
def test_a_method_that_is_replaced_is_another_one(library: Any, changes: Callable[[Any], None]):
    original = library.Trainer.method
    step = compared(library, "calls_a_method", changes)
    assert step.stats.guard_failures, step.explain()
    for kind in (library.Trainer, library.Dynamic):
        if "method" in vars(kind):
            del kind.method
    library.Trainer.method = original


def test_a_counter_that_the_method_moves_is_moved_by_replays(library: Any):
    step = compared(library, "counts", lambda trainer: None)
    assert step.stats.replays >= CALLS - 4, step.explain()
