"""Which ops may wait: those whose only effect is what they write, and that raise nothing because of data.

    may_wait(aten.mm.default)          True: pure, and its errors are seen from sizes and dtypes
    may_wait(aten.add_.Tensor)         True: writes one storage
    may_wait(aten.embedding.default)   False: raises for an index that is out of range, at the user's line
    may_wait(aten.bernoulli_.float)    False: moves a generator, whose state anybody may read

The list is positive: an op that is not on it runs at once, after what is pending if it depends on that. So a new op of
torch is slow here, and not wrong.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from functionalize.recorder.op_kinds import kind_of

_NAMES = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot"),
    *("_addmm_activation", "convolution", "convolution_backward", "_convolution"),
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm"),
    *("native_group_norm_backward", "native_batch_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("glu_backward", "gelu_backward", "silu_backward"),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    *("embedding_dense_backward", "nll_loss_backward", "nll_loss2d_backward"),
    *("mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward"),
    *("huber_loss", "huber_loss_backward", "soft_margin_loss", "soft_margin_loss_backward"),
    *("cat", "stack", "clone", "_to_copy", "copy", "fill", "zero"),
    *("cumsum", "cumprod", "logcumsumexp", "sort", "topk"),
    *("avg_pool2d", "avg_pool2d_backward", "max_pool2d_with_indices"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"),
    *("upsample_nearest2d", "upsample_nearest2d_backward"),
    *("upsample_bilinear2d", "upsample_bilinear2d_backward"),
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d"),
    *("replication_pad1d", "replication_pad2d", "tril", "triu", "flip", "roll", "repeat"),
    *("slice_backward", "select_backward", "diagonal_backward", "unfold_backward"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
    "split_with_sizes_copy",
)
_FUSED = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")

# Data decides whether these raise; of the second group only in integers, by a division by zero.
_RAISE = frozenset({"mvlgamma", "binary_cross_entropy", "multi_margin_loss", "isin"})
_DIVIDE = frozenset({"div", "divide", "floor_divide", "remainder", "fmod", "pow", "_foreach_div"})

_DRAWS_BY_ARGUMENT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@cache
def may_wait(func: Any) -> bool:
    """Whether an op may wait, if its arguments are strided tensors on a CPU and constants."""
    if func.namespace != "aten":
        return False
    op, tags, name = kind_of(func), func.tags, base_name(func)
    at_once = (op.metadata, op.composite, op.to_python, op.sized_by_data, op.returns_numbers)
    if any(at_once) or op.reads_no_data or op.reads_grad_mode or op.makes:
        return False
    if op.random and func is not _DRAWS_BY_ARGUMENT:
        return False
    if torch.Tag.data_dependent_output in tags or torch.Tag.maybe_aliasing_or_mutating in tags:
        return False
    if name in _RAISE:
        return False
    listed = torch.Tag.pointwise in tags or torch.Tag.reduction in tags or name in _NAMES
    return listed or name.startswith(_FUSED)


def draws(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call of an op that may wait draws random numbers: attention with dropout."""
    return func is _DRAWS_BY_ARGUMENT and len(args) > 3 and args[3] != 0


def draws_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call of an op that may draw random numbers draws none: attention without dropout."""
    return func is _DRAWS_BY_ARGUMENT and not draws(func, args)


@cache
def divides(func: Any) -> bool:
    """Whether the op raises for a division by zero if all of its tensors hold integers."""
    return base_name(func) in _DIVIDE


@cache
def is_shaped_by_types(func: Any) -> bool:
    """Whether the value of a number among the arguments has no influence on the size of the result."""
    name = base_name(func)
    return torch.Tag.pointwise in func.tags or name in ("fill", "addmm") or name.startswith(_FUSED)


@cache
def base_name(func: Any) -> str:
    """The name of an op without its namespace, its overload and the underscore of an in-place op."""
    name: str = func._schema.name.split("::")[-1]
    return name if name.startswith("__") else name.rstrip("_")
