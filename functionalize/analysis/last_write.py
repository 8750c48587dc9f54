"""The op at the end of a functional graph that a replay runs in place: the largest foreach or fused op on inputs.

    fused = aten._fused_adamw.default([w, v], [g, h], ...)            commit()
    return loss, fused[0][0], fused[0][1], ...                 ->     aten._fused_adamw_.default([w, v], [g, h], ...)
    epilogue: copy_(w, fused[0][0]); copy_(v, fused[0][1])            return loss, None, None, ...

So an optimizer's parameters and states have no second copy while a program without passes is replayed. The graph stays
pure: only the runner's code has the write, and only for a replay, which ignores a `Copy` of the result None.

Invariant: no input is written before all else that may fail has run, every guard among it. So a replay that
fails in the graph has changed nothing, also if this op is what fails. The op computes the same bits, see
`analysis/inplace_forms.py`. Needs no metadata.
Refuses an op
- if a tensor that it writes is no input, shares its storage with another one, or is written by another action;
- if a new value is read by another node, returned, guarded or copied twice;
- if the epilogue grows a storage, which may fail, or moves a tensor to another one;
- if a result of the graph, or another argument of the op, may be on the storage of a written input.
`reinplace` writes more: chains of ops, and temporaries.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from functionalize.analysis.aliases import is_view, leaves_gradients, results, storage_classes
from functionalize.analysis.inplace_forms import parts_of
from functionalize.discharge.rules.mutations import FunctionalForm, inplace_form
from functionalize.ir.epilogue import Copy, Resize
from functionalize.ir.outputs import Wrapped
from functionalize.program.program import Program

_LISTS = ("aten::_foreach_", "aten::_fused_")
_HIDDEN_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.lift.default})


@dataclass(frozen=True, slots=True, eq=False)
class LastWrite:
    """node: the functional op. target: its in-place form, called with the same arguments.

    parts: the `getitem` nodes of its results. guarded: the nodes of the values that the guards read, in order.
    """

    node: fx.Node
    target: Any
    parts: tuple[fx.Node, ...]
    guarded: tuple[Any, ...]

    @property
    def tail(self) -> tuple[fx.Node, ...]:
        """The nodes that run right before the output."""
        return self.node, *self.parts


def in_order(graph: fx.Graph, last: LastWrite | None) -> list[fx.Node]:
    """The nodes of a graph in the order of a replay."""
    if last is None:
        return list(graph.nodes)
    tail = dict.fromkeys(last.tail)
    nodes = [node for node in graph.nodes if node not in tail]
    nodes[-1:-1] = tail
    return nodes


def last_write(program: Program) -> LastWrite | None:
    """The op of a program that its replays run last and in place; None if there is none. Linear in nodes."""
    if program.stage != "FUNCTIONAL" or not any(type(a) is Copy for a in program.epilogue):
        return None
    for action in program.epilogue:
        if not isinstance(action, (Copy, Resize)):
            return None
        if isinstance(action, Resize) and action.nbytes > program.inputs[action.input].nbytes:
            return None
    slots = results(program.graph)
    copied = _copied(program, slots)
    if not copied:
        return None
    number = {n: i for i, n in enumerate(program.graph.find_nodes(op="placeholder"))}
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.nodes:
        form = _form(node)
        found = _written(node, form[1], copied, number) if form is not None else []
        if found:
            written[node] = found

    def nbytes(node: fx.Node) -> int:
        return sum(program.inputs[number[n]].nbytes for n in written[node])

    node = max(written, key=nbytes, default=None)
    if node is None or _is_read_otherwise(node, written[node], slots):
        return None
    form = _form(node)
    assert form is not None
    guarded = tuple(slots[guard.slot] for guard in program.value_guards)
    return LastWrite(node, form[0], tuple(_below(node)), guarded)


def _form(node: fx.Node) -> tuple[Any, FunctionalForm] | None:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.name.startswith(_LISTS):
        return None
    return inplace_form(node.target)


def _copied(program: Program, slots: tuple[Any, ...]) -> Mapping[fx.Node, Copy]:
    """The results that are read by one copy to a whole input, alone on its storage, and by nothing else."""
    classes = storage_classes(program)
    inputs, actions = Counter(classes), Counter(classes[a.input] for a in program.epilogue)
    named = Counter(slot for role in program.outputs for slot in _slots_of(role))
    named.update(guard.slot for guard in program.value_guards)
    named.update(a.slot for a in program.epilogue if isinstance(a, Copy))
    nodes = Counter(node for node in slots if isinstance(node, fx.Node))
    found = {}
    for action in program.epilogue:
        if not isinstance(action, Copy):
            continue
        storage, spec = classes[action.input], program.inputs[action.input]
        alone = inputs[storage] == actions[storage] == 1 and action.geometry == spec.geometry
        alone = alone and action.geometry.is_dense
        node = slots[action.slot]
        if alone and named[action.slot] == 1 and nodes[node] == 1 and len(node.users) == 1:
            found[node] = action
    return found


def _slots_of(role: Any) -> Iterator[int]:
    if isinstance(role, Wrapped):
        for inner in role.inner.values():
            yield from _slots_of(inner)
    elif (slot := getattr(role, "slot", None)) is not None:
        yield slot


def _written(
    node: fx.Node,
    form: FunctionalForm,
    copied: Mapping[fx.Node, Copy],
    number: Mapping[fx.Node, int],
) -> list[fx.Node]:
    """The placeholders that an op would write in place; empty if it may not write all that its schema says.

    number: of each placeholder, its number.
    """
    if any(n.target is not operator.getitem for n in node.users) or form.order or form.defaults:
        return []
    written = list[fx.Node]()
    for (at, name), index in zip(form.written, form.results, strict=True):
        in_place = at is not None and at < len(node.args)
        old: Any = node.args[at] if in_place else node.kwargs.get(name)  # type: ignore[index]
        lists = [node] if form.single else parts_of(node).get(index, [])
        if name == "grads" and leaves_gradients(node):
            if any(each.users for each in lists):
                return []
            continue
        parts = {i: n for each in lists for i, n in parts_of(each).items()}
        if not isinstance(old, (list, tuple)) or len(parts) != len(old):
            return []
        for i, each in enumerate(old):
            new = parts.get(i, [])
            if len(new) != 1 or new[0] not in copied or number.get(each) != copied[new[0]].input:
                return []
            written.append(each)
    return written


def _below(node: fx.Node) -> Iterator[fx.Node]:
    """The `getitem` nodes of a node, at all depths."""
    for user in node.users:
        if user.target is operator.getitem:
            yield user
            yield from _below(user)


def _is_read_otherwise(op: fx.Node, written: Sequence[fx.Node], slots: tuple[Any, ...]) -> bool:
    """Whether a result of the graph, or another argument of `op`, may be on the storage of an input that it writes."""
    near = set(written)
    for node in op.graph.nodes:
        if node.op == "call_function" and not near.isdisjoint(node.all_input_nodes):
            target: Any = node.target
            is_new = getattr(target, "namespace", "") == "aten" and not any(
                each.alias_info is not None for each in target._schema.returns
            )
            if not is_new or is_view(node) or target in _HIDDEN_VIEWS:
                near.add(node)
    arguments: list[fx.Node] = []
    fx.node.map_arg((op.args, op.kwargs), arguments.append)
    again = sum(node in near for node in arguments) != len(written)
    return again or any(node in near for node in slots if isinstance(node, fx.Node))
