"""A guard of a training step on torch's modes and global hooks.

    with torch.no_grad(): step(batch)      grad mode is False, was True

Invariant: `_modes` and `_modes_without_names` read the same; the former has the words, the latter is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from functionalize._compat.autograd import saved_tensor_hooks
from functionalize._compat.dispatch import FLAGS, function_modes
from functionalize._compat.modules import (
    has_hooks_of_modules,
    has_hooks_of_optimizers,
    hooks_of_modules,
    hooks_of_optimizers,
)
from functionalize.ir.inputs import Call
from functionalize.util.unchanged import Unchanged


@dataclass(frozen=True, slots=True)
class ModeGuard:
    """torch's modes and global hooks are those of the capture. of_optimizers: the hooks on optimizers, too."""

    facts: tuple[tuple[str, Any], ...]
    of_optimizers: bool = True

    @staticmethod
    def now() -> ModeGuard:
        """The guard for the modes as they are."""
        return ModeGuard((*_modes(), *hooks_of_optimizers()))

    def without_optimizers(self) -> ModeGuard:
        """The guard of a step that has called no optimizer's `step`."""
        return ModeGuard(self.facts[: -len(hooks_of_optimizers())], False)

    def watched(self, call: Call, facts: Unchanged) -> None:
        facts.read(_modes_without_names)
        if self.of_optimizers:
            facts.read(_optimizer_hooks)

    def failure(self, call: Call) -> str | None:
        hooks = hooks_of_optimizers() if self.of_optimizers else ()
        for (name, old), (_, new) in zip(self.facts, (*_modes(), *hooks), strict=True):
            if old != new:
                return f"{name} is {new}, was {old}"
        return None


def _modes() -> tuple[tuple[str, Any], ...]:
    return (
        ("grad mode", torch.is_grad_enabled()),
        ("inference mode", torch.is_inference_mode_enabled()),
        ("CPU autocast", torch.is_autocast_enabled("cpu")),
        ("CUDA autocast", torch.is_autocast_enabled("cuda")),
        ("the autocast dtype", torch.get_autocast_dtype("cpu")),
        ("the default dtype", torch.get_default_dtype()),
        ("deterministic mode", torch.are_deterministic_algorithms_enabled()),
        ("the autocast cache", torch.is_autocast_cache_enabled()),
        ("anomaly detection", torch.is_anomaly_enabled()),
        ("oneDNN", torch.backends.mkldnn.enabled),
        ("the number of threads", torch.get_num_threads()),
        ("the fast path of attention", torch.backends.mha.get_fastpath_enabled()),
        ("attention", tuple(f"{n}: {on()}" for n, on in _ATTENTION)),
        ("the hooks on saved tensors", tuple(map(_spot, saved_tensor_hooks()))),
        ("the function modes", tuple(map(_mode_text, function_modes()))),
        *hooks_of_modules(),
    )


def _modes_without_names() -> list[Any]:
    """The same values."""
    found = [read() for read in FLAGS]
    found += map(torch.is_autocast_enabled, ("cpu", "cuda"))
    found += torch.get_autocast_dtype("cpu"), torch.backends.mha.get_fastpath_enabled()
    found += tuple(map(_spot, saved_tensor_hooks())), tuple(map(_mode_text, function_modes()))
    return [*found, hooks_of_modules()] if has_hooks_of_modules() else found


def _optimizer_hooks() -> Any:
    return hooks_of_optimizers() if has_hooks_of_optimizers() else ()


# Which kernels scaled_dot_product_attention may use. The CPU reads the same flags as CUDA.
_ATTENTION = (
    ("flash", torch.backends.cuda.flash_sdp_enabled),
    ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled),
    ("math", torch.backends.cuda.math_sdp_enabled),
    ("cudnn", torch.backends.cuda.cudnn_sdp_enabled),
)


def _mode_text(mode: Any) -> str:
    """The class of a function mode; of `torch.device(...)`, used as a context, also which one."""
    device = getattr(mode, "device", None) if type(mode).__module__ == "torch.utils._device" else ""
    return f"{_spot(type(mode))} {device}".rstrip()


def _spot(value: Any) -> str:
    """Where a function or a class is defined: equal for two functions from one definition."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", "")
    return f"{getattr(value, '__module__', '')}.{name}{line and ':'}{line}"
