"""Remove copies that change nothing once everything is a value.

    clone = aten.clone.default(buf)              mm = aten.mm.default(buf, buf)
    mm = aten.mm.default(clone, clone)

The engine copies where eager did (`p.copy_(buf)`), so that every base is a tensor of its own. In a
pure graph nobody can tell, except by the four things that this pass looks at: layout, memory that
leaves the graph, absolute memory positions, and how long memory lives. Views that change nothing go
too.

Invariant: every op computes on values of the same size, stride, dtype and device as before, so its
kernel gives the same bits. Memory in use never grows, unless `parts` allows it.

Refuses a copy
- that changes size, stride, dtype, device or the conjugate or negative bit;
- whose memory the caller is handed, unless it takes over fresh memory that nobody else is handed;
- that the epilogue reads, if its source is on an input's storage that the epilogue changes;
- that begins in the middle of its source's storage, if that place is not 64-byte aligned, as a
  tensor of its own is (kernels choose by alignment), or if `as_strided` indexes its memory;
- of a part of a storage that would have to live longer for it (`parts=true` allows that);
- whose source or result an op of the graph writes (at a stage where ops do).
`split_with_sizes_copy` becomes `split_with_sizes` if this holds for every part that is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.analysis.aliases import (
    Aliases,
    is_view,
    results,
    results_of,
    storage_classes,
    written_nodes,
)
from functionalize.ir.epilogue import Copy, Set
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.program.program import Program
from passes.base import Pass
from passes.graph_modules import on_graph_module
from passes.metadata import revalue
from passes.views import erase_unused, is_plain

aten = torch.ops.aten

_ALIGNMENT = 64  # bytes: what allocators of CPU and CUDA memory promise at least
_SPLIT = aten.split_with_sizes_copy.default
_SOURCE: dict[Any, int] = {  # position of the argument whose contents an op copies
    aten.clone.default: 0,
    aten._to_copy.default: 0,
    aten.lift_fresh_copy.default: 0,
    aten.copy.default: 1,
}
_ABSOLUTE = (aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter)


@dataclass(frozen=True)
class ElideCopies(Pass):
    """Remove copies that change nothing.

    parts: also where a part of a storage is copied, whose whole must then live as long as the part.
    """

    name: ClassVar[str] = "elide_copies"
    parts: bool = False

    def apply(self, program: Program) -> int:
        views = [n for n in program.graph.nodes if _is_same_view(n)]
        for node in views:
            _replace(node, node.all_input_nodes[0])
        copies = Copies(program, self.parts).elidable()
        for node in copies:
            if node.target is _SPLIT:
                _to_views(node)
            else:
                _replace(node, _source(node))
        if copies:
            revalue(program.graph)
        return len(views) + len(copies)


def elide_copies(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, *, parts: bool = False
) -> fx.GraphModule:
    """`gm` itself without the copies that change nothing; its outputs share no memory anew."""
    return on_graph_module(ElideCopies(parts))(gm, example_inputs)


# -- analysis --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """What is known of the memory of one group of aliases.

    lent: it is an input's or a constant's. touched: the epilogue changes it. written: an op does.
    given: it is handed to the caller. paid: the epilogue copies from it. absolute: somebody indexes
    it by absolute position. last: the place of its last use in the graph.
    """

    lent: bool = False
    touched: bool = False
    written: bool = False
    given: bool = False
    paid: bool = False
    absolute: bool = False
    last: int = -1


class Copies:
    """Decides which copies of a program may go.

    Whole copies of fresh memory come first: they only ever free memory and make memory live longer,
    on which the verdict on a part relies. Then all others, in the order of the graph.
    """

    def __init__(self, program: Program, parts: bool) -> None:
        self.parts = parts
        self.guarded = bool(program.guards)  # else an input may begin anywhere in its storage
        self.nodes = list(program.graph.nodes)
        self.aliases = Aliases(program.graph)
        self.born = {n: self.aliases.of(n) for n in self.nodes}  # the group before any merge
        self.shift: dict[fx.Node, int] = {}  # born group -> bytes by which its memory has moved
        self.memory = {root: Memory() for root in self.born.values()}
        for place, node in enumerate(self.nodes):
            self._look_at(node, place)
        self._look_outside(program)

    def _look_at(self, node: fx.Node, place: int) -> None:
        memory = self.of(node)
        memory.lent |= node.op in ("placeholder", "get_attr")
        memory.last = max(memory.last, place)
        for used in node.all_input_nodes:
            self.of(used).last = max(self.of(used).last, place)
        for _, written in written_nodes(node):
            self.of(written).written = True
        if getattr(node.target, "overloadpacket", None) in _ABSOLUTE and node.all_input_nodes:
            self.of(node.all_input_nodes[0]).absolute = True

    def _look_outside(self, program: Program) -> None:
        slots, classes = results(program.graph), storage_classes(program)
        for role in (r for each in program.outputs for r in results_of(each)):
            self._hand_out(slots[role.slot], role.geometry is not None)
        for action in program.epilogue:
            if isinstance(action, Copy):
                self.of(slots[action.slot]).paid = True
            elif isinstance(action, Set) and action.slot is not None:
                self._hand_out(slots[action.slot], True)
        touched = {classes[a.input] for a in program.epilogue if not isinstance(a, Set)}
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        for node, home in zip(placeholders, classes, strict=True):
            self.of(node).touched |= home in touched

    def _hand_out(self, node: Any, absolute: bool) -> None:
        if isinstance(node, fx.Node):
            memory = self.of(node)
            memory.given = True
            memory.absolute |= absolute

    def of(self, node: fx.Node) -> Memory:
        """The memory of `node`, with all that was merged into it."""
        return self.memory[self.aliases.of(node)]

    def elidable(self) -> list[fx.Node]:
        """The copies that may go, in the order of the graph."""
        copies = [n for n in self.nodes if _copies_plain(n)]
        whole = {n for n in copies if self._frees_memory(n) and self._try(n)}
        chosen: list[fx.Node] = []
        for node in copies:
            if node in whole:
                self._move(node, _source(node))
            if node in whole or self._try(node):
                chosen.append(node)
        return chosen

    def _frees_memory(self, node: fx.Node) -> bool:
        return node.target in _SOURCE and not self.of(_source(node)).lent and _is_whole(node)

    def _try(self, node: fx.Node) -> bool:
        """Decide on one copy, and merge its memory with its source's if it goes."""
        if node.target is _SPLIT:
            return self._try_split(node)
        source = _source(node)
        if not _same_layout(node, source) or node.kwargs.get("pin_memory"):
            return False
        if not self._allowed(node, source, self._offset(source), _is_whole(node)):
            return False
        self._merge(node, source)
        return True

    def _try_split(self, node: fx.Node) -> bool:
        source, pieces = node.all_input_nodes[0], list(node.users)
        if any(p.target is not operator.getitem for p in pieces):
            return False
        for piece, window in zip(pieces, _windows(node), strict=True):
            if geometry_of(piece.meta["val"]) != window._replace(offset=0):
                return False
            start = self._offset(source) + window.start - geometry_of(source.meta["val"]).start
            if not self._allowed(piece, source, start, window.nbytes == _storage_bytes(source)):
                return False
        for piece in pieces:
            self._merge(piece, source)
        return bool(pieces)

    def _allowed(self, copy: fx.Node, source: fx.Node, offset: int, whole: bool) -> bool:
        """Whether the memory of `copy` may be that of `source` from byte `offset` on."""
        mine, its = self.of(copy), self.of(source)
        if mine is its or mine.written or its.written:
            return False
        if mine.given and (its.lent or its.given or not whole or offset):
            return False
        if mine.paid and its.touched:
            return False
        if offset % _ALIGNMENT or (mine.absolute and (offset or (its.lent and not self.guarded))):
            return False
        return its.lent or whole or self.parts or mine.last <= its.last

    def _merge(self, copy: fx.Node, source: fx.Node) -> None:
        mine, its = self.of(copy), self.of(source)
        self._move(copy, source)
        self.aliases.unite(source, copy)
        for name in ("given", "paid", "absolute"):
            setattr(its, name, getattr(its, name) or getattr(mine, name))
        its.last = max(its.last, mine.last)

    def _offset(self, node: fx.Node) -> int:
        """Where in its storage a value will begin, in bytes."""
        return geometry_of(node.meta["val"]).start + self.shift.get(self.born[node], 0)

    def _move(self, copy: fx.Node, source: fx.Node) -> None:
        self.shift[self.born[copy]] = self._offset(source) - geometry_of(copy.meta["val"]).start


