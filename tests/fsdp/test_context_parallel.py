"""Context parallelism in captured steps: ranks have parts of a sequence and attend to all of it, beside FSDP2."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.allowance import ample_allowance
from tests.ranks import run_on_ranks

HEADS, DEPTH, LENGTH, CALLS = 2, 4, 8, 16
D = HEADS * DEPTH


class HeadsForSequence(torch.autograd.Function):
    """Ulysses: from a part of the sequence with all heads to the whole one with a part of them, or back."""

    @staticmethod
    def forward(ctx, x, group, gathers_sequence):
        ctx.group, ctx.back = group, not gathers_sequence
        world = dist.get_world_size(group)
        split, joined = (1, 0) if gathers_sequence else (0, 1)
        sent = torch.stack([each.contiguous() for each in x.chunk(world, split)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx, gradient):
        return HeadsForSequence.apply(gradient, ctx.group, ctx.back), None, None


def ulysses(q, k, v, positions, group):
    whole = [HeadsForSequence.apply(each, group, True).transpose(0, 1) for each in (q, k, v)]
    order = torch.empty(dist.get_world_size(group) * len(positions), dtype=torch.long)
    dist.all_gather_into_tensor(order, positions, group=group)
    scores = whole[0] @ whole[1].transpose(1, 2) / math.sqrt(DEPTH)
    scores = scores.masked_fill(order[:, None] < order, -math.inf)
    out = (scores.softmax(-1) @ whole[2]).transpose(0, 1)
    return HeadsForSequence.apply(out.contiguous(), group, False)


class Passed:
    """Tensors that go round a ring, and come in while others are computed with."""

    def __init__(self, tensors, group):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        following = dist.get_global_rank(group, (rank + 1) % world)
        before = dist.get_global_rank(group, (rank - 1) % world)
        self.arriving = [torch.empty_like(each) for each in tensors]
        ops = [dist.P2POp(dist.isend, each.contiguous(), following, group) for each in tensors]
        ops += [dist.P2POp(dist.irecv, each, before, group) for each in self.arriving]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self):
        for work in self.works:
            work.wait()
        return self.arriving


def scores_of(q, k, positions, of_keys):
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0) / math.sqrt(DEPTH)
    return scores.masked_fill(positions[:, None] < of_keys, -math.inf)


class RingAttention(torch.autograd.Function):
    """Keys and values go round, and the softmax is corrected at each turn; in backward, with their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, positions, group):
        world = dist.get_world_size(group)
        out = torch.zeros_like(q).transpose(0, 1)
        high = q.new_full((HEADS, len(q), 1), -1e30)
        total = torch.zeros_like(high)
        turning = [k, v, positions]
        for turn in range(world):
            coming = Passed(turning, group) if turn < world - 1 else None
            scores = scores_of(q, turning[0], positions, turning[2])
            top = torch.maximum(high, scores.amax(-1, keepdim=True))
            weights, scale = torch.exp(scores - top), torch.exp(high - top)
            total = total * scale + weights.sum(-1, keepdim=True)
            out = out * scale + weights @ turning[1].transpose(0, 1)
            high = top
            turning = coming.wait() if coming is not None else turning
        out = out / total
        ctx.save_for_backward(q, k, v, positions, out, high + total.log())
        ctx.group = group
        return out.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, positions, out, log_sum = ctx.saved_tensors
        gradient = gradient.transpose(0, 1)
        along = (gradient * out).sum(-1, keepdim=True)
        dq, turning = torch.zeros_like(q), [k, v, positions]
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(dist.get_world_size(ctx.group)):
            keys, values = turning[0], turning[1].transpose(0, 1)
            weights = torch.exp(scores_of(q, keys, positions, turning[2]) - log_sum)
            dv = dv + (weights.transpose(1, 2) @ gradient).transpose(0, 1)
            inner = weights * (gradient @ values.transpose(1, 2) - along) / math.sqrt(DEPTH)
            dq = dq + (inner @ keys.transpose(0, 1)).transpose(0, 1)
            dk = dk + (inner.transpose(1, 2) @ q.transpose(0, 1)).transpose(0, 1)
            *turning, dk, dv = Passed([*turning, dk, dv], ctx.group).wait()
        return dq, dk, dv, None, None


