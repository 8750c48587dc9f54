"""The numbers of any setting, composed of short plans: pieces that repeat are planned once.

    numbers.first(place)                     the short model on a mesh, offloaded or not
    numbers.of(setting, policy)              of the whole model, composed of two short models
    numbers.choices(setting)                 what a layer of each run may save

1. For each mesh, two short models (`variants.py`) at the smallest and at the largest batch: the numbers of a layer and
   of all else, between which other batches lie. The same with other reshardings, with accumulation, and recomputed.
2. For each batch, one layer op by op (`pieces.py`), and its best choices (`choices.py`).

A model that cannot be shortened (its forward needs every layer, or few layers are equal) is planned whole.
Invariant: every figure here is of a plan, or linear in figures of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functionalize.cost.machines.machine import Machine
from functionalize.errors import TuneError
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.fake_world.world import world as fake_world
from functionalize.planner.report.figures import MemoryFigures
from functionalize.planner.sweep.figures import Figures
from functionalize.planner.sweep.plan import Planner
from functionalize.planner.sweep.points import target_on
from functionalize.planner.sweep.training import Items
from functionalize.planner.timeline.timeline import EAGER
from functionalize.planner.tuning.choices import LayerChoice, frontier
from functionalize.planner.tuning.compose import StepNumbers
from functionalize.planner.tuning.pieces import LayerPiece, recording
from functionalize.planner.tuning.policy import LayerPolicy
from functionalize.planner.tuning.space import MeshKey, Setting, Space
from functionalize.planner.tuning.variants import (
    Run,
    Variant,
    layers_of,
    runs,
    shortened,
)

_EXACT = 1e-3  # of a device's bytes, to which `unusable` is found
_KEEP = 2  # layers of each run in the short model; the longer one has one more
SAVED, RECOMPUTED = LayerPolicy(None, True), LayerPolicy((), True)


@dataclass(eq=False)
class ShortPlans:
    """The short plans of one search.

    fixed: keys of every point. planned: how many plans were made.
    constants: bytes of the device outside of torch's allocator. spare: bytes that the allocator cannot use.
    whole: why the model is not shortened; None: it is.
    """

    planner: Planner
    fixed: Mapping[str, Any]
    space: Space
    machine: Machine
    world: int
    say: Callable[[str], None]
    planned: int = 0
    constants: float = 0.0
    spare: float = 0.0
    whole: str | None = None
    runs: list[Run] = field(default_factory=list)
    _seen: bool = False
    _short: dict[Any, tuple[StepNumbers, Items | None]] = field(default_factory=dict)
    _choices: dict[Any, list[list[LayerChoice]]] = field(default_factory=dict)

    @property
    def counts(self) -> list[int]:
        """The layers of each run."""
        return [len(run.names) for run in self.runs]

    @property
    def policy(self) -> LayerPolicy | None:
        """The policy of a model that recomputes nothing."""
        return SAVED if self.runs else None

    @property
    def _keep(self) -> int | None:
        return _KEEP if self.whole is None else None

    def first(self, place: Setting) -> Items | None:
        """Plan the short model of a place at batch 1, or the whole one: what a rank trains on."""
        setting = replace(place, batch=1 if self.space.has_batch else None)
        if not self._seen:
            self._seen = True
            self._see(setting, None)
            if all(len(r.names) <= _KEEP + 1 or not r.removable for r in self.runs):
                few = f"no more than {_KEEP + 1} layers that follow each other are equal"
                self.whole = few if self.runs else "no layers are wrapped"
        try:
            return self._planned(setting, None, None)[1]
        except Exception as error:
            if self.whole is not None or self._short:
                raise
            self.whole = f"its forward needs every layer ({type(error).__name__})"
            try:
                return self._planned(setting, None, None)[1]
            except Exception:  # on this mesh alone, as far as is known
                self.whole = None
                raise

    # -- numbers -----------------------------------------------------------------------------------

    def _planned(
        self, setting: Setting, policy: LayerPolicy | None, more: int | None
    ) -> tuple[StepNumbers, Items | None]:
        """The numbers of a short model. more: the run that has one layer more."""
        key = setting, policy, more
        if key not in self._short:
            self.say(f"planning a short model: {setting.text()}")
            self.planned += 1
            variant = Variant(setting.mesh, self._keep, more, policy)
            plan = self.planner.at(self.point(setting, variant))
            if plan.figures is None:
                raise plan.cause or TuneError(
                    "the step cannot be captured, so that its time is not known: `functionalize plan` says why"
                )
            self.constants = plan.figures.memory.levels(EAGER).constants
            self.spare = max(self.spare, unusable(plan.figures.memory))
            # Only numbers are kept: many graphs would make every collection of garbage slow.
            self._short[key] = _numbers_of(plan.figures), plan.figures.items
        return self._short[key]

    def point(self, setting: Setting, variant: Variant) -> dict[str, Any]:
        own: dict[str, Any] = {"variant": variant}
        if setting.batch is not None:
            own["batch"] = setting.batch
        if setting.offload is not None:
            own["offload"] = setting.offload
        if self.space.accumulates:
            own["accumulate"] = setting.accumulate
        return {**self.fixed, **own}

    def of(self, setting: Setting, policy: LayerPolicy | None) -> StepNumbers:
        """The numbers of the whole model, all layers with a policy: composed of two short models."""
        short = replace(self._planned(setting, policy, None)[0], backward=0.0)
        if self._keep is None:
            return short
        found, exposed = short, 0.0
        for i, (run, kept) in enumerate(
            zip(self.runs, shortened(self.runs, self._keep, None), strict=True)
        ):
            if len(run.names) > kept:
                longer = self._planned(setting, policy, i)[0]
                layer = longer.plus(self._planned(setting, policy, None)[0], -1.0)
                found = found.plus(layer, len(run.names) - kept)
                exposed += len(run.names) * max(layer.backward, 0.0)
        return replace(found, backward=exposed)

    def _at_batch(
        self, setting: Setting, policy: LayerPolicy | None, ends: Sequence[Setting]
    ) -> StepNumbers:
        """The numbers of one microbatch, between those of the smallest and of the largest batch that are planned."""
        first, last = (replace(each, accumulate=1) for each in (ends[0], ends[-1]))
        low = self.of(first, policy)
        if first == last or setting.batch == first.batch:
            return low
        assert setting.batch is not None and first.batch is not None and last.batch is not None
        share = (setting.batch - first.batch) / (last.batch - first.batch)
        return low.between(self.of(last, policy), share)

    def base(self, setting: Setting, ends: Sequence[Setting]) -> tuple[StepNumbers, float]:
        """(the seconds if no layer is recomputed with the peak if all are, bytes beside the last layer's backward)."""
        built = self._at_batch(setting, self.policy, ends)
        if not self.runs:
            return built, 0.0
        choices = self.choices(setting)
        saved = sum(n * each[0].nbytes for n, each in zip(self.counts, choices, strict=True))
        # The peak may move into the layers once they are recomputed: known from the first mesh, the same on others.
        alike = [replace(each, mesh=self._like(setting.mesh), accumulate=1) for each in ends]
        here = replace(setting, mesh=alike[0].mesh, accumulate=1)
        least = self._at_batch(here, RECOMPUTED, alike)
        most = self._at_batch(here, SAVED, alike)
        beside = max(least.peak - (most.peak - saved), 0.0)
        return replace(built, peak=built.peak - saved), beside

    def _like(self, mesh: MeshKey | None) -> MeshKey | None:
        """The first mesh on which layers compute what they do on this one."""
        beside = _beside_data(mesh)
        return next(each for each in self.space.meshes if _beside_data(each) == beside)

    def prepare(self, ends: Sequence[Setting]) -> None:
        """Plan what the settings of a mesh need, in an order in which plans share models. ends: its settings."""
        if self.whole is not None:
            return
        once = [replace(each, accumulate=1) for each in (ends[0], ends[-1])]
        saved = (
            [*once, replace(once[0], accumulate=2)] if any(e.accumulate > 1 for e in ends) else once
        )
        wanted: list[tuple[LayerPolicy | None, list[Setting]]] = [(self.policy, saved)]
        for value in self.space.reshards_on(ends[0].mesh, self.world):
            if value is not True:
                wanted.append((replace(SAVED, reshard=value), once[:1]))
        if ends[0].mesh == self._like(ends[0].mesh):
            wanted.append((RECOMPUTED, once))
        for policy, settings in wanted:
            for more in (None, *range(len(self.runs))):
                for setting in settings:
                    self._planned(setting, policy, more)

    def reshards(self, setting: Setting, first: Setting) -> dict[bool | int, tuple[float, float]]:
        """The bytes and seconds of a layer's resharding beyond `True`."""
        found: dict[bool | int, tuple[float, float]] = {True: (0.0, 0.0)}
        layers = sum(self.counts)
        smallest = replace(first, accumulate=1)
        resharded = self.of(smallest, SAVED)
        for value in self.space.reshards_on(setting.mesh, self.world):
            if value is not True:
                other = self.of(smallest, replace(SAVED, reshard=value))
                delta = other.plus(resharded, -1.0)
                found[value] = max(delta.peak / layers, 0.0), delta.seconds / layers
        return found

    def choices(self, setting: Setting) -> list[list[LayerChoice]]:
        """The choices of a layer of each run."""
        key = setting.batch, _beside_data(setting.mesh)
        if key not in self._choices:
            self.say(f"one layer, op by op: {setting.text()}")
            pieces = self._see(replace(setting, accumulate=1), self._keep)
            found: dict[LayerPiece, list[LayerChoice]] = {}
            for piece in pieces:
                if piece not in found:
                    found[piece] = frontier(piece) if piece.selective else self._plain(setting)
            self._choices[key] = [found[piece] for piece in pieces]
        return self._choices[key]

    def _plain(self, setting: Setting) -> list[LayerChoice]:
        """All or nothing, for layers whose ops are not known one by one: what two plans differ by."""
        here = replace(setting, accumulate=1)
        layers = sum(self.counts)
        delta = self.of(here, SAVED).plus(self.of(here, RECOMPUTED), -1.0)
        return [
            LayerChoice(None, max(int(delta.peak / layers), 0), 0.0),
            LayerChoice((), 0, max(-delta.seconds / layers, 0.0)),
        ]

    def _see(self, setting: Setting, keep: int | None) -> list[LayerPiece]:
        """Build a model in a fake world, and run its step once, recording a layer of each run.

        The first time: only find the runs.
        """
        functions, point = self.planner.functions, self.point(setting, Variant(setting.mesh, keep))
        target = target_on(point.get("target", "cuda"), point.get("machine"))
        self.planner.close()
        with fake_world(self.world, rank=point.get("rank", 0), target=target):
            built = functions.built(point)
            if not self._short:
                self.runs = runs(built)
                return []
            layers = layers_of(built)
            chosen = {run.names[0]: layers[run.names[0]] for run in self.runs}
            _, args, kwargs = functions.call(built, point)
            with recording(chosen, self.machine) as pieces:
                functions.step(*args, **kwargs)
            del built, args, kwargs, layers, chosen, _
        return [pieces.get(run.names[0], LayerPiece((), 0, 0, False)) for run in self.runs]

    def accumulation(self, setting: Setting, first: Setting) -> tuple[float, float]:
        """(bytes that stay from one microbatch to the next, the seconds of a later one by those of the first)."""
        if setting.accumulate == 1:
            return 0.0, 1.0
        once, twice = (self.of(replace(first, accumulate=n), self.policy) for n in (1, 2))
        factor = (twice.seconds - once.seconds) / max(once.seconds - once.optimizer, 1e-12)
        return max(twice.peak - once.peak, 0.0), factor


def unusable(memory: MemoryFigures) -> float:
    """The bytes that eager's peak needs beyond the requested ones on the smallest device in which the step fits."""
    levels = memory.levels(EAGER)
    low, high = levels.requested + levels.constants - 1, levels.device
    while high - low > max(_EXACT * high, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if memory.fit(middle, EAGER).refused is None else (middle, high)
    return high - levels.requested - levels.constants


def _numbers_of(figures: Figures) -> StepNumbers:
    time = figures.time
    phases = {p.phase: p for p in time.phases}
    backward = sum(p.exposed for name, p in phases.items() if name not in (FORWARD, OPTIMIZER, ""))
    optimizer = phases[OPTIMIZER].seconds if OPTIMIZER in phases else 0.0
    return StepNumbers(
        figures.memory.levels(EAGER).requested,
        time.seconds,
        time.exposed,
        backward,
        optimizer,
        figures.memory.host_peak,
    )


def _beside_data(mesh: MeshKey | None) -> MeshKey:
    """The dimensions of a mesh on which the ops of a layer depend: all but those that replicate and shard."""
    return tuple((name, size) for name, size in mesh or () if name not in ("replicate", "shard"))
