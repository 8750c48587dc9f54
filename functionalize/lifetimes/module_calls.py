"""The module that an op belongs to, in a forward, in a backward and in a recomputation.

    with calls.observing(recorder):           the modules that are called, for the metadata of a program
    calls.enter(module) ... calls.leave()     every call of a module while a step is recorded
    calls.module_of(record)                   "model.layers.0.mlp", or "" outside every module
    calls.module_at(backward_position())      the same, for the current op

In a forward it is the innermost module that is being called. In a backward it is the module that was being called when
autograd created the current node: nodes are numbered in order of creation, so the next number is noted whenever a call
of a module begins or ends. A module that is called inside a backward (activation checkpointing) counts as in a forward.
An op that accumulates a gradient belongs to the module of the parameter.
Invariant: O(log calls) per op. A module without a name counts as a part of its caller. Autograd numbers nodes per
thread, so a node created by another thread may be assigned to a wrong module.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from functionalize._compat.autograd import (
    Position,
    current_node_leaf,
    graph_task,
    is_of_leaf,
    next_node_number,
)
from functionalize._compat.dispatch import current_modes
from functionalize._compat.fsdp import class_before_fsdp
from functionalize._compat.modules import end_reports, report_calls
from functionalize._compat.references import address
from functionalize.fsdp.objects import fsdp_registered
from functionalize.ir.ops import OpRecord
from functionalize.recorder.recorder import Recorder
from functionalize.tape.notes import TapeNotes
from functionalize.walk.roots import Roots


class ModuleCalls:
    """The calls of modules in one recording."""

    def __init__(self, numbered: bool = True) -> None:
        """numbered: whether `module_at` will be called, and not only the notes of a recording are filled."""
        self._numbered = numbered
        self.running = ""  # the innermost module that is being called
        self._watched_modules: dict[nn.Module, None] = {}
        self._names: dict[int, str] = {}  # address of a module -> its name
        self._types: dict[str, type] = {}  # name -> the class
        # The address of a parameter -> its module, its name.
        self._leaves: dict[int, tuple[str, str]] = {}
        self._running: list[tuple[str, bool]] = []  # name, whether it was called inside a backward
        # Nodes from `_numbers[i]` up to the next number were created by module `_modules[i]`.
        self._numbers, self._modules = [0], [""]
        self._tape: TapeNotes | None = None

    def register(self, roots: Roots) -> None:
        """Register the names of the modules that a step can reach, and the module of each of their parameters."""
        names, leaves = self._names, self._leaves
        for name, module in roots.walk():
            names.setdefault(address(module), name)
            self._types.setdefault(name, type(module))
            self._watched_modules[module] = None
            for own, parameter in module._parameters.items():
                if parameter is not None:
                    leaves.setdefault(address(parameter), (name, f"{name}.{own}"))
        for states in roots.states().values():
            for owner, own, managed in fsdp_registered(states):
                name = self._names.get(address(owner), "")
                for attribute in ("sharded_param", "_unsharded_param"):
                    leaf = getattr(managed, attribute, None)
                    self._leaves.setdefault(address(leaf), (name, f"{name}.{own}"))

    @contextmanager
    def observing(self, recorder: Recorder) -> Iterator[None]:
        """A context: calls are noted for the program of a recording."""
        self._tape, recorder.tape.place_of = recorder.tape, self._place_of
        recorder.tape.class_of = self._class_of
        before, recorder.module_calls = recorder.module_calls, self
        self.watch()
        try:
            yield
        finally:
            self.unwatch()
            self._tape, recorder.module_calls = None, before

    def watch(self) -> None:
        """Start to observe calls of the registered modules."""
        _WATCHED.add(self._watched_modules)

    def unwatch(self) -> None:
        """Stop to observe them."""
        _WATCHED.remove(self._watched_modules)

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        name = self.running = self._names.get(address(module), self.running)
        inside = graph_task() != -1
        self._running.append((name, inside))
        self._mark(name, inside)

    def leave(self) -> None:
        """The innermost call ends, or raises."""
        running = self._running
        running.pop()
        self.running, inside = running[-1] if running else ("", False)
        self._mark(self.running, inside)

    def _mark(self, name: str, inside: bool) -> None:
        if self._numbered:
            self._numbers.append(next_node_number())
            self._modules.append(name)
        tape = self._tape
        if tape is not None:
            tape.marks.append((len(tape.records), name, inside, len(self._running)))

    def _place_of(self, leaf: torch.Tensor | None) -> tuple[str, str]:
        """The module of a parameter, and its full name."""
        return self._leaves.get(address(leaf), ("", ""))

    def _class_of(self, name: str) -> str:
        """The class of a module with its package, the user's also where the module is sharded."""
        if name not in self._types:
            return ""
        found = class_before_fsdp(self._types[name])
        return f"{found.__module__}.{found.__qualname__}"

    def module_at(self, position: Position | None) -> str:
        """The name of the module that the current op belongs to. position: in the backward, None in a forward."""
        if position is None or (self._running and self._running[-1][1]):
            return self.running
        number = position[0]
        if number is None:
            return ""
        if is_of_leaf(number):
            return self._place_of(current_node_leaf())[0]
        return self._modules[bisect_right(self._numbers, number) - 1]

    def module_of(self, record: OpRecord) -> str:
        """The same, for an op that is being recorded."""
        if record.phase is None:
            return self.module_at(None)
        in_node = record.autograd_node is not None
        return self.module_at((record.seq_nr if in_node else None, record.phase))


class _WatchedModules:
    """Modules whose calls are reported to the recordings of the calling thread, each with a count of recordings.

    Note [Observing calls]
    `nn.Module.__call__` is not replaced: that would invalidate Python's attribute caches for every class of modules,
    which costs more than the calls. A module has an attribute for a function that runs instead of `_call_impl`.
    `Module.compile` uses it, and copies of the module do not inherit it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[nn.Module, int] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            users = self._users
            for module in modules:
                count = users[module] = users.get(module, 0) + 1
                if count == 1:
                    report_calls(module, _reporting_call)

    def remove(self, modules: Iterable[nn.Module]) -> None:
        with self._lock:
            users = self._users
            for module in modules:
                count = users[module] = users[module] - 1
                if not count:
                    del users[module]
                    end_reports(module)


def _reporting_call(
    module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    found = []
    for mode in current_modes():
        calls = getattr(mode, "module_calls", None)
        if calls is not None:
            calls.enter(module)
            found.append(calls)
    try:
        return (own or module._call_impl)(*args, **kwargs)
    finally:
        for calls in found:
            calls.leave()


_WATCHED = _WatchedModules()
