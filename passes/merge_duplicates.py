"""Merge nodes that compute the same value (common subexpression elimination).

    t = aten.t(w); mm = aten.mm(x, t)            t = aten.t(w); mm = aten.mm(x, t)
    t_1 = aten.t(w); mm_1 = aten.mm(y, t_1)      mm_1 = aten.mm(y, t)

Two values are equal if the same pure op made them from equal arguments; two views, if they have the same geometry on
equal memory, whatever view ops made them. `1`, `1.0` and `True` are not equal, nor are `0.0` and `-0.0`. torch's
`fx_graph_cse` relies on an incomplete list of random ops, merges collectives, ignores lifetimes (it would undo
activation checkpointing), compares arguments with `==` and skips every value that shares memory with an output.

Invariant: every op computes on equal bits with the same geometry. At no point of the graph is more memory live, unless
`held` allows it: a value replaces a later one only if it is live then anyway, or shares its memory.

Refuses
- random ops, collectives, waits, barriers, ops that write, ops without a value, `empty` and its like, ops that torch
  calls nondeterministic, and ops of other libraries, which may have undeclared effects;
- to merge two values that are both returned: the caller expects separate memory for each;
- to keep a value for longer than it would live, if it has more than `held` bytes;
- a graph in which an op writes (stage INPLACE).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.analysis.aliases import results, results_of, written_nodes
from functionalize.analysis.dead_code import is_impure
from functionalize.cost.liveness import Liveness, Storage
from functionalize.ir.epilogue import Set
from functionalize.passes.base import Pass
from functionalize.passes.metadata import revalue
from functionalize.passes.views import Geometries, chain
from functionalize.program.program import Program
from functionalize.util.by_address import by_address

aten = torch.ops.aten
_UNDEFINED = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_permuted,
        aten.empty_quantized,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
    }
)

_PYTHON = ("_operator", "math")  # functions of numbers, and `getitem`
_WRITING = (operator.setitem, operator.delitem)
_TORCH = ("aten", "prims")
_ATOMS = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...))
_EXACT = frozenset({bool, int, *_ATOMS})  # types whose equal values are equal in every way


@dataclass(frozen=True)
class MergeDuplicates(Pass):
    """Compute equal values once.

    held: the largest value, in bytes, whose life may be extended to replace a later equal one; None: any size.
    """

    name: ClassVar[str] = "merge_duplicates"
    held: int | None = 0

    def apply(self, program: Program) -> int:
        nodes = list(program.graph.nodes)
        if any(written_nodes(node) for node in nodes):
            return 0
        lives, numbers = Lives(program), Numbers(program)
        kept: dict[Hashable, fx.Node] = {}  # (number, memory) -> the last node of that value
        done = 0
        for node in nodes:
            number = numbers.number(node)
            if not numbers.is_known(node):
                continue  # equal to nothing else
            at_home = number, lives.home(node)
            first = kept.get(at_home, kept.get(number))
            if first is None or not lives.may_merge(first, node, self.held):
                kept[number] = kept[at_home] = node
                continue
            lives.merge(first, node)
            node.replace_all_uses_with(first)
            done += 1
        if done:
            for node in reversed(nodes):  # erase also the nodes that only duplicates used
                if not node.users and numbers.is_known(node):
                    program.graph.erase_node(node)
            revalue(program.graph, program.fakes)
        return done


# -- which values are equal ------------------------------------------------------------------------


class Numbers:
    """Numbers nodes so that nodes with the same number have equal bits and the same geometry (value numbering)."""

    def __init__(self, program: Program) -> None:
        self.guarded = bool(program.guards)
        self._of: dict[fx.Node, int] = {}
        self._known: dict[Hashable, int] = {}
        self._pure: set[fx.Node] = set()
        self._geometries = Geometries(program)
        self._origin: dict[fx.Node, fx.Node] = {}  # view -> the start of its chain of views

    def number(self, node: fx.Node) -> int:
        """The number of a node. Must be called for every node, in graph order."""
        key = self._key(node)
        if key is None:
            key = node  # equal to nothing else
        else:
            self._pure.add(node)
        found = self._of[node] = self._known.setdefault(key, len(self._known))
        return found

    def is_known(self, node: fx.Node) -> bool:
        """Whether a node is of a kind that can be merged."""
        return node in self._pure

    def _key(self, node: fx.Node) -> Hashable | None:
        if node.op == "get_attr":
            return ("constant", str(node.target))
        if node.op != "call_function" or not _is_repeatable(node):
            return None
        above = next(chain(node, self.guarded), None)
        if above is not None and None not in (self._geometries[node], self._geometries[above]):
            origin = self._origin[node] = self._origin.get(above, above)
            return ("view", self._of[origin], self._geometries[node])
        try:
            named = self._canonical(node.kwargs) if node.kwargs else ()
            return (node.target, self._canonical(node.args), named)
        except TypeError:
            return None

    def _canonical(self, arg: Any) -> Hashable:
        """A hashable key of an argument: equal keys mean equal values. Raises `TypeError` if there is none."""
        kind = type(arg)
        if kind is fx.Node:
            return ("node", self._of[arg])
        if kind in _EXACT:
            return (kind, arg)
        if isinstance(arg, (list, tuple)):
            return tuple(self._canonical(each) for each in arg)
        if isinstance(arg, dict):
            return tuple((name, self._canonical(arg[name])) for name in sorted(arg))
        if isinstance(arg, float):
            return (float, arg.hex())
        if isinstance(arg, complex):
            return (complex, arg.real.hex(), arg.imag.hex())
        if isinstance(arg, _ATOMS):
            return (kind, arg)
        raise TypeError(kind)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether a node is deterministic and has no side effects."""
    return _is_repeatable_op(node.target) and not is_impure(node)


