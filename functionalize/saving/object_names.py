"""Names for the live objects that programs refer to, by which another process finds its corresponding objects.

    names = Names(walked(step))
    names.of(model[0])        "module model.0"
    names.object("module model.0")
    names.place(held)         ("lr_scale", 0, 1): number 0 of the 1 place that discovery names so
    names.movable(held)       ("self.n", 0, 1): likewise, of the places whose content a replay may move
                              ("self.state", 0, 1, "n"): of a number in a container there
    names.logger("train")     the logger, if the step reaches it

Both processes run the same code (see fingerprint.py), so discovery finds the same objects in the same order. Named are
modules, optimizers, schedulers, FSDP2's state objects, device meshes, and the attribute tables of these and of the
step's other objects.
Invariant: a name leads to an object that the live step reaches, and a movable place is one that its walk finds to be
so: a file cannot make a replay assign elsewhere.
Refusals: `SaveError` for a search whose order differs from process to process (a set of modules); `LoadError`
for a name that has no object here, or another number of places.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from functionalize.errors import LoadError, SaveError
from functionalize.fsdp.objects import fsdp_objects
from functionalize.walk.fact_text import Path, text_of
from functionalize.walk.live_places import Keys, content, elements_in
from functionalize.walk.parts import Held, Is
from functionalize.walk.roots import Roots
from functionalize.walk.walker import PythonState

# (name by discovery, index among the places of this name, their number); of a place inside of what is there, its keys.
Place = tuple[Any, ...]


class Names:
    """The names of all objects that a walk has found, and the objects of names."""

    def __init__(self, state: PythonState) -> None:
        self.state, self.roots = state, state.roots
        self._objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        for name, value in (*_named(self.roots), *_schedulers(state)):
            unique = self._unique(name)
            self._objects[unique] = value
            self._names.setdefault(id(value), unique)
        self._places = _Places((name, held) for name, held, _ in self.roots.tensors)
        self._movable = _Places((text_of(p), held) for p, held in state.movable if _is_text(p))
        self._lists = {id(each): held for _, held, each in state.lists}
        self._loggers = {f[1] for f in state.facts if type(f) is tuple and f[:1] == ("logger",)}

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
        return self._places.name_of(held)

    def held(self, name: str, index: int, count: int) -> Held:
        """The place of that name; raises `LoadError`."""
        return self._places.held(name, index, count)

    def movable(self, held: Held) -> Place | None:
        """The name of a place whose content a replay moves, None if discovery does not find it."""
        keys: Keys = ()
        while isinstance(held.container, Held):
            keys, held = (held.key, *keys), held.container
        found = self._movable.name_of(held)
        return None if found is None else (*found, *keys)

    def movable_of_list(self, found: list[Any]) -> Place | None:
        """The name of the place of a list to which a replay appends."""
        held = self._lists.get(id(found))
        return None if held is None else self._movable.name_of(held)

    def moved(self, name: str, index: int, count: int, *keys: Any) -> Held:
        """The place of such a name; raises `LoadError`."""
        held = self._movable.held(name, index, count)
        for key in keys:
            found = elements_in(content(held)) or ()
            if type(key) not in (str, int) or key not in [each for each, _ in found]:
                raise LoadError(
                    f"needs {key!r} in what the step calls `{name}`, which is not there"
                )
            held = Held(held, key)
        return held

    def logger(self, name: str) -> logging.Logger:
        """A logger that the step reaches; raises `LoadError`."""
        found = (
            logging.root if name == logging.root.name else logging.root.manager.loggerDict.get(name)
        )
        if name not in self._loggers or not isinstance(found, logging.Logger):
            raise LoadError(f"logs by `{name}`, a logger that the step does not reach")
        return found

    def reaches_logger(self, name: str) -> bool:
        """Whether the step reaches a logger of this name."""
        return name in self._loggers


class _Places:
    """Places by name: of several with one name each has a number."""

    def __init__(self, named: Iterable[tuple[str, Held]]) -> None:
        self._of_name: dict[str, list[Held]] = {}
        self._known: dict[Any, tuple[str, int]] = {}
        for name, held in named:
            places = self._of_name.setdefault(name, [])
            if held.place not in self._known:
                self._known[held.place] = name, len(places)
                places.append(held)

    def name_of(self, held: Held) -> Place | None:
        known = self._known.get(held.place)
        return None if known is None else (*known, len(self._of_name[known[0]]))

    def held(self, name: str, index: int, count: int) -> Held:
        places = self._of_name.get(name, [])
        if len(places) != count or not 0 <= index < count:
            there = f"are {len(places)}" if places else "is none"
            raise LoadError(f"needs {count} of what the step calls `{name}`, there {there}")
        return places[index]


def _is_text(path: Path) -> bool:
    """Whether a path consists of names and positions, which are the same in another process."""
    while path:
        path, name = path
        if type(name) not in (str, int):
            return False
    return True


def _schedulers(state: PythonState) -> Iterator[tuple[str, Any]]:
    """The schedulers that the step reaches."""
    for path, fact in zip(state.paths, state.facts, strict=True):
        if type(fact) is Is and isinstance(fact.value, LRScheduler) and _is_text(path):
            yield f"scheduler {text_of(path)}", fact.value


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
