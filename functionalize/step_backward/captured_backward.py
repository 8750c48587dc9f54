"""`capture_backward`: the backwards of graphs that eager has built, each replayed by the program of an earlier one.

    backward = fz.functions.capture_backward()
    loss = model(batch)            eager, of whatever depth and shape
    backward(loss)                 what `loss.backward()` does

Graphs of one tape (the same nodes, sizes, numbers, edges and hooks, see `tape/listing.py`) share a program. What Python
code of hooks and Functions reads is guarded as in a captured step: such a backward is a step whose arguments are what
the nodes hold, and whose code is that of the hooks. Programs are recorded, replayed, audited and dropped as those of
steps.
Invariant: a backward that cannot be listed, or captured, is eager's own. What a replay reads was listed: a program that
reads another tensor is refused.
Refusals, after which calls run eagerly: `backward.refused` counts them, by reason.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import first_gradients
from functionalize.audit.schedule import AuditOption
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Captured, chain_of
from functionalize.step.captured_step import CapturedStep
from functionalize.step.hooks import Hooks
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built
from functionalize.step.policy import ALLOWANCE
from functionalize.tape.listing import Unlisted, listed

Tensors = Tensor | Sequence[Tensor]


def capture_backward(
    *,
    passes: Sequence[Any] | str = (),
    audit: AuditOption = "auto",
    allowance: float | None = ALLOWANCE,
) -> TapeBackward:
    """A callable that goes backward as `loss.backward()`, by a program where one of the same tape was recorded.

    The options are those of `capture`. A call never raises for a backward that cannot be captured: it runs eagerly.

        >>> backward = fz.functions.capture_backward()
        >>> weight = torch.ones(2, requires_grad=True)
        >>> for _ in range(4):
        ...     weight.grad = None
        ...     backward(weight.sin().sum())
        >>> torch.equal(weight.grad, torch.ones(2).cos())
        True
    """
    return TapeBackward(
        CaptureOptions.of(
            passes,
            "eager",
            None,
            False,
            audit,
            allowance,
            False,
        )
    )


class TapeBackward:
    """Backwards by programs, one for each tape: a captured step whose arguments are what the nodes hold.

    step: that captured step, whose attributes this has, too. refused: how many calls could not be listed, by reason.
    """

    def __init__(self, options: CaptureOptions) -> None:
        # Of the running call: the search for what code reads begins there.
        self._hooks: list[Any] = []
        self.step = CapturedStep(functools.partial(_backward, self._hooks), options, _Tapes)
        self.refused: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # how it is copied is its own
            raise AttributeError(name)
        return getattr(self.__dict__["step"], name)

    def __getstate__(self) -> tuple[CaptureOptions, dict[str, Any]]:
        """The options, and what a script has set: a copy begins without programs."""
        own = {"_hooks", "step", "refused"}
        return self.step.core.options, {k: v for k, v in vars(self).items() if k not in own}

    def __setstate__(self, state: tuple[CaptureOptions, dict[str, Any]]) -> None:
        options, attributes = state
        TapeBackward.__init__(self, options)
        vars(self).update(attributes)

    def __call__(
        self,
        loss: Tensors,
        gradient: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """What `torch.autograd.backward(loss, gradient, retain_graph)` does.

        A replay does not free the graph: drop it (`del loss`).
        """
        roots = [loss] if isinstance(loss, Tensor) else list(loss)
        passed = [gradient] if gradient is None or isinstance(gradient, Tensor) else list(gradient)
        if gradient is None:
            passed *= len(roots)
        gradients = first_gradients(roots, passed)
        try:
            if self.step.core.options.is_off:
                raise Unlisted("switched off by FUNCTIONALIZE=off")
            if self.step.is_busy:
                raise Unlisted("inside of a recording or a transform")
            tape = listed(roots, gradients)
        except Unlisted as reason:
            self.refused[str(reason)] += 1
            torch.autograd.backward(roots, gradients, retain_graph)
            return
        self._hooks[:] = tape.hooks
        try:
            self.step(
                roots, gradients, retain_graph, tape.key, tape.tensors, tape.leaves, tape.packed
            )
        finally:
            self._hooks.clear()


class _Tapes:
    """What is particular to such a step."""

    hooks = Hooks(
        is_still=True,  # hooks are made anew: a number in one is no place of the next
        built=lambda built, recording, call: _checked(built),
        why_unsaved="is for the backwards of eager graphs: capture a whole step",
    )

    def __init__(self, step: CapturedStep[..., Any]) -> None:
        step.core.name, step.core.goes_outside = "backward", True


def _checked(built: Built) -> Built:
    """Refuse a program that reads a tensor that was not listed."""
    for spec in built.cached.program.inputs:
        if any(isinstance(source, Captured) for source in chain_of(spec.source)):
            raise UncapturableError(f"the backward reads `{spec.name}`, which no node holds")
    return built


def _backward(
    hooks: list[Any],
    roots: Sequence[Tensor],
    gradients: Sequence[Any],
    retain_graph: bool,
    tape: str,
    tensors: Sequence[Any],
    leaves: Sequence[Tensor],
    packed: Sequence[Any],
) -> None:
    """The backward itself. What is not passed on to autograd is what it depends on."""
    torch.autograd.backward(roots, gradients, retain_graph)
