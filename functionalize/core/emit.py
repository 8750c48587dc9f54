"""The two emitters: a value is a graph node, or a tensor.

`GraphEmitter` writes `fx.Graph` nodes; nothing is executed. `TensorEmitter` executes each op on values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat import append_node
from functionalize.core.ops import Geometry, OpRecord
from functionalize.core.storage import FunctionalStorage, Value
from functionalize.errors import UnsupportedOpError

aten = torch.ops.aten


class GraphEmitter:
    """Builds graph nodes directly (no tracing). `now` is the record that nodes are made for."""

    def __init__(self, whole: Callable[[FunctionalStorage, Geometry], fx.Node]) -> None:
        self.graph = fx.Graph()
        self.now: OpRecord | None = None
        self._whole = whole

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node; its meta keeps the record it was made for until somebody asks for the graph module."""
        name, draws = _traits(target)
        if draws and _given_generator(args, kwargs):
            raise UnsupportedOpError(
                "draws from a torch.Generator it was given, which a graph cannot hold: use the default "
                "generator (torch.manual_seed), which replay draws from as eager does"
            )
        node = append_node(self.graph, target, args, kwargs, name)
        if self.now is not None:
            node.meta["record"] = self.now
        return node

    def empty(self, geometry: Geometry, device: torch.device) -> fx.Node:
        """`aten.empty_strided`."""
        return self.call(
            aten.empty_strided.default,
            list(geometry.size),
            list(geometry.stride),
            dtype=geometry.dtype,
            device=device,
        )

    def whole(self, storage: FunctionalStorage, flat: Geometry) -> fx.Node:
        """A placeholder for an input's whole storage."""
        return self._whole(storage, flat)


class TensorEmitter:
    """Executes ops on values; `original(storage)` is any tensor on an input's own storage."""

    def __init__(self, original: Callable[[FunctionalStorage], Tensor]) -> None:
        self.now: OpRecord | None = None
        self._original = original

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The result of the op."""
        return target(*args, **kwargs)

    def empty(self, geometry: Geometry, device: torch.device) -> Tensor:
        """`aten.empty_strided`."""
        return aten.empty_strided.default(
            geometry.size, geometry.stride, dtype=geometry.dtype, device=device
        )

    def whole(self, storage: FunctionalStorage, flat: Geometry) -> Tensor:
        """The input's own storage as a flat tensor."""
        return aten.as_strided.default(self._original(storage), flat.size, flat.stride, 0)


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
