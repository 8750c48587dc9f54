"""A forward and its backward, recorded as one op stream and split into two programs.

    records  |  forward .......... | backward ..........
    programs |  inputs -> outputs, saved values    inputs, saved values, tangents -> gradients

    end = ForwardEnd.now(entry, result, recorder)      the state after the forward
    run = JointRun(recorder, end, later, ...)          after the backward; later: the state before it
    run.recording().pair(spec, keep)                   both programs, and the saved values between them

The forward's epilogue writes to its inputs at its end. The backward resolves each input again and reads its contents
at that time, so that no parameter and no view of one is saved.

Note [FSDP2 between forward and backward]
Between forward and backward eager FSDP2 keeps the root unsharded, and records in Python which groups ran. A replayed
forward leaves this state as it was on entry; the replayed backward applies the effects of both. So the epilogue of the
backward compares an unsharded storage with its state on entry of the forward, and the unsharded parameters that the
backward of the root's layers reads are among the saved values. A forward without a backward, and a second forward
before the backward, therefore leave FSDP2's state unchanged.

Refusals: what `ExitState.changed` names; a storage that is resized between forward and backward; calls of the backward
that a replay would make again, and a scheduler that the forward steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.analysis.joint_split import Split, split
from functionalize.audit.signature import Signature
from functionalize.calls.schedulers import SCHEDULING
from functionalize.fsdp.objects import FSDPTensor, fsdp_unsharded
from functionalize.fsdp.python_state import FSDPEffects, FSDPState, FSDPStateGuard, same_value
from functionalize.ir.inputs import Argument, InputSpec, Source, chain_of
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.outputs import Result
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_inputs
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import External
from functionalize.scalars.escaped_numbers import outliving, replace_escaped
from functionalize.scalars.live_scalars import plain_keys
from functionalize.state.python_effects import check_leaves
from functionalize.state.sources import Slot, plain_attributes
from functionalize.state.step_guards import SlotGuard
from functionalize.step.recording import StepRecording
from functionalize.step.step_state import EntryState, ExitState, kept_objects, state_around
from functionalize.step.vote import has_messages
from functionalize.step_backward.boundary import RequestedGradients
from functionalize.step_backward.pair import ForwardProgram
from functionalize.step_backward.pair_builder import Half, PairBuilder, SavedValue
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.walk.walker import walked


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """The state at the end of a recorded forward.

    entry, exit: the state before and after the forward.
    modes: the modes of modules that the forward changed. fsdp: FSDP2's state after the forward.
    unsharded: serial numbers of the storages of unsharded FSDP2 parameters. is_updated: whether a parameter was
    written since the last call; None: this call is the first one.
    records, externals, facts, call_facts: the numbers of these in the recorder at that time, where the forward's part
    ends.
    """

    entry: EntryState
    exit: ExitState
    modes: FSDPEffects
    fsdp: FSDPState
    unsharded: frozenset[int]
    is_updated: bool | None
    records: int
    externals: int
    facts: int
    call_facts: int

    @staticmethod
    def now(
        entry: EntryState,
        result: Any,
        recorder: Recorder,
        changed: str | None,
        is_updated: bool | None,
    ) -> ForwardEnd:
        """Read the state after the forward. changed: a change that is known already."""
        recorder.checks.check_generators(lambda: "after its last random op")
        modules = list(entry.roots.modules.values())
        plain = [t for m in modules for u in fsdp_unsharded(m) for t in plain_tensors(u)]
        unsharded = {recorder.storages.ref(t).storage for t in plain}
        log, effects = recorder.scalar_log, recorder.python_effects
        plain_keys([value for _, value in effects])
        try:
            exit = ExitState.now(entry, result, changed, effects)
        except Exception as error:  # the caller's loop goes on, with the result that eager has
            changed = f"cannot be compared: a bug in functionalize: {type(error).__name__}: {error}"
            exit = ExitState.now(entry, result, changed, effects)
        if exit.changed is None:
            entry.observed.leave_unread(entry.leaves)
        else:  # no program is made: the caller keeps no live number
            replace_escaped(log)
        return ForwardEnd(
            entry,
            exit,
            FSDPEffects().with_modes(entry.modules.changed_modes()),
            FSDPState.now(modules),
            frozenset(unsharded),
            is_updated,
            len(recorder.records),
            len(recorder.storages.externals),
            len(log.facts) if log is not None else 0,
            len(recorder.calls.facts),
        )

    def has_escaped(self, fn: Callable[..., Any]) -> bool:
        """Whether the forward, of which no program is made, left a part of its graph in an attribute or a variable."""
        if self.exit.changed is None:
            return False
        roots, leaves = walked(fn).roots, {id(leaf) for leaf in self.entry.leaves}
        held = (t for _, _, t in (*plain_attributes(roots), *roots.tensors) if t.requires_grad)
        return any(t.grad_fn is not None or id(t) in leaves for t in held)

    def signature(self, recorder: Recorder) -> Signature:
        """What the forward alone is compared with."""
        return Signature.of(recorder, state_around(self.entry, self.exit, self.records, self.facts))


@dataclass(eq=False)
class Pair:
    """The programs of a forward and of its backward.

    results: the number of leaves that the forward returns. saved: the names of the values that it returns after them.
    used: the names of the saved values that are inputs of the backward.
    text, sources: the ops of the forward as text, and the sources of its inputs; equal for equal forwards.
    slots, backward_slots: the slots that each program assigns. effects: those of both on FSDP2's state.
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

    end: the state after the forward. later: the state before the backward. gradients: the result of the backward.
    changed: a change of hyperparameters that a replay would not repeat; None: there is none.
    requested: the gradients that autograd requested. parameters: the sources of the leaves that have a gradient,
    besides arguments.
    rerun_of: the cached forward that ran again for this backward; None: the forward is a new recording.
    """

    recorder: Recorder
    end: ForwardEnd
    later: EntryState
    gradients: Sequence[Tensor | None]
    changed: str | None
    requested: RequestedGradients
    parameters: tuple[Source, ...]
    rerun_of: ForwardProgram | None
    rendezvous: ClassVar[None] = None  # a forward may have no backward, for which no rank waits

    @property
    def is_updated(self) -> bool:
        """Whether a parameter was written since the last call; of the first one, whether it found no gradients."""
        known = self.end.is_updated
        return not any(self.later.gradients) if known is None else known

    def recording(self) -> JointRecording:
        for state in (self.end.entry, self.later):
            state.settle_hooks(self.recorder)
        log, changed = self.recorder.scalar_log, self.end.exit.changed or self.changed
        if log is not None and changed is None and outliving(log, self.end.exit.leaves):
            changed = (
                "keeps a number that it reads from a tensor, where a replay would leave the old one: "
                "return the tensor"
            )
        return JointRecording(self, ExitState.now(self.later, self.gradients), changed)


class JointRecording(StepRecording):
    """A forward and its backward as one recording, not yet judged.

    backward_exit: the state after the backward, whose result is the list of gradients.
    changed: a change that is known already.
    expected: FSDP2's state when a replayed backward begins; None: unknown, see `expected_state`.
    effects: the changes of FSDP2's state by forward and backward together.
    """

    def __init__(self, run: JointRun, backward_exit: ExitState, changed: str | None) -> None:
        end, later = run.end, run.later
        both = {**later.places.widest, **end.entry.places.widest}
        expected = expected_state(end, later.fsdp)
        after = FSDPState.now(list(later.roots.modules.values()))
        effects = (
            "FSDP2 set itself up" if expected is None else FSDPEffects.between(expected, after)
        )
        changed = changed or later.changed()
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

    def refusal(self) -> str | None:
        if has_messages(self.recorder):
            return (
                "sends or receives messages between two ranks, a second time where a backward that no program covers "
                "runs the forward again (`backward=True`): capture the whole step"
            )
        exit = self.end.exit
        forward = list(zip(exit.python_effects, exit.values, strict=True))
        schedules = next((each for each in forward if isinstance(each[0], SCHEDULING)), None)
        backward = self.recorder.python_effects[len(forward) :]
        if schedules is not None or backward:
            found, half = (backward[0], "its backward") if schedules is None else (schedules, "it")
            advice = "do it outside, or capture the whole step"
            return f"{_text(*found)}, which {half} does not repeat (`backward=True`): {advice}"
        return super().refusal()

    def pair(self, in_spec: pytree.TreeSpec, keep: Collection[str] = ()) -> Pair:
        """Discharge forward and backward into one graph and split it.

        keep: names of values that the forward must save for its other backwards.
        """
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
        kept = kept_objects(recorder, end.entry, end.exit)
        forward_half = builder.half(end.exit.leaves, end.entry.leaves, end.unsharded, kept)
        outputs = end.exit.python_effects, end.exit.values, end.exit.leaves, forward_half.outputs
        check_leaves(*outputs, self._was_there, self._origin)
        text, sources = builder.summary()
        builder.begin_backward(end.unsharded)
        builder.add_inputs(list(self._named_inputs(builder, rest)))
        builder.run(recorder.records[end.records :])
        builder.guard(facts[end.facts :])
        backward_half = builder.half(self.backward_exit.leaves, self.later.leaves, ())
        graph, names = builder.emit.graph, builder.names
        cut = split(
            graph, builder.forward_nodes, forward_half.results, backward_half.results, keep, names
        )
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

    def signature(self) -> Callable[[], Signature]:
        """What a later forward is compared with: its own ops, without those of the backward."""
        own = self.end.signature(self.recorder)
        return lambda: own

    def whole_signature(self) -> Signature:
        """The ops of both."""
        return super().signature()()

    def _named_inputs(
        self, builder: Builder, externals: Sequence[External]
    ) -> Iterator[TensorInput]:
        """Inputs for these tensors. The backward's arguments are the forward's leaves, then the tangents."""
        leaves = len(self.end.entry.leaves)
        for each in self._inputs(builder, externals):
            source = each.source
            if isinstance(source, Argument) and source.leaf >= leaves:
                each = each._replace(name=f"tangent_{source.leaf - leaves}")
            yield each

    def _forward(self, builder: PairBuilder, cut: Split, half: Half, in_spec: Any) -> Program:
        first = len(half.results)
        saved = [Result(first + i, is_saved=True) for i in range(len(cut.saved))]
        program = half.program(builder, cut.forward, builder.inputs, saved, in_spec)
        storages = _storages(builder, drop_unused_inputs(program))
        entry = self.end.entry
        program.inputs = entry.with_versions(program.inputs, program.epilogue, storages)
        changing = (FSDPStateGuard(entry.fsdp), entry.slot_guard)
        calls = self.recorder.calls.facts[: self.end.call_facts]
        program.facts = (*changing, *entry.facts, entry.observed.guard, *calls, *program.facts)
        program.guards = (
            *entry.guards_on_tensors(program.inputs, storages),
            *entry.guards_on_metadata(storages),
            *half.early_guards,
        )
        return program

    def _backward(self, builder: PairBuilder, cut: Split, half: Half, forward: Program) -> Program:
        first = len(self.later.leaves)
        saved = [builder.saved(n, SavedValue(first + i)) for i, n in enumerate(cut.used)]
        if any(map(_has_no_geometry, saved)):
            saved = _with_geometry(saved, cut, forward)
        inputs = [*builder.backward_inputs(), *saved]
        program = half.program(builder, cut.backward, inputs, [], None)
        storages = _storages(builder, drop_unused_inputs(program))
        program.inputs = self.later.with_versions(program.inputs, program.epilogue, storages)
        assert self.expected is not None
        slots = [(n, s) for n, s in self.later.slots if self._uses_slot(program, s)]
        changing = (FSDPStateGuard(self.expected), self._slot_guard(slots))
        calls = self.recorder.calls.facts[self.end.call_facts :]
        program.facts = (*changing, *self.later.facts, *calls, *program.facts)
        program.guards = (
            *self.later.guards_on_tensors(program.inputs, storages),
            *half.early_guards,
        )
        return program

    def _slot_guard(self, slots: Sequence[tuple[str, Slot]]) -> SlotGuard:
        """The guard that these slots hold a gradient, or are empty, as when the backward began."""
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
        return any(slot in chain_of(spec.source) for spec in program.inputs)


def expected_state(end: ForwardEnd, later: FSDPState) -> FSDPState | None:
    """FSDP2's state when a replayed backward begins: that on entry, with the user's changes since the forward.

    None if the states cannot be compared, since FSDP2 initialised itself in between.
    """
    entry = end.entry.fsdp
    keys = [[(p.key, id(p.table)) for p in state.places] for state in (entry, end.fsdp, later)]
    if keys[0] != keys[1] or keys[1] != keys[2]:
        return None
    # A replayed forward does not change these values: only a change after the forward is the user's.
    triples = zip(entry.values, end.fsdp.values, later.values, strict=True)
    return replace(
        entry, values=tuple(was if same_value(b, now) else now for was, b, now in triples)
    )


def _storages(builder: Builder, kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(builder.storage_of_input[i] for i in kept if i < len(builder.storage_of_input))


def _with_geometry(saved: Sequence[InputSpec], cut: Split, forward: Program) -> list[InputSpec]:
    """The saved values with geometries, for those without a recorded storage from fake values of the forward."""
    copy = forward.copy()
    copy.describe()
    outs = copy.graph.find_nodes(op="output")[0].args[0]
    values = dict(zip([n.name for n in cut.saved], outs[len(outs) - len(cut.saved) :], strict=True))
    return [
        replace(s, **_geometry_fields(values[s.name].meta["val"])) if _has_no_geometry(s) else s
        for s in saved
    ]


def _has_no_geometry(saved: InputSpec) -> bool:
    """Whether a saved value is a tensor of unknown geometry; a number has a hint in place of a geometry."""
    source: Any = saved.source
    return not isinstance(saved.geometry, Geometry) and source.hint is None


def _geometry_fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {}
    geometry = geometry_of(value)._replace(offset=0)
    return {"geometry": geometry, "nbytes": geometry.end, "device": value.device}


def _text(effect: Any, value: Any) -> str:
    """What an effect does; of a call that is made again, its line as well."""
    is_call = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return value[0] if is_call else str(effect.what)
