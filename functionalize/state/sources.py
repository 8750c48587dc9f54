"""Sources: the places of a step's tensors. A source reads the tensor at a place at every call.

    candidates(roots, leaves)     ->  every (name, source, tensor)
    slots(roots, leaves)          ->  every place that may hold a gradient after the step: (name, slot)

A source is resolved at every call, so a replay uses a replaced parameter or a loaded optimizer state. A slot is a
source that a replay may assign to, and that may hold None.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from functionalize._compat.references import address
from functionalize.cost.categories import Category, category_of
from functionalize.fsdp.objects import fsdp_parameters, fsdp_slots, fsdp_tensors
from functionalize.fsdp.python_state import FSDPEffects
from functionalize.ir.inputs import Argument, Call, Source
from functionalize.util.reading import elements_of, entry_of, is_a, item_of, items_of
from functionalize.util.tensor_wrappers import is_no_wrapper, local_tensor, plain_tensors_by_path
from functionalize.walk.fact_text import NUMBERS
from functionalize.walk.parts import Held
from functionalize.walk.roots import Roots


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensor:
    """A parameter or buffer: entry `name` of `module._parameters` or `_buffers`."""

    module: nn.Module
    table: str
    name: str

    @property
    def category(self) -> Category:
        """What the tensor is for."""
        return Category.SHARDED_PARAMETERS if self.table == "_parameters" else Category.BUFFERS

    @property
    def entries(self) -> dict[str, Tensor | None]:
        """The table of the module that holds it."""
        table: dict[str, Tensor | None] = getattr(self.module, self.table)
        return table

    def resolve(self, call: Call) -> Any:
        return call.reader.item(call.reader.attribute(self.module, self.table), self.name)


class Slot(Protocol):
    """A place that holds a tensor or None, and that a step may assign to."""

    def resolve(self, call: Call) -> Any:
        """The tensor that it holds now, or None."""
        ...

    def assign(self, call: Call, value: Tensor | None) -> None:
        """Assign a tensor or None."""
        ...

    def is_filled(self, call: Call) -> bool:
        """Whether it holds a tensor now."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """`.grad` of another source."""

    of: Source

    @property
    def category(self) -> Category:
        """What the tensor is for."""
        unsharded = category_of(self.of) is Category.UNSHARDED_PARAMETERS
        return Category.UNSHARDED_GRADIENTS if unsharded else Category.SHARDED_GRADIENTS

    def resolve(self, call: Call) -> Any:
        owner = self.of.resolve(call)
        # An argument that was a leaf may be computed at another call; then it has no gradient, and torch would warn.
        return owner.grad if owner.grad_fn is None or owner.retains_grad else None

    def assign(self, call: Call, value: Tensor | None) -> None:
        """Assign a tensor or None."""
        self.of.resolve(call).grad = value

    def is_filled(self, call: Call) -> bool:
        """Whether there is a gradient now."""
        read = call.reader
        owner = read.find(self.of, call)
        if owner.grad_fn is not None and not owner.retains_grad:
            read.moves()
            return False
        read.place(self, owner, "grad")
        return read.is_there(owner, "grad")


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """`optimizer.state[p][key]` for parameter `index` of group `group`."""

    optimizer: torch.optim.Optimizer
    group: int
    index: int
    key: str
    category: ClassVar[Category] = Category.OPTIMIZER_STATE

    def resolve(self, call: Call) -> Any:
        param = _parameter(self.optimizer, self.group, self.index, call)
        return call.reader.state(self.optimizer, param, self.key)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerParameter:
    """Parameter `index` of an optimizer's group `group`. No module needs to hold it."""

    optimizer: torch.optim.Optimizer
    group: int
    index: int
    category: ClassVar[Category] = Category.SHARDED_PARAMETERS

    def resolve(self, call: Call) -> Any:
        return _parameter(self.optimizer, self.group, self.index, call)


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensor:
    """A hyperparameter that is a tensor, such as `lr`."""

    optimizer: torch.optim.Optimizer
    group: int
    key: str
    category: ClassVar[Category] = Category.OPTIMIZER_STATE

    def resolve(self, call: Call) -> Any:
        return item_of(item_of(self.optimizer.param_groups, self.group), self.key)


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """A tensor inside a wrapper subclass (`DTensor._local_tensor`)."""

    of: Source
    attribute: str
    is_inner: ClassVar[bool] = True

    @property
    def category(self) -> Category:
        """What the tensor is for."""
        return category_of(self.of)

    def resolve(self, call: Call) -> Any:
        return call.reader.attribute(*self.home(call))

    def home(self, call: Call) -> tuple[Any, str]:
        """The tensor around it, and the attribute."""
        return call.reader.find(self.of, call), self.attribute


