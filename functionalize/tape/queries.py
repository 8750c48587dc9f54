"""Forward and backward ops of a described graph, joined by the autograd nodes in their metadata.

    forward_of(graph, "mm_3")        [addmm]       which op's backward is it?
    backward_of(graph, "addmm")      [mm_2, mm_3, sum_1]
    gradient_of(graph, "0.weight")   mm_3

Passes copy metadata, so an op that was moved or replaced is found, too; a value that a pass computes again in the
backward made no autograd node. Linear in nodes.
"""

from __future__ import annotations

from torch import fx

from functionalize.ir.phases import in_backward

# What `node.meta` says about an op's autograd node, see `program/metadata.py`.
AUTOGRAD = ("seq_nr", "autograd_node", "makes_seq_nr", "forward_stack_trace", "forward_seq_nr")


def made_by(node: fx.Node) -> int | None:
    """The number of the autograd node that an op made."""
    if in_backward(node) and "autograd_node" not in node.meta:
        return None
    found = node.meta.get("makes_seq_nr" if "autograd_node" in node.meta else "seq_nr")
    return None if found is None else int(found)


def forward_number(node: fx.Node) -> int | None:
    """The number of the autograd node whose maker is the forward of a backward op."""
    if "autograd_node" not in node.meta:
        return None
    found = node.meta.get("forward_seq_nr", node.meta.get("seq_nr"))
    return None if found is None else int(found)


def forward_of(graph: fx.Graph, node: fx.Node | str) -> list[fx.Node]:
    """The ops that made the autograd node in which a backward op ran."""
    number = forward_number(_find(graph, node))
    return [] if number is None else [n for n in graph.nodes if made_by(n) == number]


def backward_of(graph: fx.Graph, node: fx.Node | str) -> list[fx.Node]:
    """The ops that ran in the autograd node that an op made."""
    number = made_by(_find(graph, node))
    return [] if number is None else [n for n in graph.nodes if forward_number(n) == number]


def gradient_of(graph: fx.Graph, parameter: str) -> fx.Node:
    """The node whose value is the gradient of the parameter of this name; raises `LookupError`."""
    found: dict[str, fx.Node] = {}
    known: list[str] = []
    for node in graph.nodes:
        for name in node.meta.get("gradient_of", ()):
            known.append(name)
            if f".{name}".endswith(f".{parameter}"):
                found[name] = node
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise LookupError(f"`{parameter}` may be {' or '.join(found)}: say which")
    some = ", ".join(known[:8]) or "none"
    raise LookupError(f"the graph has no gradient of `{parameter}`: it has those of {some}")


def _find(graph: fx.Graph, node: fx.Node | str) -> fx.Node:
    if isinstance(node, fx.Node):
        return node
    found = next((n for n in graph.nodes if n.name == node), None)
    if found is None:
        raise LookupError(f"the graph has no node `{node}`")
    return found
