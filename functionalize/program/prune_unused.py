"""Remove inputs and results that a program does not need, and renumber references to the others.

A recording of a step has every reachable parameter, buffer and state as an input; a program keeps those that its
graph reads, its epilogue writes or its outputs are views of. An FSDP2 parameter's unsharded storage, empty on entry
and on exit, disappears here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functionalize.ir.inputs import InputSpec, WholeStorage
from functionalize.ir.outputs import Wrapped
from functionalize.program.executable import Executable


def drop_unused_inputs(program: Executable) -> list[int]:
    """Remove inputs that no node, output or action needs; returns the old numbers of those kept.

    Guards are not renumbered: make them after this, for the inputs that are kept.
    """
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    needed = {i for i, n in enumerate(placeholders) if n.users}
    needed |= {
        i for item in (*program.outputs, *program.epilogue) for i in _numbers_of(item, _INPUT)
    }
    for i in sorted(needed, reverse=True):
        source = program.inputs[i].source
        if isinstance(source, WholeStorage):
            needed.add(source.input)
    kept = sorted(needed)
    if len(kept) == len(placeholders):
        return kept
    new = {old: i for i, old in enumerate(kept)}
    for i, node in enumerate(placeholders):
        if i not in needed:
            program.graph.erase_node(node)
    program.inputs = tuple(_renumbered_source(program.inputs[i], new) for i in kept)
    program.outputs = tuple(_renumbered(role, new) for role in program.outputs)
    program.epilogue = tuple(_renumbered(action, new) for action in program.epilogue)
    program.writes = tuple(new[i] for i in program.writes)
    return kept


def drop_unused_results(program: Executable) -> None:
    """Drop results of the graph that no output, action or guard names. The graph's output must be flat."""
    named = (*program.outputs, *program.epilogue, *program.value_guards)
    kept = sorted({slot for item in named for slot in _numbers_of(item, _SLOT)})
    new = {old: i for i, old in enumerate(kept)}
    (output,) = program.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    output.args = (tuple(returned[slot] for slot in kept),)
    program.outputs = tuple(_renumbered(role, new, _SLOT) for role in program.outputs)
    program.epilogue = tuple(_renumbered(action, new, _SLOT) for action in program.epilogue)
    program.value_guards = tuple(_renumbered(each, new, _SLOT) for each in program.value_guards)


_INPUT, _SLOT = ("input", "other"), ("slot",)  # the fields that name inputs, and results


def _numbers_of(item: Any, fields: tuple[str, ...]) -> list[int]:
    """The inputs, or results, that an output role, an action or a guard names."""
    if isinstance(item, Wrapped):
        return [i for role in item.inner.values() for i in _numbers_of(role, fields)]
    return [i for name in fields if (i := getattr(item, name, None)) is not None]


def _renumbered(item: Any, new: dict[int, int], fields: tuple[str, ...] = _INPUT) -> Any:
    if isinstance(item, Wrapped):
        inner = {k: _renumbered(role, new, fields) for k, role in item.inner.items()}
        return replace(item, inner=inner)
    names = [n for n in fields if getattr(item, n, None) is not None]
    return replace(item, **{n: new[getattr(item, n)] for n in names}) if names else item


def _renumbered_source(spec: InputSpec, new: dict[int, int]) -> InputSpec:
    if not isinstance(spec.source, WholeStorage):
        return spec
    return replace(spec, source=replace(spec.source, input=new[spec.source.input]))
