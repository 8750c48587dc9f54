"""`torch.autocast("cuda")` for fake CPU tensors that stand for CUDA tensors.

    with torch.autocast("cuda", dtype=torch.bfloat16):
        F.linear(x, w)          in bfloat16, as on either device
        F.layer_norm(x, ...)    in float32: on CUDA's list, not on the CPU's
        torch.cat([x, y])       unchanged: on the CPU's list, not on CUDA's

The context switches on the CPU's autocast. Where the lists of the two devices differ, the CPU's autocast kernels are
overridden, only for fake tensors in a thread with a target. Ops on both lists are treated alike on both devices (except
`prod` and `grid_sampler`, which are overridden too), so casts of weights are cached as on CUDA. A context that names
the CPU applies CUDA's rules as well: its tensors stand for CUDA tensors.
Source: aten/src/ATen/autocast_mode.h; a test compares its lists with those below.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import autocast_mode

from functionalize._compat.dispatch import (
    excluded,
    kernel_of,
    op_overrides,
    ops_with_kernel,
    redispatch_below,
)
from functionalize._compat.graphs import pytree

Find = Callable[[Any], Any]
_KEY = "AutocastCPU"

# The policies of autocast_mode.h and their ops. LOWER: cast to the context's dtype. FLOAT: cast to float32.
LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
FLOAT = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm "
    "logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# Result in float32, by the argument `dtype`.
FLOAT_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
# Overloads that take dimension names; torch 2.13 removed them from the lists.
FLOAT_RESULT_BY_NAME = (
    "prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname "
    "sum.dim_DimnameList"
)
FLOAT_NORM = "norm.Scalar norm.ScalarOpt_dim norm.names_ScalarOpt_dim"
# Cast to the widest dtype among the arguments.
WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
# On both lists, under different policies.
_DIFFER = ("prod", "prod.dim_int", "prod.dim_Dimname", "grid_sampler")


@contextmanager
def overridden(find: Find) -> Iterator[None]:
    """Register the overrides inside the `with`. find: returns the target for a tensor, or None: the original kernel."""
    here, cuda = set(ops_with_kernel(_KEY)), set(ops_with_kernel("AutocastCUDA"))
    kinds = {LOWER: _lower, FLOAT: _float, FLOAT_RESULT: _float_result}
    kinds |= {FLOAT_RESULT_BY_NAME: _float_result, FLOAT_NORM: _float_norm, WIDEST: _widest}
    policies = {
        f"aten::{name}": policy for names, policy in kinds.items() for name in names.split()
    }
    differ = {f"aten::{name}" for name in _DIFFER}
    with op_overrides("aten") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when a kernel replaces another
            for name in sorted((here ^ cuda) | (here & differ)):
                if name.startswith("aten::") and (name not in cuda or name in policies):
                    op = _overload(name)
                    original = kernel_of(op, _KEY) if name in here else None
                    kernel = _kernel(find, op, original, policies[name] if name in cuda else None)
                    library.impl(op, kernel, _KEY, with_keyset=True)
        yield


def _overload(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _kernel(find: Find, op: Any, original: Any, policy: Any) -> Any:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if find(_first(args)) is None:
            if original is not None:
                return original.call_boxed(keys, *args, **kwargs)
        elif policy is not None:
            args, kwargs = policy(op, args, kwargs)
            with excluded(_KEY):
                return op(*args, **kwargs)
        return redispatch_below(op, keys, _KEY, *args, **kwargs)

    return kernel


def _first(args: Any) -> Any:
    return next((a for a in pytree.tree_leaves(args) if isinstance(a, Tensor)), None)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _is_cast(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dtype != torch.float64


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Arguments:
    def cast(value: Any) -> Any:
        return value.to(dtype) if _is_cast(value) else value

    converted: Arguments = pytree.tree_map(cast, (args, kwargs))
    return converted


def _lower(op: Any, args: Any, kwargs: Any) -> Arguments:
    return _cast(args, kwargs, torch.get_autocast_dtype("cpu"))


def _float(op: Any, args: Any, kwargs: Any) -> Arguments:
    return _cast(args, kwargs, torch.float32)


def _float_result(op: Any, args: Any, kwargs: Any) -> Arguments:
    at = [a.name for a in op._schema.arguments].index("dtype")
    dtype = args[at] if at < len(args) else kwargs.get("dtype")
    if dtype is not None or not _is_cast(args[0]):
        return args, kwargs
    return args[:at], {**kwargs, "dtype": torch.float32}


def _float_norm(op: Any, args: Any, kwargs: Any) -> Arguments:
    """torch casts inside `norm`, by its `dtype` overload: a cast before it has the same result in more memory."""
    return _cast(args, kwargs, torch.float32)


def _widest(op: Any, args: Any, kwargs: Any) -> Arguments:
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if _is_cast(t)]
    wide = any(t.dtype == torch.float32 for t in tensors)
    return _cast(args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cpu"))


# -- the contexts ----------------------------------------------------------------------------------------


def patches(planning: Callable[[], Any]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) for functions with a device argument. planning: the target of this thread, or None."""
    yield autocast_mode.autocast, "__init__", _init(planning, autocast_mode.autocast.__init__)
    enabled = torch.is_autocast_enabled
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        yield torch, name, _query(planning, enabled, getattr(torch, name))


def _init(planning: Callable[[], Any], original: Any) -> Any:
    def __init__(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if planning() and device_type in ("cuda", "cpu"):
            outside = torch.is_autocast_enabled("cpu")
            default = torch.get_autocast_dtype("cpu") if outside else torch.float16
            dtype, device_type = dtype or default, "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    __init__.__doc__ = original.__doc__
    return __init__


def _query(planning: Callable[[], Any], enabled: Any, original: Any) -> Any:
    def query(*device_type: str) -> Any:
        if planning() and device_type in ((), ("cuda",)) and enabled("cpu"):
            return original("cpu")
        return original(*device_type)

    query.__doc__ = original.__doc__
    return query
