"""Names for the live objects that programs refer to, by which another process finds its corresponding objects.

    names = Names(walked(step).roots)
    names.of(model[0])        "module model.0"
    names.object("module model.0")
    names.place(held)         ("lr_scale", 0, 1): number 0 of the 1 place that discovery names so

Both processes run the same code (see fingerprint.py), so discovery finds the same objects in the same order. Named are
modules, optimizers, FSDP2's state objects, device meshes, and the attribute tables of these and of the step's other
objects.
Refusals: `SaveError` for a search whose order differs from process to process (a set of modules); `LoadError`
for a name that has no object here, or another number of places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from functionalize.errors import LoadError, SaveError
from functionalize.fsdp.objects import fsdp_objects
from functionalize.walk.parts import Held
from functionalize.walk.roots import Roots

Place = tuple[
    str, int, int
]  # (name by discovery, index among the places of this name, their number)


class Names:
    """The names of all objects reachable from `roots`, and the objects of names."""

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self._objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        for name, value in _named(roots):
            unique = self._unique(name)
            self._objects[unique] = value
            self._names.setdefault(id(value), unique)
        self._places: dict[str, list[Held]] = {}
        self._known: dict[Any, Place] = {}
        for name, held, _ in roots.tensors:
            places = self._places.setdefault(name, [])
            if held.place not in self._known:
                self._known[held.place] = (name, len(places), 0)
                places.append(held)

    def _unique(self, name: str) -> str:
        count, unique = 1, name
        while unique in self._objects:
            count, unique = count + 1, f"{name} ({count + 1})"
        return unique

    def of(self, value: Any) -> str | None:
        """The name of an object, None if it has none."""
        return self._names.get(id(value))

    def object(self, name: str) -> Any:
        """The object of that name; raises `LoadError`."""
        try:
            return self._objects[name]
        except KeyError:
            raise LoadError(f"needs the {name}, which is not there") from None

    def objects(self) -> Iterator[Any]:
        """Every object that has a name, the containers that the step reaches, and its tensors."""
        yield from self._objects.values()
        yield from (container for _, container in self.roots.containers)
        yield from (tensor for _, _, tensor in self.roots.tensors)

    def meshes(self) -> Iterator[tuple[str, Any]]:
        """Every device mesh that has a name."""
        for name, value in self._objects.items():
            if hasattr(value, "get_group") and hasattr(value, "get_coordinate"):
                yield name, value

    def place(self, held: Held) -> Place | None:
        """The name of a place, None if discovery does not find it."""
        known = self._known.get(held.place)
        return None if known is None else (known[0], known[1], len(self._places[known[0]]))

    def held(self, name: str, index: int, count: int) -> Held:
        """The place of that name; raises `LoadError`."""
        places = self._places.get(name, [])
        if len(places) != count:
            there = f"are {len(places)}" if places else "is none"
            raise LoadError(f"needs {count} of what the step calls `{name}`, there {there}")
        return places[index]


def check_order(roots: Roots) -> None:
    """Raises `SaveError` if a module, optimizer or tensor is in a set: its order differs between processes."""
    for name, container in roots.containers:
        if isinstance(container, set) and len(container) > 1:
            kinds = (nn.Module, torch.optim.Optimizer, Tensor)
            if any(isinstance(each, kinds) for each in container):
                raise SaveError(
                    f"uses the set `{name}`, whose order is another one in every process: make it a list"
                )


def _named(roots: Roots) -> Iterator[tuple[str, Any]]:
    for name, module in roots.walk():
        yield f"module {name}", module
        yield f"attributes of module {name}", vars(module)
        yield f"parameters of module {name}", module._parameters
    for name, optimizer in roots.optimizers.items():
        yield f"optimizer {name}", optimizer
    for name, root in roots.modules.items():
        for what, value in fsdp_objects(root):
            yield f"FSDP {what} in {name}", value
    for name, module in roots.walk():
        for key, parameter in module._parameters.items():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                yield f"mesh of {name}.{key}", mesh
    total = Counter(name for name, _ in roots.objects)
    for name, table in roots.objects:
        yield f"attributes of {name}, one of {total[name]}", table
