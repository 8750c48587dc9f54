"""The state before and after a step: the facts that guard a program, and the changes that the step made to them.

    entry = EntryState.now(fn, leaves, recorder)     tensors and their places, guards, slots, FSDP2's state
    with recorder: result = fn(...)
    exit = ExitState.now(entry, result)              assigned slots, effects on FSDP2 and on the modes of modules,
                                                     changes that no replay repeats

A slot is a place for a gradient: `p.grad`, or where FSDP2 keeps gradients between microbatches (`sources.py`).
Invariant: both only read state. `EntryState.now` raises before the step runs, for objects that cannot be inspected.
Refusals: `ExitState.changed` names a change that a replay would not repeat; a slot that cannot be assigned
raises `UncapturableError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize._compat.references import address
from functionalize.audit.signature import StateAround
from functionalize.fsdp.python_state import FSDPEffects, FSDPState
from functionalize.ir.epilogue import Action
from functionalize.ir.guards import AliasGuard, ConstantGuard, Guard, TensorGuard, frozen_constant
from functionalize.ir.inputs import Argument, Call, Captured, InputSpec, Source, chain_of
from functionalize.ir.outputs import SourceItself
from functionalize.recorder.recorder import Recorder
from functionalize.state.alias_guard import SharedGuard, outermost
from functionalize.state.arguments import flatten_result
from functionalize.state.dropped_gradients import watch
from functionalize.state.hyperparameters import Key, liftable
from functionalize.state.mode_guard import ModeGuard
from functionalize.state.moving_state import MovingPlaces, moved, with_live_places
from functionalize.state.number_arguments import number_arguments
from functionalize.state.python_effects import PythonEffect, flatten_left, unrepeatable
from functionalize.state.python_state import Filled, ObservedState, SurroundingsGuard
from functionalize.state.sources import (
    GroupTensor,
    Inner,
    ModuleTensor,
    OptimizerState,
    Slot,
    changed_slots,
    first_unmade,
    made_outside,
    may_have_grad,
    parameters,
)
from functionalize.state.step_guards import (
    HyperparameterGuard,
    MetadataGuard,
    ModuleGuard,
    ParameterGuard,
    SlotGuard,
    check_writable,
)
from functionalize.state.storage_places import (
    FixedTensor,
    Places,
    fixed_inside,
    fixed_tensors,
)
from functionalize.state.tensor_attributes import ArgumentAttributes, GivenAttributes
from functionalize.util.number_uses import any_needs_exact
from functionalize.util.reading import is_a
from functionalize.util.structure import KeptObject
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.walk.code_uses import is_only_stored
from functionalize.walk.fact_text import OUTSIDE, in_forward
from functionalize.walk.live_places import NO_PLACES, LivePlaces
from functionalize.walk.parts import Held, MovedPlace
from functionalize.walk.roots import Roots
from functionalize.walk.unread import AttributeReads
from functionalize.walk.walker import PythonState, note_optimizer, walked, walked_again


class UnmadeError(Exception):
    """A parameter or buffer that this call makes (`nn.LazyLinear`) cannot be an input of a program. Internal."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"reaches `{name}`, a lazy parameter or buffer, which only a forward of its module makes: call the "
            "module once before the step, or remove it where no step calls it"
        )


