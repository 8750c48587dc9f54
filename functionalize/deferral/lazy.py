"""`fz.lazy`: a context in which ops wait until somebody looks at what they compute.

    lazy = fz.lazy()
    with lazy:
        for x, y in loader:              no step function
            loss = criterion(model(x), y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            print(loss.item())           looks: what is pending runs, as one program from its second time on
    print(lazy.explain())

    model, optimizer = lazy.module(model), lazy.optimizer(optimizer)      their calls wait as a whole, see `calls.py`

What waits are the contents of storages, not tensors: inside the block every tensor is a `torch.Tensor` on a storage of
the right size. Leaving the block runs what is pending, since ops outside of it would read these storages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from functionalize._compat.dispatch import current_modes
from functionalize.deferral.calls import LazyModule, LazyOptimizer
from functionalize.deferral.interceptors import INTERCEPTORS
from functionalize.deferral.mode import LazyMode
from functionalize.deferral.runs import Kind, Runs
from functionalize.errors import PassError
from functionalize.step.options import CaptureOptions
from functionalize.util.switches import mode

DEFAULT_BUDGET = float(2**30)
_SHOWN = 20


class Lazy:
    """What `fz.lazy` returns; may be entered any number of times, one block inside another, too."""

    def __init__(self, pipeline: Sequence[Any], enabled: bool, max_bytes: float) -> None:
        self._enabled, self._pipeline = enabled, pipeline
        self._calls: list[LazyModule | LazyOptimizer] = []
        self._runs = Runs(pipeline)
        self._mode = LazyMode(self._runs, max_bytes)
        self._depth = self._thread = 0
        self._is_on = False
        self._refused: str | None = None

    def __enter__(self) -> Self:
        if self._depth and self._thread != threading.get_ident():
            raise RuntimeError(
                "this fz.lazy() is active in another thread: make one for each thread"
            )
        self._depth, self._thread = self._depth + 1, threading.get_ident()
        if self._depth > 1 or not self._enabled:
            return self
        try:
            others = current_modes()
            if others:  # it would not see the ops that wait
                self._refused = f"inside of the dispatch mode {type(others[-1]).__name__}"
                return self
            self._mode.__enter__()
            self._is_on = True
            INTERCEPTORS.install()
        except BaseException:
            self._leave(INTERCEPTORS.active and self._is_on)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._depth > 1 or not self._is_on:
            self._depth -= 1
            return
        try:
            self._mode.look("the end of the block")
        finally:
            self._leave(True)

    def _leave(self, has_interceptors: bool) -> None:
        self._depth, was_on, self._is_on = 0, self._is_on, False
        try:
            if has_interceptors:
                INTERCEPTORS.remove()
        finally:
            if was_on:
                self._mode.__exit__(None, None, None)

    def barrier(self) -> None:
        """Run what is pending. Raises what an op of it raises, with a note of the line that recorded the op."""
        self._mode.look("lazy.barrier()")

    def module(self, model: Callable[..., Any]) -> LazyModule:
        """A model, or any callable, whose calls wait inside of the block, each as a whole, and so do their backwards.

        Outside of it, and in another thread, the callable itself runs. Attributes are those of the callable.
        Raises `PassError` for passes that change collectives.
        """
        name = getattr(model, "__name__", type(model).__name__)
        made = LazyModule(model, self._mode, self._options(self._pipeline), name)
        self._calls.append(made)
        return made

    def optimizer(self, optimizer: torch.optim.Optimizer) -> LazyOptimizer:
        """An optimizer whose step runs what waits: forward, backward and step as one captured step, with one program.

        Outside of the block the optimizer itself runs. Attributes are those of the optimizer.
        Raises `PassError` for passes that change collectives.
        """
        if changing := next((p for p in self._pipeline if p.changes_collectives), None):
            raise PassError(
                f"`{changing}` changes collectives, and ranks that look at different places run different programs: "
                "leave the pass out, or capture a whole step"
            )
        made = LazyOptimizer(optimizer, self._mode, self._options(self._pipeline))
        self._calls.append(made)
        return made

    @staticmethod
    def _options(pipeline: Sequence[Any]) -> CaptureOptions:
        return CaptureOptions.of(pipeline, "eager", None, allowance=None)

    def explain(self) -> str:
        """How many ops waited, who looked, which programs there are, and how their kinds of iterations differ."""
        found = [_report(self._mode, self._runs, self._enabled, self._refused)]
        return "\n".join([*found, *(each.explain() for each in self._calls)])


def lazy(
    *,
    passes: Sequence[Any] | str = (),
    enabled: bool = True,
    max_bytes: float = DEFAULT_BUDGET,
) -> Lazy:
    """A context manager: inside, ops on CPU tensors wait until somebody looks at what they compute.

    passes: a pipeline for the programs, as for `fz.capture`. enabled: False switches everything off: ops run as in
    eager. max_bytes: of pending results, after which they are computed.
    Results are bitwise equal to eager's, unless a pass or `passes="fast"` says otherwise. See `docs/lazy.md`.
    Raises `PassError` for a pipeline that cannot be parsed, `ValueError` for `max_bytes` below 1.

        >>> with fz.lazy():
        ...     y = torch.ones(3).sin().sum()  # waits
        ...     print(y > 2)  # somebody looks
        tensor(True)
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is at least 1, not {max_bytes}")
    enabled = enabled and mode() != "off"
    if isinstance(passes, str):
        from functionalize import passes as package  # here, as `passes` imports `functionalize`

        return Lazy(package.parse(passes), enabled, max_bytes)
    return Lazy(tuple(passes), enabled, max_bytes)


def _report(mode: LazyMode, runs: Runs, enabled: bool, refused: str | None) -> str:
    """What waited, who looked, and what ran, one line each."""
    if not enabled:
        return "lazy is switched off (enabled=False, or FUNCTIONALIZE=off): every op ran at once"
    lines = [f"{mode.waited} ops waited; {runs.compiles} programs were made"]
    if refused is not None:
        lines.append(f"a block was entered {refused}, and did nothing there")
    looked = mode.looked.most_common(_SHOWN)
    lines += [f"looked {count} times: {what}" for what, count in looked]
    kinds = runs.kinds()
    lines += [_line(kind) for kind in kinds[-_SHOWN:]]
    return "\n".join(lines)


def _line(kind: Kind) -> str:
    how = f"{kind.replays} by its program"
    if kind.refused is not None:
        how = f"no program: {kind.refused}"
    first = f"kind {kind.number}: {kind.ops} ops {kind.line}"
    return f"{first}\n    {kind.runs} runs, {how}; {kind.differs}"
