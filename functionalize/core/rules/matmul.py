"""Matrix products written to a matrix that is not row-major.

    torch.mm(a, b, out=o.t())  ->  o' = aten.mm(b.t(), a.t())

A product into columns is another call of the BLAS than one into rows, and may round differently. The
functional ops make rows; their product of the transposes makes the same call as eager does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from functionalize.core.ops import Geometry, OpRecord, TensorRef, contiguous_geometry
from functionalize.core.rules.mutations import functional_form
from functionalize.core.rules.registry import rule

if TYPE_CHECKING:
    from functionalize.core.discharge import Functionalizer

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
def matrix_product(engine: Functionalizer, record: OpRecord) -> Any:
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
