"""Digests of tensors: equal for equal bytes in order, different for every single change."""

from __future__ import annotations

import pytest
import torch

from functionalize.audit.digest import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 3, 7, 8, 200_001])
def test_every_element_counts(dtype: torch.dtype, numel: int) -> None:
    values = torch.arange(numel).to(dtype)
    assert digest(values) == digest(values.clone())
    for at in {0, numel // 2, numel - 1} if numel else ():
        other = values.clone()
        other[at] += 1 if dtype is not torch.bfloat16 else other[at] + 1
        assert digest(other) != digest(values)


def test_the_order_the_size_and_the_dtype_count() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    others = values.t(), values.flatten(), values.flip(0), values.view(torch.int32), -values
    assert len({digest(each) for each in (values, *others)}) == 6


def test_views_with_other_strides_and_offsets_are_read_in_order() -> None:
    values = torch.arange(30, dtype=torch.int32).reshape(5, 6)
    assert digest(values.t().contiguous()) == digest(values.t())
    assert digest(values[1:, 1:]) == digest(values[1:, 1:].clone())
    assert digest(values.flatten()[1:]) == digest(values.flatten()[1:].clone())
    assert digest(torch.tensor([1 + 2j]).conj()) == digest(torch.tensor([1 - 2j]))


def test_signed_zeros_and_nans_are_compared_by_their_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))
