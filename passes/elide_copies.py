"""Remove copies that are redundant in a pure graph.

    clone = aten.clone.default(buf)              mm = aten.mm.default(buf, buf)
    mm = aten.mm.default(clone, clone)

The engine copies where eager did (`p.copy_(buf)`), so that every base is a separate tensor. In a pure graph the
copy is observable only by its layout, by memory that leaves the graph, by absolute positions in memory, and by
how long memory lives; this pass checks all four. It also removes views that have their source's geometry, or that of a
value further up their chain once no copy is between them.

Invariant: every op computes on values of the same size, stride, dtype and device as before, so its
results are bitwise equal. Memory in use never grows, unless `parts` allows it.

Refuses a copy
- that changes size, stride, dtype, device or the conjugate or negative bit;
- whose memory is returned to the caller, unless its source is fresh memory that is not returned otherwise;
- that the epilogue reads, if its source is on an input's storage that the epilogue changes;
- whose contents do not begin on a 64-byte boundary of the source's storage, as those of a separate tensor do
  (kernels choose by alignment), or not at its beginning if `as_strided` indexes its memory;
- that a `*_scatter` op reads, if the source's storage is no whole number of its elements: torch refuses these;
- of a part of a storage that would have to live longer for it (`parts=true` allows that);
- whose source or result an op of the graph writes (at stage INPLACE).
`split_with_sizes_copy` becomes `split_with_sizes` if this holds for every part that is used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
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
from functionalize.passes.base import Pass
from functionalize.passes.metadata import revalue
from functionalize.passes.views import Geometries, erase_unused, same_above
from functionalize.program.program import Program
from functionalize.util.by_address import by_address

aten = torch.ops.aten

_ALIGNMENT = 64  # bytes: the least alignment that the CPU and CUDA allocators guarantee
_SPLIT = aten.split_with_sizes_copy.default
_SOURCE: dict[Any, int] = {  # position of the argument whose contents an op copies
    aten.clone.default: 0,
    aten._to_copy.default: 0,
    aten.lift_fresh_copy.default: 0,
    aten.copy.default: 1,
}
_SCATTERS = frozenset(
    {aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter}
)
_ABSOLUTE = frozenset({aten.as_strided, aten.as_strided_copy, aten.as_strided_scatter})


@dataclass(frozen=True)
class ElideCopies(Pass):
    """Remove redundant copies.

    parts: also remove a copy of a part of a storage; the whole storage then lives as long as the part.
    """

    name: ClassVar[str] = "elide_copies"
    parts: bool = False

    def apply(self, program: Program) -> int:
        known = Geometries(program)
        views = [n for n in program.graph.nodes if _is_same_view(n, known)]
        for node in views:
            _replace(node, node.all_input_nodes[0])
        copies = Copies(program, self.parts, known).elidable()
        for node in copies:
            if node.target is _SPLIT:
                _to_views(node)
            else:
                _replace(node, _source(node))
        if copies:
            revalue(program.graph, program.fakes)
            return len(views) + len(copies) + _undone(program)
        return len(views)


# -- analysis --------------------------------------------------------------------------------------


@dataclass(slots=True)
class MemoryFacts:
    """Facts about the memory of one group of aliases.

    external: whether it belongs to an input or a constant.
    touched: whether the epilogue changes it.
    written: whether an op of the graph writes it.
    returned: whether the caller obtains it, by an output or a `set_`.
    copied: whether the epilogue copies from it.
    absolute: whether an op or an output addresses it from the beginning of its storage.
    last: the position of its last use in the graph.
    nbytes: the size of the storage.
    unit: the size of the largest element to which a `*_scatter` op writes.
    """

    external: bool = False
    touched: bool = False
    written: bool = False
    returned: bool = False
    copied: bool = False
    absolute: bool = False
    last: int = -1
    nbytes: int = 0
    unit: int = 1


class Copies:
    """Decides which copies of a program can be removed.

    Copies of whole fresh storages are decided first: removing one frees memory and extends the life of its source,
    which may allow the removal of a copy of a part. All others follow in graph order.
    """

    def __init__(self, program: Program, parts: bool, known: Geometries) -> None:
        self.parts, self.known = parts, known
        self.guarded = bool(program.guards)  # without guards, an input's storage offset is unknown
        self.nodes = list(program.graph.nodes)
        self.aliases = Aliases(program.graph)
        self.original_group = {
            n: self.aliases.of(n) for n in self.nodes
        }  # the group of aliases before any merge
        self.shift: dict[fx.Node, int] = {}  # original group -> bytes by which its memory moved
        self.memory = {root: MemoryFacts() for root in self.original_group.values()}
        for place, node in enumerate(self.nodes):
            self._record_uses(node, place)
        self._record_scatters()
        self._record_outputs_and_epilogue(program)

    def _record_uses(self, node: fx.Node, place: int) -> None:
        """Must be called for every node, in graph order."""
        memory, used = self._first(node), node.all_input_nodes
        memory.external |= node.op in ("placeholder", "get_attr")
        memory.last = place
        for each in used:
            self._first(each).last = place
        for _, written in written_nodes(node):
            self._first(written).written = True
        if used and _is_absolute(node.target):
            self._first(used[0]).absolute = True

    def _record_scatters(self) -> None:
        """Fill `unit`, and `nbytes`, which only matters if there are scatters."""
        scatters = [n for n in self.nodes if _is_scatter(n.target) and self.known[n]]
        # The result's storage is as large as the base's, so what the result is scattered to counts, too.
        for node in reversed(scatters):
            base = self._first(node.all_input_nodes[0])
            base.unit = max(base.unit, self._first(node).unit, node.meta["val"].itemsize)
        for node in self.nodes if scatters else ():
            if self.known[node] is not None:
                memory = self._first(node)
                memory.nbytes = max(memory.nbytes, _storage_bytes(node))

    def _first(self, node: fx.Node) -> MemoryFacts:
        """The memory of a node before any merge."""
        return self.memory[self.original_group[node]]

    def _record_outputs_and_epilogue(self, program: Program) -> None:
        slots, classes = results(program.graph), storage_classes(program)
        for role in (r for each in program.outputs for r in results_of(each)):
            self._mark_returned(slots[role.slot], role.geometry is not None)
        for action in program.epilogue:
            if isinstance(action, Copy):
                self.of(slots[action.slot]).copied = True
            elif isinstance(action, Set) and action.slot is not None:
                self._mark_returned(slots[action.slot], True)
        touched = {classes[a.input] for a in program.epilogue if not isinstance(a, Set)}
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        for node, home, spec in zip(placeholders, classes, program.inputs, strict=True):
            self.of(node).touched |= home in touched
            self.of(node).nbytes = spec.nbytes

    def _mark_returned(self, node: Any, absolute: bool) -> None:
        if isinstance(node, fx.Node):
            memory = self.of(node)
            memory.returned = True
            memory.absolute |= absolute

    def of(self, node: fx.Node) -> MemoryFacts:
        """The memory of `node`, with everything that was merged into it."""
        return self.memory[self.aliases.of(node)]

    def elidable(self) -> list[fx.Node]:
        """The copies that can be removed, in the order of the graph."""
        copies = [n for n in self.nodes if self._copies_plain(n)]
        whole = {n for n in copies if self._frees_memory(n) and self._try(n)}
        chosen: list[fx.Node] = []
        for node in copies:
            if node in whole:
                self._move(node, _source(node))
            if node in whole or self._try(node):
                chosen.append(node)
        return chosen

    def _copies_plain(self, node: fx.Node) -> bool:
        """Whether a node copies strided tensors of known sizes."""
        if not _is_copy(node.target):
            return False
        is_split = node.target is _SPLIT
        read = [node.all_input_nodes[0], *node.users] if is_split else [node, _source(node)]
        return all(self.known[each] is not None for each in read)

    def _frees_memory(self, node: fx.Node) -> bool:
        return node.target in _SOURCE and not self.of(_source(node)).external and _is_whole(node)

    def _try(self, node: fx.Node) -> bool:
        """Decide on one copy; if it is removed, merge its memory with its source's."""
        if node.target is _SPLIT:
            return self._try_split(node)
        source = _source(node)
        if not _same_layout(node, source, self.known) or node.kwargs.get("pin_memory"):
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
            if self.known[piece] != window._replace(offset=0):
                return False
            start = self._offset(source) + window.start - geometry_of(source.meta["val"]).start
            if not self._allowed(piece, source, start, window.nbytes == _storage_bytes(source)):
                return False
        for piece in pieces:
            self._merge(piece, source)
        return bool(pieces)

    def _allowed(self, copy: fx.Node, source: fx.Node, offset: int, whole: bool) -> bool:
        """Whether `copy` may share the memory of `source`, from byte `offset` of its storage on."""
        mine, its = self.of(copy), self.of(source)
        if mine is its or mine.written or its.written:
            return False
        if mine.returned and (its.external or its.returned or not whole or offset):
            return False
        if mine.copied and its.touched:
            return False
        if offset % _ALIGNMENT or its.nbytes % mine.unit:
            return False
        if mine.absolute and (offset or (its.external and not self.guarded)):
            return False
        return its.external or whole or self.parts or mine.last <= its.last

    def _merge(self, copy: fx.Node, source: fx.Node) -> None:
        mine, its = self.of(copy), self.of(source)
        self._move(copy, source)
        self.aliases.unite(source, copy)
        for name in ("returned", "copied", "absolute"):
            setattr(its, name, getattr(its, name) or getattr(mine, name))
        its.last, its.unit = max(its.last, mine.last), max(its.unit, mine.unit)

    def _offset(self, node: fx.Node) -> int:
        """The byte of its storage at which a value begins after the rewrite."""
        return geometry_of(node.meta["val"]).start + self.shift.get(self.original_group[node], 0)

    def _move(self, copy: fx.Node, source: fx.Node) -> None:
        self.shift[self.original_group[copy]] = (
            self._offset(source) - geometry_of(copy.meta["val"]).start
        )


