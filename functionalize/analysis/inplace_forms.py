"""What the ops of a pure graph would write if they were done in place. Not a pass: what `reinplace` asks.

    lerp = aten.lerp.Scalar(m, g, 0.1)       Write(old=m, new=[lerp])
    add = aten._foreach_add.List([a, b], c)  Write(old=a, new=[getitem]), Write(old=b, new=[getitem_1])
    getitem, getitem_1 = add[0], add[1]

The in-place form of an op is the one whose functional form it is (`rules/mutations.py`), or its `out=` form where
eager called that. It is known to give the same bits where each element is made of the elements of the arguments in
its place: by torch's tag, for the lists (foreach, fused), and for copies.
Refusals: random ops; lists that are read otherwise than by their elements.
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
from functionalize.ir.generators import is_random
from functionalize.ir.ops import geometry_of

aten = torch.ops.aten

_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_")
_EXACT = (aten.copy.default, aten.fill.Scalar, aten.fill.Tensor)  # nothing to round


@dataclass(slots=True, eq=False)
class Write:
    """One tensor that an op would write in place.

    at: which argument, and which element of it (None: all). old: what it is now. new: the nodes that are its new
    contents, which are like `value`. spared: the kernel leaves it as it is.
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
    """The in-place form of a node's op, if it is known to give the same bits."""
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "_schema"):
        return None
    if is_random(node) or target.namespace != "aten":
        return None
    by_element = torch.Tag.pointwise in target.tags or target in _EXACT
    if not by_element and not target._schema.name.startswith(_LISTS):
        return None
    return inplace_form(target) or (_out_of(node) if by_element else None)


def _out_of(node: fx.Node) -> Any:
    """The overload that writes to an `out`, if eager called that, with its first argument (`maximum(a, b, out=a)`)."""
    recorded = node.meta.get("original_aten")
    if recorded is None or not hasattr(recorded, "_schema") or not is_mutating(recorded):
        return None
    form = functional_form(recorded)
    only = form.single and form.dropped and not (form.order or form.defaults or form.fills_device)
    same = only and form.target is node.target and [name for _, name in form.written] == ["out"]
    return (recorded, form) if same and isinstance(node.args[0], fx.Node) else None


def writes_of(node: fx.Node) -> list[Write] | None:
    """What a node would write in place; None if it has no in-place form, or is read otherwise than by its parts."""
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
            its = [n for p in parts for n in p.get(i, [])]
            writes.append(Write(node, (place, i), each, its, like[i], spared))
    return writes or None


def parts_of(node: fx.Node) -> dict[Any, list[fx.Node]]:
    """The nodes that are parts of a tuple or list, by index."""
    found: dict[Any, list[fx.Node]] = {}
    for user in node.users:
        if user.target is operator.getitem:
            found.setdefault(user.args[1], []).append(user)
    return found


def fits(write: Write) -> bool:
    """Whether the new contents fit where the old ones are: same layout, and no element twice."""
    old, new = write.old.meta["val"], write.value
    if not isinstance(old, Tensor) or old.layout is not torch.strided:
        return False
    own = geometry_of(old)
    plain = own.is_dense and not (own.conj or own.neg)
    same = geometry_of(new)._replace(offset=own.offset) == own and new.device == old.device
    return plain and same
