"""The ops of torch's database inside `fz.lazy`, forward and gradient, against eager, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tests.deferral.eagerly import Empty, outcome, same_as_eager
from tests.op_database import OPS, full_name, function_of, plain_runs

BY_NAME = {full_name(op): op for op in OPS}
UNDEFINED = frozenset(  # their results have no contents
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
# Under any dispatch mode torch itself computes the gradient, or the result, by other ops: with other strides, in
# another order, without a check. These are compared with a run under an empty mode.
OTHERWISE = frozenset({"linalg.eig", "linalg.pinv", "ormqr", "pinverse"})
# LAPACK's `gelsy` rounds by where its memory lies: eager gives four results for the same numbers.
UNSTABLE = frozenset({"linalg.lstsq", "linalg.lstsq.grad_oriented"})


@pytest.fixture(autouse=True)
def cheap_database() -> Iterator[None]:
    with plain_runs():
        yield


USUAL = frozenset(
    {
        *("addmm", "bmm", "cat", "clamp", "cumsum", "div.no_rounding_mode", "exp", "index_select"),
        *("log_softmax", "masked_fill", "matmul", "max.reduction_with_dim", "mean", "softmax"),
        *("nn.functional.conv2d", "nn.functional.cross_entropy", "nn.functional.dropout"),
        *("nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm"),
        *("nn.functional.scaled_dot_product_attention", "split", "std", "where"),
    }
)


def leaves_of(tree: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def as_attribute(op: Any) -> Callable[..., Any]:
    """The function of an op, as a user finds it: some are replaced while a block is active."""
    found = function_of(op)
    return getattr(torch, op.name, found) if op.name == "tensor_split" else found


def check(
    op: Any,
    dtype: torch.dtype,
    gradients: bool,
    count: int,
    compare: Callable[..., Any] = same_as_eager,
) -> None:
    torch.default_generator.manual_seed(0)
    eager = Empty() if full_name(op) in OTHERWISE else None
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
                return (
                    leaf.clone()
                    if isinstance(leaf, Tensor) and leaf.layout is torch.strided
                    else leaf
                )

            first, args, kwargs = pytree.tree_map(wait, given)
            out = as_attribute(op)(first, *args, **kwargs)
            if gradients:
                roots = [t for t in leaves_of(out) if t.requires_grad]
                inputs = [t for t in leaves_of(given) if t.requires_grad]
                if roots and inputs:
                    seeds = [torch.ones_like(t) * 2 for t in roots]
                    return out, torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
            return out

        compare(make, call, eager=eager)


NAMES = sorted(BY_NAME.keys() - UNDEFINED - UNSTABLE)
EACH = 10  # without --fuzz-long every tenth op is tried, and the usual ones


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All ops, or some."""
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--fuzz-long")
        names = NAMES if every else sorted(USUAL.union(NAMES[::EACH]))
        metafunc.parametrize("name", names)


def test_op(name: str, request: pytest.FixtureRequest) -> None:
    op, every = BY_NAME[name], request.config.getoption("--fuzz-long")
    differentiable = op.supports_autograd and op.supports_dtype(torch.float32, "cpu")
    if differentiable:
        check(op, torch.float32, True, 6 if every else 1)
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
        if op.supports_dtype(dtype, "cpu") and (every or not differentiable):
            check(op, dtype, False, 4 if every else 1)
            if not every:
                break


def test_ormqr_has_other_strides_under_an_empty_mode() -> None:
    """The reason for `OTHERWISE`."""
    differs = False

    def compare(make: Callable[[], Any], call: Callable[..., Any], **_: Any) -> None:
        nonlocal differs
        differs |= outcome(make, call, Empty()) != outcome(make, call, nullcontext())

    check(BY_NAME["ormqr"], torch.float32, True, 4, compare)
    assert differs
