"""A guard of a training step on torch's modes and global hooks.

    with torch.no_grad(): step(batch)      grad mode is False, was True

The values are read together, by functions of C where torch has them, and `_NAMES` has the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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


@dataclass(frozen=True, slots=True)
class ModeGuard:
    """torch's modes and global hooks are those of the capture. of_optimizers: the hooks on optimizers, too."""

    facts: tuple[tuple[str, Any], ...]
    of_optimizers: bool = True
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def now() -> ModeGuard:
        """The guard for the modes as they are."""
        return ModeGuard(_named(_modes(), hooks_of_optimizers()))

    def without_optimizers(self) -> ModeGuard:
        """The guard of a step that has called no optimizer's `step`."""
        return ModeGuard(self.facts[: -len(hooks_of_optimizers())], False)

    def failure(self, call: Call) -> str | None:
        read = call.reader.result
        hooks = read(_optimizer_hooks) if self.of_optimizers else ()
        for (name, old), (_, new) in zip(self.facts, _named(read(_modes), hooks), strict=True):
            if old != new:
                return f"{name} is {new}, was {old}"
        return None


_NAMES = (
    *FLAGS.values(),
    *("CPU autocast", "CUDA autocast", "the autocast dtype", "the fast path of attention"),
    *("the hooks on saved tensors", "the function modes"),
)


def _modes() -> tuple[list[Any], Any]:
    """The values of the modes, in the order of their names, and the hooks on all modules."""
    found = [read() for read in FLAGS]
    found += map(torch.is_autocast_enabled, ("cpu", "cuda"))
    found += torch.get_autocast_dtype("cpu"), torch.backends.mha.get_fastpath_enabled()
    found += tuple(map(_spot, saved_tensor_hooks())), tuple(map(_mode_text, function_modes()))
    return found, hooks_of_modules() if has_hooks_of_modules() else None


def _optimizer_hooks() -> Any:
    return hooks_of_optimizers() if has_hooks_of_optimizers() else None


def _named(modes: tuple[list[Any], Any], of_optimizers: Any) -> tuple[tuple[str, Any], ...]:
    values, of_modules = modes
    if of_modules is None:
        of_modules = hooks_of_modules()
    if of_optimizers is None:
        of_optimizers = hooks_of_optimizers()
    return (*zip(_NAMES, values, strict=True), *of_modules, *of_optimizers)


def _mode_text(mode: Any) -> str:
    """The class of a function mode; of `torch.device(...)`, used as a context, also which one."""
    device = getattr(mode, "device", None) if type(mode).__module__ == "torch.utils._device" else ""
    return f"{_spot(type(mode))} {device}".rstrip()


def _spot(value: Any) -> str:
    """Where a function or a class is defined: equal for two functions from one definition."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    line = getattr(getattr(value, "__code__", None), "co_firstlineno", "")
    return f"{getattr(value, '__module__', '')}.{name}{line and ':'}{line}"
