"""The kind of kernel that an op runs, by the name of the op: what its efficiency is looked up by.

    kind_of_kernel("addmm")                       "matmul"
    kind_of_kernel("_fused_adamw_")               "optimizer"
    kind_of_kernel("mul")                         "pointwise": any op that has no other kind

An op in place has the kind of its functional form. An op that is not listed and has FLOPs counts as a matmul.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    COPY,
    COSTLY,
    CUDNN,
    CUDNN_BACKWARD,
    LOOKUP,
    MATMUL,
    NORM,
    OPTIMIZER,
    POINTWISE,
    RANDOM,
    REDUCTION,
)

# Ops of several instructions per element: exponentials, roots, divisions by polynomials.
_COSTLY = (
    "cos cosh elu erf exp exp2 expm1 gelu gelu_backward log log1p log2 log_sigmoid mish pow reciprocal rsqrt sigmoid "
    "sigmoid_backward silu silu_backward sin softplus sqrt tan tanh tanh_backward"
)
_RANDOM = (
    "bernoulli exponential native_dropout normal normal_functional rand rand_like randint randn "
    "randn_like uniform"
)
_REDUCTIONS = (
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax amin any argmax cumsum "
    "linalg_vector_norm logsumexp max mean min nll_loss_backward nll_loss_forward prod std sum var"
)
_COPIES = (
    "_chunk_cat _to_copy cat clone copy constant_pad_nd contiguous fill flip repeat roll slice_backward slice_scatter "
    "split_with_sizes_copy stack zero zeros zeros_like full full_like ones ones_like select_backward"
)
_LOOKUPS = "embedding embedding_dense_backward gather index index_add index_put index_select scatter scatter_add"
_BY_NAME: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(_COSTLY.split(), COSTLY),
        **dict.fromkeys(_RANDOM.split(), RANDOM),
        **dict.fromkeys(_REDUCTIONS.split(), REDUCTION),
        **dict.fromkeys(_COPIES.split(), COPY),
        **dict.fromkeys(_LOOKUPS.split(), LOOKUP),
        "convolution": CONVOLUTION,
        "convolution_backward": CONVOLUTION,
    }
)
_CUDNN = (CUDNN, CUDNN_BACKWARD)
# The parts of names that tell a kind, in this order.
_PARTS = (("_norm", NORM), ("_fused_", OPTIMIZER), ("_foreach_", OPTIMIZER))


def kind_of_kernel(name: str, flops: int = 0) -> str:
    """The kind of an op, by its name without namespace and overload. flops: of the op."""
    if "scaled_dot_product" in name:
        forward, backward = _CUDNN if "cudnn" in name else (ATTENTION, ATTENTION_BACKWARD)
        return backward if "_backward" in name else forward
    plain = name if name.startswith("__") else name.removesuffix("_")
    found = _BY_NAME.get(plain)
    if found is None:
        found = next((kind for part, kind in _PARTS if part in plain), None)
    if found is None or (flops and found not in (CONVOLUTION, NORM)):
        return MATMUL if flops else found or POINTWISE
    return found
