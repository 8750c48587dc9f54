"""One run of a step, recorded: what held before and after it, whether it is the steady state, its program.

    entry = Entry.now(fn, leaves, recorder)       places, guards, slots, FSDP2's state
    with recorder: result = fn(...)
    taken = Recording(recorder, entry, Exit.now(entry, result))
    taken.refused(), taken.unsettled(before), taken.program(...)
    before = taken.remains                        what the next recording is compared with

Note [Steady state]
The first step is not the one to keep: FSDP2 allocates where later steps resize, the optimizer makes its
state. A recording is kept once it depends on nothing that later steps will not find again:
- no storage born in it outlives it (gradients and outputs apart), or it read none of those that outlived the
  recording before;
- tensors it found outside every module, optimizer and argument were found in the same places by the recording
  before, and tensors that Python made from numbers held the same numbers;
- nothing that is guarded was changed by the step itself: numbers that Python keeps, module attributes,
  hyperparameters, containers. A replay changes none of them.

Two things may change, since a replay does them again: places for gradients (`Slot`), and what FSDP2 keeps in
Python (`FSDPEffects`). With them a step may be one microbatch of several: gradients left unreduced, parameters
left unsharded, flags set for the next call.
"""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functionalize._compat import is_traceable_wrapper_subclass, pytree
from functionalize.core.guards import (
    AliasGuard,
    ConstantGuard,
    Guard,
    TensorGuard,
    frozen_constant,
)
from functionalize.core.inputs import Argument, Call, Captured, Source
from functionalize.core.ops import OpRecord, refs_in
from functionalize.core.program import Constant, OutputRole, Program
from functionalize.core.unused import drop_unused_inputs
from functionalize.core.where import line_of
from functionalize.core.wrappers import plain_tensors
from functionalize.frontend.arguments import flatten_result, hidden
from functionalize.frontend.build import Builder, GivenInput
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import fsdp_keepalives
from functionalize.frontend.fsdp_state import FSDPEffects, FSDPState, FSDPStateGuard
from functionalize.frontend.guards import (
    HyperparameterGuard,
    ModeGuard,
    ModuleGuard,
    ParameterGuard,
    PlaceGuard,
    SlotGuard,
    check_writable,
)
from functionalize.frontend.host import HostState
from functionalize.frontend.lifted import Key, liftable
from functionalize.frontend.places import Places
from functionalize.frontend.reach import Held, Roots, reachable
from functionalize.frontend.release import why_not_here
from functionalize.frontend.shared import SharedGuard
from functionalize.frontend.sources import Slot, module_tensors, parameters
from functionalize.frontend.storage_table import External
from functionalize.frontend.surroundings import SurroundingsGuard
from functionalize.run.boxed import boxed


@dataclass(slots=True)
class Entry:
    """What holds when the step begins.

    facts: guards on what the step itself must leave alone. fsdp, held: what a replay changes as the step does.
    """

    places: Places
    gradients: list[weakref.ref[Tensor] | None]
    fsdp: FSDPState
    host: HostState
    facts: list[Guard]
    around: SurroundingsGuard
    held: SlotGuard
    lifted: frozenset[Key]
    kept: list[tuple[str, Source, Tensor, int | None]]

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
    ) -> Entry:
        """Look at everything `fn` can reach.

        varying: hyperparameters that are to be live, besides the learning rates. names: of the leaves.
        """
        call, roots = Call(leaves, []), reachable(fn, leaves, names)
        found = list(parameters(roots, leaves))
        places = Places.now(roots, leaves, found, recorder.storages)
        fsdp = FSDPState.now(roots.states().values())
        gradients = [slot.resolve(call) for _, slot in places.slots]
        keys = liftable(roots.optimizers) | varying if recorder.live else frozenset()
        return Entry(
            places,
            [None if g is None else weakref.ref(g) for g in gradients],
            fsdp,
            HostState.now(roots),
            _facts(roots, leaves, found, keys),
            SurroundingsGuard.of(fn, roots),
            SlotGuard.of(call, places.slots),
            keys,
            list(_kept(roots, fsdp)),
        )

    def changed(self) -> str | None:
        """What the step changed that a replay would not."""
        call = Call(self.leaves, [])
        for name, source, was, address in self.kept:
            try:
                if source.resolve(call) is not was:
                    return f"assigns another tensor to `{name}`"
                if _address(was) != address:
                    return f"gives `{name}` another storage (`.data = ...` or `set_`)"
            except (LookupError, AttributeError):
                return f"removes `{name}`"
        failures = (fact.failure(call) for fact in self.facts)
        failure = next((f for f in failures if f), None)
        if failure is None and (difference := self.host.difference()) is not None:
            return difference
        failure = failure or self.around.difference(call)
        return f"changes what it is guarded by: {failure}" if failure else None


