"""`capture_backward`: the backwards of graphs that eager has built, each replayed by the program of an earlier one.

    backward = functionalize.capture_backward()
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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import first_gradients
from functionalize.audit.schedule import AuditOption
from functionalize.errors import UncapturableError
from functionalize.ir.inputs import Captured, chain_of
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import MAX_PROGRAM_BYTES, CaptureOptions
from functionalize.step.outcome import Built
from functionalize.step.recording import StepRecording
from functionalize.step.stages import Invocation
from functionalize.tape.listing import Unlisted, listed
from functionalize.walk.live_places import NO_PLACES, LivePlaces

Tensors = Tensor | Sequence[Tensor]


def capture_backward(
    *,
    passes: Sequence[Any] | str = (),
    max_programs: int = 16,
    audit: AuditOption = "auto",
    record_after: int = 2,
    max_program_bytes: float = MAX_PROGRAM_BYTES,
) -> CapturedTapes:
    """A callable that goes backward as `loss.backward()`, by a program where one of the same tape was recorded.

    The options are those of `capture`. A call never raises for a backward that cannot be captured: it runs eagerly.
    """
    return CapturedTapes(
        functools.partial(_backward, []),
        CaptureOptions.of(
            passes,
            "eager",
            max_programs,
            None,
            False,
            audit,
            record_after,
            max_program_bytes,
            False,
        ),
    )


class CapturedTapes(CapturedStep):
    """Backwards by programs, one for each tape. refused: how many calls could not be listed, by reason."""

    _fn: functools.partial[None]
    _goes_outside = True
    _why_unsaved = "is for the backwards of eager graphs: capture a whole step"

    def __init__(self, train_step: Callable[..., Any], options: CaptureOptions) -> None:
        super().__init__(train_step, options)
        self._name = "backward"
        self.refused: Counter[str] = Counter()

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
            if self.is_busy:
                raise Unlisted("inside of a recording or a transform")
            tape = listed(roots, gradients)
        except Unlisted as reason:
            self.refused[str(reason)] += 1
            torch.autograd.backward(roots, gradients, retain_graph)
            return
        (hooks,) = self._fn.args  # of the running call: the search for what code reads begins there
        hooks[:] = tape.hooks
        try:
            super().__call__(
                roots, gradients, retain_graph, tape.key, tape.tensors, tape.leaves, tape.packed
            )
        finally:
            hooks.clear()

    def _places(self, call: Invocation, live: bool) -> LivePlaces:
        return NO_PLACES  # hooks are made anew: a number in one is no place of the next

    def _build(self, recording: StepRecording, call: Invocation) -> Built:
        built = super()._build(recording, call)
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