@dataclass(slots=True)
class EntryState:
    """The state when the step begins.

    places: every tensor that the callable reaches, by storage, and the modules and optimizers that hold them.
    gradients: a weak reference to the gradient in each slot; None: an empty slot.
    deaths: for a slot whose gradient died in the step, how many ops had run by then.
    fsdp, slot_guard: state that a step may change, since a replay changes it in the same way.
    facts: guards on state that the step itself must not change.
    python_state: the guard on Python objects that the code of the step reads.
    hyperparameters: those that are live numbers in the recording.
    fixed: tensors that the step must not replace. arguments: those among the leaves. inside: those inside of others.
    given: what scripts have assigned to tensors among the leaves.
    moving: the places in Python that the step moves, see `moving_state.py`.
    observed: `python_state` without the attributes of libraries' objects that the step does not touch, once it has run.
    """

    places: Places
    gradients: list[weakref.ref[Tensor] | None]
    deaths: dict[int, int]
    fsdp: FSDPState
    facts: list[Guard]
    python_state: SurroundingsGuard
    slot_guard: SlotGuard
    hyperparameters: frozenset[Key]
    fixed: list[FixedTensor]
    arguments: list[FixedTensor]
    inside: list[FixedTensor]
    given: list[GivenAttributes]
    moving: MovingPlaces
    observed: ObservedState

    @property
    def roots(self) -> Roots:
        return self.places.roots

    @property
    def leaves(self) -> Sequence[Any]:
        return self.places.leaves

    @property
    def slots(self) -> list[tuple[str, Slot]]:
        return self.places.slots

    @staticmethod
    def now(
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        recorder: Recorder,
        varying: frozenset[Key] = frozenset(),
        names: Sequence[str] | None = None,
        hooks_run_outside: bool = False,
        live: LivePlaces = NO_PLACES,
        varies: Callable[[PythonState], LivePlaces] | None = None,
        numbers: Sequence[int] = (),
        unowned: Sequence[weakref.ref[Tensor]] = (),
    ) -> EntryState:
        """Inspect all objects that `fn` reaches.

        varying: hyperparameters that become live numbers, besides the learning rates. names: the names of the leaves.
        hooks_run_outside: whether autograd runs hooks of plain parameters, and no program does.
        live: the places in Python that the step moves.
        varies: finds by a walk those that code outside of it has changed. numbers: the leaves that are numbers and
        live, unless code hands numbers on to C code that takes exact ones alone. unowned: leaf tensors that an earlier
        recording met and nothing known holds, as buffers of a pipeline's stage. Raises `UnmadeError`.
        """
        call, asks_nodes = Call(leaves, []), not recorder.checks.goes_outside

        def walk(live: LivePlaces) -> PythonState:
            return walked(fn, leaves, names, hooks_run_outside, live=live, asks_nodes=asks_nodes)

        state = with_live_places(live, walk)
        if varies is not None and (others := varies(state)).values.keys() - live.values.keys():
            state = with_live_places(live | others, walk)
        roots = state.roots
        if (name := first_unmade(roots, leaves)) is not None:
            raise UnmadeError(name)
        found = list(parameters(roots, leaves))
        known = {address(tensor) for _, _, tensor in found}
        alive = [tensor for each in unowned if (tensor := each()) is not None]
        found += [
            (f"unowned_{i}", Captured(tensor), tensor)
            for i, tensor in enumerate(alive)
            if may_have_grad(tensor) and address(tensor) not in known
        ]
        places = Places.now(roots, leaves, found, recorder.storages, state.live)
        if asks_nodes:
            recorder.checks.outside = made_outside(roots, leaves)
        moving = MovingPlaces.of(state, leaves)
        if numbers and not any_needs_exact(roots.functions):
            moving = replace(moving, arguments=number_arguments(numbers, leaves, roots.arguments))
        moving.bring_in(places, recorder)
        fsdp = FSDPState.now(roots.states().values())
        deaths: dict[int, int] = {}
        gradients = [slot.resolve(call) for _, slot in places.slots]
        surroundings = SurroundingsGuard.of(fn, state)
        lifted = liftable(roots.optimizers) | varying if recorder.live else frozenset()
        return EntryState(
            places,
            watch(gradients, recorder.records, deaths),
            deaths,
            fsdp,
            _facts(roots, leaves, found, lifted, state, moving),
            surroundings,
            SlotGuard.of(call, places.slots),
            lifted,
            list(fixed_tensors(roots, fsdp.tables(), state.live)),
            [FixedTensor.of(*each) for each in _tensor_arguments(roots, leaves)],
            list(fixed_inside(roots, fsdp.tables(), state.live)),
            GivenAttributes.of(roots.arguments, leaves),
            moving,
            ObservedState(surroundings, AttributeReads(roots, state.seen)),
        )

    @property
    def holders(self) -> dict[int, tuple[Held, Any]]:
        """By id, the objects that determine ops and can be changed, each with its place."""
        return self.python_state.state.holders

    @property
    def modules(self) -> ModuleGuard:
        """The guard on modules."""
        return next(fact for fact in self.facts if isinstance(fact, ModuleGuard))

    def guards_on_tensors(
        self, inputs: Sequence[InputSpec], storages: Sequence[int]
    ) -> Iterator[Guard]:
        """Guards on the first inputs: their geometry, which of them alias, and other aliases of their storages.

        storages: the serial numbers of the storages of these inputs.
        """
        inputs = inputs[: len(storages)]
        for i, spec in enumerate(inputs):
            yield TensorGuard(i, spec)
        if inputs:
            yield AliasGuard(tuple(storages), tuple(spec.name for spec in inputs))
        yield from SharedGuard.of(inputs, [self.places.shared.get(s, []) for s in storages])

    def with_versions(
        self, inputs: Sequence[InputSpec], epilogue: Sequence[Action], storages: Sequence[int]
    ) -> tuple[InputSpec, ...]:
        """The inputs of a program, with what the step has done to the version counters of those that it has written.

        storages: the serial numbers of the storages of the first inputs.
        """
        written = {action.input for action in epilogue if action.input < len(storages)}
        return tuple(
            replace(spec, version=self.places.version(storages[i])) if i in written else spec
            for i, spec in enumerate(inputs)
        )

    def guards_on_metadata(self, storages: Sequence[int]) -> Iterator[Guard]:
        """Guards on whether inputs that are no parameters require a gradient, and on the geometry of other tensors.

        Not on what FSDP2 keeps, which `FSDPStateGuard` compares, and not on places that the step only assigns: what
        was left there may have any size. storages: the serial numbers of the storages of the inputs.
        """
        shared, inputs = self.places.shared, set(storages)
        used = {place.tensor for s in inputs for place in shared.get(s, ())}
        buffers = [
            (name, source, value)
            for name, source, value, _, _ in self.fixed
            if not may_have_grad(value) and any(address(t) in used for t in plain_tensors(value))
        ]
        if buffers:
            yield ParameterGuard.of(buffers, self.python_state.state.asks_nodes)
        state, swapped = self.python_state.state, self.fsdp.tables()
        only_stored = cache(partial(is_only_stored, state.names.codes))  # layers have equal names

        def is_read(source: Source) -> bool:
            if isinstance(source, Held):
                return not only_stored(source.key)
            if isinstance(source, ModuleTensor):
                return (id(source.entries), source.name) not in swapped
            return isinstance(source, (OptimizerState, GroupTensor))

        others = (place for s, places in shared.items() if s not in inputs for place in places)
        found = [(p.name, p.source, p.geometry) for p in others if is_read(outermost(p.source))]
        yield from MetadataGuard.of(found, Call(self.leaves, []))

    def settle_hooks(self, recorder: Recorder) -> None:
        """The run has ended: the hooks on all optimizers are guarded if it has called one's `step`, and then only."""
        if recorder.steps_optimizers:
            note_optimizer(self.python_state.fn)
        else:
            self.facts = [
                fact.without_optimizers() if isinstance(fact, ModeGuard) else fact
                for fact in self.facts
            ]

    def moved(self) -> LivePlaces:
        """The places that the step has moved and that a replay may be able to move."""
        guard = self.python_state
        now = walked_again(guard.fn, self.leaves, guard.state, is_replay=False)
        return moved(guard.state, now)

    def changed(self, modes: bool = True, explained: Container[int] = ()) -> str | None:
        """A change that the step made and that a replay would not repeat; None if there is none.

        modes: whether the modes of modules, training or evaluation, count. explained: ids of generators that a replay
        moves alike.
        """
        found = self._change(modes, explained)
        outside = self.python_state.state.hooks_run_outside
        return in_forward(found) if found is not None and outside else found

    def _change(self, modes: bool, explained: Container[int]) -> str | None:
        call = Call(self.leaves, [])
        tensors: list[FixedTensor | GivenAttributes] = [*self.fixed, *self.arguments, *self.inside]
        for each in (*tensors, *self.given):
            if (change := each.change(call)) is not None:
                return change
        facts = self.facts
        if not modes and self.modules.changed_modes():
            facts = [f.but_modes() if isinstance(f, ModuleGuard) else f for f in facts]
        failures = (fact.failure(call) for fact in facts)
        failure = next((f for f in failures if f), None)
        return (
            f"changes what it is guarded by: {failure}{OUTSIDE}"
            if failure
            else self.python_state.change(call, explained)
        )


