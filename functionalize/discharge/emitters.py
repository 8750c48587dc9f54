"""The two emitters: values are graph nodes, or tensors.

`GraphEmitter` appends nodes to an `fx.Graph`; nothing is executed. `TensorEmitter` executes each op on tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from functionalize._compat.graphs import NodeWriter
from functionalize._compat.references import address
from functionalize.discharge.values import Emitter, Value
from functionalize.errors import InvariantError, UnsupportedOpError
from functionalize.ir.ops import Geometry
from functionalize.ir.scalars import (
    Applied,
    LiveNumber,
    ScalarInput,
    bottom_up,
    is_expression,
    map_numbers,
)

aten = torch.ops.aten


class _Kind(NamedTuple):
    """Facts about an op that every node of it needs, looked up once.

    takes_generator: whether the op has a parameter for a `torch.Generator`.
    node: appends a node that calls the op with arguments and keyword arguments.
    """

    takes_generator: bool
    node: Callable[[Any, Any], fx.Node]


class GraphEmitter(Emitter):
    """Builds graph nodes directly (no tracing).

    whole: makes the placeholder of an input's whole storage.
    scalar_placeholder: makes the placeholder of a Python number that is an input of the program.
    numbers: the node of every live number computed so far, by expression.
    """

    def __init__(
        self,
        whole: Callable[[int, Geometry], fx.Node],
        scalar_placeholder: Callable[[ScalarInput], fx.Node] | None = None,
    ) -> None:
        self.graph = fx.Graph()
        self.nodes = NodeWriter(self.graph)
        self.numbers: dict[Any, fx.Node] = {}
        self._kinds: dict[int, _Kind] = {}  # by the address of the op: hashing one calls Python
        self._getitem = self.nodes.caller(operator.getitem, "getitem")
        self._whole, self._scalar_placeholder = whole, scalar_placeholder

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls `target`; `meta["record"]` holds its op record until the graph module is built."""
        record = self.record
        if record is not None and record.live:
            args, kwargs = map_numbers(self._live, args), map_numbers(self._live, kwargs)
        kind = self._kinds.get(address(target)) or self._kind(target)
        if kind.takes_generator and _has_generator(args, kwargs):
            raise UnsupportedOpError(
                "draws from a torch.Generator argument, which a graph cannot hold: keep the generator in one "
                "attribute or variable and seed it outside of the step, or use the default generator"
            )
        node = kind.node(args, kwargs)
        if record is not None:
            node.meta["record"] = record
        return node

    def part(self, values: fx.Node, index: int) -> fx.Node:
        """A node that calls `operator.getitem`; a fused op has hundreds of these."""
        node = self._getitem((values, index), {})
        if self.record is not None:
            node.meta["record"] = self.record
        return node

    def _node(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = self._kind(target).node(args, {})
        if self.record is not None:
            node.meta["record"] = self.record
        return node

    def _kind(self, target: Any) -> _Kind:
        name, takes_generator = _traits(target)
        # The function holds the op, whose address is that of no other object then.
        kind = _Kind(takes_generator, self.nodes.caller(target, name))
        self._kinds[address(target)] = kind
        return kind

    def _live(self, argument: LiveNumber) -> fx.Node:
        return self.number(argument.expression)

    def number(self, expression: Any) -> fx.Node:
        """The node of a live number: it calls the same Python functions in the same order, each once."""
        nodes = self.numbers
        for part in bottom_up(expression, nodes):
            if isinstance(part, Applied):
                args = tuple(nodes[a] if is_expression(a) else a for a in part.args)
                nodes[part] = self._node(part.function, args)
            elif isinstance(part, ScalarInput) and self._scalar_placeholder is not None:
                tensor = self._scalar_placeholder(part)
                read = aten._local_scalar_dense.default
                nodes[part] = self._node(read, (tensor,))
                nodes[part].meta["hint"] = part.hint
            else:
                raise InvariantError("a number is used before the op that returned it to Python")
        return nodes[expression]

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
    """Executes ops on tensors. original: returns a tensor on the input storage of a serial."""

    def __init__(self, original: Callable[[int], Tensor]) -> None:
        self._original = original

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The result of the op."""
        return target(*args, **kwargs)

    def part(self, values: Sequence[Value], index: int) -> Value:
        """Output `index` of an op with several outputs."""
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
    """The base name of nodes that call `target`, and whether it has a parameter for a generator."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return str(target.__name__), False
    takes_generator = any("Generator" in str(a.type) for a in schema.arguments)
    return schema.name.split("::")[-1], takes_generator


def _has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))
