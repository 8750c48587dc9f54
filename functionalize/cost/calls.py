"""The arguments of a call of a graph by their names, and the bytes of a tensor.

    arguments_of(node)     {"input": <node>, "dim": 1}
    nbytes_of(tensor)      12

Costs and messages are worked out from these; passes read the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's data; an expanded tensor counts the bytes that it occupies in memory."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    return min(tensor.nbytes, int(tensor.untyped_storage().nbytes()))
