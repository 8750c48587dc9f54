"""A compact Llama 3 in its three sizes under `fully_shard`: all that a plan needs; it imports nothing of this package.

    python -m functionalize plan examples.llama --world 64 --set size=8B --set length=8192
    fz.plan(build, step, inputs=inputs, world=16384, grid={"size": ["8B", "70B", "405B"]})

Shapes are those of the Llama 3 models (arXiv:2407.21783, table 3). Trained in bfloat16 with float32 master weights,
reductions in float32, AdamW; every block is wrapped and resharded after forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

VOCABULARY = 128_256


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int = 8


SHAPES = {
    "8B": Shape(32, 4096, 14_336, 32),
    "70B": Shape(80, 8192, 28_672, 64),
    "405B": Shape(126, 16_384, 53_248, 128),
}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.key = nn.Linear(shape.width, shape.key_heads * self.size, bias=False)
        self.value = nn.Linear(shape.width, shape.key_heads * self.size, bias=False)
        self.out = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Block(nn.Module):
    """A layer: attention and a gated feed-forward, each after a norm and added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens to the loss of predicting the next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        size = shape.width // shape.heads
        inverse = 500_000.0 ** (-torch.arange(0, size, 2).float() / size)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.outer(torch.arange(tokens.size(1)).float(), self.inverse).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(
    size: str = "8B",
    layers: int | None = None,
    fused: bool = True,
    mesh: DeviceMesh | None = None,
    offload: bool = False,
):
    """The sharded model of a size, and its optimizer.

    layers: None for all layers of that size. mesh: of one dimension (sharded), or two (replicated, sharded); None: all
    ranks shard. offload: keep parameters, gradients and the optimizer's state in host memory.
    """
    shape = SHAPES[size]
    if layers is not None:
        shape = Shape(layers, shape.width, shape.hidden, shape.heads, shape.key_heads)
    model = Llama(shape)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=where)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused)


def inputs(batch: int = 1, length: int = 8192, accumulate: int = 1) -> tuple[Tensor, ...]:
    """The microbatches of this rank in one step."""
    return tuple(torch.randint(0, VOCABULARY, (batch, length)) for _ in range(accumulate))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *microbatches: Tensor) -> Tensor:
    """One training step, with the mean gradient of its microbatches."""
    for tokens in microbatches:
        loss = model(tokens)
        (loss / len(microbatches) if len(microbatches) > 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
