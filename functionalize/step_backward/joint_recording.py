"""A forward and its backward, recorded as one op stream, made into two programs.

    records  |  forward .......... | backward ..........
    programs |  inputs -> outputs, saved values    inputs, saved values, tangents -> gradients

    end = ForwardEnd.now(entry, result, recorder)      where the forward ended
    run = JointRun(recorder, end, later, ...)          after the backward; later: the state before it
    run.recording().pair(spec, keep)                   both programs, and what is passed from one to the other

The forward's epilogue writes to its inputs at its end; the backward looks each input up again, so that it
reads what the input holds then, and no parameter and no view of one is saved.

Note [FSDP2 between forward and backward]
Eager FSDP2 keeps the root unsharded in between, and remembers in Python which groups ran. A replay of the forward
leaves all that as it was on entry, and the backward does both halves' part of it: an unsharded storage is
compared with its state when the forward began, and what the root's layers need is among the saved values.
So a forward without a backward changes nothing that FSDP2 keeps, and neither does a second forward before it.

Refusals: see `ForwardEnd.changed`; a storage that is resized between forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.analysis.joint_split import Split, split
from functionalize.fsdp.objects import FSDPTensor, fsdp_unsharded
from functionalize.fsdp.python_state import FSDPEffects, FSDPState, FSDPStateGuard, same_value
from functionalize.ir.inputs import Argument, InputSpec, Source
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.outputs import Result
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_inputs
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import External
from functionalize.state.sources import Slot
from functionalize.state.step_guards import SlotGuard
from functionalize.step.recording import StepRecording, input_guards
from functionalize.step.step_state import EntryState, ExitState
from functionalize.step_backward.boundary import RequestedGradients
from functionalize.step_backward.pair import ForwardProgram
from functionalize.step_backward.pair_builder import Half, PairBuilder, SavedValue
from functionalize.util.tensor_wrappers import plain_tensors


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """The moment when a recorded forward has ended.

    entry, exit: the state around the forward. changed: what it changed that a replay would not; None: nothing.
    fsdp: FSDP2's state, as the forward left it. unsharded: the storages of unsharded FSDP2 parameters.
    records, externals, facts: how many of each the recorder had.
    """

    entry: EntryState
    exit: ExitState
    changed: str | None
    fsdp: FSDPState
    unsharded: frozenset[int]
    records: int
    externals: int
    facts: int

    @staticmethod
    def now(entry: EntryState, result: Any, recorder: Recorder, changed: str | None) -> ForwardEnd:
        """Look at the state after the forward; `changed`: what is known already."""
        recorder.checks.check_generators("after its last random op")
        modules = list(entry.roots.modules.values())
        plain = [t for m in modules for u in fsdp_unsharded(m) for t in plain_tensors(u)]
        unsharded = {recorder.storages.ref(t).storage for t in plain}
        log = recorder.scalar_log
        return ForwardEnd(
            entry,
            ExitState.now(entry, result),
            changed or entry.changed(),
            FSDPState.now(modules),
            frozenset(unsharded),
            len(recorder.records),
            len(recorder.storages.externals),
            len(log.facts) if log is not None else 0,
        )


@dataclass(eq=False)
class Pair:
    """Both programs.

    results: how many leaves the forward returns; saved: the names of the values that it returns after them.
    used: the names of the saved values that the backward takes.
    text, sources: the ops of the forward and where they find their inputs; equal for the same forward.
    slots, backward_slots: which slots each program assigns. effects: of both on FSDP2's state.
    """

    forward: Program
    backward: Program
    results: int
    saved: tuple[str, ...]
    used: tuple[str, ...]
    text: str
    sources: tuple[Source, ...]
    slots: Sequence[Slot]
    backward_slots: Sequence[Slot]
    effects: FSDPEffects


@dataclass(frozen=True, slots=True)
class JointRun:
    """A forward and its backward that ran to their ends.

    end: where the forward ended. later: the state before the backward. gradients: what the backward returned.
    changed: what it did to hyperparameters that a replay would not; None: nothing.
    requested: the gradients that autograd requested. parameters: where the leaves are that gradients went to.
    rerun_of: the forward that ran again for this backward; None: it was recorded at once.
    """

    recorder: Recorder
    end: ForwardEnd
    later: EntryState
    gradients: Sequence[Tensor | None]
    changed: str | None
    requested: RequestedGradients
    parameters: tuple[Source, ...]
    rerun_of: ForwardProgram | None

    def recording(self) -> JointRecording:
        return JointRecording(self, ExitState.now(self.later, self.gradients))


class JointRecording(StepRecording):
    """A forward and a backward of it, before it is known whether their programs are kept.

    backward_exit: the state after the backward, whose result are gradients.
    expected: FSDP2's state when a replayed backward begins. effects: of both halves on FSDP2's state.
    """

    def __init__(self, run: JointRun, backward_exit: ExitState) -> None:
        end, later = run.end, run.later
        both = {**later.places.widest, **end.entry.places.widest}
        expected = expected_state(end, later.fsdp)
        after = FSDPState.now(list(later.roots.modules.values()))
        effects = (
            "FSDP2 set itself up" if expected is None else FSDPEffects.between(expected, after)
        )
        changed = end.changed or run.changed or later.changed()
        if isinstance(effects, str):
            changed, effects = changed or effects, FSDPEffects()
        leaves = [*end.exit.leaves, *backward_exit.leaves]
        super().__init__(
            run.recorder,
            replace(end.entry, places=replace(end.entry.places, widest=both)),
            replace(backward_exit, leaves=leaves, changed=changed),
        )
        self.run, self.end, self.later, self.backward_exit = run, end, later, backward_exit
        self.expected, self.effects = expected, effects

    def pair(self, in_spec: pytree.TreeSpec, keep: Collection[str] = ()) -> Pair:
        """Discharge both halves. keep: values that the forward must save for other backwards."""
        end, recorder, builder = self.end, self.recorder, PairBuilder(self.recorder)
        facts = list(recorder.scalar_log.facts.values()) if recorder.scalar_log is not None else []
        first, rest = (
            recorder.storages.externals[: end.externals],
            recorder.storages.externals[end.externals :],
        )
        builder.add_inputs(list(self._named_inputs(builder, first)))
        builder.early = recorder.early_records()
        builder.run(recorder.records[: end.records])
        builder.guard(facts[: end.facts])
        forward_half = builder.half(end.exit.leaves, end.entry.leaves, end.unsharded)
        text, sources = builder.summary()
        builder.cross(end.unsharded)
        builder.add_inputs(list(self._named_inputs(builder, rest)))
        builder.run(recorder.records[end.records :])
        builder.guard(facts[end.facts :])
        backward_half = builder.half(self.backward_exit.leaves, self.later.leaves, ())
        graph, names = builder.emit.graph, builder.names
        cut = split(graph, builder.before, forward_half.results, backward_half.results, keep, names)
        forward = self._forward(builder, cut, forward_half, in_spec)
        backward = self._backward(builder, cut, backward_half, forward)
        return Pair(
            forward,
            backward,
            len(forward_half.outputs),
            tuple(n.name for n in cut.saved),
            tuple(n.name for n in cut.used),
            text,
            sources,
            end.exit.assigned,
            self.backward_exit.assigned,
            self.effects,
        )

    def _named_inputs(
        self, builder: Builder, externals: Sequence[External]
    ) -> Iterator[TensorInput]:
        """Inputs for these tensors; the backward's arguments beyond the forward's leaves are tangents."""
        leaves = len(self.end.entry.leaves)
        for each in self._inputs(builder, externals):
            source = each.source
            if isinstance(source, Argument) and source.leaf >= leaves:
                each = replace(each, name=f"tangent_{source.leaf - leaves}")
            yield each

    def _forward(self, builder: PairBuilder, cut: Split, half: Half, in_spec: Any) -> Program:
        saved = [Result(len(half.results) + i) for i in range(len(cut.saved))]
        program = half.program(builder, cut.forward, builder.inputs, saved, in_spec)
        storages = _storages(builder, drop_unused_inputs(program))
        entry = self.end.entry
        changing = (FSDPStateGuard(entry.fsdp), entry.slot_guard)
        program.facts = (*changing, *entry.facts, entry.python_state, *program.facts)
        program.guards = (*input_guards(program, storages, entry), *half.early_guards)
        return program

    def _backward(self, builder: PairBuilder, cut: Split, half: Half, forward: Program) -> Program:
        first = len(self.later.leaves)
        saved = [builder.saved(n, SavedValue(first + i)) for i, n in enumerate(cut.used)]
        if any(map(_has_no_geometry, saved)):
            saved = _with_geometry(saved, cut, forward)
        inputs = [*builder.backward_inputs(), *saved]
        program = half.program(builder, cut.backward, inputs, [], None)
        storages = _storages(builder, drop_unused_inputs(program))
        assert self.expected is not None
        slots = [(n, s) for n, s in self.later.slots if self._uses_slot(program, s)]
        changing = (FSDPStateGuard(self.expected), self._slot_guard(slots))
        program.facts = (*changing, *self.later.facts, *program.facts)
        program.guards = (*input_guards(program, storages, self.later), *half.early_guards)
        return program

    def _slot_guard(self, slots: Sequence[tuple[str, Slot]]) -> SlotGuard:
        """The guard on which of these slots held a gradient when the backward began."""
        held = {
            id(s): g is not None
            for (_, s), g in zip(self.later.slots, self.later.gradients, strict=True)
        }
        names = tuple(n for n, _ in slots)
        return SlotGuard(tuple(s for _, s in slots), names, tuple(held[id(s)] for _, s in slots))

    def _uses_slot(self, program: Program, slot: Slot) -> bool:
        """Whether the backward reads a slot, or assigns it."""
        if isinstance(slot, FSDPTensor) or isinstance(getattr(slot, "of", None), FSDPTensor):
            return True
        if any(s is slot for s in self.backward_exit.assigned):
            return True
        return any(slot in _chain(spec.source) for spec in program.inputs)


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "of", None)


def expected_state(end: ForwardEnd, later: FSDPState) -> FSDPState | None:
    """FSDP2's state in a replay when the backward begins: as on entry, apart from what the user changed since.

    None if the states cannot be compared, since FSDP2 set itself up in between.
    """
    entry = end.entry.fsdp
    keys = [[(p.key, id(p.table)) for p in state.places] for state in (entry, end.fsdp, later)]
    if keys[0] != keys[1] or keys[1] != keys[2]:
        return None
    triples = zip(entry.values, end.fsdp.values, later.values, strict=True)
    return replace(
        entry, values=tuple(was if same_value(b, now) else now for was, b, now in triples)
    )


def _storages(builder: Builder, kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(builder.storage_of_input[i] for i in kept if i < len(builder.storage_of_input))


def _with_geometry(saved: Sequence[InputSpec], cut: Split, forward: Program) -> list[InputSpec]:
    """The geometry of values that are on no storage of the recording, from fake values of the forward's graph."""
    copy = forward.copy()
    copy.describe()
    outs = copy.graph.find_nodes(op="output")[0].args[0]
    values = dict(zip([n.name for n in cut.saved], outs[len(outs) - len(cut.saved) :], strict=True))
    return [
        replace(s, **_geometry_fields(values[s.name].meta["val"])) if _has_no_geometry(s) else s
        for s in saved
    ]


def _has_no_geometry(saved: InputSpec) -> bool:
    """Whether the geometry of a saved value is unknown; a number has none, but a hint."""
    source: Any = saved.source
    return not isinstance(saved.geometry, Geometry) and source.hint is None


def _geometry_fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {}
    geometry = geometry_of(value)._replace(offset=0)
    return {"geometry": geometry, "nbytes": geometry.end, "device": value.device}