def _facts(
    roots: Roots,
    leaves: Sequence[Any],
    found: Sequence[tuple[str, Source, Tensor]],
    lifted: frozenset[Key],
    state: PythonState,
    moving: MovingPlaces,
) -> list[Guard]:
    """Guards on state that a step reads and does not write; those that fail most often come first."""
    # Of these places alone, the recording has what they hold as inputs.
    live = LivePlaces({place.place: place for _, place in moving.values})
    inputs = {each.leaf for each in moving.arguments}
    constants = [
        ConstantGuard(i, frozen_constant(leaf), roots.arguments[i])
        for i, leaf in enumerate(leaves)
        if not is_a(leaf, Tensor) and i not in inputs
    ]
    hyperparameters = [HyperparameterGuard.of(n, o, lifted) for n, o in roots.optimizers.items()]
    return [
        *constants,
        ModeGuard.now(),
        ArgumentAttributes.of(roots.arguments, leaves),
        ModuleGuard.of(roots, live),
        *hyperparameters,
        ParameterGuard.of([*found, *_tensor_arguments(roots, leaves)], state.asks_nodes),
    ]


def _tensor_arguments(roots: Roots, leaves: Sequence[Any]) -> Iterator[tuple[str, Source, Tensor]]:
    for i, (name, leaf) in enumerate(zip(roots.arguments, leaves, strict=True)):
        if is_a(leaf, Tensor):
            yield name, Argument(i), leaf


