"""Stacks whose layers differ in kind, for tests that compare a plan with the long way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from examples import llama

WIDTH = 32


class Layer(nn.Module):
    """A layer of which `kind` says how it differs from the others."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        hidden = 3 * WIDTH if kind == "wide" else 2 * WIDTH
        self.kind = kind
        self.gates = nn.Linear(WIDTH, 2) if kind == "experts" else None
        ways = 2 if kind == "experts" else 1
        self.ups = nn.ModuleList(nn.Linear(WIDTH, hidden) for _ in range(ways))
        self.downs = nn.ModuleList(nn.Linear(hidden, WIDTH) for _ in range(ways))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "recomputed":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        outs = [
            down(F.gelu(up(x)) * x.mean()) for up, down in zip(self.ups, self.downs, strict=True)
        ]
        if self.gates is not None:
            shares = self.gates(x).softmax(-1)
            outs = [out * shares[:, i : i + 1] for i, out in enumerate(outs)]
        out = sum(outs)
        return F.dropout(out, 0.1) if self.kind == "dropout" else out


def _squares(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * out.detach().square().mean()


KINDS = {
    "two widths": ("", "wide") * 5,
    "an odd one": ("",) * 6 + ("wide",) + ("",) * 6,
    "experts in some": ("", "experts") * 4,
    "recomputed in some": ("", "", "recomputed") * 4,
    "tied": ("tied", "") * 5,
    "of all kinds": ("", "wide", "dropout", "hooked", "recomputed", "experts", "", "wide"),
}


def build(kinds: Sequence[str]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(Layer(kind) for kind in kinds))
    for layer in model:
        if layer.kind == "hooked":
            layer.register_forward_hook(_squares)
        if layer.kind == "tied":
            layer.ups[0].weight = model[0].ups[0].weight
        if "tied" not in kinds:
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch: int = 8) -> Tensor:
    return torch.randn(batch, WIDTH)


def split_llama(shape: llama.Shape, mesh: DeviceMesh) -> llama.Llama:
    """A Llama with tensor parallelism over the dimension `split` of a mesh, sharded over the dimension `shard`."""
    built = llama.Llama(shape).bfloat16()
    columns = [f"attention.{part}" for part in ("query", "key", "value")] + ["gate", "up"]
    ways: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    ways |= {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    for block in built.blocks:
        parallelize_module(block, mesh["split"], ways)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(built, mesh=mesh["shard"])
    return built
