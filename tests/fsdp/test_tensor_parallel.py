"""Tensor parallelism in captured steps, of losses and sequences, too; beside FSDP2 and in pipelines."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import functionalize as fz
from tests.allowance import ample_allowance
from tests.fsdp.meshes import LOCALLY
from tests.ranks import run_on_ranks

D, TOKENS, CLASSES, CALLS = 8, 8, 16, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x))


def split(model, mesh, head):
    """Layers whose matrices are split and whose activations are, too, between them: sequence parallelism."""
    parallelize_module(
        model,
        mesh,
        {
            "layers": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
            ),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "head": head,
        },
        **LOCALLY,
    )
    return model


def loss_of(model, x, target):
    """The cross entropy of logits whose classes are on the ranks."""
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())
        loss.backward()
    return loss


class LossParallel:
    """data: how many ranks have batches of their own, over which FSDP2 shards."""

    def __init__(self, data):
        shape = (data, dist.get_world_size() // data)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        head = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )
        self.model = split(Model(), self.mesh["tp"], head)
        for module in (*self.model.layers, self.model) if data > 1 else ():
            fully_shard(module, mesh=self.mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.parameters = list(self.model.parameters())

    def step(self, x, target):
        loss = loss_of(self.model, x, target)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()


class ByHand:
    """The matrices of this rank: what is gathered comes while something else is computed."""

    def __init__(self, data):
        shape = (data, dist.get_world_size() // data)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.group = self.mesh["tp"].get_group()
        torch.manual_seed(dist.get_rank(self.group))
        ranks = dist.get_world_size(self.group)
        self.model = nn.ModuleDict(
            {"up": nn.Linear(D, 2 * D // ranks), "down": nn.Linear(2 * D // ranks, D, bias=False)}
        )
        if data > 1:
            for each in self.model.values():
                fully_shard(each, mesh=self.mesh["dp"])
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-2)

    def step(self, x, target):
        mine = x[0].chunk(self.group.size())[self.group.rank()]
        coming = all_gather_tensor_autograd(mine * 2, 0, self.group)  # waited for at its first use
        other = mine.square().sum()
        inner = self.model["up"](coming).relu()
        out = reduce_scatter_tensor_autograd(self.model["down"](inner), "sum", 0, self.group)
        loss = out.square().mean() + other * 0.1
        loss.backward()
        sums = [
            all_reduce(
                p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad, "sum", self.group
            )
            for p in self.parameters[:1]
        ]
        norms = all_gather_tensor(torch.stack([each.norm() for each in sums]), 0, self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() + norms.sum()


class InPipeline:
    """A pipeline of two stages, whose layers are split over the other two ranks."""

    def __init__(self, data):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        group = mesh["pp"].get_group()
        rank = dist.get_rank(group)
        torch.manual_seed(rank)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Layer(), mesh["tp"], plan, **LOCALLY)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        self.is_first = rank == 0
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-2, foreach=False)

    def step(self, x, target):
        losses, wanted = [], {}
        if not self.is_first:
            wanted = {"target": x.flip(0), "losses": losses}
        self.schedule.step(*((x,) if self.is_first else ()), return_outputs=False, **wanted)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else x.sum()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trained(kind, data, passes):
    eager, trainer = kind(data), kind(data)
    with ample_allowance():
        step = fz.capture(trainer.step, on_uncapturable="raise", passes=passes)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2 if data > 1 else 0)
    for _ in range(CALLS):
        x = torch.randn(4, TOKENS, D, generator=generator)
        target = torch.randint(CLASSES, (4, TOKENS), generator=generator)
        assert torch.equal(step(x, target), eager.step(x, target))
        for a, b in zip(trainer.parameters, eager.parameters, strict=True):
            assert torch.equal(local(a), local(b))
    return step.stats.replays, step.explain()


KINDS = {
    LossParallel: "tensor, sequence and loss parallelism",
    ByHand: "tensor parallelism by functional collectives, waited for when they are read",
}
IN_PIPELINE = "tensor parallelism in the stages of `Schedule1F1B` on a 2×2 mesh"


def check(kind, data, passes, world):
    for replays, text in run_on_ranks(trained, kind, data, passes, world=world):
        assert replays >= 0.7 * CALLS, text


@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_two_ranks(kind, passes):
    check(kind, 1, passes, 2)


@pytest.mark.long
@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("kind", [*KINDS, InPipeline], ids=lambda kind: kind.__name__)
def test_a_mesh_of_four_ranks(kind, passes):
    check(kind, 2, passes, 4)