def _parameter(optimizer: torch.optim.Optimizer, group: int, index: int, call: Call) -> Any:
    read = call.reader
    found = read.item(read.attribute(optimizer, "param_groups"), group)
    return read.element(read.item(found, "params"), index)


def unwrapped(name: str, source: Source, value: Any) -> Iterator[tuple[str, Source, Tensor]]:
    """`value` itself, or the plain tensors inside it, each with its source."""
    local = local_tensor(value)
    if local is not None:
        yield name, Inner(source, "_local_tensor"), local
        return
    for path, tensor in plain_tensors_by_path(value):
        short = ".".join([name, *(part for part in path if part != "_local_tensor")])
        yield short, reduce(Inner, path, source), tensor


def module_tensors(roots: Roots) -> Iterator[tuple[str, ModuleTensor, Tensor]]:
    """Every parameter and buffer, once per place where it is registered."""
    for name, module in roots.walk():
        for table in ("_parameters", "_buffers"):
            for key, value in items_of(getattr(module, table)):
                if value is not None:
                    yield f"{name}.{key}", ModuleTensor(module, table, key), value


_NO_TENSORS = frozenset({*NUMBERS, dict, OrderedDict, set})  # types of most attributes of modules


def plain_attributes(roots: Roots, but: Collection[int] = ()) -> Iterator[tuple[str, Held, Tensor]]:
    """Tensors that a module keeps as plain attributes. but: ids of containers that are left out."""
    for name, module in roots.walk():
        for key, value in vars(module).items():
            if type(value) in _NO_TENSORS:  # nearly all
                continue
            kind = type(value)  # `isinstance` asks the object
            if issubclass(kind, Tensor):
                yield f"{name}.{key}", Held(vars(module), key), value
            elif issubclass(kind, (list, tuple, deque)) and id(value) not in but:
                place = Held(vars(module), key)
                for i, each in enumerate(elements_of(value)):
                    if issubclass(type(each), Tensor):
                        yield f"{name}.{key}_{i}", Held(place, i), each


def optimizer_tensors(
    name: str, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Source, Any]]:
    """The tensors in the groups and in the state of an optimizer."""
    for g, group in enumerate(elements_of(optimizer.param_groups)):
        for key, value in items_of(group):
            if issubclass(type(value), Tensor):
                yield f"{name}.{key}_{g}", GroupTensor(optimizer, g, key), value
        for i, param in enumerate(elements_of(item_of(group, "params"))):
            for key, value in items_of(entry_of(optimizer.state, param) or {}):
                if issubclass(type(value), Tensor):
                    yield f"{name}.{g}.{i}.{key}", OptimizerState(optimizer, g, i, key), value
    for table in (optimizer.state, optimizer.defaults):
        for key, value in items_of(table):
            if type(key) is str and issubclass(type(value), Tensor):
                yield f"{name}.{key}", Held(table, key), value


def parameters(roots: Roots, leaves: Sequence[Any]) -> Iterator[tuple[str, Source, Tensor]]:
    """Every leaf tensor of autograd whose `.grad` a step may assign, each once."""
    seen: set[int] = set()
    found: list[tuple[str, Source, Any]] = []
    for (
        name,
        states,
    ) in (
        roots.states().items()
    ):  # first: module tables hold either the sharded or the unsharded one
        managed = fsdp_parameters(states)
        found += [(f"{name}.{n}", source, source.resolve(_NO_CALL)) for n, source in managed]
    found += module_tensors(roots)
    for name, optimizer in roots.optimizers.items():
        found += _optimizer_parameters(name, optimizer)
    arguments = zip(roots.arguments, leaves, strict=True)
    found += [(name, Argument(i), leaf) for i, (name, leaf) in enumerate(arguments)]
    found += roots.tensors
    for name, source, value in found:
        if not is_a(value, Tensor) or (at := address(value)) in seen:
            continue
        if may_have_grad(value):
            seen.add(at)
            yield name, source, value


_NO_CALL = Call((), [])


def first_unmade(roots: Roots, leaves: Sequence[Any]) -> str | None:
    """The name of a parameter or buffer that the next forward makes (`nn.LazyLinear`); None: there is none.

    It has no storage, no sizes, and until then a class that ops cannot take.
    """
    arguments = zip(roots.arguments, leaves, strict=True)
    found: Iterator[tuple[str, Any]] = chain(
        ((name, value) for name, _, value in module_tensors(roots)),
        (
            (name, value)
            for owner, optimizer in roots.optimizers.items()
            for name, _, value in _optimizer_parameters(owner, optimizer)
        ),
        ((name, value) for name, _, value in roots.tensors),
        arguments,
    )
    return next((name for name, value in found if is_lazy(value)), None)


