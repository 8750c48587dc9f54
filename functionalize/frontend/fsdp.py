"""The only module that knows FSDP2's internals: where it keeps tensors, and what it keeps in Python.

    fsdp_params(module)     every FSDPParam under a module, with its fully qualified name
    fsdp_tensors(module)    the tensors FSDP2 keeps beside the parameters, with names
    FSDPState.now(modules)  flags, sharded or not, which parameter is registered, prefetch order
    FSDPStateGuard          the step enters in the state it was captured in
    FSDPEffects             what a step did to that state, done again by a replay

A replay runs no hook, so what FSDP2 keeps in Python moves by effects alone: after a replay the model is in the
state that the eager step leaves it in, and an eager call may follow.
Seen in torch 2.11 (one parameter group per module) and 2.13 (several).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from functionalize._compat import fsdp_lazy_init, fsdp_state_of
from functionalize.core.inputs import Call

_GROUP_FLAGS = (
    "_training_state",
    "_sharded_state",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "unshard_async_op",
    "unshard_in_backward",
    "post_forward_mesh_info",
    "_all_gather_result",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
)
_STATE_FLAGS = ("_training_state",)
_SHARED_FLAGS = ("is_last_backward", "iter_forward_root")
_PARAM_FLAGS = ("sharded_state",)
_PLAIN = (bool, int, float, str, enum.Enum, type(None))


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
        for j, group in enumerate(_groups_of(state)):
            yield from _objects_of(group, f"{i}.{j}")


def _objects_of(group: Any, number: str) -> Iterator[tuple[str, Any]]:
    yield f"group {number}", group
    yield f"attributes of group {number}", vars(group)
    yield f"indices of group {number}", group._post_forward_indices
    if _ready(group):
        yield f"order of group {number}", group.comm_ctx.post_forward_order
    for key in ("mesh_info", *_GROUP_FLAGS):
        value = vars(group).get(key)
        if not isinstance(value, _PLAIN):
            yield f"{key} of group {number}", value
            if hasattr(value, "mesh"):
                yield f"mesh in {key} of group {number}", value.mesh
    for k, param in enumerate(group.fsdp_params):
        yield f"parameter {number}.{k}", param
        yield f"attributes of parameter {number}.{k}", vars(param)
        yield f"sharded parameter {number}.{k}", param.sharded_param
        if hasattr(param, "_unsharded_param"):
            yield f"unsharded parameter {number}.{k}", param._unsharded_param


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
        yield (
            f"{fqn}.unsharded_accumulated_grad",
            FSDPTensor(param, "unsharded_accumulated_grad"),
        )
    for group in fsdp_groups(under):
        name = group._module_fqn or "root"
        yield f"{name}.partial_reduce_output", FSDPTensor(group, "_partial_reduce_output")


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


# -- what is kept in Python ------------------------------------------------------------------------


class Place(NamedTuple):
    """One value: `table[key]`, where `table` is an object's attributes or a module's parameters."""

    name: str
    table: dict[str, Any]
    key: str


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
        places = [place for state in states for place in _places(state)]
        orders: list[list[Any]] = []
        indices: list[tuple[list[int], int]] = []
        for state in states:
            for group in _groups_of(state):
                order = group.comm_ctx.post_forward_order if _ready(group) else []
                known = next((i for i, o in enumerate(orders) if o is order), len(orders))
                if known == len(orders):
                    orders.append(order)
                indices.append((group._post_forward_indices, known))
        values = tuple([p.table.get(p.key) for p in places])
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
        return tuple([v if isinstance(v, _PLAIN) else id(v) for v in self.values])

    def difference(self, backward: bool) -> str | None:
        """How FSDP2's state now differs from this one, in what a step (that goes `backward`) looks at."""
        for place, was in zip(self.places, self.values, strict=True):
            now = place.table.get(place.key)
            if now is not was and not (isinstance(was, _PLAIN) and now == was):
                return f"{place.name} is {_brief(now)}, was {_brief(was)}"
        recent = len(self._indices) if backward else 0
        if not recent:
            return None
        for order, were in zip(self._orders, self.orders, strict=True):
            if list(map(id, order[-recent:])) != list(map(id, were[-recent:])):
                return "FSDP2 ran other modules forward since its last backward"
        return None


def _ready(group: Any) -> bool:
    return hasattr(group.comm_ctx, "post_forward_order")


def _places(state: Any) -> Iterator[Place]:
    groups = _groups_of(state)
    where = (groups[0]._module_fqn or "root") if groups else "a module"
    for key in _STATE_FLAGS:
        yield Place(f"FSDP module `{where}`: {key}", vars(state), key)
    for key in _SHARED_FLAGS:
        yield Place(f"FSDP2's {key}", vars(state._state_ctx), key)
    for group in groups:
        name = f"FSDP group `{group._module_fqn or 'root'}`"
        for key in _GROUP_FLAGS:
            yield Place(f"{name}: {key}", vars(group), key)
        for param in group.fsdp_params:
            name = f"FSDP parameter `{param._param_fqn}`"
            for key in _PARAM_FLAGS:
                yield Place(f"{name}: {key}", vars(param), key)
            for module, key in _registrations(param):
                yield Place(f"{name}: registered", module._parameters, key)


def _brief(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
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
            if now is not was:
                assigned.append((place, now))
                if place.key == "_all_gather_result":
                    return "an unshard begins in one call and ends in another"
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

    def apply(self) -> None:
        """Leave FSDP2 as the step does."""
        for place, value in self.assigned:
            place.table[place.key] = value
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
