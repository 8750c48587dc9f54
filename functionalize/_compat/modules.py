"""Modules and optimizers: hooks on all of them, calls, foreach and fused functions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
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
    """The modules with the rules for which devices and tensors optimizers and clipping use foreach by default."""
    names = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.optim.swa_utils")
    return [importlib.import_module(name) for name in names]


def own_call(module: torch.nn.Module) -> Any:
    """The function that `Module.compile` has set to run in place of the module's call, or None (torch 2.1 to 2.13)."""
    return vars(module).get("_compiled_call_impl")


def set_own_call(module: torch.nn.Module, run: Any) -> None:
    """Set the function that runs in place of the module's call; None: remove it from the instance."""
    if run is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = run


class ReportedCall(functools.partial[Any]):
    """What a recording sets in place of a module's call: `ReportedCall(report, module, the call before)`."""

    __slots__ = ()


def report_calls(modules: Iterable[torch.nn.Module], report: Callable[..., Any]) -> None:
    """Let `report(module, the call before, ...)` run in place of a call of each module, until `end_reports`."""
    for module in modules:
        own = module.__dict__
        own["_compiled_call_impl"] = ReportedCall(report, module, own.get("_compiled_call_impl"))


def end_reports(modules: Iterable[torch.nn.Module]) -> None:
    """Set the calls from before `report_calls`; one that the step has set itself stays."""
    for module in modules:
        own = module.__dict__
        found = own.get("_compiled_call_impl")
        if type(found) is ReportedCall:
            if (before := found.args[1]) is None:
                del own["_compiled_call_impl"]
            else:
                own["_compiled_call_impl"] = before


def without_reports(value: Any) -> Any:
    """The value of a module's attribute; if a recording has replaced it temporarily, the user's value."""
    return value.args[1] if issubclass(type(value), ReportedCall) else value


_MODULES = importlib.import_module("torch.nn.modules.module")
_OPTIMIZERS = importlib.import_module("torch.optim.optimizer")
_MODULE_HOOKS = {
    "forward pre-hooks": "_global_forward_pre_hooks",
    "forward hooks": "_global_forward_hooks",
    "backward pre-hooks": "_global_backward_pre_hooks",
    "backward hooks": "_global_backward_hooks",
}
_OPTIMIZER_HOOKS = {
    "step pre-hooks": "_global_optimizer_pre_hooks",
    "step post-hooks": "_global_optimizer_post_hooks",
}
OPTIMIZER_LABEL = (
    "Optimizer.step#"  # of the range in which `step` calls its hooks (torch 2.0 to 2.15)
)
_of_modules = attrgetter(*_MODULE_HOOKS.values())
_of_optimizers = attrgetter(*_OPTIMIZER_HOOKS.values())


Hooks = tuple[tuple[str, tuple[int, ...]], ...]


def hooks_of_modules() -> Hooks:
    """(description, ids) of the hooks on all modules; ids are never reused (torch 2.11 to 2.13)."""
    return _ids(_MODULE_HOOKS, _of_modules(_MODULES))


def hooks_of_optimizers() -> Hooks:
    """The same of the hooks on all optimizers, which `step` calls."""
    return _ids(_OPTIMIZER_HOOKS, _of_optimizers(_OPTIMIZERS))


def has_hooks_of_modules() -> bool:
    """Whether there may be hooks on all modules."""
    return any(_of_modules(_MODULES))


def has_hooks_of_optimizers() -> bool:
    """Whether there may be hooks on all optimizers."""
    return any(_of_optimizers(_OPTIMIZERS))


def global_hooks(of_optimizers: bool) -> list[Any]:
    """The hooks on all modules, and those on all optimizers."""
    tables = _of_modules(_MODULES)
    tables += _of_optimizers(_OPTIMIZERS) if of_optimizers else ()
    return [table[number] for table in tables for number in _not_ours(table)]


def _ids(names: Iterable[str], tables: Iterable[dict[int, Any]]) -> Hooks:
    found = zip(names, tables, strict=True)
    return tuple((f"the global {name}", tuple(_not_ours(table))) for name, table in found)


def _not_ours(table: dict[int, Any]) -> Iterator[int]:
    """The ids of the hooks that this library has not registered itself, as it does during a recording."""
    for number, hook in table.items():
        if not str(getattr(hook, "__module__", "")).startswith("functionalize."):
            yield number


def packed_sequence_functions() -> list[tuple[Any, str]]:
    """(module, name) of each function of C++ that reads the lengths of a packed sequence without the dispatcher."""
    names = ("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu")
    return [(torch._VF, name) for name in names]


def call_of(module: torch.nn.Module) -> Any:
    """A module's call with its hooks, as it runs where `own_call` is None: a bound method (torch 2.1 to 2.15)."""
    return module._call_impl
