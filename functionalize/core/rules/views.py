"""View ops: how to get from a parent to a child geometry, and back after a write to the child.

    a[1:3].mul_(2)        slice = aten.slice(a, 0, 1, 3); mul = aten.mul(slice, 2)
                          slice_scatter = aten.slice_scatter(a, mul, 0, 1, 3)

Every view op that torch's functionalization knows has a step here (composite ones arrive as these). An op
that is not listed, or a geometry no op was seen to make, goes straight from the root by `as_strided`.

Invariant: `inverse(forward(x)) == x`, and `inverse` does not ask for the old parent when the child covers it.
Refusal: none here; overlapping writes are refused by `FunctionalStorage.check_writable`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.core.ops import Geometry, contiguous_geometry
from functionalize.core.storage import Emitter, Step, Value

aten = torch.ops.aten
Old = Callable[[], Value]


@dataclass(frozen=True, slots=True)
class Reshape:
    """Both sides hold the same elements in the same order: `view` there and back."""

    target: Any
    args: tuple[Any, ...]
    parent: Geometry

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        return emit.call(self.target, parent, *self.args)

    def inverse(self, emit: Emitter, child: Value, parent: Old, shift: int) -> Value:
        return emit.call(aten.view.default, child, list(self.parent.size))


@dataclass(frozen=True, slots=True)
class Bijection:
    """An op whose inverse is another op: `permute`, `view.dtype`, `view_as_real`, `_conj`."""

    target: Any
    args: tuple[Any, ...]
    back: Any
    back_args: tuple[Any, ...]

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        return emit.call(self.target, parent, *self.args)

    def inverse(self, emit: Emitter, child: Value, parent: Old, shift: int) -> Value:
        return emit.call(self.back, child, *self.back_args)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the parent: `slice`, `select`, `diagonal`; back by the matching `*_scatter`.

    `index`: which output of a multi-output op (`split`, `unbind`) this is, else None.
    """

    target: Any
    args: tuple[Any, ...]
    index: int | None
    scatter: Any
    scatter_args: tuple[Any, ...]
    covers: bool

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        out = emit.call(self.target, parent, *self.args)
        return out if self.index is None else emit.call(operator.getitem, out, self.index)

    def inverse(self, emit: Emitter, child: Value, parent: Old, shift: int) -> Value:
        if self.covers:
            return child
        return emit.call(self.scatter, parent(), child, *self.scatter_args)


