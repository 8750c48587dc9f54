"""One run of a step, recorded: what held before and after it, whether it is the steady state, its program.

    entry = Entry.now(fn, leaves, recorder)       places, guards, gradients
    with recorder: result = fn(...)
    taken = Recording(recorder, entry, Exit.now(entry, result))
    taken.refused(), taken.unsettled(before), taken.program(...)

Note [Steady state]
The first step is not the one to keep: FSDP2 allocates where later steps resize, the optimizer makes its
state. A recording is kept once it depends on nothing that later steps will not find again:
- no storage born in it outlives it (gradients and outputs apart), or it read none of those that outlived the
  recording before;
- tensors it found outside every module, optimizer and argument were found in the same places by the recording
  before, and tensors that Python made from numbers held the same numbers;
- nothing that is guarded was changed by the step itself: numbers that Python keeps, module attributes,
  hyperparameters, FSDP2's state. A replay changes none of them.
"""

from __future__ import annotations

import functools
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
from functionalize.core.ops import OpRecord, TensorRef, refs_in
from functionalize.core.program import Program
from functionalize.core.unused import drop_unused_inputs
from functionalize.core.where import line_of
from functionalize.frontend.build import Builder, GivenInput, inner_tensors
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import FSDPStateGuard
from functionalize.frontend.guards import (
    GradientGuard,
    HyperparameterGuard,
    ModeGuard,
    ModuleGuard,
    ParameterGuard,
    PlaceGuard,
)
from functionalize.frontend.known_storages import External
from functionalize.frontend.reach import Held, Roots, reachable
from functionalize.frontend.sources import candidates, module_tensors, parameters
from functionalize.run.boxed import boxed


@dataclass(slots=True)
class Entry:
    """What holds when the step begins. facts: guards on what the step itself must leave alone."""

    roots: Roots
    leaves: Sequence[Any]
    parameters: list[tuple[str, Source, Tensor]]
    gradients: list[weakref.ref[Tensor] | None]
    guards: list[Guard]
    facts: list[Guard]
    places: dict[int, tuple[str, Source, TensorRef]]
    kept: list[tuple[str, Source, Tensor, int | None]]

    @staticmethod
    def now(fn: Callable[..., Any], leaves: Sequence[Any], recorder: Recorder) -> Entry:
        """Look at everything `fn` can reach; each storage is known by the widest tensor on it."""
        roots = reachable(fn, leaves)
        places: dict[int, tuple[str, Source, TensorRef]] = {}
        for name, source, tensor in candidates(roots, leaves):
            ref = recorder.bring_in(tensor, name)
            known = places.get(ref.storage)
            if known is None or ref.geometry.end > known[2].geometry.end:
                places[ref.storage] = (name, source, ref)
        found = list(parameters(roots, leaves))
        constants = [
            ConstantGuard(i, frozen_constant(leaf))
            for i, leaf in enumerate(leaves)
            if not isinstance(leaf, Tensor)
        ]
        facts: list[Guard] = [ModeGuard.now(), ModuleGuard.of(roots)]
        facts += [HyperparameterGuard.of(n, o) for n, o in roots.optimizers.items()]
        facts += [FSDPStateGuard.of(list(roots.modules.values())), PlaceGuard.of(roots), *constants]
        given: list[tuple[str, Source, Tensor]] = [
            (f"args_{i}", Argument(i), leaf)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        ]
        guards = [*facts, ParameterGuard.of([*found, *given]), GradientGuard.of(found)]
        gradients = [None if p.grad is None else weakref.ref(p.grad) for _, _, p in found]
        held: list[tuple[str, Source, Tensor]] = [*module_tensors(roots), *roots.tensors]
        kept = [(name, source, value, _address(value)) for name, source, value in held]
        return Entry(roots, leaves, found, gradients, guards, facts, places, kept)

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
        return next((f"changes what it is guarded by: {f}" for f in failures if f), None)


def _address(tensor: Tensor) -> int | None:
    """Where a plain tensor's storage is."""
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage()._cdata if plain else None


@dataclass(slots=True)
class Exit:
    """What the step returned, the gradients it assigned (None: it took one away), what else it changed."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    assigned: list[Source]
    changed: str | None

    @staticmethod
    def now(entry: Entry, result: Any) -> Exit:
        """Compare every `.grad` with what it was."""
        assigned, gradients = [], []
        call = Call(entry.leaves, [])
        for (_, source, _), before in zip(entry.parameters, entry.gradients, strict=True):
            now = source.resolve(call).grad
            if now is not (before() if before is not None else None):
                assigned.append(source)
                gradients.append(now)
        leaves, spec = pytree.tree_flatten((result, gradients), is_leaf=lambda x: x is None)
        return Exit(leaves, spec, assigned, entry.changed())


class Recording:
    """One recorded step, before it is known whether it is kept."""

    def __init__(self, recorder: Recorder, entry: Entry, exit: Exit) -> None:
        self.recorder, self.entry, self.exit = recorder, entry, exit
        self.assigned = exit.assigned
        returned = {recorder.ref(t).storage for leaf in exit.leaves for t in inner_tensors(leaf)}
        known = returned | {e.ref.storage for e in recorder.externals}
        self.left = [i for i in recorder.infos if i.serial not in known and i.alive]

        self.found = [
            e for e in recorder.externals if e.ref.geometry.numel and self._is_elsewhere(e)
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
        return external.ref.storage not in self.entry.places

    def _is_elsewhere(self, external: External) -> bool:
        """Whether a tensor comes from no argument, module or optimizer."""
        return self._is_unknown(external) or isinstance(
            self.entry.places[external.ref.storage][1], Held
        )

    def _identity(self, external: External) -> Any:
        """What says whether the next step found the same tensor."""
        if external.literal:
            held = external.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return external.ref.geometry, bytes(held.tolist())
        if self._is_unknown(external):
            return external.ref.geometry, external.info.address
        _, source, ref = self.entry.places[external.ref.storage]
        assert isinstance(source, Held)
        return ref.geometry, source.place

    def refused(self) -> str | None:
        """What no further call would mend."""
        self.recorder.check_generators("after its last random op")
        return "; ".join(self.recorder.unfaithful) or None

    def unsettled(self, before: Recording | None) -> str | None:
        """Why this is not the steady state yet, or None. See Note [Steady state]."""
        if self.exit.changed is not None:
            return self.exit.changed
        if self.found and (before is None or self.identities != before.identities):
            first = self.found[0]
            where = self._where(lambda r: any(x == first.ref for x in refs_in(r.args)))
            kind = "Python made from numbers" if first.literal else "no module or optimizer holds"
            return (
                f"reads a tensor ({first.ref.geometry}) that {kind}, and which may be another one at "
                f"every step: pass it as an argument\n  first used by {where}"
            )
        if self.left and before is not None and before.left:
            kept = {i.address for i in before.left}
            outside = (e for e in self.recorder.externals if e.ref.storage in self._used)
            read = [e for e in outside if e.info.address in kept]
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
        builder.discharge()
        outputs = builder.roles(self.exit.leaves, self.entry.leaves)
        epilogue = builder.epilogue()
        program = builder.program(outputs, epilogue, (), in_spec, self.exit.spec, boxed)
        kept = drop_unused_inputs(program)
        storages = tuple(builder.storage_of_input[i] for i in kept)
        program.guards = (*_input_guards(program, storages), *self.entry.guards)
        return program

    def _inputs(self, builder: Builder) -> Iterator[GivenInput]:
        """One input per storage that came from outside."""
        for external in self.recorder.externals:
            place = self.entry.places.get(external.ref.storage)
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
