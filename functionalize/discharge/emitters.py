"""The two emitters: a value is a graph node, or a tensor.

`GraphEmitter` writes `fx.Graph` nodes; nothing is executed. `TensorEmitter` executes each op on values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize._compat.graphs import NodeWriter
from functionalize.discharge.values import Emitter, Value
from functionalize.errors import InvariantError, UnsupportedOpError
from functionalize.ir.ops import Geometry
from functionalize.ir.scalars import (
    Applied,
    Given,
    LiveNumber,
    bottom_up,
    is_expression,
    map_numbers,
)

aten = torch.ops.aten


class _Kind(NamedTuple):
    """What a call of an op is named, whether it may be given a generator, where the graph keeps such calls."""

    name: str
    draws: bool
    nodes: dict[fx.Node, None]


class GraphEmitter(Emitter):
    """Builds graph nodes directly (no tracing).

    numbers: the nodes of the live numbers computed so far. given: makes the placeholder of a number that
    every call looks up.
    """

    def __init__(
        self,
        whole: Callable[[int, Geometry], fx.Node],
        given: Callable[[Given], fx.Node] | None = None,
    ) -> None:
        self.graph = fx.Graph()
        self.nodes = NodeWriter(self.graph)
        self.numbers: dict[Any, fx.Node] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._getitem = self._kind(operator.getitem)
        self._whole, self._given = whole, given

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; its meta keeps the record it was made for until somebody asks for the graph module."""
        if self.now is not None and self.now.live:
            args, kwargs = map_numbers(self._live, args), map_numbers(self._live, kwargs)
        kind = self._kinds.get(target) or self._kind(target)
        if kind.draws and _given_generator(args, kwargs):
            raise UnsupportedOpError(
                "draws from a torch.Generator it was given, which a graph cannot hold: use the default "
                "generator (torch.manual_seed), which replay draws from as eager does"
            )
        return self._node(kind, target, args, kwargs)

    def part(self, values: fx.Node, index: int) -> fx.Node:
        """`operator.getitem`; many of them come of one fused op."""
        return self._node(self._getitem, operator.getitem, (values, index), {})

    def _node(self, kind: _Kind, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.nodes.call(target, args, kwargs, kind.name, kind.nodes)
        if self.now is not None:
            node.meta["record"] = self.now
        return node

    def _kind(self, target: Any) -> _Kind:
        kind = self._kinds[target] = _Kind(*_traits(target), self.nodes.nodes_of(target))
        return kind

    def _live(self, argument: LiveNumber) -> fx.Node:
        return self.number(argument.expression)

    def number(self, expression: Any) -> fx.Node:
        """The node of a live number: the same Python functions in the same order, each once."""
        known = self.numbers
        for part in bottom_up(expression, known):
            if isinstance(part, Applied):
                args = tuple(known[a] if is_expression(a) else a for a in part.args)
                known[part] = self._node(self._kind(part.function), part.function, args, {})
            elif isinstance(part, Given) and self._given is not None:
                tensor = self._given(part)
                read = aten._local_scalar_dense.default
                known[part] = self._node(self._kind(read), read, (tensor,), {})
                known[part].meta["hint"] = part.hint
            else:
                raise InvariantError("a number is used before the op that gave it to Python")
        return known[expression]

    def empty(self, geometry: Geometry, device: torch.device) -> fx.Node:
        """`aten.empty_strided`."""
        return self.call(
            aten.empty_strided.default,
            list(geometry.size),
            list(geometry.stride),
            dtype=geometry.dtype,
            device=device,
        )

    def whole(self, serial: int, flat: Geometry) -> fx.Node:
        """A placeholder for an input's whole storage."""
        return self._whole(serial, flat)


class TensorEmitter(Emitter):
    """Executes ops on values; `original(serial)` is any tensor on an input's own storage."""

    def __init__(self, original: Callable[[int], Tensor]) -> None:
        self._original = original

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The result of the op."""
        return target(*args, **kwargs)

    def part(self, values: Sequence[Value], index: int) -> Value:
        """One of them."""
        return values[index]

    def empty(self, geometry: Geometry, device: torch.device) -> Tensor:
        """`aten.empty_strided`."""
        return aten.empty_strided.default(
            geometry.size, geometry.stride, dtype=geometry.dtype, device=device
        )

    def whole(self, serial: int, flat: Geometry) -> Tensor:
        """The input's own storage as a flat tensor."""
        return aten.as_strided.default(self._original(serial), flat.size, flat.stride, 0)


@cache
def _traits(target: Any) -> tuple[str, bool]:
    """What a node of `target` is called, and whether it may be given a generator."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(target.__name__), False
    draws = any("Generator" in str(a.type) for a in schema.arguments)
    return schema.name.split("::")[-1], draws


def _given_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))
