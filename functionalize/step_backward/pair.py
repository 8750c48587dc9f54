"""The programs of a captured forward: one forward, and the backwards that were recorded for it.

    forward.program         arguments, parameters -> results, saved values
    backward.program        arguments, parameters, tangents, saved values -> gradients

A backward computes the gradients that were requested at its recording (`requested`); another request needs another
backward of the same forward. `is_same_forward` compares a forward that ran again for one with the cached forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from functionalize.audit.signature import Signature
from functionalize.fsdp.python_state import FSDPEffects
from functionalize.ir.inputs import Argument, Source, WholeStorage
from functionalize.lengths.length_class import Prediction
from functionalize.program.program import Program
from functionalize.state.sources import ModuleTensor, Slot
from functionalize.step.cache import CachedProgram
from functionalize.step_backward.boundary import RequestedGradients
from functionalize.step_backward.pair_builder import SavedValue
from functionalize.templates.leaves import identity


@dataclass(eq=False)
class BackwardProgram:
    """One backward of a forward.

    used: the names of the saved values that are its inputs. slots: the slots that a replay assigns.
    effects: the changes of FSDP2's state by a replay. replays: the number of replays.
    op_stream: that of the forward and this backward, with which audits compare, or what makes it; None: they are not
    audited.
    """

    program: Program
    requested: RequestedGradients
    used: tuple[str, ...]
    slots: Sequence[Slot]
    effects: FSDPEffects
    op_stream: Signature | Callable[[], Signature] | None = None
    replays: int = 0

    @property
    def signature(self) -> Signature | None:
        """The op stream; made at first use."""
        if callable(self.op_stream):
            self.op_stream = self.op_stream()
        return self.op_stream

    @cached_property
    def unwritten(self) -> tuple[int, ...]:
        """The inputs that autograd would have saved as they are: arguments and parameters."""
        return tuple(
            i
            for i, spec in enumerate(self.program.inputs)
            if isinstance(spec.source, Argument)
            or (isinstance(spec.source, ModuleTensor) and spec.source.table == "_parameters")
        )

    @cached_property
    def freed(self) -> tuple[int, ...]:
        """The saved values, and their whole storages, that the graph may free after their last use."""
        inputs = self.program.inputs
        saved = {i for i, spec in enumerate(inputs) if isinstance(spec.source, SavedValue)}
        for i, spec in enumerate(inputs):
            if isinstance(spec.source, WholeStorage) and spec.source.input in saved:
                saved.add(i)
        return tuple(i for i in self.program.read_by_graph_only() if i in saved)


@dataclass(eq=False)
class ForwardProgram(CachedProgram):
    """A forward and its backwards.

    spec: the pytree spec of the pair (result, gradients that the callable assigned). results: the number of its leaves.
    saved: the names of the values that the program returns after them.
    text, sources: its ops as text, and the sources of its inputs; equal for equal forwards.
    parameters: the sources of the leaves that have a gradient, besides arguments.
    is_random: whether the graph draws random numbers. communicates: whether ranks run it together.
    updated: of which calls backwards were recorded: of the first one since a parameter was written, of a later one.
    trained: the sources of the parameters that this is about.
    rerun_of: the cached forward whose rerun was recorded as this program; None: this is a new recording.
    """

    spec: Any = None
    results: int = 0
    saved: tuple[str, ...] = ()
    text: str = ""
    sources: tuple[Source, ...] = ()
    parameters: tuple[Source, ...] = ()
    backwards: list[BackwardProgram] = field(default_factory=list)
    is_random: bool = False
    communicates: bool = False
    updated: frozenset[bool] = frozenset()
    trained: tuple[Source, ...] = ()
    rerun_of: ForwardProgram | None = None

    @property
    def replayed_alike(self) -> tuple[Any, ...]:
        backward = self.backwards[0]
        used = tuple(map(self.saved.index, backward.used))
        found = (self.spec, self.results, len(self.saved), used, tuple(self.parameters))
        request = tuple(backward.requested)
        return (
            *super().replayed_alike,
            *found,
            request,
            tuple(backward.slots),
            backward.effects,
            self.communicates,
        )

    def made_by(self, found: Prediction, **parts: Any) -> CachedProgram:
        # Which saved value is which is said by its name in this recording.
        backward = replace(
            self.backwards[0],
            program=found.programs[1],
            op_stream=found.op_stream,
            replays=0,
        )
        made = super().made_by(found, text="", backwards=[backward], rerun_of=None, **parts)
        made.op_stream = found.forward
        return made

    def rewrite(self, apply: Callable[[Program], Program]) -> None:
        super().rewrite(apply)
        for each in self.backwards:
            each.program = apply(each.program)

    def takes(self, programs: Sequence[Program]) -> None:
        super().takes(programs)
        (backward,) = self.backwards
        programs[1].facts = backward.program.facts
        self.backwards[:] = [replace(backward, program=programs[1])]


def is_same_forward(a: ForwardProgram, b: ForwardProgram) -> bool:
    """Whether two forwards run the same ops on the same inputs."""
    return (
        a.text == b.text
        and len(a.sources) == len(b.sources)
        and all(identity(x) == identity(y) for x, y in zip(a.sources, b.sources, strict=True))
    )