@dataclass(slots=True)
class ExitState:
    """The result of the step and the state that it changed.

    leaves, spec: the flattened pair (result, gradients in the slots that the step assigned, then the values of its
    effects on Python objects).
    assigned: the slots that the step assigned; the gradient of a slot that it emptied is None.
    effects: the changes of FSDP2's state in Python, and of the modes of modules.
    has_grad_fn: for each leaf of the result, whether it has an autograd history.
    changed: a change that a replay would not repeat; None: there is none.
    moved: if there is one, the places that the step has moved and a replay may be able to move.
    filled: if there is one, the deques to which the step has added elements, and which take so many and no more.
    python_effects: what a replay repeats in Python, see `state/python_effects.py`. values: one for each.
    on_entry: the tensors that were at places which the step moves, by their ids, with the places of each.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    assigned: list[Slot]
    effects: FSDPEffects
    has_grad_fn: list[bool]
    changed: str | None
    moved: LivePlaces = NO_PLACES
    filled: list[Filled] = field(default_factory=list)
    python_effects: list[PythonEffect] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    on_entry: dict[int, list[MovedPlace]] = field(default_factory=dict)

    @staticmethod
    def now(
        entry: EntryState,
        result: Any,
        changed: str | None = None,
        python_effects: Sequence[tuple[PythonEffect, Any]] = (),
        explained: Container[int] = (),
        on_entry: Iterable[tuple[weakref.ref[Tensor], MovedPlace]] = (),
        one_object: Sequence[tuple[Any, Any]] = (),
        replaced: Mapping[Any, weakref.ref[Tensor]] = MappingProxyType({}),
    ) -> ExitState:
        """Compare every slot and FSDP2's state with those on entry.

        changed: a change that is known already. python_effects: those of the step, with their values. explained: ids of
        generators that they move. on_entry: the tensors that were at places which the step moves. one_object: the
        containers that the step leaves in several places. replaced: see `MovingState`.
        """
        were: dict[int, list[MovedPlace]] = {}
        for tensor, source in on_entry:
            if tensor() is not None:
                were.setdefault(id(tensor()), []).append(source)
        assigned, gradients = [], []
        call = Call(entry.leaves, [])
        for at, gradient in changed_slots(entry.slots, entry.gradients, call, replaced):
            name, slot = entry.slots[at]
            check_writable(name, slot, call)
            assigned.append(slot)
            gradients.append(gradient)
        repeated, values = [e for e, _ in python_effects], [value for _, value in python_effects]
        leaves, spec = flatten_left(result, gradients, python_effects, one_object)
        has_grad_fn = [
            isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None
            for x in leaves[: len(flatten_result(result)[0])]
        ]
        changed = changed or entry.changed(False, explained) or unrepeatable(repeated, values)
        places = NO_PLACES if changed is None else entry.moved()
        after = FSDPState.now(list(entry.roots.modules.values()))
        effects = FSDPEffects.between(entry.fsdp, after)
        if isinstance(effects, str):
            changed, effects = changed or effects, FSDPEffects()
        effects = effects.with_modes(entry.modules.changed_modes())
        return ExitState(
            leaves,
            spec,
            assigned,
            effects,
            has_grad_fn,
            changed,
            places,
            entry.python_state.filled() if changed is not None else [],
            repeated,
            values,
            were,
        )


def state_around(
    entry: EntryState, exit: ExitState, records: int | None = None, facts: int | None = None
) -> StateAround:
    """What a signature needs. records, facts: how many of the recording are the callable's own; None: all."""
    return StateAround(
        entry.places.widest,
        exit.leaves,
        exit.spec,
        entry.slots,
        exit.assigned,
        entry.hyperparameters,
        entry.roots.optimizers,
        entry.moving.left_with(exit.python_effects, exit.leaves),
        records,
        facts,
    )