def _facts(
    roots: Roots,
    leaves: Sequence[Any],
    found: Sequence[tuple[str, Source, Tensor]],
    keys: frozenset[Key],
) -> list[Guard]:
    """Guards on what a step reads and does not write; what differs most often comes first."""
    given: list[tuple[str, Source, Tensor]] = [
        (name, Argument(i), leaf)
        for i, (name, leaf) in enumerate(zip(roots.arguments, leaves, strict=True))
        if isinstance(leaf, Tensor)
    ]
    constants = [
        ConstantGuard(i, frozen_constant(leaf))
        for i, leaf in enumerate(leaves)
        if not isinstance(leaf, Tensor)
    ]
    hyperparameters = [HyperparameterGuard.of(n, o, keys) for n, o in roots.optimizers.items()]
    return [
        *constants,
        ModeGuard.now(),
        ModuleGuard.of(roots),
        *hyperparameters,
        PlaceGuard.of(roots),
        ParameterGuard.of([*found, *given]),
    ]


def _kept(roots: Roots, fsdp: FSDPState) -> Iterator[tuple[str, Source, Tensor, int | None]]:
    """Tensors that must stay where they are, apart from parameters that FSDP2 swaps."""
    swapped = fsdp.tables()
    for name, source, value in module_tensors(roots):
        if (id(source.entries), source.name) not in swapped:
            yield name, source, value, _address(value)
    for name, held, value in roots.tensors:
        yield name, held, value, _address(value)


def _address(tensor: Tensor) -> int | None:
    """Where a plain tensor's storage is."""
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage()._cdata if plain else None


@dataclass(slots=True)
class Exit:
    """What the step returned, the slots it assigned (None: it emptied one), what else it changed.

    history: which leaves of the result have an autograd history.
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    assigned: list[Slot]
    effects: FSDPEffects
    history: list[bool]
    changed: str | None

    @staticmethod
    def now(entry: Entry, result: Any, changed: str | None = None) -> Exit:
        """Compare every slot and FSDP2's state with what they were; `changed`: what is known already."""
        assigned, gradients = [], []
        call = Call(entry.leaves, [])
        for (name, slot), before in zip(entry.slots, entry.gradients, strict=True):
            now = slot.resolve(call)
            same = now is None if before is None else now is not None and now is before()
            if not same:
                check_writable(name, slot, call)
                assigned.append(slot)
                gradients.append(now)
        leaves, spec = flatten_result((result, gradients))
        history = [
            isinstance(x, Tensor) and x.requires_grad and x.grad_fn is not None
            for x in flatten_result(result)[0]
        ]
        changed = changed or entry.changed()
        after = FSDPState.now(list(entry.roots.modules.values()))
        effects = FSDPEffects.between(entry.fsdp, after)
        if isinstance(effects, str):
            return Exit(leaves, spec, assigned, FSDPEffects(), history, changed or effects)
        return Exit(leaves, spec, assigned, effects, history, changed)


