"""Fakes do not show the values of what they stand for, and look as what eager makes, on every release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize._compat.fakes import DataDependentOutputException, FakeTensorMode
from functionalize.errors import UncapturableError
from functionalize.ir.fake_mode import fake_like, fake_mode
from functionalize.planner.fake_world.world import WorldMode
from tests.discharge.eager import same_as_eager

aten = torch.ops.aten
NUMBERS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)


def emptied(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_fake_has_no_value(dtype: torch.dtype) -> None:
    mode = fake_mode()
    fake = fake_like(mode, torch.ones((), dtype=dtype))
    assert (fake.shape, fake.dtype, fake.device.type) == ((), dtype, "cpu")
    with pytest.raises(DataDependentOutputException):
        fake.item()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_an_empty_number_is_traced(dtype: torch.dtype) -> None:
    def grown(x: Tensor) -> Tensor:
        fz.functions.resize_storage_bytes_(x, x.dtype.itemsize)
        x.fill_(1)
        return x + x

    same_as_eager(grown, emptied(torch.ones((), dtype=dtype)))


def read(x: Tensor, y: Tensor) -> Any:
    return y * x.item()


def as_an_index(x: Tensor, y: Tensor) -> Any:
    return y[x]


def as_a_number(x: Tensor, y: Tensor) -> Any:
    return y * 2 if x else y


def as_a_size(x: Tensor, y: Tensor) -> Any:
    return y.new_ones(int(x))


USES: list[tuple[Callable[..., Any], torch.dtype]] = [
    *((fn, torch.int64) for fn in (read, as_an_index, as_a_number, as_a_size)),
    *((fn, torch.float64) for fn in (read, as_a_number, as_a_size)),
]


@pytest.mark.parametrize(("fn", "dtype"), USES)
def test_no_program_depends_on_a_value_in_silence(
    fn: Callable[..., Any], dtype: torch.dtype
) -> None:
    """From torch 2.14 on the fake of a number would give it; not that of a float32, nor one that was written."""
    x, y = torch.ones((), dtype=dtype), torch.ones(3)
    message = "gives Python a number, or a size, that depends on data"
    with pytest.raises(UncapturableError, match=message):
        fz.functions.trace(fn, x, y)
    with pytest.raises(UncapturableError, match=message):
        fz.functions.trace(lambda y: fn(x, y), y)  # found by itself


# -- kernels ---------------------------------------------------------------------------------------


def test_no_elements_split() -> None:
    """Up to torch 2.12 the fake of it raises an IndexError."""

    def fn(x: Tensor, y: Tensor) -> Any:
        (whole,) = x.split(2)
        return whole.add_(1), y.split(2), y.split(2, 1), x.split(0), x.chunk(3)

    same_as_eager(fn, torch.zeros(0), torch.zeros(0, 3))


SHAPES = ((5, 6, 7), (4, 2, 8), (1, 6, 2))
ORDERS = ((0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1))
DIMS = ([0], [1], [2], [0, 1], [1, 2], [2, 1], [2, 0], [0, 1, 2], [1, 2, 0])
TRANSFORMS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "r2c": lambda x, dims: aten._fft_r2c(x, dims, 0, False),
    "r2c, one side": lambda x, dims: aten._fft_r2c(x, dims, 0, True),
    "c2c": lambda x, dims: aten._fft_c2c(x + 0j, dims, 0, True),
    "c2r": lambda x, dims: aten._fft_c2r(x + 0j, dims, 0, 2 * x.shape[dims[-1]] - 2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_have_the_strides_of_eager(name: str) -> None:
    """Torch 2.11 gives most of them others."""
    mode, transform = fake_mode(), TRANSFORMS[name]
    for shape in SHAPES:
        for order in ORDERS:
            x = torch.randn(shape).permute(order)
            for dims in DIMS:
                if name == "c2r" and x.shape[dims[-1]] == 1:
                    continue
                real, fake = transform(x, dims), transform(fake_like(mode, x), dims)
                assert looks(fake) == looks(real), (shape, order, dims)


def looks(tensor: Tensor) -> Any:
    strides = [st for size, st in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tensor.shape, strides, tensor.dtype


def test_what_is_made_of_transforms() -> None:
    def fn(x: Tensor) -> Any:
        y = torch.fft.rfft(x, dim=0)
        y[0].mul_(2)
        y.real.t()[1].zero_()
        z = torch.fft.fft2(x)
        z.t().add_(y[0, 0])
        return y.reshape(-1), z.reshape(-1), torch.fft.irfft2(z.t()).reshape(-1)

    same_as_eager(fn, torch.randn(6, 6))
    same_as_eager(fn, torch.randn(6, 6).t())


# -- aliases ---------------------------------------------------------------------------------------


def lstm_backward() -> tuple[Any, tuple[Any, ...]]:
    """The op and its arguments, as a step of a small LSTM calls it."""
    found: list[tuple[Any, tuple[Any, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten.mkldnn_rnn_layer_backward.default:
                found.append((func, args))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.nn.LSTM(6, 8)(torch.ones(3, 2, 6))[0].sum().backward()
    op, args = found[0]
    return op, tuple(a.detach() if isinstance(a, Tensor) else a for a in args)


def storages(results: Any) -> int:
    return len({each.untyped_storage()._cdata for each in results})


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's LSTM")
def test_results_of_one_op_share_no_storage_in_the_first_call_either() -> None:
    """Torch's kernel gives one tensor for both biases, and its cache two, from the second call in a process on."""
    op, args = lstm_backward()
    assert storages(op(*args)) == 7
    for make in (fake_mode, lambda: WorldMode("cpu")):
        FakeTensorMode.cache_clear()
        for _ in range(2):
            mode = make()
            fakes = [fake_like(mode, a) if isinstance(a, Tensor) else a for a in args]
            with torch.no_grad(), mode:
                assert storages(op(*fakes)) == 7


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN's LSTM")
@pytest.mark.parametrize("passes", ["cleanup", "default", "fast"])
def test_an_lstm_under_the_first_passes_of_a_process(passes: str) -> None:
    FakeTensorMode.cache_clear()
    torch.manual_seed(0)
    model = torch.nn.LSTM(6, 8, 2, dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = fz.capture(train, passes=passes)
    for _ in range(4):
        step(torch.ones(3, 2, 6))
    assert step.stats.replays == 2
