"""The boxed runner calls ops through Python bindings: the dispatcher sees the same ops with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize._compat.bindings import BINDINGS

aten = torch.ops.aten
X, Y, V = torch.rand(4, 6) + 0.5, torch.rand(4, 6) + 0.5, torch.rand(6)
ARGUMENTS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.add_.Tensor: ((X, Y), {"alpha": 2}),
    aten.as_strided.default: ((X, [2, 3], [1, 2], 4), {}),
    aten.expand.default: ((V, [4, -1]), {}),
    aten.mul_.Tensor: ((X, Y), {}),
    aten.permute.default: ((X, [1, 0]), {}),
    aten.pow_.Scalar: ((X, 3), {}),
    aten.rsqrt_.default: ((X,), {}),
    aten.select.int: ((X, 1, -2), {}),
    aten.split.Tensor: ((X, 4, -1), {}),
    aten.split_with_sizes.default: ((X, [2, 4], 1), {}),
    aten.squeeze.dim: ((X[:1], 0), {}),
    aten.t.default: ((X,), {}),
    aten.transpose.int: ((X, 0, -1), {}),
    aten.unbind.int: ((X, 1), {}),
    aten.unsqueeze.default: ((X, -1), {}),
    aten.view.default: ((X, [2, -1, 3]), {}),
    aten._chunk_cat.default: (([X, Y], 0, 2), {}),
    aten._log_softmax.default: ((X, 1, False), {}),
    aten._log_softmax_backward_data.default: ((X, Y, 1, torch.float32), {}),
    aten._softmax.default: ((X, 1, False), {}),
    aten._softmax_backward_data.default: ((X, Y, 1, torch.float32), {}),
    aten.add.Tensor: ((X, 2.5), {"alpha": 2}),
    aten.addmm.default: ((V[:4], X, Y.t()), {"beta": 2}),
    aten.bmm.default: ((X[None], Y.t()[None]), {}),
    aten.cat.default: (([X, Y], -1), {}),
    aten.clone.default: ((X,), {"memory_format": torch.contiguous_format}),
    aten.cos.default: ((X,), {}),
    aten.div.Tensor: ((X, Y), {}),
    aten.embedding.default: ((X, torch.tensor([1, 3]), -1, False, False), {}),
    aten.exp.default: ((X,), {}),
    aten.mean.dim: ((X, [1], True), {"dtype": torch.float64}),
    aten.mm.default: ((X, Y.t()), {}),
    aten.mul.Tensor: ((X, 3), {}),
    aten.native_layer_norm.default: ((X, [6], V, None, 1e-5), {}),
    aten.neg.default: ((X,), {}),
    aten.pow.Tensor_Scalar: ((X, 2), {}),
    aten.relu.default: ((X,), {}),
    aten.rsqrt.default: ((X,), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.sin.default: ((X,), {}),
    aten.split_with_sizes_copy.default: ((X, [2, 4], 1), {}),
    aten.sqrt.default: ((X,), {}),
    aten.stack.default: (([X, Y], 1), {}),
    aten.sub.Tensor: ((X, Y), {"alpha": 3}),
    aten.sum.dim_IntList: ((X, [0], True), {"dtype": torch.float64}),
    aten.tanh.default: ((X,), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.gelu_backward.default: ((X, Y), {"approximate": "tanh"}),
    aten.silu.default: ((X,), {}),
}


class Dispatched(TorchDispatchMode):
    """The calls that reach the dispatcher, each with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.calls.append((op, repr(args), repr(kwargs or {})))
        return out


def calls_of(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    # Fresh arguments: some ops write theirs.
    fresh = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, args)
    with Dispatched() as dispatched:
        out = function(*fresh, **kwargs)
    return dispatched.calls, out


@pytest.mark.parametrize("op", BINDINGS, ids=str)
def test_a_binding_reaches_the_overload_of_its_op(op: Any) -> None:
    args, kwargs = ARGUMENTS[op]
    expected, wanted = calls_of(op, args, kwargs)
    found, got = calls_of(BINDINGS[op], args, kwargs)
    assert found == expected
    assert found[0][0] is op
    assert repr(list(got) if isinstance(got, (list, tuple)) else got) == repr(
        list(wanted) if isinstance(wanted, (list, tuple)) else wanted
    )


def parts(x: Tensor) -> tuple[Tensor, ...]:
    rows = aten.slice.Tensor(x, 0, 1, 3)
    last = aten.slice.Tensor(x, 0, -2)
    other = aten.slice.Tensor(x, 1, 1, 3)
    second = aten.slice.Tensor(x, 0, 0, 4, 2)
    return rows + 1, last + 1, other + 1, second + 1


def test_slices_of_every_form() -> None:
    program = fz.functions.trace(parts, X)
    for mine, its in zip(program(X), parts(X), strict=True):
        assert torch.equal(mine, its)


class Counting(torch.overrides.TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += "relu" in getattr(func, "__name__", "")
        return func(*args, **(kwargs or {}))


def test_a_function_mode_of_the_caller_does_not_see_the_ops_of_a_replay() -> None:
    program = fz.functions.trace(lambda x: aten.relu.default(x), X)
    with Counting() as mode:
        result = program(X)
    assert mode.seen == 0
    assert torch.equal(result, X.relu())