def _is_changeable(value: Any) -> bool:
    kind = type(value)
    array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"
    return array or kind in (set, bytearray, types.SimpleNamespace)


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a recording, for the next one to be compared with.

    pins: weak references to the storages named, so that none of their addresses is given to another.
    """

    identities: list[Any]
    left: frozenset[int]
    pins: tuple[Any, ...]


class Recording:
    """One recorded step, before it is known whether it is kept."""

    def __init__(self, recorder: Recorder, entry: Entry, exit: Exit) -> None:
        self.recorder, self.entry, self.exit = recorder, entry, exit
        modules = list(entry.roots.modules.values())
        held = [*exit.leaves, *fsdp_keepalives(modules)]
        known = {recorder.storages.ref(t).storage for leaf in held for t in plain_tensors(leaf)}
        known |= {e.ref.storage for e in recorder.storages.externals}
        self.left = [i for i in recorder.storages.infos if i.serial not in known and i.alive]
        if self.left:  # some may be garbage in cycles, which is not collected during a capture
            gc.collect(1)
            self.left = [i for i in self.left if i.alive]
        self.found = [
            e for e in recorder.storages.externals if self._is_elsewhere(e) and e.ref.geometry.numel
        ]
        if any(not self._is_unknown(e) for e in self.found):
            self.found = [e for e in self.found if e.ref.storage in self._used]
        self.identities = [self._identity(e) for e in self.found]

    @functools.cached_property
    def _used(self) -> set[int]:
        """The storages that an op was given."""
        records = self.recorder.records
        return {ref.storage for r in records for ref in refs_in([r.args, r.kwargs])}

    def _is_unknown(self, external: External) -> bool:
        return external.ref.storage not in self.entry.places.widest

    def _is_elsewhere(self, external: External) -> bool:
        """Whether a tensor comes from no argument, module or optimizer."""
        return self._is_unknown(external) or isinstance(
            self.entry.places.widest[external.ref.storage][1], Held
        )

    def _identity(self, external: External) -> Any:
        """What says whether the next step found the same tensor."""
        if external.literal:
            held = external.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return external.ref.geometry, bytes(held.tolist())
        if self._is_unknown(external):
            return external.ref.geometry, external.info.address
        _, source, ref = self.entry.places.widest[external.ref.storage]
        assert isinstance(source, Held)
        return ref.geometry, source.place

    def refused(self) -> str | None:
        """What no further call would mend."""
        self.recorder.checks.check_generators("after its last random op")
        modules = list(self.entry.roots.modules.values())
        told = dict.fromkeys(
            [*self.recorder.checks.unrepeatable, hidden(self.exit.leaves), why_not_here(modules)]
        )
        return "; ".join(text for text in told if text) or None

    @property
    def remains(self) -> Remains:
        """What the next recording is compared with."""
        pins = (*(e.info.weak for e in self.found), *(i.weak for i in self.left))
        return Remains(self.identities, frozenset(i.address for i in self.left), pins)

    def unsettled(self, before: Remains | None) -> str | None:
        """Why this is not the steady state yet, or None. See Note [Steady state]."""
        if self.exit.changed is not None:
            return self.exit.changed
        if not self.recorder.live and (
            self.recorder.scalars or liftable(self.entry.roots.optimizers)
        ):
            return "reads numbers that may change: recorded once more, with these live"
        if self.found and (before is None or self.identities != before.identities):
            first = self.found[0]
            where = self._where(lambda r: any(x == first.ref for x in refs_in(r.args)))
            kind = "Python made from numbers" if first.literal else "no module or optimizer holds"
            return (
                f"reads a tensor ({first.ref.geometry}) that {kind}, and which may be another one at "
                f"every step: pass it as an argument\n  first used by {where}"
            )
        if self.left and before is not None and before.left:
            outside = (e for e in self.recorder.storages.externals if e.ref.storage in self._used)
            read = [e for e in outside if e.info.address in before.left]
            if not read:
                return None
            where = self._where(lambda r: any(x == read[0].ref for x in refs_in(r.args)))
            return f"reads what the step before had made and kept\n  first used by {where}"
        if self.left:
            where = self._where(lambda r: self.left[0].serial in r.meta.get("born", ()))
            return f"makes {len(self.left)} storages that outlive it\n  the first made by {where}"
        return None

    def _where(self, wanted: Callable[[OpRecord], bool]) -> str:
        for record in self.recorder.records:
            if wanted(record):
                return f"{record.target} {line_of(record.traceback)}"
        return "an unknown op"

    def program(self, in_spec: pytree.TreeSpec) -> Program:
        """Discharge the recording."""
        builder = Builder(self.recorder)
        builder.add_inputs(list(self._inputs(builder)))
        builder.early = self.recorder.early_records()
        builder.discharge()
        outputs = self._made(builder.roles(self.exit.leaves, self.entry.leaves))
        epilogue = builder.epilogue()
        early = builder.early_guards(boxed)
        program = builder.program(outputs, epilogue, (), in_spec, self.exit.spec, boxed)
        kept = drop_unused_inputs(program)
        storages = tuple(builder.storage_of_input[i] for i in kept)
        backward = any(record.autograd_node is not None for record in self.recorder.records)
        moving = (FSDPStateGuard(self.entry.fsdp, backward), self.entry.held)
        program.facts = (*moving, *self.entry.facts, self.entry.around, *program.facts)
        places = [self.entry.places.shared.get(storage, []) for storage in storages]
        program.guards = (
            *_input_guards(program, storages),
            *SharedGuard.of(program.inputs, places),
            *early,
        )
        return program

    def _made(self, outputs: list[OutputRole]) -> list[OutputRole]:
        """Of objects that the step made, and that its caller may change, each replay gives out a new one."""
        known = {*self.entry.around.known, *map(id, self.entry.leaves)}
        return [
            Constant(copy.deepcopy(role.value), made=True)
            if isinstance(role, Constant)
            and _is_changeable(role.value)
            and id(role.value) not in known
            else role
            for role in outputs
        ]

    def _inputs(
        self, builder: Builder, externals: Sequence[External] | None = None
    ) -> Iterator[GivenInput]:
        """One input per storage that came from outside, or for some of those."""
        for external in self.recorder.storages.externals if externals is None else externals:
            place = self.entry.places.widest.get(external.ref.storage)
            if external.literal:
                builder.add_constant(external.ref, external.tensor)
            elif place is not None:
                name, source, ref = place
                yield GivenInput(name, ref, source)
            else:
                yield GivenInput(external.info.name, external.ref, Captured(external.tensor))


def _input_guards(program: Program, storages: tuple[int, ...]) -> list[Guard]:
    guards: list[Guard] = [TensorGuard(i, spec) for i, spec in enumerate(program.inputs)]
    names = tuple(spec.name for spec in program.inputs)
    return [*guards, AliasGuard(storages, names)] if names else guards
