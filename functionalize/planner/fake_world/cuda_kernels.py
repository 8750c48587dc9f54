"""Dispatcher overrides for ops that CUDA computes by other kernels than the CPU, and the report of which kernels ran.

    aten.scaled_dot_product_attention    the fused attention that the device runs, see sdpa_choice.py
    aten.dropout                         native_dropout, which keeps a mask of one byte per element
    aten._fused_rms_norm                 one op that keeps one number per row; on CPU it is made of a dozen ops
    aten.softmax, log_softmax            from float16 to float32 in one op
    aten.native_layer_norm               keeps its statistics in float32 for inputs of half precision

    choices.rows        [Choice("scaled_dot_product_attention", "cudnn", "the first in the order of sm_90", 64), ...]
    print(choices.text())                which kernels the target is assumed to run, how often, and why; by first call

The overrides apply to fake CPU tensors in a thread with a target; all other calls run the original kernel. They are
registered at autograd's key: so they also apply in backward (recomputation), where no `TorchFunctionMode` is on, and
autograd records the ops that they call. Whether a convolution or a batch norm runs by cuDNN or torch is not modelled:
no tensor saved for backward depends on it, except the reserve space of cuDNN's batch norm. A recurrent layer runs as on
the CPU (an LSTM as oneDNN's op where there is one, others step by step), and is reported so: cuDNN runs each as one op,
whose saved tensors are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.dispatch import (
    composite_kernel,
    composite_override,
    has_kernel,
    kernel_of,
    op_overrides,
)
from functionalize.planner.fake_world import sdpa_choice as attention

aten = torch.ops.aten


@dataclass(frozen=True)
class Choice:
    """An op ran a kernel `count` times for one reason."""

    op: str
    kernel: str
    reason: str
    count: int


class Choices:
    """The choices so far. target: the name of the target."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._counts: dict[tuple[str, str, str], int] = {}

    def __repr__(self) -> str:
        return f"<Choices for {self.target}: {len(self._counts)} kernels>"

    def __str__(self) -> str:
        return self.text()

    def note(self, op: str, kernel: str, reason: str) -> None:
        """Count one more call of `op`."""
        key = op, kernel, reason
        self._counts[key] = self._counts.get(key, 0) + 1

    @property
    def rows(self) -> list[Choice]:
        """A row per op, kernel and reason."""
        return [Choice(*key, count) for key, count in self._counts.items()]

    def kernels(self, op: str) -> dict[str, int]:
        """How often each kernel of an op ran."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.op == op:
                found[row.kernel] = found.get(row.kernel, 0) + row.count
        return found

    def text(self) -> str:
        """One line per choice."""
        if not self._counts:
            return f"for {self.target}: no op had a choice of kernels"
        lines = [
            f"  {row.op} -> {row.kernel} ({row.count} times): {row.reason}" for row in self.rows
        ]
        return "\n".join([f"for {self.target}:", *lines])


# -- overrides -------------------------------------------------------------------------------------

_ATTENTION = aten.scaled_dot_product_attention.default
_DROPOUT = aten.dropout.default
_RMS_NORM = aten._fused_rms_norm.default
_LAYER_NORM = aten.native_layer_norm.default
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_SOFTMAXES = {"softmax.int": aten._softmax.default, "log_softmax.int": aten._log_softmax.default}


class KernelOptions(Protocol):
    """The attributes of a `Target` that the overrides read."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        ...

    @property
    def attention(self) -> str | None:
        """The attention kernel to run, None for the device's own choice."""
        ...


Found = tuple[KernelOptions, Choices]
Find = Callable[[Any], Found | None]


@contextmanager
def overridden(find: Find) -> Iterator[None]:
    """Register the overrides inside the `with`. find: returns the target for a tensor, or None: the original kernel."""
    attended = _attention(find)
    with op_overrides("aten") as library, composite_override(_ATTENTION, attended):
        library.impl("scaled_dot_product_attention", attended, "AutogradCPU")
        library.impl("dropout", _dropout(find), "AutogradCPU")
        for name, fused in _SOFTMAXES.items():
            library.impl(name, _softmax(find, name, fused), "AutogradCPU")
        for name in _RECURRENT:
            library.impl(f"{name}.input", _recurrent(find, name), "AutogradCPU")
        if not has_kernel(_RMS_NORM.name(), "CUDA"):
            library.impl("_fused_rms_norm", _needs_a_device, "CUDA")
        rms_norm = _rms_norm(find, kernel_of(_RMS_NORM, "AutogradCUDA"))
        library.impl("_fused_rms_norm", rms_norm, "AutogradCPU", with_keyset=True)
        yield


def _attention(find: Find) -> Any:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        found = find(query)
        call = attention.AttentionCall(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if found is None or not attention.is_valid(call):
            options = {"scale": scale, "enable_gqa": enable_gqa}
            return composite_kernel(
                _ATTENTION, query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        target, choices = found
        chosen = attention.choose(call, target.capability, target.attention)
        choices.note("scaled_dot_product_attention", chosen.kernel, chosen.reason)
        return attention.run(chosen.kernel, call)

    return scaled_dot_product_attention


def _dropout(find: Find) -> Any:
    def dropout(x: Tensor, p: float, train: bool) -> Any:
        found = find(x) if train and 0 < p < 1 and x.numel() else None
        if found is None:
            return composite_kernel(_DROPOUT, x, p, train)
        found[1].note("dropout", "native_dropout", "one op on CUDA, with a mask of bool")
        return torch.native_dropout(x, p, train)[0]

    return dropout


def _softmax(find: Find, name: str, fused: Any) -> Any:
    op = getattr(aten, name.removesuffix(".int")).int

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        widens = x.dtype == torch.float16 and dtype == torch.float32
        if not widens or find(x) is None:
            return composite_kernel(op, x, dim, dtype)
        return fused(x, dim, True)

    return softmax


def _recurrent(find: Find, name: str) -> Any:
    op = getattr(aten, name).input

    def recurrent(*args: Any, **kwargs: Any) -> Any:
        found = find(args[0])
        if found is not None:
            found[1].note(name, "as on a CPU", "what cuDNN's single op keeps is not modelled")
        return composite_kernel(op, *args, **kwargs)

    return recurrent


def _rms_norm(find: Find, fused: Any) -> Any:
    def rms_norm(
        keys: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Any:
        found = find(x)
        if found is None:
            return composite_kernel(_RMS_NORM, x, shape, weight, eps)
        found[1].note("rms_norm", "_fused_rms_norm", "one op on CUDA")
        return fused.call_boxed(keys, x, shape, weight, eps)

    return rms_norm


def _needs_a_device(*args: Any, **kwargs: Any) -> Any:
    """A CUDA kernel to register in a build without CUDA: autograd's kernel then dispatches to the fused op."""
    raise NotImplementedError("aten::_fused_rms_norm has no CUDA kernel in this build of torch")


def as_on_cuda(func: Any, out: Any) -> Any:
    """The output of an op on fake CPU tensors, in the dtypes that a CUDA device returns."""
    if func is not _LAYER_NORM or out is NotImplemented:
        return out
    result, *statistics = out
    if result.dtype not in (torch.float16, torch.bfloat16):
        return out
    return (result, *(torch.empty_like(t, dtype=torch.float32) for t in statistics))
