"""`Interpreter`: runs a program's graph node by node, where no runner was chosen.

It differs from `fx.Interpreter` in two places: a replay's own check takes the place of `commit` (see `commit.py`), and
collectives of one gloo group run one at a time (see `gloo_waits.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from functionalize.ir.commit import Commit, commit
from functionalize.program.gloo_waits import added_waits
from functionalize.program.metadata import tensors_of


class Interpreter(fx.Interpreter):
    """Runs a graph node by node. check: what runs where the graph commits."""

    def __init__(self, module: fx.GraphModule, check: Commit) -> None:
        super().__init__(module)
        self._check = check
        self._waits = added_waits(self.graph.nodes)
        self._pending = {n: None for nodes in self._waits.values() for n in nodes}

    def run_node(self, n: fx.Node) -> Any:
        for started in self._waits.get(n, ()):
            for part in tensors_of(self._pending.pop(started)):
                torch.ops._c10d_functional.wait_tensor.default(part)
        value = super().run_node(n)
        if n in self._pending:
            self._pending[n] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(self._check if target is commit else target, args, kwargs)
