"""A forward and its backward, recorded as one stream of ops, made into two programs.

    records  |  forward .......... | backward ..........
    programs |  inputs -> outputs, saved values    inputs, saved values, tangents -> gradients

    at = Boundary.now(entry, result, recorder)           where the forward ended
    taken = JointRecording(recorder, at, later, end)     later, end: around the backward
    taken.pair(spec, keep)                               both programs, and what one hands to the other

What the forward owes its inputs is paid at its end; the backward finds them again where they are, so that it
reads what they hold then, and saves no parameter and no view of one.

Note [FSDP2 between forward and backward]
Eager FSDP2 keeps the root unsharded in between, and remembers in Python which groups ran. A replay of the forward
leaves all that as it was on entry, and the backward does both halves' part of it: an unsharded storage is
compared with what it was when the forward began, and what the root's layers need is among the saved values.
So a forward without a backward changes nothing that FSDP2 keeps, and neither does a second one before it.

Refusals: see `Boundary.refused`; a storage that is resized between forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from functionalize._compat import pytree
from functionalize.core.guards import AliasGuard, Guard, TensorGuard
from functionalize.core.inputs import Argument, InputSpec, Source
from functionalize.core.ops import Geometry, geometry_of
from functionalize.core.program import Program, Result
from functionalize.core.split import Split, split
from functionalize.core.unused import drop_unused_inputs
from functionalize.core.wrappers import plain_tensors
from functionalize.frontend.build import Builder, GivenInput
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import (
    FSDPTensor,
    fsdp_unsharded,
)
from functionalize.frontend.fsdp_state import (
    FSDPEffects,
    FSDPState,
    FSDPStateGuard,
    same_value,
)
from functionalize.frontend.guards import SlotGuard
from functionalize.frontend.halves import Half, JointBuilder, Saved
from functionalize.frontend.recording import Entry, Exit, Recording
from functionalize.frontend.shared import SharedGuard
from functionalize.frontend.sources import Slot
from functionalize.frontend.storage_table import External


@dataclass(frozen=True, slots=True)
class Boundary:
    """The moment between forward and backward: how much of everything had been recorded.

    unsharded: the storages of unsharded FSDP2 parameters. state: FSDP2's, as the forward left it.
    """

    entry: Entry
    exit: Exit
    changed: str | None
    state: FSDPState
    unsharded: frozenset[int]
    records: int
    externals: int
    facts: int

    @staticmethod
    def now(entry: Entry, result: Any, recorder: Recorder, changed: str | None) -> Boundary:
        """Look at everything when the forward has ended. changed: what it did that a replay would not."""
        recorder.checks.check_generators("after its last random op")
        modules = list(entry.roots.modules.values())
        plain = [t for m in modules for u in fsdp_unsharded(m) for t in plain_tensors(u)]
        unsharded = {recorder.storages.ref(t).storage for t in plain}
        log = recorder.scalar_log
        return Boundary(
            entry,
            Exit.now(entry, result),
            changed or entry.changed(),
            FSDPState.now(modules),
            frozenset(unsharded),
            len(recorder.records),
            len(recorder.storages.externals),
            len(log.facts) if log is not None else 0,
        )


@dataclass(eq=False)
class Pair:
    """Both programs. text: the forward without what it saves, to tell whether two are the same.

    saved: names of what the forward returns after `results` leaves; used: those that the backward takes.
    """

    forward: Program
    backward: Program
    results: int
    saved: tuple[str, ...]
    used: tuple[str, ...]
    text: str
    sources: tuple[Source, ...]
    slots: Sequence[Slot]
    late_slots: Sequence[Slot]
    effects: FSDPEffects


class JointRecording(Recording):
    """A forward and a backward of it, before it is known whether they are kept.

    later: what held when the backward began. end: what it left, with the gradients it gave as its result.
    """

    def __init__(
        self, recorder: Recorder, at: Boundary, later: Entry, end: Exit, changed: str | None
    ) -> None:
        both = {**later.places.widest, **at.entry.places.widest}
        places = replace(at.entry.places, widest=both)
        expected = expected_state(at, later.fsdp)
        after = FSDPState.now(list(later.roots.modules.values()))
        effects = (
            "FSDP2 set itself up" if expected is None else FSDPEffects.between(expected, after)
        )
        told = effects if isinstance(effects, str) else None
        changed = at.changed or changed or later.changed() or told
        leaves = [*at.exit.leaves, *end.leaves]
        super().__init__(
            recorder, replace(at.entry, places=places), replace(end, leaves=leaves, changed=changed)
        )
        self.at, self.later, self.end, self.expected = at, later, end, expected
        self.effects = effects if isinstance(effects, FSDPEffects) else FSDPEffects()

    def pair(self, in_spec: pytree.TreeSpec, keep: Collection[str] = ()) -> Pair:
        """Discharge both halves. keep: values that the forward must save for other backwards."""
        at, recorder, builder = self.at, self.recorder, JointBuilder(self.recorder)
        facts = list(recorder.scalar_log.facts.values()) if recorder.scalar_log is not None else []
        first, rest = (
            recorder.storages.externals[: at.externals],
            recorder.storages.externals[at.externals :],
        )
        builder.add_inputs(list(self._given(builder, first)))
        builder.early = recorder.early_records()
        builder.run(recorder.records[: at.records])
        builder.guard(facts[: at.facts])
        before = builder.half(at.exit.leaves, at.entry.leaves, at.unsharded)
        text, sources = builder.summary()
        builder.cross(at.unsharded)
        builder.add_inputs(list(self._given(builder, rest)))
        builder.run(recorder.records[at.records :])
        builder.guard(facts[at.facts :])
        after = builder.half(self.end.leaves, self.later.leaves, ())
        graph, names = builder.emit.graph, builder.names
        cut = split(graph, builder.before, before.results, after.results, keep, names)
        forward = self._forward(builder, cut, before, in_spec)
        backward = self._backward(builder, cut, after, forward)
        return Pair(
            forward,
            backward,
            len(before.outputs),
            tuple(n.name for n in cut.saved),
            tuple(n.name for n in cut.used),
            text,
            sources,
            at.exit.assigned,
            self.end.assigned,
            self.effects,
        )

    def _given(self, builder: Builder, externals: Sequence[External]) -> Iterator[GivenInput]:
        arguments = len(self.at.entry.leaves)
        for given in self._inputs(builder, externals):
            source = given.source
            if isinstance(source, Argument) and source.leaf >= arguments:
                given = replace(given, name=f"tangent_{source.leaf - arguments}")
            yield given

    def _forward(self, builder: JointBuilder, cut: Split, half: Half, in_spec: Any) -> Program:
        saved = [Result(len(half.results) + i) for i in range(len(cut.saved))]
        program = half.program(builder, cut.forward, builder.inputs, saved, in_spec)
        storages = _storages(builder, drop_unused_inputs(program))
        entry = self.at.entry
        moving = (FSDPStateGuard(entry.fsdp), entry.held)
        program.facts = (*moving, *entry.facts, entry.around, *program.facts)
        program.guards = (
            *_guards(program, storages, len(program.inputs)),
            *_shared(program, storages, entry),
            *half.early_guards,
        )
        return program

    def _backward(self, builder: JointBuilder, cut: Split, half: Half, forward: Program) -> Program:
        first = len(self.later.leaves)
        saved = [builder.saved(n, Saved(first + i)) for i, n in enumerate(cut.used)]
        if any(map(_is_unknown, saved)):
            saved = _measured(saved, cut, forward)
        inputs = [*builder.late_inputs(), *saved]
        program = half.program(builder, cut.backward, inputs, [], None)
        storages = _storages(builder, drop_unused_inputs(program))
        assert self.expected is not None
        slots = [(n, s) for n, s in self.later.slots if self._concerns(program, s)]
        moving = (FSDPStateGuard(self.expected), self._slot_guard(slots))
        program.facts = (*moving, *self.later.facts, *program.facts)
        count = len(program.inputs) - len(saved)
        program.guards = (
            *_guards(program, storages, count),
            *_shared(program, storages[:count], self.later),
            *half.early_guards,
        )
        return program

    def _slot_guard(self, slots: Sequence[tuple[str, Slot]]) -> SlotGuard:
        """Which of these places held a gradient when the backward began."""
        held = {
            id(s): g is not None
            for (_, s), g in zip(self.later.slots, self.later.gradients, strict=True)
        }
        names = tuple(n for n, _ in slots)
        return SlotGuard(tuple(s for _, s in slots), names, tuple(held[id(s)] for _, s in slots))

    def _concerns(self, program: Program, slot: Slot) -> bool:
        """Whether the backward looks at a place for a gradient, or fills it."""
        if isinstance(slot, FSDPTensor) or isinstance(getattr(slot, "of", None), FSDPTensor):
            return True
        if any(s is slot for s in self.end.assigned):
            return True
        return any(slot in _chain(spec.source) for spec in program.inputs)


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "of", None)


def expected_state(at: Boundary, later: FSDPState) -> FSDPState | None:
    """FSDP2's state in a replay when the backward begins: as on entry, apart from what the user changed since.

    None if it is not to be compared, since FSDP2 made something.
    """
    entry = at.entry.fsdp
    keys = [[(p.key, id(p.table)) for p in state.places] for state in (entry, at.state, later)]
    if keys[0] != keys[1] or keys[1] != keys[2]:
        return None
    triples = zip(entry.values, at.state.values, later.values, strict=True)
    return replace(
        entry, values=tuple(was if same_value(b, now) else now for was, b, now in triples)
    )


def _storages(builder: Builder, kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(builder.storage_of_input[i] for i in kept if i < len(builder.storage_of_input))


def _shared(program: Program, storages: tuple[int, ...], entry: Entry) -> tuple[Guard, ...]:
    """The guard for other places that held tensors on the inputs' storages."""
    places = [entry.places.shared.get(storage, []) for storage in storages]
    return SharedGuard.of(program.inputs[: len(storages)], places)


def _guards(program: Program, storages: tuple[int, ...], count: int) -> Iterator[Guard]:
    """Guards for the inputs that are not saved values."""
    for i, spec in enumerate(program.inputs[:count]):
        yield TensorGuard(i, spec)
    if count:
        yield AliasGuard(storages[:count], tuple(spec.name for spec in program.inputs[:count]))


def _measured(saved: Sequence[InputSpec], cut: Split, forward: Program) -> list[InputSpec]:
    """The geometry of values that are on no storage of the program, from the forward's own fake values."""
    copy = forward.copy()
    copy.describe()
    outs = copy.graph.find_nodes(op="output")[0].args[0]
    values = dict(zip([n.name for n in cut.saved], outs[len(outs) - len(cut.saved) :], strict=True))
    return [replace(s, **_look(values[s.name].meta["val"])) if _is_unknown(s) else s for s in saved]


def _is_unknown(saved: InputSpec) -> bool:
    """Whether nothing is known of how a saved value looks; a number has a hint."""
    source: Any = saved.source
    return not isinstance(saved.geometry, Geometry) and source.hint is None


def _look(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {}
    geometry = geometry_of(value)._replace(offset=0)
    return {"geometry": geometry, "nbytes": geometry.end, "device": value.device}
