"""The generated Python bindings of ops: they parse arguments, above all lists, faster than `OpOverload._op` does.

    binding_of(aten.view.default)    torch._C.TensorBase.view, called with the op's own arguments; None: has none

Both end in the same call of the dispatcher. A binding chooses the overload by its arguments; this table has those
overloads alone that are chosen for the arguments that their schema declares. `tests/run/test_boxed.py` compares what
reaches the dispatcher. A binding gives a tuple where the op returns a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import DisableTorchFunction as without_function_modes  # bindings ask them, ops do not

__all__ = ["without_function_modes"]

_METHODS = """
    add_.Tensor as_strided.default expand.default mul_.Tensor permute.default pow_.Scalar rsqrt_.default select.int
    split.Tensor split_with_sizes.default squeeze.dim t.default transpose.int unbind.int unsqueeze.default view.default
"""
_FUNCTIONS = """
    _chunk_cat.default _log_softmax.default _log_softmax_backward_data.default _softmax.default
    _softmax_backward_data.default add.Tensor addmm.default bmm.default cat.default clone.default cos.default
    div.Tensor embedding.default exp.default mean.dim mm.default mul.Tensor native_layer_norm.default neg.default
    pow.Tensor_Scalar relu.default rsqrt.default sigmoid.default sin.default split_with_sizes_copy.default sqrt.default
    stack.default sub.Tensor sum.dim_IntList tanh.default
"""
_OF_NN = "gelu.default gelu_backward.default silu.default"


def _table() -> Mapping[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    homes = (
        (torch._C.TensorBase, _METHODS),
        (torch._C._VariableFunctions, _FUNCTIONS),
        (torch._C._nn, _OF_NN),
    )
    for home, names in homes:
        for each in names.split():
            name, overload = each.split(".")
            op = getattr(getattr(torch.ops.aten, name, None), overload, None)
            binding = getattr(home, name, None)
            if op is not None and binding is not None:
                found[op] = binding
    return found


BINDINGS = _table()


def binding_of(op: Any) -> Callable[..., Any] | None:
    """The binding of an op; None if it has none, or if another overload might be called."""
    return BINDINGS.get(op)
