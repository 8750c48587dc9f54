"""Fold chains of views into one view.

    view = aten.view(x, [6, 4]); t = aten.t(view); t_1 = aten.t(t)      unchanged: that is for `remove_noops`
    view = aten.view(x, [6, 4]); view_1 = aten.view(view, [2, 12])      view_1 = aten.view(x, [2, 12])
    slice_1 = aten.slice(x, 0, 4, 16); slice_2 = aten.slice(slice_1, 0, 2, 4)    slice_2 = aten.slice(x, 0, 6, 8)
    as_strided = aten.as_strided(x, [4, 6], [1, 4], 0)                  t = aten.t(x), if x is [6, 4] and contiguous

A view is taken of the farthest value up its chain from which one op leads to the same size, stride and offset: `view`,
`t`, `transpose`, `permute`, `squeeze`, `unsqueeze`, `expand`, `select` or `slice`. An `as_strided` becomes one of those
even if it is a chain of one: compilers and people understand these ops better.

Invariant: every value keeps its geometry and its memory; each candidate is tried on a meta tensor. Views hold no memory
of their own, so nothing lives longer.

Refuses what needs two ops; views with other bits than their base (dtype, conjugate, negative); views of unknown or zero
elements; parts of tuples; an `as_strided` of an input that may begin anywhere in its storage (no guard says where); and
a view of which elements are split or joined (`view.dtype`): that op needs strides in dimensions of size 1, too, where a
value may have others than its fake.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize._compat.dispatch import disable_current_modes
from functionalize.ir.ops import Geometry
from functionalize.passes.base import Pass
from functionalize.passes.views import Geometries, chain, erase_unused, viewed
from functionalize.program.program import Program

aten = torch.ops.aten
_AS_STRIDED = aten.as_strided.default
_REGROUPING = frozenset({aten.view.dtype, aten.view_as_complex.default})
Step = tuple[Any, tuple[Any, ...]]  # an op and its arguments after the base


@dataclass(frozen=True)
class FoldViews(Pass):
    """Fold chains of views."""

    name: ClassVar[str] = "fold_views"

    def apply(self, program: Program) -> int:
        folds, done = _Folds(program), 0
        with disable_current_modes():
            kept = _regrouped(program.graph)
            for node in list(program.graph.nodes):
                if node.users and node.target is not operator.getitem and viewed(node) is not None:
                    done += node not in kept and folds.fold(node)
        return done


def _regrouped(graph: fx.Graph) -> set[fx.Node]:
    """The values of which a view's elements are split or joined."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if viewed(node) is not None and (node in found or node.target in _REGROUPING):
            found.add(node.all_input_nodes[0])
    return found


class _Folds:
    """Folds the views of one graph. Equal layers have equal views: a step between two geometries is looked for once."""

    def __init__(self, program: Program) -> None:
        self._guarded, self._known = bool(program.guards), Geometries(program)
        self._steps: dict[tuple[Geometry, Geometry], Step | None] = {}

    def fold(self, node: fx.Node) -> bool:
        """Replace `node` by one view op on the farthest possible base; returns whether there is one."""
        found = self._farthest(node)
        if found is None:
            return False
        base, (target, args) = found
        with node.graph.inserting_before(node):
            name = target.overloadpacket.__name__
            new = node.graph.create_node("call_function", target, (base, *args), name=name)
        new.meta.update(node.meta)  # the value is the same, on the same memory
        node.replace_all_uses_with(new)
        erase_unused(node)
        return True

    def _farthest(self, node: fx.Node) -> tuple[fx.Node, Step] | None:
        """The farthest base from which one op leads to a view, and this op; None if that is the view as it is."""
        wanted, found = self._known[node], None
        if wanted is None:
            return None
        for distance, base in enumerate(chain(node, self._guarded)):
            geometry = self._known[base]
            if geometry is None or (distance == 0 and node.target is not _AS_STRIDED):
                continue
            if geometry == wanted:
                return None
            step = self._step(geometry, wanted)
            found = found if step is None else (base, step)
        return found

    def _step(self, base: Geometry, wanted: Geometry) -> Step | None:
        key = base, wanted
        if key not in self._steps:
            self._steps[key] = step_between(base, wanted)
        return self._steps[key]


