"""The checks for nan values that autograd makes in anomaly mode, in a recording.

    isnan = aten.isnan(div); any = aten._is_any_true(isnan); _local_scalar_dense(any)      inside SqrtBackward0

A replay in anomaly mode computes them, too: a guard on each names the autograd node and the lines of its forward.
"""

from __future__ import annotations

import torch
from torch import fx

from functionalize.ir.ops import OpRecord
from functionalize.tape.ownership import ownership_of
from functionalize.util.user_stack import trace_of

aten = torch.ops.aten


def nan_check(node: fx.Node, record: OpRecord) -> tuple[str, str] | None:
    """(the autograd node whose gradient is checked, the user's frames of its forward); None if this is no such check.

    node: of the number that Python, here the engine, has read by `record`.
    """
    if record.autograd_node is None or record.tape is None or "hook" in record.meta:
        return None
    sources: list[fx.Node] = [node]
    for target in (aten._is_any_true.default, aten.isnan.default):
        sources = sources[0].all_input_nodes
        if len(sources) != 1 or sources[0].target is not target:
            return None
    maker = ownership_of(record.tape).maker(record)
    forward = trace_of(maker.traceback) if maker is not None else None
    return record.autograd_node, forward or ""