@by_address
def _is_copy(target: Any) -> bool:
    return target is _SPLIT or target in _SOURCE


@by_address
def _is_scatter(target: Any) -> bool:
    return getattr(target, "overloadpacket", None) in _SCATTERS


@by_address
def _is_absolute(target: Any) -> bool:
    return getattr(target, "overloadpacket", None) in _ABSOLUTE


def _source(node: fx.Node) -> fx.Node:
    at = _SOURCE[node.target]
    found = node.args[at] if at < len(node.args) else node.kwargs[("self", "src")[at]]
    assert isinstance(found, fx.Node)
    return found


def _storage_bytes(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())


def _is_whole(node: fx.Node) -> bool:
    """Whether a copy is as large as its source's storage."""
    return _storage_bytes(node) == _storage_bytes(_source(node))


def _same_layout(a: fx.Node, b: fx.Node, known: Geometries) -> bool:
    """Whether two values are equal in device and geometry, apart from the storage offset."""
    g, h = known[a], known[b]
    if g is None or h is None or g._replace(offset=0) != h._replace(offset=0):
        return False
    return bool(a.meta["val"].device == b.meta["val"].device)


def _is_same_view(node: fx.Node, known: Geometries) -> bool:
    """Whether a node is a view with the geometry of its source, and is not itself returned."""
    if not is_view(node) or node.target is operator.getitem or not node.users:
        return False
    source = node.all_input_nodes[0]
    if known[node] is None or known[node] != known[source]:
        return False
    return _same_layout(node, source, known) and all(user.op != "output" for user in node.users)


def _undone(program: Program) -> int:
    """Remove the views that lead back to a value up their chain, now that no copy is between them; how many."""
    # The values of views were made anew.
    done, guarded, known = 0, bool(program.guards), Geometries(program)
    for node in list(program.graph.nodes):
        same = same_above(node, guarded, known)
        if same is not None:
            _replace(node, same)
            done += 1
    return done


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
    """Replace `split_with_sizes_copy` by `split_with_sizes`; a split into one part, by its source."""
    sizes: Any = node.args[1]
    if len(sizes) == 1:
        for part in list(node.users):  # replacing the last one erases `node`, too
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
    views.meta.update(node.meta)
    node.replace_all_uses_with(views)
    node.graph.erase_node(node)
