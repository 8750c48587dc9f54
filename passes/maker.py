"""Nodes that a pass inserts in place of others, with their fake values and their provenance.

    make = Maker(graph, gather.start, others=[second.start])
    make(WAIT, value).meta["fsdp"]                   ("blocks.0+blocks.1", "wait")

Not a pass: a tool for passes that merge or split chains of collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from functionalize.ir.ops import geometry_of, tensor_metadata
from functionalize.ir.waits import WAIT
from functionalize.passes.metadata import NewValues, origin_meta
from functionalize.passes.patterns import ALL_REDUCE, GATHER, GATHER_LIST, REDUCE_SCATTER

aten = torch.ops.aten
# What a node does for FSDP2, if not what the node does that it is inserted for.
_ROLES = {
    aten.cat.default: "pack",
    aten.full.default: "pack",
    aten._chunk_cat.default: "pack",
    GATHER: "unshard",
    GATHER_LIST: "unshard",
    REDUCE_SCATTER: "reduce",
    ALL_REDUCE: "reduce",
    WAIT: "wait",
    aten.split_with_sizes_copy.default: "copy-out",
}


class Maker:
    """Makes nodes before `anchor`, with the metadata of `origin` (by default the anchor) and with fake values.

    others: nodes for which the new ones stand, too; their groups of FSDP2 are joined by `+`.
    values: what makes the values of these nodes and of others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        anchor: fx.Node,
        origin: fx.Node | None = None,
        others: Iterable[fx.Node] = (),
        values: NewValues | None = None,
    ) -> None:
        self.graph, self.anchor = graph, anchor
        self._values = values or NewValues()
        self.meta = origin_meta(origin or anchor)
        roles = [n.meta["fsdp"] for n in others if "fsdp" in n.meta]
        if roles:
            groups = dict.fromkeys(group or "root" for group, _ in roles)
            self.meta["fsdp"] = "+".join(groups) if len(groups) > 1 else roles[0][0], roles[0][1]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._make(target, args, kwargs, target._schema.name.split("::")[1])
        self._values.set(node)
        return node

    def part(self, whole: fx.Node, index: int) -> fx.Node:
        """`whole[index]`"""
        node = self._make(operator.getitem, (whole, index), {}, "getitem")
        value = whole.meta["val"][index]  # `set_value` would look at the whole list, once per part
        node.meta.update(val=value, tensor_meta=tensor_metadata(geometry_of(value)))
        return node

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: Any, name: str) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(self.meta)
        if "fsdp" in node.meta and target in _ROLES:
            node.meta["fsdp"] = node.meta["fsdp"][0], _ROLES[target]
        return node
