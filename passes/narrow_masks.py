"""Compute no gradient that nobody reads, where a backward op makes several.

    convolution_backward = aten.convolution_backward(..., [True, True, True])      ..., [True, False, False])
    getitem = convolution_backward[0]                                              getitem, read as before

Autograd asks an op for the gradients of all tensors that require one; the step may drop some of them: `p.grad = None`
before the optimizer runs, `torch.autograd.grad` of which one result is read. Where each gradient has an op of its own,
nothing is left of it in a program anyway.

Invariant: the gradients that are read are equal bit for bit. A table says which parts of an op do not depend on each
other; the parts were compared on the CPU for shapes, layouts and dtypes. The gradients of weight and bias, which one
kernel may compute together, are left out together. Linear in nodes.

Refuses
- other ops with such an argument, and an op of which something else than single results is read;
- an op of which nothing is read: `drop_dead_code` erases it;
- the gradient of the input of `native_group_norm_backward`: torch 2.13 crashes without it, in channels-last layout.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.passes.base import STAGES, Pass
from functionalize.program.program import Program

aten = torch.ops.aten

# For each op, the sets of results that can be left out without a change of the others.
_INPUT, _WEIGHTS = (0,), (1, 2)
_PARTS: Mapping[Any, tuple[tuple[int, ...], ...]] = MappingProxyType(
    {
        aten.convolution_backward.default: (_INPUT, _WEIGHTS),
        aten.grid_sampler_2d_backward.default: (_INPUT,),
        aten.native_batch_norm_backward.default: (_INPUT, _WEIGHTS),
        aten.native_group_norm_backward.default: (_WEIGHTS,),
        aten.native_layer_norm_backward.default: (_INPUT, _WEIGHTS),
    }
)


@dataclass(frozen=True)
class NarrowMasks(Pass):
    """Leave out the results of backward ops that nobody reads, by their `output_mask`."""

    name: ClassVar[str] = "narrow_masks"
    accepts: ClassVar[tuple[str, ...]] = STAGES

    def apply(self, program: Program) -> int:
        return sum(_narrowed(node) for node in list(program.graph.nodes) if node.target in _PARTS)


def _narrowed(node: fx.Node) -> bool:
    """Leave out what can be of one op; whether that was anything."""
    if any(user.target is not operator.getitem for user in node.users):
        return False
    at = [a.name for a in node.target._schema.arguments].index("output_mask")  # type: ignore[union-attr]
    mask: Any = node.args[at] if at < len(node.args) else node.kwargs["output_mask"]
    read = {user.args[1] for user in node.users if user.users}
    computed = {i for i, on in enumerate(mask) if on}
    drop: set[Any] = set()
    for part in _PARTS[node.target]:
        if read.isdisjoint(part):
            drop |= computed.intersection(part)
    if not drop or drop == computed:
        return False
    for user in list(node.users):
        if user.args[1] in drop:
            node.graph.erase_node(user)
    narrower = [on and i not in drop for i, on in enumerate(mask)]
    if at < len(node.args):
        node.update_arg(at, narrower)
    else:
        node.update_kwarg("output_mask", narrower)
    value = node.meta["val"]
    node.meta["val"] = type(value)(None if i in drop else v for i, v in enumerate(value))
    return True
