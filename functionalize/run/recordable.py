"""Whether a device can record a program as one graph, and if not, every reason why.

    `item` reads a number of a tensor on cuda:0, which waits for the device: ...
    `opt_0_0_step` (float32[]) is in host memory: ...

A recording fixes addresses, sizes and everything that the host computes; a launch repeats only the device's work.
So all tensors must be on the device. The exceptions are numbers: a zero-dimensional input in host memory is read at
every call, and values computed from such inputs alone are computed while recording.

Refusals: listed by `reasons`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from functionalize._compat.distributed import group_of_name
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import is_commit
from functionalize.ir.generators import GET_STATE, SEED, SET_STATE
from functionalize.ir.inputs import InputSpec
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program


def is_host_number(spec: InputSpec, kind: str) -> bool:
    """Whether an input is a zero-dimensional tensor in host memory, such as a learning rate.

    kind: the type of the device that records.
    """
    return kind != "cpu" and spec.device.type == "cpu" and spec.geometry.size == ()


def reasons(program: Program, kind: str, backends: Sequence[str]) -> list[str]:
    """Every reason why a device cannot record a program; empty if it can.

    kind: the device type. backends: the process group backends whose collectives it can record.
    Every node needs its `val`. Linear in nodes.
    """
    found = list(_reasons_of_inputs(program, kind))
    written = {program.inputs[a.input].name for a in program.epilogue if hasattr(a, "nbytes")}
    found += [f"`{name}` is grown or freed at the end of every step" for name in sorted(written)]
    host: set[fx.Node] = set()  # host numbers, and values computed from them alone
    reported: set[fx.Node] = set()  # values on another device whose reason is already in `found`
    specs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            if is_host_number(spec, kind):
                host.add(node)
            elif spec.device.type != kind:
                reported.add(node)
        elif node.op == "get_attr":
            if _is_host_scalar(node):
                host.add(node)
        elif node.op == "call_function" and not is_commit(node):
            found += _reasons_of_node(node, kind, backends, host, reported)
    return found


def _reasons_of_inputs(program: Program, kind: str) -> Iterator[str]:
    for spec in program.inputs:
        if spec.device.type != kind and not is_host_number(spec, kind):
            yield f"`{spec.name}` ({spec.geometry}) is on {spec.device}: move it to the device"


def _reasons_of_node(
    node: fx.Node,
    kind: str,
    backends: Sequence[str],
    host: set[fx.Node],
    reported: set[fx.Node],
) -> Iterator[str]:
    if node.target is BARRIER:
        yield f"`{node.name}` is a barrier, at which the host waits"
    elif node.target in (GET_STATE, SET_STATE, SEED):
        reported.add(node)
        yield f"`{node.name}` reads or sets a generator, which the host does: draw other numbers without that"
    elif getattr(node.target, "namespace", "") == "_c10d_functional":
        yield from _reasons_of_collective(node, backends)
    elif _is_number(node.meta.get("val")):
        if all(n in host for n in node.all_input_nodes):
            host.add(node)
        else:
            source = node.all_input_nodes[0].name
            yield f"`{node.name}` reads a number from `{source}`, for which the host waits: keep it a tensor"
    elif any(t.device.type != kind for t in tensors_of(node.meta.get("val"))):
        if reported.isdisjoint(node.all_input_nodes):
            device = next(tensors_of(node.meta["val"])).device
            yield (
                f"`{node.name}` ({node.target}) computes on {device}, which no launch repeats: an optimizer's "
                "step count moves to the device with `capturable=True` or `fused=True`"
            )
        reported.add(node)


def _reasons_of_collective(node: fx.Node, backends: Sequence[str]) -> Iterator[str]:
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.name == "group_name":
            backend = str(dist.get_backend(group_of_name(str(value))))
            if backend not in backends:
                yield f"`{node.name}` communicates by {backend}, which only the host can do"


def _is_host_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))
