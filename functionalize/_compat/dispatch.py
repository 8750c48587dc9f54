"""Dispatch below autograd: modes, kernels by dispatch key, overrides of ops, wrapper subclasses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import (  # custom ops that only mutate
    auto_functionalized,
    can_auto_functionalize,
)
from torch._library.simple_registry import (  # the first Python function of every dispatch to a mode
    find_torch_dispatch_rule,
)
from torch._ops import (  # the type of ops; `torch.cond` and its like, which a mode on a stack of modes refuses
    HigherOrderOperator,
    OpOverload,
)
from torch.autograd import profiler
from torch.overrides import _pop_mode_temporarily as _without_function_mode  # torch 2.0 to 2.15
from torch.utils._python_dispatch import (  # the only interception of ops below autograd
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import (  # to copy a constant for real inside a fake mode
    _disable_current_modes as disable_current_modes,
)
from torch.utils._python_dispatch import (  # which recorder is active in this thread
    _get_dispatch_stack_at as _mode_at,
)
from torch.utils._python_dispatch import _len_torch_dispatch_stack as _count_modes

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "auto_functionalized",
    "can_auto_functionalize",
    "disable_current_modes",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "no_dispatch",
]  # names of torch that are used elsewhere


DISPATCH_CODE = find_torch_dispatch_rule.__code__
DISPATCH_GLOBALS = (
    find_torch_dispatch_rule.__globals__
)  # reading a frame's code is audited, its globals are not
_CLASS = DISPATCH_CODE.co_varnames[1]
_HAS_TORCH_FUNCTION = torch.overrides.has_torch_function


def current_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are active in this thread, the innermost last."""
    count = _count_modes()
    if count == 1:  # in most recordings
        return [_mode_at(0)]
    return [_mode_at(i) for i in range(count)]


def dispatched_to(frame: FrameType) -> type:
    """The class of the mode or the tensor to which a call of `DISPATCH_CODE` belongs."""
    found: type = frame.f_locals[_CLASS]
    return found


def address_of_generator(generator: torch.Generator) -> int:
    """The address of the generator in C++: an op receives another Python object for it."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def plain_resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """`storage.resize_(nbytes)` by the base class's method, which no capture patches."""
    torch._C.StorageBase.resize_(storage, nbytes)  # type: ignore[attr-defined]


def all_op_names() -> list[str]:
    """`namespace::op.overload` of every op of the dispatcher."""
    return list(torch._C._dispatch_get_all_op_names())


def ops_with_kernel(key: str) -> list[str]:
    """`namespace::op.overload` of every op that has a kernel of its own for a dispatch key."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def has_kernel(name: str, key: str) -> bool:
    """Whether an op has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def load_resize_op() -> None:
    """Register `inductor::resize_storage_bytes_`, unless torch has it in C++, as 2.13 and 2.15 do. Inductor is slow."""
    if not hasattr(torch.ops.inductor, "resize_storage_bytes_"):
        importlib.import_module("torch._inductor.inductor_prims")


no_dispatch: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
"""A context: no mode sees the ops inside; those on a wrapper subclass change it, and not its inner tensors."""


def op_overrides(namespace: str) -> AbstractContextManager[Any]:
    """A library whose `impl` replaces kernels of existing ops until the context ends.

    A public `Library` removes its kernels only when it is garbage-collected.
    """
    return torch.library._scoped_library(namespace, "IMPL")


@contextmanager
def composite_override(op: Any, kernel: Any) -> Iterator[None]:
    """A context: `kernel` replaces the decomposition of a composite op where a mode or the fake mode decomposes it."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = op.py_kernels.get(key)
    op.py_kernels[key] = kernel
    try:
        yield
    finally:
        op.py_kernels.pop(key, None)
        if before is not None:
            op.py_kernels[key] = before


def composite_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own decomposition of a composite op, even if it is overridden."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def kernel_of(op: Any, key: str) -> Any:
    """The current kernel of an op for a dispatch key; its method `call_boxed(keys, *args)` runs it."""
    return torch.library.get_kernel(op, key)  # public, but the type that it returns is not


def redispatch_below(op: Any, keys: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Dispatch an op to the next key after `key`. keys: the dispatch key set that the kernel was called with."""
    return op.redispatch(keys - torch._C.DispatchKeySet(_key(key)), *args, **kwargs)


def excluded(key: str) -> AbstractContextManager[Any]:
    """A context: no kernel of this dispatch key runs in this thread."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key(key)))


def _key(name: str) -> Any:
    return getattr(torch._C.DispatchKey, name)


def sdpa_order() -> list[int]:
    """The order of attention backends, as set by `sdpa_kernel(..., set_priority=True)`."""
    return list(torch._C._get_sdp_priority_order())


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this process: the flag that the code of Inductor reads (2.11 to 2.15)."""
    return profiler._is_profiler_enabled


def entry_of(op: Any) -> Any:
    """The function under `OpOverload.__call__`, to save a Python frame; other callables unchanged (2.0 to 2.13)."""
    return getattr(op, "_op", op)


def is_in_python(op: Any) -> bool:
    """Whether a kernel that computes the op was registered from Python, by `torch.library` (torch 2.4 to 2.15)."""
    start = op.name().partition(".")[0].replace("::", "/") + "/"
    keys = [each.removeprefix(start) for each in torch.library._impls if each.startswith(start)]
    return any(not key.startswith(("Meta", "Autograd", "Autocast")) for key in keys)


