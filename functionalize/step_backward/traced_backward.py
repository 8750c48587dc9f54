"""`TracedBackward`: the backward of one graph that eager has built, as a program that runs once.

    program = fz.trace_backward(loss)
    program()                 what `loss.backward()` does, without autograd: gradients in their places, bit for bit
    program.inputs            tangents, leaves, saved tensors; also FSDP2's parameters and gradients
    passes.run(program, ...)  a rewritten copy; one of the two runs

The program owns the values that it reads and that only the graph reads. Its call frees each after its last use, where
the user has dropped the graph (`del loss`).
Invariant: nothing is changed before the last guard has passed.
Refusals (`GuardError`): a second call; a tensor that was written since the trace; a gradient that is there now and was
not, or the other way round; a gradient that was written, if a hook kept a tensor of the trace, such as a state of an
optimizer; another state of FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from functionalize.errors import GuardError
from functionalize.fsdp.python_state import FSDPEffects
from functionalize.ir.inputs import Argument, Call, InputSpec, chain_of
from functionalize.ir.outputs import LeafItself
from functionalize.program.program import Program
from functionalize.state.alias_guard import SharedGuard
from functionalize.state.sources import Slot, leave

_TWICE = "runs a traced backward a second time, whose values were freed by the first: call `trace_backward` again"
_ADVICE = ". Nothing was changed: call `trace_backward` again"


@dataclass(slots=True)
class GraphValues:
    """The values that a program reads, until it runs; all copies of the program share them.

    leaves: tangents, leaves of autograd, saved tensors. kept: how many of them, the first ones, are not freed.
    versions: how often each tensor had been written after the trace.
    gradients: name, source, tensor and version of each gradient that must not be written either.
    """

    leaves: list[Any]
    kept: int
    versions: list[int] = field(default_factory=list)
    gradients: list[tuple[str, Any, Any, int]] = field(default_factory=list)

    def drop_unused(self, program: Program, slots: Sequence[Slot]) -> None:
        """Drop the values that neither the program, nor its guards, nor its slots refer to."""
        sources = [*(each.source for each in program.inputs), *slots]
        shared = (guard.places for guard in program.guards if isinstance(guard, SharedGuard))
        sources += [source for places in shared for _, source, *_ in places]
        chains = (source for each in sources for source in chain_of(each))
        used = {source.leaf for source in chains if isinstance(source, Argument)}
        used |= {role.leaf for role in program.outputs if isinstance(role, LeafItself)}
        self.leaves = [leaf if i in used else None for i, leaf in enumerate(self.leaves)]

    def seal(
        self, inputs: Sequence[InputSpec], tensors: Sequence[Any], with_gradients: bool
    ) -> None:
        """The trace is done: values must not be written from now on. with_gradients: nor gradients.

        tensors: what the sources of the inputs have resolved to.
        """
        self.versions = [_version_of(leaf) for leaf in self.leaves]
        self.gradients = [
            (spec.name, spec.source, tensor, _version_of(tensor))
            for spec, tensor in zip(inputs, tensors, strict=True)
            if with_gradients and not isinstance(spec.source, Argument)
        ]

    def written(self, inputs: Sequence[InputSpec]) -> str | None:
        """Which value was written since the trace, in words; None: there is none."""
        for spec in inputs:
            at = spec.source.leaf if isinstance(spec.source, Argument) else None
            if at is not None and _version_of(self.leaves[at]) != self.versions[at]:
                return f"`{spec.name}` was written since the trace"
        call = Call(self.leaves, [])
        for name, source, tensor, version in self.gradients:
            if source.resolve(call) is not tensor or _version_of(tensor) != version:
                return f"`{name}` was written since the trace, in which a hook kept a tensor that may depend on it"
        return None


def _version_of(leaf: Any) -> int:
    counted = isinstance(leaf, Tensor) and not leaf.is_inference()
    return leaf._version if counted else 0


@dataclass(eq=False, repr=False)
class TracedBackward(Program):
    """The backward of an eager graph. slots: the gradients that a call assigns. effects: on FSDP2's state."""

    slots: Sequence[Slot] = ()
    effects: FSDPEffects = field(default_factory=FSDPEffects)
    values: GraphValues = field(default_factory=lambda: GraphValues([], 0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward: None, or the gradients of `inputs`. Without arguments, and once.

        Raises `GuardError`, with nothing changed, if a tensor or the state was changed since the trace.
        """
        if args or kwargs:
            raise TypeError(
                "a traced backward is called without arguments: it has those of the graph"
            )
        values, leaves = self.values, list(self.values.leaves)
        if not leaves:
            raise GuardError(_TWICE)
        call = self.resolve_slowly(leaves)
        if isinstance(call, str):
            raise GuardError(call + _ADVICE)
        written = values.written(self.inputs)
        if written is not None:
            raise GuardError(written + _ADVICE)
        call.freed = self.read_by_graph_only()
        returned = {role.leaf for role in self.outputs if isinstance(role, LeafItself)}
        for i in range(values.kept, len(leaves)):
            if i not in returned:
                leaves[i] = None
        values.leaves, values.versions, values.gradients = [], [], []
        result, gradients = self.replay(call)
        leave(call, self.slots, gradients, self.effects)
        return result
