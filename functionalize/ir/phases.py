"""Which part of a training step a node belongs to, in `node.meta["phase"]`.

    all_gather, addmm, relu, mse_loss                       forward
    all_gather, mse_loss_backward, mm, reduce_scatter       backward
    addmm, relu (run again by activation checkpointing)     recompute
    _foreach_norm, _fused_adamw                             optimizer

With several microbatches: forward, backward, forward, backward, optimizer. The recorder marks the ops that run in a
backward (autograd's nodes, the hooks of tensors and of FSDP2, the callbacks at its end). Of the other ops, those that
`torch.optim` runs are in phase optimizer, and so are the ops between these and the preceding backward (clipping,
scaling), and all ops after the last backward. The rest are forward.

A pass copies the meta of the node it replaces, the phase included, so a node that was moved keeps its phase.
Invariant: every op of a captured program has a phase; a graph that was not recorded has none. Linear in nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.ir.waits import WAIT

FORWARD, OPTIMIZER = "forward", "optimizer"


def phase_of(node: fx.Node) -> str | None:
    """`forward`, `backward`, `recompute` or `optimizer`; None for a node that is no recorded op."""
    return node.meta.get("phase")


def in_backward(node: fx.Node) -> bool:
    """Whether a node runs inside a backward, recomputation included."""
    return phase_of(node) in (BACKWARD, RECOMPUTE)


def first_of(phase: str, graph: fx.Graph) -> fx.Node | None:
    """The first node of a phase, in the order of the graph."""
    return next((node for node in graph.nodes if phase_of(node) == phase), None)


def set_phases(graph: fx.Graph, updates: Iterable[fx.Node]) -> None:
    """Fill `meta["phase"]` of every recorded op that has none. updates: the nodes that `torch.optim` itself ran.

    The graph is in the order of the recording, except for waits, which were moved: they get their collective's phase.
    """
    updates = set(updates)
    part: list[fx.Node] = []  # the nodes since the last backward
    update = 0  # how many of them there are up to the last update
    had_backward = False
    for node in graph.nodes:
        record = node.meta.get("record")
        if node.op != "call_function" or record is None or node.target is WAIT:
            continue
        if node in updates:
            part.append(node)
            update = len(part)
        elif record.phase is None:
            part.append(node)
        else:
            _settle(part, update, FORWARD)
            node.meta.setdefault("phase", record.phase)
            part, update, had_backward = [], 0, True
    _settle(part, update, OPTIMIZER if had_backward else FORWARD)
    for node in graph.find_nodes(op="call_function", target=WAIT) if WAIT else ():
        phase = phase_of(node.all_input_nodes[0]) if node.all_input_nodes else None
        if phase is not None:
            node.meta.setdefault("phase", phase)


def _settle(part: list[fx.Node], update: int, rest: str) -> None:
    for i, node in enumerate(part):
        node.meta.setdefault("phase", OPTIMIZER if i < update else rest)
