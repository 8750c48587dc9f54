"""Stacks of layers for tests of short runs: equal ones, and ones that differ in a way that a short run must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS = 32, 12
Built = tuple[nn.Module, torch.optim.Optimizer]


class Layer(nn.Module):
    """A residual layer that knows its number and does not use it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(x))


class Scaled(Layer):
    """Uses its number."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(x)) * (1 + self.number)


class Switched(Layer):
    """Uses its number if the batch is not small; for a small batch, all layers do the same."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4 and self.number == 5:
            return x + F.relu(self.inner(x))
        return super().forward(x)


class Counting(Layer):
    """Counts its calls."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Dropping(Layer):
    """Drops some of what it adds."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.inner(x)), 0.1)


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, kind: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(number) for number in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Skipping(Stack):
    """The second half of the layers gets what the first half returned, too."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers[:6]:
            kept.append(x := layer(x))
        for layer in self.layers[6:]:
            x = layer(x) + kept.pop()
        return self.head(x).square().mean()


class Watching(Stack):
    """Reads every hidden state."""

    def forward(self, x: Tensor) -> Tensor:
        seen: Any = 0
        for layer in self.layers:
            x = layer(x)
            seen = seen + x.mean()
        return self.head(x).square().mean() + seen


class Demanding(Stack):
    """Raises unless every layer returns a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
            assert outputs[-1] is not outputs[-2]
        return self.head(outputs[-1]).square().mean()


def sharded(model: Stack) -> Built:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def batch(batch: int = 1) -> Tensor:
    return torch.randn(2 * batch, WIDTH)
