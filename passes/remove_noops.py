"""Remove ops that return their argument unchanged, and views that undo each other.

    t = aten.t(w); t_1 = aten.t(t); mm = aten.mm(x, t_1)     mm = aten.mm(x, w)
    detach = aten.detach(x); view = aten.view(detach, [4])   x, if it is of size [4]
    (a,) = aten.split_with_sizes(x, [4])                     x, likewise
    pow = aten.pow(x, 1)                                     clone = aten.clone(x)

A view is removed if its source, or a value further up its chain, has the same size, stride, offset and dtype.
An op that copies its argument bit for bit becomes a `clone`; `elide_copies` decides whether a copy can be removed,
which depends on the owner of the memory. (Inductor's `remove_noop_ops` considers neither an epilogue nor lifetimes, nor
views that undo each other.)

Invariant: every op computes on values with the same geometry, on the same memory. No memory lives longer.

Refuses
- a view that is returned, if its source is an input, a constant or returned, too;
- an `as_strided` of an input that may begin anywhere in its storage (in a bare graph: no guard says where);
- a copy whose result has another layout than a `clone` of its argument;
- arithmetic that changes nothing but the payload of a NaN (`x * 1`, `x + 0`); values of unknown sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from functionalize.ir.ops import geometry_of
from functionalize.passes.base import Pass
from functionalize.passes.metadata import NewValues
from functionalize.passes.views import Geometries, erase_unused, is_plain, same_above
from functionalize.program.program import Program
from functionalize.util.by_address import by_address

aten = torch.ops.aten
_CLONE = aten.clone.default


@dataclass(frozen=True)
class RemoveNoops(Pass):
    """Remove ops without effect."""

    name: ClassVar[str] = "remove_noops"

    def apply(self, program: Program) -> int:
        done, guarded, known = 0, bool(program.guards), Geometries(program)
        values = NewValues(program.fakes)
        for node in list(program.graph.nodes):
            same = same_above(node, guarded, known)
            if same is not None:
                node.replace_all_uses_with(same)
                erase_unused(node)
                done += 1
            elif _may_copy(node.target) and node.users and known[node] is not None:
                done += _to_clone(node, values)
        return done


# -- copies ----------------------------------------------------------------------------------------


def _argument(node: fx.Node, at: int, name: str, default: Any = None) -> Any:
    return node.args[at] if at < len(node.args) else node.kwargs.get(name, default)


def _of_power(node: fx.Node) -> Any:
    return node.args[0] if _argument(node, 1, "exponent") == 1 else None


def _of_cat(node: fx.Node) -> Any:
    tensors = _argument(node, 0, "tensors")
    return tensors[0] if len(tensors) == 1 else None


def _of_repeat(node: fx.Node) -> Any:
    return node.args[0] if all(n == 1 for n in _argument(node, 1, "repeats")) else None


def _of_padding(node: fx.Node) -> Any:
    return node.args[0] if not any(_argument(node, 1, "pad")) else None


def _of_rounding(node: fx.Node) -> Any:
    value = node.meta["val"]
    return None if value.is_floating_point() else node.args[0]


def _of_slice(node: fx.Node) -> Any:
    """The source of a `slice_scatter` that overwrites its whole destination."""
    source, step = _argument(node, 1, "src"), _argument(node, 5, "step", 1)
    return source if step == 1 and source.meta["val"].shape == node.meta["val"].shape else None


_COPIED: Mapping[Any, Callable[[fx.Node], Any]] = MappingProxyType(
    {
        aten.pow.Tensor_Scalar: _of_power,  # torch's kernels copy for this exponent
        aten.cat.default: _of_cat,
        aten.repeat.default: _of_repeat,
        aten.constant_pad_nd.default: _of_padding,
        aten.slice_scatter.default: _of_slice,
        **{op.default: _of_rounding for op in (aten.ceil, aten.floor, aten.round, aten.trunc)},
    }
)


@by_address
def _may_copy(target: Any) -> bool:
    return target in _COPIED


def _to_clone(node: fx.Node, values: NewValues) -> bool:
    """Replace an op that copies its argument by `clone`, unless the layout would differ."""
    source = _COPIED[node.target](node)
    if not isinstance(source, fx.Node) or not is_plain(source.meta.get("val")):
        return False
    with node.graph.inserting_before(node):
        clone = node.graph.create_node("call_function", _CLONE, (source,), name="clone")
    clone.meta.update(node.meta)
    values.set(clone)
    old, new = node.meta["val"], clone.meta["val"]
    assert isinstance(old, Tensor)
    if geometry_of(old) != geometry_of(new) or old.device != new.device:
        node.graph.erase_node(clone)
        return False
    node.replace_all_uses_with(clone)
    erase_unused(node)
    return True
