"""Modules and optimizers: hooks on all of them, calls, foreach and fused functions."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch


def fused_optimizer_functions() -> list[tuple[Any, str]]:
    """(module, name) of the functions by which `torch.optim` calls its fused kernels."""
    names = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    return [(torch, name) for name in names if hasattr(torch, name)]


def checkpoint_module(module: torch.nn.Module) -> None:
    """Checkpoint the activations of a module in place, composable with `fully_shard` (2.11 to 2.13)."""
    from torch.distributed._composable import checkpoint

    checkpoint(module)


def foreach_owners() -> list[Any]:
    """The modules that keep where and for which tensors optimizers and clipping take foreach by default."""
    names = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.optim.swa_utils")
    return [importlib.import_module(name) for name in names]


def own_call(module: torch.nn.Module) -> Any:
    """What runs instead of a call of this module, if `Module.compile` has set something (torch 2.1 to 2.13)."""
    return vars(module).get("_compiled_call_impl")


def set_own_call(module: torch.nn.Module, run: Any) -> None:
    """Set that, or (None) leave it to the class again."""
    if run is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = run


def hooks_of_everything() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Hooks on all modules and all optimizers, by their numbers, which are never given twice (torch 2.11 to 2.13)."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = (
        ("forward pre-hooks", module._global_forward_pre_hooks),
        ("forward hooks", module._global_forward_hooks),
        ("backward pre-hooks", module._global_backward_pre_hooks),
        ("backward hooks", module._global_backward_hooks),
        ("step pre-hooks", optimizer._global_optimizer_pre_hooks),
        ("step post-hooks", optimizer._global_optimizer_post_hooks),
    )
    return tuple((f"the global {name}", tuple(_not_ours(table))) for name, table in tables)


def _not_ours(table: dict[int, Any]) -> Iterator[int]:
    """Leaves out what a recording hangs there for its own time."""
    for number, hook in table.items():
        if not str(getattr(hook, "__module__", "")).startswith("functionalize."):
            yield number