def _copies_plain(node: fx.Node) -> bool:
    """Whether a node copies strided tensors of known sizes."""
    if node.target is _SPLIT:
        return is_plain(node.all_input_nodes[0]) and all(is_plain(part) for part in node.users)
    return node.target in _SOURCE and is_plain(node) and is_plain(_source(node))


def _source(node: fx.Node) -> fx.Node:
    at = _SOURCE[node.target]
    found = node.args[at] if at < len(node.args) else node.kwargs[("self", "src")[at]]
    assert isinstance(found, fx.Node)
    return found


def _storage_bytes(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())


def _is_whole(node: fx.Node) -> bool:
    """Whether a copy is as large as the storage it copies from."""
    return _storage_bytes(node) == _storage_bytes(_source(node))


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values differ in nothing but where in their storage they begin."""
    if not is_plain(a) or not is_plain(b):
        return False
    x, y = a.meta["val"], b.meta["val"]
    g, h = geometry_of(x), geometry_of(y)
    return g._replace(offset=0) == h._replace(offset=0) and x.device == y.device


def _is_same_view(node: fx.Node) -> bool:
    """Whether a node is a view that changes nothing, and is not itself returned."""
    if not is_view(node) or node.target is operator.getitem or not node.users:
        return False
    source = node.all_input_nodes[0]
    if any(user.op == "output" for user in node.users) or not _same_layout(node, source):
        return False
    return bool(node.meta["val"].storage_offset() == source.meta["val"].storage_offset())


def _windows(node: fx.Node) -> Iterator[Geometry]:
    """For each used part of a `split_with_sizes_copy`, the window of its source that it copies."""
    sizes: Any = node.args[1]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    g = geometry_of(node.all_input_nodes[0].meta["val"])
    dim %= len(g.size)
    for part in node.users:
        at: Any = part.args[1]
        size = (*g.size[:dim], sizes[at], *g.size[dim + 1 :])
        yield g._replace(size=size, offset=g.offset + sum(sizes[:at]) * g.stride[dim])


# -- rewriting -------------------------------------------------------------------------------------


def _replace(node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    erase_unused(node)


def _to_views(node: fx.Node) -> None:
    """`split_with_sizes` for `split_with_sizes_copy`; nothing at all if one part is the whole."""
    sizes: Any = node.args[1]
    if len(sizes) == 1:
        for part in list(node.users):  # the last one takes `node` with it
            _replace(part, node.all_input_nodes[0])
        return
    with node.graph.inserting_before(node):
        views = node.graph.create_node(
            "call_function",
            aten.split_with_sizes.default,
            node.args,
            dict(node.kwargs),
            "split_with_sizes",
        )
    views.meta = dict(node.meta)
    node.replace_all_uses_with(views)
    node.graph.erase_node(node)
