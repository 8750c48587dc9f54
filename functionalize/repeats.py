"""The blocks of a graph that repeat, as equal layers do, forward and backward: worked out once.

    repeats = Repeats(graph)
    for block, like in repeats.likes():     spans that cover the graph, in order
        ...                                 `like` is None: work the block out; else take over what was found for `like`

        x ─▶│ layer 0 │─▶│ layer 1 │─▶│ layer 2 │─▶ loss      │ block │: of one kind, entered with
             └ w0         └ w1         └ w2                     x and w0, then h0 and w1, then h1 and w2

Two blocks are of one kind if their nodes have, place by place, the same ops and constants (of the same types), and read
the same places: of the block, or of its borders. The borders are the nodes before the block that it reads, in the order
of their first uses. Where borders stand does not matter: among the parameters, in the forward, in the layer before.
A block is `like` an earlier one of its kind if the values of their borders are alike (`BorderValues`).
Not in a block: inputs, constants, the result, a node whose value is data (a number that was read, a result whose size
depends on data), and one with an argument that is neither a node nor a plain constant.
Invariant: what follows from the ops of a block, their constants and the looks of what enters it is equal for blocks
that are alike. Blocks are looked for in runs, one after the other; one that is not found is worked out as it stands.
Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize._compat.references import address
from functionalize.ir.ops import geometry_fields

_PLAIN = frozenset(
    {bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_DATA = frozenset({"hint", "sized"})  # of a node whose value does not follow from its inputs' looks
_WINDOW = 24  # so many nodes must be alike before a block is looked for


class Section(NamedTuple):
    """The nodes from place `start` to before `end`.

    kind: a number, equal for equal blocks; None if no other is equal. borders: the places before it that it reads.
    """

    start: int
    end: int
    kind: int | None = None
    borders: tuple[int, ...] = ()


class Repeats:
    """The repeating blocks of a graph. nodes: its nodes in their order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self._calls = calls_of(graph)
        self._keys: list[int] = []  # of a node: equal for the same op and constants
        self._read = array("l")  # the places that nodes read, one node after the other
        self._ends = array("l", [0])  # of a node and all before it, in `_read`
        self._fill()
        self.blocks = tuple(self._blocks())
        self._keys.clear()
        self._likes: list[tuple[Section, Section | None]] | None = None  # once found

    def likes(self) -> Iterator[tuple[Section, Section | None]]:
        """Each block, and the first that it is like; None for one that is like none before it.

        The nodes before a block must have their `val` when it is asked for.
        """
        if self._likes is not None:
            yield from self._likes
            return
        values, first, found = BorderValues(), dict[Any, Section](), []
        for block in self.blocks:
            like = block
            if block.kind is not None:
                entered = values.of(self.nodes[place] for place in block.borders)
                like = first.setdefault((block.kind, entered), block)
            found.append((block, None if like is block else like))
            yield found[-1]
        self._likes = found

    def read_from_outside(self) -> set[int]:
        """The places that blocks read before themselves, and all that nodes outside of repeating blocks read."""
        found: set[int] = set()
        for block in self.blocks:
            found.update(self.read(block.start, block.end) if block.kind is None else block.borders)
        return found

    def read(self, start: int, end: int) -> Sequence[int]:
        """The places that nodes from `start` to before `end` read: of each its keyword, then its other arguments."""
        return self._read[self._ends[start] : self._ends[end]]

    def are_of(self, graph: fx.Graph) -> bool:
        """Whether the graph has the nodes that it had, with the same targets and arguments."""
        return are_calls_of(self._calls, graph)

    def _fill(self) -> None:
        """Fill `_keys`, `_read` and `_ends`."""
        places: dict[fx.Node, int] = {}
        numbers: dict[Any, int] = {}
        for place, node in enumerate(self.nodes):
            read: list[int] = []
            number = -1 - place
            if node.op == "call_function" and _DATA.isdisjoint(node.meta):
                try:
                    also = _shape(tuple(node.kwargs.items()), places, read) if node.kwargs else None
                    key = address(node.target), _shape(node.args, places, read), also
                    number = numbers.setdefault(key, len(numbers))
                except _IsUnlikeAny:
                    pass
            places[node] = place
            self._keys.append(number)
            self._read.extend(read)
            self._ends.append(len(self._read))

    def _blocks(self) -> Iterator[Section]:
        """The blocks, with spans of all other nodes between them."""
        kinds: dict[Any, int] = {}
        found = []
        for start, period, end in runs(self._keys):
            for at in range(start, end - period + 1, period):
                borders, looks = self._borders(at, at + period)
                kind = kinds.setdefault(looks, len(kinds))
                found.append(Section(at, at + period, kind, borders))
        numbers = Counter(block.kind for block in found)
        repeating = [block for block in found if numbers[block.kind] > 1]
        ends = [Section(0, 0), *repeating, Section(len(self.nodes), len(self.nodes))]
        for before, block in pairwise(ends):
            if before.end < block.start:
                yield Section(before.end, block.start)
            if block.start < block.end:
                yield block

    def _borders(self, start: int, end: int) -> tuple[tuple[int, ...], Any]:
        """(the borders of a span, what is equal for equal spans)."""
        borders: dict[int, int] = {}
        reads = [
            place - start if place >= start else -1 - borders.setdefault(place, len(borders))
            for place in self.read(start, end)
        ]
        return tuple(borders), (tuple(self._keys[start:end]), tuple(reads))


