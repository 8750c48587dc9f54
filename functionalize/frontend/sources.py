"""Where a step's tensors live: the modules and optimizers a callable can reach, and a source for each tensor.

    reachable(train_step, args)   ->  Roots(modules={"model": ...}, optimizers={"optimizer": ...})
    candidates(roots, leaves)     ->  every (name, source) whose tensor a step may read

A source is resolved at every call, so a replaced parameter or a loaded optimizer state is noticed.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat import is_traceable_wrapper_subclass
from functionalize.core.inputs import Argument, Call, Source
from functionalize.frontend.fsdp import fsdp_tensors

_MAX_OBJECTS = 20_000  # a bound on the search, far above what a training script reaches


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that Python holds: `container[key]` of a dict or list, or a closure's cell (`key` None)."""

    container: Any
    key: Any

    def resolve(self, call: Call) -> Any:
        return self.container.cell_contents if self.key is None else self.container[self.key]

    @property
    def place(self) -> tuple[int, Any]:
        """What tells two places apart."""
        return id(self.container), self.key


@dataclass(slots=True)
class Roots:
    """The modules, optimizers and other tensors that a step can reach, by the name it knows them by."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    tensors: list[tuple[str, Held, Tensor]] = field(default_factory=list)


_Found = tuple[str, Any, Held | None]


def reachable(fn: Callable[..., Any], args: Sequence[Any] = ()) -> Roots:
    """Search closures, defaults, bound objects, the globals that code names, and the arguments."""
    roots, seen = Roots(), set[int]()
    queue: deque[_Found] = deque([("", fn, None)])
    queue += [(f"args_{i}", a, None) for i, a in enumerate(args)]
    while queue and len(seen) < _MAX_OBJECTS:
        name, value, held = queue.popleft()
        if id(value) in seen or isinstance(value, _ATOMS):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            roots.modules[name or "model"] = value
        elif isinstance(value, torch.optim.Optimizer):
            roots.optimizers[name or "optimizer"] = value
        elif isinstance(value, Tensor):
            if held is not None:
                roots.tensors.append((name, held, value))
        else:
            queue += _inside(name, value)
    inner = {id(m) for root in roots.modules.values() for m in list(root.modules())[1:]}
    roots.modules = {n: m for n, m in roots.modules.items() if id(m) not in inner}
    return roots


_ATOMS = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device)


def _inside(name: str, value: Any) -> list[_Found]:
    if isinstance(value, functools.partial):
        bound = [(name, a, None) for a in value.args]
        return [(name, value.func, None), *bound, *_items(value.keywords)]
    if isinstance(value, types.MethodType):
        return [(name, value.__self__, None), (name, value.__func__, None)]
    if isinstance(value, types.FunctionType):
        return _inside_function(value)
    if isinstance(value, dict):
        return _items(value)
    if isinstance(value, list):
        return [(f"{name}_{i}", v, Held(value, i)) for i, v in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        return [(f"{name}_{i}", v, None) for i, v in enumerate(value)]
    if isinstance(value, (type, types.ModuleType)):
        return []
    if hasattr(value, "__wrapped__"):
        return [(name, value.__wrapped__, None)]
    if type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return []
    call = type(value).__call__ if callable(value) else None
    found = _items(getattr(value, "__dict__", {}))
    return [*found, (name, call, None)] if isinstance(call, types.FunctionType) else found


def _items(table: dict[Any, Any]) -> list[_Found]:
    return [(str(k), v, Held(table, k)) for k, v in table.items()]


def _inside_function(fn: types.FunctionType) -> list[_Found]:
    found: list[_Found] = []
    if fn.__module__ and fn.__module__.partition(".")[0] == "torch":
        return found
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents, Held(cell, None)))
        except ValueError:  # an empty cell
            continue
    for code in _codes(fn.__code__):
        for name in code.co_names:
            if name in fn.__globals__:
                found.append((name, fn.__globals__[name], Held(fn.__globals__, name)))
    found += [("default", d, None) for d in fn.__defaults__ or ()]
    return found + _items(fn.__kwdefaults__ or {})


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# -- sources ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensor:
    """A parameter or buffer: entry `name` of `module._parameters` or `_buffers`."""

    module: nn.Module
    table: str
    name: str

    def resolve(self, call: Call) -> Any:
        return getattr(self.module, self.table)[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """`.grad` of another source."""

    of: Source

    def resolve(self, call: Call) -> Any:
        return self.of.resolve(call).grad


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """`optimizer.state[p][key]` for parameter `index` of group `group`."""

    optimizer: torch.optim.Optimizer
    group: int
    index: int
    key: str

    def resolve(self, call: Call) -> Any:
        param = self.optimizer.param_groups[self.group]["params"][self.index]
        return self.optimizer.state[param][self.key]


@dataclass(frozen=True, slots=True, eq=False)
class GroupTensor:
    """A hyperparameter kept as a tensor, such as `lr`."""

    optimizer: torch.optim.Optimizer
    group: int
    key: str

    def resolve(self, call: Call) -> Any:
        return self.optimizer.param_groups[self.group][self.key]


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    """A tensor inside a wrapper subclass (`DTensor._local_tensor`)."""

    of: Source
    attribute: str

    def resolve(self, call: Call) -> Any:
        return getattr(self.of.resolve(call), self.attribute)


def unwrapped(name: str, source: Source, value: Any) -> Iterator[tuple[str, Source, Tensor]]:
    """`value` itself, or the plain tensors inside it, each with its source."""
    if is_traceable_wrapper_subclass(value):
        for attribute in value.__tensor_flatten__()[0]:
            inner = getattr(value, attribute)
            short = name if attribute == "_local_tensor" else f"{name}.{attribute}"
            yield from unwrapped(short, Inner(source, attribute), inner)
    elif isinstance(value, Tensor):
        yield name, source, value


def module_tensors(roots: Roots) -> Iterator[tuple[str, ModuleTensor, Tensor]]:
    """Every parameter and buffer, once per place it is registered."""
    for root_name, root in roots.modules.items():
        for fqn, module in root.named_modules(remove_duplicate=True):
            for table in ("_parameters", "_buffers"):
                for name, value in getattr(module, table).items():
                    if value is not None:
                        full = ".".join(part for part in (root_name, fqn, name) if part)
                        yield full, ModuleTensor(module, table, name), value


def _optimizer_tensors(
    name: str, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Source, Any]]:
    for g, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}_{g}", GroupTensor(optimizer, g, key), value
        for i, param in enumerate(group["params"]):
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor):
                    yield f"{name}.{g}.{i}.{key}", OptimizerState(optimizer, g, i, key), value


def candidates(roots: Roots, leaves: Sequence[Any]) -> Iterator[tuple[str, Source, Tensor]]:
    """Every place a step's input may come from, the most telling first."""
    empty = Call(leaves, [])
    for i, leaf in enumerate(leaves):
        yield from unwrapped(f"args_{i}", Argument(i), leaf)
    for name, source, value in module_tensors(roots):
        yield from unwrapped(name, source, value)
        if value.grad is not None and source.table == "_parameters":
            yield from unwrapped(f"{name}.grad", Gradient(source), value.grad)
    for name, optimizer in roots.optimizers.items():
        for full, state, value in _optimizer_tensors(name, optimizer):
            yield from unwrapped(full, state, value)
    for root_name, root in roots.modules.items():
        for name, kept in fsdp_tensors(root):
            yield f"{root_name}.{name}", kept, kept.resolve(empty)
    for name, held, tensor in roots.tensors:
        yield from unwrapped(name, held, tensor)
