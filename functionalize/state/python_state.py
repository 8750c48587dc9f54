"""A guard on Python state that determines the ops of a step: functions, containers, classes, configurations.

    guard = SurroundingsGuard.of(fn, roots)
    criterion = nn.functional.l1_loss            `criterion` is the code of l1_loss, was the code of mse_loss
    self.weights["aux"] = 0.1                    `self.weights.aux` is 0.1, was 0.5
    model.config.scale = 2.0                     `model.config.scale` is 2.0, was 1.0
    block.forward = other                        `model.block.forward` is there, was not

One walk, from the callable and from every module and optimizer, returns a flat list of facts in a fixed order; the
guard repeats the walk at every call and compares. It covers code, defaults, closures and named globals of the user's
functions; the attributes of the user's objects and classes whose names occur in code of the step; every element of
containers and of configurations (a mapping, a `...Config`). For other objects of installed packages only the type is a
fact: they contain counters and caches. Tensors, modules and numbers of parameter groups have guards of their own.

Invariant: facts are compared by value: a new list, lambda or bound method that equals the old one is no change.
Refusals: none. A value that differs at every call makes the guard fail at every call, which `Programs` reports.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import numbers
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from functionalize.ir.inputs import Call
from functionalize.state.discovery import NUMBERS, Roots, globals_of, is_installed, is_standard
from functionalize.state.fact_text import PLAIN, Path, brief, portable, text_of
from functionalize.state.module_calls import without_watching

_MAX_SEPARATE_FACTS = 64  # a container of plain values with more elements is one fact
_MAX_ELEMENTS = (
    10_000  # of a container with other elements, only the length is a fact if it is longer
)
_MAX_ARRAY = 1 << 16  # bytes; a larger array is compared by identity
_BY_EQUALITY = PLAIN - {
    bool,
    float,
    complex,
    torch.Size,
    range,
}  # equal implies the same value
_METHODS = frozenset({"forward", "__call__", "__getattr__", "__iter__", "__getitem__", "__len__"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
_FSDP_ATTRIBUTE = (
    "__composable_api_"  # FSDP2's state; the attribute's name differs between processes
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class SurroundingsGuard:
    """The Python state around a step equals that at the capture.

    facts, paths: the facts of the walk, and the path of each.
    known: ids of the objects that the walk visited.
    stale: text about a difference that was found when the program was loaded, or None.
    states: the number of entries in each optimizer's state, per parameter. Their values are inputs of the program.
    """

    fn: Callable[..., Any]
    roots: Roots
    facts: list[Any]
    paths: list[Path]
    known: frozenset[int] = frozenset()
    stale: str | None = None
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @staticmethod
    def of(fn: Callable[..., Any], roots: Roots) -> SurroundingsGuard:
        """The guard for the Python state around `fn` as it is now."""
        walk = _walked(fn, roots)
        return SurroundingsGuard(
            fn, roots, walk.facts, walk.paths, frozenset(walk.seen), None, _states(roots)
        )

    def failure(self, call: Call) -> str | None:
        if self.stale is not None:
            return self.stale
        now = _walked(self.fn, self.roots)
        if now.facts == self.facts:
            return None
        for new, old, path, was_path in zip(now.facts, self.facts, now.paths, self.paths):  # noqa: B905
            if path != was_path:
                return f"`{text_of(path)}` is there, was not (`{text_of(was_path)}` was)"
            if new != old:
                return f"`{text_of(path)}` is {brief(new)}, was {brief(old)}"
        longer, what = (now, "new") if len(now.facts) > len(self.facts) else (self, "gone")
        return f"`{text_of(longer.paths[min(len(now.facts), len(self.facts))])}` is {what}"

    def difference(self, call: Call) -> str | None:
        """A change made by the step itself, also to the entries of an optimizer's state; None without one."""
        for (name, was), (_, now) in zip(self.states, _states(self.roots), strict=True):
            if was != now:
                counts = (
                    f"{sum(now)} entries for {len(now)} parameters, was {sum(was)} for {len(was)}"
                )
                return f"`{name}.state` has {counts}"
        return self.failure(call)

    def portable(self) -> list[list[str]]:
        """Pairs of path and fact, as texts that are comparable between processes."""
        return [[text_of(p), portable(f)] for p, f in zip(self.paths, self.facts, strict=True)]

    @staticmethod
    def loaded(fn: Callable[..., Any], roots: Roots, saved: list[list[str]]) -> SurroundingsGuard:
        """The guard for saved facts: it fails if a fact differs in this process."""
        here = SurroundingsGuard.of(fn, roots)
        found: dict[str, list[str]] = {}
        for path, fact in here.portable():
            found.setdefault(path, []).append(fact)
        for path, fact in saved:  # a path through an argument is not found here, and is skipped
            if path in found and fact not in found[path]:
                stale = f"`{path}` is not what it was when the program was saved"
                return SurroundingsGuard(fn, roots, here.facts, here.paths, stale=stale)
        return here


