"""The plain tensors inside wrapper subclasses: their order, their paths, what is left out; resizes reach each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.util.tensor_wrappers import (
    is_plain,
    local_tensor,
    plain_tensors,
    plain_tensors_by_path,
)


def test_a_tensor_is_inside_itself() -> None:
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
        ((path, inner),) = plain_tensors_by_path(tensor)
        assert path == () and inner is tensor
    assert not plain_tensors(3) and not plain_tensors([torch.ones(2)]) and not plain_tensors(Tensor)


def test_a_parameter_of_a_wrapper_is_no_plain_tensor() -> None:
    wrapper = TwoTensor(torch.ones(2), torch.zeros(2))
    assert is_plain(torch.ones(2)) and is_plain(nn.Parameter(torch.ones(2)))
    for value in (wrapper, nn.Parameter(wrapper), 3, None, Tensor):
        assert not is_plain(value)
    assert len(plain_tensors(nn.Parameter(wrapper))) == 2


def test_wrappers_in_wrappers() -> None:
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    nested = TwoTensor(TwoTensor(a, b), c)
    found = list(plain_tensors_by_path(nested))
    assert [path for path, _ in found] == [("a", "a"), ("a", "b"), ("b",)]
    assert all(inner is t for (_, inner), t in zip(found, (a, b, c), strict=True))
    assert all(x is y for x, y in zip(plain_tensors(nested), (a, b, c), strict=True))


def test_the_mesh_of_a_dtensor_is_no_tensor() -> None:
    with fake_process_group(0, 2):
        local = torch.ones(2)
        sharded = DTensor.from_local(local, init_device_mesh("cpu", (2,)))
        ((path, inner),) = plain_tensors_by_path(sharded)
        assert path == ("_local_tensor",) and inner is sharded._local_tensor
        assert local_tensor(sharded) is inner and plain_tensors(sharded)[0] is inner


def test_the_local_tensor_is_that_of_a_plain_dtensor() -> None:
    class Own(DTensor):
        pass

    with fake_process_group(0, 2):
        nested = DTensor.from_local(
            TwoTensor(torch.ones(2), torch.zeros(2)), init_device_mesh("cpu", (2,))
        )
        assert local_tensor(nested) is None and len(plain_tensors(nested)) == 2
        own = Own.__new__(Own, torch.ones(2), nested._spec, requires_grad=False)
    assert [local_tensor(value) for value in (own, torch.ones(2), 3, None)] == [None] * 4


def read_and_free(wrapper: Any) -> Tensor:
    """The sum of what is inside a wrapper, which is freed."""
    out = torch.stack([t.sum() for t in plain_tensors(wrapper)]).sum()
    fz.functions.resize_storage_bytes_(wrapper, 0)
    return out


def traced(fn: Callable[..., Any], *args: Any) -> Any:
    return fz.functions.trace(fn, *args)(*args)


def prepassed(fn: Callable[..., Any], *args: Any) -> Any:
    return fz.functions.functionalize_storage(fn)(*args)


@pytest.mark.parametrize("run", [traced, prepassed])
def test_a_resize_of_a_wrapper_is_one_of_each_inner_tensor(run: Callable[..., Any]) -> None:
    def nested() -> Any:
        return TwoTensor(TwoTensor(torch.ones(2), torch.ones(2) * 2), torch.ones(2) * 3)

    eager, ours = nested(), nested()
    assert torch.equal(run(read_and_free, ours), read_and_free(eager))
    for tensors in (plain_tensors(eager), plain_tensors(ours)):
        assert [t.untyped_storage().nbytes() for t in tensors] == [0, 0, 0]


@pytest.mark.parametrize("run", [traced, prepassed])
def test_a_resize_of_a_dtensor(run: Callable[..., Any]) -> None:
    with fake_process_group(0, 2):
        local = torch.ones(2)
        sharded = DTensor.from_local(local, init_device_mesh("cpu", (2,)))
        assert run(read_and_free, sharded).item() == 2
        assert sharded._local_tensor.untyped_storage().nbytes() == 0
