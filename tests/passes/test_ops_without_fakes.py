"""A step with ops whose result torch cannot describe without running them: passes leave it right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

pytestmark = pytest.mark.usefixtures("ample_allowance")


@torch.library.custom_op("functionalize_tests::twice_unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("functionalize_tests::twice_raising", mutates_args=())
def raising(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("functionalize_tests::halves_unknown", mutates_args=())
def halves(x: Tensor) -> list[Tensor]:
    return [x[:, :4].clone(), x[:, 4:].clone()]


@raising.register_fake
def _(x: Tensor) -> Tensor:
    raise ValueError("this fake kernel does not answer")


for each in (unknown, raising):
    each.register_autograd(lambda ctx, grad: grad * 2)
halves.register_autograd(lambda ctx, grads: torch.cat(grads, 1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([5, 3, 2, *[1] * (len(x) - 3)])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class Custom(nn.Module):
    """Equal layers with the op, between views and ops that passes change."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.layers = op, nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = self.op(layer(x).relu())
            x = y.reshape(-1, 5, 4)[:, :, :].sin() + 1
        return x


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = halves(self.layer(x.flatten(1)))
        return left.sin().add_(right.t().t())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "packed": Packed,
    "unknown": lambda: Custom(unknown),
    "raising": lambda: Custom(raising),
    "list": Halves,
}


def trained(kind: str, sizes: list[int], **options: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    call = fz.capture(step, **options) if options else step
    losses = [
        call(torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(i))).detach().clone()
        for i, n in enumerate(sizes)
    ]
    return [*losses, *(p.detach() for p in model.parameters())], getattr(call, "stats", None)


@pytest.mark.parametrize("passes", ["default", "fast"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_op_without_a_fake_kernel_is_captured_with_passes(kind: str, passes: str):
    expected, _ = trained(kind, [3] * 6)
    found, stats = trained(kind, [3] * 6, passes=passes)
    assert all(map(torch.equal, expected, found))
    assert stats.captures == 1 and stats.replays >= 3, stats


@pytest.mark.parametrize("kind", MODELS)
def test_calls_of_other_sizes_stay_right(kind: str):
    sizes = [3, 3, 3, 5, 5, 4, 4, 7, 7, 6, 3, 6, 8]
    expected, _ = trained(kind, sizes)
    found, stats = trained(kind, sizes, passes="default")
    assert all(map(torch.equal, expected, found))
    assert stats.replays >= (1 if kind == "packed" else 3), stats  # lengths are constants of a size
