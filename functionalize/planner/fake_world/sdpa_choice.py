"""Which attention kernel a CUDA device runs for a call of `scaled_dot_product_attention`, and the call of that kernel.

    choose(call, (9, 0), forced=None)   ->  Chosen("cudnn", "the first in the order of sm_90")
    run("cudnn", call)                  ->  the output of aten._scaled_dot_product_cudnn_attention, called as in C++

Source: the rules of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp, torch 2.11 to 2.13, and
the cuDNN of the wheels for CUDA 13. The wheels for CUDA 12 have an older cuDNN and try flash first on an H100, too: use
`Target(attention="flash")` for them. A `torch.nn.attention.sdpa_kernel` context is respected, and so is its order.
Where torch versions differ the older rule holds: cuDNN accepts head sizes up to 128 (and 192 with 128 for the value),
memory-efficient attention accepts no grouped heads (torch accepts them after 2.13, pull request 191085).
None of the fused kernels stores the attention scores, so memory hardly depends on which of them runs.
Refusals: math attention that neither the target nor `sdpa_kernel` requests. It stores the scores of every head, so a
plan that mistook it for a fused kernel would be wrong by several times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from functionalize._compat.dispatch import sdpa_order
from functionalize._compat.stacks import stack_here
from functionalize.errors import TargetError
from functionalize.util.user_stack import line_of

aten = torch.ops.aten
Capability = tuple[int, int]

MATH = "math"
_HALF = (torch.float16, torch.bfloat16)
_NAMES = {
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
    SDPBackend.MATH.value: MATH,
}
KERNELS = tuple(_NAMES.values())
# The order of kernels unless `sdpa_kernel(..., set_priority=True)` sets another one, and that of sm_90 and sm_100.
_PLAIN_ORDER = ("flash", "efficient", MATH, "cudnn")
_CUDNN_FIRST = ("cudnn", "flash", "efficient", MATH)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one call of `scaled_dot_product_attention`.

    query, key, value: of shape (batch, heads, length, head size). grouped: the argument `enable_gqa`, under which
    several heads of the query share one head of the key and of the value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether autograd records the call, so that a backward may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)

    def __str__(self) -> str:
        shapes = [
            f"{name} {t.dtype} {list(t.shape)}".replace("torch.", "")
            for name, t in zip(("query", "key", "value"), self.tensors, strict=True)
        ]
        if self.mask is not None:
            shapes.append(f"mask {self.mask.dtype} {list(self.mask.shape)}".replace("torch.", ""))
        options = [f"dropout {self.dropout}"] if self.dropout else []
        options += ["is_causal"] * self.is_causal + ["enable_gqa"] * self.grouped
        return ", ".join(shapes + options)


class Chosen(NamedTuple):
    """A kernel, and why the device runs it."""

    kernel: str
    reason: str


def choose(call: AttentionCall, capability: Capability, forced: str | None) -> Chosen:
    """The kernel that a device of this compute capability runs for the call.

    forced: the kernel that the target names; None: the device's own choice.
    Raises `TargetError` if `forced` refuses the call, or if only math attention accepts it and nothing requests math.
    """
    if forced == MATH:
        return Chosen(MATH, "the target says so")
    refused: dict[str, str] = {}
    for kernel in _order(capability) if forced is None else (forced,):
        if kernel == MATH:
            if not torch.backends.cuda.math_sdp_enabled():
                continue
            if not any(enabled() for enabled in _ENABLED.values()):
                return Chosen(MATH, "sdpa_kernel allows no other")
            break
        reason = refusal(kernel, call, capability)
        if reason is None:
            return Chosen(kernel, _why(refused, capability, forced))
        refused[kernel] = reason
    raise _refused(call, refused, capability, forced)


def _why(refused: dict[str, str], capability: Capability, forced: str | None) -> str:
    if forced is not None:
        return "the target says so"
    if not refused:
        return f"the first in the order of {_sm(capability)}"
    others = "; ".join(f"{kernel}: {reason}" for kernel, reason in refused.items())
    return f"others refuse ({others})"


def _refused(
    call: AttentionCall, refused: dict[str, str], capability: Capability, forced: str | None
) -> TargetError:
    if forced is None:
        for kernel in _ENABLED:
            reason = refusal(kernel, call, capability)
            refused.setdefault(kernel, reason or "comes after math in the order of kernels")
    reasons = "\n".join(f"    {kernel}: {reason}" for kernel, reason in refused.items())
    if forced is not None:
        what = f"the target says attention={forced!r}, which refuses"
    elif torch.backends.cuda.math_sdp_enabled():
        what = (
            f"{_sm(capability)} would take math attention, which keeps the scores of every head in memory, "
            "because the fused kernels refuse"
        )
    else:
        what = f"{_sm(capability)} has no kernel for it, and would stop here; they refuse"
    return TargetError(
        f"scaled_dot_product_attention({call}): {what}\n{reasons}\n  {line_of(stack_here())}\n"
        '  Change the call so that a kernel takes it, or accept math attention with Target(attention="math"), '
        "or for this call with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


def _order(capability: Capability) -> tuple[str, ...]:
    """The order in which kernels are tried: that of `sdpa_kernel(..., set_priority=True)`, else the device's own."""
    order = tuple(_NAMES[number] for number in sdpa_order() if number in _NAMES)
    if order == _PLAIN_ORDER and capability[0] in (9, 10):
        return _CUDNN_FIRST
    return order


