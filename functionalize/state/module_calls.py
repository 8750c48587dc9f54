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
from functools import cached_property
from typing import Any

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
from functionalize.util.reading import keys_of, size_of, values_of
from functionalize.walk.roots import Roots

_thread = threading.get_ident


class ModuleCalls:
    """The calls of modules in one recording."""

    def __init__(self, numbered: bool = True) -> None:
        """numbered: whether `module_at` will be called, and not only the notes of a recording are filled."""
        self._numbered = numbered
        self.running = ""  # the innermost module that is being called
        self._watched_modules: dict[int, nn.Module] = {}  # by address: hashes may change
        self._named: list[tuple[str, nn.Module]] = []
        # The name of a module, the names of parameters of it, and their addresses.
        self._parameters: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
        self._running: list[tuple[str, bool]] = []  # name, whether it was called inside a backward
        # Nodes from `_numbers[i]` up to the next number were created by module `_modules[i]`.
        self._numbers, self._modules = [0], [""]
        self._tape: TapeNotes | None = None
        self.only_notes: TapeNotes | None = None  # the same, if nothing else is observed

    def register(self, roots: Roots) -> None:
        """Register the modules that a step can reach, and the module of each of their parameters."""
        named = roots.walk()
        self._named += named
        self._parameters += [
            (name, tuple(keys_of(table)), tuple(map(address, values_of(table))))
            for name, module in named
            if size_of(table := module._parameters)
        ]
        self._watched_modules.update({address(module): module for _, module in named})
        for states in roots.states().values():
            for owner, own, managed in fsdp_registered(states):
                name = self._names.get(address(owner), "")
                for attribute in ("sharded_param", "_unsharded_param"):
                    at = address(getattr(managed, attribute, None))
                    self._parameters.append((name, (own,), (at,)))

    @cached_property
    def _leaves(self) -> dict[int, tuple[str, str]]:
        """The address of a parameter -> the name of its first module, its own name."""
        found = {
            at: (module, own)
            for module, names, places in reversed(self._parameters)
            for own, at in reversed([*zip(names, places, strict=True)])
        }
        found.pop(address(None), None)
        return found

    @cached_property
    def _names(self) -> dict[int, str]:
        """The first name of each module, by its address."""
        return {address(module): name for name, module in reversed(self._named)}

    @cached_property
    def _types(self) -> dict[str, type]:
        """The class of the first module of each name."""
        return {name: type(module) for name, module in reversed(self._named)}

    @contextmanager
    def observing(self, recorder: Recorder) -> Iterator[None]:
        """A context: calls are noted for the program of a recording."""
        self._tape, recorder.tape.place_of = recorder.tape, self._place_of
        self.only_notes = None if self._numbered else recorder.tape
        recorder.tape.name_of, recorder.tape.class_of = self._name_of, self._class_of
        before, recorder.module_calls = recorder.module_calls, self
        self.watch()
        try:
            yield
        finally:
            self.unwatch()
            self._tape = self.only_notes = None
            recorder.module_calls = before

    def watch(self) -> None:
        """Start to observe calls of the registered modules."""
        _WATCHED.add(self._watched_modules, self.only_notes)

    def unwatch(self) -> None:
        """Stop to observe them."""
        _WATCHED.remove(self._watched_modules)

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        inside, tape = graph_task() != -1, self._tape
        if tape is not None:
            tape.marks.append((len(tape.records), address(module), inside))
        if self._numbered:
            self._running.append((self._names.get(address(module), self.running), inside))
            self._mark()

    def leave(self) -> None:
        """The innermost call ends, or raises."""
        tape = self._tape
        if tape is not None:
            tape.marks.append((len(tape.records), None, False))
        if self._numbered:
            self._running.pop()
            self._mark()

    def _mark(self) -> None:
        self.running = self._running[-1][0] if self._running else ""
        self._numbers.append(next_node_number())
        self._modules.append(self.running)

    def _name_of(self, module: int) -> str:
        """The name of the module with an address, empty if unknown."""
        return self._names.get(module, "")

    def _place_of(self, leaf: int) -> tuple[str, str]:
        """The module of the parameter with an address, and its full name."""
        module, own = self._leaves.get(leaf, ("", ""))
        return module, own and f"{module}.{own}"

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
            return self._place_of(address(current_node_leaf()))[0]
        return self._modules[bisect_right(self._numbers, number) - 1]

    def module_of(self, record: OpRecord) -> str:
        """The same, for an op that is being recorded."""
        if record.phase is None:
            return self.module_at(None)
        in_node = record.autograd_node is not None
        return self.module_at((record.seq_nr if in_node else None, record.phase))


class _WatchedModules:
    """Modules whose calls are reported to the recordings of the calling thread.

    Note [Observing calls]
    `nn.Module.__call__` is not replaced: that would invalidate Python's attribute caches for every class of modules,
    which costs more than the calls. A module has an attribute for a function that runs instead of `_call_impl`.
    `Module.compile` uses it, and copies of the module do not inherit it.
    """

    only: TapeNotes | None = None  # of the one recording that watches, if it wants nothing else

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each recording, the modules that it watches, and its notes if it wants nothing else.
        self._watches: list[tuple[dict[int, nn.Module], TapeNotes | None]] = []

    def add(self, modules: dict[int, nn.Module], only_notes: TapeNotes | None) -> None:
        with self._lock:
            report_calls(self._of_no_other(modules), _reporting_call)
            self._set([*self._watches, (modules, only_notes)])

    def remove(self, modules: dict[int, nn.Module]) -> None:
        with self._lock:
            self._set([each for each in self._watches if each[0] is not modules])
            end_reports(self._of_no_other(modules))

    def _set(self, watches: list[tuple[dict[int, nn.Module], TapeNotes | None]]) -> None:
        self._watches, self.only = watches, watches[0][1] if len(watches) == 1 else None

    def _of_no_other(self, modules: dict[int, nn.Module]) -> Iterable[nn.Module]:
        """Those that no recording watches."""
        if not self._watches:
            return modules.values()
        return [m for at, m in modules.items() if not any(at in w for w, _ in self._watches)]


def _reporting_call(
    module: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    call = own or module._call_impl
    tape = _WATCHED.only
    if tape is not None and tape.stacks.main == _thread():  # nearly always
        marks, records = tape.marks, tape.records
        marks.append((len(records), address(module), graph_task() != -1))
        try:
            return call(*args, **kwargs)
        finally:
            marks.append((len(records), None, False))
    found = [c for m in current_modes() if (c := getattr(m, "module_calls", None)) is not None]
    for calls in found:
        calls.enter(module)
    try:
        return call(*args, **kwargs)
    finally:
        for calls in found:
            calls.leave()


_WATCHED = _WatchedModules()
