"""Law: what looks at the state or the arguments of a step calls no method of a container or an object of the user.

A profiler counts the calls of methods that classes of this file define, and who called them. The step's own code may,
and so may torch and Python where eager does as well; this library may not.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functionalize as fz

LIBRARY = fz.__file__.removesuffix("__init__.py")
CODES: dict[CodeType, str] = {}
METHODS = """
__getitem__ __setitem__ __delitem__ __contains__ __iter__ __len__ __bool__ __eq__ __ne__ __repr__ __str__ get keys
values items pop popitem setdefault update clear copy __missing__ append extend insert index count __reversed__
__sizeof__ __or__ __ior__ __add__
"""


def _watch(kind: Any) -> Any:
    for name, each in vars(kind).items():
        code = getattr(getattr(each, "fget", each), "__code__", None)
        if code is not None and name != "__init__":
            CODES[code] = f"{kind.__name__}.{name}"
    return kind


def loud(base: Any) -> Any:
    """A subclass of a container that overrides every method, each with code of its own."""
    own: dict[str, Any] = {}
    for name in METHODS.split():
        if hasattr(base, name):
            source = (
                f"def {name}(self, *a, **k): return base.{name}(self, *a, **k)  # {base.__name__}"
            )
            scope: dict[str, Any] = {"base": base}
            exec(compile(source, __file__, "exec"), scope)
            own[name] = scope[name]
            own[name].__code__ = own[name].__code__.replace(co_qualname=f"{base.__name__}.{name}")
    return _watch(type(f"Loud{base.__name__}", (base,), own))


class _Default(defaultdict[Any, Any]):
    def __init__(self, entries: Any = ()) -> None:
        super().__init__(dict, entries)


Dict, Ordered, List, Tuple, Set, Deque, Default = map(
    loud, (dict, OrderedDict, list, tuple, set, deque, _Default)
)


@_watch
class Asked:
    """It notes every read of an attribute."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


@_watch
class Special:
    """It has every special method that a reader may call without meaning to."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    @property
    def __class__(self) -> Any:
        return Special

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "special"

    def __iter__(self) -> Any:
        return iter(())


Calls = Counter[tuple[str, str]]


def called_by_the_library(call: Callable[[], Any], calls: Calls) -> Any:
    """The result of a call; each method above that a function of the library calls in it is counted."""

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and (name := CODES.get(frame.f_code)) and frame.f_back is not None:
            code = frame.f_back.f_code
            if code.co_filename.startswith(LIBRARY):
                calls[name, f"{code.co_filename.removeprefix(LIBRARY)}: {code.co_name}"] += 1

    sys.setprofile(note)
    try:
        return call()
    finally:
        sys.setprofile(None)


VALUES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda v: Dict(a=v), lambda held: held["a"]),
    "ordered": (lambda v: Ordered(a=v), lambda held: held["a"]),
    "default": (lambda v: Default({"a": v}), lambda held: held["a"]),
    "list": (lambda v: List([v]), lambda held: held[0]),
    "tuple": (lambda v: Tuple([v]), lambda held: held[0]),
    "deque": (lambda v: Deque([v]), lambda held: held[0]),
    "set": (lambda v: Set([2.0]), lambda held: 2.0 if 2.0 in held else 1.0),
    "asked": (lambda v: Asked(a=v), lambda held: held.a),
    "special": (lambda v: Special(a=v), lambda held: held.a),
    "in a list": (lambda v: [Special(a=v)], lambda held: held[0].a),
    "in a dict": (lambda v: {"k": List([v])}, lambda held: held["k"][0]),
}


def _replace(model: Any, optimizer: Any, what: str) -> None:
    """A table of the model or the optimizer becomes one of a class of the user."""
    group = optimizer.param_groups[0]
    if what == "groups":
        optimizer.param_groups = List(optimizer.param_groups)
    elif what == "group":
        optimizer.param_groups[0] = Dict(group)
    elif what == "params":
        group["params"] = List(group["params"])
    elif what == "state":
        optimizer.state = Default()
    elif what == "hooks":
        model._forward_hooks = Ordered(model._forward_hooks)
    elif what:
        setattr(model, what, Dict(getattr(model, what)))


TABLES = ["", "groups", "group", "params", "state", "hooks", "_parameters", "_buffers", "_modules"]


def check(value: str, holder: str, of_tensor: bool, table: str, options: dict[str, Any]) -> None:
    """Eight calls, captured and in eager: equal, with replays, and no method called by the library."""
    make, use = VALUES[value]

    class Trainer:
        """It may hold the value."""

    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any, Calls]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        _replace(model, optimizer, table)
        trainer: Any = Trainer()
        held = trainer.held = make(torch.full((3,), 2.0) if of_tensor else 2.0)
        if holder == "module":
            model.held = held

        def step(x: Tensor, *given: Any) -> Tensor:
            now = held if holder == "cell" else trainer.held if holder == "object" else None
            now = given[0] if given else model.held if holder == "module" else now
            loss = (model(x) * use(now)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        wrapped, found, calls = wrap(step), [], Calls()
        for i in range(8):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
            given = [held] if holder == "argument" else []
            found.append(called_by_the_library(lambda x=x, g=given: wrapped(x, *g), calls).item())
        return found, wrapped, calls

    expected, _, _ = run(lambda step: step)
    found, step, calls = run(lambda step: fz.capture(step, **options))
    assert found == expected
    assert not calls, calls
    assert step.stats.replays >= 5 or options, step.explain()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("holder", ["cell", "object", "module", "argument"])
def test_values(value: str, holder: str) -> None:
    check(value, holder, False, "", {})


@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str) -> None:
    check("dict", "cell", False, table, {})


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(["cell", "object", "module", "argument"]),
    st.booleans(),
    st.sampled_from(TABLES),
    st.sampled_from([{}, {"audit": False}, {"allowance": None}]),
)
def test_any(value: str, holder: str, of_tensor: bool, table: str, options: dict[str, Any]) -> None:
    check(value, holder, of_tensor and value != "set", table, options)
