"""Which objects a step returns: those that were there before, those that it leaves elsewhere, and new ones.

The caller may change what a step returns, and compare which object it is: a replay returns the objects that eager does.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError

pytestmark = pytest.mark.usefixtures("ample_allowance")


class Notes:
    """An object without tensors."""

    def __init__(self, *notes: Any) -> None:
        self.notes, self.is_done = [*notes], False


@dataclasses.dataclass
class Report:
    notes: list[Any]
    is_done: bool = False


class Owner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.table: dict[str, Any] = {"a": torch.ones(2), "n": 1}
        self.scales, self.array = [torch.ones(2), torch.ones(2)], np.ones(2)
        self.report, self.notes = Report([1]), Notes(2)
        self.metrics: dict[str, Any] = {"loss": torch.zeros(()), "calls": 0}

    def train(self, x: Tensor) -> Tensor:
        scale = (
            self.table["a"].sum() * self.scales[0].sum() * self.table["n"] * len(self.report.notes)
        )
        scale = scale * len(self.notes.notes) * float(self.array[0])
        loss: Tensor = (self.model(x) * scale).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _table(o: Owner, x: Tensor) -> Any:
    return o.train(x), o.table


def _list_in_a_dict(o: Owner, x: Tensor) -> Any:
    return {"loss": o.train(x), "scales": o.scales, "again": (o.scales,)}


def _array(o: Owner, x: Tensor) -> Any:
    o.train(x)
    return o.array


def _objects(o: Owner, x: Tensor) -> Any:
    return [o.train(x), o.report, o.notes]


def _updated(o: Owner, x: Tensor) -> Any:
    o.metrics["loss"] = o.train(x)
    o.metrics["calls"] += 1
    return o.metrics


def _read(o: Owner, x: Tensor) -> Any:
    o.metrics["loss"] = o.train(x).item()
    return o.metrics


def _new_object(o: Owner, x: Tensor) -> Any:
    o.train(x)
    return Notes("new")


def _new_dataclass(o: Owner, x: Tensor) -> Any:
    o.train(x)
    return Report(["new"])


def _new_in_others(o: Owner, x: Tensor) -> Any:
    notes = Notes("new")
    return {
        **{"loss": o.train(x), "notes": notes, "twice": [notes], "report": Report([3])},
        **{"names": {"a"}, "array": np.zeros(1), "queue": collections.deque([1])},
        **{"counts": collections.Counter("ab"), "order": collections.OrderedDict(a=[1])},
    }


def _around_another(o: Owner, x: Tensor) -> Any:
    o.train(x)
    return Notes(o.notes, o.model)


RETURNS = [
    *(_table, _list_in_a_dict, _array, _objects, _updated, _read),
    *(_new_object, _new_dataclass, _new_in_others, _around_another),
]


def picture(value: Any, known: dict[int, Any], names: dict[int, str]) -> Any:
    """Types, contents, and which objects are one, those of the owner by name."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (bool, int, float, str, nn.Module)):
        return type(value), repr(value)
    at = names.get(id(value), known.setdefault(id(value), len(known)))
    if isinstance(value, dict):
        found = [*value.items()]
    elif isinstance(value, (list, tuple, collections.deque)):
        found = [*enumerate(value)]
    elif isinstance(value, (set, np.ndarray)):
        found = [*enumerate(map(repr, value))]
    else:
        found = [*vars(value).items()]
    return at, type(value), [(key, picture(each, known, names)) for key, each in found]


def change(value: Any) -> None:
    """What a caller may do with a result."""
    if isinstance(value, (list, tuple)):
        for each in value:
            change(each)
    elif isinstance(value, dict):
        for each in value.values():
            change(each)
        if "n" in value:
            value["n"] += 1
        if "loss" in value:
            value["loss"] = 0.5
    elif isinstance(value, np.ndarray):
        value[0] += 1
    elif isinstance(value, set):
        value.add("changed")
    elif isinstance(value, (Notes, Report)):
        value.notes.append(4)
        value.is_done = True


def run(returns: Callable[[Owner, Tensor], Any], capture: Callable[[Any], Any]) -> Any:
    owner, found = Owner(), []
    step = capture(lambda x: returns(owner, x))
    for i in range(24):
        left = step(torch.full((4, 3), 0.1 * (i % 5)))
        names = {id(value): name for name, value in vars(owner).items()}
        found.append(picture(left, {}, names))
        found.append(owner.model.weight.tolist())
        if i in (10, 16):
            change(left)
    return found, step


@pytest.mark.parametrize("audit", ["auto", 2])
@pytest.mark.parametrize("returns", RETURNS, ids=lambda each: each.__name__)
def test_as_eager(returns: Callable[[Owner, Tensor], Any], audit: Any) -> None:
    capture = lambda step: fz.capture(step, audit=audit)  # noqa: E731
    (expected, _), (found, step) = run(returns, lambda s: s), run(returns, capture)
    assert found == expected
    assert step.stats.replays > 5, step.explain()
    assert not step.stats.audit_failures


def test_another_object_at_the_place() -> None:
    """An equal list takes the place of the one that was returned: the next replay returns that."""
    owner = types.SimpleNamespace(names=["a"])

    def step(x: Tensor) -> Any:
        return x.sum() * len(owner.names), owner.names

    captured = fz.capture(step)
    for i in range(16):
        if i == 8:
            owner.names = ["a"]
        assert captured(torch.ones(2))[1] is owner.names
    assert captured.stats.replays > 8


def test_object_without_copies_is_refused() -> None:
    class Once:
        def __init__(self) -> None:
            self.notes: list[Any] = []

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one")

    def step(x: Tensor) -> Any:
        return x.sum(), Once()

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError, match=r"an object of type Once, of which no replay .*there is one"
    ):
        for _ in range(4):
            captured(torch.ones(2))


def test_losses_with_history_in_a_result() -> None:
    """They are no leaves of a state that is returned beside them, which stays the same object."""
    owner = Owner()
    weight = nn.Parameter(torch.ones(2))

    def step(x: Tensor) -> Any:
        loss = (weight * x).sum()
        owner.metrics = {"last": loss.detach()}
        return {"loss": loss, "again": loss, "metrics": owner.metrics, "table": owner.table}

    captured = fz.capture(step)
    for _ in range(12):
        left = captured(torch.ones(2))
        assert left["metrics"] is owner.metrics and left["table"] is owner.table
        assert left["loss"] is left["again"] and left["loss"].requires_grad
    assert captured.stats.replays > 6
    with pytest.raises(UncapturableError, match="goes backward from an output of a captured step"):
        left["loss"].backward()
