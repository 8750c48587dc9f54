"""Tensors that a step leaves somewhere and the loop around it reads: replays leave theirs, or the step is eager."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz


def plain(value: Any) -> Any:
    """The bits of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    if isinstance(value, (dict, collections.UserDict)):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, functools.partial):
        return plain(value.args)
    if isinstance(value, torch.distributions.Normal):
        return plain(value.loc)
    return plain(vars(value)) if hasattr(value, "__dict__") else repr(value)


# -- in an optimizer -------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    """An optimizer of the user's. what: done for each parameter, with its state."""

    def __init__(self, params: Any, what: Callable[[Own, Tensor, dict[str, Any]], None]) -> None:
        super().__init__(params, {"lr": 0.05})
        self.n, self.what = 0, what

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.n += 1
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            self.what(self, p, self.state[p])
            p.sub_(p.grad, alpha=0.05)


def restart(o: Own, p: Any, state: dict[str, Any]) -> None:
    if o.n % 7 == 1:
        state["m"] = torch.zeros_like(p)
    p.sub_(state["m"].mul_(0.9).add_(p.grad), alpha=0.05)


def lookahead(o: Own, p: Any, state: dict[str, Any]) -> None:
    if o.n % 4 == 1:
        state["slow"] = p.clone()
    p.lerp_(state["slow"], 0.1)


def swap(o: Own, p: Any, state: dict[str, Any]) -> None:
    if not state:
        state["a"], state["b"] = torch.zeros_like(p), torch.ones_like(p)
    state["a"].add_(p.grad)
    state["a"], state["b"] = state["b"], state["a"]
    p.sub_(state["a"], alpha=0.05)


def update(o: Own, p: Any, state: dict[str, Any]) -> None:
    state["last"] = p.grad.sign()


def gradient(o: Own, p: Any, state: dict[str, Any]) -> None:
    state["g"], state["norm"] = p.grad, p.grad.norm()


def by_name(o: Own, p: Any, state: dict[str, Any]) -> None:
    o.state["seen"] = p.grad * 2  # type: ignore[index]
    o.state["total"] = o.state.get("total", 0.0) + 1.0  # type: ignore[call-overload, index]


def in_group(o: Own, p: Any, state: dict[str, Any]) -> None:
    o.param_groups[0]["norm"], o.defaults["last"] = p.grad.norm(), p.grad * 3


IN_OPTIMIZER = (restart, lookahead, swap, update, gradient, by_name, in_group)