def kept_objects(recorder: Recorder, entry: EntryState, exit: ExitState) -> dict[int, SourceItself]:
    """The objects of a result that were there on entry, by the ids of leaves: a replay finds them again."""
    assigned = set(map(id, exit.assigned))
    found: dict[int, SourceItself] = {}
    for leaf in exit.leaves:
        if type(leaf) is KeptObject:
            place: Held = leaf.place
            is_moved = entry.moving.live.has(place)
            source = MovedPlace(place.container, place.key) if is_moved else place
            found[id(leaf)] = SourceItself(source)
        if isinstance(leaf, Tensor) and id(leaf) not in found:
            sources = list(_places_of(leaf, recorder, entry, assigned))
            known = {source.place for source in sources if isinstance(source, Held)}
            # A replay makes its outputs before it assigns to places.
            sources += [s for s in exit.on_entry.get(id(leaf), ()) if s.place not in known]
            if sources:
                found[id(leaf)] = SourceItself(sources[0], tuple(sources[1:]))
    return found


def _places_of(
    leaf: Tensor, recorder: Recorder, entry: EntryState, assigned: set[int]
) -> Iterator[Source]:
    """Every place that held the object `leaf` on entry and holds it now. assigned: ids of assigned slots."""
    call, swapped = Call(entry.leaves, []), entry.fsdp.tables()
    for inner in plain_tensors(leaf):
        storage = recorder.storages.ref(inner).storage
        for place in entry.places.shared.get(storage, ()):
            source = next(s for s in chain_of(place.source) if not isinstance(s, Inner))
            if (
                place.tensor != address(inner)
                or isinstance(source, Argument)
                or id(source) in assigned
            ):
                continue
            if isinstance(source, ModuleTensor) and (id(source.entries), source.name) in swapped:
                continue  # it holds FSDP2's sharded and unsharded parameter in turn; each has another source
            if source.resolve(call) is leaf:
                yield source
