"""Small models whose kernels allocate scratch memory: convolutions, transposed convolutions, an LSTM.

ResNet()(images), UNet()(images), Recurrent()(sequence)      a loss, of one number
ResNet.batch                                                 the size of the batch
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def block(into: int, out: int, stride: int = 1) -> nn.Sequential:
    """Two 3x3 convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    """A block and a shortcut, of 1x1 where the size changes."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.block = block(into, out, stride)
        self.shortcut = nn.Conv2d(into, out, 1, stride=stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.block(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, four residual blocks, a head."""

    batch = (16, 3, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        sizes = ((32, 32, 1), (32, 64, 2), (64, 128, 2), (128, 128, 1))
        self.blocks = nn.Sequential(*(Residual(*each) for each in sizes))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3))).square().mean()


class UNet(nn.Module):
    """Two levels down by pooling and up by transposed convolutions, joined."""

    batch = (4, 3, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((block(3, 32), block(32, 64)))
        self.middle = block(64, 128)
        self.up = nn.ModuleList(
            (nn.ConvTranspose2d(128, 64, 2, stride=2), nn.ConvTranspose2d(64, 32, 2, stride=2))
        )
        self.joined = nn.ModuleList((block(128, 64), block(64, 32)))
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(down(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        return self.head(x).square().mean()


class Recurrent(nn.Module):
    """An LSTM of two layers and a head."""

    batch = (8, 32, 128)

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0]).square().mean()
