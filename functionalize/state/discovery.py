"""The objects that a callable can reach: modules, optimizers, tensors and numbers, each with the place that holds it.

    reachable(train_step, args)   ->  Roots(modules={"model": ...}, optimizers={"optimizer": ...}, ...)

The search covers closures, defaults, bound objects, arguments, the globals that code names, and the user's code in
modules (`forward`) and hooks. Of an object, a class or a Python module, it covers the attributes whose names occur in
the code found so far. Of functions in installed packages, it covers closures and defaults, but not globals.
"""

from __future__ import annotations

import dis
import functools
import io
import queue
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from functionalize._compat.autograd import hook_functions
from functionalize.fsdp.objects import fsdp_states
from functionalize.ir.inputs import Call
from functionalize.planning.timeline.timeline import Category

_MAX_OBJECTS = 20_000  # a bound on the search, far above what a training script reaches
NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_ATOMS = (*NUMBERS, torch.dtype, torch.device)
CONTAINERS = (list, dict, set, deque, queue.Queue, queue.SimpleQueue, io.IOBase)


# Code that uses one of these may access attributes by string constants.
_BY_TEXT = frozenset({"getattr", "hasattr", "vars", "__dict__", "attrgetter"})
# Of these packages, objects are not searched. This one: a program that the step keeps holds the sources of its inputs.
_NOT_SEARCHED = ("torch", "builtins", "functionalize")


@dataclass(frozen=True, slots=True)
class Held:
    """A place in Python: `container[key]`, attribute `key` of `container`, or the contents of a cell (`key` None).

    For an element of a tuple, `container` is the place of the tuple, because Python replaces a tuple as a whole.
    """

    container: Any
    key: Any
    category: ClassVar[Category] = Category.BUFFERS

    def resolve(self, call: Call | None = None) -> Any:
        container = self.container
        if isinstance(container, Held):
            container = container.resolve()
        if self.key is None:
            return container.cell_contents
        if isinstance(container, (dict, list, tuple)):
            return container[self.key]
        return getattr(container, self.key)

    @property
    def place(self) -> tuple[Any, Any]:
        """A key that is equal for equal places."""
        inner = self.container
        return (inner.place if isinstance(inner, Held) else id(inner)), self.key


