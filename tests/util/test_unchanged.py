"""Facts of identity: each read is compared, nothing equal passes for the same, and no tensor is kept alive."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize.util.unchanged import Unchanged


class Holder:
    """Something for every kind of fact."""

    def __init__(self) -> None:
        self.number, self.maybe = 1000.5, None
        self.table: dict[Any, Any] = {"a": object(), "b": torch.ones(1)}
        self.keyed: dict[Any, Any] = {1000: 1, 2000: 2}
        self.ordered = OrderedDict(a=1, b=2)
        self.items: list[Any] = [object(), torch.ones(2)]
        self.space: dict[str, Any] = {"f": object(), "unread": 1}
        self.value = 3
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.layer.parameters())
        self.layer(torch.ones(2)).sum().backward()
        self.optimizer.step()

    def facts(self) -> Unchanged:
        facts = Unchanged()
        facts.attribute(self, "number")
        for name in ("requires_grad", "_backward_hooks"):
            facts.attribute(self.layer.weight, name)
        facts.presence(self.layer.weight, "grad")
        facts.presence(self, "maybe")
        facts.table(self.table)
        facts.table(self.keyed)
        facts.keys(self.ordered)
        facts.elements(self.items)
        facts.entry(self.__dict__, "layer")
        facts.names(self.space, lambda space: (space["f"],))
        facts.states(self.optimizer)
        facts.kind(self)
        facts.read(lambda: self.value)
        facts.freeze()
        return facts


class Other(Holder):
    pass


def state_of(holder: Holder) -> dict[str, Any]:
    return holder.optimizer.state[holder.layer.weight]


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "an equal attribute": lambda h: setattr(h, "number", float("1000.5")),
    "all attributes": lambda h: setattr(h, "__dict__", {**vars(h)}),
    "no attribute": lambda h: delattr(h, "number"),
    "a flag of a parameter": lambda h: h.layer.weight.requires_grad_(False),
    "a hook of a parameter": lambda h: h.layer.weight.register_hook(lambda gradient: None),
    "no gradient": lambda h: setattr(h.layer.weight, "grad", None),
    "something instead of None": lambda h: setattr(h, "maybe", 1),
    "an entry": lambda h: h.table.update(a=object()),
    "an equal tensor": lambda h: h.table.update(b=torch.ones(1)),
    "a new entry": lambda h: h.table.update(c=1),
    "a renamed entry": lambda h: h.table.update(c=h.table.pop("b")),
    "a number as a key": lambda h: h.keyed.update({3000: h.keyed.pop(2000)}),
    "the order": lambda h: h.ordered.move_to_end("a"),
    "an element": lambda h: h.items.__setitem__(1, torch.ones(2)),
    "one element less": lambda h: h.items.pop(),
    "an entry's value": lambda h: setattr(h, "layer", nn.Linear(2, 2)),
    "a name": lambda h: h.space.update(f=object()),
    "another number of names": lambda h: h.space.update(g=1),
    "a state": lambda h: state_of(h).update(exp_avg=torch.zeros(2, 2)),
    "a new state": lambda h: state_of(h).update(more=1),
    "all states": lambda h: h.optimizer.load_state_dict(copy.deepcopy(h.optimizer.state_dict())),
    "the order of states": lambda h: h.optimizer.state.update(
        {h.layer.weight: h.optimizer.state.pop(h.layer.weight)}
    ),
    "the class": lambda h: setattr(h, "__class__", Other),
    "a result": lambda h: setattr(h, "value", 4),
}


@pytest.mark.parametrize("has_versions", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(
    name: str, has_versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_versions:  # as in a torch without versions of dicts
        monkeypatch.setattr("functionalize.util.unchanged.dict_version", None)
    holder = Holder()
    facts = holder.facts()
    assert facts.hold() and facts.hold()
    CHANGES[name](holder)
    assert not facts.hold()


def test_an_assignment_by_specialised_bytecode_is_seen() -> None:
    def assign(holder: Holder, number: float) -> None:
        holder.number = number

    holder = Holder()
    for i in range(100):
        facts = Unchanged()
        facts.attribute(holder, "number")
        facts.freeze()
        assert facts.hold()
        assign(holder, i + 0.5)
        assert not facts.hold()


def test_a_value_that_is_back_is_no_change() -> None:
    holder = Holder()
    facts, number = holder.facts(), holder.number
    holder.number = 3.0
    holder.number = number
    assert facts.hold() and facts.hold()
    holder.number = 3.0
    assert not facts.hold() and not facts.hold()


def test_an_attribute_that_python_reads_is_read_as_python_reads_it() -> None:
    class Reading(Tensor):
        answer: Any = False

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
                return cls.answer
            return super().__torch_function__(func, types, args, kwargs or {})

    value, facts = torch.ones(2).as_subclass(Reading), Unchanged()
    facts.attribute(value, "requires_grad")
    facts.freeze()
    assert facts.hold()
    Reading.answer = True
    assert not facts.hold()


def test_what_is_not_a_fact_may_change() -> None:
    holder = Holder()
    facts = holder.facts()
    holder.space["unread"], holder.ordered["a"] = 2, 5
    with torch.no_grad():
        holder.layer.weight.add_(1), holder.table["b"].add_(1), state_of(holder)["exp_avg"].add_(1)
    assert facts.hold()


def test_no_tensor_is_kept_alive() -> None:
    holder = Holder()
    wrapped = Holder()
    facts = holder.facts()
    more = Unchanged()
    owner = torch.ones(3)
    more.attribute(owner, "requires_grad")
    more.presence(owner, "grad")
    more.freeze()
    assert more.hold()
    tensors: list[Tensor] = [holder.table["b"], holder.items[1], owner]
    tensors += [state_of(holder)["exp_avg"], state_of(holder)["step"]]
    alive = [weakref.ref(tensor) for tensor in tensors]
    holder.table.clear(), holder.items.clear(), holder.optimizer.state.clear()
    del tensors, owner
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    assert not facts.hold() and not more.hold() and wrapped.facts().hold()


def test_what_other_facts_test_is_not_tested_again() -> None:
    module, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    others = Unchanged()
    others.table(vars(module)), others.attribute(module, "__dict__")
    others.freeze()
    facts = Unchanged(beside=others)
    for each in (module, alone):
        facts.table(vars(each)), facts.attribute(each, "__dict__")
    facts.freeze()
    module.note = 1  # type: ignore[assignment]
    assert facts.hold() and not others.hold()
    alone.note = 1  # type: ignore[assignment]
    assert not facts.hold()
