"""The metadata that passes read in `node.meta`, filled in on first access to a program's graph module.

val            a fake tensor like the node's value
tensor_meta    its size, stride and dtype, as FX passes read them
stack_trace    the user's frames
seq_nr         the sequence number of the autograd node; autograd_node: its name
original_aten  the op that was recorded, where the node is its functional counterpart
phase          the part of a training step that the op belongs to, see `ir/phases.py`
module         the module that the op belongs to, if that was recorded

A number that Python reads has as `val` the value that was recorded for it in `hint`. A result whose size depends on
data has the geometry that was recorded for it in `sized`; an early guard checks the size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import disable_current_modes
from functionalize.ir.fake_mode import fake_like
from functionalize.ir.fakes import Fakes
from functionalize.ir.inputs import InputSpec
from functionalize.ir.ops import Geometry, TensorRef, geometry_of, tensor_metadata
from functionalize.ir.phases import set_phases
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.user_stack import trace_and_update


class GraphWithInputs(Protocol):
    """A graph, its inputs (one per placeholder), and its constants by name."""

    @property
    def graph(self) -> fx.Graph: ...

    @property
    def inputs(self) -> Sequence[InputSpec]: ...

    @property
    def constants(self) -> Mapping[str, Any]: ...


def annotate(program: GraphWithInputs) -> None:
    """Fill the `meta` of every node."""
    with only_young_collections():  # the objects made here live as long as the program
        read_records(program.graph)
        propagate(program)


def read_records(graph: fx.Graph) -> None:
    """Fill the metadata that comes from the recorded ops, and drop the records."""
    # By traceback: many nodes share a record, and all records of a backward share one traceback.
    known: dict[int, tuple[str | None, bool]] = {}
    updates: list[fx.Node] = []
    for node in graph.nodes:
        record = node.meta.get("record")
        if record is None:
            continue
        stack = id(record.traceback)
        if stack not in known:
            known[stack] = trace_and_update(record.traceback)
        trace, update = known[stack]
        if update:
            updates.append(node)
        if trace:
            node.meta["stack_trace"] = trace
        if record.seq_nr is not None:
            node.meta["seq_nr"] = record.seq_nr
        if record.autograd_node is not None:
            node.meta["autograd_node"] = record.autograd_node
        if record.meta.get("module"):
            node.meta["module"] = record.meta["module"]
        node.meta["original_aten"] = record.target
        if node.target is record.target and torch.Tag.dynamic_output_shape in node.target.tags:
            node.meta["sized"] = _recorded(record.outputs, record.meta.get("born", {}))
    set_phases(graph, updates)
    for node in graph.nodes:
        node.meta.pop("record", None)


def _recorded(outputs: Any, born: Mapping[int, Any]) -> Any:
    """(geometry, device) of a result, or a list of them; None if it is not all on new storages."""
    if isinstance(outputs, TensorRef):
        found = born.get(outputs.storage)
        return None if found is None else (outputs.geometry, found[1])
    made = [_recorded(each, born) for each in outputs]
    return None if None in made else made


def propagate(program: GraphWithInputs) -> None:
    """Set `val` and `tensor_meta` of every node by running the graph on fake tensors; linear in nodes."""
    fakes = Fakes()
    specs = iter(program.inputs)
    env: dict[fx.Node, Any] = {}
    with disable_current_modes(), torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                value = fake_input(fakes, next(specs))
            elif node.op == "get_attr":
                constant = program.constants[str(node.target)]
                value = fake_like(fakes.mode, constant)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                if (value := node.meta.get("hint")) is None:
                    made = node.meta.get("sized")
                    run = made is None
                    value = fakes.run(node.target, args, kwargs) if run else fakes.sized(made)
            else:
                continue
            env[node] = value
            node.meta["val"] = value
            if isinstance(value, Tensor):
                node.meta["tensor_meta"] = tensor_metadata(geometry_of(value))


def fake_input(fakes: Fakes, spec: InputSpec) -> Any:
    """A fake tensor with an input's geometry and the size of its storage on entry."""
    if not isinstance(spec.geometry, Geometry):
        return getattr(spec.source, "hint", spec.source)
    return fakes.like(spec.geometry, spec.nbytes, spec.device)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensor that a node's value is, or all tensors in a (nested) list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each)
