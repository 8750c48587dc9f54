"""A recorded step: whether it is the steady state, and the program that it becomes.

    recording = StepRecording(recorder, entry, exit)     entry, exit: the state around the run, see `step_state.py`
    recording.refusal()                                  why no call of this step can be captured, or None
    recording.not_steady(previous)                       why the next call must be recorded as well, or None
    recording.program(in_spec)                           the op stream, discharged
    previous = recording.summary                         compared with the next recording

Note [Steady state]
The recording of the first step is not kept: FSDP2 allocates where later steps resize, and the optimizer makes its
state. A recording is kept once everything on which it depends is present at later steps again:
- no storage made by the step outlives it (gradients and outputs apart), or the step read none of the storages that
  outlived the previous one;
- tensors found outside every module, optimizer and argument were found in the same places by the previous
  recording, and tensors that Python made from numbers held the same numbers;
- the step changed nothing that is guarded: numbers that Python keeps, module attributes, hyperparameters,
  containers. A replay changes none of them.

Three kinds of state may change, since a replay changes them in the same way: slots for gradients, FSDP2's state in
Python, and the modes of modules, training or evaluation (`FSDPEffects`). So a step may be one microbatch of several:
gradients left unreduced, parameters left unsharded, flags set for the next call.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize._compat.references import address
from functionalize.audit.signature import Signature
from functionalize.calls.late_numbers import check_not_needed
from functionalize.errors import UncapturableError
from functionalize.fsdp.objects import fsdp_keepalives
from functionalize.fsdp.python_state import FSDPStateGuard
from functionalize.fsdp.releases import why_not_here
from functionalize.ir.guards import Guard
from functionalize.ir.inputs import Call, Captured, chain_of
from functionalize.ir.ops import OpRecord, refs_in, storages_in
from functionalize.ir.outputs import Constant, MadeAnew, OutputRole, SameAs
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_inputs
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.op_kinds import kind_of
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import External
from functionalize.run.boxed import boxed
from functionalize.state.arguments import beside_elements, hidden
from functionalize.state.dropped_gradients import droppable
from functionalize.state.hyperparameters import liftable
from functionalize.state.moving_state import Moves
from functionalize.state.python_effects import check_leaves
from functionalize.state.python_state import Filled
from functionalize.state.sources import Gradient, may_have_grad
from functionalize.state.tensor_attributes import why_unreturnable
from functionalize.step.step_state import EntryState, ExitState, kept_objects, state_around
from functionalize.util.reading import is_a
from functionalize.util.structure import is_stateful, objects_inside
from functionalize.util.tensor_wrappers import address_of, plain_tensors
from functionalize.util.user_stack import line_of
from functionalize.walk.code_uses import lines_of_returns
from functionalize.walk.fact_text import HELD_TOO, KEPT_OBJECT
from functionalize.walk.live_places import NO_PLACES, LivePlaces, content, is_bundle
from functionalize.walk.parts import Held, Is
from functionalize.walk.roots import Roots

_NAMED = re.compile(r"`([^`]+)`(?: has (\w+) = )?")
_OF_TENSORS = ("assigns another tensor to", "gives `", "removes `")
_MOST_SEEN = 64
_MOST_REASONS = 3  # in a message


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    """The part of a recording with which the next one is compared, after the recording itself is released.

    identities: one value per tensor that no argument, module or optimizer holds, see `StepRecording`.
    held: the same of all tensors that variables held when the recording began, whether it read them or not.
    outliving: addresses of the storages that the step made and that were alive after it.
    pins: weak references to these storages, which keep their addresses from being reused. has_ops: see `differs`.
    moved: places in Python that this recording, or one before it, has moved. is_live: whether its numbers were live.
    seen: how this recording and those before it have moved places, see Note [What moves alike].
    changed: the name of what the step changed and a replay would not, if it has one. clock: the one that it read.
    filled: deques that the step fills, and that will be full at some call. facts: the guards on Python state and on
    modules on entry. changes_objects: whether it changed what Python holds, by assignments or by repeated calls.
    unowned_leaves: of the tensors that nothing known holds, those whose `.grad` the step may assign.
    """

    identities: list[Any]
    outliving: frozenset[int]
    pins: tuple[Any, ...]
    moved: LivePlaces = NO_PLACES
    is_live: bool = False
    seen: tuple[Moves, ...] = ()
    changed: tuple[str, ...] = ()
    clock: str | None = None
    has_ops: bool = True
    filled: tuple[Filled, ...] = ()
    facts: tuple[Guard, ...] = ()
    held: frozenset[Any] = frozenset()
    changes_objects: bool = False
    unowned_leaves: tuple[weakref.ref[Tensor], ...] = ()

    def differs(self, identities: list[Any]) -> bool:
        """Whether a later recording read tensors that were not there, or were others."""
        if any(_is_held(each) and each not in self.held for each in identities):
            return True
        before, now = (
            [each for each in found if not _is_held(each)]
            for found in (self.identities, identities)
        )
        if not self.has_ops:  # then only those that Python made were seen to be read
            before = [each for each in before if type(each[1]) is bytes or each in now]
        return now != before


class StepRecording:
    """One recorded step, not yet judged.

    outliving: the storages made by the step that are alive after it, gradients and outputs apart.
    unowned: the tensors that the step read and no argument, module or optimizer holds: reached through a variable,
    unreachable, or made by Python from numbers. Of a run whose ops were not recorded: all that variables hold.
    identities: one value per unowned tensor, equal in two recordings if both read the same tensor.
    previous: the summary of the recording before.
    """

    def __init__(
        self,
        recorder: Recorder,
        entry: EntryState,
        exit: ExitState,
        moves: Moves | None = None,
        moved: Mapping[Any, Held] = MappingProxyType({}),
        numbers: Mapping[Any, frozenset[Any]] = MappingProxyType({}),
        fresh: Container[int] = (),
    ) -> None:
        """moved, numbers: the places that the step has moved, and the numbers in these, see `LivePlaces`.

        fresh: the ids of objects that the step leaves, and that can be changed and nothing else holds."""
        self.recorder, self.entry, self.exit = recorder, entry, exit
        self.previous: RecordingSummary | None = None
        self._moves, self._moved, self._numbers, self._fresh = moves, moved, numbers, fresh
        modules = list(entry.roots.modules.values())
        allowed = [*exit.leaves, *fsdp_keepalives(modules)]
        known = {recorder.storages.ref(t).storage for leaf in allowed for t in plain_tensors(leaf)}
        known |= {e.ref.storage for e in recorder.storages.externals}
        self.outliving = [i for i in recorder.storages.infos if i.serial not in known and i.alive]
        unknown = {i.address for i in self.outliving}
        if unknown and unknown.difference(map(address_of, entry.roots.made_once())):
            gc.collect(1)  # some may be garbage in cycles, which a capture does not collect
            self.outliving = [i for i in self.outliving if i.alive]
        self.unowned = [
            e for e in recorder.storages.externals if self._is_unowned(e) and e.ref.geometry.numel
        ]
        if recorder.started and any(not self._is_unreachable(e) for e in self.unowned):
            # The search through variables also finds tensors that the step does not use.
            self.unowned = [e for e in self.unowned if e.ref.storage in self._used]
        self.identities = [self._identity(e) for e in self.unowned]

    @functools.cached_property
    def _used(self) -> set[int]:
        """The storages of all arguments of ops."""
        return storages_in(self.recorder.records)

    def _is_unreachable(self, external: External) -> bool:
        return external.ref.storage not in self.entry.places.widest

    def _is_unowned(self, external: External) -> bool:
        """Whether no argument, module or optimizer holds a tensor, nor a place that the step moves."""
        place = self.entry.places.widest.get(external.ref.storage)
        return place is None or type(place[1]) is Held

    def _identity(self, external: External) -> Any:
        """A value that is equal in the next recording if the step found the same tensor."""
        if external.literal:
            contents = external.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return external.ref.geometry, bytes(contents.tolist())
        if self._is_unreachable(external):
            return external.ref.geometry, external.info.address
        _, source, ref = self.entry.places.widest[external.ref.storage]
        assert isinstance(source, Held)
        return ref.geometry, source.place

    @property
    def summary(self) -> RecordingSummary:
        """The part with which the next recording is compared."""
        pins = (*(e.info for e in self.unowned), *self.outliving)
        lists, previous = self.entry.moving.live.lists, self.previous
        numbers = self.entry.moving.live.numbers
        numbers = {place: each for place, each in numbers.items() if place in self._moved}
        numbers |= self._numbers
        places = LivePlaces(self._moved, lists, numbers) | self.exit.moved
        seen = (self._moves,) if self._moves is not None else ()
        if previous is not None:
            if previous.is_live:  # the first recording may have filled caches
                places = previous.moved | places
            seen = (*seen, *(s for s in previous.seen if s != self._moves))
        return RecordingSummary(
            self.identities,
            frozenset(i.address for i in self.outliving),
            pins,
            places,
            self.recorder.live,
            seen[:_MOST_SEEN],
            _names_in(self.exit.changed)[:1],
            self.recorder.checks.own_clock,
            self.recorder.started,
            tuple(self.exit.filled),
            (self.entry.python_state, self.entry.modules),
            self._held,
            bool(places or self.exit.python_effects),
            tuple(
                weakref.ref(each.tensor)
                for each in self.unowned
                if self._is_unreachable(each) and not each.literal and may_have_grad(each.tensor)
            ),
        )

    @property
    def _held(self) -> frozenset[Any]:
        """The identities of all tensors in variables when the recording began."""
        found = self.entry.places.widest.values()
        return frozenset((ref.geometry, s.place) for _, s, ref in found if isinstance(s, Held))

    # -- is it the steady state? -----------------------------------------------------------------

    def refusal(self) -> str | None:
        """Why the step cannot be captured, whatever later calls do; None if it can."""
        fn = self.entry.python_state.fn
        reasons = [
            beside_elements(self.entry.roots.arguments, self.entry.leaves),
            *refusals(self.recorder, self.exit.leaves, self.entry.roots, fn),
            *self._unreturnable(),
            self.recorder.checks.unknown_arguments() or self._clock(),
            self._unknown_target(),
        ]
        found = list(filter(None, dict.fromkeys(reasons)))
        more = len(found) - _MOST_REASONS
        text = "; ".join(found[:_MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
        return text or self.entry.python_state.refusal

    def _unreturnable(self) -> Iterator[str]:
        """Why a replay could not return the tensors that the step has made and returns."""
        results = self.exit.leaves[: len(self.exit.has_grad_fn)]
        found = {id(t): why for t in results if is_a(t, Tensor) and (why := why_unreturnable(t))}
        if found:
            kept = kept_objects(self.recorder, self.entry, self.exit)
            there_before = {*kept, *map(id, self.entry.leaves)}
            yield from (why for at, why in found.items() if at not in there_before)

    def _unknown_target(self) -> str | None:
        """Why a repeated call would not do what it does in eager, or None."""
        if not self.recorder.calls.targets:
            return None
        facts = self.entry.python_state.state.facts
        known = {id(fact.value) for fact in facts if type(fact) is Is}
        known |= {id(module) for _, module in self.entry.roots.walk()}
        return self.recorder.calls.refusal(known)

    def _clock(self) -> str | None:
        """What the step reads that changes by itself, in the recording before and in this (if that is seen)."""
        checks, before = self.recorder.checks, self.previous and self.previous.clock
        if not before or (checks.is_watched and checks.own_clock is None):
            return None
        return f"reads {before}, which changes by itself and which a replay would not read: do so outside the step"

    def not_steady(self, previous: RecordingSummary | None) -> str | None:
        """Why this is not the steady state yet, or None. See Note [Steady state]."""
        if self.exit.changed is not None:
            return self.exit.changed
        seen, moves = previous.seen if previous is not None else (), self._moves
        if moves is not None and not any(map(moves.is_as, seen)):
            return f"{moves.shape[0]}, as no recording before did: recorded once more, to see that it does it alike"
        if (recorder := self.recorder).checks.once:
            return f"{recorder.checks.once[0]}, in a cached function: at one call only"
        if recorder.checks.own_clock is not None and (previous is None or previous.clock is None):
            return f"reads {recorder.checks.own_clock}: recorded once more, to see whether it does so again"
        if recorder.checks.repeated and recorder.checks.is_watched is None:
            return f"{recorder.checks.repeated[0]}: recorded once more, to see whether it reads a clock"
        if awaits_live_numbers(recorder, self.entry):
            return "reads numbers that may change: recorded once more, with these live"
        if recorder.steps_optimizers and not self.entry.python_state.knows_hooks:
            return "calls hooks on all optimizers: recorded once more, to see what they read"
        if self.unowned and (previous is None or previous.differs(self.identities)):
            first = self.unowned[0]
            if first.literal and (text := self._of_array(first)) is not None:
                return text
            where = self._where(lambda r: any(x == first.ref for x in refs_in(r.args)))
            kind = "Python made from numbers" if first.literal else "no module or optimizer holds"
            found = "" if self._is_unreachable(first) else f"\n  found as `{first.info.name}`"
            return (
                f"reads a tensor ({first.ref.geometry}) that {kind}, and which may be another one at "
                f"every step: pass it as an argument{found}\n  first used by {where}"
            )
        if not self.outliving:
            return None
        # The graph of a result that is not detached keeps what a backward reads, as does that of a captured forward,
        # and autocast around the step keeps casts of parameters. Else something holds them that no walk has found, and
        # a replay would leave those of the recording there.
        is_explained = (
            any(self.exit.has_grad_fn)
            or self.entry.python_state.state.hooks_run_outside
            or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        )
        if previous is None or not previous.outliving or not is_explained:
            where = self._where(lambda r: self.outliving[0].serial in r.meta.get("born", ()))
            return (
                f"makes {len(self.outliving)} storages that outlive it: return these tensors, or keep them in "
                f"attributes\n  the first made by {where}"
            )
        outside = (e for e in recorder.storages.externals if e.ref.storage in self._used)
        read = next((e for e in outside if e.info.address in previous.outliving), None)
        if read is None:
            return None
        where = self._where(lambda r: any(x == read.ref for x in refs_in(r.args)))
        return (
            "reads what the step before had made and kept: keep it in an attribute, or pass it as an argument"
            f"\n  first used by {where}"
        )

    def _of_array(self, literal: External) -> str | None:
        """That Python has made a tensor of an array among the arguments, or perhaps so; None: there is none."""
        arrays = self.recorder.other_arrays
        found = arrays.known.get(literal.ref.storage) if arrays is not None else None
        if found is None:
            return None
        names, is_known, traceback = found
        made = f"makes a tensor ({literal.ref.geometry}) of"
        before = f"make the tensor before the step (`torch.as_tensor({names[0]})`"
        if not is_known:
            return (
                f"{made} numbers that may be others at every step, {line_of(traceback)}: {before}, if the numbers are "
                "of that array), and pass it as an argument"
            )
        return (
            f"{made} the array `{names[0]}`, an argument, {line_of(traceback)}, where a replay would not read the "
            f"array again: {before}), and pass it in place of the array"
        )

    def changed_again(self) -> str | None:
        """The change that a replay would not repeat, if the recording before has changed the same; with its lines."""
        changed, previous, moves = self.exit.changed, self.previous, self._moves
        if changed is None and moves is not None and previous is not None:
            seen = previous.seen
            if any(map(moves.differs_in_constants, seen)) and not any(map(moves.is_as, seen)):
                whats = ", ".join(dict.fromkeys(e.what for e in self.exit.python_effects))
                return (
                    f"{whats}: with a number of its own at every call that it reads from no tensor and no guarded "
                    "state (a clock?), which a replay cannot know: pass the number as an argument"
                    f"{self._origin(whats)}"
                )
        found, hyper = _names_in(changed)[:1], self.recorder.calls.hyperparameters
        if changed is None or previous is None or not found or found != previous.changed:
            return None
        if hyper is not None and hyper.wanted:  # these are live in the next recording
            return None
        if any(each.name == found[0] for each in self.exit.filled):  # it will be full
            return None
        known = self.entry.moving.live.values.keys()
        new = [place for key, place in self.exit.moved.values.items() if key not in known]
        is_bundle_there = KEPT_OBJECT in changed and any(is_bundle(content(p)) for p in new)
        if new and (HELD_TOO in changed or is_bundle_there):  # these are live there
            return None
        return self._as_written(changed) + self._origin(changed)

    def unsettled(self, reason: str) -> str:
        """The reason why a recording is not kept, with the lines of a change."""
        is_change = self.exit.changed is not None
        return self._as_written(reason) + self._origin(reason) if is_change else reason

    def _as_written(self, change: str) -> str:
        """A change of a tensor with its place as code writes it, in place of the name of an input."""
        roots, found = self.entry.roots, _NAMED.search(change)
        if found is None or not change.startswith(_OF_TENSORS):
            return change
        places = [place for name, place, _ in roots.tensors if name == found.group(1)]
        text = roots.text_at(places[0], found.group(1)) if len(places) == 1 else found.group(1)
        return change.replace(f"`{found.group(1)}`", f"`{text}`", 1)

    def _origin(self, change: str) -> str:
        """The lines that make a change, after the text about it."""
        found = _NAMED.search(change)
        if found is None:
            return ""
        name = ".".join(filter(None, found.group(1, 2)))  # `model` has n = 2: `model.n`
        return self.entry.python_state.origin(name, change)

    def _where(self, wanted: Callable[[OpRecord], bool]) -> str:
        for record in self.recorder.records:
            if wanted(record):
                return f"{record.target} {line_of(record.traceback)}"
        return "an unknown op"

    # -- its program -----------------------------------------------------------------------------

    def program(self, in_spec: pytree.TreeSpec) -> Program:
        """Discharge the recording."""
        builder = Builder(self.recorder)
        builder.add_inputs(list(self._inputs(builder)))
        builder.early = self.recorder.early_records()
        builder.discharge()
        roles = builder.roles(
            self.exit.leaves,
            self.entry.leaves,
            places=kept_objects(self.recorder, self.entry, self.exit),
        )
        check_leaves(
            self.exit.python_effects,
            self.exit.values,
            self.exit.leaves,
            roles,
            self._was_there,
            self._origin,
        )
        outputs = self._copying(roles)
        epilogue = builder.epilogue()
        early = builder.early_guards(boxed)
        program = builder.program(outputs, epilogue, (), in_spec, self.exit.spec, boxed)
        kept = drop_unused_inputs(program)
        check_not_needed([spec.source for spec in program.inputs], program.facts)
        storages = tuple(builder.storage_of_input[i] for i in kept)
        program.inputs = self.entry.with_versions(program.inputs, program.epilogue, storages)
        goes_backward = any(record.autograd_node is not None for record in self.recorder.records)
        fsdp = FSDPStateGuard(self.entry.fsdp, goes_backward)
        program.facts = (
            fsdp,
            self.entry.slot_guard,
            *self.entry.facts,
            *self.entry.moving.facts,
            self.entry.observed.guard,
            *self.recorder.calls.facts,
            *program.facts,
        )
        program.guards = (
            *self.entry.guards_on_tensors(program.inputs, storages),
            *self.entry.guards_on_metadata(storages),
            *early,
        )
        self.entry.observed.forget_slots()
        return program

    def dropped(self, program: Program) -> list[Gradient]:
        """The slots that a replay of `program` empties first, see `state/dropped_gradients.py`."""
        entry, records = self.entry, self.recorder.records
        if not entry.deaths:
            return []
        places = (place for s in self._used for place in entry.places.shared.get(s, ()))
        read = {id(source) for place in places for source in chain_of(place.source)}
        latest = 0
        if not program.may_run_again(Call((), [])):
            early = self.recorder.early_records()  # checked before the graph runs
            is_read = [kind_of(r.target).is_read and id(r) not in early for r in records]
            latest = is_read.index(True) if True in is_read else len(records)
        return list(droppable([slot for _, slot in entry.slots], entry.deaths, read, latest))

    def _was_there(self, leaf: Tensor) -> bool:
        """Whether a tensor object was in some place on entry."""
        shared, ref = self.entry.places.shared, self.recorder.storages.ref
        return any(
            place.tensor == address(inner)
            for inner in plain_tensors(leaf)
            for place in shared.get(ref(inner).storage, ())
        )

    def signature(self) -> Callable[[], Signature]:
        """What makes that with which a later run is compared."""
        return Signature.later(self.recorder, state_around(self.entry, self.exit))

    def _copying(self, outputs: list[OutputRole]) -> list[OutputRole]:
        """Let each replay return a copy of a mutable object that the step made."""
        known = {*self.entry.python_state.state.seen, *map(id, self.entry.leaves)}
        first: dict[int, int] = {}
        found: list[OutputRole] = []
        for at, role in enumerate(outputs):
            value = role.value if isinstance(role, Constant) else None
            if id(value) not in self._fresh and not _is_changeable(value, known):
                found.append(role)
            elif id(value) in first:
                found.append(SameAs(first[id(value)]))
            else:
                first[id(value)] = at
                found.append(self._made_anew(value, known))
        return found

    def _made_anew(self, value: Any, known: Container[int]) -> Constant:
        """The role of an object of which each replay returns a copy, with the same objects of others in it."""
        kept = [each for each in objects_inside(value) if is_stateful(each) or id(each) in known]
        try:
            copied = copy.deepcopy(value, {id(each): each for each in kept})
        except Exception as error:
            raise UncapturableError(
                f"the step leaves an object of type {type(value).__name__}, of which no replay can make another one "
                f"({type(error).__name__}: {error}): return numbers, tensors, or dicts and dataclasses of these"
            ) from None
        return Constant(MadeAnew(copied, kept) if kept else copied, made=True)

    def _inputs(
        self, builder: Builder, externals: Sequence[External] | None = None
    ) -> Iterator[TensorInput]:
        """One input per storage that the step did not make. externals: only these; None: all."""
        for external in self.recorder.storages.externals if externals is None else externals:
            place = self.entry.places.widest.get(external.ref.storage)
            if external.literal:
                builder.add_constant(external.ref, external.tensor)
            elif place is not None:
                name, source, ref = place
                yield TensorInput(name, ref, source)
            else:
                yield TensorInput(external.info.name, external.ref, Captured(external.tensor))


def refusals(
    recorder: Recorder,
    leaves: Sequence[Any],
    roots: Roots,
    fn: Callable[..., Any] | None = None,
) -> list[str]:
    """Why no program repeats what was recorded. leaves: of the result of `fn`, if it has one."""
    checks = recorder.checks
    checks.check_generators(lambda: "after its last random op")
    reasons = [
        *checks.unrepeatable,
        *checks.unknown_sizes(recorder),
        checks.unwritten(recorder.records),
        inside + returned_at(fn) if (inside := hidden(leaves)) else None,
        why_not_here(list(roots.modules.values())),
    ]
    return [text for text in reasons if text]


def returned_at(fn: Callable[..., Any] | None) -> str:
    """The lines at which a function returns, for a message."""
    code = getattr(getattr(fn, "forward", fn), "__code__", None)
    lines = lines_of_returns(code) if isinstance(code, types.CodeType) else []
    return "".join(f"\n  returned at {line}" for line in lines[:_MOST_REASONS])


def awaits_live_numbers(recorder: Recorder, entry: EntryState) -> bool:
    """Whether a recording is not kept, since the next one has numbers live that are constants in this one.

    Known before the step runs if it has an optimizer.
    """
    wants = recorder.scalars or recorder.calls.assigned or liftable(entry.roots.optimizers)
    return not recorder.live and bool(wants)


def _is_held(identity: Any) -> bool:
    """Whether an identity is that of a tensor in a variable, by its place."""
    return type(identity[1]) is tuple


def _is_changeable(value: Any, known: Container[int]) -> bool:
    kind = type(value)
    array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"
    is_mutable = array or kind in (set, bytearray, types.SimpleNamespace)
    return is_mutable and id(value) not in known


def _names_in(text: str | None) -> tuple[str, ...]:
    """The names in a text."""
    return tuple(each.group(1) for each in _NAMED.finditer(text or ""))
