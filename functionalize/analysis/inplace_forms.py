"""The tensors that the ops of a pure graph would write in their in-place forms. An analysis for the pass `reinplace`.

    lerp = aten.lerp.Scalar(m, g, 0.1)       Write(old=m, new=[lerp])
    add = aten._foreach_add.List([a, b], c)  Write(old=a, new=[getitem]), Write(old=b, new=[getitem_1])
    getitem, getitem_1 = add[0], add[1]

The in-place form of an op is the mutating op of which it is the functional form (`rules/mutations.py`), or its `out=`
form where eager called that. The two are known to compute the same bits where each element depends only on the elements
of the arguments at the same index: ops with torch's tag `pointwise`, lists (foreach, fused), and copies.
Refusals: random ops; lists of results that are read other than by `getitem`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.analysis.aliases import leaves_gradients
from functionalize.discharge.rules.mutations import (
    FunctionalForm,
    functional_form,
    inplace_form,
    is_mutating,
)
from functionalize.ir.generators import is_random_op
from functionalize.ir.ops import geometry_of
from functionalize.util.by_address import by_address

aten = torch.ops.aten

_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")
_EXACT = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor)  # nothing to round


@dataclass(slots=True, eq=False)
class Write:
    """One tensor that an op would write in place.

    at: the argument (position or name), and the index in it if that is a list, else None.
    old: the node that is that argument now.
    new: the nodes of its new contents. value: a fake tensor of the geometry of these.
    spared: whether the kernel leaves it unchanged although the schema marks it as written.
    """

    op: fx.Node
    at: tuple[int | str, int | None]
    old: fx.Node
    new: list[fx.Node]
    value: Tensor
    spared: bool

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return geometry_of(self.value).nbytes


def form_of(node: fx.Node) -> tuple[Any, FunctionalForm] | None:
    """The in-place form of a node's op, if it is known to compute the same bits; else None."""
    is_exact, by_element = _exactness(node.target)
    if not is_exact:
        return None
    return inplace_form(node.target) or (_out_of(node) if by_element else None)


@by_address
def _exactness(target: Any) -> tuple[bool, bool]:
    """Whether the in-place form of an op is known to compute the same bits; whether as each element is by itself."""
    if not hasattr(target, "_schema") or target.namespace != "aten" or is_random_op(target):
        return False, False
    by_element = torch.Tag.pointwise in target.tags or target in _EXACT
    return by_element or target._schema.name.startswith(_LISTS), by_element


def _out_of(node: fx.Node) -> Any:
    """The `out=` overload, if eager called that (`maximum(a, b, out=a)`): it can write to the node's first argument."""
    recorded = node.meta.get("original_aten")
    if recorded is None or not hasattr(recorded, "_schema") or not is_mutating(recorded):
        return None
    form = functional_form(recorded)
    only = form.single and form.dropped and not (form.order or form.defaults or form.fills_device)
    same = only and form.target is node.target and [name for _, name in form.written] == ["out"]
    return (recorded, form) if same and isinstance(node.args[0], fx.Node) else None


def writes_of(node: fx.Node) -> list[Write] | None:
    """The tensors that a node would write in place; None if it has no in-place form or a refusal applies."""
    found = form_of(node)
    if found is None:
        return None
    lists = [n for n in (node, *node.users) if isinstance(n.meta.get("val"), (list, tuple))]
    if any(user.target is not operator.getitem for n in lists for user in n.users):
        return None
    form, value, writes = found[1], node.meta["val"], list[Write]()
    if form.dropped:
        first: Any = node.args[0]
        return [Write(node, ("out", None), first, [node], value, False)]
    for (at, name), index in zip(form.written, form.results, strict=True):
        place: int | str = at if at is not None and at < len(node.args) else name
        old: Any = node.args[place] if isinstance(place, int) else node.kwargs.get(name)
        new = [node] if form.single else parts_of(node).get(index, [])
        like = value if form.single else value[index]
        spared = name == "grads" and leaves_gradients(node)
        if isinstance(old, fx.Node):
            writes.append(Write(node, (place, None), old, new, like, spared))
            continue
        parts = [parts_of(each) for each in new]
        for i, each in enumerate(old or ()):
            contents = [n for p in parts for n in p.get(i, [])]
            writes.append(Write(node, (place, i), each, contents, like[i], spared))
    return writes or None


def parts_of(node: fx.Node) -> dict[Any, list[fx.Node]]:
    """The `getitem` nodes of a node whose value is a tuple or list, by index."""
    found: dict[Any, list[fx.Node]] = {}
    for user in node.users:
        if user.target is operator.getitem:
            found.setdefault(user.args[1], []).append(user)
    return found


def fits(write: Write) -> bool:
    """Whether the new contents fit into the old tensor: same geometry and device, no overlapping elements."""
    old, new = write.old.meta["val"], write.value
    if not isinstance(old, Tensor) or old.layout is not torch.strided:
        return False
    own = geometry_of(old)
    plain = own.is_dense and not (own.conj or own.neg)
    same = geometry_of(new)._replace(offset=own.offset) == own and new.device == old.device
    return plain and same
