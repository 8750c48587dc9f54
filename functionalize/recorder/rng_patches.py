"""Replacements of torch's functions that read and set the default random generators, used while a capture runs.

    torch.set_rng_state(state)     ->  torch.ops.functionalize.set_rng_state(state, device('cpu'))

The originals do not dispatch. Each replacement calls an op of this package (see `ir/generators.py`), which the recorder
records like any other. So activation checkpointing with dropout, `fork_rng` and seeds set inside a step are recorded.
Refusals: `torch.seed()`, which a replay cannot repeat, and `initial_seed()`, which returns a number to Python that no
guard checks. `Checks.check_generators` detects generators set by other means (`torch.default_generator.set_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.compilers import load_dynamo
from functionalize.ir.generators import GET_STATE, SEED, SET_STATE
from functionalize.util.gc_pause import only_young_collections

Function = Callable[..., Any]
Recorders = Callable[[], list[Any]]
_CPU = torch.device("cpu")


def patches(recorders: Recorders) -> Iterator[tuple[ModuleType, str, Function]]:
    """(module, name, replacement) of each function. recorders: returns the recorders active in this thread."""
    # It replaces `torch.manual_seed` for good when it is imported, which a step may do.
    with only_young_collections():  # a third of the time of the import
        load_dynamo()
    for modules, replaced in (
        ((torch, torch.random), _PLAIN),
        ((torch.cuda, torch.cuda.random), _CUDA),
    ):
        for name, replacement in replaced.items():
            original = getattr(modules[0], name)
            new = _while_recording(recorders, original, replacement, modules[0].__name__)
            for module in modules:
                yield module, name, new


def _while_recording(
    recorders: Recorders, original: Function, replacement: Function | None, module: str
) -> Function:
    def function(*args: Any, **kwargs: Any) -> Any:
        active = recorders()
        if active and replacement is not None:
            return replacement(original, *args, **kwargs)
        for recorder in active:
            if recorder.checks is not None:
                what = f"{module}.{original.__name__}() is called inside the step"
                recorder.checks.note_changes_each_time(what, "call it outside the step")
        return original(*args, **kwargs)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function


# -- every device ----------------------------------------------------------------------------------


def _get_rng_state(original: Function) -> Tensor:
    state: Tensor = GET_STATE(_CPU)
    return state


def _set_rng_state(original: Function, new_state: Tensor) -> None:
    SET_STATE(new_state, _CPU)


def _manual_seed(original: Function, seed: Any) -> torch.Generator:
    number = _as_int64(seed)
    if number is None:
        original(seed)  # raises
    SEED(number)
    return torch.default_generator


def _as_int64(seed: Any) -> int | None:
    """The signed 64-bit number with the same bits as a seed; None if the seed needs more, which eager refuses."""
    number = int(seed)
    if not -(2**63) <= number < 2**64:
        return None
    return number - 2**64 if number >= 2**63 else number


_PLAIN: dict[str, Function | None] = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
    "seed": None,
    "initial_seed": None,
}


# -- CUDA: before it is initialized there is no generator, and eager defers the call -----------------


def _get_cuda_rng_state(original: Function, device: Any = "cuda") -> Tensor:
    torch.cuda.init()
    state: Tensor = GET_STATE(_cuda(device))
    return state


def _set_cuda_rng_state(original: Function, new_state: Tensor, device: Any = "cuda") -> None:
    if torch.cuda.is_initialized():
        SET_STATE(new_state, _cuda(device))
    else:
        original(new_state, device)


def _manual_seed_cuda(original: Function, seed: Any) -> None:
    _seed_cuda(original, seed, lambda: _cuda("cuda"))


def _manual_seed_all_cuda(original: Function, seed: Any) -> None:
    _seed_cuda(original, seed, lambda: torch.device("cuda"))


def _seed_cuda(original: Function, seed: Any, which: Callable[[], torch.device]) -> None:
    number = _as_int64(seed)
    if number is None or not torch.cuda.is_initialized():
        original(seed)
    else:
        SEED(number, which())


def _cuda(device: Any) -> torch.device:
    """The device that eager uses: the current one if `device` has no index."""
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


_CUDA: dict[str, Function | None] = {
    "get_rng_state": _get_cuda_rng_state,
    "set_rng_state": _set_cuda_rng_state,
    "manual_seed": _manual_seed_cuda,
    "manual_seed_all": _manual_seed_all_cuda,
    "seed": None,
    "seed_all": None,
    "initial_seed": None,
}
