"""Guards of a training step on facts beside its inputs: hyperparameters, train/eval, gradients, metadata of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from functionalize._compat.autograd import (
    HOOKS_OF_TENSORS,
    accumulator_hooks,
    hooks_of,
    may_have_accumulator,
)
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Call, Source
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.state.hyperparameters import Key, is_liftable
from functionalize.state.sources import Slot
from functionalize.util.reader import READER, Reader
from functionalize.util.reading import item_of, values_of
from functionalize.util.text import with_article
from functionalize.walk.fact_text import NUMBERS, has_plain_parts
from functionalize.walk.live_places import LIVE_NUMBERS, NO_PLACES, LivePlaces
from functionalize.walk.parts import Held
from functionalize.walk.roots import Roots


@dataclass(frozen=True, slots=True, eq=False)
class ModuleGuard:
    """Every module has the same mode, children, registered names, hooks, and numbers as at the capture."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    facts: tuple[dict[str, Any], ...]
    live: LivePlaces = NO_PLACES
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def of(roots: Roots, live: LivePlaces = NO_PLACES) -> ModuleGuard:
        """The guard for every module under `roots`. live: places of numbers of which only the type is compared."""
        names = tuple(name for name, _ in roots.walk())
        modules = tuple(module for _, module in roots.walk())
        facts = tuple(_facts(module, live) for module in modules)
        return ModuleGuard(modules, names, facts, live)

    def failure(self, call: Call) -> str | None:
        for module, name, was in zip(self.modules, self.names, self.facts, strict=True):
            now = _facts(module, self.live, call.reader)
            if now != was:
                return f"`{name}` has {_changed(now, was)}"
        return None

    def varied(self) -> LivePlaces:
        """The places of numbers that are others than at the capture, of the same types."""
        found = [
            Held(table, key)
            for table, was in zip(map(vars, self.modules), self.facts, strict=True)
            for key, now in _changed_numbers(table, was)
            if type(now) is type(was[key]) in LIVE_NUMBERS
        ]
        return LivePlaces({each.place: each for each in found})

    def changed_modes(self) -> list[tuple[str, dict[str, Any], bool]]:
        """The modules whose mode differs: name, attributes, whether it is in training mode now."""
        found = zip(self.names, map(vars, self.modules), self.facts, strict=True)
        return [
            (name, table, now)
            for name, table, was in found
            if type(now := table.get("training")) is bool and now is not was.get("training")
        ]

    def but_modes(self) -> ModuleGuard:
        """The same guard, of modules in the modes that they are in now."""
        return self.but_numbers(lambda name: name == "training")

    def but_numbers(self, named: Callable[[str], bool] = lambda name: True) -> ModuleGuard:
        """The same guard, of modules with the modes and numbers of such names that they have now."""
        found = zip(self._changed_numbers(), self.facts, strict=True)
        facts = (was | {k: v for k, v in now.items() if named(k)} for (_, now), was in found)
        return replace(self, facts=tuple(facts))

    @contextmanager
    def numbers_on_entry(self) -> Iterator[None]:
        """Inside the `with` the modules have the modes and numbers of the guard, afterwards those of before."""
        changed = [(table, now) for table, now in self._changed_numbers() if now]
        facts = {id(vars(m)): was for m, was in zip(self.modules, self.facts, strict=True)}
        try:
            for table, now in changed:
                table.update((key, facts[id(table)][key]) for key in now)
            yield
        finally:
            for table, now in changed:
                table.update(now)

    def _changed_numbers(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes of each module, and those of its modes and numbers that are others than in the guard."""
        found = zip(map(vars, self.modules), self.facts, strict=True)
        return [(table, dict(_changed_numbers(table, was))) for table, was in found]


def _changed_numbers(table: dict[str, Any], was: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if type(value) in _PLAIN and type(was.get(key, table)) in _PLAIN and value != was[key]:
            yield key, value


def _facts(module: nn.Module, live: LivePlaces, read: Reader = READER) -> dict[str, Any]:
    """The facts about a module that determine its ops: equal dicts mean equal ops."""
    table = read.attribute(module, "__dict__")
    if live.keys_of(table) or any(issubclass(type(value), Tensor) for value in table.values()):
        # These may be others at every call, and the facts the same.
        found: dict[str, Any] = read.result(partial(_facts_in, table, live, READER))
        return found
    return _facts_in(read.table(table), live, read)


def _facts_in(table: dict[str, Any], live: LivePlaces, read: Reader) -> dict[str, Any]:
    found = {key: value for key, value in table.items() if type(value) in _PLAIN}
    for key in live.keys_of(table) & found.keys():
        if type(found[key]) in LIVE_NUMBERS:
            found[key] = type(found[key])
    children = read.table(table.get("_modules", {}))
    found["children"] = [id(child) for child in values_of(children)]
    for key, kind in read.kinds(table.get("_buffers", {})).items():
        if kind is not Tensor:
            found[f"the type of {key}"] = f"{kind.__module__}.{kind.__qualname__}"
    for key, kind in read.kinds(table.get("_parameters", {})).items():
        if kind is type(None):
            found[key] = None
    for key in _REGISTRIES:
        found[key] = read.keys(table.get(key, {}))
    return found


_PLAIN = frozenset(NUMBERS)
_REGISTRIES = (
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _changed(now: dict[str, Any], was: dict[str, Any]) -> str:
    for key in (*was, *now):
        if now.get(key) != was.get(key):
            if key == "children":
                return "other children than it had"
            new, old = (repr(of[key]) if key in of else "no constant" for of in (now, was))
            return f"{key} = {new}, had {old}"
    return "changed"


class LeafFacts(NamedTuple):
    """The facts about a tensor that determine its backward. same: the parameter itself, None for an argument.

    has_history: whether a backward goes on from it into the graph that made it. of_node: the number of hooks on the
    node that accumulates its gradient; None if these are not asked for.
    """

    requires_grad: bool
    has_history: bool
    hooks: tuple[int, int]
    of_node: int | None
    grad_dtype: str
    same: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGuard:
    """Parameters are the same objects; they and tensor arguments have the same autograd properties."""

    sources: tuple[Source, ...]
    names: tuple[str, ...]
    facts: tuple[LeafFacts, ...]
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def of(found: list[tuple[str, Source, Tensor]], asks_nodes: bool = True) -> ParameterGuard:
        """The guard for these tensors as they are. asks_nodes: see `PythonState`."""
        return ParameterGuard(
            tuple(source for _, source, _ in found),
            tuple(name for name, _, _ in found),
            tuple(
                LeafFacts(
                    v.requires_grad,
                    v.grad_fn is not None,
                    hooks_of(v),
                    len(accumulator_hooks(v)) if asks_nodes else None,
                    _grad_dtype(source, v),
                    v if isinstance(v, nn.Parameter) else None,
                )
                for _, source, v in found
            ),
        )

    def parts(self) -> list[ParameterGuard]:
        """A guard for each tensor."""
        found = zip(self.sources, self.names, self.facts, strict=True)
        return [ParameterGuard((source,), (name,), (fact,)) for source, name, fact in found]

    def failure(self, call: Call) -> str | None:
        read = call.reader
        found = zip(self.sources, self.names, self.facts, strict=True)
        for source, name, (was, had_history, hooks, of_node, dtype, same) in found:
            now = read.find(source, call)
            if not isinstance(now, Tensor):
                what = "None" if now is None else with_article(type(now).__name__)
                return f"`{name}` is {what}, was a tensor"
            if same is not None and now is not same:
                return f"`{name}` is another parameter"
            if _hooks(now, read) != hooks:
                return f"`{name}` has other hooks on its gradient"
            if of_node is not None and _hooks_of_node(now, read) != of_node:
                return f"`{name}` has other hooks on the node that accumulates its gradient"
            requires_grad = read.attribute(now, "requires_grad")
            if requires_grad != was:
                return f"`{name}` {'no longer requires' if was else 'now requires'} a gradient"
            if requires_grad and _has_history(now, read) != had_history:
                return f"`{name}` {'was' if had_history else 'is now'} computed from tensors that require a gradient"
            now_dtype = _grad_dtype(source, now, read)
            if now_dtype != dtype:
                return f"`{name}` has the grad_dtype {now_dtype}, had {dtype}"
        return None


def _hooks(tensor: Tensor, read: Reader) -> tuple[int, int]:
    """The numbers of a tensor's hooks. A table of them may be filled in place, also one that is empty now."""
    for name in HOOKS_OF_TENSORS:
        if read.attribute(tensor, name) is not None:
            read.moves()
    return hooks_of(tensor)


def _has_history(tensor: Tensor, read: Reader) -> bool:
    """Whether a backward goes on from a tensor. Each read of a node makes another object."""
    if read.attribute(tensor, "grad_fn") is None:
        return False
    read.moves()
    return True


def _hooks_of_node(leaf: Tensor, read: Reader) -> int:
    """The number of hooks on the node that accumulates the gradient of a leaf: of one that nobody keeps, none."""
    if may_have_accumulator(leaf):
        read.moves()
        return len(accumulator_hooks(leaf))
    if read.attribute(leaf, "requires_grad"):
        read.references(leaf)
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class MetadataGuard:
    """Tensors that are no inputs have the metadata that they had: Python may read `buffer.shape` alone.

    places: of each its name, source and geometry, its device, and whether it requires a gradient.
    """

    places: tuple[tuple[str, Source, Geometry, torch.device, bool], ...]

    @staticmethod
    def of(places: Sequence[tuple[str, Source, Geometry]], call: Call) -> Iterator[MetadataGuard]:
        """The guard, or nothing if there are no places. A place that holds nothing any more is left out."""
        found = []
        for place in places:
            try:
                tensor = place[1].resolve(call)
                found.append((*place, tensor.device, tensor.requires_grad))
            except (LookupError, AttributeError):
                continue
        if found:
            yield MetadataGuard(tuple(found))

    def failure(self, call: Call) -> str | None:
        for name, source, geometry, device, requires_grad in self.places:
            try:
                now = source.resolve(call)
            except (LookupError, AttributeError):
                return f"`{name}` is gone"
            if not isinstance(now, Tensor):
                return f"`{name}` is {with_article(type(now).__name__)}, was a tensor"
            if geometry_of(now) != geometry:
                return f"`{name}` is {geometry_of(now)}, was {geometry}"
            if now.device != device:
                return f"`{name}` is on {now.device}, was on {device}"
            if now.requires_grad != requires_grad:
                return f"`{name}` {'no longer requires' if requires_grad else 'now requires'} a gradient"
        return None


def _grad_dtype(source: Source, value: Tensor, read: Reader = READER) -> str:
    """The dtype of a leaf's gradient, if it is not the leaf's own.

    That of an unsharded parameter changes during a step: `FSDPState` restores it, see `fsdp/python_state.py`.
    """
    if not value.is_leaf:
        read.moves()
        return _OWN
    if getattr(source, "attribute", "") == "_unsharded_param":
        return _OWN
    dtype: torch.dtype | None = read.attribute(value, "grad_dtype")
    return _OWN if dtype is value.dtype else str(dtype)


_OWN = "its own dtype"


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterGuard:
    """Hyperparameters that are no tensors (`betas`, ...) are those of the capture: constants of the program.

    lifted: hyperparameters that are inputs of the program (see hyperparameters.py). Only their type is compared.
    """

    optimizer: torch.optim.Optimizer
    name: str
    facts: tuple[dict[str, Any], ...]
    lifted: frozenset[Key] = frozenset()
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def of(
        name: str, optimizer: torch.optim.Optimizer, lifted: Collection[Key] = ()
    ) -> HyperparameterGuard:
        """The guard for one optimizer."""
        own = frozenset(key for key in lifted if key[0] == name)
        return HyperparameterGuard(optimizer, name, _hyperparameters(optimizer, own), own)

    def changed_keys(self) -> frozenset[Key]:
        """The hyperparameters that differ now and are still numbers, so that they can be lifted."""
        now = _hyperparameters(self.optimizer, self.lifted)
        return frozenset(
            (self.name, i, key)
            for i, (new, old) in enumerate(zip(now, self.facts, strict=False))
            for key in new.keys() & old.keys()
            if new[key] != old[key] and is_liftable(new[key]) and is_liftable(old[key])
            if key != "params"
        )

    def failure(self, call: Call) -> str | None:
        now = _hyperparameters(self.optimizer, self.lifted, call.reader)
        if now == self.facts:
            return None
        if len(now) != len(self.facts):
            return f"`{self.name}` has {len(now)} parameter groups, had {len(self.facts)}"
        for i, (new, old) in enumerate(zip(now, self.facts, strict=True)):
            if new != old and new["params"] != old["params"]:
                return f"`{self.name}` group {i} has other parameters"
            if new != old:
                return f"`{self.name}` group {i} has {_changed(new, old)}"
        return None


def _hyperparameters(
    optimizer: torch.optim.Optimizer, lifted: frozenset[Key], read: Reader = READER
) -> tuple[dict[str, Any], ...]:
    groups = read.elements(read.attribute(optimizer, "param_groups"))
    numbers = {(at, key) for _, at, key in lifted}
    return tuple(
        {key: _hyperparameter(group, key, (at, key) in numbers, read) for key in read.keys(group)}
        for at, group in enumerate(groups)
    )


def _hyperparameter(group: dict[str, Any], key: str, is_lifted: bool, read: Reader) -> Any:
    if key == "params":
        return tuple(map(id, read.elements(read.item(group, key))))
    if is_lifted:
        return read.result(partial(_kind, group, key))
    if _is_tensor(group, key) and read.result(partial(_is_tensor, group, key)):
        return "a tensor"  # which one is no constant of the program
    value = read.item(group, key)
    # A script may change these in place.
    if type(value) is list:
        value = list(read.elements(value))
    elif type(value) is dict:
        value = dict(read.table(value))
    # The walk compares what holds tensors, or is an object.
    return value if has_plain_parts(value) else type(value)


def _kind(group: dict[str, Any], key: str) -> Any:
    """The type of a hyperparameter, or those of its elements."""
    value = item_of(group, key)
    return tuple(map(type, value)) if type(value) is tuple else type(value)


def _is_tensor(group: dict[str, Any], key: str) -> bool:
    return issubclass(type(item_of(group, key)), Tensor)


def check_writable(name: str, slot: Slot, call: Call) -> None:
    """Raise `UncapturableError` unless a slot accepts an assignment of its own value; changes nothing.

    A replay assigns slots after its program has run: a slot that refused the value would leave the step half done.
    """
    try:
        slot.assign(call, slot.resolve(call))
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UncapturableError(
            f"leaves a gradient in `{name}`, which a replay cannot assign ({error}): set it to None in the step"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class SlotGuard:
    """Every slot holds a gradient at the begin of the step if and only if it did at the capture."""

    slots: tuple[Slot, ...]
    names: tuple[str, ...]
    present: tuple[bool, ...]
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def of(call: Call, slots: Sequence[tuple[str, Slot]]) -> SlotGuard:
        """The guard for these places as they are."""
        return SlotGuard(
            tuple(slot for _, slot in slots),
            tuple(name for name, _ in slots),
            tuple(slot.is_filled(call) for _, slot in slots),
        )

    def parts(self) -> list[SlotGuard]:
        """A guard for each slot."""
        found = zip(self.slots, self.names, self.present, strict=True)
        return [SlotGuard((slot,), (name,), (was,)) for slot, name, was in found]

    def failure(self, call: Call) -> str | None:
        for slot, name, was in zip(self.slots, self.names, self.present, strict=True):
            now = slot.is_filled(call)
            if now != was:
                return f"`{name}` {'is there' if now else 'is missing'}, was {'' if was else 'not '}there"
        return None
