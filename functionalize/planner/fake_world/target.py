"""The target of a fake world: fake CPU tensors behave as tensors of the device that is planned for.

    target = target_named("cuda")                     or Target(capability=(8, 0)), Target(attention="math")
    with target.applied() as choices:
        step(batch)                                   unmodified code, which may name "cuda"
    print(choices.text())                             scaled_dot_product_attention -> flash (64 times): ...

Inside the `with`, in this thread and on fake tensors, these are the device's: the attention kernel
(`sdpa_choice.py`), dropout and norms (`cuda_kernels.py`), the op lists of `torch.autocast` (`autocast.py`), the
defaults of optimizers, and the meaning of `torch.cuda` and of the name "cuda" (`cuda_api.py`). The target "cpu" changes
none of these. With any target `model.to(torch.bfloat16)` works on fake parameters and keeps their identity; under
torch's own fake mode it often raises.

Why fake CPU tensors and not fake CUDA ones: a build of torch without CUDA makes fake `cuda` tensors, but convolutions,
linear layers and fused optimizers of them raise ("PyTorch is not linked with support for cuda devices"), and dropout,
batch norm, attention and RMSNorm crash the process. So "cuda" is only a name here, and a program that checks
`tensor.is_cuda` or `tensor.device.type == "cuda"` sees a CPU tensor.
Invariant: after the `with` torch is as before, also if its body raised; other threads see no difference.
Refuses (`TargetError`): unknown targets and kernels, a target inside a target, math attention that is not requested.
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
from functionalize.ir.worlds import ON_CPU
from functionalize.planner.fake_world import autocast, cuda_api, cuda_kernels
from functionalize.planner.fake_world.cuda_kernels import Choice, Choices
from functionalize.planner.fake_world.sdpa_choice import KERNELS
from functionalize.util.patching import Patches

__all__ = ["Choice", "Choices", "Target", "target_named"]

_NAMES = ("cuda", "cpu")


@dataclass(frozen=True)
class Target:
    """A device to plan for.

    name: "cuda" or "cpu".
    capability: the compute capability of a CUDA device, (8, 0) for an A100, (9, 0) for an H100.
    attention: the kernel that every attention runs ("flash", "efficient", "cudnn", "math"); None: the device's own
    choice, which refuses math.
    devices: the number of devices of a host, which `torch.cuda.device_count()` returns.
    Raises `TargetError` for an unknown name or kernel.

        >>> print(fz.planner.Target("cuda", capability=(8, 0)))
        cuda (sm_80)
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
        """Apply this target inside a `with`, which yields the `Choices`. Raises `TargetError` inside another target."""
        return _applied(self)


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    return f"there is no {what} {name!r}: take one of {', '.join(map(repr, known))}"


def target_named(target: str | Target) -> Target:
    """The target of that name; a `Target` is returned unchanged. Raises `TargetError` for an unknown name."""
    return target if isinstance(target, Target) else Target(target)


class _Active:
    """The target of each thread. The dispatcher overrides and patches are installed while any thread has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: dict[int, tuple[Target, Choices]] = {}  # thread -> its target
        self._stack: ExitStack | None = None  # removes the overrides and patches when it is closed

    def enter(self, target: Target, choices: Choices) -> None:
        """Apply `target` in this thread."""
        thread = threading.get_ident()
        with self._lock:
            if thread in self._targets:
                raise TargetError(
                    f"the target {target} is applied inside {self._targets[thread][0]}: leave the one before "
                    "entering another"
                )
            if self._stack is None:
                with ExitStack() as stack:
                    _PATCHES.install()
                    stack.callback(_PATCHES.remove)
                    stack.enter_context(cuda_kernels.overridden(self.find))
                    stack.enter_context(autocast.overridden(self.find))
                    self._stack = stack.pop_all()
            self._targets[thread] = target, choices
            if target.name != "cpu":
                ON_CPU.add(thread)

    def leave(self) -> None:
        """Remove the target of this thread."""
        with self._lock:
            del self._targets[threading.get_ident()]
            ON_CPU.discard(threading.get_ident())
            if self._stack is not None and not self._targets:
                stack, self._stack = self._stack, None
                stack.close()

    def find(self, value: Any) -> tuple[Target, Choices] | None:
        """The target for an op on this tensor; None if it is not fake, or the target is "cpu".

        A thread without a target may be an autograd thread that runs the backward of a thread with one: it is treated
        as such if exactly one thread has a target.
        """
        if value is None or not is_fake(value):
            return None
        found = self._targets.get(threading.get_ident())
        if found is None and len(self._targets) == 1:
            (found,) = self._targets.values()
        return found if found is not None and found[0].name != "cpu" else None

    def swapping(self, original: Any) -> Any:
        """`torch.utils.swap_tensors` for fake tensors, as `Module.to` calls it: torch's raises on memoised ones."""

        def swap_tensors(t1: Any, t2: Any) -> None:
            if threading.get_ident() in self._targets and isinstance(t1, FakeTensor):
                swap_fakes(t1, t2)
            else:
                original(t1, t2)

        swap_tensors.__doc__ = original.__doc__
        return swap_tensors

    def planning(self) -> Target | None:
        """The target of this thread, if it is not the CPU; else None."""
        found = self._targets.get(threading.get_ident())
        return found[0] if found is not None and found[0].name != "cpu" else None


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield from cuda_api.patches(_ACTIVE.planning, cuda_kernels.as_on_cuda)
    yield torch.utils, "swap_tensors", _ACTIVE.swapping(torch.utils.swap_tensors)
    yield from autocast.patches(_ACTIVE.planning)


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