@pytest.mark.parametrize("what", IN_OPTIMIZER, ids=lambda what: what.__name__)
def test_what_an_optimizer_puts_in_its_tables(what: Any) -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1, bias=False)
        optimizer, found = Own(model.parameters(), what), []

        def train(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(train)
        for i in range(40):
            step(torch.randn(1, 2, generator=torch.Generator().manual_seed(i)))
            group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            state = [*optimizer.state.values()]
            found.append(plain([model.weight, state, group, optimizer.defaults]))
        return found, step

    eager, _ = trained(lambda fn: fn)
    captured, step = trained(lambda fn: fz.capture(fn, audit=False))
    assert captured == eager
    assert step.stats.replays > 20, step.explain()


# -- in an object ----------------------------------------------------------------------------------


class Namespace(types.SimpleNamespace):
    """A class of the user's without code of its own."""


class Arguments(argparse.Namespace):
    """The same."""


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


Held = Callable[[Tensor], Any]
MOVED: dict[str, Held] = {
    "a namespace": lambda y: types.SimpleNamespace(loss=y),
    "an argparse namespace": lambda y: argparse.Namespace(loss=y),
    "a namespace of a dict": lambda y: types.SimpleNamespace(**{"loss": y}),
    "a namespace of a list": lambda y: types.SimpleNamespace(loss=[y]),
    "a namespace of a tuple": lambda y: types.SimpleNamespace(loss=(y, 1, "a")),
    "a nested namespace": lambda y: types.SimpleNamespace(a=types.SimpleNamespace(loss=y)),
    "a dict": lambda y: {"loss": y},
    "a tuple": lambda y: (y, y + 1),
}
REFUSED: dict[str, Held] = {
    "a namespace of the user's": lambda y: Namespace(loss=y),
    "arguments of the user's": lambda y: Arguments(loss=y),
    "such a namespace in a list": lambda y: [Namespace(loss=y)],
    "an object with slots": Slotted,
    "a dict of a library": lambda y: collections.UserDict(loss=y),
    "a distribution": lambda y: torch.distributions.Normal(y, 1.0),
    "a partial": lambda y: functools.partial(torch.add, y),
    "a closure": lambda y: lambda: y,
}


def left_by(make: Held, wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    holder, found = types.SimpleNamespace(out=None), []

    def fill(x: Tensor) -> Tensor:
        holder.out = make(x * 2)
        return x + 1

    step = wrap(fill)
    for i in range(10):
        step(torch.ones(2) * i)
        out: Any = holder.out
        found.append(
            plain(
                out.loss
                if isinstance(out, Slotted)
                else out()
                if type(out) is types.FunctionType
                else out
            )
        )
    return found, step


@pytest.mark.parametrize("name", MOVED)
def test_what_a_step_makes_anew_and_leaves(name: str) -> None:
    captured, step = left_by(MOVED[name], lambda fn: fz.capture(fn, audit=False))
    assert captured == left_by(MOVED[name], lambda fn: fn)[0]
    assert step.stats.replays >= 5, step.explain()


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_replay_can_leave_is_left_by_eager(name: str) -> None:
    captured, step = left_by(REFUSED[name], lambda fn: fz.capture(fn, audit=False))
    assert captured == left_by(REFUSED[name], lambda fn: fn)[0]
    assert not step.stats.replays


def test_a_dict_by_parameters() -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model, kept, found = nn.Linear(2, 3), dict[Any, Tensor](), []

        def keep(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                kept[p] = p.grad * 2
            return loss.detach()

        step = wrap(keep)
        for i in range(10):
            step(torch.ones(1, 2) * i)
            found.append(plain([*kept.values()]))
        return found, step

    captured, step = trained(lambda fn: fz.capture(fn, audit=False))
    assert captured == trained(lambda fn: fn)[0]
    assert step.stats.replays >= 6, step.explain()


# -- in an optimizer's tables, by the step ---------------------------------------------------------

Table = Callable[[torch.optim.Optimizer, Any, Tensor], Any]


def _counts_in_state(o: Any, p: Any, loss: Tensor) -> float:
    o.state["n"] = (o.state.get("n", (0,))[0] + 1,)
    return 1.0 / o.state["n"][0]


def _counts_in_object(o: Any, p: Any, loss: Tensor) -> float:
    o.state.setdefault("c", types.SimpleNamespace(n=0)).n += 1
    return 1.0 / o.state["c"].n


def _counts_in_group(o: Any, p: Any, loss: Tensor) -> float:
    o.param_groups[0].setdefault("c", types.SimpleNamespace(n=0)).n += 1
    return 1.0 / o.param_groups[0]["c"].n


def _pops_from_group(o: Any, p: Any, loss: Tensor) -> None:
    group = o.param_groups[0]
    group.pop("t") if "t" in group else group.update(t=loss)


def _counts_in_defaults(o: Any, p: Any, loss: Tensor) -> float:
    o.defaults["n"] = o.defaults.get("n", 0) + 1
    return 1.0 / o.defaults["n"]


def _flips_in_defaults(o: Any, p: Any, loss: Tensor) -> float:
    o.defaults["warm"] = not o.defaults.get("warm")
    return 1.0 if o.defaults["warm"] else 0.5


def _keeps_previous(o: Any, p: Any, loss: Tensor) -> None:
    o.state[p]["previous"] = p.detach().clone()


def _keeps_pair_in_group(o: Any, p: Any, loss: Tensor) -> None:
    o.param_groups[0]["z"] = (p.detach().clone(), loss)


def _averages_in_state(o: Any, p: Any, loss: Tensor) -> None:
    o.state["z"] = o.state["z"] * 0.9 + loss if "z" in o.state else loss.clone()


BY_STEP: dict[Table, int] = {
    _counts_in_state: 0,
    _counts_in_object: 8,
    _counts_in_group: 0,
    _pops_from_group: 0,
    _counts_in_defaults: 8,
    _flips_in_defaults: 0,
    _keeps_previous: 5,
    _keeps_pair_in_group: 5,
    _averages_in_state: 5,
}


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
@pytest.mark.parametrize("between", ["nothing", "a load", "another dict"])
@pytest.mark.parametrize("fill", BY_STEP, ids=lambda fill: fill.__name__)
def test_what_a_step_puts_in_an_optimizers_tables(fill: Table, between: str) -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        p, found = model.weight, []

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            factor = fill(optimizer, p, loss.detach())
            (loss if factor is None else loss * factor).backward()
            optimizer.step()
            return loss.detach()

        step = wrap(train)
        for i in range(20):
            if i == 12 and between == "a load":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if i == 12 and between == "another dict":
                optimizer.state[p] = dict(optimizer.state[p])
            step(torch.ones(3, 4))
            group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
            state = {str(k)[:9]: v for k, v in optimizer.state.items()}
            found.append(plain([model.weight, state, group, optimizer.defaults]))
        return found, step

    eager, _ = trained(lambda fn: fn)
    captured, step = trained(lambda fn: fz.capture(fn, audit=False, allowance=None))
    assert captured == eager
    assert step.stats.replays >= BY_STEP[fill], step.explain()