def no_python_dispatch() -> AbstractContextManager[None]:
    """A context: ops are dispatched as if no mode were active (torch 2.0 to 2.13)."""
    guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


_OWN = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, complex})


def reaches_kernels(values: Iterable[Any]) -> bool:
    """Whether an op on these values is seen by kernels alone: no mode, transform, tracer or subclass (2.11 to 2.15)."""
    if _count_modes() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return torch._C._get_tracing_state() is None and _OWN.issuperset(map(type, values))


def function_modes() -> list[Any]:
    """The active `TorchFunctionMode`s, the innermost last (torch 2.11 to 2.15)."""
    return list(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


# Functions of C that read torch's flags, and what each reads: the public ones in Python cost a replay ten times as much
# (2.11 to 2.15). Which kernels scaled_dot_product_attention may use is read by the CPU's, too.
FLAGS: dict[Callable[[], Any], str] = {
    torch.is_grad_enabled: "grad mode",
    torch.is_inference_mode_enabled: "inference mode",
    torch.is_autocast_cache_enabled: "the autocast cache",
    torch.is_anomaly_enabled: "anomaly detection",
    torch.get_default_dtype: "the default dtype",
    torch.get_num_threads: "the number of threads",
    torch._C._get_deterministic_algorithms: "deterministic mode",
    torch._C._get_mkldnn_enabled: "oneDNN",
    torch._C._get_flash_sdp_enabled: "flash attention",
    torch._C._get_mem_efficient_sdp_enabled: "memory-efficient attention",
    torch._C._get_math_sdp_enabled: "attention by the math kernel",
    torch._C._get_cudnn_sdp_enabled: "cuDNN's attention",
}


_ON_CPU = (
    *("cpu_allow_fp16_reduced_precision_reduction", "deterministic_algorithms"),
    *("deterministic_fill_uninitialized_memory", "float32_matmul_precision", "mkldnn_enabled"),
    *("mkldnn_deterministic", "nnpack_enabled", "onednn_allow_tf32"),
)
_ON_CUDA = (
    *("blas_preferred_backend", "cublas_allow_fp16_accumulation", "cublas_allow_tf32"),
    *("cublas_allow_fp16_reduced_precision_reduction", "cudnn_allow_tf32", "cudnn_deterministic"),
    *("cublas_allow_bf16_reduced_precision_reduction", "cudnn_enabled", "linalg_preferred_backend"),
)


def kernel_settings() -> list[tuple[Any, str, str, Callable[..., Any]]]:
    """(owner, name, text, getter) of the functions that set what kernels of all ops read (torch 2.11 to 2.15).

    getter: takes the arguments of the setter; returns None if the setting cannot be read. Not those of attention, which
    choose the op.
    """

    def named(name: str) -> tuple[Any, str, str, Callable[..., Any]]:
        getter: Callable[[], Any] = getattr(torch._C, f"_get_{name}", lambda: None)
        return torch._C, f"_set_{name}", name, lambda *_: getter()

    has_cuda = torch.cuda.is_available()
    found = [named(name) for name in (*_ON_CPU, *(_ON_CUDA if has_cuda else ()))]
    for name in ("default_dtype", "default_tensor_type"):
        found.append((torch._C, f"_set_{name}", name, lambda *_: torch.get_default_dtype()))
    found.append((torch, "set_num_threads", "num_threads", lambda *_: torch.get_num_threads()))
    found.append((torch, "set_flush_denormal", "flush_denormal", lambda *_: None))
    precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)
    name = "_set_fp32_precision_setter"
    found.append((torch._C, name, "fp32_precision", lambda *args: precision(*args[:2])))
    for module in (torch.backends.mkldnn, *([torch.backends.cudnn] if has_cuda else ())):
        for name, each in vars(type(module)).items():
            if isinstance(
                each, torch.backends.ContextProp
            ):  # it holds functions that were read early
                found.append((each, "setter", name, lambda *_, getter=each.getter: getter()))
    return [each for each in found if hasattr(each[0], each[1])]


def mkldnn_is_on() -> bool:
    """Whether kernels may use oneDNN (2.11 to 2.15)."""
    return bool(torch._C._get_mkldnn_enabled())


def set_mkldnn(is_on: bool) -> None:
    """Let kernels use oneDNN, or not."""
    torch._C._set_mkldnn_enabled(is_on)


def count_references(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects hold a storage (2.1 to 2.15)."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def storage_at(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference, as `UntypedStorage._weak_ref` makes one; None if it has died."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference)
    return found


def handles_ops(kind: type) -> bool:
    """Whether a class of tensors has a handler of ops of its own: DTensor, and not Parameter (2.0 to 2.15)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not None and handler is not torch._C._disabled_torch_dispatch_impl


@contextmanager
def kernels_alone() -> Iterator[None]:
    """A context: ops reach kernels whatever is around it: modes, autograd, CPU autocast, transforms (2.11 to 2.15)."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(excluded("AutocastCPU"))
        stack.enter_context(torch._C._DisableFuncTorch())
        yield


def has_torch_function_of_types(args: Iterable[Any]) -> bool:
    """`torch.overrides.has_torch_function` without modes: whether a type among `args` overrides functions."""
    with _without_function_mode():
        return bool(_HAS_TORCH_FUNCTION(tuple(args)))
