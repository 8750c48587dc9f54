"""What every test must leave as it was: nothing patched, no mode on, gradients on, torch's settings unchanged.

    assert leftovers() == []       in words, what is not as it was when this module was imported
    restore()                      undoes it, so that the next test is not blamed for it

The states of random number generators are not looked at: a test that draws seeds first.
"""

from __future__ import annotations

import builtins
import gc
import inspect
import json
import logging
import math
import os
import socket
import statistics
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # replaces `torch.manual_seed`, once
import torch.distributed as dist
from torch import overrides as function_modes
from torch._dynamo import eval_frame as dynamo_frames
from torch._ops import HigherOrderOperator
from torch.nn.utils import clip_grad
from torch.utils import _python_dispatch as dispatch_modes

from functionalize.step import pace

_GENERATORS = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
_CUDA_GENERATORS = (*_GENERATORS, "manual_seed_all", "seed_all")
HOOK_POINTS: tuple[tuple[type | ModuleType, str], ...] = (
    (torch.UntypedStorage, "resize_"),
    (torch.nn.Module, "__call__"),
    (torch.TypedStorage, "resize_"),
    (torch.TypedStorage, "_resize_"),
    (dist.Work, "wait"),
    *(
        (dynamo_frames, name)
        for name in ("_callback_from_stance", "set_fullgraph_compiled_frame_count")
        if hasattr(dynamo_frames, name)
    ),
    (torch.Tensor, "numpy"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "item"),
    (torch.Tensor, "_wrapped_number"),
    (torch, "tensor"),
    (torch, "as_tensor"),
    *((json.JSONEncoder, name) for name in ("default", "encode", "iterencode")),
    (statistics, "type"),
    (torch.nn.functional, "interpolate"),
    *((torch, name) for name in ("ctc_loss", "tensor_split")),
    (torch.Tensor, "tensor_split"),
    *((torch._VF, name) for name in ("_pack_padded_sequence", "lstm", "gru")),
    (HigherOrderOperator, "__call__"),
    (builtins, "print"),
    (logging.Handler, "handle"),
    (threading.Thread, "start"),
    (os, "write"),
    (socket.socket, "send"),
    *((torch.Tensor, name) for name in ("__repr__", "__reduce_ex__", "__dlpack__", "data_ptr")),
    *((owner, "save") for owner in (torch, torch.serialization)),
    (clip_grad, "float"),
    *((torch, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad")),
    *((module, name) for module in (torch, torch.random) for name in _GENERATORS),
    *((module, name) for module in (torch.cuda, torch.cuda.random) for name in _CUDA_GENERATORS),
)
_PRISTINE = [inspect.getattr_static(owner, name, None) for owner, name in HOOK_POINTS]


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


# Settings of the process, which later tests would compute under: (in words, read, write).
SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("the profile function", sys.getprofile, sys.setprofile),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    (
        "(deterministic algorithms, warn only)",
        _deterministic,
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (
        "the float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    ("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    ("`torch.set_warn_always`", torch.is_warn_always_enabled, torch.set_warn_always),
    (
        "autocast on CPUs",
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
    ),
    (
        "the dtype of autocast on CPUs",
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    (
        "the garbage collector's switch",
        gc.isenabled,
        lambda on: gc.enable() if on else gc.disable(),
    ),
    (
        "the thresholds of the garbage collector",
        gc.get_threshold,
        lambda found: gc.set_threshold(*found),
    ),
)
_BEFORE = [read() for _, read, _ in SETTINGS]


def settle_process() -> None:
    """Give this process the settings that the tests run with; each test is to leave them."""
    # The tests' tensors are tiny: where the processes of a run share the cores, a second thread makes an op of 10 µs
    # wait milliseconds, and burns them.
    torch.set_num_threads(1)
    # Each full collection visits all that a test holds.
    gc.set_threshold(2000, 20, 100)
    pace.most_seconds = (
        math.inf
    )  # what a step does is counted exactly, on machines of any load: `test_pace.py` times
    _BEFORE[:] = [read() for _, read, _ in SETTINGS]


def leftovers() -> list[str]:
    """Return what is not as it was when this module was imported, in words."""
    found = [
        f"{owner.__name__}.{name} is still patched"
        for (owner, name), pristine in zip(HOOK_POINTS, _PRISTINE, strict=True)
        if inspect.getattr_static(owner, name, None) is not pristine
    ]
    modes = [
        *dispatch_modes._get_current_dispatch_mode_stack(),
        *function_modes._get_current_function_mode_stack(),
    ]
    found += [f"{type(mode).__name__} is still on" for mode in modes]
    if not torch.is_grad_enabled():
        found.append("gradients are still off")
    found += [
        f"{name}: {now}, was {before}"
        for (name, read, _), before in zip(SETTINGS, _BEFORE, strict=True)
        if (now := read()) != before
    ]
    return found


def restore() -> None:
    """Undo what ``leftovers`` reports."""
    for (owner, name), pristine in zip(HOOK_POINTS, _PRISTINE, strict=True):
        if inspect.getattr_static(owner, name, None) is not pristine:
            setattr(owner, name, pristine)
    while modes := dispatch_modes._get_current_dispatch_mode_stack():
        modes[-1].__exit__(None, None, None)
    while modes := function_modes._get_current_function_mode_stack():
        modes[-1].__exit__(None, None, None)
    torch.set_grad_enabled(True)
    for (_, read, write), before in zip(SETTINGS, _BEFORE, strict=True):
        if read() != before:
            write(before)