@dataclass(frozen=True, slots=True)
class Strided:
    """Straight from the root by memory position, whatever ops led there."""

    parent: Geometry
    child: Geometry

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        c = self.child
        return emit.call(
            aten.as_strided.default, parent, list(c.size), list(c.stride), c.offset + shift
        )

    def inverse(self, emit: Emitter, child: Value, parent: Old, shift: int) -> Value:
        p, c = self.parent, self.child
        if c.numel == p.numel and c.is_dense and p.is_dense and c.start == p.start:
            return emit.call(aten.as_strided.default, child, list(p.size), list(p.stride), 0)
        return emit.call(
            aten.as_strided_scatter.default,
            parent(),
            child,
            list(c.size),
            list(c.stride),
            c.offset + shift,
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """Several steps one after the other; `middles` are the geometries between them."""

    steps: tuple[Step, ...]

    def forward(self, emit: Emitter, parent: Value, shift: int) -> Value:
        for i, step in enumerate(self.steps):
            parent = step.forward(emit, parent, shift if i == 0 else 0)
        return parent

    def inverse(self, emit: Emitter, child: Value, parent: Old, shift: int) -> Value:
        return self._back(emit, child, parent, shift, len(self.steps) - 1)

    def _back(self, emit: Emitter, child: Value, parent: Old, shift: int, at: int) -> Value:
        if at < 0:
            return child

        def middle() -> Value:
            value = parent()
            for i, step in enumerate(self.steps[:at]):
                value = step.forward(emit, value, shift if i == 0 else 0)
            return value

        value = self.steps[at].inverse(emit, child, middle, shift if at == 0 else 0)
        return self._back(emit, value, parent, shift, at - 1)


def straight(parent: Geometry, child: Geometry) -> Step:
    """The step from a root to a geometry that no op was seen to make."""
    steps: list[Step] = []
    if child.neg:
        steps.append(Bijection(aten._neg_view.default, (), aten._neg_view.default, ()))
    if child.conj:
        steps.append(Bijection(aten._conj.default, (), aten._conj.default, ()))
    child = child._replace(conj=False, neg=False)
    if parent.neg or parent.conj:
        undo = aten._conj.default if parent.conj else aten._neg_view.default
        return Chain(
            (
                Bijection(undo, (), undo, ()),
                straight(parent._replace(conj=False, neg=False), child),
                *reversed(steps),
            )
        )
    if parent.dtype == child.dtype:
        return _chained([_same_dtype(parent, child), *reversed(steps)])
    flat = contiguous_geometry(
        ((parent.end - parent.start) // parent.dtype.itemsize,), parent.dtype, parent.offset
    )
    cast_start = parent.start // child.dtype.itemsize
    cast = contiguous_geometry((parent.nbytes // child.dtype.itemsize,), child.dtype, cast_start)
    first: list[Step] = [] if flat == parent else [_same_dtype(parent, flat)]
    first += _between_dtypes(flat.dtype, cast.dtype)
    if cast != child:
        relative = child._replace(offset=child.offset - cast.offset)
        first.append(_same_dtype(cast._replace(offset=0), relative))
    return _chained([*first, *reversed(steps)])


def _between_dtypes(old: torch.dtype, new: torch.dtype) -> list[Step]:
    if old == new:
        return []
    return [Bijection(aten.view.dtype, (new,), aten.view.dtype, (old,))]


def _same_dtype(parent: Geometry, child: Geometry) -> Step:
    if parent.numel == child.numel and parent.start == child.start:
        if parent.is_contiguous and child.is_contiguous:
            return Reshape(aten.view.default, (list(child.size),), parent)
    return Strided(parent, child)


def _chained(steps: list[Step]) -> Step:
    return steps[0] if len(steps) == 1 else Chain(tuple(steps))


# -- from ops ------------------------------------------------------------------------------------


def step_of(
    target: Any, args: tuple[Any, ...], parent: Geometry, child: Geometry, index: int | None
) -> Step | None:
    """The step that `target(parent, *args)` takes to `child`; None: go straight from the root."""
    make = _STEPS.get(target)
    return None if make is None else make(target, args, parent, child, index)


def _reshape(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
    return Reshape(target, args, p)


def _expand(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
    return Reshape(
        target, args, p
    )  # written only where nothing was expanded: then `view` goes back


def _dim(dim: int, p: Geometry) -> int:
    return dim % max(len(p.size), 1)


def _permute(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
    order = [_dim(d, p) for d in args[0]]
    back = [order.index(d) for d in range(len(order))]
    return Bijection(target, args, aten.permute.default, (back,))


def _own_inverse(
    target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None
) -> Step:
    return Bijection(target, args, target, args)


def _view_dtype(
    target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None
) -> Step:
    return Bijection(target, args, target, (p.dtype,))


def _view_as_real(
    target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None
) -> Step:
    return Bijection(target, args, aten.view_as_complex.default, ())


def _view_as_complex(
    target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None
) -> Step:
    return Bijection(target, args, aten.view_as_real.default, ())


def _part(scatter: Any) -> Callable[..., Step]:
    def make(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
        covers = c.size == p.size
        return Part(target, args, None, scatter, args, covers)

    return make


def _split(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
    assert i is not None
    dim = _dim(args[1] if len(args) > 1 else 0, p)
    sizes = args[0]
    start = sizes * i if isinstance(sizes, int) else sum(sizes[:i])
    where = (dim, start, start + c.size[dim], 1)
    return Part(target, args, i, aten.slice_scatter.default, where, c.size == p.size)


def _unbind(target: Any, args: tuple[Any, ...], p: Geometry, c: Geometry, i: int | None) -> Step:
    assert i is not None
    dim = _dim(args[0] if args else 0, p)
    return Part(target, args, i, aten.select_scatter.default, (dim, i), False)


_STEPS: dict[Any, Callable[..., Step]] = {
    aten.view.default: _reshape,
    aten._reshape_alias.default: lambda t, a, p, c, i: Reshape(aten.view.default, (a[0],), p),
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _own_inverse,
    aten.t.default: _own_inverse,
    aten._conj.default: _own_inverse,
    aten._neg_view.default: _own_inverse,
    aten.view.dtype: _view_dtype,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.slice.Tensor: _part(aten.slice_scatter.default),
    aten.select.int: _part(aten.select_scatter.default),
    aten.diagonal.default: _part(aten.diagonal_scatter.default),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
}
