"""Ops with `out=` that eager computes differently from the functional op: products and reductions.

    torch.mm(a, b, out=o.t())                   ->  o' = aten.mm(b.t(), a.t())
    torch.nn.functional.linear(x, w, b, out=o)  ->  o' = aten.matmul(x, w.t()) + b     (`x` is no matrix)
    torch.std(a, out=o)                         ->  o' = aten.std.correction(aten._to_copy(a, dtype=o.dtype))
    torch.logsumexp(a, out=o)                   ->  exp in a's type, sum and log in o's

For a column-major `out`, eager's product is another BLAS call than for a row-major one, and may round differently. The
functional ops return row-major results; the product of the transposes is the BLAS call that eager makes. `linear` folds
`x` to a matrix and calls `addmm`, which rounds once; `linear.out` rounds the product, and then the sum. The `out` of a
reduction determines the dtype in which it computes, even without `dtype=`, and the order in which it adds; where the
dtypes are equal, the plain functional form is used.

Refusals: `std` and `var` of all elements, which have a kernel of their own; on a CPU, sums into an `out` whose
dimensions are in another order in memory than those of the result (`out=o.t()`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from functionalize.discharge.layout import output_geometry
from functionalize.discharge.rules.mutations import functional_form
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.discharge.rules.views import step_of
from functionalize.discharge.values import ViewCall
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, contiguous_geometry

aten = torch.ops.aten


def _by_rows(g: Geometry) -> bool:
    """Whether ATen's `addmm` has the (column-major) BLAS compute the transpose of a result of this geometry."""
    (m, n), (down, right) = g.size, g.stride
    if down == 1 and (n == 1 or right >= max(1, m)):
        return False
    return right == 1 and (m == 1 or down >= max(1, n))


@rule(
    aten.mm.out,
    aten.addmm.out,
    aten.addmm_.default,
    aten.addbmm.out,
    aten.addbmm_.default,
)
def matrix_product(engine: Engine, record: OpRecord) -> Any:
    """`mm.out(self, mat2, *, out)`, `addmm.out(self, mat1, mat2, *, beta=1, alpha=1, out)`, and `addbmm`."""
    out = record.kwargs.get("out", record.args[0])
    want: Geometry = out.geometry
    plain = len(want.size) != 2 or not want.numel
    if plain or _by_rows(want) == _by_rows(contiguous_geometry(want.size, want.dtype)):
        return engine.mutated(record)
    engine.storage(out.storage).check_writable(want)

    def transposed(ref: TensorRef) -> Any:
        value = engine.read(ref)
        if len(ref.geometry.size) < 2:
            value = engine.emit.call(aten.expand.default, value, list(want.size))
        return engine.emit.call(aten.transpose.int, value, -2, -1)

    *added, left, right = record.args
    target = functional_form(record.target).target
    scales = {k: v for k, v in record.kwargs.items() if k != "out"}
    operands = (transposed(ref) for ref in (*added, right, left))
    product = engine.emit.call(target, *operands, **scales)
    value = engine.emit.call(aten.t.default, product)
    have = contiguous_geometry((want.size[1], want.size[0]), left.geometry.dtype)
    have = have._replace(size=want.size, stride=have.stride[::-1])
    engine.write(out, engine.fit(value, have, out))
    return None


@rule(aten.linear.out)
def linear_out(engine: Engine, record: OpRecord) -> Any:
    """`linear.out(Tensor input, Tensor weight, Tensor? bias=None, *, out)`, by the steps of ATen's kernel."""
    (source, weight), bias = record.args[:2], (record.args[2:] or (None,))[0]
    out, transposed = record.kwargs["out"], _transposed(engine, weight)
    matrices = len(source.geometry.size) == len(weight.geometry.size) == 2
    if matrices and bias is not None:
        return matrix_product(
            engine, replace(record, target=aten.addmm.out, args=(bias, source, transposed))
        )
    if matrices:
        product = replace(record, target=aten.mm.out, args=(source, transposed))
        return matrix_product(engine, product)
    engine.storage(out.storage).check_writable(out.geometry)
    # `matmul` runs another kernel for a weight that requires grad; with `out=` none does, so detach.
    columns = engine.emit.call(aten.detach.default, engine.read(transposed))
    value = engine.emit.call(aten.matmul.default, engine.read(source), columns)
    have = output_geometry(aten.matmul.default, (source, transposed), {})
    engine.write(out, engine.fit(value, have, out))
    if bias is not None:
        engine.mutated(replace(record, target=aten.add_.Tensor, args=(out, bias), kwargs={}))
    return None


