"""A step of linear layers with FSDP2's collectives, as a function, traced with the phases of a recorded step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functionalize as fz
from functionalize.cost.liveness import Liveness
from functionalize.passes.patterns import collectives
from tests.passes.chains import aten, reduce, unshard

MB = 1 / 2**20  # of a byte


def step(
    *, twice: bool, microbatches: int = 1, between: Callable[[Tensor], Tensor] | None = None
) -> Callable[..., list[Tensor]]:
    """Forward and backward of `x @ w0 @ w1 ...`; returns the shards of the gradients, and that of `x`.

    twice: parameters are gathered again in backward. between: what becomes of the first shard after a microbatch.
    """

    def fn(x: Tensor, *shards: Tensor) -> list[Tensor]:
        given, total = list(shards), [torch.zeros_like(t) for t in (*shards, x)]
        full: dict[int, Tensor] = {}
        for i in range(microbatches):
            inputs, y = [], x * (i + 1)
            for j, shard in enumerate(given):
                if twice or j not in full:
                    (full[j],) = unshard(shard)
                inputs.append(y)
                y = y @ full[j]
            grad = y.sign()
            for j in reversed(range(len(given))):
                w = unshard(given[j])[0] if twice else full[j]
                (mine,) = reduce(inputs[j].t() @ grad)
                total[j] = total[j] + mine
                grad = grad @ w.t()
            total[-1] = total[-1] + grad
            if between is not None:
                given[0], full = between(given[0]), {}
        return total

    return fn


def weights(*rows: int, width: int = 8) -> list[Tensor]:
    """Shards of square parameters of two ranks, of which each `rows` gives one."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(r, width, generator=g) for r in rows]


def traced_step(layers: int = 3, **options: Any) -> fz.Program:
    """The program of a step of square layers, from each `sign` on in backward, until `x` is read again."""
    program = fz.functions.trace(step(**options), torch.ones(4, 8), *weights(*[4] * layers))
    phase = "forward"
    for node in program.graph_module.graph.nodes:
        if node.target in (aten.sign.default, aten.mul.Tensor):
            phase = "backward" if node.target is aten.sign.default else "forward"
        if node.op == "call_function":
            node.meta["phase"] = phase
    return program


def sent(program: fz.Program) -> list[str]:
    """The collectives in order, short: g(ather) and r(educe)."""
    return ["g" if "gather" in each.kind else "r" for each in collectives(program.graph)]


def peak(program: fz.Program) -> int:
    """Bytes."""
    return Liveness(program.graph_module.graph).peak
