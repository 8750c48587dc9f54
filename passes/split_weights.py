"""Gradients of weights after those of activations: what a backward passes on is computed first (zero bubble's B and W).

    dw1 = mm(x1, dy1)                          dx1 = mm(dy1, w1)
    dx1 = mm(dy1, w1)                          dx0 = mm(dx1, w0)
    dw0 = mm(x0, dx1)       split_weights ->   dw1 = mm(x1, dy1)
    dx0 = mm(dx1, w0)                          dw0 = mm(x0, dx1)
    reduce_scatter(_chunk_cat([dw0, dw1]))     reduce_scatter(_chunk_cat([dw0, dw1]))

An op is W if its value becomes a gradient of a parameter, by views, casts and sums alone, and no other gradient is
computed from it; so is an op of the same autograd node that only W reads. W moves down to the first op that reads its
value and is not W: the reduction of the gradient, the optimizer; or to the end of its backward. A weight that is used
twice has one gradient: its parts are W, and are added in the order and grouping of the recording.
budget_mb bounds, at every node that W passes, the bytes of values that are live because only W still reads them, in
MiB: W stops where the next value does not fit.

Invariant: the same nodes, in an order with the constraints of `constraints.py`. Collectives, random ops and what is
not W stay in order. Linear in nodes and edges; with a budget, each op that moves reads the places that it passes.
Refuses graphs whose gradients are not known by name (`node.meta["gradient_of"]`): nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.analysis.aliases import is_view
from functionalize.errors import PassError
from functionalize.planning.timeline.liveness import Liveness, Storage, held_before
from functionalize.program.program import Program
from passes.base import FUNCTIONAL, INPLACE, Pass
from passes.constraints import backwards, constraints_of, is_effect, is_wait, reorder
from passes.graph_modules import on_graph_module

aten = torch.ops.aten
_MB = 2**20
# Ops that make a gradient of the parts that autograd nodes pass on, beside views.
_FINISHES = (aten.add, aten.add_, aten._to_copy, aten.clone)


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Compute gradients of weights late. budget_mb: the most that values may hold that only these read, in MiB."""

    name: ClassVar[str] = "split_weights"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    budget_mb: float | None = None

    def __post_init__(self) -> None:
        if self.budget_mb is not None and self.budget_mb < 0:
            raise PassError(f"`split_weights`: a budget is 0 MiB or more, not {self.budget_mb}")

    def apply(self, program: Program) -> int:
        """Returns the number of nodes that moved."""
        live = Liveness(program.graph)
        weights = _weights(live)
        if not weights:
            return 0
        budget = None if self.budget_mb is None else int(self.budget_mb * _MB)
        return reorder([live.nodes[i] for i in _Split(live, weights, budget).order()])


def split_weights(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    budget_mb: float | None = None,
) -> fx.GraphModule:
    """`gm` itself with the gradients of weights computed later."""
    return on_graph_module(SplitWeights(budget_mb))(gm, example_inputs)


def _weights(live: Liveness) -> dict[int, int]:
    """The ops that are W: place -> the end of their backward."""
    found: dict[int, int] = {}
    leads: set[fx.Node] = set()  # what gradients are computed from, and the gradients
    late: set[fx.Node] = set()  # W
    made: set[fx.Node] = set()  # W whose value becomes the gradient as it is
    for node in reversed(live.nodes):
        if "gradient_of" in node.meta or not leads.isdisjoint(node.users):
            leads.add(node)
    for places in reversed(backwards(live)):
        for place in reversed(places):
            node = live.nodes[place]
            users = leads.intersection(node.users)
            if node not in leads or not users <= late or is_wait(node) or is_effect(node, live):
                continue
            if is_made := all(user in made and _finishes(user) for user in users):
                made.add(node)
            if is_made or all(_is_same_autograd_node(node, user) for user in users):
                late.add(node)
                found[place] = places.stop
    return found


def _finishes(node: fx.Node) -> bool:
    """Whether an op makes a gradient of its parts."""
    return is_view(node) or getattr(node.target, "overloadpacket", None) in _FINISHES


def _is_same_autograd_node(node: fx.Node, other: fx.Node) -> bool:
    numbers = node.meta.get("seq_nr"), other.meta.get("seq_nr")
    return numbers[0] is not None and numbers[0] == numbers[1] and "autograd_node" in node.meta


class _Split:
    """Where each op goes.

    at: per op, the place before which it runs; its own if it stays.
    base: per storage, the last place where an op that is not W uses it, or at which W makes it.
    end: per storage, the last place where W uses it. From `base` to `end` it is held for W alone.
    held: per place, the bytes that are.
    """

    def __init__(self, live: Liveness, weights: dict[int, int], budget: int | None) -> None:
        self.live, self.weights, self.budget = live, weights, budget
        self.at = list(range(len(live.nodes)))
        self.base: dict[Storage, int] = {s: s.first for s in live.storages}
        self.end: dict[Storage, int] = dict(self.base)
        self.held = torch.zeros(len(live.nodes) + 1, dtype=torch.int64)
        if budget is not None:
            self._find_held()
        leads = constraints_of(live).leads
        for i in sorted(weights, reverse=True):
            self._sink(i, min((weights[i], *(self.at[j] for j in leads[i]))))

    def order(self) -> list[int]:
        """The nodes, by number, in the new order."""
        return sorted(range(len(self.at)), key=lambda i: (self.at[i], self.at[i] == i, i))

    def _find_held(self) -> None:
        for place, node in enumerate(self.live.nodes):
            last = self.end if place in self.weights else self.base
            for storage in self._touched(node):
                last[storage] = max(last[storage], place)
            for each in held_before(node):
                for storage in self.live.of[each]:
                    self.base[storage] = max(self.base[storage], place - 1)
        for storage, base in self.base.items():
            self.held[base + 1 : self.end[storage] + 1] += storage.nbytes

    def _sink(self, i: int, to: int) -> None:
        """Move an op down to before a place, or as far as its inputs fit."""
        if self.budget is None:
            self.at[i] = max(i, to)
            return
        read = [s for s in self._touched(self.live.nodes[i]) if s.first != i]
        to = self._fits(i, to, read, self.budget)
        if to <= i:
            return
        self.at[i] = to
        for storage in read:
            held = max(self.base[storage], self.end[storage])
            if to > held:
                self.held[held + 1 : to + 1] += storage.nbytes
                self.end[storage] = to
        for storage in self.live.of[self.live.nodes[i]]:
            if storage.first == i:
                self.held[i + 1 : min(self.end[storage], to) + 1] -= storage.nbytes
                self.base[storage] = to

    def _fits(self, i: int, to: int, read: list[Storage], budget: int) -> int:
        """The last place up to `to` before which an op can run within the budget."""
        held = self.held[i + 1 : to + 1].clone()
        for storage in read:
            held[max(0, max(self.base[storage], self.end[storage]) - i) :] += storage.nbytes
        over = (held > budget).nonzero()
        return i + int(over[0]) if len(over) else to

    def _touched(self, node: fx.Node) -> Iterator[Storage]:
        """The storages of a node's value and of what it reads, each once."""
        nodes = (node, *node.all_input_nodes)
        return iter(dict.fromkeys(s for n in nodes for s in self.live.of[n]))