def _transposed(engine: Engine, ref: TensorRef) -> TensorRef:
    """The transpose of a matrix; a tensor of fewer dimensions itself."""
    g: Geometry = ref.geometry
    transposed = g._replace(size=g.size[::-1], stride=g.stride[::-1])
    step = step_of(ViewCall(aten.t.default, ()), g, transposed)
    if step is not None:
        engine.storage(ref.storage).add_view(g, transposed, step)
    return TensorRef(ref.storage, transposed)


@rule(aten.std.out, aten.std.correction_out, aten.var.out, aten.var.correction_out)
def spread_out(engine: Engine, record: OpRecord) -> Any:
    """`var.correction_out(Tensor self, int[1]? dim=None, *, correction=None, keepdim=False, out)`."""
    source, out = record.args[0], record.kwargs["out"]
    want = out.geometry.dtype
    if source.geometry.dtype == want:
        return engine.mutated(record)
    engine.storage(out.storage).check_writable(out.geometry)
    if not (len(record.args) > 1 and record.args[1]):
        raise UnsupportedOpError(
            f"reduces {source.geometry.dtype} to one number in an `out` of {want}, which eager computes in "
            "float64: reduce without out=, then copy_()"
        )
    target = functional_form(record.target).target
    kwargs = {k: v for k, v in record.kwargs.items() if k != "out"}
    cast = source._replace(geometry=source.geometry._replace(dtype=want))
    have = output_geometry(target, (cast, *record.args[1:]), kwargs)
    value = engine.emit.call(aten._to_copy.default, engine.read(source), dtype=want)
    value = engine.emit.call(target, value, *record.args[1:], **kwargs)
    engine.write(out, engine.fit(value, have, out))
    return None


@rule(aten.sum.IntList_out, aten.nansum.out, aten.mean.out)
def sum_out(engine: Engine, record: OpRecord) -> Any:
    """`sum.IntList_out(Tensor self, int[1]? dim, bool keepdim=False, *, dtype=None, out)` and its like."""
    kwargs = {k: v for k, v in record.kwargs.items() if k != "out"}
    target = functional_form(record.target).target
    _check_order(engine, record.kwargs["out"], output_geometry(target, record.args, kwargs))
    return engine.mutated(record)


def _check_order(engine: Engine, out: TensorRef, have: Geometry) -> None:
    """Raise if a CPU kernel would add in another order into `out` than into a result of geometry `have`."""
    want, exact = out.geometry, not (have.dtype.is_floating_point or have.dtype.is_complex)
    if exact or want.size != have.size or engine.device_of(out).type != "cpu":
        return
    dims = [d for d, n in enumerate(want.size) if n != 1]
    orders = [sorted(dims, key=lambda d: -g.stride[d]) for g in (want, have)]
    if orders[0] != orders[1] and want.numel:
        raise UnsupportedOpError(
            f"adds in the order of the strides of `out` ({want}), and rounds otherwise than in the order of its "
            "dimensions: reduce without out=, then copy_()"
        )


@rule(aten.logsumexp.out)
def logsumexp_out(engine: Engine, record: OpRecord) -> Any:
    """`logsumexp.out(Tensor self, int[1] dim, bool keepdim=False, *, out)`, by the steps of ATen's kernel."""
    (source, dims), keep, out = record.args[:2], record.args[2:] == (True,), record.kwargs["out"]
    _check_order(engine, out, output_geometry(aten.logsumexp.default, record.args, {}))
    inside, want = source.geometry.dtype, out.geometry.dtype
    if not inside.is_floating_point and not inside.is_complex:
        inside = torch.get_default_dtype()
    if inside == want or inside.is_complex or not source.geometry.numel:
        return engine.mutated(record)
    engine.storage(out.storage).check_writable(out.geometry)
    call, value = engine.emit.call, engine.read(source)
    if source.geometry.dtype != inside:
        value = call(aten._to_copy.default, value, dtype=inside)
    top = call(aten.amax.default, value, dims, True)
    infinite = call(aten.eq.Scalar, call(aten.abs.default, top), float("inf"))
    top = call(aten.masked_fill.Scalar, top, infinite, 0)
    power = call(aten.exp.default, call(aten.sub.Tensor, value, top))
    total = call(aten.sum.dim_IntList, power, dims, keep, dtype=want)
    top = top if keep else call(aten.squeeze.dims, top, dims)
    value = call(aten.add.Tensor, call(aten.log.default, total), top)
    if torch.promote_types(inside, want) != want:
        value = call(aten._to_copy.default, value, dtype=want)
    engine.write(out, engine.laid_out(value, out))
    return None
