"""`torch.cuda` and the device name "cuda" for a program whose CUDA tensors are fake CPU tensors.

    torch.empty(3, device="cuda"), x.to("cuda"), model.cuda()      fake CPU tensors: every tensor is on the device
    DeviceMesh("cuda", ...), init_device_mesh("cuda", ...)         a mesh of the CPU, whose group is the world's
    torch.cuda.Stream(), Event(), synchronize(), empty_cache()     accepted; nothing happens
    torch.cuda.is_available(), current_device(), get_device_capability()   from the target
    torch.cuda.memory_allocated(), max_memory_allocated()          0: memory is read from the plan
    torch.optim.AdamW(...), clip_grad_norm_                        foreach by default, as on CUDA

Only a thread with a CUDA target sees any of this. For torch's own modules `torch.cuda.is_available()` and the like
keep their real result: torch would call the driver. A factory accepts `device="cuda"` but no device index: torch parses
an index before a mode or a patch can replace it.
All tensors are on one device: `.cpu()` and `.to("cuda")` return the same tensor, and what a program keeps on the host
(pinned batches) counts as device memory, but for what FSDP2 offloads:

    fully_shard(module, offload_policy=CPUOffloadPolicy())

    sharded parameters, their gradients, optimizer state     fakes on `HOST`, another type of device than the world's
    before an all-gather, after a reduction                  `aten._to_copy` between the two, as on a GPU
    the optimizer                                            ops on `HOST`, with the defaults that torch has for the CPU

Only FSDP2's own `.cpu()` and `.to("cpu")` go to the host. With the target "cpu" the policy copies nothing, as on real
CPU ranks.
Refuses (`TargetError`): CUDA graphs and figures that only a driver has; offloaded parameters that are not on the host
when the first forward begins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from functionalize._compat.fakes import HOST, FakeTensor, FakeTensorMode
from functionalize._compat.fsdp import offload_check
from functionalize._compat.modules import foreach_owners
from functionalize._compat.stacks import stack_here
from functionalize.errors import TargetError
from functionalize.util.patching import Patch
from functionalize.util.user_stack import line_of

_CPU = torch.device("cpu")


class TargetDevice(Protocol):
    """The attributes of a `Target` that a program can query."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        ...

    @property
    def devices(self) -> int:
        """The number of devices of a host."""
        ...


Planning = Callable[[], TargetDevice | None]


def patches(planning: Planning, corrected: Callable[[Any, Any], Any]) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch.

    planning: returns the target of the calling thread, or None.
    corrected: (op, output on the CPU) -> the output in the dtypes that the device returns.
    """
    yield FakeTensorMode, "__torch_dispatch__", _on_cpu(planning, corrected)
    yield torch.Tensor, "to", _to(planning, torch.Tensor.to)
    for name in ("cuda", "pin_memory"):
        yield torch.Tensor, name, _itself(planning, getattr(torch.Tensor, name))
    yield torch.Tensor, "record_stream", _nothing(planning, torch.Tensor.record_stream)
    yield from _meshes(planning)
    yield from _cuda(planning)
    yield from _foreach(planning)
    yield from _offloading(planning)


# -- tensors ---------------------------------------------------------------------------------------------


def is_cuda(device: Any) -> bool:
    """Whether a value names a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _on_cpu(planning: Planning, corrected: Callable[[Any, Any], Any]) -> Any:
    original = vars(FakeTensorMode)["__torch_dispatch__"]

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if planning() is None:
            return original(self, func, types, args, kwargs or {})
        if kwargs and is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return corrected(func, original(self, func, types, args, kwargs or {}))

    return __torch_dispatch__


def _to(planning: Planning, original: Any) -> Any:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if planning() is None:
            return original(self, *args, **kwargs)
        if args and (is_cuda(args[0]) or type(args[0]) is int):
            args = (_CPU, *args[1:])
        elif args and isinstance(args[0], torch.device):
            args = (_host_for(args[0], sys._getframe(1)), *args[1:])
        device = kwargs.get("device")
        if is_cuda(device) or type(device) is int:
            kwargs = {**kwargs, "device": _CPU}
        return original(self, *args, **kwargs)

    to.__doc__ = original.__doc__
    return to


def _itself(planning: Planning, original: Any) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self if planning() is not None else original(self, *args, **kwargs)

    method.__name__, method.__doc__ = original.__name__, original.__doc__
    return method


