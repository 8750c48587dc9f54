"""Which module an op belongs to, in forward, in backward and in a recomputation.

    calls.enter(module) ... calls.leave()     every call of a module while a memory capture runs
    calls.module_of(record)                   "model.layers.0.mlp", or "" outside every module
    calls.module_at(backward_position())      the same, of the op at hand

In a forward it is the innermost module that is being called. In a backward it is the one that was being called when
autograd made the node at hand: nodes are numbered in the order in which they are made, so the number that comes next
is noted whenever a module begins or ends. A module that is called inside a backward (activation checkpointing) counts
as in a forward; what accumulates a gradient belongs to the module of the parameter.
Invariant: O(log calls) for an op. Modules that no name leads to count as a part of their caller; autograd numbers
the nodes of every thread by itself, so a node that another thread made may be given to another module.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from functionalize._compat.autograd import (
    FIRST_OF_LEAVES,
    Position,
    current_node_leaf,
    in_backward,
    next_node_number,
)
from functionalize._compat.dispatch import current_modes
from functionalize._compat.modules import own_call, set_own_call
from functionalize.fsdp.objects import fsdp_registered
from functionalize.ir.ops import OpRecord
from functionalize.state.discovery import Roots


class ModuleCalls:
    """The calls of modules in one recording."""

    def __init__(self) -> None:
        self.running = ""  # the innermost module that is being called
        self._modules_known: dict[nn.Module, None] = {}
        self._names: dict[int, str] = {}
        self._leaves: dict[int, str] = {}
        self._running: list[tuple[str, bool]] = []  # name, whether it was called inside a backward
        self._numbers, self._modules = (
            [0],
            [""],
        )  # from each number on, nodes are made by that module

    def know(self, roots: Roots) -> None:
        """Learn the names of the modules that a step can reach, and whose their parameters are."""
        for name, module in roots.walk():
            self._names.setdefault(id(module), name)
            self._modules_known[module] = None
            for parameter in module._parameters.values():
                self._leaves.setdefault(id(parameter), name)
        for root in roots.modules.values():
            for owner, _, managed in fsdp_registered(root):
                for attribute in ("sharded_param", "_unsharded_param"):
                    leaf = getattr(managed, attribute, None)
                    self._leaves.setdefault(id(leaf), self._names.get(id(owner), ""))

    def watch(self) -> None:
        """Be told of the calls of the modules that are known, from now on."""
        _WATCHED.add(self._modules_known)

    def unwatch(self) -> None:
        """Be told no more."""
        _WATCHED.remove(self._modules_known)

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        self.running = self._names.get(id(module), self.running)
        self._running.append((self.running, in_backward()))
        self._mark()

    def leave(self) -> None:
        """The innermost call ends, or raises."""
        self._running.pop()
        self.running = self._running[-1][0] if self._running else ""
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(next_node_number())
        self._modules.append(self.running)

    def module_at(self, position: Position | None) -> str:
        """The name of the module that the op at hand belongs to."""
        if position is None or (self._running and self._running[-1][1]):
            return self.running
        number = position[0]
        if number is None:
            return ""
        if number >= FIRST_OF_LEAVES:
            return self._leaves.get(id(current_node_leaf()), "")
        return self._modules[bisect_right(self._numbers, number) - 1]

    def module_of(self, record: OpRecord) -> str:
        """The same, of an op that is recorded."""
        if record.phase is None:
            return self.module_at(None)
        in_node = record.autograd_node is not None
        return self.module_at((record.seq_nr if in_node else None, record.phase))


class _Watched:
    """Modules whose calls are told to the recordings of the calling thread, and how many recordings asked for it.

    Note [Told of calls]
    `nn.Module.__call__` is not replaced: that would empty Python's caches of attributes for every class of modules,
    which costs more than the calls. A module has a place of its own for what runs instead of a call, which
    `Module.compile` uses, and which is not copied with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[nn.Module, int] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            for module in modules:
                self._users[module] = self._users.get(module, 0) + 1
                if self._users[module] == 1:
                    told = partial(_told, module, own_call(module))
                    set_own_call(module, told)

    def remove(self, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            for module in modules:
                self._users[module] -= 1
                if not self._users[module]:
                    del self._users[module]
                    set_own_call(module, without_watching(own_call(module)))


def without_watching(value: Any) -> Any:
    """What a module keeps at a place: the user's own where a recording has put something there for its time."""
    watching = isinstance(value, partial) and value.func is _told
    return value.args[1] if watching else value


def _told(module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    notes = (getattr(mode, "step_notes", None) for mode in current_modes())
    found = [each.calls for each in notes if each is not None]
    for calls in found:
        calls.enter(module)
    try:
        return (own or module._call_impl)(*args, **kwargs)
    finally:
        for calls in found:
            calls.leave()


_WATCHED = _Watched()
