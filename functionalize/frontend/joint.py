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

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat import pytree
from functionalize.core.epilogue import Action, owed
from functionalize.core.guards import AliasGuard, Guard, NumberGuard, TensorGuard, ValueGuard
from functionalize.core.inputs import Argument, Call, InputSpec, Source
from functionalize.core.ops import Geometry
from functionalize.core.printer import node_text
from functionalize.core.program import OutputRole, Program, Result
from functionalize.core.rules.views import straight
from functionalize.core.split import Split, split
from functionalize.core.storage import FunctionalStorage, View
from functionalize.core.unused import drop_unused_inputs
from functionalize.frontend.arguments import flatten_result
from functionalize.frontend.build import Builder, GivenInput, inner_tensors
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import (
    FSDPEffects,
    FSDPState,
    FSDPStateGuard,
    FSDPTensor,
    fsdp_unsharded,
)
from functionalize.frontend.guards import SlotGuard
from functionalize.frontend.known_storages import External
from functionalize.frontend.recording import Entry, Exit, Recording
from functionalize.frontend.shared import SharedGuard
from functionalize.frontend.sources import Slot
from functionalize.run.boxed import boxed


@dataclass(frozen=True, slots=True)
class Saved:
    """Where the backward is given a saved value: after the arguments and the tangents. hint: if it is a number."""

    leaf: int
    hint: Any = None

    def resolve(self, call: Call) -> Any:
        return call.leaves[self.leaf]


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
        recorder.check_generators("after its last random op")
        modules = list(entry.roots.modules.values())
        plain = [t for m in modules for u in fsdp_unsharded(m) for t in inner_tensors(u)]
        unsharded = {recorder.ref(t).storage for t in plain}
        ledger = recorder.ledger
        return Boundary(
            entry,
            Exit.now(entry, result),
            changed or entry.changed(),
            FSDPState.now(modules),
            frozenset(unsharded),
            len(recorder.records),
            len(recorder.externals),
            len(ledger.facts) if ledger is not None else 0,
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
        places = {**later.places, **at.entry.places}
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
        facts = list(recorder.ledger.facts.values()) if recorder.ledger is not None else []
        first, rest = recorder.externals[: at.externals], recorder.externals[at.externals :]
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
        program.facts = (*moving, *entry.facts, *program.facts)
        program.guards = (
            *_guards(program, storages, len(program.inputs)),
            *_shared(program, storages, entry),
            *half.early_guards,
        )
        return program

    def _backward(self, builder: JointBuilder, cut: Split, half: Half, forward: Program) -> Program:
        first = len(self.later.leaves)
        saved = [
            builder.saved(n, Saved(first + i, n.meta.get("hint"))) for i, n in enumerate(cut.used)
        ]
        if any(spec.geometry is None for spec in saved):
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
    return replace(entry, values=tuple(was if b is now else now for was, b, now in triples))


def _storages(builder: Builder, kept: Sequence[int]) -> tuple[int, ...]:
    return tuple(builder.storage_of_input[i] for i in kept if i < len(builder.storage_of_input))


def _shared(program: Program, storages: tuple[int, ...], entry: Entry) -> tuple[Guard, ...]:
    """The guard for other places that held tensors on the inputs' storages."""
    places = [entry.shared.get(storage, []) for storage in storages]
    return SharedGuard.of(program.inputs[: len(storages)], places)


def _guards(program: Program, storages: tuple[int, ...], count: int) -> Iterator[Guard]:
    """Guards for the inputs that are not saved values."""
    for i, spec in enumerate(program.inputs[:count]):
        yield TensorGuard(i, spec)
    if count:
        yield AliasGuard(storages[:count], tuple(spec.name for spec in program.inputs[:count]))


def _measured(saved: Sequence[InputSpec], cut: Split, forward: Program) -> list[InputSpec]:
    """The geometry of values that are on no storage of the program, from the forward's own fake values."""
    outs = forward.copy().graph_module.graph.find_nodes(op="output")[0].args[0]
    values = dict(zip([n.name for n in cut.saved], outs[len(outs) - len(cut.saved) :], strict=True))
    return [
        replace(s, **_look(values[s.name].meta["val"])) if s.geometry is None else s for s in saved
    ]


def _look(value: Any) -> dict[str, Any]:
    from functionalize.core.ops import geometry_of

    if not isinstance(value, Tensor):
        return {}
    geometry = geometry_of(value)._replace(offset=0)
    return {"geometry": geometry, "nbytes": geometry.end, "device": value.device}


# -- discharging -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Half:
    """What one side of the boundary returns and owes."""

    outputs: list[OutputRole]
    epilogue: list[Action]
    results: list[fx.Node]
    value_guards: tuple[ValueGuard, ...]
    number_guards: tuple[NumberGuard, ...]
    early_guards: tuple[Guard, ...]

    def program(
        self,
        builder: Builder,
        graph: fx.Graph,
        inputs: Sequence[InputSpec],
        saved: Any,
        in_spec: Any,
    ) -> Program:
        """The program of this side; it returns a flat list, saved values at the end."""
        outputs = (*self.outputs, *saved)
        return Program(
            graph=graph,
            constants=dict(builder.constants),
            inputs=tuple(inputs),
            outputs=outputs,
            epilogue=tuple(self.epilogue),
            guards=(),
            facts=self.number_guards,
            value_guards=self.value_guards,
            in_spec=in_spec,
            out_spec=flatten_result([0] * len(outputs))[1],
            runner=boxed,
        )


class JointBuilder(Builder):
    """Discharges a recording that has a boundary in it. before: the ops on its first side."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.before: list[fx.Node] = []
        self.names: dict[fx.Node, str] = {}
        self._geometry: dict[fx.Node, tuple[Geometry, torch.device]] = {}

    def half(self, leaves: Sequence[Any], given: Sequence[Any], deferred: Collection[int]) -> Half:
        """What the ops discharged since the last half return and owe; `deferred` storages owe nothing yet."""
        outputs = self.roles(leaves, given)
        epilogue: list[Action] = []
        for serial, index in self._home.items():
            if serial not in deferred:
                epilogue += owed(self.engine.storages[serial], index, self.emit, self.slot)
        half = Half(
            outputs,
            epilogue,
            list(self._slots),
            tuple(self._value_guards),
            tuple(self._number_guards),
            tuple(self.early_guards(boxed)),
        )
        self._slots, self._clones = {}, {}
        self._value_guards, self._number_guards, self._early = [], [], []
        return half

    def summary(self) -> tuple[str, tuple[Source, ...]]:
        """The ops so far as text, and where the inputs that they read come from."""
        nodes = self.emit.graph.nodes
        read = [i for i, node in enumerate(self._nodes) if node.users]
        text = [node_text(node) for node in nodes if node.op != "placeholder"]
        text += [self._nodes[i].name for i in read]
        same = re.sub(
            r" at 0x[0-9a-f]+", "", "\n".join(text)
        )  # a profiler's mark, which goes as dead code
        return same, tuple(self.inputs[i].source for i in read)

    def cross(self, deferred: Collection[int]) -> None:
        """Go over to the backward: inputs are found again, views are taken again.

        A view that the forward took of what it made is taken again from the whole, which is what is saved.
        """
        self.before = [n for n in self.emit.graph.nodes if n.op == "call_function"]
        for serial, storage in list(self.engine.storages.items()):
            for view in storage.views.values():
                if isinstance(view.value, fx.Node):
                    found = view.geometry._replace(offset=0), storage.device
                    self._geometry.setdefault(view.value, found)
            if serial in self._home and serial not in deferred:
                self._find_again(serial, storage)
            elif not storage.parts and storage.views[storage.root].version == storage.version:
                for view in storage.views.values():
                    if view.geometry != storage.root:
                        view.version = -1

    def _find_again(self, serial: int, storage: FunctionalStorage) -> None:
        """An input's storage as the backward finds it, whatever happened to it in between."""
        was = self.inputs[self._home[serial]]
        name = self._unique(was.name)
        spec = InputSpec(name, was.geometry, storage.nbytes, was.device, was.source)
        node = self._placeholder(spec, serial)
        self.names |= {self._nodes[self._home[serial]]: f"{was.name}_before", node: was.name}
        self._home[serial] = len(self.inputs) - 1
        new = FunctionalStorage(
            serial, spec.geometry, spec.device, node, spec.nbytes, was.name, straight, external=True
        )
        for g, view in storage.views.items():
            if g != spec.geometry:
                new.views[g] = View(g, view.parent, view.step)
        self.engine.storages[serial] = new

    def late_inputs(self) -> list[InputSpec]:
        """Every input as the backward calls it."""
        pairs = zip(self._nodes, self.inputs, strict=True)
        return [replace(spec, name=self.names.get(node, spec.name)) for node, spec in pairs]

    def saved(self, node: fx.Node, source: Saved) -> InputSpec:
        """The input of the backward that a value of the forward is."""
        geometry, device = self._geometry.get(node, (None, torch.device("cpu")))
        nbytes = geometry.end if geometry is not None else 0
        return InputSpec(node.name, geometry, nbytes, device, source)  # type: ignore[arg-type]