def step_between(base: Geometry, wanted: Geometry) -> Step | None:
    """One view op that leads from one geometry to the other, with its arguments; None if there is none."""
    same_bits = base[3:] == wanted[3:]
    if not same_bits or not wanted.numel or not base.numel:
        return None
    offset = wanted.offset - base.offset
    return next((s for s in _candidates(base, wanted, offset) if _leads(base, wanted, s)), None)


def _leads(base: Geometry, wanted: Geometry, step: Step) -> bool:
    target, args = step
    tensor = torch.empty_strided(base.size, base.stride, dtype=base.dtype, device="meta")
    try:
        view = target(tensor, *args)
    except RuntimeError:  # `view`, where the strides do not allow it
        return False
    offset = base.offset + view.storage_offset()
    return (tuple(view.shape), view.stride(), offset) == (wanted.size, wanted.stride, wanted.offset)


def _candidates(base: Geometry, wanted: Geometry, offset: int) -> Iterator[Step]:
    size, rank = list(wanted.size), len(base.size)
    if not offset:
        if base.numel == wanted.numel:
            yield aten.view.default, (size,)
            yield from _permutation(base, wanted)
            yield from ((aten.squeeze.dim, (d,)) for d in _left_out(base, wanted))
            yield from ((aten.unsqueeze.default, (d,)) for d in _left_out(wanted, base))
        elif len(size) >= rank and 0 in wanted.stride:
            yield aten.expand.default, (size,)
    for dim in _left_out(base, wanted):
        stride = base.stride[dim]
        yield aten.select.int, (dim, offset // stride if stride else 0)
    yield from _slices(base, wanted, offset)


def _permutation(base: Geometry, wanted: Geometry) -> Iterator[Step]:
    """The dimensions of the base in another order."""
    places: dict[tuple[int, int], list[int]] = {}
    for dim, look in enumerate(zip(base.size, base.stride, strict=True)):
        places.setdefault(look, []).append(dim)
    order: list[int] = []
    for look in zip(wanted.size, wanted.stride, strict=True):
        if not places.get(look):
            return
        order.append(places[look].pop(0))
    if len(order) != len(base.size):
        return
    moved = [i for i, dim in enumerate(order) if i != dim]
    if len(order) == 2:
        yield aten.t.default, ()
    elif len(moved) == 2:
        yield aten.transpose.int, (moved[0], moved[1])
    else:
        yield aten.permute.default, (order,)


def _left_out(more: Geometry, fewer: Geometry) -> Iterator[int]:
    """Dimensions without which `more` has the sizes and strides of `fewer`: the first of equal ones."""
    if len(more.size) != len(fewer.size) + 1:
        return
    pairs = list(zip(more.size, more.stride, strict=True))
    rest = list(zip(fewer.size, fewer.stride, strict=True))
    dim = next((i for i, (a, b) in enumerate(zip(pairs, rest, strict=False)) if a != b), len(rest))
    if pairs[:dim] + pairs[dim + 1 :] == rest:
        yield dim


def _slices(base: Geometry, wanted: Geometry, offset: int) -> Iterator[Step]:
    """A part of one dimension."""
    if len(base.size) != len(wanted.size):
        return
    pairs = zip(base.size, wanted.size, base.stride, wanted.stride, strict=True)
    other = [i for i, (n, m, s, t) in enumerate(pairs) if (n, s) != (m, t)]
    if len(other) != 1:
        return
    (dim,) = other
    stride, count = base.stride[dim], wanted.size[dim]
    step = wanted.stride[dim] // stride if stride else 1
    start = offset // stride if stride else 0
    if start < 0 or step < 1:
        return
    end = start + (count - 1) * step + 1
    yield aten.slice.Tensor, (dim, start, end) if step == 1 else (dim, start, end, step)
