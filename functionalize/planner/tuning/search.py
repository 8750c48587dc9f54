"""The search of `tune`: settings are composed of short plans, and what is chosen is planned as it stands.

    search.compose()        every setting: uniform policies, and the best ones for several budgets
    search.verify(3)        plan the best of each setting, until so many fit

For each setting an integer program picks the options of the layers (`compose.py`) from the numbers of short plans
(`short_plans.py`). The best is planned whole. If it does not fit, the budget of all candidates shrinks, and the next
best is planned.
Invariant: a candidate with a `plan` has that plan's figures; one without has composed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from functionalize.errors import TuneError
from functionalize.planner.lifetimes.step_memory import StepMemory
from functionalize.planner.sweep.figures import Figures
from functionalize.planner.sweep.plan import in_short
from functionalize.planner.sweep.summary import Plan
from functionalize.planner.sweep.training import Items
from functionalize.planner.timeline.timeline import EAGER
from functionalize.planner.tuning.compose import LayerAssignment, StepNumbers, options, solved
from functionalize.planner.tuning.policy import EagerPolicy, LayerPolicy
from functionalize.planner.tuning.short_plans import ShortPlans, unusable
from functionalize.planner.tuning.space import TENSOR_PARALLEL, Setting
from functionalize.planner.tuning.variants import Variant
from functionalize.util.text import human_bytes, human_seconds

_BUDGETS = tuple(1 - i / 20 for i in range(16))  # of what is left: the frontier
_GROWTH = 1.1  # of the margin, at least, if a plan does not fit
_REFUSED = 5  # plans that do not fit, until the search ends


class Composed(NamedTuple):
    """The figures of a candidate before it is planned: bytes and seconds, as in `Candidate`."""

    peak: float
    seconds: float
    exposed: float
    recompute: float


@dataclass(frozen=True, eq=False, repr=False)
class Candidate:
    """One configuration.

    assigned: the options of its layers. peak: requested bytes of eager. seconds: of a step. items: tokens or samples
    that a rank trains on in it, shared ones divided. exposed, recompute: seconds of it. lacks: bytes that it has too
    many. host: bytes in host memory. plan: it as it was planned; all figures are the plan's then. refused: why the plan
    does not fit, or failed.
    """

    setting: Setting
    policy: EagerPolicy
    assigned: LayerAssignment
    peak: float
    seconds: float
    items: float
    exposed: float
    recompute: float
    lacks: float
    composed: Composed
    host: float
    plan: Plan | None = None
    refused: str | None = None

    def __repr__(self) -> str:
        about = f"{human_bytes(self.peak)}, {human_seconds(self.seconds)} a step"
        known = "planned" if self.plan is not None else "composed"
        return f"<Candidate: {self.setting.text()}, {about}, {known}{'' if self.fits else ', too large'}>"

    @property
    def throughput(self) -> float:
        """Items per second and rank."""
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return not self.lacks and self.refused is None


@dataclass(eq=False)
class Stages:
    """How far a search is. A stage: to try one mesh, to compose its candidates, to plan one of them as it stands.

    tell: called with (stages done, stages, what is done now).
    """

    tell: Callable[[int, int, str], None]
    done: int = 0
    of: int = 1

    def say(self, text: str) -> None:
        """Tell what is done now."""
        self.tell(self.done, self.of, text)

    def next(self) -> None:
        """A stage is done; a stage more than there were to be moves the end."""
        self.done += 1
        self.of = max(self.of, self.done + 1)


@dataclass(eq=False)
class Search:
    """One search. limit: bytes of a device. pipelines: run on the program of the best.

    candidates: found so far. failed: place -> why it cannot be planned. margins: batch and offload -> bytes that
    the allocator cannot use, of plans that did not fit. programs: setting -> pipeline -> the plan of its best after it.
    largest: the batch at which doubling ended, though larger ones may fit.
    """

    short: ShortPlans
    limit: float
    pipelines: Sequence[str]
    stages: Stages
    candidates: list[Candidate] = field(default_factory=list)
    failed: dict[Setting, str] = field(default_factory=dict)
    items: Items | None = None
    margins: dict[tuple[int | None, bool | None], float] = field(default_factory=dict)
    planned: int = 0
    largest: int | None = None
    programs: dict[Setting, dict[str, Plan]] = field(default_factory=dict)
    _settings: list[Setting] = field(default_factory=list)

    # -- the settings ------------------------------------------------------------------------------

    def compose(self) -> None:
        """Find the settings, and the candidates of each."""
        places = self.short.space.places
        self.stages.of = 2 * len(places) + 1
        for place in places:
            try:
                self._settings += self._settings_at(place)
            except Exception as error:  # of the script, too, which may not take each mesh
                self.failed[place] = in_short(error)
                if len(self.failed) == len(places):  # the same for each, as a rule
                    raise
            self.stages.next()
        self._compose()

    def _settings_at(self, place: Setting) -> list[Setting]:
        items, space = self.short.first(place), self.short.space
        each, ranks = 1, self.short.world
        if items is not None:
            each, ranks = items.number, ranks // items.ranks
            self.items = items
            split = dict(place.mesh or ()).get(TENSOR_PARALLEL, 1)
            if items.ranks % split:
                raise TuneError(
                    f"`build` shards parameters over the dimension `{TENSOR_PARALLEL}` of its mesh, too, and splits no "
                    "op over it: give `fully_shard` the other dimensions, and `parallelize_module` this one"
                )
        found = space.settings(place, each, ranks)
        if space.batches is not None or space.tokens is not None:
            return found
        # Batches by doubling, until one does not fit even if every layer is recomputed.
        fitting: list[Setting] = []
        for setting in found:
            base, beside = self.short.base(setting, found[:2])
            if fitting and base.peak + beside > self._left(setting):
                break
            fitting.append(setting)
        if len(fitting) == len(found) and space.has_batch:
            self.largest = fitting[-1].batch
        return fitting

    # -- candidates --------------------------------------------------------------------------------

    def margin(self, setting: Setting) -> float:
        """The bytes that the allocator cannot use, as far as plans have shown."""
        return max(self.margins.get((setting.batch, setting.offload), 0.0), self.short.spare)

    def _left(self, setting: Setting) -> float:
        """Requested bytes that a candidate may have."""
        return self.limit - self.short.constants - self.margin(setting)

    def _compose(self) -> None:
        """All candidates, with the margin as it is now; those that were planned stay."""
        self.candidates = [each for each in self.candidates if each.plan is not None]
        by_place: dict[Setting, list[Setting]] = {}
        for setting in self._settings:
            by_place.setdefault(setting.place, []).append(setting)
        for ends in by_place.values():
            self.short.prepare(ends)
            for setting in ends:
                self._compose_at(setting, ends)
            self.stages.next()

    def _compose_at(self, setting: Setting, ends: Sequence[Setting]) -> None:
        base, beside = self.short.base(setting, ends)
        stays, later = self.short.accumulation(setting, ends[0])
        micro = base.seconds - base.optimizer
        base = replace(
            base,
            peak=base.peak + stays,
            seconds=base.seconds + (setting.accumulate - 1) * later * micro,
            exposed=base.exposed * setting.accumulate,
        )
        if not self.short.runs:
            self._add(setting, LayerAssignment((), 0.0), base, beside)
            return
        counts, choices = self.short.counts, self.short.choices(setting)
        reshards = self.short.reshards(setting, ends[0])
        # Seconds are those of a step: what is recomputed is so for each microbatch.
        # Recomputation hides communication that is exposed beside it, where there are streams.
        hidden = base.backward / sum(counts) if self.short.machine.streams else 0.0
        every = [options(each, reshards, hidden, setting.accumulate) for each in choices]
        for share in _BUDGETS:
            found = solved(every, counts, self._left(setting) * share - base.peak, beside)
            if found is not None:
                self._add(setting, found, base, beside)
        for at in (0, -1):  # all saved, all recomputed: as it is done by hand
            for reshard in reshards.items():
                chosen = [
                    options([each[at]], dict([reshard]), hidden, setting.accumulate)
                    for each in choices
                ]
                runs = [(own[0],) * count for own, count in zip(chosen, counts, strict=True)]
                self._add(setting, LayerAssignment(tuple(runs), 0.0), base, beside)

    def _add(
        self, setting: Setting, assigned: LayerAssignment, base: StepNumbers, beside: float
    ) -> None:
        names = [name for run in self.short.runs for name in run.names]
        layers = dict(zip(names, (o.policy for run in assigned.runs for o in run), strict=True))
        mesh = dict(setting.mesh) if setting.mesh else None
        policy = EagerPolicy(setting.batch, setting.accumulate, mesh, layers, setting.offload)
        if any(each.policy == policy for each in self.candidates):
            return
        peak = assigned.peak(base.peak, beside)
        seconds = base.seconds + assigned.seconds
        each = self.items.number / self.items.ranks if self.items else 1
        found = Candidate(
            setting,
            policy,
            assigned,
            peak,
            seconds,
            each * (setting.batch or 1) * setting.accumulate,
            base.exposed,
            assigned.recompute,
            max(peak - self._left(setting), 0.0),
            Composed(peak, seconds, base.exposed, assigned.recompute),
            base.host,
        )
        self.candidates.append(found)

    # -- plans of what was chosen ------------------------------------------------------------------

    def ranked(self) -> list[Candidate]:
        """The candidates that fit, the fastest first; of equal ones that with the lower peak."""
        fitting = (each for each in self.candidates if each.fits)
        return sorted(fitting, key=lambda c: (-c.throughput, c.peak))

    def best(self) -> Candidate | None:
        """The fastest that was planned and fits."""
        return next((each for each in self.ranked() if each.plan is not None), None)

    def verify(self, wanted: int) -> None:
        """Plan the best candidate of each of the best settings, until so many fit."""
        refused = 0
        while refused < _REFUSED:
            done = {c.setting for c in self.candidates if c.plan is not None and c.fits}
            after = [c for c in self.ranked() if c.plan is None and c.setting not in done]
            if len(done) >= wanted or not after:
                return
            refused += not self._plan(after[0])
            self.stages.next()

    def _plan(self, chosen: Candidate) -> bool:
        """Plan a candidate; return whether it fits."""
        self.stages.say(f"planning it as it stands: {chosen.setting.text()}")
        self.planned += 1
        layers: Mapping[str, LayerPolicy] = chosen.policy.layers
        variant = Variant(chosen.setting.mesh, policy=tuple(layers.items()) or None)
        plan = self.short.planner.at(self.short.point(chosen.setting, variant))
        at = self.candidates.index(chosen)
        if plan.figures is None:
            self.candidates[at] = replace(chosen, plan=plan, refused=plan.error or "it fails")
            return False
        memory, time = plan.figures.memory, plan.figures.time
        fit = memory.fit(self.limit, EAGER)
        self.candidates[at] = replace(
            chosen,
            plan=plan,
            peak=memory.levels(EAGER).requested,
            seconds=time.seconds,
            exposed=time.exposed,
            recompute=sum(p.compute for p in time.phases if p.phase == "recompute"),
            host=memory.host_peak,
            refused=fit.refused,
            lacks=max(fit.nbytes - self.limit, 0.0) if fit.refused else 0.0,
        )
        if fit.refused is not None:
            # What this plan needs beyond what was composed, others are assumed to need, too.
            more = max(memory.levels(EAGER).requested - chosen.composed.peak, 0.0)
            before = self.margin(chosen.setting)
            key = chosen.setting.batch, chosen.setting.offload
            self.margins[key] = max(unusable(memory) + more, before * _GROWTH)
            self._compose()
            return False
        self.programs[chosen.setting] = {}
        if len(self.programs) == 1:  # the best, unless the model of time is wrong
            self.programs[chosen.setting] = self._after_passes(plan)
        return True

    def _after_passes(self, plan: Plan) -> dict[str, Plan]:
        found = {}
        for text in self.pipelines:
            self.stages.say(f"running the pipeline {text}")
            found[text] = after_passes(plan, text)
        return found


def after_passes(plan: Plan, pipeline: str) -> Plan:
    """A plan with its program after other passes, not recorded again; in the world of the plan."""
    from functionalize import passes  # here, as `passes` imports `functionalize`

    before = plan.figures
    assert before is not None
    assert isinstance(before.memory, StepMemory)
    program = passes.run(before.program, pipeline)
    conf = str(plan.point.get("alloc_conf") or "")
    figures = Figures.of(program, before.memory, before.machine, conf, before.items, replay=True)
    _ = figures.row  # computed now: process groups exist only inside the world
    return replace(plan, point={**plan.point, "passes": pipeline}, figures=figures)


def frontier_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one betters in both peak and throughput, the lowest peak first."""
    best: list[Candidate] = []
    for each in sorted(candidates, key=lambda c: (c.peak, -c.throughput)):
        if not best or each.throughput > best[-1].throughput:
            best.append(each)
    return best
