"""Models on meshes of more than one dimension, or of one rank: builders for `features.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.fsdp.models import CLASSES, WIDTH, Build, Built, Net, mesh, momentum, wrapped

# Every rank makes the same weights and keeps its own part: gloo's `scatter` on a new group hangs now and then, on torch
# 2.13 and 2.15, before anything of this library has run.
LOCALLY: dict[str, Any] = {"src_data_rank": None}


def tensor_parallel(**options: Any) -> Build:
    """Linear layers split over the inner dimension, `fully_shard(**options)` over the outer one."""

    def build() -> Built:
        both = mesh(2, 2)
        torch.manual_seed(0)
        model = Net()
        plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, both["inner"], plan, **LOCALLY)
        head = ColwiseParallel(output_layouts=Replicate())
        model.head = nn.Linear(WIDTH, 2 * CLASSES)
        parallelize_module(model, both["inner"], {"head": head}, **LOCALLY)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=both["outer"], **options)
        return model, momentum(model.parameters())

    return build


def replicated() -> Built:
    """FSDP2's hooks with whole parameters on every rank: gradients are all-reduced."""
    torch.manual_seed(0)
    model = Net()
    for module in (*model.blocks, model):
        replicate(module, mesh=mesh(2))
    return model, momentum(model.parameters())


class OnMesh(Net):
    """Takes and gives plain tensors; inside, activations are DTensors, each group of ranks with its own."""

    def forward(self, x: Tensor) -> Tensor:
        here = [Replicate(), Replicate()]
        out = super().forward(DTensor.from_local(x, mesh(2, 2), here, run_check=False))
        return out.redistribute(placements=here).to_local()


def spmd() -> Built:
    """Parameters are DTensors on the whole mesh already; FSDP is told which dimension is its own."""
    both = mesh(2, 2)
    torch.manual_seed(0)
    model = OnMesh(classes=4)
    for name, child in model.named_modules():
        for key, p in list(child.named_parameters(recurse=False)):
            last = Shard(0) if name.endswith((".a", "head")) else Replicate()
            placed = distribute_tensor(p.detach(), both, [Replicate(), last], **LOCALLY)
            child.register_parameter(key, nn.Parameter(placed))
    from torch.distributed.fsdp import DataParallelMeshDims  # newer than torch 2.11

    dims = DataParallelMeshDims(shard="outer")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=both, dp_mesh_dims=dims)
    return model, momentum(model.parameters())


class Experts(nn.Module):
    """Every expert computes every row, weighed by a router: no shape depends on data."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 12) * 0.1)
        self.down = nn.Parameter(torch.randn(count, 12, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        each = torch.einsum("bd,edh->ebh", x, self.up).relu()
        return x + torch.einsum("ebh,ehd,be->bd", each, self.down, weights)


def experts_on_another_mesh() -> Built:
    """In one module, the experts are sharded over two ranks and the router over all four."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList([Experts(), Experts()])
    over_two = FSDPMeshInfo(mesh=mesh(2, 2)["inner"], shard_mesh_dim=0)

    def place(p: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), over_two) if p.dim() == 3 else None

    for block in model.blocks:
        fully_shard(block, mesh=mesh(4), shard_placement_fn=place)
    fully_shard(model, mesh=mesh(4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def on_a_mesh_of_one() -> Built:
    return wrapped(mesh=mesh(2, 1)["inner"])()
