"""A captured step and its eager twin, called with inputs of given sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.lengths.capturing import capture
from tests.step.twins import same_state
from tests.steps import make_loss_step

Loss = Callable[[nn.Module, Tensor], Tensor]


def block(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(width, 2, 16, batch_first=True, dropout=0.1)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))


def plain_loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def trained(
    loss_of: Loss,
    sizes: Sequence[tuple[int, ...]],
    make: Callable[[], nn.Module] = linear,
    fused: bool = True,
    **options: Any,
) -> Any:
    """A captured step after calls of these sizes; it equals its eager twin bit for bit after every call.

    Every new size is compared, if no option says otherwise.
    """
    options = ({} if "dynamic" in options else {"every": 1}) | {"audit": False} | options
    steps, models = [], []
    for _ in range(2):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        steps.append(make_loss_step(lambda x, model=model: loss_of(model, x), optimizer))
        models.append(model)
    captured = capture(steps[0], **options)
    for i, size in enumerate(sizes):
        x = torch.randn(*size, 8, generator=torch.Generator().manual_seed(i))
        found = []
        for step in (captured, steps[1]):
            torch.manual_seed(i)
            found.append(step(x.clone()))
        assert torch.equal(*found), (i, size)
        assert same_state(*models), (i, size)
    return captured


def lengths(*several: int, times: int = 3) -> list[tuple[int, int]]:
    return [(2, length) for length in several for _ in range(times)]
