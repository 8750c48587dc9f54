"""Iterators over FSDP2's objects and tensors. `contract.py` lists its attributes, `python_state.py` restores them.

    fsdp_params(module)     every FSDPParam under a module, with its fully qualified name
    fsdp_tensors(module)    the tensors that FSDP2 holds besides the parameters, with names
    fsdp_slots(module)      places other than `.grad` that hold gradients between microbatches
    set_up_fsdp(module)     the initialization that its first forward does

Valid for torch 2.11 (one parameter group per module) to 2.15 (gradients accumulate in `_unsharded_param.grad`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functionalize._compat.fsdp import fsdp_lazy_init, fsdp_state_of
from functionalize.cost.categories import Category
from functionalize.fsdp.contract import MOVED, Handling, is_writable, names
from functionalize.ir.inputs import Call
from functionalize.util.reader import READER
from functionalize.util.reading import modules_under

# Types of numbers, names and dtypes: compared by value, and saved as they are.
PLAIN = (bool, int, float, str, enum.Enum, type(None), torch.dtype)


Under = nn.Module | Sequence[Any]  # a root module, or the list of states under it


def fsdp_states(under: Under) -> Iterator[Any]:
    """Every `FSDPState` under a module, each once."""
    if not isinstance(under, nn.Module):
        yield from under
        return
    seen: set[int] = set()
    for _, child in modules_under(under):
        state = fsdp_state_of(child)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield state


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of an `FSDPState`; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def fsdp_groups(under: Under) -> Iterator[Any]:
    """Every FSDP parameter group under a module, each once."""
    for state in fsdp_states(under):
        yield from groups_of(state)


def fsdp_contexts(under: Under) -> Iterator[Any]:
    """The contexts that FSDP modules share, of the iteration and of communication. May repeat one."""
    for state in fsdp_states(under):
        yield state._state_ctx
        yield state._comm_ctx


def fsdp_params(under: Under) -> Iterator[tuple[str, Any]]:
    """Every FSDPParam under a module with its fully qualified name."""
    for group in fsdp_groups(under):
        for param in group.fsdp_params:
            info = param._module_info
            yield param._param_fqn or info.param_name, param


def is_ready(group: Any) -> bool:
    """Whether FSDP2 has initialized the communication of a group, which the root's first forward does."""
    return hasattr(group.comm_ctx, "post_forward_order")


def fsdp_registered(under: Under) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every place where FSDP2 registers a parameter: module, name, FSDPParam."""
    for _, param in fsdp_params(under):
        for owner, name in registrations_of(param):
            yield owner, name, param


def registrations_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Every place, as module and name, where an FSDPParam is registered; more than one if it is tied."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def fsdp_objects(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every object that a program may refer to, with a name that is the same in all processes. May repeat one."""
    for i, state in enumerate(fsdp_states(module)):
        yield f"state {i}", state
        yield f"attributes of state {i}", vars(state)
        yield f"context of state {i}", vars(state._state_ctx)
        yield f"communication of state {i}", vars(state._comm_ctx)
        for key in names("FSDPState", Handling.RESTORED):
            yield from _objects_in(f"{key} of state {i}", vars(state).get(key))
        for j, group in enumerate(groups_of(state)):
            yield from _objects_of(group, f"{i}.{j}")


def _objects_of(group: Any, number: str) -> Iterator[tuple[str, Any]]:
    yield f"group {number}", group
    yield f"attributes of group {number}", vars(group)
    yield f"indices of group {number}", group._post_forward_indices
    if is_ready(group):
        yield f"order of group {number}", group.comm_ctx.post_forward_order
    for key in names("FSDPParamGroup", Handling.RESTORED):
        yield from _objects_in(f"{key} of group {number}", vars(group).get(key))
    for k, param in enumerate(group.fsdp_params):
        yield f"parameter {number}.{k}", param
        yield f"attributes of parameter {number}.{k}", vars(param)
        yield f"sharded parameter {number}.{k}", param.sharded_param
        if hasattr(param, "_unsharded_param"):
            yield f"unsharded parameter {number}.{k}", param._unsharded_param


def _objects_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, (*PLAIN, dict, list, set)):
        yield name, value
        if hasattr(value, "mesh"):
            yield f"mesh in {name}", value.mesh


# -- initialization ----------------------------------------------------------------------------------------


class SetUp(NamedTuple):
    """The initialization of an FSDP2 module: whether it is a root, and whether its parameters were ever unsharded."""

    root: bool
    unsharded: bool


def fsdp_set_up(module: nn.Module) -> list[SetUp]:
    """The initialization of the FSDP modules under `module`, in the order of `fsdp_states`."""
    return [SetUp(bool(s._is_root), _was_unsharded(s)) for s in fsdp_states(module)]


def _was_unsharded(state: Any) -> bool:
    params = [param for group in groups_of(state) for param in group.fsdp_params]
    return bool(params) and all(hasattr(param, "_unsharded_param") for param in params)