def _nothing(planning: Planning, original: Any, result: Any = None) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return result if planning() is not None else original(*args, **kwargs)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function


def _meshes(planning: Planning) -> Iterator[Patch]:
    from torch.distributed.device_mesh import DeviceMesh

    original = DeviceMesh.__init__

    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if planning() is not None and is_cuda(device_type):
            device_type = "cpu"
        original(self, device_type, *args, **kwargs)

    yield DeviceMesh, "__init__", __init__


def _foreach(planning: Planning) -> Iterator[Patch]:
    """The functions by which optimizers and clipping decide between foreach, fused and a loop over tensors."""
    name, kinds = "_get_foreach_kernels_supported_devices", "_foreach_supported_types"
    fused = "_get_fused_kernels_supported_devices"
    for owner in foreach_owners():
        yield owner, name, _with(planning, getattr(owner, name), "cpu")
        if hasattr(owner, fused):
            yield owner, fused, _with(planning, getattr(owner, fused), HOST.type)
        if hasattr(owner, kinds):
            yield owner, kinds, [*getattr(owner, kinds), FakeTensor]


def _with(planning: Planning, original: Any, device: str) -> Any:
    def supported() -> list[str]:
        return original() if planning() is None else [*original(), device]

    supported.__doc__ = original.__doc__
    return supported


# -- torch.cuda ------------------------------------------------------------------------------------------


class StreamStandIn:
    """Stand-in for `torch.cuda.Stream`: nothing runs on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.device_index, self.priority = torch.device("cuda", 0), 0, 0

    def __enter__(self) -> StreamStandIn:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def synchronize(self, *args: Any) -> None:
        """There is nothing to wait for."""

    wait_stream = wait_event = synchronize

    def record_event(self, event: EventStandIn | None = None) -> EventStandIn:
        """An event that has happened."""
        return event or EventStandIn()

    def query(self) -> bool:
        """Everything has run."""
        return True


class EventStandIn:
    """Stand-in for `torch.cuda.Event`: every event has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """There is nothing to wait for."""

    wait = synchronize = record

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, end: EventStandIn) -> float:
        """No time passes."""
        return 0.0


