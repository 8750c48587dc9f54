"""The target personality of a fake world: what the device that is planned for would do, on fake CPU tensors.

    target = target_named("cuda")                     or Target(capability=(8, 0)), Target(attention="math")
    with target.applied() as choices:
        step(batch)                                   unmodified code, that may name "cuda" throughout
    print(choices.text())                             scaled_dot_product_attention -> flash (64 times): ...

For the time of the `with`, in this thread and on fake tensors: the attention kernel of the device (`sdpa_choice.py`),
its dropout and norms (`cuda_kernels.py`), its lists of `torch.autocast` (`autocast.py`), its defaults of optimizers,
and what `torch.cuda` and the name "cuda" mean (`cuda_api.py`). The target "cpu" changes none of them. With either,
`model.to(torch.bfloat16)` works on fake parameters and keeps their identity: torch's own fake mode often refuses it.

Why fake CPU tensors and not fake CUDA ones: a build of torch without CUDA makes fake `cuda` tensors, but convolutions,
linear layers and fused optimizers of them raise ("PyTorch is not linked with support for cuda devices"), and dropout,
batch norm, attention and RMSNorm end the process. So "cuda" is a name here, and a program that checks
`tensor.is_cuda` or `tensor.device.type == "cuda"` sees a CPU tensor.
Invariant: torch is as before after the `with`, whatever happened in it; other threads see no difference.
Refuses (`TargetError`): unknown targets and kernels, a target inside a target, math attention that nobody asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from functionalize._compat.fakes import FakeTensor, is_fake, swap_fakes
from functionalize.errors import TargetError
from functionalize.fake_world import autocast as autocasts
from functionalize.fake_world import cuda_api as device_names
from functionalize.fake_world import cuda_kernels as kernels
from functionalize.fake_world.kernel_log import Choice, Choices
from functionalize.fake_world.sdpa_choice import KERNELS
from functionalize.util.patching import Patches

__all__ = ["Choice", "Choices", "Target", "placed", "target_named"]

_NAMES = ("cuda", "cpu")


@dataclass(frozen=True)
class Target:
    """A device to plan for.

    name: "cuda" or "cpu". capability: of a CUDA device, (8, 0) for an A100, (9, 0) for an H100.
    attention: take this kernel for every attention ("flash", "efficient", "cudnn", "math"), where None takes the
    device's own choice and refuses math. devices: how many a host has, as `torch.cuda.device_count()` tells.
    Raises `TargetError` for a name or a kernel that is not known.
    """

    name: str = "cuda"
    capability: tuple[int, int] = (9, 0)
    attention: str | None = None
    devices: int = 8

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise TargetError(_unknown("target", self.name, _NAMES))
        if self.attention is not None and self.attention not in KERNELS:
            raise TargetError(_unknown("attention kernel", self.attention, KERNELS))

    def __str__(self) -> str:
        if self.name == "cpu":
            return "cpu"
        forced = f", attention={self.attention}" if self.attention else ""
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]}{forced})"

    def applied(self) -> AbstractContextManager[Choices]:
        """Be this target for the time of a `with`; gives what it chose. Raises `TargetError` inside another one."""
        return _applied(self)


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    return f"there is no {what} {name!r}: take one of {', '.join(map(repr, known))}"


def target_named(target: str | Target) -> Target:
    """A target by its name, or itself. Raises `TargetError` for a name that is not known."""
    return target if isinstance(target, Target) else Target(target)


def placed(device: torch.device) -> torch.device:
    """The device that an op on `device` is recorded with: the CPU's tensors stand for those of a planned one."""
    if device.type == "cuda" and _ACTIVE.planning() is not None:
        return torch.device("cpu")
    return device


class _Active:
    """The targets that are applied now, by thread; the dispatcher's overrides exist while there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, tuple[Target, Choices]] = {}
        self._stack: ExitStack | None = None

    def enter(self, target: Target, choices: Choices) -> None:
        """Be `target` in this thread."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self._found:
                raise TargetError(
                    f"the target {target} is applied inside {self._found[thread][0]}: leave the one before "
                    "entering another"
                )
            if self._stack is None:
                with ExitStack() as stack:
                    _PATCHES.install()
                    stack.callback(_PATCHES.remove)
                    stack.enter_context(kernels.overridden(self.find))
                    stack.enter_context(autocasts.overridden(self.find))
                    self._stack = stack.pop_all()
            self._found[thread] = target, choices

    def leave(self) -> None:
        """Be no target in this thread."""
        with self._lock:
            del self._found[threading.get_ident()]
            if self._stack is not None and not self._found:
                stack, self._stack = self._stack, None
                stack.close()

    def find(self, value: Any) -> tuple[Target, Choices] | None:
        """The target for an op on this tensor.

        A thread without one may be autograd's, which runs a backward of a thread that has one.
        """
        if value is None or not is_fake(value):
            return None
        found = self._found.get(threading.get_ident())
        if found is None and len(self._found) == 1:
            (found,) = self._found.values()
        return found if found is not None and found[0].name != "cpu" else None

    def swapping(self, original: Any) -> Any:
        """`Module.to` and the like swap fake parameters: torch refuses where the fake mode knows one of them."""

        def swap_tensors(t1: Any, t2: Any) -> None:
            if threading.get_ident() in self._found and isinstance(t1, FakeTensor):
                swap_fakes(t1, t2)
            else:
                original(t1, t2)

        swap_tensors.__doc__ = original.__doc__
        return swap_tensors

    def planning(self) -> Target | None:
        """The target of this thread, if it is another device than the CPU."""
        found = self._found.get(threading.get_ident())
        return found[0] if found is not None and found[0].name != "cpu" else None


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield from device_names.patches(_ACTIVE.planning, kernels.as_on_cuda)
    yield torch.utils, "swap_tensors", _ACTIVE.swapping(torch.utils.swap_tensors)
    yield from autocasts.patches(_ACTIVE.planning)


_ACTIVE = _Active()
_PATCHES = Patches(_patches)


@contextmanager
def _applied(target: Target) -> Iterator[Choices]:
    choices = Choices(str(target))
    _ACTIVE.enter(target, choices)
    try:
        yield choices
    finally:
        _ACTIVE.leave()