@by_address
def _is_repeatable_op(target: Any) -> bool:
    """Whether calls of an op are deterministic, and have no side effects unless their arguments ask for them."""
    if not hasattr(target, "_schema"):
        return getattr(target, "__module__", None) in _PYTHON and target not in _WRITING
    tags = torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise
    if target.namespace not in _TORCH or any(tag in target.tags for tag in tags):
        return False
    return bool(target._schema.returns) and target.overloadpacket not in _UNDEFINED


# -- which of them may be one ----------------------------------------------------------------------


class Lives:
    """The lifetimes of storages before any merge, and the merges so far."""

    def __init__(self, program: Program) -> None:
        self._live = Liveness(program.graph)
        self._joined: dict[Storage, Storage] = {}
        self._returned: set[Storage] = set()
        slots = results(program.graph)
        returned = [r.slot for role in program.outputs for r in results_of(role)]
        returned += [a.slot for a in program.epilogue if isinstance(a, Set) and a.slot is not None]
        for slot in returned:
            if isinstance(slots[slot], fx.Node):
                self._returned |= set(self._storages(slots[slot]))

    def home(self, node: fx.Node) -> Hashable:
        """A key that is equal for nodes on the same memory."""
        return self._storages(node)

    def may_merge(self, first: fx.Node, node: fx.Node, held: int | None) -> bool:
        """Whether `first` may replace `node`."""
        mine, its = self._storages(node), self._storages(first)
        if mine == its:
            return True
        parts, others = _parts(node), _parts(first)
        if len(mine) != len(its) or (parts.keys() - others.keys() and held is not None):
            return False  # a late use of one part would keep all of them alive
        return all(self._may_join(a, b, node, held) for a, b in self._joining(first, node))

    def _joining(self, first: fx.Node, node: fx.Node) -> list[tuple[Storage, Storage]]:
        """The storages of `node` that are used, and those of `first` that would replace them."""
        used = {s for part in _parts(node).values() for s in self._storages(part)}
        pairs = zip(self._storages(node), self._storages(first), strict=True)
        return [(a, b) for a, b in pairs if a is not b and a in used]

    def _may_join(self, mine: Storage, its: Storage, node: fx.Node, held: int | None) -> bool:
        place = self._live.place[node]
        if mine.first != place or (mine in self._returned and its in self._returned):
            return False
        return its.last >= place or held is None or its.nbytes <= held

    def merge(self, first: fx.Node, node: fx.Node) -> None:
        """Record that `first` replaces `node`."""
        for mine, its in self._joining(first, node):
            self._joined[mine] = its
            its.last = max(its.last, mine.last)
            if mine in self._returned:
                self._returned.add(its)

    def _storages(self, node: fx.Node) -> tuple[Storage, ...]:
        found = self._live.of[node]
        if self._joined.keys().isdisjoint(found):
            return found
        return tuple(map(self._now, found))

    def _now(self, storage: Storage) -> Storage:
        while storage in self._joined:
            storage = self._joined[storage]
        return storage


def _parts(node: fx.Node, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], fx.Node]:
    """The parts of a tuple by their index path; a node that is no tuple is its only part."""
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return {place: node}
    parts = [n for n in node.users if n.target is operator.getitem]
    return {at: n for each in parts for at, n in _parts(each, (*place, each.args[1])).items()}
