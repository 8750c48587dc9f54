"""Single nodes with fake values, for tests of what one node costs."""

from __future__ import annotations

import torch
from torch import fx

from functionalize._compat.fakes import FakeTensorMode


def node_of(target, *args, **kwargs) -> fx.Node:
    """A node on tensors, with fake values."""
    graph, mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [mode.from_tensor(a) if torch.is_tensor(a) else a for a in args]
        value = target(*fakes, **kwargs)
    nodes = []
    for fake in fakes:
        nodes.append(graph.placeholder("x") if torch.is_tensor(fake) else fake)
        if torch.is_tensor(fake):
            nodes[-1].meta["val"] = fake
    node = graph.call_function(target, tuple(nodes), kwargs)
    node.meta["val"] = value
    return node
