"""`capture`: a whole training step, run once for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

Note [Steady state]
The first step is not the one to keep: FSDP2 allocates where later steps resize, the optimizer makes its
state. A recording is kept once it depends on nothing that later steps will not find again:
- no storage born in it outlives it (gradients and outputs apart), or it read none of those that outlived the
  recording before;
- tensors it found outside every module, optimizer and argument were found in the same places by the recording
  before, and tensors that Python made from numbers held the same numbers.

Invariants: a step is never lost and never run twice. A guard that fails means that the call runs eagerly,
recording; nothing was changed before. An exception passes through as eager raised it, and no program is kept.
Refusals: state that is made anew at every step and read by the next one (`UncapturableError`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functionalize._compat import pytree
from functionalize.core.guards import AliasGuard, ConstantGuard, Guard, TensorGuard
from functionalize.core.inputs import Call, Captured, Source
from functionalize.core.ops import OpRecord, TensorRef, refs_in
from functionalize.core.program import Program
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.core.unused import drop_unused_inputs
from functionalize.core.where import line_of
from functionalize.errors import GuardError, UncapturableError
from functionalize.frontend.build import Builder, GivenInput, inner_tensors
from functionalize.frontend.collector import only_young_collections
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import FSDPStateGuard
from functionalize.frontend.guards import (
    GradientGuard,
    HyperparameterGuard,
    ModeGuard,
    TrainingGuard,
)
from functionalize.frontend.known_storages import External
from functionalize.frontend.sources import (
    Held,
    ModuleTensor,
    Roots,
    candidates,
    module_tensors,
    reachable,
)
from functionalize.run.boxed import boxed

log = logging.getLogger("functionalize")
_MAX_WARMUPS = 5
_FAILURES_KEPT = 100


@dataclass(slots=True)
class Stats:
    """What happened so far, and what the current program was made from.

    calls = warmups + captures + replays (a warm-up ran eagerly and was not kept). ops, resizes: recorded.
    guard_failures: the last hundred. nodes_recorded, nodes: in the graph before and after the passes.
    """

    warmups: int = 0
    captures: int = 0
    replays: int = 0
    guard_failures: list[str] = field(default_factory=list)
    ops: int = 0
    resizes: int = 0
    nodes_recorded: int = 0
    nodes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    inputs: int = 0
    guards: int = 0


def capture(
    train_step: Callable[..., Any] | None = None, *, passes: Sequence[Any] | str = ()
) -> Any:
    """Record `train_step` (any callable; also a decorator) and replay it from then on.

    passes: a pipeline for the program: its text (`"elide_copies"`) or `Pass` objects, see `docs/passes.md`.
    Raises `UncapturableError` for a step that never settles; whatever the step itself raises passes through.
    """
    if train_step is None:
        return functools.partial(capture, passes=passes)
    return CapturedStep(train_step, passes)


class CapturedStep:
    """A training step that is recorded in its steady state and replayed after."""

    def __init__(self, train_step: Callable[..., Any], passes: Sequence[Any] | str) -> None:
        functools.update_wrapper(self, train_step)
        self.stats = Stats()
        self.program: Program | None = None
        self._fn, self._passes = train_step, passes
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._gradients: list[ModuleTensor] = []
        self._before: Recording | None = None
        self._attempts = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: a replay if every guard holds, else for real, recording."""
        leaves, in_spec = pytree.tree_flatten((args, kwargs))
        if self.program is not None:
            done, result = self._replay(self.program, leaves, in_spec)
            if done:
                return result
        with only_young_collections():
            return self._record(args, kwargs, leaves, in_spec)

    def _replay(
        self, program: Program, leaves: Sequence[Any], in_spec: pytree.TreeSpec
    ) -> tuple[bool, Any]:
        call: Call | str = "the structure of the arguments changed"
        if in_spec == program.in_spec:
            call = program.resolve(leaves)
        if isinstance(call, Call):
            try:
                result, gradients = program.replay(call)
            except GuardError as error:
                call = str(error)
            else:
                for source, gradient in zip(self._gradients, gradients, strict=True):
                    source.resolve(call).grad = gradient
                self.stats.replays += 1
                return True, result
        log.info("recapturing %s: %s", self._name, call)
        self.stats.guard_failures.append(call)
        del self.stats.guard_failures[:-_FAILURES_KEPT]
        self.program, self._before, self._attempts = None, None, 0
        return False, None

    def _record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        in_spec: pytree.TreeSpec,
    ) -> Any:
        recorder = Recorder(ignore_fake=True)
        entry = Entry.now(self._fn, leaves, recorder)
        with recorder:
            result = self._fn(*args, **kwargs)
        with torch.no_grad(), recorder.quiet():
            taken = Recording(recorder, entry, Exit.now(entry, result))
            unsettled = taken.unsettled(self._before)
            if unsettled is None:
                self.program, self._gradients = taken.program(in_spec, self.stats), taken.assigned
                self._run_passes()
                self._before = None
                self.stats.captures += 1
                return result
        self._before = taken
        self._attempts += 1
        self.stats.warmups += 1
        log.info("warming up %s: %s", self._name, unsettled)
        if self._attempts >= _MAX_WARMUPS:
            raise UncapturableError(
                f"the step did not settle in {self._attempts} calls: {unsettled}"
            )
        return result

    def _run_passes(self) -> None:
        assert self.program is not None
        self.stats.nodes_recorded = self.program.nodes()
        if self._passes:
            import passes  # the arrow of imports points from passes to here

            self.program = passes.run(self.program, self._passes)
        self.stats.nodes = self.program.nodes()


