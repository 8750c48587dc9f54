"""The autograd graph of each backward of a recording: its nodes, their edges, and the order in which they run.

    loss.backward()     ->     BackwardCall(names=["SumBackward0", ...], numbers=[7, ...], readers=[1, ...], ...)

The graph is walked when `torch.autograd` calls its engine, so nodes that run no op are known, too (`AddBackward0`
passes its gradient on). Of the nodes that have got all their gradients, the engine runs the one with the highest
sequence number first; `order` is evaluated on demand.
Invariant: a call keeps no node and no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from typing import Any

from functionalize._compat.autograd import ACCUMULATES, OTHER_CLASS, gradient_node
from functionalize._compat.references import address
from functionalize._compat.stacks import CapturedTraceback

_NUMBER = methodcaller("_sequence_nr")
_NUMBER_OF_LEAVES = 2**64 - 1  # autograd's, of every node that accumulates a gradient


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """One call of the engine. A node is referred to by its place in the lists.

    numbers: in the thread's sequence; below 0 for a leaf's node, see `TapeNotes`. readers: the nodes that get gradients
    of the first node, then those of the next one. stops: of each node, where its readers end. roots: the nodes of the
    outputs. ends: those of the inputs, if the backward is of these alone.
    """

    names: list[str]
    numbers: list[int]
    readers: list[int]
    stops: list[int]
    roots: list[int]
    ends: list[int] | None
    thread: int
    traceback: CapturedTraceback

    @cached_property
    def edges(self) -> list[list[int]]:
        """Of each node, the nodes that get its gradients."""
        starts = [0, *self.stops]
        return [self.readers[a:b] for a, b in zip(starts, self.stops, strict=False)]

    def order(self) -> list[int]:
        """The nodes that run, in their order (`torch._C._current_graph_task_execution_order`)."""
        needed = self._needed()
        waits = [0] * len(self.names)  # how many gradients a node still waits for
        for place, after in enumerate(self.edges):
            if place in needed:
                for each in after:
                    waits[each] += 1
        heap = _Heap([n if n >= 0 else _NUMBER_OF_LEAVES for n in self.numbers])
        for root in dict.fromkeys(self.roots):
            if not waits[root] and root in needed:
                heap.push(root)
        order = []
        while heap.items:
            place = heap.pop()
            order.append(place)
            for each in self.edges[place]:
                waits[each] -= 1
                if not waits[each] and each in needed:
                    heap.push(each)
        return order

    def _needed(self) -> set[int]:
        """The nodes that lead to the inputs, and those of the inputs."""
        if self.ends is None:
            return set(range(len(self.names)))
        before: list[list[int]] = [[] for _ in self.names]
        for place, after in enumerate(self.edges):
            for each in after:
                before[each].append(place)
        needed, waiting = set(self.ends), list(self.ends)
        while waiting:
            for each in before[waiting.pop()]:
                if each not in needed:
                    needed.add(each)
                    waiting.append(each)
        return needed


def walked(
    outputs: Iterable[Any],
    inputs: Iterable[Any],
    numbers_of: Callable[[list[Any]], Iterable[int]],
    thread: int,
    traceback: CapturedTraceback,
) -> tuple[BackwardCall, dict[Any, int]]:
    """The graph that a backward of `outputs` can reach, and the place of each node in it.

    inputs: tensors or gradient edges, if the backward is of these alone. numbers_of: returns the numbers of the nodes
    of leaves.
    """
    outputs, inputs = list(outputs), list(inputs)
    roots = [gradient_node(each) for each in outputs]
    found = list(dict.fromkeys(node for node in roots if node is not None))
    places = {node: place for place, node in enumerate(found)}
    readers: list[int] = []
    stops: list[int] = []
    size, find, place_of, add = len(found), found.append, places.setdefault, readers.append
    for node in found:  # which grows
        for each, _ in node.next_functions:
            if each is not None:
                place = place_of(each, size)
                if place == size:
                    find(each)
                    size += 1
                add(place)
        stops.append(len(readers))
    numbers: list[int] = list(map(_NUMBER, found))
    kinds = list(map(type, found))
    ends = [place for place, kind in enumerate(kinds) if kind is ACCUMULATES]
    texts = {kind: kind.__name__ for kind in set(kinds)}
    names = list(map(texts.__getitem__, kinds))
    if OTHER_CLASS in texts.values():
        names = [
            node.name() if n == OTHER_CLASS else n for n, node in zip(names, found, strict=True)
        ]
    tensors = [found[place].variable for place in ends]
    bare = [each for each, node in zip(outputs, roots, strict=True) if node is None]
    leaves: dict[int, int] = {}  # address -> the place of the node, if one is asked for
    if bare or any(gradient_node(each) is None for each in inputs):
        leaves = dict(zip(map(address, tensors), ends, strict=True))
    for each in bare:
        if address(each) not in leaves:
            leaves[address(each)] = len(names)
            ends.append(len(names))
            tensors.append(each)
            names.append(ACCUMULATES.__name__)
            numbers.append(0)
            stops.append(len(readers))
    for place, of_leaf in zip(ends, numbers_of(tensors), strict=True):
        numbers[place] = of_leaf

    def places_of(tensors: list[Any]) -> list[int]:
        ofs = ((each, gradient_node(each)) for each in tensors)
        some = (leaves.get(address(t)) if node is None else places.get(node) for t, node in ofs)
        return [place for place in some if place is not None]

    needed = places_of(inputs) if inputs else None
    call = BackwardCall(
        names, numbers, readers, stops, places_of(outputs), needed, thread, traceback
    )
    return call, places


class _Heap:
    """The heap of C++'s standard library: it decides in which order nodes of equal numbers (of leaves) run."""

    def __init__(self, keys: list[int]) -> None:
        self.items: list[int] = []
        self._keys = keys

    def push(self, item: int) -> None:
        self.items.append(item)
        self._rise(len(self.items) - 1, 0, item)

    def pop(self) -> int:
        items, keys = self.items, self._keys
        top, last = items[0], items.pop()
        size = len(items)
        if size == 0:
            return top
        hole = child = 0
        while child < (size - 1) // 2:
            child = 2 * (child + 1)
            if keys[items[child]] < keys[items[child - 1]]:
                child -= 1
            items[hole], hole = items[child], child
        if size % 2 == 0 and child == (size - 2) // 2:
            child = 2 * (child + 1)
            items[hole], hole = items[child - 1], child - 1
        self._rise(hole, 0, last)
        return top

    def _rise(self, hole: int, top: int, item: int) -> None:
        items, keys = self.items, self._keys
        parent = (hole - 1) // 2
        while hole > top and keys[items[parent]] < keys[item]:
            items[hole], hole = items[parent], parent
            parent = (hole - 1) // 2
        items[hole] = item
