"""The one text form of a program: snapshots, error windows and the command line all use it.

program(a: float32[8] in 0 bytes):
    full = aten.full.default([8], 1, dtype=float32)
    add = aten.add.Tensor(full, 1)
    return (add, full)
epilogue:
    resize_storage_bytes_(a, 32)
    copy_(a, full)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.ir.commit import is_commit
from functionalize.ir.epilogue import Action, Copy, Resize, Set
from functionalize.ir.guards import NumberGuard
from functionalize.ir.inputs import Captured, chain_of
from functionalize.ir.ops import Geometry
from functionalize.ir.outputs import (
    Constant,
    InputView,
    LeafItself,
    Result,
    SameAs,
    SourceItself,
    Wrapped,
)
from functionalize.ir.phases import phase_of
from functionalize.ir.scalars import applied_text, expression_text
from functionalize.program.executable import Executable


def argument_text(arg: Any) -> str:
    """One argument of a node."""
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, list):
        return f"[{', '.join(argument_text(a) for a in arg)}]"
    if isinstance(arg, tuple):
        inner = ", ".join(argument_text(a) for a in arg)
        return f"({inner},)" if len(arg) == 1 else f"({inner})"
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return str(arg).removeprefix("torch.")
    if isinstance(arg, torch.device):
        return str(arg)
    if hasattr(arg, "_schema"):  # an op that is an argument of torch's `auto_functionalized`
        return str(arg)
    return repr(arg)


def node_text(node: fx.Node) -> str:
    """One line for one node."""
    if node.op == "get_attr":
        return f"{node.name} = constant {node.target}"
    if node.op == "output":
        returned = node.args[0]
        return (
            f"return {argument_text(tuple(returned) if isinstance(returned, list) else returned)}"
        )
    if node.target is operator.getitem:
        return f"{node.name} = {argument_text(node.args[0])}[{node.args[1]}]"
    parts = [argument_text(a) for a in node.args]
    if is_commit(node):
        return f"commit({', '.join(parts)})"
    number = applied_text(node.target, parts)
    if number is not None:
        return f"{node.name} = {number}"
    for k, v in node.kwargs.items():
        if not (k == "device" and str(v) == "cpu"):
            parts.append(f"{k}={argument_text(v)}")
    return f"{node.name} = {node.target}({', '.join(parts)})"


def window_text(nodes: Sequence[fx.Node], at: fx.Node, around: int = 2) -> str:
    """The lines around one node, that one marked."""
    index = nodes.index(at)
    shown = nodes[max(0, index - around) : index + around + 1]
    return "\n".join(f"{'>' if n is at else ' '} {node_text(n)}" for n in shown)


def _action_text(action: Action, program: Executable, slots: Sequence[Any]) -> str:
    spec = program.inputs[action.input]
    if isinstance(action, Resize):
        return f"resize_storage_bytes_({spec.name}, {action.nbytes})"
    seen = spec.name + _as(action.geometry, spec.geometry)
    if isinstance(action, Copy):
        return f"copy_({seen}, {argument_text(slots[action.slot])})"
    assert isinstance(action, Set)
    source = (
        argument_text(slots[action.slot])
        if action.slot is not None
        else program.inputs[action.other or 0].name
    )
    return f"set_({spec.name}, {source} as {action.geometry})"


def _as(geometry: Geometry | None, own: Geometry | None) -> str:
    return "" if geometry is None or geometry == own else f" as {geometry}"


def _output_text(role: Any, program: Executable, slots: Sequence[Any]) -> str:
    if isinstance(role, Result):
        return argument_text(slots[role.slot]) + _as(role.geometry, None)
    if isinstance(role, InputView):
        return program.inputs[role.input].name + _as(role.geometry, None)
    if isinstance(role, LeafItself):
        return f"argument {role.leaf}"
    if isinstance(role, SourceItself):
        found = (s.name for s in program.inputs if role.source in chain_of(s.source))
        return next(found, f"the tensor of a {type(role.source).__name__}")
    if isinstance(role, SameAs):
        return f"output {role.output}"
    if isinstance(role, Wrapped):
        parts = [r for r in role.inner.values() if not isinstance(r, Constant)]
        inner = ", ".join(_output_text(r, program, slots) for r in parts)
        return f"{role.kind.__name__}({inner})"
    assert isinstance(role, Constant)
    if not isinstance(role.value, Tensor):
        return repr(role.value)
    for spec in program.inputs:
        if isinstance(spec.source, Captured) and spec.source.value is role.value:
            return spec.name
    return f"a {type(role.value).__name__} of size {list(role.value.shape)}"


def where_text(node: fx.Node) -> str:
    """Where an op comes from: its phase, its module, what it does for FSDP2, its hook."""
    parts = [phase_of(node), node.meta.get("module")]
    if "fsdp" in node.meta:
        group, role = node.meta["fsdp"]
        parts.append(f"FSDP {role} of {group or 'the root'}")
    elif "hook" in node.meta:
        parts.append(node.meta["hook"][0])
    return ", ".join(filter(None, parts))


def program_text(
    program: Executable, keep: Callable[[fx.Node], bool] | None = None, where: bool = False
) -> str:
    """The whole program; `keep` filters the ops shown. where: with a comment where `where_text` changes."""
    nodes = list(program.graph.nodes)
    lines = ["program("]
    for spec in program.inputs:
        is_tensor = isinstance(spec.geometry, Geometry)
        emptied = " in 0 bytes" if is_tensor and spec.nbytes == 0 and spec.geometry.numel else ""
        lines.append(f"    {spec.name}: {spec.geometry if is_tensor else 'a number'}{emptied},")
    lines.append("):")
    slots: Sequence[Any] = ()
    last = ""
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            slots = tuple(node.args[0])
            continue
        if keep is None or keep(node):
            if where and (found := where_text(node)) != last:
                last = found
                lines.append(f"    # {found or 'elsewhere'}")
            lines.append(f"    {node_text(node)}")
    outs = ", ".join(_output_text(r, program, slots) for r in program.outputs)
    lines.append(f"    return {outs}")
    if program.epilogue:
        lines.append("epilogue:")
        lines += [f"    {_action_text(a, program, slots)}" for a in program.epilogue]
    numbers = [fact for fact in program.facts if isinstance(fact, NumberGuard)]
    if numbers:
        lines.append("guards on numbers:")
        for number in numbers:
            lines.append(f"    {expression_text(number.expression)} is {number.value!r}")
    if program.value_guards:
        lines.append("guards on values:")
        for guard in program.value_guards:
            lines.append(f"    {argument_text(slots[guard.slot])} == {guard.value!r}")
    return "\n".join(lines) + "\n"
