"""View ops: how to get from a parent to a child geometry, and back after a write to the child.

    a[1:3].mul_(2)        slice = aten.slice(a, 0, 1, 3); mul = aten.mul(slice, 2)
                          slice_scatter = aten.slice_scatter(a, mul, 0, 1, 3)

Every view op of torch's functionalization has a step here (composite ones are dispatched as these). The output of an
op that is not listed, or a geometry that no recorded op made, is derived from the root by `as_strided`.

Invariant: `inverse(forward(x)) == x`, and `inverse` does not read the old parent when the child covers it.
Refusal: none here; overlapping writes are refused by `FunctionalStorage.check_writable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.discharge.values import Emitter, Value, View, ViewCall, ViewStep
from functionalize.ir.ops import Geometry, contiguous_geometry

aten = torch.ops.aten
OldParent = Callable[[], Value]


@dataclass(frozen=True, slots=True)
class ReshapeStep(ViewStep):
    """Parent and child have the same elements in the same order: the inverse is `view`."""

    target: Any
    args: tuple[Any, ...]
    parent: Geometry

    def forward(self, emit: Emitter, parent: Value) -> Value:
        return emit.call(self.target, parent, *self.args)

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        return emit.call(aten.view.default, child, list(self.parent.size))


@dataclass(frozen=True, slots=True)
class BijectiveStep(ViewStep):
    """An op with an inverse op (`back`): `permute`, `_conj`."""

    target: Any
    args: tuple[Any, ...]
    back: Any
    back_args: tuple[Any, ...]

    def forward(self, emit: Emitter, parent: Value) -> Value:
        return emit.call(self.target, parent, *self.args)

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        return emit.call(self.back, child, *self.back_args)


@dataclass(frozen=True, slots=True)
class RegroupStep(BijectiveStep):
    """A bijective op that makes one element of several, or several of one: `view.dtype`, `view_as_complex`.

    To make one of several, torch requires strides that are a multiple of their number, and to make several of one, the
    stride 1 in the last dimension; in dimensions of size 1 too, where a value may have other strides than its geometry.
    """

    parent: Geometry
    child: Geometry

    def forward(self, emit: Emitter, parent: Value) -> Value:
        return _regrouped(emit, self.target, self.args, parent, self.parent, self.child)

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        return _regrouped(emit, self.back, self.back_args, child, self.child, self.parent)


def _regrouped(
    emit: Emitter, target: Any, args: tuple[Any, ...], value: Value, have: Geometry, want: Geometry
) -> Value:
    sizes = [s for s in have.size if s != 1]
    if have.dtype.itemsize > want.dtype.itemsize and have.size[-1:] == (1,):  # to the stride 1
        value = emit.call(aten.unsqueeze.default, emit.call(aten.select.int, value, -1, 0), -1)
    if have.dtype.itemsize >= want.dtype.itemsize or len(sizes) == len(have.size):
        return emit.call(target, value, *args)
    value = emit.call(aten.view.default, value, sizes)
    return emit.call(aten.view.default, emit.call(target, value, *args), list(want.size))


@dataclass(frozen=True, slots=True)
class SubviewStep(ViewStep):
    """A part of the parent: `slice`, `select`, `diagonal`; the inverse is the matching `*_scatter`.

    A child that is the whole parent (`select` of a dimension of size 1) becomes the parent by `view`.
    """

    call: ViewCall
    scatter: Any
    scatter_args: tuple[Any, ...]
    parent: Geometry
    child: Geometry

    @property
    def scatters(self) -> bool:
        return self.child.numel != self.parent.numel

    def forward(self, emit: Emitter, parent: Value) -> Value:
        return self.call.on(emit, parent)

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        if self.scatters:
            return emit.call(self.scatter, parent(), child, *self.scatter_args)
        if self.child.size == self.parent.size:
            return child
        return emit.call(aten.view.default, child, list(self.parent.size))


@dataclass(frozen=True, slots=True)
class OutputStep(SubviewStep):
    """A part of the parent that is one output of a multi-output op: `split`, `unbind`.

    Note [One call for all outputs]
    All outputs that are read from one value of the parent share one call; a call for each would compute N outputs N
    times. The parent's `View` keeps the result of the call as long as its own value.
    """

    index: int

    def forward(self, emit: Emitter, parent: Value) -> Value:
        return emit.part(self.call.on(emit, parent), self.index)

    def regenerate(self, emit: Emitter, parent: View) -> Value:
        lists = parent.output_lists = parent.output_lists or {}
        values = lists.get(self.call)
        if values is None:
            values = lists[self.call] = self.call.on(emit, parent.value)
        return emit.part(values, self.index)


@dataclass(frozen=True, slots=True)
class StridedStep(ViewStep):
    """From a dense geometry to any other geometry of the same dtype inside it, whatever ops made that.

    Note [Positions are relative]
    The storage offset of a value is not known while a graph is built: `slice_scatter` keeps the offset of its argument.
    So positions count from the value's first element, and `as_strided` is emitted without a storage offset.
    """

    parent: Geometry
    child: Geometry

    @property
    def _window(self) -> tuple[int, int]:
        """[start, end) of the child in the elements of the flattened parent."""
        p, c = self.parent, self.child
        return c.offset - p.offset, c.end // c.dtype.itemsize - p.offset

    @property
    def _same_elements(self) -> bool:
        return self.child.is_dense and self.child.numel == self.parent.numel

    def forward(self, emit: Emitter, parent: Value) -> Value:
        p, c = self.parent, self.child
        if self._same_elements:
            return _with_layout(emit, parent, p, c)
        start, end = self._window
        part = _sliced(emit, _flattened(emit, parent, p), p.numel, start, end)
        return _with_layout(emit, part, contiguous_geometry((end - start,), c.dtype, c.offset), c)

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        p, c = self.parent, self.child
        if self._same_elements:
            return _with_layout(emit, child, c, p)
        flat, (start, end) = _flattened(emit, parent(), p), self._window
        if c.is_dense:
            part = _flattened(emit, child, c)
        else:
            part = _sliced(emit, flat, p.numel, start, end)
            to = (list(c.size), list(c.stride))
            part = emit.call(aten.as_strided_scatter.default, part, child, *to)
        if end - start != p.numel:
            part = emit.call(aten.slice_scatter.default, flat, part, 0, start, end)
        return _with_layout(emit, part, contiguous_geometry((p.numel,), p.dtype, p.offset), p)


def _with_layout(emit: Emitter, value: Value, have: Geometry, want: Geometry) -> Value:
    """The memory of `value` (geometry `have`) viewed with the size and stride of `want`.

    By `permute` and `view` where both are dense, which passes and compilers handle better than `as_strided`.
    """
    if have.size == want.size and have.stride == want.stride:
        return value
    before, after = _by_stride(have), _by_stride(want)
    sizes = [want.size[d] for d in after]
    dense = have.is_dense and want.is_dense and have.numel == want.numel
    if not dense or (before == after and list(have.size) == sizes):  # unusual strides in size 1
        return emit.call(aten.as_strided.default, value, list(want.size), list(want.stride))
    if before != sorted(before):
        value = emit.call(aten.permute.default, value, before)
    if sizes != [have.size[d] for d in before]:
        value = emit.call(aten.view.default, value, sizes)
    if after != sorted(after):
        value = emit.call(aten.permute.default, value, [after.index(d) for d in range(len(after))])
    return value


def _by_stride(geometry: Geometry) -> list[int]:
    """The dimensions from the outermost in memory to the innermost; those of size 1 stay in place."""
    if geometry.is_contiguous:
        return list(range(len(geometry.size)))
    return sorted(range(len(geometry.size)), key=lambda d: -geometry.stride[d])


def _flattened(emit: Emitter, value: Value, have: Geometry) -> Value:
    """A dense value as one dimension, in the order of its memory."""
    return _with_layout(
        emit, value, have, contiguous_geometry((have.numel,), have.dtype, have.offset)
    )


def _sliced(emit: Emitter, flat: Value, numel: int, start: int, end: int) -> Value:
    return flat if end - start == numel else emit.call(aten.slice.Tensor, flat, 0, start, end)


@dataclass(frozen=True, slots=True)
class ChainedSteps(ViewStep):
    """Several steps, applied one after the other."""

    steps: tuple[ViewStep, ...]

    def forward(self, emit: Emitter, parent: Value) -> Value:
        for step in self.steps:
            parent = step.forward(emit, parent)
        return parent

    def inverse(self, emit: Emitter, child: Value, parent: OldParent) -> Value:
        return self._back(emit, child, parent, len(self.steps) - 1)

    def _back(self, emit: Emitter, child: Value, parent: OldParent, at: int) -> Value:
        if at < 0:
            return child

        def middle() -> Value:
            value = parent()
            for step in self.steps[:at]:
                value = step.forward(emit, value)
            return value

        value = self.steps[at].inverse(emit, child, middle)
        return self._back(emit, value, parent, at - 1)


# The inverses materialise: a base must not have a conjugate or negative bit, which many ops refuse.
_CONJUGATED = BijectiveStep(aten._conj.default, (), aten._conj_physical.default, ())
_NEGATED = BijectiveStep(aten._neg_view.default, (), aten.neg.default, ())


def straight(parent: Geometry, child: Geometry) -> ViewStep:
    """The step from a root to a geometry that no recorded op made."""
    steps: list[ViewStep] = []
    if child.neg:
        steps.append(_NEGATED)
    if child.conj:
        steps.append(_CONJUGATED)
    child = child._replace(conj=False, neg=False)
    if parent.neg or parent.conj:
        own_inverse = _CONJUGATED if parent.conj else _NEGATED
        return ChainedSteps(
            (
                own_inverse,
                straight(parent._replace(conj=False, neg=False), child),
                *reversed(steps),
            )
        )
    steps = [*_between_dtypes(parent, child), *reversed(steps)]
    return steps[0] if len(steps) == 1 else ChainedSteps(tuple(steps))


def _between_dtypes(parent: Geometry, child: Geometry) -> list[ViewStep]:
    """Steps from a parent to a child of any dtype.

    A child of another element size is taken from the smallest contiguous run that contains it and is a whole number of
    elements of both dtypes.
    """
    old, new = parent.dtype, child.dtype
    if old == new:
        return [StridedStep(parent, child)]
    cast = BijectiveStep(aten.view.dtype, (new,), aten.view.dtype, (old,))
    if old.itemsize == new.itemsize:
        same = parent._replace(dtype=new)
        return [cast] if same == child else [cast, StridedStep(same, child)]
    unit = max(old.itemsize, new.itemsize)
    start, end = child.start // unit * unit, -(-child.end // unit) * unit
    before = contiguous_geometry(((end - start) // old.itemsize,), old, start // old.itemsize)
    after = contiguous_geometry(((end - start) // new.itemsize,), new, start // new.itemsize)
    first: list[ViewStep] = [] if before == parent else [StridedStep(parent, before)]
    last: list[ViewStep] = [] if after == child else [StridedStep(after, child)]
    casts = RegroupStep(aten.view.dtype, (new,), aten.view.dtype, (old,), before, after)
    return [*first, casts, *last]


# -- from ops ------------------------------------------------------------------------------------


def step_of(
    call: ViewCall, parent: Geometry, child: Geometry, index: int | None = None
) -> ViewStep | None:
    """The step of the view op `call` from `parent` to `child`, its output `index` (None: its only output).

    None for an op that is not listed: its output is derived from the root (`straight`).
    """
    make = _STEPS.get(call.target)
    return None if make is None else make(call, parent, child, index)


def _reshape(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    return ReshapeStep(call.target, call.args, parent)


def _expand(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    # Only a view in which no dimension was expanded is ever written; its inverse is `view`.
    return ReshapeStep(call.target, call.args, parent)


def _dim(dim: int, geometry: Geometry) -> int:
    return dim % max(len(geometry.size), 1)


def _permute(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    order = [_dim(d, parent) for d in call.args[0]]
    back = [order.index(d) for d in range(len(order))]
    return BijectiveStep(call.target, call.args, aten.permute.default, (back,))


def _own_inverse(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    return BijectiveStep(call.target, call.args, call.target, call.args)


def _view_dtype(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    return RegroupStep(call.target, call.args, call.target, (parent.dtype,), parent, child)


def _view_as_real(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    return RegroupStep(call.target, call.args, aten.view_as_complex.default, (), parent, child)


def _view_as_complex(
    call: ViewCall, parent: Geometry, child: Geometry, index: int | None
) -> ViewStep:
    return RegroupStep(call.target, call.args, aten.view_as_real.default, (), parent, child)


def _part(scatter: Any) -> Callable[..., ViewStep]:
    def make(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
        return SubviewStep(call, scatter, call.args, parent, child)

    return make


def _split(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    assert index is not None
    dim = _dim(call.args[1] if len(call.args) > 1 else 0, parent)
    stride = parent.stride[dim]  # 0: an expanded dimension, which is never written
    start = (child.offset - parent.offset) // stride if stride else 0
    where = (dim, start, start + child.size[dim], 1)
    return OutputStep(call, aten.slice_scatter.default, where, parent, child, index)


def _unbind(call: ViewCall, parent: Geometry, child: Geometry, index: int | None) -> ViewStep:
    assert index is not None
    dim = _dim(call.args[0] if call.args else 0, parent)
    return OutputStep(call, aten.select_scatter.default, (dim, index), parent, child, index)


_STEPS: dict[Any, Callable[..., ViewStep]] = {
    aten.view.default: _reshape,
    aten._reshape_alias.default: lambda call, parent, child, index: ReshapeStep(
        aten.view.default, (call.args[0],), parent
    ),
    aten.unsqueeze.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dim: _reshape,
    aten.squeeze.dims: _reshape,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _own_inverse,
    aten.t.default: _own_inverse,
    aten._conj.default: lambda call, parent, child, index: _CONJUGATED,
    aten._neg_view.default: lambda call, parent, child, index: _NEGATED,
    aten.view.dtype: _view_dtype,
    aten.view_as_real.default: _view_as_real,
    aten.view_as_complex.default: _view_as_complex,
    aten.slice.Tensor: _part(aten.slice_scatter.default),
    aten.select.int: _part(aten.select_scatter.default),
    aten.diagonal.default: _part(aten.diagonal_scatter.default),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
}
