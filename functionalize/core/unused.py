"""Inputs that a program does not need: removed, and everything that names inputs by number renumbered.

A step is given every parameter, buffer and state it can reach; a program keeps what its graph reads, what
its epilogue writes and what its outputs are views of. An FSDP2 parameter's unsharded storage, empty on entry
and on exit, disappears here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functionalize.core.inputs import InputSpec, WholeStorage
from functionalize.core.program import Program, Wrapped


def drop_unused_inputs(program: Program) -> list[int]:
    """Remove inputs that no node, output or action needs; returns the old numbers of those kept.

    Guards are left alone: make them for the inputs that are kept.
    """
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    needed = {i for i, n in enumerate(placeholders) if n.users}
    needed |= {i for item in (*program.outputs, *program.epilogue) for i in _inputs_of(item)}
    for i in sorted(needed, reverse=True):
        source = program.inputs[i].source
        if isinstance(source, WholeStorage):
            needed.add(source.input)
    kept = sorted(needed)
    new = {old: i for i, old in enumerate(kept)}
    for i, node in enumerate(placeholders):
        if i not in needed:
            program.graph.erase_node(node)
    program.inputs = tuple(_renumbered_source(program.inputs[i], new) for i in kept)
    program.outputs = tuple(_renumbered(role, new) for role in program.outputs)
    program.epilogue = tuple(_renumbered(action, new) for action in program.epilogue)
    return kept


def _inputs_of(item: Any) -> list[int]:
    """The inputs that an output role or an action names."""
    if isinstance(item, Wrapped):
        return [i for role in item.inner.values() for i in _inputs_of(role)]
    return [i for name in ("input", "other") if (i := getattr(item, name, None)) is not None]


def _renumbered(item: Any, new: dict[int, int]) -> Any:
    if isinstance(item, Wrapped):
        return replace(item, inner={k: _renumbered(r, new) for k, r in item.inner.items()})
    names = [n for n in ("input", "other") if getattr(item, n, None) is not None]
    return replace(item, **{n: new[getattr(item, n)] for n in names}) if names else item


def _renumbered_source(spec: InputSpec, new: dict[int, int]) -> InputSpec:
    if not isinstance(spec.source, WholeStorage):
        return spec
    return replace(spec, source=replace(spec.source, input=new[spec.source.input]))