_ENABLED: dict[str, Callable[[], bool]] = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
}


def refusal(kernel: str, call: AttentionCall, capability: Capability) -> str | None:
    """Why a fused kernel does not accept a call; None if it accepts it."""
    return next(_RULES[kernel](call, capability), None)


def _sm(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _common(
    kernel: str, call: AttentionCall, capability: Capability, oldest: Capability, grouped: bool
) -> Iterator[str]:
    if not _ENABLED[kernel]():
        yield "switched off (sdpa_kernel or torch.backends.cuda)"
    if any(t.is_nested for t in call.tensors):
        yield "nested tensors are not modelled"
    if not oldest <= capability <= (12, 1):
        yield f"needs {_sm(oldest)} to sm_121, not {_sm(capability)}"
    if [t.dim() for t in call.tensors] != [4, 4, 4]:
        yield f"needs 4 dimensions, not {[t.dim() for t in call.tensors]}"
    if 0 in (call.query.size(-2), call.key.size(-2)):
        yield "a sequence is empty"
    yield from _strides(call, any_if_one=kernel != "efficient")
    yield from _heads(call, grouped, same=kernel != "cudnn")


def _strides(call: AttentionCall, any_if_one: bool) -> Iterator[str]:
    last = [t.stride(-1) for t in call.tensors]
    if last != [1, 1, 1] and not (any_if_one and call.query.size(-1) == 1):
        yield f"the last dimensions have strides {last}, not 1"
    if call.mask is not None and call.mask.stride(-1) != 1:
        yield f"the last dimension of the mask has stride {call.mask.stride(-1)}, not 1"


def _heads(call: AttentionCall, grouped: bool, same: bool) -> Iterator[str]:
    if len({t.size(0) for t in call.tensors}) > 1:
        yield f"the batches differ: {[t.size(0) for t in call.tensors]}"
    heads = [t.size(1) for t in call.tensors]
    if len(set(heads)) == 1:
        return
    if not (call.grouped and grouped):
        yield f"the numbers of heads differ: {heads}"
    elif heads[0] % heads[1] or heads[0] % heads[2] or (same and heads[1] != heads[2]):
        yield f"heads {heads} are not groups of the same size"


def _dtypes(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> Iterator[str]:
    dtypes = [str(t.dtype).removeprefix("torch.") for t in call.tensors]
    if len(set(dtypes)) > 1 or call.query.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        yield f"needs {names}, not {dtypes[0] if len(set(dtypes)) == 1 else dtypes}"


def _flash(call: AttentionCall, capability: Capability) -> Iterator[str]:
    yield from _common("flash", call, capability, (8, 0), grouped=True)
    if call.mask is not None:
        yield "takes no mask"
    sizes = {t.size(-1) for t in call.tensors}
    if len(sizes) > 1 or max(sizes) > 256:
        yield f"needs equal head sizes up to 256, not {[t.size(-1) for t in call.tensors]}"
    if call.trains and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        size = max(sizes)
        if size > 192 and (call.dropout > 0 or size <= 224):
            yield f"cannot train with head size {size} on {_sm(capability)}"
    if call.is_causal and call.query.size(-2) != call.key.size(-2):
        yield (f"is_causal needs equal lengths, not {call.query.size(-2)} and {call.key.size(-2)}")
    yield from _dtypes(call, _HALF)


def _efficient(call: AttentionCall, capability: Capability) -> Iterator[str]:
    yield from _common("efficient", call, capability, (5, 0), grouped=False)
    bits = 16 if call.query.dtype in _HALF else 32
    cores = capability[0] >= 8 or (capability[0] == 7 and bits == 16)
    unit = max(4 if capability[0] >= 8 else 1, 128 // bits if cores else 1)
    sizes = [t.size(-1) for t in call.tensors]
    if sizes[0] != sizes[1] or sizes[0] % unit or sizes[2] % unit or 0 in sizes:
        yield f"needs head sizes that {unit} divides, not {sizes}"
    half = _HALF if capability[0] >= 8 else _HALF[:1]
    yield from _dtypes(call, (*half, torch.float32))


def _cudnn(call: AttentionCall, capability: Capability) -> Iterator[str]:
    yield from _common("cudnn", call, capability, (8, 0), grouped=True)
    if torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        yield "is not deterministic"
    yield from _dtypes(call, _HALF)
    yield from _cudnn_mask(call)
    if (call.dropout * 16) % 1:
        yield f"needs dropout in steps of 1/16, not {call.dropout}"
    if max(call.query.shape[:2]) > 65535:
        yield f"needs at most 65535 samples and heads, not {list(call.query.shape[:2])}"
    size, last = call.query.size(-1), call.value.size(-1)
    wide = capability in ((9, 0), (10, 0), (10, 3)) and (size, last) == (192, 128)
    if max(size, last) > 128 and not wide:
        yield f"needs head sizes up to 128, not {[size, last]}"
    if size % 8 or last % 8:
        yield f"needs head sizes that 8 divides, not {[size, last]}"
    if call.key.size(-2) == 1 or (call.dropout and call.query.size(-2) == 1):
        yield "a sequence has length 1"


def _cudnn_mask(call: AttentionCall) -> Iterator[str]:
    if call.mask is None:
        return
    if call.mask.requires_grad:
        yield "the mask needs a gradient"
    *batch, rows, columns = call.mask.shape
    like = (*call.query.shape[:2],) if len(batch) == 2 else ()
    fits = rows in (1, call.query.size(-2)) and columns in (1, call.key.size(-2))
    fits = fits and len(batch) in (0, 2)
    if not fits or any(n not in (1, m) for n, m in zip(batch, like, strict=False)):
        yield f"a mask of shape {list(call.mask.shape)} does not fit"


_RULES = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}


def is_valid(call: AttentionCall) -> bool:
    """Whether the arguments are acceptable in eager mode; if not, torch's own error should be raised."""
    same = len({t.dtype for t in call.tensors}) == 1 and len({t.device for t in call.tensors}) == 1
    mask = call.mask
    if mask is not None:
        allowed = (torch.bool, torch.float32, call.query.dtype)
        same = same and mask.dtype in allowed
    return same and all(t.dim() >= 2 for t in call.tensors)


# -- calls of the kernels' ops, with the same padding and casts as in C++ ------------------------------


def run(kernel: str, call: AttentionCall) -> Tensor:
    """The output of the op that runs the kernel; autograd records that op."""
    return _RUNS[kernel](call)


def _run_flash(call: AttentionCall) -> Tensor:
    size = call.query.size(-1)
    scale = 1 / math.sqrt(size) if call.scale is None else call.scale
    # Flash attention needs head sizes that 8 divides: C++ pads them and slices the output.
    padded = [F.pad(t, (0, -size % 8)) if size % 8 else t for t in call.tensors]
    out: Tensor = aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return out[..., :size] if size % 8 else out


def _run_efficient(call: AttentionCall) -> Tensor:
    bias = _as_bias(call, -math.inf)
    if bias is not None:
        # The kernel loads the bias in vectors of 8: C++ pads rows whose strides do not allow that.
        if bias.stride(-1) != 1 or any(n % 8 for n in bias.stride()[:-1]):
            columns = bias.size(-1)
            bias = F.pad(bias, (0, 8 - columns % 8))[..., :columns]
        bias = bias.expand(*call.query.shape[:-1], call.key.size(-2))
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        *call.tensors, bias, call.trains, call.dropout, call.is_causal, scale=call.scale
    )[0]
    return out


def _run_cudnn(call: AttentionCall) -> Tensor:
    bias = _as_bias(call, -65504.0)
    out: Tensor = aten._scaled_dot_product_cudnn_attention(
        *call.tensors, bias, call.trains, call.dropout, call.is_causal, False, scale=call.scale
    )[0]
    return out


def _run_math(call: AttentionCall) -> Tensor:
    bias = _as_bias(call, -math.inf)
    out: Tensor = aten._scaled_dot_product_attention_math(
        *call.tensors,
        bias,
        call.dropout,
        call.is_causal,
        None,
        scale=call.scale,
        enable_gqa=call.grouped,
    )[0]
    return out


def _as_bias(call: AttentionCall, masked: float) -> Tensor | None:
    """The mask as a bias added to the scores: a mask of bool becomes 0 where it is True and `masked` elsewhere."""
    mask = call.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(
        mask, 0.0, torch.scalar_tensor(masked, dtype=call.query.dtype, device=mask.device)
    )


_RUNS: dict[str, Callable[[AttentionCall], Tensor]] = {
    "flash": _run_flash,
    "efficient": _run_efficient,
    "cudnn": _run_cudnn,
    MATH: _run_math,
}
