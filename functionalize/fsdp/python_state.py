"""FSDP2's Python state: read and compared before a step, and restored after a replay.

    FSDPState.now(modules)  flags, sharded or unsharded, the registered parameters, prefetch order
    FSDPStateGuard          the state on entry is that of the capture
    FSDPEffects             a step's changes to that state, and to the modes of modules, which a replay repeats

A replay runs no hooks, so only `FSDPEffects` changes this state: after a replay the model is in the state that the
eager step leaves it in, and an eager call may follow. `contract.py` lists the attributes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from functionalize._compat.references import address
from functionalize.fsdp.contract import Handling, names
from functionalize.fsdp.objects import (
    PLAIN,
    Under,
    fsdp_states,
    groups_of,
    is_ready,
    registrations_of,
)
from functionalize.ir.inputs import Call
from functionalize.util.reader import READER, Reader

_STATE = names("FSDPState", Handling.RESTORED)
_CONTEXT = names("FSDPStateContext", Handling.RESTORED)
_COMMUNICATION = names("FSDPCommContext", Handling.RESTORED)
_GROUP = names("FSDPParamGroup", Handling.RESTORED)
_PARAM = names("FSDPParam", Handling.RESTORED)
# Attributes that a step must not change: a later call uses the pending object, which a replay would not renew.
_PENDING = {
    "_all_gather_result": "an unshard begins in one call and ends in another",
    "active_gradient_reduction": (
        "an asynchronous finalize_backward begins in one call and is waited for in another: call wait() on its handle "
        "inside the step"
    ),
}


class Contents(NamedTuple):
    """The contents of a dict, a list or a set at one moment; equal for equal contents."""

    kind: str
    items: tuple[Any, ...] | frozenset[Any]


_KINDS: Mapping[str, type] = {"dict": dict, "list": list, "set": set}
_EMPTY = {kind: Contents(name, frozenset() if kind is set else ()) for name, kind in _KINDS.items()}


class Place(NamedTuple):
    """The place of a value: `table[key]` (a `__dict__` or a module's `_parameters`), or attribute `key` of a tensor."""

    name: str
    table: dict[str, Any] | Tensor
    key: str

    def read(self, read: Reader = READER) -> Any:
        """The value; for a container its contents, which a step may change in place."""
        _, table, key = self
        if type(table) is not dict:
            value = read.attribute(table, key)
        elif key in table:
            value = read.item(table, key)
        else:
            value = read.result(partial(table.get, key))
        empty = _EMPTY.get(type(value))
        if empty is None:
            return value
        if type(value) is dict:
            items: Any = tuple(read.table(value).items())
        elif not value:
            items = read.elements(value)
        elif type(value) is list:
            items = tuple(read.elements(value))
        else:
            items = read.result(partial(frozenset, value))
        return empty._replace(items=items) if value else empty  # most containers are empty

    def write(self, value: Any) -> None:
        """Assign a result of `read`. A container is updated in place, because FSDP2's hooks refer to some."""
        if not isinstance(value, Contents):
            if type(self.table) is dict:
                self.table[self.key] = value
            else:
                setattr(self.table, self.key, value)
            return
        assert type(self.table) is dict
        kind = _KINDS[value.kind]
        if type(self.table.get(self.key)) is not kind:
            self.table[self.key] = kind()
        container: Any = self.table[self.key]
        container.clear()
        if value.kind == "list":
            container.extend(value.items)
        else:
            container.update(value.items)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPState:
    """FSDP2's Python state at one moment.

    places, values: the places of RESTORED attributes, and their values.
    orders: the elements of each `post_forward_order`: groups in the order of their forwards. Only the last ones, one
    per group, affect later steps.
    indices: for each group, its indices in its order.
    _orders, _indices: the live lists; for indices, with the position of the group's order in `_orders`.
    """

    places: tuple[Place, ...]
    values: tuple[Any, ...]
    orders: tuple[tuple[Any, ...], ...]
    indices: tuple[tuple[int, ...], ...]
    _orders: tuple[list[Any], ...]
    _indices: tuple[tuple[list[int], int], ...]

    @staticmethod
    def now(roots: Iterable[Under]) -> FSDPState:
        """Read the state of every FSDP2 module under these roots."""
        states = [state for root in roots for state in fsdp_states(root)]
        found = [place for state in states for place in _places(state)]
        places = list({(address(place.table), place.key): place for place in found}.values())
        orders: list[list[Any]] = []
        indices: list[tuple[list[int], int]] = []
        for state in states:
            # A model that never ran forward has no order: what its first forward adds shows in `_where`.
            for group in filter(is_ready, groups_of(state)):
                order = group.comm_ctx.post_forward_order
                known = next((i for i, o in enumerate(orders) if o is order), len(orders))
                if known == len(orders):
                    orders.append(order)
                indices.append((group._post_forward_indices, known))
        values = tuple([p.read() for p in places])
        lists = tuple(tuple(order) for order in orders)
        numbers = tuple(tuple(at) for at, _ in indices)
        return FSDPState(tuple(places), values, lists, numbers, tuple(orders), tuple(indices))

    def _where(self) -> list[Any]:
        """The identities of the places and lists. They change when FSDP2 is initialized."""
        places = [(place.key, address(place.table)) for place in self.places]
        return [places, list(map(id, self._orders)), [id(numbers) for numbers, _ in self._indices]]

    def tables(self) -> set[tuple[int, str]]:
        """The keys of the places, which other guards and effects must skip."""
        return {(id(place.table), place.key) for place in self.places}

    def summary(self) -> tuple[Any, ...]:
        """A hashable key, equal for states from which the same program may start."""
        return tuple([v if isinstance(v, _BY_VALUE) else id(v) for v in self.values])

    def restore(self) -> None:
        """Make FSDP2's state this one again, if FSDP2 has not set itself up since."""
        for place, was in zip(self.places, self.values, strict=True):
            if not same_value(place.read(), was):
                place.write(was)
        for order, groups in zip(self._orders, self.orders, strict=True):
            order[:] = groups
        for (numbers, _), were in zip(self._indices, self.indices, strict=True):
            numbers[:] = were

    def difference(self, backward: bool, read: Reader = READER) -> str | None:
        """Text about a difference between FSDP2's state now and this one, or None.

        backward: whether the step runs a backward, which depends on the order of forwards.
        """
        for place, was in zip(self.places, self.values, strict=True):
            if read is READER:  # nearly all values are the same object
                _, table, key = place
                if (table.get(key) if type(table) is dict else getattr(table, key)) is was:
                    continue
            now = place.read(read)
            if not same_value(now, was):
                return f"{place.name} is {_brief(now)}, was {_brief(was)}"
        if not backward or not self._indices:
            return None
        recent = len(self._indices)
        for now, were in zip(read.result(self.recent), self.orders, strict=True):
            if now != list(map(id, were[-recent:])):
                return "FSDP2 ran other modules forward since its last backward"
        return None

    def recent(self) -> list[list[int]]:
        """The identities of the last groups in each order, as many as there are groups."""
        return [list(map(id, order[-len(self._indices) :])) for order in self._orders]


_BY_VALUE = (*PLAIN, Contents)


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a place are one object, or equal numbers, names or contents."""
    return a is b or (type(a) is type(b) and isinstance(b, _BY_VALUE) and bool(a == b))


def _places(state: Any) -> Iterator[Place]:
    groups = groups_of(state)
    where = (groups[0]._module_fqn or "root") if groups else "a module"
    yield from _attributes(f"FSDP module `{where}`: ", state, _STATE)
    yield from _attributes("FSDP2's ", state._state_ctx, _CONTEXT)
    yield from _attributes("FSDP2's ", state._comm_ctx, _COMMUNICATION)
    for group in groups:
        yield from _attributes(f"FSDP group `{group._module_fqn or 'root'}`: ", group, _GROUP)
        for param in group.fsdp_params:
            name = f"FSDP parameter `{param._param_fqn}`: "
            yield from _attributes(name, param, _PARAM)
            for module, key in registrations_of(param):
                yield Place(f"{name}registered", module._parameters, key)
            if hasattr(param, "sharded_grad_dtype") and hasattr(param, "_unsharded_param"):
                yield Place(f"{name}grad_dtype", param._unsharded_param, "grad_dtype")


def _attributes(name: str, owner: Any, keys: Iterable[str]) -> Iterator[Place]:
    """A place for each of the attributes that exist in the installed torch."""
    table = vars(owner)
    for key in keys:
        if hasattr(owner, key):
            yield Place(f"{name}{key}", table, key)


def _brief(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Contents):
        return f"a {value.kind} of {len(value.items)}"
    return repr(value) if isinstance(value, PLAIN) else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True, eq=False)
class FSDPStateGuard:
    """FSDP2's state at the begin of the step is that of the capture.

    backward: whether the step runs a backward, which prefetches by the order of earlier forwards.
    """

    state: FSDPState
    backward: bool = True
    is_read_by_reader: ClassVar[bool] = True

    def failure(self, call: Call) -> str | None:
        return self.state.difference(self.backward, call.reader)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPEffects:
    """A step's changes to FSDP2's Python state.

    assigned: places that the step assigned, with their values at exit; also `training` of modules.
    orders: for each `post_forward_order`: the list, whether the step cleared it, the groups it appended.
    indices: for each group's list of indices: the list, the position of its order in `orders`, whether the step cleared
    it, and the appended indices, relative to the end of the order before the step appended.
    """

    assigned: tuple[tuple[Place, Any], ...] = ()
    orders: tuple[tuple[list[Any], bool, tuple[Any, ...]], ...] = ()
    indices: tuple[tuple[list[int], int, bool, tuple[int, ...]], ...] = ()

    @staticmethod
    def between(before: FSDPState, after: FSDPState) -> FSDPEffects | str:
        """The effects, or text why a replay cannot repeat them."""
        if before._where() != after._where():
            return "FSDP2 set itself up"
        assigned = []
        for place, was, now in zip(before.places, before.values, after.values, strict=True):
            if not same_value(now, was):
                assigned.append((place, now))
                if place.key in _PENDING:
                    return _PENDING[place.key]
        orders, indices = [], []
        for lst, was, now in zip(before._orders, before.orders, after.orders, strict=True):
            kept = _starts_with(now, was)
            orders.append((lst, not kept, now[len(was) :] if kept else now))
        pairs = zip(before._indices, before.indices, after.indices, strict=True)
        for (numbers, order), was, now in pairs:
            kept = _starts_with(now, was)
            if not kept and now and not orders[order][1]:
                return "FSDP2 goes backward through forwards of an earlier call"
            start = 0 if orders[order][1] else len(before.orders[order])
            new = now[len(was) :] if kept else now
            indices.append((numbers, order, not kept, tuple(i - start for i in new)))
        return FSDPEffects(tuple(assigned), tuple(orders), tuple(indices))

    def with_modes(self, modes: Iterable[tuple[str, dict[str, Any], bool]]) -> FSDPEffects:
        """These effects and those on modules: (name, attributes, whether it is in training mode at exit)."""
        assigned = tuple((Place(name, table, "training"), mode) for name, table, mode in modes)
        return replace(self, assigned=(*self.assigned, *assigned))

    @property
    def changes_grad_dtype(self) -> bool:
        """Whether the step changes the `grad_dtype` of an unsharded parameter."""
        return any(place.key == "grad_dtype" for place, _ in self.assigned)

    @property
    def are_none(self) -> bool:
        """Whether the step changes nothing."""
        moved = any(emptied or new for *_, emptied, new in (*self.orders, *self.indices))
        return not (self.assigned or moved)

    def apply(self) -> None:
        """Make the step's changes."""
        for place, value in self.assigned:
            place.write(value)
        starts = [0 if emptied else len(order) for order, emptied, _ in self.orders]
        for order, emptied, new in self.orders:
            if emptied:
                order.clear()
            order.extend(new)
        for numbers, which, emptied, steps in self.indices:
            if emptied:
                numbers.clear()
            numbers.extend(starts[which] + step for step in steps)


def _starts_with(now: tuple[Any, ...], was: tuple[Any, ...]) -> bool:
    return now[: len(was)] == was
