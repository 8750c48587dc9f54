"""Where FSDP2 keeps tensors, and what it keeps in Python; `fsdp_contract.py` lists its attributes.

    fsdp_params(module)     every FSDPParam under a module, with its fully qualified name
    fsdp_tensors(module)    the tensors FSDP2 keeps beside the parameters, with names
    FSDPState.now(modules)  flags, sharded or not, which parameter is registered, prefetch order
    FSDPStateGuard          the step enters in the state it was captured in
    FSDPEffects             what a step did to that state, done again by a replay

A replay runs no hook, so what FSDP2 keeps in Python moves by effects alone: after a replay the model is in the
state that the eager step leaves it in, and an eager call may follow.
Seen in torch 2.11 (one parameter group per module) to 2.15 (gradients accumulate in `_unsharded_param.grad`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functionalize._compat import fsdp_lazy_init, fsdp_state_of
from functionalize.core.inputs import Call
from functionalize.frontend.fsdp_contract import MOVED, Handling, is_writable, names

_STATE = names("FSDPState", Handling.RESTORED)
_CONTEXT = names("FSDPStateContext", Handling.RESTORED)
_COMMUNICATION = names("FSDPCommContext", Handling.RESTORED)
_GROUP = names("FSDPParamGroup", Handling.RESTORED)
_PARAM = names("FSDPParam", Handling.RESTORED)
_PLAIN = (bool, int, float, str, enum.Enum, type(None), torch.dtype)
# What a step may not leave behind: it ends in another call, where a replay's would be the recorded one.
_PENDING = {
    "_all_gather_result": "an unshard begins in one call and ends in another",
    "active_gradient_reduction": (
        "an asynchronous finalize_backward begins in one call and is waited for in another: call wait() on its handle "
        "inside the step"
    ),
}


Under = nn.Module | Sequence[Any]  # a module, or the states under it, if they were found already


def fsdp_states(under: Under) -> Iterator[Any]:
    """Every `FSDPState` under a module, each once."""
    if not isinstance(under, nn.Module):
        yield from under
        return
    seen: set[int] = set()
    for child in under.modules():
        state = fsdp_state_of(child)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_groups(under: Under) -> Iterator[Any]:
    """Every FSDP parameter group under a module, each once."""
    for state in fsdp_states(under):
        yield from _groups_of(state)


def fsdp_contexts(under: Under) -> Iterator[Any]:
    """The contexts that FSDP modules share: of the iteration, and of communication; some twice."""
    for state in fsdp_states(under):
        yield state._state_ctx
        yield state._comm_ctx


def fsdp_params(under: Under) -> Iterator[tuple[str, Any]]:
    """Every FSDPParam under a module with its fully qualified name."""
    for group in fsdp_groups(under):
        for param in group.fsdp_params:
            info = param._module_info
            yield param._param_fqn or info.param_name, param


def fsdp_registered(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every place, as module and name, where FSDP2 registers a parameter, and the FSDPParam."""
    for _, param in fsdp_params(module):
        for owner, name in _registrations(param):
            yield owner, name, param


