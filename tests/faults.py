"""Faults to put into a training step, and what must be as it was when one has passed through a capture.

    trap = Trap(); trap.arm("backward", error)   the next `trap("backward")` raises, once
    with Tripwire(7, error) as wire: step(x)     the eighth op that reaches the dispatcher raises
    with surroundings(optimizer): ...            torch, the collector and hyperparameters are left as they were
    fault_of(step, x)                            what a call raised, or None

Nothing here needs pytest, so that the ranks can import it.
"""

from __future__ import annotations

import contextvars
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize.program.program import Program
from functionalize.run.windows import windows
from functionalize.scalars.live_scalars import is_live
from tests.leftovers import leftovers

Error = Callable[[], None]


def raising(error: BaseException | type[BaseException]) -> Error:
    """Raises the error."""

    def throw() -> None:
        raise error

    return throw


def interrupt() -> None:
    """Ctrl-C, as the operating system delivers it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class Trap:
    """Places of a step where a fault can be had: `trap("forward")` raises if it was armed for that place.

    What it is armed with is where no search of a step looks: a program does not depend on it.
    """

    def __init__(self) -> None:
        self._armed: contextvars.ContextVar[Any] = contextvars.ContextVar("armed", default=None)

    def arm(self, where: str, error: Error) -> None:
        """For one fault."""
        self._armed.set((where, error))

    def disarm(self) -> bool:
        """Whether it was still armed."""
        armed = self._armed.get() is not None
        self._armed.set(None)
        return armed

    def __call__(self, where: str) -> None:
        """A place of the step."""
        armed = self._armed.get()
        if armed is not None and armed[0] == where:
            self._armed.set(None)
            armed[1]()


def ops_of_replay(program: Program) -> int:
    """How many ops of a graph a mode sees; those of the epilogue follow."""
    views = windows(program)
    run = [n for n in program.graph.nodes if n not in views.skipped]
    return sum(n in views.made or isinstance(n.target, torch._ops.OpOverload) for n in run)


class Tripwire(TorchDispatchMode):
    """The op number `at` raises before it runs; below zero: none. ops: how many came.

    Tensors made of Python's numbers do not count: a replay makes some to look up its inputs.
    """

    def __init__(self, at: int, error: Error) -> None:
        super().__init__()
        self.at, self.error, self.ops = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += func is not torch.ops.aten.lift_fresh.default
        if self.ops == self.at + 1 and func is not torch.ops.aten.lift_fresh.default:
            self.error()
        return func(*args, **(kwargs or {}))


def fault_of(step: Callable[..., Any], *args: Any) -> str | None:
    """What a call raised, if it did; also what is no `Exception`."""
    try:
        step(*args)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


def live_numbers(optimizer: torch.optim.Optimizer) -> list[str]:
    """Hyperparameters that are live numbers of a recording."""
    return [
        f"group {i}: {key} is live"
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        for each in (value if isinstance(value, (list, tuple)) else (value,))
        if is_live(each)
    ]


def _hyperparameters(optimizer: torch.optim.Optimizer) -> str:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return repr(groups)


@contextmanager
def surroundings(*optimizers: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever happens inside, torch, the collector, threads and hyperparameters are as before."""

    def now() -> tuple[Any, ...]:
        threads, thresholds = threading.active_count(), gc.get_threshold()
        modes = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        return gc.isenabled(), thresholds, threads, modes, [*map(_hyperparameters, optimizers)]

    before = now()
    try:
        yield
    finally:
        found = leftovers() + [text for o in optimizers for text in live_numbers(o)]
        assert found == [], found
        assert now() == before, (now(), before)
