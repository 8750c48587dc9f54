"""The costs of the nodes of a graph; calls that are alike are looked at once, as those of equal layers are.

    costs = call_costs(graph)
    costs[node]              Cost(free=False, flops=..., moved=..., dtype=...), the same object for calls that are alike

Two calls are alike if they have the same op, the same numbers and flags, tensors of the same geometry, device and
storage size in the same places, and the same of these on one storage: all that `costs.py` reads of a node. Where they
stand in the graph does not matter.
Invariant: equal to `is_free`, `flops`, `moved` and `dtype_of` of each node. A call with an argument that has no key
(a generator, a symbolic number) is like no other. Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize.analysis.aliases import is_view, storage_key
from functionalize.ir.ops import geometry_fields
from functionalize.planning.time.costs import dtype_of, flops, is_free, moved

_PLAIN = frozenset(
    {bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Cost(NamedTuple):
    """free: see `is_free`. flops, moved: 0 of a free call. dtype: that an op computes in."""

    free: bool
    flops: int = 0
    moved: int = 0
    dtype: torch.dtype | None = None


Costs = Mapping[fx.Node, Cost]
"""The cost of each call of a graph."""


def call_costs(graph: fx.Graph) -> Costs:
    """The costs of the calls of a graph whose nodes have their `val`."""
    keys = _Keys()
    alike: dict[Any, Cost] = {_FREE: _FREE}
    found: dict[fx.Node, Cost] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        # The key of a `getitem` would list the whole list: thousands of an optimizer's results.
        if node.target is operator.getitem:
            found[node] = _FREE
            continue
        try:
            key = _FREE if keys.is_plain_view(node) else keys.of(node)
        except _HasNoKey:
            found[node] = _cost(node)
            continue
        if key not in alike:
            alike[key] = _cost(node)
        found[node] = alike[key]
    return found


_FREE = Cost(True)


def _cost(node: fx.Node) -> Cost:
    if is_free(node):
        return _FREE
    return Cost(False, flops(node), moved(node), dtype_of(node))


class _HasNoKey(Exception):
    """An argument, or a value, has no key."""


class _Keys:
    """Keys of calls, equal for those that are alike."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # the look of a tensor or value -> a number for it
        self._values: dict[fx.Node, list[tuple[int, Any]]] = {}

    def of(self, node: fx.Node) -> Any:
        """The key of a call. Raises `_HasNoKey`."""
        inputs = node.all_input_nodes
        places = {each: at for at, each in enumerate(inputs)}
        storages: dict[Any, int] = {}
        looks: list[int] = []
        for each in (*inputs, node):
            for look, storage in self._value(each):
                looks += look, storages.setdefault(storage, len(storages))
        kwargs = _key(tuple(node.kwargs.items()), places) if node.kwargs else None
        return node.target, _key(node.args, places), kwargs, tuple(looks)

    def is_plain_view(self, node: fx.Node) -> bool:
        """Whether a call is that of a view, and its one tensor is on the storage of its first argument."""
        if not is_view(node):
            return False
        made, read = self._value(node), self._value(node.all_input_nodes[0])
        return len(made) == len(read) == 2 and made[1][1] == read[1][1]

    def _value(self, node: fx.Node) -> list[tuple[int, Any]]:
        """Of a node's value: what it is made of, without a storage; then each tensor in it, with its storage."""
        found = self._values.get(node)
        if found is None:
            tensors: list[Tensor] = []
            made_of = _made_of(node.meta.get("val"), tensors)
            found = [(self._number(made_of), None), *map(self._tensor, tensors)]
            self._values[node] = found
        return found

    def _tensor(self, tensor: Tensor) -> tuple[int, Any]:
        """A number for all that costs read of a tensor, and a key of its storage."""
        if tensor.layout != torch.strided:
            sparse = tensor.layout, tensor.shape, tensor.dtype, tensor.device
            return self._number(sparse), storage_key(tensor)
        storage = tensor.untyped_storage()
        look = geometry_fields(tensor), tensor.device, storage.nbytes()
        return self._number(look), storage._cdata

    def _number(self, look: Any) -> int:
        return self._numbers.setdefault(look, len(self._numbers))


def _made_of(value: Any, tensors: list[Tensor]) -> Any:
    """The structure of a value; appends the tensors in it."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, (list, tuple)):
        return tuple([_made_of(each, tensors) for each in value])
    return _key(value, {})


def _key(arg: Any, places: Mapping[fx.Node, int]) -> Any:
    """A key of an argument. places: numbers for the nodes in it."""
    kind = type(arg)
    if kind is fx.Node:
        return places[arg]
    if kind in _PLAIN:
        return kind, arg
    if isinstance(arg, (list, tuple)):
        return tuple([_key(each, places) for each in arg])
    raise _HasNoKey