def _states(roots: Roots) -> tuple[tuple[str, tuple[int, ...]], ...]:
    optimizers = roots.optimizers.items()
    return tuple((name, tuple(map(len, o.state.values()))) for name, o in optimizers)


def _walked(fn: Callable[..., Any], roots: Roots) -> _Walk:
    walk = _Walk(roots.named)
    walk.visit((), fn)
    for name, module in roots.walk():
        walk.module(((), name), module)
    for name, optimizer in roots.optimizers.items():
        walk.optimizer(((), name), optimizer)
    return walk


@dataclass(frozen=True, slots=True, eq=False)
class _TensorIdentity:
    tensor: weakref.ref[Tensor]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorIdentity) and other.tensor() is self.tensor() is not None

    def __repr__(self) -> str:
        return "a tensor"


class _Walk:
    """One walk over the Python state. named: names of attributes that occur in code of the step."""

    def __init__(self, named: Collection[Any]) -> None:
        self.facts: list[Any] = []
        self.paths: list[Path] = []
        self._named = named
        self.seen: dict[int, Path] = {}  # id -> the path of the first visit
        self._kinds: set[type] = set()
        self._loosely = (
            False  # whether tensors are compared by identity, since no source finds them
        )
        self._alive: list[Any] = []  # keeps objects alive, so that their ids are not reused

    def note(self, path: Path, fact: Any) -> None:
        self.facts.append(fact)
        self.paths.append(path)

    def visit(self, path: Path, value: Any) -> None:
        """Add facts about a value and about the objects that it holds."""
        kind = type(value)
        if kind in _BY_EQUALITY:
            return self.note(path, value)
        if kind in PLAIN:  # -0.0 is not 0.0, True is not 1
            return self.note(path, (kind, repr(value)))
        if id(value) in self.seen:
            return self.note(path, ("again", self.seen[id(value)]))
        self.seen[id(value)] = path
        self._alive.append(value)
        if isinstance(value, Tensor) and self._loosely:
            return self.note(path, _TensorIdentity(weakref.ref(value)))
        if isinstance(value, (Tensor, nn.Module, torch.optim.Optimizer)):
            return self.note(path, ("kind", kind))
        if isinstance(value, types.FunctionType):
            return self._function(path, value)
        if isinstance(value, types.MethodType):
            self.visit(path, value.__func__)
            return self.visit((path, "self"), value.__self__)
        if isinstance(value, functools.partial):
            self.note(path, "partial")
            self.visit((path, "func"), value.func)
            self._loose((path, "args"), value.args)
            return self.visit((path, "keywords"), value.keywords)
        if isinstance(value, type):
            self.note(path, value)
            return self._class(path, value)
        return self._object(path, value, kind)

    def _object(self, path: Path, value: Any, kind: type) -> None:
        if isinstance(value, (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)):
            return self._container(path, value, kind)
        if isinstance(value, types.BuiltinFunctionType):
            owner = getattr(value, "__self__", None)
            free = owner is None or isinstance(owner, types.ModuleType)
            return self.note(path, value if free else value.__name__)
        if isinstance(value, enum.Enum):
            return self.note(path, (kind, value.name))
        if isinstance(value, (numbers.Number, slice)):
            return self.note(path, (kind, repr(value)))
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            data = value.tobytes() if value.nbytes <= _MAX_ARRAY else id(value)
            return self.note(path, (kind, str(value.dtype), value.shape, data))
        self.note(path, ("kind", kind))
        if isinstance(value, types.ModuleType):
            if _is_users(value.__name__):
                self._named_in(path, vars(value))
            return None
        if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
            return self._named_in(path, vars(value))
        if isinstance(value, (staticmethod, classmethod, property, functools.cached_property)):
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None)
            return self.visit(path, inner or getattr(value, "func", None))
        if _is_users(kind.__module__):
            self._named_in(path, getattr(value, "__dict__", {}))
            slots = [n for n in getattr(kind, "__slots__", ()) if n in self._named]
            self._named_in(path, {n: getattr(value, n) for n in slots if hasattr(value, n)})
            return self._class(path, kind)
        if _is_configuration(kind) and hasattr(value, "__dict__"):
            return self._entries(path, vars(value))
        wrapped = getattr(kind, "__wrapped__", None) or _wrapped(value)
        return None if wrapped is None else self.visit((path, "__wrapped__"), wrapped)

    def _named_in(self, path: Path, table: Mapping[str, Any]) -> None:
        for key in list(table):
            if key in self._named:
                self.visit((path, key), table[key])

    def _entries(self, path: Path, table: Mapping[Any, Any]) -> None:
        for key, value in list(table.items()):
            self.visit((path, key if type(key) in PLAIN else type(key).__name__), value)

    def _container(self, path: Path, value: Any, kind: type) -> None:
        mapping = isinstance(value, (dict, types.MappingProxyType))
        size = len(value)
        self.note(path, (kind, size))
        if size > _MAX_SEPARATE_FACTS:
            parts = (*value, *value.values()) if mapping else tuple(value)
            if set(map(type, parts)) <= _BY_EQUALITY:
                same = frozenset(parts) if isinstance(value, (set, frozenset)) else parts
                return self.note(path, same)
            if size > _MAX_ELEMENTS:
                return None
        if mapping:
            return self._entries(path, value)
        if not isinstance(value, (list, tuple)):
            return self._loose(path, list(value) if kind is deque else sorted(value, key=_order))
        for i, each in enumerate(list(value)):
            self.visit((path, i), each)
        return None

    def _loose(self, path: Path, values: Sequence[Any]) -> None:
        """Visit elements that no source finds. Tensors among them are compared by identity: the program holds them."""
        self.note(path, ("values", len(values)))
        before, self._loosely = self._loosely, True
        for i, each in enumerate(values):
            self.visit((path, i), each)
        self._loosely = before

    # -- code --------------------------------------------------------------------------------------

    def _function(self, path: Path, fn: types.FunctionType) -> None:
        self.note(path, fn.__code__)
        users = _is_users(fn.__module__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if users or isinstance(held, (types.FunctionType, types.BuiltinFunctionType)):
                self.visit((path, name) if path else ((), name), held)
        if not users:
            return
        if fn.__defaults__:
            self._loose((path, "defaults"), fn.__defaults__)
        if fn.__kwdefaults__:
            self._entries((path, "defaults"), fn.__kwdefaults__)
        for name in globals_of(fn.__code__):
            if name in fn.__globals__:
                self.visit((path, name), fn.__globals__[name])

    def _class(self, path: Path, kind: type) -> None:
        """Visit attributes of a user's class whose names occur in code, and special methods."""
        for base in kind.__mro__:
            if base in self._kinds or not _is_users(base.__module__):
                continue
            self._kinds.add(base)
            table = vars(base)
            for key in [k for k in table if k in self._named or k in _METHODS]:
                self.visit((path, key), table[key])

    # -- modules and optimizers --------------------------------------------------------------------

    def module(self, path: Path, module: nn.Module) -> None:
        """Add facts about a module: its class, its code, and attributes other than modules, tensors and numbers."""
        kind = type(module)
        self.note(path, kind)
        if kind not in self._kinds:
            self._class(path, kind)
            self._kinds.add(kind)
            self.note((path, "forward"), getattr(getattr(kind, "forward", None), "__code__", None))
        table = vars(module)
        for key in sorted(table.keys() - _OF_EVERY_MODULE):
            value = without_watching(table[key])
            if type(value) in _GUARDED or key.startswith(_FSDP_ATTRIBUTE):
                continue
            self._loosely = True
            if isinstance(value, (list, tuple)):  # tensors directly in a list have sources
                value = [None if isinstance(each, Tensor) else each for each in value]
            self.visit((path, key), value)
            self._loosely = False
        for hooks in _HOOKS:
            if table[hooks]:
                self.visit((path, hooks), list(table[hooks].values()))

    def optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """Add facts about an optimizer: its class, its hooks, replaced methods, and numbers in its state."""
        kind = type(optimizer)
        self.note(path, kind)
        self._class(path, kind)
        for key, value in vars(optimizer).items():
            if key not in _OF_EVERY_OPTIMIZER:
                self.visit((path, key), value)
        for state in list(optimizer.state.values()):
            for key, value in state.items() if isinstance(state, dict) else ():
                if type(value) in PLAIN:
                    self.visit(((path, "state"), key), value)


_GUARDED = frozenset({Tensor, nn.Parameter, *NUMBERS})  # `ModuleGuard`, sources


@functools.lru_cache(maxsize=4096)
def _is_users(module: str | None) -> bool:
    """Whether a Python module is the user's: not of the standard library, not installed, not this package."""
    package = (module or "").partition(".")[0]
    return (
        not is_standard(package)
        and package not in ("torch", "functionalize")
        and not is_installed(module)
    )


def _is_configuration(kind: type) -> bool:
    return kind.__name__.endswith("Config") or (
        dataclasses.is_dataclass(kind) and not _is_torchs(kind)
    )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "functionalize")


def _wrapped(value: Any) -> Any:
    table = getattr(value, "__dict__", None)
    return table.get("__wrapped__") if isinstance(table, dict) else None


def _order(value: Any) -> str:
    return repr(value) if type(value) in PLAIN else type(value).__qualname__
