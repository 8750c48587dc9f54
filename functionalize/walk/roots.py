"""The objects from which a replay reads its inputs: modules, optimizers, and tensors in other places."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.graphs import pytree
from functionalize.fsdp.objects import fsdp_states, fsdp_unsharded
from functionalize.util.reading import is_a, values_of
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.util.text import with_article
from functionalize.walk.fact_text import CARRIED, Path, text_of
from functionalize.walk.parts import Held, Visit


def _is_element(place: Held) -> bool:
    """Whether a place is one in a tuple."""
    return is_a(place.container, Held)


@dataclass(slots=True)
class Roots:
    """The objects that a step can reach.

    modules, optimizers: by a name that is unique. modules holds root modules only.
    tensors: name, place and tensor, of those at a place that is no module's table.
    paths: of the places of these, see `text_at`.
    objects: name and `__dict__` of every other object.
    containers: name and object of every container.
    tables: by id of the `__dict__` of an object that determines ops: this, the classes of the objects that have it, and
    the path of the first of them.
    functions: the user's functions.
    arguments: a name per leaf of the step's arguments.
    named_modules: for each root module, every module under it with its full name.
    found_elsewhere: ids of containers whose tensors are not found through the module that holds them: of lists that
    are no state of the step, since its code only appends to them, and of those in which the step moves elements.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    tensors: list[tuple[str, Held, Tensor]] = field(default_factory=list)
    paths: dict[tuple[Any, Any], Path] = field(default_factory=dict)
    objects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    tables: dict[int, tuple[dict[str, Any], set[type], Path]] = field(default_factory=dict)
    functions: list[types.FunctionType] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    named_modules: dict[str, list[tuple[str, nn.Module]]] = field(default_factory=dict)
    found_elsewhere: frozenset[int] = frozenset()
    _walked: list[tuple[str, nn.Module]] | None = None
    _states: dict[str, list[Any]] | None = None

    def add_object(self, visit: Visit, table: dict[str, Any]) -> None:
        """An object with these attributes."""
        kind = type(visit.value)
        self.objects.append((visit.name or kind.__name__, table))
        if visit.is_fact or id(table) in self.tables:
            self.tables.setdefault(id(table), (table, set(), visit.path))[1].add(kind)

    def text_at(self, source: Any, name: str) -> str:
        """How code may write a place that has a name, which is that of an input: `T.reg` for `reg`."""
        path = self.paths.get(source.place) if is_a(source, Held) else None
        if not path:
            return name
        holder, key = path
        fields = (
            getattr(type(source.container.resolve()), "_fields", ()) if _is_element(source) else ()
        )
        return text_of((holder, fields[key] if key in range(len(fields)) else key))

    def walk(self) -> list[tuple[str, nn.Module]]:
        """Every module under the roots with its full name; computed once."""
        if self._walked is None:
            self._walked = [pair for name in self.modules for pair in self.named_modules[name]]
        return self._walked

    def keep_outermost(self) -> None:
        """Remove the root modules that are inside other ones."""
        inner = {id(module) for pairs in self.named_modules.values() for _, module in pairs[1:]}
        self.modules = {name: m for name, m in self.modules.items() if id(m) not in inner}

    def made_once(self) -> Iterator[Tensor]:
        """The tensors that first steps make for all later ones: optimizer state, and what FSDP2 gathers into."""
        for optimizer in self.optimizers.values():
            for leaf in pytree.tree_leaves(list(values_of(optimizer.state))):
                yield from plain_tensors(leaf)
        for module in self.modules.values():
            yield from fsdp_unsharded(module)

    def states(self) -> dict[str, list[Any]]:
        """FSDP2's states under every root module, by the root's name; computed once."""
        if self._states is None:
            self._states = {name: list(fsdp_states(root)) for name, root in self.modules.items()}
        return self._states


@dataclass(frozen=True, slots=True, eq=False)
class Identity:
    """The fact that an object is this very one."""

    value: weakref.ref[Any]
    kind: type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value() is self.value() is not None

    @property
    def advice(self) -> str:
        """What to do where a step puts another one there."""
        return CARRIED if issubclass(self.kind, Tensor) else ""

    def __repr__(self) -> str:
        return "a tensor" if issubclass(self.kind, Tensor) else with_article(self.kind.__name__)


@dataclass(frozen=True, slots=True)
class InPlace:
    """The fact that a tensor, or what a live place holds, is of this type and an entry of this very container.

    home: the id of the container. A program whose input is at the place keeps the container alive. A container that
    takes the place of another one is a change, whatever it holds, because the source would read the old one.
    """

    kind: type
    home: int

    @property
    def advice(self) -> str:
        """What to do where a step puts another one there."""
        return CARRIED if issubclass(self.kind, Tensor) else ""

    def __repr__(self) -> str:
        return "a tensor" if issubclass(self.kind, Tensor) else with_article(self.kind.__name__)


def free_name(name: str, taken: dict[str, Any]) -> str:
    """A name that no root has."""
    return name if name not in taken else free_name(f"{name}_", taken)