class Attention(nn.Module):
    def __init__(self, attend, group):
        super().__init__()
        self.project, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.attend, self.group = attend, group

    def forward(self, x, positions):
        q, k, v = self.project(x).view(len(x), 3, HEADS, DEPTH).unbind(1)
        out = self.attend(q, k, v, positions, self.group)
        return x + self.out(out.reshape(len(x), D))


ATTEND = {"ring": RingAttention.apply, "ulysses": ulysses}
WAYS = {
    "ring": "a ring with online softmax, zig-zag",
    "ulysses": "Ulysses: heads for the sequence by `all_to_all_single`",
}


class Trainer:
    """Layers under FSDP2 over all ranks, or over one dimension of a mesh, where the other one has the sequence.

    zigzag: each rank has a piece from the begin of the sequence and one from the end.
    """

    def __init__(self, way, data, zigzag):
        mesh = init_device_mesh(
            "cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "cp")
        )
        self.group, rank = mesh["cp"].get_group(), mesh["cp"].get_local_rank()
        parts = dist.get_world_size(self.group)
        pieces = torch.arange(LENGTH).chunk(2 * parts)
        mine = (2 * rank, 2 * rank + 1)
        if zigzag:
            mine = rank, 2 * parts - 1 - rank
        self.positions = torch.cat([pieces[each] for each in mine])
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(ATTEND[way], self.group) for _ in range(2)])
        for layer in self.layers:
            fully_shard(layer, mesh=mesh["dp", "cp"]._flatten("all") if data == 1 else mesh["dp"])
        self.is_replicated = data > 1
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), 1e-2)

    def step(self, x):
        out = x
        for layer in self.layers:
            out = layer(out, self.positions)
        loss = out.square().mean()
        loss.backward()
        if self.is_replicated:  # the parts of the sequence belong to one batch
            for p in self.layers.parameters():
                dist.all_reduce(p.grad.to_local(), group=self.group)
        nn.utils.clip_grad_norm_(self.layers.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def trained(way, data, zigzag, passes):
    eager, trainer = Trainer(way, data, zigzag), Trainer(way, data, zigzag)
    with ample_allowance():
        step = fz.capture(trainer.step, on_uncapturable="raise", passes=passes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(CALLS):
        x = torch.randn(len(trainer.positions), D, generator=generator)
        assert torch.equal(step(x), eager.step(x))
        ours, theirs = (list(each.layers.parameters()) for each in (trainer, eager))
        assert all(
            torch.equal(a.to_local(), b.to_local()) for a, b in zip(ours, theirs, strict=True)
        )
    return step.stats.replays, step.explain()


def attended(way, zigzag):
    """What the layer's attention is for the whole sequence, and what this rank has computed of it, with gradients."""
    trainer = Trainer(way, 1, zigzag)
    whole = torch.randn(3, LENGTH, HEADS, DEPTH, generator=torch.Generator().manual_seed(1))
    mine = whole[:, trainer.positions].requires_grad_()
    out = ATTEND[way](*mine, trainer.positions, trainer.group)
    out.square().sum().backward()
    whole.requires_grad_()
    wanted = nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in whole), is_causal=True
    )[0].transpose(0, 1)
    wanted.square().sum().backward()
    return (
        torch.allclose(out, wanted[trainer.positions], atol=1e-5),
        torch.allclose(mine.grad, whole.grad[:, trainer.positions], atol=1e-4),
    )


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_the_attention_is_that_of_the_whole_sequence(way, zigzag):
    assert run_on_ranks(attended, way, zigzag, world=2) == [(True, True)] * 2


@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks(way, passes):
    for replays, text in run_on_ranks(trained, way, 1, True, passes, world=2):
        assert replays >= 0.7 * CALLS, text


@pytest.mark.long
@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("way", WAYS)
def test_beside_data_parallelism(way, passes):
    for replays, text in run_on_ranks(trained, way, 2, True, passes, world=4):
        assert replays >= 0.7 * CALLS, text
