"""`fz.tune`: the fastest configuration of a training step that fits in a device.

    found = fz.tune(build, step, inputs=inputs, world=64, limit="h100", batch_tokens=1 << 20)
    print(found.text())                 the fastest configuration that fits, the frontier, and why others lost
    found.policy.apply(model)           what to do to the model; `found.policy.code()`: as a Python file
    found.pipeline                      for `fz.capture(step, passes=...)`; None: eager is as good
    found.peak, found.program_peak      requested bytes, of plans of exactly that: eager's, and of the replayed program
    found.over(Training(15e12, price=2.5))      the same with the days and the cost of a training run
    found.rows(), found.to_json()

The functions are those of `fz.plan`. What they have parameters for is searched:

    build(offload=False)         whether FSDP2's `CPUOffloadPolicy` keeps parameters and optimizer state on the host
    build(mesh=None)             a `DeviceMesh`: fully sharded, or replicas of groups of one, two or four nodes
    inputs(batch=1)              the batch of a rank and microbatch
    inputs(accumulate=1)         or `step`: microbatches of a step, whose gradients are accumulated
    layers of `fully_shard`      below the root: resharding, recomputation of all or of some ops, each layer its own

MFU is that of the plan of the best, by throughput: FLOPs without recomputation are the same in all candidates.
Figures that are composed, not planned, have a `~` in the text and `"planned": false` in rows.
Invariant: the figures of the answer are those of a plan of exactly that configuration; torch is as before afterwards.
Refuses (`TuneError`) before anything is recorded: no scipy, an option that cannot be read, an axis without a
parameter of the functions. Refuses then: a limit in which nothing fits.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import TuneError
from functionalize.planner.fake_world.target import Target, target_named
from functionalize.planner.machines.constants import declared
from functionalize.planner.machines.files import machine_of
from functionalize.planner.sweep.plan import Planner
from functionalize.planner.sweep.points import (
    WORLD_KEYS,
    StepFunctions,
    check_functions,
    check_pipeline,
    check_points,
)
from functionalize.planner.sweep.summary import COLUMNS, Plan, assumptions, efficiencies
from functionalize.planner.sweep.training import Training
from functionalize.planner.timeline.timeline import EAGER, PROGRAM
from functionalize.planner.tuning.policy import EagerPolicy, Mesh, counted_policies
from functionalize.planner.tuning.search import Candidate, Search, Stages, frontier_of
from functionalize.planner.tuning.short_plans import ShortPlans
from functionalize.planner.tuning.solver import check_solver
from functionalize.planner.tuning.space import Space
from functionalize.planner.tuning.variants import VariantBuilder
from functionalize.util.text import aligned, human_bytes, human_seconds

_SEARCHED = ("mesh", "batch", "accumulate", "variant")  # keys that the search sets


def tune(
    build: Callable[..., Any],
    step: Callable[..., Any],
    *,
    inputs: Callable[..., Any] | None = None,
    world: int,
    limit: float | str,
    batch_tokens: int | None = None,
    meshes: Sequence[Mesh] | None = None,
    batches: Sequence[int] | None = None,
    tp: Sequence[int] | None = None,
    offload: bool | None = None,
    pipelines: Sequence[str] = ("default",),
    top: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
    target: str | Target = "cuda",
    machine: str | Machine | None = None,
    **fixed: Any,
) -> Tuned:
    """Search the configuration with the most tokens (or samples) per second whose eager step fits in `limit`.

    limit: bytes of a device, or the name of a machine, whose memory it is.
    batch_tokens: tokens or samples of a step over all ranks, rounded to whole batches; None: any.
    meshes: dimension -> ranks, for `build`'s parameter `mesh`; None: those that the machine's nodes suggest.
    batches: of a rank and microbatch; None: the divisors of what a rank has in a step.
    tp: sizes of tensor parallelism to try, too, for a `build` that splits ops over the dimension `tp` of its mesh.
    offload: the only value of `build`'s parameter `offload`; None: True and False, where a device has a host.
    pipelines: passes that are run on the best's program. top: how many settings are planned as they stand.
    progress: called with (stages done, stages, what is done now). fixed: other keys, as those of `fz.plan`.
    Raises `TuneError`, and the errors of `fz.plan`.

        >>> found = fz.tune(build, step, inputs=inputs, world=64, limit="h100")  # doctest: +SKIP
        >>> found.policy.apply(model)  # doctest: +SKIP
    """
    start = time.perf_counter()
    own: dict[str, Any] = {"target": target, "machine": machine, "pipelines": pipelines, "top": top}
    own["offload"] = offload
    asked = asked_for(
        (build, inputs, step), world, limit, batch_tokens, meshes, batches, tp=tp, **own, **fixed
    )
    constants = sum(each.nbytes for each in declared(asked.machine, 1))
    if asked.limit <= constants:
        raise TuneError(
            f"nothing fits in {human_bytes(asked.limit)}: context and workspaces alone need "
            f"{human_bytes(constants)}"
        )
    planner, stages = Planner(asked.functions), Stages(progress or (lambda done, of, text: None))
    with planner.searching():
        short = ShortPlans(planner, asked.keys, asked.space, asked.machine, world, stages.say)
        search = Search(short, asked.limit, pipelines, stages)
        search.compose()
        search.verify(top)
    return _answer(search, world, start)


class Asked(NamedTuple):
    """What a search was asked for, checked. limit: bytes of a device. keys: of every plan.

    functions: of the script, `build` with a parameter `variant`.
    """

    machine: Machine
    limit: float
    space: Space
    keys: Mapping[str, Any]
    functions: StepFunctions


def asked_for(
    script: tuple[Any, Any, Any],
    world: int,
    limit: float | str,
    batch_tokens: int | None,
    meshes: Sequence[Mesh] | None,
    batches: Sequence[int] | None,
    *,
    tp: Sequence[int] | None,
    offload: bool | None = None,
    pipelines: Sequence[str],
    top: int,
    target: str | Target,
    machine: str | Machine | None,
    **fixed: Any,
) -> Asked:
    """The options of `tune`; script: `build`, `inputs`, `step`. Raises as `tune` does before anything is recorded."""
    check_solver()
    build, inputs, step = script
    check_functions(build, step, inputs, None, {}, TuneError)
    bytes_of_device = _limit(limit)
    _check(build, world, batch_tokens, {"batches": batches, "tp": tp}, top, fixed)
    _check_pipelines(pipelines)
    if offload not in (None, True, False):
        raise TuneError(f"`offload` is True, False or None, not {offload!r}")
    kind = target_named(target).name
    where, has_host = machine_of(machine, kind), kind != "cpu"
    space = Space.of(script, world, where, meshes, batches, batch_tokens, tp, offload, has_host)
    every = {"world": world, "target": target, "machine": machine, **fixed}
    keys = {key: value for key, value in every.items() if value is not None}
    own = ["variant", *(["batch"] if space.has_batch else [])]
    own += ["accumulate"] if space.accumulates else []
    own += ["offload"] if space.offloads != (None,) else []
    functions = StepFunctions.of([*keys, *own], VariantBuilder(build), inputs, step)
    check_points([keys], functions)
    return Asked(where, bytes_of_device, space, keys, functions)


def _answer(search: Search, world: int, start: float) -> Tuned:
    best, short = search.best(), search.short
    if best is None:
        raise TuneError(_nothing_fits(search))
    fitting = search.ranked()
    rest = [each for each in search.candidates if not each.fits]
    every = [
        best,
        *(each for each in fitting if each is not best),
        *sorted(rest, key=lambda c: c.lacks),
    ]
    left_out = list(short.space.left_out)
    if search.largest is not None:
        left_out.append(f"batches above {search.largest:,}, which may fit: `batches` names others")
    if not short.runs:
        left_out.append(
            "layers: `build` returns no model with modules that `fully_shard` wraps below a root"
        )
    elif short.whole is not None:
        left_out.append(f"short models, so each was planned whole: {short.whole}")
    facts = SearchFacts(
        settings=len({each.setting for each in every}),
        candidates=len(every),
        short=short.planned,
        whole=search.planned,
        seconds=time.perf_counter() - start,
        margin=search.margin(best.setting),
        left_out=tuple(left_out),
        failed={place.text(): why for place, why in search.failed.items()},
    )
    kind = search.items.kind if search.items is not None else "steps"
    programs = search.programs.get(best.setting) or {}
    return Tuned(best, every, programs, search.limit, kind, world, facts)


def _nothing_fits(search: Search) -> str:
    refused = [each for each in search.candidates if each.refused is not None]
    least = min(search.candidates, key=lambda c: c.lacks or float("inf"))
    text = (
        f"nothing fits in {human_bytes(search.limit)}: of {len(search.candidates):,} configurations the one that "
        f"needs least lacks {human_bytes(least.lacks)} ({least.setting.text()})"
    )
    if refused:
        text += (
            f"; {len(refused)} were planned whole: {(refused[-1].refused or '').splitlines()[0]}"
        )
    return text + ". Use more ranks, a smaller batch or a larger limit"


def _limit(limit: float | str) -> float:
    """The bytes of a limit. Raises `TuneError`."""
    if isinstance(limit, str):
        memory = MACHINES[limit].memory if limit in MACHINES else None
        if memory is None:
            named = ", ".join(name for name, each in MACHINES.items() if each.memory is not None)
            raise TuneError(f"a limit is a number of bytes, or one of {named}, not {limit!r}")
        return float(memory)
    if isinstance(limit, bool) or not limit > 0:
        raise TuneError(f"a limit is a number of bytes or the name of a machine, not {limit!r}")
    return float(limit)


def _check(
    build: Any,
    world: Any,
    tokens: Any,
    lists: Mapping[str, Sequence[Any] | None],
    top: Any,
    fixed: Mapping[str, Any],
) -> None:
    """Raises `TuneError` for arguments of the wrong kind."""
    numbers = {"world": world, "top": top, "batch_tokens": 1 if tokens is None else tokens}
    numbers |= {
        f"{name}[{i}]": each for name, found in lists.items() for i, each in enumerate(found or ())
    }
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise TuneError(f"`{name}` is a positive whole number, not {value!r}")
    searched = sorted({*_SEARCHED, "passes", "reshard", "checkpoint"} & fixed.keys())
    own = inspect.signature(build).parameters
    taken = [key for key in searched if key in _SEARCHED or key not in own]
    if taken:
        other = {"mesh": "meshes", "batch": "batches", "passes": "pipelines"}.get(taken[0])
        hint = f": set `{other}`" if other else ": remove it"
        raise TuneError(f"`{taken[0]}` is an axis of the search and has no single value{hint}")
    unknown = [key for key in fixed if key in WORLD_KEYS and key != "rank"]
    assert not unknown, unknown


def _check_pipelines(pipelines: Sequence[str]) -> None:
    """Raises `PassError` for a pipeline that cannot be read."""
    if isinstance(pipelines, str):
        raise TuneError(f"`pipelines` is a list of pipelines, not {pipelines!r}")
    for text in pipelines:
        check_pipeline(text)


# -- the answer ------------------------------------------------------------------------------------

_LOST = 8  # rows that say why others lost
_FRONTIER = 8
_SHOWN = {name: (head, show) for name, head, show in COLUMNS}
# Columns of a row that are shown where they have a value, in their order; names of figures that have no column.
_COLUMNS = (
    *("peak", "device", "host", "step", "exposed"),
    *("recomputed", "mfu", "throughput", "days", "cost"),
)
_OWN = {"recomputed": ("recomputed", human_seconds)}
_OPTIONAL = (
    "exposed",
    "recomputed",
    "mfu",
    "device",
)  # left out in a narrow terminal, in this order


@dataclass(frozen=True, repr=False)
class SearchFacts:
    """What a search did. gap: of the best choice of layers, from the optimum of the composed model, as a fraction.

    short, whole: plans made. seconds: of the clock. left_out: axes that the script does not have. margin: bytes of
    the limit that the allocator cannot use.
    """

    settings: int
    candidates: int
    short: int
    whole: int
    seconds: float
    margin: float
    left_out: tuple[str, ...]
    failed: Mapping[str, str]

    def __repr__(self) -> str:
        return f"<SearchFacts: {self.candidates:,} configurations in {self.settings:,} settings>"


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """The answer.

    best: the fastest that fits. candidates: all, the fastest that fits first. programs: pipeline -> the best after it.
    limit: bytes of a device. kind: what is trained on, "tokens" or "samples". world: ranks.
    training: a run whose days and cost are asked for.
    """

    best: Candidate
    candidates: Sequence[Candidate]
    programs: Mapping[str, Plan]
    limit: float
    kind: str
    world: int
    facts: SearchFacts
    training: Training | None = None

    def __repr__(self) -> str:
        rate = f"{self.best.throughput:,.0f} {self.kind}/s/rank"
        return f"<Tuned: {self.best.setting.text()}, {human_bytes(self.peak)}, {rate}>"

    def __str__(self) -> str:
        return self.text()

    def over(self, training: Training) -> Tuned:
        """The same answer with the days and the cost of a training run."""
        return replace(self, training=training)

    @property
    def policy(self) -> EagerPolicy:
        """What the best does, to apply or to print."""
        return self.best.policy

    @property
    def peak(self) -> int:
        """Requested bytes of the best, run eagerly: of its plan."""
        return int(self.best.peak)

    @property
    def pipeline(self) -> str | None:
        """The passes after which the best's program fits and takes least; None: none is better than eager."""
        times = {
            text: plan.figures.time.seconds
            for text, plan in self.programs.items()
            if plan.figures is not None and self._fits(plan)
        }
        found = min(times, key=lambda text: times[text], default=None)
        return found if found is not None and times[found] <= self.best.seconds else None

    @property
    def program_peak(self) -> int | None:
        """Requested bytes of the program after `pipeline`; None without one."""
        if self.pipeline is None:
            return None
        figures = self.programs[self.pipeline].figures
        return figures.memory.levels(PROGRAM).requested if figures is not None else None

    @property
    def tokens(self) -> float:
        """Tokens or samples of a step, over all ranks."""
        return self.best.items * self.world

    def frontier(self) -> list[Candidate]:
        """The candidates that fit, of which no other has both a lower peak and a higher throughput."""
        return frontier_of([each for each in self.candidates if each.fits])

    def _fits(self, plan: Plan) -> bool:
        assert plan.figures is not None
        return plan.figures.memory.fit(self.limit, PROGRAM).refused is None

    # -- why the others lost -----------------------------------------------------------------------

    def why(self, other: Candidate) -> str:
        """Why a candidate is not the best."""
        if not other.fits:
            much = f"does not fit: {human_bytes(other.lacks)} too many" if other.lacks else ""
            return much or f"does not fit: {(other.refused or '').splitlines()[0]}"
        best = self.best
        mine, others = best.composed, other.composed
        slower = (others.seconds / other.items) / (mine.seconds / best.items) - 1
        if slower <= 0:
            return "composed as fast, not planned: more settings are planned with a larger `top`"
        # Seconds per item that it spends more.
        more = {
            "recomputation": others.recompute / other.items - mine.recompute / best.items,
            "exposed communication": others.exposed / other.items - mine.exposed / best.items,
            "gathering again": (
                other.assigned.gather / other.items - best.assigned.gather / best.items
            ),
        }
        whole = others.seconds / other.items - mine.seconds / best.items
        cause = max(more, key=lambda name: more[name])
        much = f"{slower:.1%} slower" if slower < 1 else f"{slower + 1:,.1f} times as slow"
        if more[cause] * 2 < whole:
            return f"{much}: kernels and optimizer"
        return f"{much}: {cause}, {human_seconds(more[cause] * other.items)} more per step"

    def losers(self) -> list[Candidate]:
        """The next best of each other setting, and what is done by hand in the setting of the best."""
        found: list[Candidate] = []
        settings = {self.best.setting}
        for each in self.candidates:
            if each is self.best:
                continue
            alike = len({o.policy for run in each.assigned.runs for o in run}) <= 1
            if each.setting not in settings or (each.setting == self.best.setting and alike):
                settings.add(each.setting)
                found.append(each)
        return found

    # -- for people and programs -------------------------------------------------------------------

    def row(self, each: Candidate) -> dict[str, Any]:
        """The figures of a candidate: bytes, seconds, items per second and rank."""
        device = None
        if each.plan is not None and each.plan.figures is not None:
            device = each.plan.figures.memory.fit(self.limit, EAGER).nbytes
        return {
            "mesh": dict(each.setting.mesh) if each.setting.mesh else None,
            "batch": each.setting.batch,
            "accumulate": each.setting.accumulate,
            "offload": each.setting.offload,
            "layers": counted_policies(each.policy.layers.values()),
            "peak": int(each.peak),
            "device": device,
            "host": int(each.host) or None,
            "step": each.seconds,
            "exposed": each.exposed,
            "recomputed": each.recompute,
            "mfu": self._mfu(each),
            "throughput": each.throughput,
            **self._run(each),
            "planned": each.plan is not None,
            "fits": each.fits,
            "lacks": int(each.lacks),
            "composed": {"peak": int(each.composed.peak), "step": each.composed.seconds},
        }

    def _mfu(self, each: Candidate) -> float | None:
        plan = self.best.plan
        known = plan.figures.time.mfu if plan is not None and plan.figures is not None else None
        if known is None or not self.best.throughput:
            return None
        return known * each.throughput / self.best.throughput

    def _run(self, each: Candidate) -> dict[str, float | None]:
        """The days and the cost of the training run, if there is one."""
        if self.training is None:
            return {}
        days = {"days": self.training.days(each.throughput, self.world)}
        if self.training.price is not None:
            days["cost"] = self.training.cost(each.throughput)
        return days

    def rows(self) -> list[dict[str, Any]]:
        """A dict per candidate, the fastest that fits first."""
        return [self.row(each) for each in self.candidates]

    def to_json(self) -> str:
        """The answer as JSON: the best, its policy and pipeline, all candidates, why the next ones lost."""
        data = {
            "best": self.row(self.best),
            "policy": {name: each.text() for name, each in self.policy.layers.items()},
            "code": self.policy.code(),
            "pipeline": self.pipeline,
            "program peak": self.program_peak,
            "frontier": [self.row(each) for each in self.frontier()],
            "lost": [{**self.row(each), "why": self.why(each)} for each in self.losers()],
            "candidates": self.rows(),
            "limit": self.limit,
            "items": self.kind,
            "notes": self.notes(),
            "search": vars(self.facts),
        }
        return json.dumps(data, indent=2, default=str)

    def notes(self) -> list[str]:
        """The efficiencies of the modelled times and the range that follows; the kernels and numbers assumed."""
        plan = self.best.plan
        if plan is None or plan.figures is None:
            return []
        figures = plan.figures
        found = efficiencies([(figures.time, figures.time_range)])
        return found + assumptions(plan.choices, plan.assumed, plan.remarks)

    def text(self, width: int | None = None) -> str:
        """The answer for people. width: of the terminal, in which some columns may have no room."""
        facts = self.facts
        tokens = f"{self.tokens:,.0f} {self.kind} a step"
        planned = [c for c in self.candidates if c.plan is not None and c.fits]
        lines = [
            f"{tokens} on {self.world:,} ranks of {human_bytes(self.limit)}",
            *self._table(planned, width),
            "",
            "the frontier (~ composed, not planned)",
            *self._table(_thinned(self.frontier(), _FRONTIER), width),
        ]
        lost = [each for each in self.losers() if each not in planned[:1]][:_LOST]
        if lost:
            lines += ["", "why the next ones lost"]
            rows = [(c.setting.text(), _layers(c), self.why(c)) for c in lost]
            lines += aligned(rows, 3)
        for text, plan in self.programs.items():
            if plan.figures is not None:
                levels = plan.figures.memory.levels(PROGRAM)
                fits = "fits" if self._fits(plan) else "does not fit"
                chosen = ", chosen" if text == self.pipeline else ""
                lines += [
                    "",
                    f"captured, passes={text!r}: peak {human_bytes(levels.requested)}, "
                    f"{human_seconds(plan.figures.time.seconds)} a step, {fits}{chosen}",
                ]
        off = self.best.peak / self.best.composed.peak - 1
        late = self.best.seconds / self.best.composed.seconds - 1
        lines += [
            "",
            f"{facts.candidates:,} configurations in {facts.settings} settings, of {facts.short} short plans and "
            f"{facts.whole} whole ones, in {human_seconds(facts.seconds)}",
            f"the plan of the best has {off:+.1%} of the composed peak and {late:+.1%} of the composed seconds; its "
            f"layers are chosen within {self.best.assigned.gap:.0e} of the optimum of what is composed",
        ]
        lines += self.notes()
        lines += [f"not searched: {why}" for why in facts.left_out]
        lines += [f"not searched: {place}: {why}" for place, why in facts.failed.items()]
        return "\n".join(lines)

    def _table(self, found: Sequence[Candidate], width: int | None) -> list[str]:
        rows = [(self.row(each), each) for each in found]
        names = [n for n in _COLUMNS if any(row.get(n) is not None for row, _ in rows)]
        for optional in (None, *_OPTIONAL):
            names = [name for name in names if name != optional]
            heads = [(_SHOWN | _OWN)[name][0].replace("items", self.kind) for name in names]
            cells = [self._cells(row, each, names) for row, each in rows]
            lines = aligned([("setting", "layers", *heads), *cells], 2)
            if width is None or max(map(len, lines)) <= width:
                break
        return lines

    def _cells(self, row: Mapping[str, Any], each: Candidate, names: Sequence[str]) -> list[str]:
        about = "" if each.plan is not None else "~"
        figures = (
            "" if row[name] is None else about + (_SHOWN | _OWN)[name][1](row[name])
            for name in names
        )
        return [each.setting.text(), _layers(each), *figures]


def _layers(each: Candidate) -> str:
    """The policies of the layers in short: `19 recomputed in part, 13 saved`."""
    counts: dict[str, int] = {}
    for one in each.policy.layers.values():
        how = "saved" if one.saved is None else "recomputed in part" if one.saved else "recomputed"
        after = ""
        if one.reshard is False:
            after = ", unsharded"
        elif not isinstance(one.reshard, bool) and one.reshard is not None:
            after = f", on {one.reshard}"
        counts[how + after] = counts.get(how + after, 0) + 1
    return "; ".join(f"{count} {how}" for how, count in counts.items()) or "as built"


def _thinned(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most so many, evenly, the first and the last included."""
    if len(found) <= most:
        return [*found]
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