def set_up_fsdp(module: nn.Module, goal: Sequence[SetUp]) -> None:
    """Initialize FSDP2 as its first forward does: roots, and the storages that parameters are unsharded into.

    goal: the result of `fsdp_set_up` to reach. Unshards one module after the other, so every rank must call it.
    Modules that are initialized already are skipped.
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

_CATEGORIES: Mapping[str, Category] = {
    "_sharded_param_data": Category.SHARDED_PARAMETERS,
    "sharded_param": Category.SHARDED_PARAMETERS,
    "all_gather_outputs": Category.UNSHARDED_PARAMETERS,
    "_unsharded_inner_tensors": Category.UNSHARDED_PARAMETERS,
    "_unsharded_param": Category.UNSHARDED_PARAMETERS,
    "unsharded_accumulated_grad": Category.UNSHARDED_GRADIENTS,
    "_partial_reduce_output": Category.SHARDED_GRADIENTS,
}


_SLOTS = frozenset({*names("FSDPParam", Handling.SLOT), *names("FSDPParamGroup", Handling.SLOT)})


@dataclass(frozen=True, slots=True, eq=False)
class FSDPTensor:
    """The source of a tensor of FSDP2: `attribute` of an FSDPParam or group; element `index` if that is a list."""

    param: Any
    attribute: str
    index: int | None = None

    @property
    def category(self) -> Category:
        """What the tensor is for."""
        return _CATEGORIES.get(self.attribute, Category.UNKNOWN)

    def resolve(self, call: Call) -> Any:
        # A slot has another tensor at every call.
        read = READER if self.attribute in _SLOTS else call.reader
        value = read.attribute(self.param, self.attribute)
        return value if self.index is None else read.item(value, self.index)

    def is_filled(self, call: Call) -> bool:
        """Whether this slot of FSDP2's holds a tensor now."""
        call.reader.place(self, self.param, self.attribute)
        return call.reader.is_there(self.param, self.attribute)

    def assign(self, call: Call, value: Tensor | None) -> None:
        """Assign a tensor or None."""
        setattr(self.param, self.attribute, value)


def fsdp_tensors(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Tensors that FSDP2 holds besides `parameters()`: padded shards, unsharded storages."""
    for fqn, param in fsdp_params(under):
        if isinstance(getattr(param, "_sharded_param_data", None), Tensor):
            yield f"{fqn}.sharded_param_data", FSDPTensor(param, "_sharded_param_data")
        for i in range(len(param.all_gather_outputs)):
            yield f"{fqn}.unsharded_{i}", FSDPTensor(param, "all_gather_outputs", i)
        for i in range(len(getattr(param, "_unsharded_inner_tensors", ()))):
            yield f"{fqn}.unsharded_inner_{i}", FSDPTensor(param, "_unsharded_inner_tensors", i)


def fsdp_parameters(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Each parameter sharded, and unsharded if that tensor exists; only one of the two is registered."""
    for fqn, param in fsdp_params(under):
        yield fqn, FSDPTensor(param, "sharded_param")
        if hasattr(param, "_unsharded_param"):
            yield f"{fqn}.unsharded", FSDPTensor(param, "_unsharded_param")


def fsdp_unsharded(module: nn.Module) -> Iterator[Tensor]:
    """Every tensor on a storage that FSDP2 grows to unshard a parameter and resizes to 0 bytes to reshard it."""
    for _, param in fsdp_params(module):
        yield from param.all_gather_outputs
        yield from getattr(param, "_unsharded_inner_tensors", ())
        if hasattr(param, "_unsharded_param"):
            yield param._unsharded_param


def fsdp_padded(under: Under) -> Iterator[tuple[Tensor, int]]:
    """Tensors that FSDP2 may pad, each with the number of its elements that are not padding."""
    for _, param in fsdp_params(under):
        shard = getattr(param, "_sharded_param_data", None)
        if isinstance(shard, Tensor):
            yield shard, param.sharded_size.numel()
        if len(param.all_gather_outputs) == 1 and hasattr(param, "_unsharded_param"):
            yield param.all_gather_outputs[0], param._orig_size.numel()


def fsdp_slots(under: Under) -> Iterator[tuple[str, FSDPTensor]]:
    """Places other than `.grad` that may hold a gradient between microbatches."""
    for fqn, param in fsdp_params(under):
        for key in _slots_of("FSDPParam", type(param)):
            yield f"{fqn}.{key}", FSDPTensor(param, key)
    for group in fsdp_groups(under):
        name = group._module_fqn or "root"
        for key in _slots_of("FSDPParamGroup", type(group)):
            yield f"{name}.{key.removeprefix('_')}", FSDPTensor(group, key)


def _slots_of(kind: str, cls: type) -> Iterator[str]:
    """The slots of a class, without those that read another slot in the installed torch."""
    for key in names(kind, Handling.SLOT):
        if (kind, key) not in MOVED or is_writable(cls, key):
            yield key


def fsdp_keepalives(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Tensors that FSDP2 holds only until a collective on another stream has read them."""
    for module in modules:
        for state in fsdp_states(module):
            shared = state._comm_ctx
            for each in getattr(shared, "reduce_scatter_states", ()):
                yield each.reduce_scatter_input
            gathered = getattr(shared, "all_gather_state", None)
            if gathered is not None:
                yield gathered.all_gather_result.all_gather_output
            for group in groups_of(state):
                if group._all_reduce_state is not None:
                    yield group._all_reduce_state.all_reduce_input
