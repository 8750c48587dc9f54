"""Matrix products with `out=` that eager computes by other calls of the BLAS than the functional op.

    torch.mm(a, b, out=o.t())                   ->  o' = aten.mm(b.t(), a.t())
    torch.nn.functional.linear(x, w, b, out=o)  ->  o' = aten.matmul(x, w.t()) + b     (`x` is no matrix)

A product into columns is another call of the BLAS than one into rows, and may round differently. The
functional ops make rows; their product of the transposes makes the same call as eager does.
`linear` folds `x` to a matrix and calls `addmm`, which rounds once; `linear.out` rounds the product, and then
the sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from functionalize.core.ops import Geometry, OpRecord, TensorRef, contiguous_geometry
from functionalize.core.rules.layout import output_geometry
from functionalize.core.rules.mutations import functional_form
from functionalize.core.rules.registry import Engine, rule
from functionalize.core.rules.views import step_of
from functionalize.core.values import Call

aten = torch.ops.aten


def _by_rows(g: Geometry) -> bool:
    """Whether ATen's `addmm` asks the BLAS for the transpose of this result."""
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

    def turned(ref: TensorRef) -> Any:
        value = engine.read(ref)
        if len(ref.geometry.size) < 2:
            value = engine.emit.call(aten.expand.default, value, list(want.size))
        return engine.emit.call(aten.transpose.int, value, -2, -1)

    *added, left, right = record.args
    target = functional_form(record.target).target
    scales = {k: v for k, v in record.kwargs.items() if k != "out"}
    product = engine.emit.call(target, *(turned(ref) for ref in (*added, right, left)), **scales)
    value = engine.emit.call(aten.t.default, product)
    have = contiguous_geometry((want.size[1], want.size[0]), left.geometry.dtype)
    have = have._replace(size=want.size, stride=have.stride[::-1])
    engine.write(out, engine.fit(value, have, out))
    return None


@rule(aten.linear.out)
def linear_out(engine: Engine, record: OpRecord) -> Any:
    """`linear.out(Tensor input, Tensor weight, Tensor? bias=None, *, out)`, as ATen's kernel goes."""
    (source, weight), bias = record.args[:2], (record.args[2:] or (None,))[0]
    out, turned = record.kwargs["out"], _turned(engine, weight)
    matrices = len(source.geometry.size) == len(weight.geometry.size) == 2
    if matrices and bias is not None:
        return matrix_product(
            engine, replace(record, target=aten.addmm.out, args=(bias, source, turned))
        )
    if matrices:
        return matrix_product(engine, replace(record, target=aten.mm.out, args=(source, turned)))
    engine.storage(out.storage).check_writable(out.geometry)
    # `matmul` asks whether the weight wants a gradient; with `out=` it does not
    columns = engine.emit.call(aten.detach.default, engine.read(turned))
    value = engine.emit.call(aten.matmul.default, engine.read(source), columns)
    have = output_geometry(aten.matmul.default, (source, turned), {})
    engine.write(out, engine.fit(value, have, out))
    if bias is not None:
        engine.mutated(replace(record, target=aten.add_.Tensor, args=(out, bias), kwargs={}))
    return None


def _turned(engine: Engine, ref: TensorRef) -> TensorRef:
    """The transpose of a matrix; anything of fewer dimensions itself."""
    g: Geometry = ref.geometry
    turned = g._replace(size=g.size[::-1], stride=g.stride[::-1])
    step = step_of(Call(aten.t.default, ()), g, turned)
    if step is not None:
        engine.storage(ref.storage).add_view(g, turned, step)
    return TensorRef(ref.storage, turned)