def _registrations(param: Any) -> list[tuple[nn.Module, str]]:
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def fsdp_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that a program may refer to, with names that are the same in every process; some twice."""
    for i, state in enumerate(fsdp_states(module)):
        yield f"state {i}", state
        yield f"attributes of state {i}", vars(state)
        yield f"context of state {i}", vars(state._state_ctx)
        yield f"communication of state {i}", vars(state._comm_ctx)
        for key in _STATE:
            yield from _objects_in(f"{key} of state {i}", vars(state).get(key))
        for j, group in enumerate(_groups_of(state)):
            yield from _objects_of(group, f"{i}.{j}")


def _objects_of(group: Any, number: str) -> Iterator[tuple[str, Any]]:
    yield f"group {number}", group
    yield f"attributes of group {number}", vars(group)
    yield f"indices of group {number}", group._post_forward_indices
    if _ready(group):
        yield f"order of group {number}", group.comm_ctx.post_forward_order
    for key in _GROUP:
        yield from _objects_in(f"{key} of group {number}", vars(group).get(key))
    for k, param in enumerate(group.fsdp_params):
        yield f"parameter {number}.{k}", param
        yield f"attributes of parameter {number}.{k}", vars(param)
        yield f"sharded parameter {number}.{k}", param.sharded_param
        if hasattr(param, "_unsharded_param"):
            yield f"unsharded parameter {number}.{k}", param._unsharded_param


def _objects_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (*_PLAIN, *_EMPTY)):
        yield name, value
        if hasattr(value, "mesh"):
            yield f"mesh in {name}", value.mesh


# -- set up ----------------------------------------------------------------------------------------


class SetUp(NamedTuple):
    """How far FSDP2 has set up one of its modules: whether it is a root, whether it was unsharded once."""

    root: bool
    unsharded: bool


def fsdp_set_up(module: nn.Module) -> list[SetUp]:
    """How far the FSDP modules under `module` are set up, in the order of `fsdp_states`."""
    return [SetUp(bool(s._is_root), _was_unsharded(s)) for s in fsdp_states(module)]


def _was_unsharded(state: Any) -> bool:
    params = [param for group in _groups_of(state) for param in group.fsdp_params]
    return bool(params) and all(hasattr(param, "_unsharded_param") for param in params)


def set_up_fsdp(module: nn.Module, goal: Sequence[SetUp]) -> None:
    """Set FSDP2 up as its first forward does: roots, and the storages that parameters are unsharded into.

    Unshards one module after the other, so every rank must call it. Where that was done, nothing happens.
    """
    pairs = list(zip(fsdp_states(module), goal, strict=True))
    for state, (root, _) in pairs:
        if root:
            fsdp_lazy_init(state)
    for state, (_, unsharded) in pairs:
        if unsharded and not _was_unsharded(state):
            state._modules[0].unshard()
            state._modules[0].reshard()


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class FSDPTensor:
    """A tensor FSDP2 keeps: `attribute` of an FSDPParam or a group, `index` if that is a list."""

    param: Any
    attribute: str
    index: int | None = None

    def resolve(self, call: Call) -> Any:
        value = getattr(self.param, self.attribute)
        return value if self.index is None else value[self.index]

    def assign(self, call: Call, value: Tensor | None) -> None:
        """Put another tensor, or none, in its place."""
        setattr(self.param, self.attribute, value)


def fsdp_tensors(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Tensors FSDP2 keeps beside `parameters()`: padded shards, unsharded storages."""
    for fqn, param in fsdp_params(under):
        if isinstance(getattr(param, "_sharded_param_data", None), Tensor):
            yield f"{fqn}.sharded_param_data", FSDPTensor(param, "_sharded_param_data")
        for i in range(len(param.all_gather_outputs)):
            yield f"{fqn}.unsharded_{i}", FSDPTensor(param, "all_gather_outputs", i)
        for i in range(len(getattr(param, "_unsharded_inner_tensors", ()))):
            yield f"{fqn}.unsharded_inner_{i}", FSDPTensor(param, "_unsharded_inner_tensors", i)


