"""Objects of libraries in a step: attributes that it does not touch are no facts, all others are, however it reads.

The library is a module whose file is in site-packages. Every case changes numbers of its objects between calls, and
compares results and the state of the objects with eager after every call.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.walk.unread import is_observable

CALLS, CHANGED_AT = 9, 5
LIBRARY = "installed_loop"
SOURCE = """
import copy, dataclasses, operator, pickle, weakref
import torch

@dataclasses.dataclass
class State:
    epoch: int = 0
    scale: float = 1.0
    is_done: bool = False
    def factor(self): return 1.0 if self.epoch < 5 else 3.0
    @property
    def now(self): return self.factor()

class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.state, self.count, self.even, self.total = State(), 0, True, 0.0
        self.first, self.sums, self.shared = True, [0], Shared()
        self.left = [*range(50)]
        self.fetcher = Fetcher(self)
        ALL.append(self)
    def train(self, x, factor=1.0):
        loss = self.model(x).mean() * factor
        loss.backward()
        return loss.detach()

    # -- reads nothing that changes
    def plain(self, x): return self.train(x)
    def reads_another(self, x): return self.train(x, self.state.scale)
    def reads_shared(self, x): return self.train(x, self.shared.scale)

    # -- decides by `state.epoch`
    def attribute(self, x): return self.train(x, 1.0 if self.state.epoch < 5 else 3.0)
    def method(self, x): return self.train(x, self.state.factor())
    def by_property(self, x): return self.train(x, self.state.now)
    def by_name(self, x): return self.train(x, float(getattr(self.state, "epoch") < 5))
    def by_data(self, x): return self.train(x, float(getattr(self.state, "".join(["epo", "ch"])) < 5))
    def getter(self, x): return self.train(x, float(operator.attrgetter("epoch")(self.state) < 5))
    def in_vars(self, x): return self.train(x, float(vars(self.state)["epoch"] < 5))
    def in_dict(self, x): return self.train(x, float(self.state.__dict__["epoch"] < 5))
    def copied(self, x): return self.train(x, float(copy.copy(self.state).epoch < 5))
    def deep_copied(self, x): return self.train(x, float(copy.deepcopy(self.state).epoch < 5))
    def pickled(self, x): return self.train(x, float(pickle.loads(pickle.dumps(self.state)).epoch < 5))
    def as_dict(self, x): return self.train(x, float(dataclasses.asdict(self.state)["epoch"] < 5))
    def replaced(self, x): return self.train(x, dataclasses.replace(self.state, scale=1.0).factor())
    def equal(self, x): return self.train(x, float(self.state == State(4)))
    def text(self, x): return self.train(x, float("epoch=4" in repr(self.state)))
    def matched(self, x):
        match self.state:
            case State(epoch=4): return self.train(x, 3.0)
        return self.train(x)
    def proxy(self, x): return self.train(x, float(weakref.proxy(self.state).epoch < 5))
    def in_lambda(self, x): return self.train(x, (lambda: float(self.state.epoch < 5))())
    def in_hook(self, x):
        loss = self.model(x).mean()
        loss.register_hook(lambda g: g * (1.0 if self.state.epoch < 5 else 3.0))
        loss.backward()
        return loss.detach()
    def kept_table(self, x): return self.train(x, float(self.table["epoch"] < 5))
    def by_global(self, x): return self.train(x, state_of_all().factor())
    def shared_table(self, x): return self.train(x, float(Shared().epoch < 5))
    def by_class(self, x): return self.train(x, self.shared.scale * float(Shared.values["epoch"] < 5))
    def by_class_vars(self, x): return self.train(x, self.shared.scale * float(vars(Shared)["values"]["epoch"] < 5))
    def by_instance(self, x): return self.train(x, self.shared.scale * float(self.shared.values["epoch"] < 5))
    def by_super(self, x): return self.train(x, self.shared.scale * float(Sub().now < 5))

    # -- assigns a number that is no constant of this line
    def odd_branch(self, x):
        self.count = 1 if TICKS[0] >= 5 else 0
        return self.train(x)
    def odd_builtin(self, x):
        setattr(self, "count", min(TICKS[0] // 5, 1))
        return self.train(x)
    def odd_value(self, x):
        self.count = min(TICKS[0] // 5, 1)
        return self.train(x)

    # -- absent, then there; the same value set again; deleted
    def absent(self, x): return self.train(x, getattr(self.state, "extra", 1.0))
    def absent_then_there(self, x): return self.train(x, 3.0 if hasattr(self.state, "extra") else 1.0)
    def sets(self, x):
        self.state.is_done = True
        return self.train(x)
    def deletes(self, x):
        if hasattr(self.state, "extra"): del self.state.extra
        return self.train(x)

    # -- draws from an iterator, or changes what it holds
    def draws(self, x): return self.train(x, float(next(self.fetcher)))
    def draws_in_c(self, x): return self.train(x, float(next(self.fetcher.rest)))
    def pops(self, x): return self.train(x, float(self.left.pop()))

    # -- moves
    def counts(self, x):
        self.count += 1
        return self.train(x)
    def counts_and_computes(self, x):
        self.count += 1
        return self.train(x, self.count * 0.5)
    def counts_and_decides(self, x):
        self.count += 1
        return self.train(x, 1.0 if self.count % 2 == 0 else 2.0)
    def accumulates(self, x):
        self.count += 1
        self.even = self.count % 2 == 0
        loss = self.train(x, 1.0 if self.even else 2.0)
        if self.even: self.model.zero_grad(set_to_none=False)
        return loss
    def alternates(self, x):
        self.even = not self.even
        return self.train(x, 1.0 if self.even else 2.0)
    def only_first(self, x):
        factor = 2.0 if self.first else 1.0
        self.first = False
        return self.train(x, factor)
    def sums_up(self, x):
        self.total += 0.5
        return self.train(x, self.total)
    def averages(self, x):
        self.count += 1
        self.total = max(min((1 + self.count) / (10 + self.count), 0.9), 0.0)
        return self.train(x, 1 - self.total)
    def resets(self, x):
        if self.count == 2: self.count = 0
        else: self.count += 1
        return self.train(x)
    def in_a_list(self, x):
        self.sums[0] += 1
        return self.train(x, float(self.sums[0] % 2))

class Shared:
    values = {"epoch": 0, "scale": 0.5}
    def __init__(self): self.__dict__ = self.values
class Sub(Shared):
    @property
    def now(self): return super().values["epoch"]

class Fetcher:
    def __init__(self, loop): self.loop, self.left, self.at, self.rest = loop, loop.left, 0, iter(range(50))
    def __iter__(self): return self
    def __next__(self):
        self.at += 1
        return self.left.pop()

ALL, TICKS = [], [0]
def state_of_all(): return ALL[-1].state

class Past:
    def __init__(self): self.epoch = 0
    def read(self): return object.__getattribute__(self, "epoch")
"""
DECIDES = [
    *("attribute", "method", "by_property", "by_name", "by_data", "getter", "in_vars", "in_dict"),
    *("copied", "deep_copied", "pickled", "as_dict", "replaced", "equal", "text", "matched"),
    *("proxy", "in_lambda", "in_hook", "kept_table", "shared_table", "by_global"),
    *("by_class", "by_class_vars", "by_instance", "by_super"),
]
MOVES = {
    **dict.fromkeys(("counts", "counts_and_computes", "sums_up", "averages"), 4),
    **dict.fromkeys(("counts_and_decides", "accumulates", "alternates", "in_a_list"), 2),
    "only_first": 3,
    "resets": 4,
}


class OwnLoop:
    """Finds the library's loop by a variable, as a script does."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop


def state_of(loop: Any) -> Any:
    found = {
        key: value for key, value in vars(loop).items() if key not in ("model", "shared", "fetcher")
    }
    return {**found, "state": vars(loop.state).copy(), "at": loop.fetcher.at}


def compared(library: Any, name: str, calls: int = CALLS, **changes: Any) -> Any:
    """Steps by eager and captured, which must agree at every call. changes: attributes of the state from a call on."""
    loops = [library.Loop(), library.Loop()]
    for each in loops:
        each.table = vars(each.state)
        if name != "kept_table":
            del each.table
    eager, ours = (OwnLoop(each) for each in loops)

    def of(own: OwnLoop) -> Any:
        return lambda x: getattr(own.loop, name)(x)

    step = fz.capture(of(ours), on_uncapturable="eager")
    for i in range(calls):
        for each in loops:
            each.state.epoch = library.Shared.values["epoch"] = library.TICKS[0] = i
            each.count = 9 if name.startswith("odd") else each.count
            for key, value in changes.items() if i >= CHANGED_AT else ():
                setattr(each.state, key, value)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        results = [of(eager)(x.clone()), step(x.clone())]
        assert torch.equal(*results), (name, i, step.explain())
        assert state_of(loops[0]) == state_of(loops[1]), (name, i, step.explain())
        grads = [each.model.weight.grad for each in loops]
        assert torch.equal(*grads), (name, i, step.explain())
        for each in loops:
            each.model.zero_grad()
    return step


@pytest.mark.parametrize("name", ["plain", "reads_another", "reads_shared"])
def test_a_number_that_the_step_does_not_read_is_no_fact(library: Any, name: str):
    step = compared(library, name)
    assert step.stats.captures == 1 and step.stats.replays >= CALLS - 3, step.explain()


def test_a_class_of_the_user_that_inherits_from_a_library(library: Any):
    class Own(library.Loop):
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return super().plain(x) if self.state.scale < 2 else self.attribute(x)

    loop, other = Own(), Own()
    step = fz.capture(loop.step, on_uncapturable="eager")
    for i in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        for each in (loop, other):
            each.state.epoch = each.count = i
            each.state.scale = 1.0 if i < CHANGED_AT else 2.0
            each.model.zero_grad()
        assert torch.equal(step(x), other.step(x)), step.explain()
    assert step.stats.replays >= 3 and step.stats.captures < CALLS - 3, step.explain()


@pytest.mark.parametrize("name", DECIDES)
def test_a_number_by_which_the_step_decides_is_a_fact(library: Any, name: str):
    compared(library, name)


@pytest.mark.parametrize("name", ["odd_branch", "odd_builtin", "odd_value"])
def test_a_number_that_the_code_computes_is_not_assigned_by_a_replay(library: Any, name: str):
    step = compared(library, name)
    assert "changes Python state" in step.explain() and not step.stats.captures


@pytest.mark.parametrize("name", ["draws", "draws_in_c", "pops"])
def test_a_step_that_draws_from_an_iterator_of_a_library_is_refused(library: Any, name: str):
    """The iterator leads to the loop, which is compared by itself."""
    step = compared(library, name)
    assert "draws from" in step.explain() or "changes Python state" in step.explain()
    assert not step.stats.captures


@pytest.mark.parametrize("name", ["absent", "absent_then_there", "reads_another"])
def test_what_was_not_there_or_differs_is_seen(library: Any, name: str):
    step = compared(library, name, extra=3.0, scale=2.0)
    assert step.stats.replays and step.stats.guard_failures, step.explain()


@pytest.mark.parametrize("name", ["sets", "deletes"])
def test_what_the_step_sets_or_deletes_is_a_fact(library: Any, name: str):
    compared(library, name, is_done=False, extra=3.0)


@pytest.mark.parametrize(("name", "least"), MOVES.items())
def test_counters_and_flags_of_a_library_are_moved(library: Any, name: str, least: int):
    step = compared(library, name, calls=14)
    assert step.stats.replays >= least, step.explain()


class Trained(torch.nn.Module):
    """As in Lightning: an attribute of the module leads to the trainer, and that to the optimizer."""

    def __init__(self, loop: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loop = torch.nn.Linear(3, 1), loop
        loop.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.loop.count += 1
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()
        return loss.detach()


def test_an_optimizer_that_an_attribute_of_a_module_leads_to(library: Any):
    ours, eager = Trained(library.Loop()), Trained(library.Loop())
    step = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(CALLS):
        for each in (ours, eager):
            each.loop.optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(step(x), eager.step(x)), step.explain()
        assert ours.loop.count == eager.loop.count == i + 1
    assert torch.equal(ours.net.weight, eager.net.weight)
    assert step.stats.replays >= 3, step.explain()


@pytest.mark.parametrize("name", ["counts_and_decides", "plain"])
def test_classes_are_as_before_after_a_recording(library: Any, name: str):
    before = dict(vars(library.Loop)), dict(vars(library.State))
    compared(library, name)
    assert before == (dict(vars(library.Loop)), dict(vars(library.State)))


def test_classes_are_as_before_after_an_exception(library: Any):
    loop = library.Loop()

    def step(x: torch.Tensor) -> torch.Tensor:
        loop.train(x)
        raise KeyError(loop.state.epoch)

    with pytest.raises(KeyError):
        fz.capture(step)(torch.ones(4, 3))
    assert "__getattribute__" not in vars(library.Loop) | vars(library.State)


def test_a_class_that_looks_past_its_attributes_is_not_observed(library: Any):
    assert is_observable(library.Loop) and is_observable(library.State)
    assert not is_observable(library.Past) and not is_observable(OwnLoop)
    past = library.Past()
    model = torch.nn.Linear(3, 1)
    step = fz.capture(lambda x: model(x).sum() * float(past.read() < 5), on_uncapturable="eager")
    for past.epoch in range(CALLS):
        x = torch.ones(4, 3)
        assert torch.equal(step(x), model(x).sum() * float(past.epoch < 5)), step.explain()


def test_another_thread_reads_while_a_step_is_recorded(library: Any):
    """Its objects behave as ever. While it runs, no number is made live; when it has ended, the step is captured."""
    loop, stop, seen = library.Loop(), threading.Event(), set[Any]()

    def read() -> None:
        while not stop.is_set():
            seen.add((loop.state.epoch, loop.state.now, hasattr(loop, "nothing")))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        step = fz.capture(lambda x: loop.plain(x), on_uncapturable="eager")
        for _ in range(4):
            step(torch.ones(4, 3))
    finally:
        stop.set()
        thread.join()
    assert seen == {(0, 1.0, False)}
    for _ in range(4):
        step(torch.ones(4, 3))
    assert step.stats.replays, step.explain()
