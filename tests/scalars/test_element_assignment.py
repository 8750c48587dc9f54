"""`buffer[index] = number`: C++ makes a tensor of the number without an op, so a recording makes it by an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import functionalize as fz
from tests.scalars.bits import bits

pytestmark = pytest.mark.usefixtures("ample_allowance")


class Model(nn.Module):
    """A layer with a ring of results, as contrastive learning and replay buffers have."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("buf", torch.zeros(4, 4))
        self.n = 0
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.n += 1
        self._write(self, y.detach())
        return y.sum() + self.buf.sum() + self.ptr.sum()


def _moco(m: Any, y: Tensor) -> None:
    ptr = int(m.ptr)
    m.buf[:, ptr] = y[0]
    m.ptr[0] = (ptr + 1) % 4


def _counted(m: Any, y: Tensor) -> None:
    m.ptr[0] = m.n


def _of_a_result(m: Any, y: Tensor) -> None:
    m.buf[1, 2] = y.sum().item()


def _of_two(m: Any, y: Tensor) -> None:
    m.buf[0, 0], m.buf[1] = y.sum().item() * 0.5, m.n / 3


def _by_mask(m: Any, y: Tensor) -> None:
    m.buf[m.buf <= 0.5] = m.n * 0.1
    m.buf[:3][y > 0] = 2


def _by_slices(m: Any, y: Tensor) -> None:
    m.buf[:2] = m.n
    m.buf[..., 1] = True
    m.ptr[:] = 2.7
    m.buf[torch.tensor([0, 1]), 2] = m.n * 0.3
    m.buf[None, 3, 3:] = -0.0


def _constant(m: Any, y: Tensor) -> None:
    m.buf[3, 3], m.ptr[-1] = 0.25, 3


WRITES = (_moco, _counted, _of_a_result, _of_two, _by_mask, _by_slices, _constant)


@pytest.mark.parametrize("write", WRITES)
def test_a_number_assigned_to_elements_is_live(write):
    def make() -> Callable[[Tensor], Any]:
        torch.manual_seed(0)
        model = Model(write)
        optimizer = SGD(model.parameters(), lr=0.01)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach(), model.buf.clone(), model.ptr.clone()

        return step

    eager, step = make(), fz.capture(make(), audit=False)
    for _ in range(24):
        x = torch.randn(3, 4)
        assert bits(step(x)) == bits(eager(x))
    assert step.stats.replays >= 15


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
VALUES = (0, 1, -3, 2.7, -0.0, 1e9, float("inf"), float("nan"), True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_becomes_an_element_as_in_eager(dtype):
    for value in VALUES:

        def write(x: Tensor, value: Any = value) -> Tensor:
            found = x.to(dtype)
            found[1] = value
            found[x > 0.5] = value
            return found

        x, step = torch.tensor([0.2, 0.4, 0.6]), fz.capture(write, audit=False)
        try:
            expected = bits(write(x))
        except RuntimeError as error:
            with pytest.raises(RuntimeError) as found:
                step(x)
            assert str(found.value).splitlines()[0] == str(error).splitlines()[0]
            continue
        assert [bits(step(x)) for _ in range(4)] == [expected] * 4
        assert step.stats.replays
