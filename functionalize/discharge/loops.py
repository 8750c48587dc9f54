"""Element-wise ops with `out=`: the loop over the elements that eager's CPU kernel runs.

    torch.sigmoid(x, out=o[::2])  ->  x' = aten.copy(aten.empty_strided([4], [2]), x)
                                      o' = aten.sigmoid(x')

A CPU kernel computes a run of adjacent elements by vector instructions, and the rest of a run, or elements with gaps
between them, by a scalar function, whose last bit may differ. The strides of all operands decide which elements are
computed in which way. `out` is an operand of eager's op and not of the functional op: where the loops differ, the
program copies an argument to strides with which the functional op runs eager's loop.

Invariant: nothing is copied where the two loops are the same.
Refusal: an op for which no copy of a single argument yields eager's loop.
Source: `at::TensorIterator` (`reorder_dimensions`, `coalesce_dimensions`, `compute_types`), `VectorizedLoop2d`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functionalize.discharge.layout import UNKNOWN, output_geometry
from functionalize.discharge.rules.mutations import expands
from functionalize.discharge.rules.registry import Engine
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import Geometry, TensorRef, contiguous_geometry, map_refs, refs_in

Strides = tuple[int, ...]

aten = torch.ops.aten
_EXACT = {  # on real numbers these round at most once, as IEEE 754 defines: every kernel returns the same bits
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.neg.default, aten.abs.default, aten.maximum.default, aten.minimum.default),
}
# These move bits and compute nothing, on complex numbers too.
_SELECTS = {aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor}


class Loop(NamedTuple):
    """A loop by vector instructions.

    run: the number of adjacent elements. order: the dimensions, from the innermost to the outermost.
    """

    run: int
    order: tuple[int, ...]


class Copied(NamedTuple):
    """The argument to copy: its position `at`, the geometry of the copy, and the geometry `have` of the op's result."""

    at: int
    geometry: Geometry
    have: Geometry


def operands_of(
    engine: Engine,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: list[Any],
    have: list[Any] | None,
) -> tuple[Any, list[Any] | None]:
    """The values of `args`, one of them copied if eager's loop into `written` needs that, and the results' geometries.

    have: the geometries of the results of `target(*args, **kwargs)`; None if they are those of `written`.
    """
    values = map_refs(engine.read, args)
    out = written[0]
    if have is None or len(have) > 1 or torch.Tag.pointwise not in target.tags:
        return values, have
    if type(out) is not TensorRef or engine.device_of(out).type != "cpu":
        return values, have
    copied = copied_argument(target, args, kwargs, out.geometry, have[0])
    if copied is None:
        return values, have
    at, arg = copied.at, args[copied.at]
    value = engine.fit(values[at], arg.geometry, arg._replace(geometry=copied.geometry))
    return (*values[:at], value, *values[at + 1 :]), [copied.have]


def copied_argument(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], want: Geometry, have: Geometry
) -> Copied | None:
    """The argument to copy so that `target` runs the loop that eager runs into an `out` of layout `want`.

    have: the geometry of the functional op's result. None: no copy is needed.
    """
    refs = refs_in([args, kwargs])
    if have is UNKNOWN or have.size != want.size or _is_exact(target, refs, kwargs, have.dtype):
        return None
    same = have.stride == want.stride and have.dtype == want.dtype
    if same or not all(expands(ref.geometry.size, have.size) for ref in refs):
        return None
    size, dtype = have.size, have.dtype
    inputs = [_operand(ref, have) for ref in refs]
    # For an `out` of another dtype, eager computes into a contiguous temporary tensor, and casts that.
    into = want if want.dtype == dtype else contiguous_geometry(size, dtype)
    eager = loop(size, [into.stride, *inputs])
    if eager == loop(size, [have.stride, *inputs]):
        return None
    stride = _strides(eager, size)
    for at, arg in enumerate(args):
        if type(arg) is TensorRef:
            real = arg.geometry.dtype.is_complex and not dtype.is_complex  # `abs`, `angle`
            own = Geometry(size, stride, 0, arg.geometry.dtype if real else dtype)
            changed = (*args[:at], arg._replace(geometry=own), *args[at + 1 :])
            result = output_geometry(target, changed, kwargs)
            inputs = [_operand(ref, have) for ref in refs_in([changed, kwargs])]
            fits = result.size == size and result.dtype == dtype
            if fits and eager == loop(size, [result.stride, *inputs]):
                return Copied(at, own, result)
    raise UnsupportedOpError(
        f"computes into {want} by a loop over the elements that no functional op runs, and may round "
        "differently: compute without out=, then copy_()"
    )


def _is_exact(
    target: Any, refs: list[TensorRef], kwargs: dict[str, Any], dtype: torch.dtype
) -> bool:
    """Whether every kernel of the op returns the same bits."""
    if target in _SELECTS:
        return True
    if any(g.is_complex for g in (dtype, *(ref.geometry.dtype for ref in refs))):
        return False
    return not dtype.is_floating_point or (target in _EXACT and "alpha" not in kwargs)


def _operand(ref: TensorRef, have: Geometry) -> Strides:
    """The strides with which the kernel reads an argument: 0 in broadcast dimensions; of the copy if it is cast."""
    g = ref.geometry
    cast = g.dtype != have.dtype and not g.dtype.is_complex
    if cast or g.conj or g.neg:
        dtype = have.dtype if cast else g.dtype
        g = output_geometry(aten._to_copy.default, (ref,), {"dtype": dtype})
    missing = len(have.size) - len(g.size)
    pairs = zip(g.size, g.stride, have.size[missing:], strict=True)
    return (0,) * missing + tuple(0 if s == 1 != full else st for s, st, full in pairs)


def loop(size: Sequence[int], operands: Sequence[Strides]) -> Loop | None:
    """The loop over operands of one size. operands: their strides, the output's first. None: a scalar loop."""
    order = [d for d in _order(size, operands) if size[d] != 1]
    if not order:
        return None
    innermost = [stride[order[0]] for stride in operands]
    if innermost[0] != 1 or set(innermost) - {0, 1} or innermost.count(0) > 1:
        return None
    run = 1
    for d in order:
        if any(stride[d] != run * step for stride, step in zip(operands, innermost, strict=True)):
            break
        run *= size[d]
    return Loop(run, tuple(order))


def _strides(wanted: Loop | None, size: Sequence[int]) -> Strides:
    """Strides of a copy that yields a loop: a gap after every run; after every element for the scalar loop."""
    order = wanted.order if wanted else reversed(range(len(size)))
    stride, step, run = [1] * len(size), 1, wanted.run if wanted else 1
    for d in order:
        stride[d] = step + (step == run)
        step = stride[d] * size[d]
    return tuple(stride)


def _order(size: Sequence[int], operands: Sequence[Strides]) -> list[int]:
    """The dimensions from the innermost to the outermost, by torch's insertion sort (the order of ties matters)."""
    order = list(reversed(range(len(size))))
    for i in range(1, len(order)):
        at = i
        for before in reversed(range(i)):
            swap = _compare(size, operands, order[before], order[at])
            if swap < 0:
                break
            if swap > 0:
                order[before], order[at] = order[at], order[before]
                at = before
    return order


def _compare(size: Sequence[int], operands: Sequence[Strides], inner: int, outer: int) -> int:
    for stride in operands:
        a, b = stride[inner], stride[outer]
        if a and b and (a != b or size[inner] > size[outer]):
            return 1 if a >= b else -1
    return 0