def slots(roots: Roots, found: Sequence[tuple[str, Source, Tensor]]) -> Iterator[tuple[str, Slot]]:
    """Every place that may hold a gradient: `.grad` of the tensors from `parameters`, and FSDP2's own slots."""
    for name, source, _ in found:
        yield f"{name}.grad", Gradient(source)
    for root_name, states in roots.states().items():
        for name, slot in fsdp_slots(states):
            yield f"{root_name}.{name}", slot


def changed_slots(
    slots: Sequence[tuple[str, Slot]],
    before: Sequence[weakref.ref[Tensor] | None],
    call: Call,
    replaced: Mapping[Any, weakref.ref[Tensor]] = MappingProxyType({}),
) -> Iterator[tuple[int, Tensor | None]]:
    """The slots that a step has assigned: the index of each, and its gradient now.

    before: a weak reference to the gradient in each slot when the step began; None: an empty slot. replaced: by their
    places, the tensors in whose place the step has put others: a slot is that of the tensor that was there.
    """
    for at, ((_, slot), was) in enumerate(zip(slots, before, strict=True)):
        held = slot.of if isinstance(slot, Gradient) and isinstance(slot.of, Held) else None
        if held is not None and held.place in replaced:
            owner = replaced[held.place]()
            if owner is None:
                continue
            now = owner.grad
        else:
            now = slot.resolve(call)
        same = now is None if was is None else now is not None and now is was()
        if not same:
            yield at, now


def leave(
    call: Call,
    slots: Sequence[Slot],
    gradients: Sequence[Tensor | None],
    effects: FSDPEffects,
) -> None:
    """Apply a replay's effects that the epilogue does not: FSDP2's Python state, and gradients in their slots.

    Autograd requires that a leaf's `.grad` has its `grad_dtype`, at an assignment of either one. So if the step changes
    `grad_dtype`, the slots are emptied first.
    """
    if effects.changes_grad_dtype:
        for slot in slots:
            slot.assign(call, None)
    effects.apply()
    if effects.assigned:  # the slots may be found elsewhere now
        call.owners = None
    assign(call, slots, gradients)


def assign(call: Call, slots: Sequence[Slot], values: Sequence[Tensor | None]) -> None:
    """Assign to each slot its value."""
    if call.owners is None or not call.owners.assign(slots, values):
        for slot, value in zip(slots, values, strict=True):
            slot.assign(call, value)


def may_have_grad(value: Tensor) -> bool:
    """Whether a step may assign the `.grad` of a tensor."""
    return value.is_leaf and (value.requires_grad or isinstance(value, nn.Parameter))


def _optimizer_parameters(
    name: str, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Source, Tensor]]:
    for g, group in enumerate(elements_of(optimizer.param_groups)):
        for i, param in enumerate(elements_of(item_of(group, "params"))):
            yield f"{name}.{g}.{i}", OptimizerParameter(optimizer, g, i), param


def candidates(
    roots: Roots, leaves: Sequence[Any], places: Sequence[tuple[str, Slot]]
) -> Iterator[tuple[str, Source, Tensor]]:
    """Every place that an input may be read from, in order of preference. places: the slots from `slots`."""
    for name, source, value in _places(roots, Call(leaves, []), places):
        if is_no_wrapper(value):  # nearly all of hundreds: no generator is made for each
            yield name, source, value
        else:
            yield from unwrapped(name, source, value)


def made_outside(roots: Roots, leaves: Sequence[Any]) -> dict[Any, str]:
    """The names of tensors that have an autograd history before the step begins, by the node that made each."""
    return {
        value.grad_fn: roots.text_at(source, name)
        for name, source, value in _places(roots, Call(leaves, []), ())
        if is_a(value, Tensor) and value.grad_fn is not None
    }


def _places(
    roots: Roots, call: Call, places: Sequence[tuple[str, Slot]]
) -> Iterator[tuple[str, Source, Any]]:
    """The same before wrapper subclasses are opened; a slot may hold None, an argument anything."""
    for i, (name, leaf) in enumerate(zip(roots.arguments, call.leaves, strict=True)):
        yield name, Argument(i), leaf
    yield from module_tensors(roots)
    for name, slot in places:
        yield name, slot, slot.resolve(call)
    for name, optimizer in roots.optimizers.items():
        yield from optimizer_tensors(name, optimizer)
    for root_name, states in roots.states().items():
        for name, kept in fsdp_tensors(states):
            yield f"{root_name}.{name}", kept, kept.resolve(call)
        for name, managed in fsdp_parameters(states):
            yield f"{root_name}.{name}", managed, managed.resolve(call)
    for name, optimizer in roots.optimizers.items():
        yield from _optimizer_parameters(name, optimizer)
    yield from plain_attributes(roots, roots.found_elsewhere)
    yield from roots.tensors
