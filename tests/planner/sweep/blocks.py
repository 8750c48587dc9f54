"""A block of two linear layers, for tests that plan a stack of equal ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64


class Block(nn.Module):
    """A linear layer to four times the width, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))