@dataclass(slots=True)
class Roots:
    """The objects that a step can reach.

    modules, optimizers: by a name that is unique. modules holds root modules only.
    tensors: name, place and tensor, of those at a place that is no module's table.
    held: name, place and value of every module, optimizer, tensor and number that is held at a place.
    objects: name and `__dict__` of every other object.
    containers: name and object of every list, dict, set, queue and file.
    named: the names of attributes and globals that occur in the code.
    functions: the user's functions.
    arguments: a name per leaf of the step's arguments.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    tensors: list[tuple[str, Held, Tensor]] = field(default_factory=list)
    held: list[tuple[str, Held, Any]] = field(default_factory=list)
    objects: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    named: set[Any] = field(default_factory=set)
    functions: list[types.FunctionType] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    _walked: list[tuple[str, nn.Module]] | None = None
    _states: dict[str, list[Any]] | None = None

    def walk(self) -> list[tuple[str, nn.Module]]:
        """Every module under the roots with its full name; computed once."""
        if self._walked is None:
            self._walked = [
                (".".join(part for part in (name, fqn) if part), module)
                for name, root in self.modules.items()
                for fqn, module in root.named_modules()
            ]
        return self._walked

    def states(self) -> dict[str, list[Any]]:
        """FSDP2's states under every root module, by the root's name; computed once."""
        if self._states is None:
            self._states = {name: list(fsdp_states(root)) for name, root in self.modules.items()}
        return self._states


_Found = tuple[str, Any, Held | None]


class _Search:
    """A breadth-first search. `queue` holds objects to visit: name, object, place (None: at no place)."""

    def __init__(self) -> None:
        self.roots, self.seen = Roots(), set[int]()
        self.named: set[Any] = set()  # names of attributes and globals in the code found so far
        self.queue: deque[_Found] = deque()
        # Classes and Python modules, each with the names that were already visited.
        self.owners: list[tuple[Any, set[str]]] = []

    def run(self) -> Roots:
        roots = self.roots
        while self.queue and len(self.seen) < _MAX_OBJECTS:
            self._look(*self.queue.popleft())
            if not self.queue:  # code that was found may name more attributes of known classes
                self.queue += self._newly_named()
        used = (h for h in roots.held if h[1].key is None or h[1].key in self.named)
        roots.held, roots.named = list(used), self.named
        inner = {id(m) for root in roots.modules.values() for m in list(root.modules())[1:]}
        roots.modules = {n: m for n, m in roots.modules.items() if id(m) not in inner}
        return roots

    def _look(self, name: str, value: Any, held: Held | None) -> None:
        if isinstance(value, NUMBERS):
            if held is not None:
                self.roots.held.append((name, held, value))
        elif id(value) not in self.seen and not isinstance(value, _ATOMS):
            self.seen.add(id(value))
            if isinstance(value, (nn.Module, torch.optim.Optimizer, Tensor)):
                self._keep(name, value, held)
            else:
                self.queue += self._inside(name, value, held)

    def _newly_named(self) -> list[_Found]:
        """Attributes of known classes and Python modules whose names occur in code found since the last call."""
        found: list[_Found] = []
        for owner, visited in self.owners:
            table = vars(owner)
            new = [k for k in table if k in self.named and k not in visited]
            visited.update(new)
            found += [(k, table[k], Held(owner, k)) for k in new]
        return found

    def _keep(self, name: str, value: Any, held: Held | None) -> None:
        roots = self.roots
        if held is not None:
            roots.held.append((name, held, value))
        if isinstance(value, nn.Module):
            roots.modules[_free(name or "model", roots.modules)] = value
            self.queue += [(n, code, None) for n, code in _code_of(value)]
        elif isinstance(value, torch.optim.Optimizer):
            roots.optimizers[_free(name or "optimizer", roots.optimizers)] = value
        elif held is not None:
            roots.tensors.append((name, held, value))

    def _inside(self, name: str, value: Any, held: Held | None) -> list[_Found]:
        if isinstance(value, CONTAINERS):
            self.roots.containers.append((name, value))
        if isinstance(value, functools.partial):
            bound = [(name, a, None) for a in value.args]
            return [(name, value.func, None), *bound, *_items(value.keywords)]
        if isinstance(value, types.MethodType):
            return [(name, value.__func__, None), (name, value.__self__, None)]
        if isinstance(value, types.FunctionType):
            return self._inside_function(value)
        if isinstance(value, dict):
            return _items(value)
        if isinstance(value, list):
            return [(f"{name}_{i}", v, Held(value, i)) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            places = (None if held is None else Held(held, i) for i in range(len(value)))
            return [
                (f"{name}_{i}", v, p) for i, (v, p) in enumerate(zip(value, places, strict=True))
            ]
        if isinstance(value, (queue.Queue, queue.SimpleQueue, io.IOBase)):
            return []
        if isinstance(value, (set, frozenset, deque)):
            return [(f"{name}_{i}", v, None) for i, v in enumerate(value)]
        if isinstance(value, GradScaler):  # its dict by optimizer is rebuilt in every step: skipped
            kept = {k: v for k, v in vars(value).items() if isinstance(v, (Tensor, *NUMBERS))}
            self.named.update(kept)
            return [(f"{name}{k}", v, Held(vars(value), k)) for k, v in kept.items()]
        if isinstance(value, LRScheduler):
            self.named.update(k for k, v in vars(value).items() if isinstance(v, NUMBERS))
            return _items(vars(value))
        inner = _wrapped(value)
        if inner is not None:
            return [(name, inner, None)]
        is_class, is_module = isinstance(value, type), isinstance(value, types.ModuleType)
        owner = value if is_class else type(value)
        package = value.__name__ if is_module else owner.__module__
        package = package.partition(".")[0]
        if package in _NOT_SEARCHED or ((is_module or is_class) and is_standard(package)):
            return []
        if is_class or is_module:
            self.owners.append((value, set()))
            return []
        self.owners.append((owner, set()))
        call = vars(owner).get("__call__")
        attributes = getattr(value, "__dict__", {})
        self.roots.objects.append((name or owner.__name__, attributes))
        found = _items(attributes)
        slots = (n for n in getattr(owner, "__slots__", ()) if hasattr(value, n))
        found += [(n, getattr(value, n), Held(value, n)) for n in slots]
        return [*found, (name, call, None)] if isinstance(call, types.FunctionType) else found

    def _inside_function(self, fn: types.FunctionType) -> list[_Found]:
        found: list[_Found] = []
        if fn.__module__ and fn.__module__.partition(".")[0] == "torch":
            return found
        if not is_installed(fn.__module__):
            self.roots.functions.append(fn)
        for code in codes_of(fn.__code__) if not is_installed(fn.__module__) else ():
            self.named.update(code.co_names)
            if not _BY_TEXT.isdisjoint(code.co_names):
                self.named.update(c for c in code.co_consts if isinstance(c, str))
        for name in globals_of(fn.__code__) if not is_installed(fn.__module__) else ():
            if name in fn.__globals__:
                found.append((name, fn.__globals__[name], Held(fn.__globals__, name)))
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                found.append((name, cell.cell_contents, Held(cell, None)))
            except ValueError:  # an empty cell
                continue
        defaults = fn.__defaults__ or ()
        named = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(defaults) :]
        found += [(n, d, None) for n, d in zip(named, defaults, strict=False) if defaults]
        return found + _items(fn.__kwdefaults__ or {})


def _code_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The user's code in modules: `forward`, and hooks of modules and parameters."""
    for child in module.modules():
        kind = type(child)
        if not is_installed(kind.__module__):
            yield kind.__name__, kind.forward
        for table in (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks):
            yield from (("hook", hook) for hook in table.values())
        for parameter in child._parameters.values():
            if parameter is not None:
                yield from (("hook", hook) for hook in hook_functions(parameter))


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a Python module belongs to an installed package and is not the user's own code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def reachable(
    fn: Callable[..., Any], args: Sequence[Any] = (), names: Sequence[str] | None = None
) -> Roots:
    """Search `fn` and `args`, breadth first. names: of the leaves `args`, from the signature of `fn`."""
    search = _Search()
    search.queue.append(("", fn, None))
    search.roots.arguments = [f"args_{i}" for i in range(len(args))] if names is None else [*names]
    named = zip(search.roots.arguments, args, strict=True)
    search.queue += [(name, a, None) for name, a in named if not _is_number(a)]
    return search.run()


def _wrapped(value: Any) -> Any:
    """The function that a decorator wrapped (`__wrapped__`), or None. Some attributes raise (`torch.classes`)."""
    try:
        return getattr(value, "__wrapped__", None)
    except Exception:
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, _ATOMS)


def _free(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else _free(f"{name}_", taken)


def _items(table: dict[Any, Any]) -> list[_Found]:
    return [(str(k), v, Held(table, k)) for k, v in table.items()]


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, classes and comprehensions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that a code object and those nested in it use. Other names in `co_names` are attributes."""
    used = (
        i.argval
        for each in codes_of(code)
        for i in dis.get_instructions(each)
        if i.opname in _GLOBAL_OPS
    )
    return tuple(dict.fromkeys(used))


def is_standard(package: str) -> bool:
    """Whether a package belongs to Python's standard library."""
    return package in sys.stdlib_module_names and package != "__main__"
