"""The ops of torch's database inside `fz.lazy`, forward and gradient, against eager, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import settings
from torch import Tensor

from tests.deferral.eagerly import same_as_eager
from tests.op_database import OPS, full_name, function_of, plain_runs

BY_NAME = {full_name(op): op for op in OPS}
SKIPPED: dict[str, str] = {}


@pytest.fixture(autouse=True)
def cheap_database() -> Iterator[None]:
    with plain_runs():
        yield


def leaves_of(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def check(op: Any, dtype: torch.dtype, gradients: bool, count: int) -> None:
    torch.default_generator.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), count):
        given = (sample.input, sample.args, sample.kwargs)

        def make(given: Any = given) -> list[Any]:
            def copy(leaf: Any) -> Any:
                if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                    return leaf
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)

            return [pytree.tree_map(copy, given)]

        def call(given: Any) -> Any:
            # What the op reads is pending, if it may be.
            def wait(leaf: Any) -> Any:
                return leaf.clone() if isinstance(leaf, Tensor) and leaf.layout is torch.strided else leaf

            first, args, kwargs = pytree.tree_map(wait, given)
            out = function_of(op)(first, *args, **kwargs)
            if gradients:
                roots = [t for t in leaves_of(out) if t.requires_grad]
                inputs = [t for t in leaves_of(given) if t.requires_grad]
                if roots and inputs:
                    seeds = [torch.ones_like(t) * 2 for t in roots]
                    return out, torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
            return out

        same_as_eager(make, call)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_op(name: str) -> None:
    if name in SKIPPED:
        pytest.skip(SKIPPED[name])
    op, every = BY_NAME[name], settings.default.max_examples > 100
    differentiable = op.supports_autograd and op.supports_dtype(torch.float32, "cpu")
    if differentiable:
        check(op, torch.float32, True, 4 if every else 1)
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
        if op.supports_dtype(dtype, "cpu") and (every or not differentiable):
            check(op, dtype, False, 3)
            if not every:
                break
