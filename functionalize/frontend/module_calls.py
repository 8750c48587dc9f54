"""Which module an op belongs to, in forward, in backward and in a recomputation.

    calls.enter(module) ... calls.leave()     every call of a module while a memory capture runs
    calls.module_of(record)                   "model.layers.0.mlp", or "" outside every module

In a forward it is the innermost module that is being called. In a backward it is the one that was being called when
autograd made the node at hand: nodes are numbered in the order in which they are made, so the number that comes next
is noted whenever a module begins or ends. A module that is called inside a backward (activation checkpointing) counts
as in a forward; what accumulates a gradient belongs to the module of the parameter.
Invariant: O(log calls) for an op. Modules that no name leads to count as a part of their caller; autograd numbers
the nodes of every thread by itself, so a node that another thread made may be given to another module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from functionalize._compat import current_node_leaf, in_backward, next_node_number
from functionalize.core.ops import OpRecord
from functionalize.frontend.fsdp import fsdp_registered
from functionalize.frontend.reach import Roots


class ModuleCalls:
    """The calls of modules in one recording."""

    def __init__(self) -> None:
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
            for parameter in module._parameters.values():
                self._leaves.setdefault(id(parameter), name)
        for root in roots.modules.values():
            for owner, _, managed in fsdp_registered(root):
                for attribute in ("sharded_param", "_unsharded_param"):
                    leaf = getattr(managed, attribute, None)
                    self._leaves.setdefault(id(leaf), self._names.get(id(owner), ""))

    @property
    def running(self) -> str:
        """The innermost module that is being called."""
        return self._running[-1][0] if self._running else ""

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        name = self._names.get(id(module), self.running)
        self._running.append((name, in_backward()))
        self._mark(name)

    def leave(self) -> None:
        """The innermost call ends, or raises."""
        self._running.pop()
        self._mark(self.running)

    def _mark(self, name: str) -> None:
        self._numbers.append(next_node_number())
        self._modules.append(name)

    def module_of(self, record: OpRecord) -> str:
        """The name of the module that the op at hand belongs to."""
        if record.phase is None or (self._running and self._running[-1][1]):
            return self.running
        if record.autograd_node is None or record.seq_nr is None:
            return ""
        leaf = current_node_leaf()
        if leaf is not None:
            return self._leaves.get(id(leaf), "")
        return self._modules[bisect_right(self._numbers, record.seq_nr) - 1]


def patches(watchers: Callable[[], list[Any]]) -> Iterator[tuple[type, str, Any]]:
    """What tells the recorders of a thread of every call; `watchers`: those."""
    original = nn.Module.__call__

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = [watcher.calls for watcher in watchers() if hasattr(watcher, "calls")]
        for calls in found:
            calls.enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            for calls in found:
                calls.leave()

    yield nn.Module, "__call__", __call__