# -- before and after the step -----------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """What holds when the step begins."""

    roots: Roots
    leaves: Sequence[Any]
    parameters: list[tuple[str, ModuleTensor, Tensor]]
    gradients: list[weakref.ref[Tensor] | None]
    guards: list[Guard]
    places: dict[int, tuple[str, Source, TensorRef]]

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
        parameters = [p for p in module_tensors(roots) if p[1].table == "_parameters"]
        guards: list[Guard] = [
            ConstantGuard(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)
        ]
        guards += [ModeGuard.now(), TrainingGuard.of(roots)]
        guards += [HyperparameterGuard.of(n, o) for n, o in roots.optimizers.items()]
        guards += [GradientGuard.of(parameters), FSDPStateGuard.of(list(roots.modules.values()))]
        gradients = [None if p.grad is None else weakref.ref(p.grad) for _, _, p in parameters]
        return Entry(roots, leaves, parameters, gradients, guards, places)


@dataclass(slots=True)
class Exit:
    """What the step returned, and the gradients it assigned (None: it took the gradient away)."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    assigned: list[ModuleTensor]

    @staticmethod
    def now(entry: Entry, result: Any) -> Exit:
        """Compare every `.grad` with what it was."""
        assigned, gradients = [], []
        for (_, source, _), before in zip(entry.parameters, entry.gradients, strict=True):
            now = source.resolve(Call((), [])).grad
            if now is not (before() if before is not None else None):
                assigned.append(source)
                gradients.append(now)
        leaves, spec = pytree.tree_flatten((result, gradients), is_leaf=lambda x: x is None)
        return Exit(leaves, spec, assigned)


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

    def unsettled(self, before: Recording | None) -> str | None:
        """Why this is not the steady state yet, or None. See Note [Steady state]."""
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

    def program(self, in_spec: pytree.TreeSpec, stats: Stats) -> Program:
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
        stats.ops = len(self.recorder.records)
        stats.resizes = sum(r.target is RESIZE_STORAGE for r in self.recorder.records)
        stats.collectives = collectives(program)
        stats.inputs, stats.guards = len(program.inputs), len(program.guards)
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


def collectives(program: Program) -> Counter[str]:
    """How many collectives of each kind the graph issues."""
    return Counter(
        str(n.target).split(".")[1]
        for n in program.graph.nodes
        if getattr(n.target, "namespace", "") == "_c10d_functional"
        and "wait_tensor" not in str(n.target)
    )
