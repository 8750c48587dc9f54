"""Fake values of nodes that a pass makes or moves: `node.meta["val"]` and `node.meta["tensor_meta"]`.

Invariant: the fake value of a view is on the memory of the fake value of its source.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import first_input, input_nodes
from functionalize._compat.references import address
from functionalize.analysis.aliases import is_view, storage_key
from functionalize.ir.fakes import FakeResultCache, Fakes
from functionalize.ir.ops import geometry_of, tensor_metadata
from functionalize.program.metadata import tensors_of

UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def value_of(arg: Any) -> Any:
    """`arg` with the fake value in place of every node."""
    return fx.node.map_arg(arg, lambda n: n.meta["val"])


def set_value(node: fx.Node) -> None:
    """Fill `val` and `tensor_meta` of one node by running it on its arguments' fake values.

    One without a tensor among its arguments (`full`) makes a fake one of the mode of the first in the graph.
    """
    NewValues().set(node)


class NewValues:
    """Makes the values of many nodes, as `set_value` does: of equal layers, each op is run for one of them.

    fakes: what made the values of the program, if it is known: then an op that the program has is not run at all.
    """

    def __init__(self, fakes: Fakes | None = None) -> None:
        self._fakes = fakes
        self._caches: dict[int, tuple[Any, FakeResultCache]] = {}  # address of a fake mode -> it

    def set(self, node: fx.Node) -> None:
        """Fill `val` and `tensor_meta` of one node."""
        target: Any = node.target
        args, kwargs = value_of(node.args), value_of(node.kwargs)
        near = (n for nodes in (input_nodes(node), node.graph.nodes) for n in nodes)
        tensors = (t for n in near for t in tensors_of(n.meta.get("val")))
        mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)

        def op() -> Any:
            with nullcontext() if mode is None else mode:
                return target(*args, **kwargs)

        with torch.no_grad():
            if mode is None:
                value = op()
            elif self._fakes is not None and mode is self._fakes.mode:
                value = self._fakes.run(target, args, kwargs)
            else:
                if address(mode) not in self._caches:
                    self._caches[address(mode)] = mode, FakeResultCache(mode)
                value = self._caches[address(mode)][1].run(target, args, kwargs, op)
        describe(node, value)


def is_detached(node: fx.Node) -> bool:
    """Whether a view's fake value is not on its source's memory: `make_fx` on real tensors loses it."""
    if not is_view(node) and node.target is not UNSAFE_VIEW:
        return False
    value, source = node.meta["val"], first_input(node).meta["val"]
    return storage_key(value) != storage_key(source)


_OF_VALUES = ("val", "tensor_meta", "hint", "sized")  # what describes the value of a node


def origin_meta(node: fx.Node) -> dict[str, Any]:
    """The metadata that a replacement copies from `node`: all but the description of its value."""
    return {k: v for k, v in node.meta.items() if k not in _OF_VALUES}


def describe(node: fx.Node, value: Any) -> None:
    """Set `val`, and `tensor_meta` where it is a tensor."""
    node.meta["val"] = value
    if isinstance(value, Tensor):
        node.meta["tensor_meta"] = tensor_metadata(geometry_of(value))
    else:
        node.meta.pop("tensor_meta", None)


def revalue(graph: fx.Graph, fakes: Fakes | None = None) -> None:
    """Make the fake values of views anew whose source is another node now; linear in nodes. fakes: see `NewValues`."""
    values = NewValues(fakes)
    for node in graph.nodes:
        if is_detached(node):
            values.set(node)