def fsdp_parameters(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Each parameter twice: sharded, and unsharded if it was made; only one of them is registered."""
    for fqn, param in fsdp_params(under):
        yield fqn, FSDPTensor(param, "sharded_param")
        if hasattr(param, "_unsharded_param"):
            yield f"{fqn}.unsharded", FSDPTensor(param, "_unsharded_param")


def fsdp_unsharded(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor on a storage that FSDP2 grows to unshard a parameter, and empties to reshard it."""
    for _, param in fsdp_params(module):
        yield from param.all_gather_outputs
        yield from getattr(param, "_unsharded_inner_tensors", ())
        if hasattr(param, "_unsharded_param"):
            yield param._unsharded_param


def fsdp_slots(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Places, apart from `.grad`, that hold a gradient between microbatches, or nothing."""
    for fqn, param in fsdp_params(under):
        for key in _slots_of("FSDPParam", type(param)):
            yield f"{fqn}.{key}", FSDPTensor(param, key)
    for group in fsdp_groups(under):
        name = group._module_fqn or "root"
        for key in _slots_of("FSDPParamGroup", type(group)):
            yield f"{name}.{key.removeprefix('_')}", FSDPTensor(group, key)


def _slots_of(kind: str, cls: type) -> Iterator[str]:
    """The slots of a class, without those that are a view of another one in the torch at hand."""
    for key in names(kind, Handling.SLOT):
        if (kind, key) not in MOVED or is_writable(cls, key):
            yield key


def fsdp_keepalives(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Tensors held only until a collective on another stream has read them."""
    for module in modules:
        for state in fsdp_states(module):
            shared = state._comm_ctx
            for each in getattr(shared, "reduce_scatter_states", ()):
                yield each.reduce_scatter_input
            gathered = getattr(shared, "all_gather_state", None)
            if gathered is not None:
                yield gathered.all_gather_result.all_gather_output
            for group in _groups_of(state):
                if group._all_reduce_state is not None:
                    yield group._all_reduce_state.all_reduce_input


# -- what is kept in Python ------------------------------------------------------------------------


class Contents(NamedTuple):
    """What a dict, a list or a set holds, at one moment; equal for equal contents."""

    kind: str
    items: tuple[Any, ...] | frozenset[Any]


_EMPTY: Mapping[type, Contents] = {
    dict: Contents("dict", ()),
    list: Contents("list", ()),
    set: Contents("set", frozenset()),
}


class Place(NamedTuple):
    """One value: `table[key]` of an object's attributes or a module's parameters, or attribute `key` of a tensor."""

    name: str
    table: dict[str, Any] | Tensor
    key: str

    def read(self) -> Any:
        """The value; the contents of a container, which a step may change in place."""
        _, table, key = self
        value = table.get(key) if type(table) is dict else getattr(table, key)
        empty = _EMPTY.get(type(value))
        if empty is None or not value:
            return value if empty is None else empty  # most containers are empty
        if type(value) is dict:
            return Contents("dict", tuple(value.items()))
        return empty._replace(items=tuple(value) if type(value) is list else frozenset(value))

    def write(self, value: Any) -> None:
        """Assign what `read` returned; a container stays the same object, since hooks of FSDP2 hold some."""
        if not isinstance(value, Contents):
            if type(self.table) is dict:
                self.table[self.key] = value
            else:
                setattr(self.table, self.key, value)
            return
        assert type(self.table) is dict
        container = self.table[self.key]
        container.clear()
        if value.kind == "list":
            container.extend(value.items)
        else:
            container.update(value.items)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPState:
    """What FSDP2 keeps in Python at one moment.

    order: groups in the order of their forwards, by list that holds it; only the last ones, one per group,
    can matter to what comes. indices: where in that order each group stands.
    """

    places: tuple[Place, ...]
    values: tuple[Any, ...]
    orders: tuple[tuple[Any, ...], ...]
    indices: tuple[tuple[int, ...], ...]
    _orders: tuple[list[Any], ...]
    _indices: tuple[tuple[list[int], int], ...]

    @staticmethod
    def now(roots: Iterable[Under]) -> FSDPState:
        """Look at every FSDP2 module under these roots."""
        states = [state for root in roots for state in fsdp_states(root)]
        found = [place for state in states for place in _places(state)]
        places = list({(id(place.table), place.key): place for place in found}.values())
        orders: list[list[Any]] = []
        indices: list[tuple[list[int], int]] = []
        for state in states:
            for group in _groups_of(state):
                order = group.comm_ctx.post_forward_order if _ready(group) else []
                known = next((i for i, o in enumerate(orders) if o is order), len(orders))
                if known == len(orders):
                    orders.append(order)
                indices.append((group._post_forward_indices, known))
        values = tuple([p.read() for p in places])
        lists = tuple(tuple(order) for order in orders)
        numbers = tuple(tuple(at) for at, _ in indices)
        return FSDPState(tuple(places), values, lists, numbers, tuple(orders), tuple(indices))

    def _where(self) -> list[Any]:
        """Where it was looked; another list or table is there when FSDP2 has set itself up."""
        places = [(place.key, id(place.table)) for place in self.places]
        return [places, list(map(id, self._orders)), [id(numbers) for numbers, _ in self._indices]]

    def tables(self) -> set[tuple[int, str]]:
        """The places, so that others leave them to us."""
        return {(id(place.table), place.key) for place in self.places}

    def summary(self) -> tuple[Any, ...]:
        """What tells states apart, hashable; equal for states that an equal step may start from."""
        return tuple([v if isinstance(v, _BY_VALUE) else id(v) for v in self.values])

    def difference(self, backward: bool) -> str | None:
        """How FSDP2's state now differs from this one, in what a step (that goes `backward`) looks at."""
        for place, was in zip(self.places, self.values, strict=True):
            name, table, key = place
            now = table.get(key) if type(table) is dict else getattr(table, key)
            if now is not was and not same(now := place.read(), was):  # nearly all are the same
                return f"{name} is {_brief(now)}, was {_brief(was)}"
        recent = len(self._indices) if backward else 0
        if not recent:
            return None
        for order, were in zip(self._orders, self.orders, strict=True):
            if list(map(id, order[-recent:])) != list(map(id, were[-recent:])):
                return "FSDP2 ran other modules forward since its last backward"
        return None


_BY_VALUE = (*_PLAIN, Contents)


def same(a: Any, b: Any) -> bool:
    """Whether two values of a place are one object, or equal numbers, names or contents."""
    return a is b or (type(a) is type(b) and isinstance(b, _BY_VALUE) and bool(a == b))


def _ready(group: Any) -> bool:
    return hasattr(group.comm_ctx, "post_forward_order")


def _places(state: Any) -> Iterator[Place]:
    groups = _groups_of(state)
    where = (groups[0]._module_fqn or "root") if groups else "a module"
    yield from _attributes(f"FSDP module `{where}`: ", state, _STATE)
    yield from _attributes("FSDP2's ", state._state_ctx, _CONTEXT)
    yield from _attributes("FSDP2's ", state._comm_ctx, _COMMUNICATION)
    for group in groups:
        yield from _attributes(f"FSDP group `{group._module_fqn or 'root'}`: ", group, _GROUP)
        for param in group.fsdp_params:
            name = f"FSDP parameter `{param._param_fqn}`: "
            yield from _attributes(name, param, _PARAM)
            for module, key in _registrations(param):
                yield Place(f"{name}registered", module._parameters, key)
            if hasattr(param, "sharded_grad_dtype") and hasattr(param, "_unsharded_param"):
                yield Place(f"{name}grad_dtype", param._unsharded_param, "grad_dtype")


def _attributes(name: str, owner: Any, keys: Iterable[str]) -> Iterator[Place]:
    """A place for each of the attributes that the torch at hand has."""
    table = vars(owner)
    for key in keys:
        if hasattr(owner, key):
            yield Place(f"{name}{key}", table, key)


def _brief(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Contents):
        return f"a {value.kind} of {len(value.items)}"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


@dataclass(frozen=True, slots=True, eq=False)
class FSDPStateGuard:
    """FSDP2 enters the step in the state it was captured in.

    backward: whether the step goes backward, and so prefetches by the order of the forwards before.
    """

    state: FSDPState
    backward: bool = True

    def failure(self, call: Call) -> str | None:
        return self.state.difference(self.backward)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPEffects:
    """What a step did to FSDP2's state in Python.

    assigned: places and their values at exit. orders: of each list of forwards, whether it was emptied, and what
    was appended; indices: the same for each group's places in it, counted from where the list then ended.
    """

    assigned: tuple[tuple[Place, Any], ...] = ()
    orders: tuple[tuple[list[Any], bool, tuple[Any, ...]], ...] = ()
    indices: tuple[tuple[list[int], int, bool, tuple[int, ...]], ...] = ()

    @staticmethod
    def between(before: FSDPState, after: FSDPState) -> FSDPEffects | str:
        """The effects, or why they cannot be done again."""
        if before._where() != after._where():
            return "FSDP2 set itself up"
        assigned = []
        for place, was, now in zip(before.places, before.values, after.values, strict=True):
            if not same(now, was):
                assigned.append((place, now))
                if place.key in _PENDING:
                    return _PENDING[place.key]
        orders, indices = [], []
        for lst, was, now in zip(before._orders, before.orders, after.orders, strict=True):
            kept = _begins(now, was)
            orders.append((lst, not kept, now[len(was) :] if kept else now))
        pairs = zip(before._indices, before.indices, after.indices, strict=True)
        for (numbers, order), was, now in pairs:
            kept = _begins(now, was)
            if not kept and now and not orders[order][1]:
                return "FSDP2 goes backward through forwards of an earlier call"
            start = 0 if orders[order][1] else len(before.orders[order])
            new = now[len(was) :] if kept else now
            indices.append((numbers, order, not kept, tuple(i - start for i in new)))
        return FSDPEffects(tuple(assigned), tuple(orders), tuple(indices))

    @property
    def changes_grad_dtype(self) -> bool:
        """Whether the step leaves an unsharded parameter with another `grad_dtype`."""
        return any(place.key == "grad_dtype" for place, _ in self.assigned)

    def apply(self) -> None:
        """Leave FSDP2 as the step does."""
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


def _begins(now: tuple[Any, ...], was: tuple[Any, ...]) -> bool:
    return now[: len(was)] == was