_SILENT = (
    "init",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_device",
    "set_stream",
    "set_rng_state",
    "set_rng_state_all",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_per_process_memory_fraction",
)
_ZERO = (
    "current_device",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
_REFUSED = (
    "mem_get_info",
    "memory_snapshot",
    "memory_summary",
    "graph",
    "make_graphed_callables",
    "CUDAGraph",
    "utilization",
    "memory_usage",
    "temperature",
    "power_draw",
    "clock_rate",
)


def _cuda(planning: Planning) -> Iterator[Patch]:
    cuda = torch.cuda
    for module in (cuda, cuda.memory, cuda.random):
        for names, result in ((_SILENT, None), (_ZERO, 0)):
            for name in names:
                if hasattr(module, name):
                    yield module, name, _nothing(planning, getattr(module, name), result)
    for name in _REFUSED:
        if hasattr(cuda, name):
            yield cuda, name, _refusing(planning, name, getattr(cuda, name))
    for owner, answers in ((cuda, _ANSWERS), (torch.accelerator, _ACCELERATOR)):
        for name, answer in answers.items():
            if hasattr(owner, name):
                yield owner, name, _answering(planning, getattr(owner, name), answer)
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, _nothing(planning, getattr(cuda.nvtx, name), 0)
    common = sys.modules["torch.cuda.amp.common"]
    name = "amp_definitely_not_available"
    yield common, name, _nothing(planning, getattr(common, name), False)
    for name, kind in (("Stream", StreamStandIn), ("Event", EventStandIn)):
        yield cuda, name, _made(planning, getattr(cuda, name), kind)


def _refusing(planning: Planning, name: str, original: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        if planning() is None:
            return original(*args, **kwargs)
        raise TargetError(
            f"torch.cuda.{name} has no meaning on a device that is only planned\n  {line_of(stack_here())}\n"
            "  leave it out of what is planned; a plan itself tells the memory and the time"
        )

    function.__doc__ = original.__doc__
    if isinstance(original, type):  # annotations need a class
        return _called(original, lambda kind, *args, **kwargs: function(*args, **kwargs))
    return function


def _called(original: type, new: Callable[..., Any]) -> type:
    """A subclass of `original` that makes its instances by `new`."""
    body = {"__new__": staticmethod(new), "__init__": lambda self, *args, **kwargs: None}
    return type(original.__name__, (original,), {**body, "__doc__": original.__doc__})


def _answering(planning: Planning, original: Any, answer: Callable[..., Any]) -> Any:
    """`answer(target)` for callers outside of torch; the original for torch's own modules."""

    def function(*args: Any, **kwargs: Any) -> Any:
        device = planning()
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if device is None or caller == "torch":
            return original(*args, **kwargs)
        return answer(device, *args)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda device: True,
    "is_bf16_supported": lambda device, *args: device.capability >= (8, 0),
    "device_count": lambda device: device.devices,
    "get_device_capability": lambda device, *args: device.capability,
    "get_device_name": lambda device, *args: _name(device),
    "get_device_properties": lambda device, *args: _properties(device),
    "current_stream": lambda device, *args: StreamStandIn(),
    "default_stream": lambda device, *args: StreamStandIn(),
    "stream": lambda device, stream: contextlib.nullcontext(stream),
    "get_rng_state": lambda device, *args: torch.empty(16, dtype=torch.uint8),
    "get_rng_state_all": lambda device: [torch.empty(16, dtype=torch.uint8)] * device.devices,
}
_ACCELERATOR: dict[str, Callable[..., Any]] = {
    "is_available": lambda device: True,
    "current_accelerator": lambda device, *args: torch.device("cuda"),
    "device_count": lambda device: device.devices,
    "current_device_index": lambda device: 0,
    "set_device_index": lambda device, *args: None,
    "synchronize": lambda device, *args: None,
    "empty_cache": lambda device, *args: None,
    "current_stream": lambda device, *args: StreamStandIn(),
    "reset_peak_memory_stats": lambda device, *args: None,
    "memory_allocated": lambda device, *args: 0,
    "max_memory_allocated": lambda device, *args: 0,
}


def _name(device: TargetDevice) -> str:
    major, minor = device.capability
    return f"a planned CUDA device, sm_{major}{minor}"


def _properties(device: TargetDevice) -> SimpleNamespace:
    major, minor = device.capability
    return SimpleNamespace(name=_name(device), major=major, minor=minor)


def _made(planning: Planning, original: type, stand_in: type) -> Any:
    """A class that makes instances of `stand_in` in a thread with a target, and of `original` elsewhere."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (stand_in if planning() is not None else original)(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (stand_in, original))

    return Meta(original.__name__, (), {"__doc__": original.__doc__})


# -- host memory -----------------------------------------------------------------------------------

_FSDP2 = "torch.distributed.fsdp._fully_shard."
_PARAMETERS, _COLLECTIVES = f"{_FSDP2}_fsdp_param", f"{_FSDP2}_fsdp_collectives"


def _offloading(planning: Planning) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch. planning: the target of the calling thread, or None."""
    yield torch.Tensor, "cpu", _cpu(planning, torch.Tensor.cpu)
    yield torch.Tensor, "is_pinned", _is_pinned(planning, torch.Tensor.is_pinned)
    owner, name = offload_check()
    yield owner, name, _checked(planning, getattr(owner, name))


def _host_for(device: Any, frame: Any) -> Any:
    """The device of a `Tensor.to` that `frame` calls: `HOST` where FSDP2 offloads a gradient."""
    if device == _CPU and frame.f_globals.get("__name__") == _COLLECTIVES:
        return HOST
    return device


def _cpu(planning: Planning, original: Any) -> Any:
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if planning() is not None and sys._getframe(1).f_globals.get("__name__") == _PARAMETERS:
            return self.to(HOST)
        return original(self, *args, **kwargs)

    cpu.__doc__ = original.__doc__
    return cpu


def _is_pinned(planning: Planning, original: Any) -> Any:
    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if planning() is not None and self.device.type == HOST.type:
            return True  # `pin_memory` returns the tensor itself; only a time would differ
        return bool(original(self, *args, **kwargs))

    is_pinned.__doc__ = original.__doc__
    return is_pinned


def _checked(planning: Planning, original: Any) -> Any:
    def check(group: Any) -> None:
        if planning() is None:
            original(group)
            return
        for param in group.fsdp_params:
            if param.offload_to_cpu and param.sharded_param.device.type != HOST.type:
                raise TargetError(
                    f"CPUOffloadPolicy: the parameter `{param._param_fqn}` was replaced after `fully_shard` by a "
                    "tensor that a plan takes for one of the device: make it on a device before `fully_shard`, not on "
                    "`meta`, as fakes take no memory"
                )

    return check