class BorderValues:
    """What the ops of a block can read of the values that enter it, apart from data."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # fields or a structure -> number

    def of(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """The structures of values; of each tensor its geometry, device and storage size; which share storages."""
        storages: dict[Any, int] = {}
        found: list[int] = []
        for node in nodes:
            for fields, storage in self._value(node.meta.get("val")):
                found += fields, storages.setdefault(storage, len(storages))
        return tuple(found)

    def _value(self, value: Any) -> list[tuple[int, Any]]:
        tensors: list[Tensor] = []
        structure = _structure(value, tensors)
        return [(self._number(structure), None), *map(self._tensor, tensors)]

    def _tensor(self, tensor: Tensor) -> tuple[int, Any]:
        """The fields of a tensor, and its storage."""
        number = getattr(tensor, "constant", None)
        if tensor.layout != torch.strided or number is not None:
            return self._number(address(tensor)), address(tensor)
        storage = tensor.untyped_storage()
        fields = geometry_fields(tensor), tensor.device, storage.nbytes()
        return self._number(fields), storage._cdata

    def _number(self, fields: Any) -> int:
        return self._numbers.setdefault(fields, len(self._numbers))


def _structure(value: Any, tensors: list[Tensor]) -> Any:
    """The structure of a value; appends the tensors in it. What is no tensor, number or list is like nothing else."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, (list, tuple)):
        return tuple([_structure(each, tensors) for each in value])
    kind = type(value)
    return kind, value if kind in _PLAIN else address(value)


def runs(keys: Sequence[int], shown_by: int = _WINDOW) -> Iterator[tuple[int, int, int]]:
    """The spans of a sequence that repeat what stands before them: (start, period, end), of two periods or more.

    From left to right, each with the shortest period that so many keys show. The last period of a span may be cut off:
    what is left of it may belong to the next span.
    """
    bytes_ = array("q", keys).tobytes()
    last: dict[int, int] = {}  # a hash of a window -> where it stood last
    done, at = 0, 0
    failed = 0, 0  # a period, and how far it is known to go: less than one period
    while at + shown_by <= len(keys):
        window = hash(bytes_[8 * at : 8 * (at + shown_by)])
        before = last.get(window, -1)
        last[window] = at
        period = at - before
        if before < done or (period == failed[0] and at < failed[1]):
            at += 1
            continue
        end = at
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        if end - at < period:
            failed, at = (period, end), at + 1
            continue
        yield before, period, end
        done = at = end - (end - before) % period


def calls_of(graph: fx.Graph) -> list[Any]:
    """The nodes and what they call, held: an address of one that is not may be another's later."""
    return [each for n in graph.nodes for each in (n, n.target, n.args, n.kwargs)]


def are_calls_of(calls: Sequence[Any], graph: fx.Graph) -> bool:
    """Whether the graph has the same nodes, in the same order, with the same targets and arguments."""
    now = calls_of(graph)
    return len(now) == len(calls) and all(map(operator.is_, now, calls))


class _IsUnlikeAny(Exception):
    """An argument that is neither a node nor a plain constant."""


def _shape(arg: Any, places: dict[fx.Node, int], read: list[int]) -> Any:
    """A list of arguments without its nodes; appends their places to `read`."""
    if not isinstance(arg, (list, tuple)):
        raise _IsUnlikeAny
    found: list[Any] = []
    for each in arg:
        kind = type(each)
        if kind is fx.Node:
            read.append(places[each])
            found.append(kind)
        elif kind in _PLAIN:
            found += kind, each
        else:
            found.append(_shape(each, places, read))
    return tuple(found)
