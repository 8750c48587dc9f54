"""The calls of a module, captured with their backward: what every integration builds on.

    captured = CapturedCalls([model])
    loss = criterion(model(batch), labels)     the model's forward, with its hooks, is recorded, later replayed
    loss.backward()                            and so is its backward; the loss is eager
    print(captured.explain())
    captured.remove()

`Module.compile` runs a function in place of the module's call; a `CapturedCall` stands in the same place. So whoever
calls the module calls it, and its parameters, hooks, `state_dict` and class stay as they are.
A module inside another one whose call is running is a part of it: of several modules the outermost are captured.

Note [One forward, one backward]
Under FSDP2 eager reduces the gradients of several forwards in their common backward together, and a captured forward
reduces its own. So the first calls with a gradient run eagerly, and show whether a backward follows each forward
before the next one. If not (two forwards of a discriminator, contrastive losses), all calls stay eager.

Invariant: a loop that runs without a `CapturedCalls` runs with it, but for one under FSDP2 that has one forward per
backward in its first calls and two later: its backward then raises `UncapturableError`.
Refusals: a module on which `Module.compile` was called is left as it is, and `explain` says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from functionalize._compat.modules import call_of, own_call, set_own_call, without_reports
from functionalize.entry import capture
from functionalize.state.arguments import flatten_result
from functionalize.step.captured_step import CapturedStep
from functionalize.step.explain import Boundary
from functionalize.step_backward.boundary import is_output

log = logging.getLogger("functionalize")
_OBSERVED = 4  # calls with a gradient that run eagerly first


class CapturedCalls:
    """The captured calls of modules. options: those of `fz.capture`; what cannot be captured runs eagerly."""

    def __init__(self, modules: Iterable[nn.Module], **options: Any) -> None:
        options = {"on_uncapturable": "eager", **options, "backward": True}
        self.calls: list[CapturedCall] = []
        self.is_running = False  # whether one of the modules is being called
        self._left: list[str] = []  # why modules were left as they are
        for module in modules:
            name = type(module).__name__
            if own_call(module) is None:
                self.calls.append(CapturedCall(module, self, options))
            elif not isinstance(own_call(module), CapturedCall):
                self._left.append(
                    f"calls of `{name}` are not captured: it is compiled (`compile()`)"
                )
                log.warning("%s", self._left[-1])

    def explain(self) -> str:
        """What is captured, and for each module what `explain` of its captured forward says."""
        return "\n".join([*self._left, *(call.explain() for call in self.calls)])

    @property
    def replays(self) -> int:
        """The number of replayed forwards."""
        return sum(call.step.stats.replays for call in self.calls)

    def remove(self) -> None:
        """Let the modules run as before; programs are kept for `explain`."""
        for call in self.calls:
            if without_reports(own_call(call.module)) is call:
                set_own_call(call.module, None)


class CapturedCall:
    """Runs in place of the calls of `module`."""

    def __init__(self, module: nn.Module, group: CapturedCalls, options: dict[str, Any]) -> None:
        self.module, self.group = module, group
        self._run = call_of(module)
        named = functools.partial(self._run)
        name = named.__name__ = type(module).__name__  # type: ignore[attr-defined]
        self.step: CapturedStep[..., Any] = capture(named, **options)
        self.step.boundary = Boundary(
            f"calls of `{name}`, forward with hooks, and their backward",
            "loss, clipping, optimizer, scheduler",
        )
        self._observed = 0
        self._last: Callable[[], _Backward | None] = _nothing  # of the forward before
        self._is_eager = False
        set_own_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = self.group
        if group.is_running or self._is_eager:
            return self._run(*args, **kwargs)
        group.is_running = True
        try:
            if self._observed < _OBSERVED and torch.is_grad_enabled() and not self.step.is_busy:
                return self._observe(args, kwargs)
            return self.step(*args, **kwargs)
        finally:
            group.is_running = False

    def _observe(self, args: Any, kwargs: Any) -> Any:
        """Run eagerly: Note [One forward, one backward]."""
        self.step.stats.eager += 1
        last = self._last()
        if last is not None and not last.has_run:
            self._is_eager = True
            log.warning(
                "calls of `%s` stay eager: %s", type(self.module).__name__, _SEVERAL_FORWARDS
            )
            return self._run(*args, **kwargs)
        result = self._run(*args, **kwargs)
        outputs = [leaf for leaf in flatten_result(result)[0] if is_output(leaf)]
        backward = _Backward()
        self._observed += bool(outputs)
        self._last = ref(backward)
        for output in outputs:
            output.register_hook(backward)
        return result

    def explain(self) -> str:
        """What is captured, and what became of it."""
        if self._is_eager:
            return f"calls of `{type(self.module).__name__}` run eagerly: {_SEVERAL_FORWARDS}"
        return self.step.explain()


_SEVERAL_FORWARDS = (
    "it is called again before the backward of the call before, and one backward runs through both"
)


class _Backward:
    """A hook on the outputs of a forward. It lives as long as their autograd graph."""

    has_run = False

    def __call__(self, gradient: Tensor) -> None:
        self.has_run = True


def captured(module: nn.Module) -> CapturedCalls | None:
    """What captures the calls of `module`, or None."""
    found = without_reports(own_call(module))
    return found.group if isinstance(found, CapturedCall) else None


def _nothing() -> None:
    return None
