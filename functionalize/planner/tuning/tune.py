"""`fz.tune`: the fastest configuration of a training step that fits in a device.

    found = fz.tune(build, step, inputs=inputs, world=64, limit="h100", batch_tokens=1 << 20)
    found.policy.apply(model); found.pipeline; print(found.text())

The functions are those of `fz.plan`. What they have parameters for is searched:

    build(offload=False)         whether FSDP2's `CPUOffloadPolicy` keeps parameters and optimizer state on the host
    build(mesh=None)             a `DeviceMesh`: fully sharded, or replicas of groups of one, two or four nodes
    inputs(batch=1)              the batch of a rank and microbatch
    inputs(accumulate=1)         or `step`: microbatches of a step, whose gradients are accumulated
    layers of `fully_shard`      below the root: resharding, recomputation of all or of some ops, each layer its own

Invariant: the figures of the answer are those of a plan of exactly that configuration; torch is as before afterwards.
Refuses (`TuneError`) before anything is recorded: no scipy, an option that cannot be read, an axis
without a parameter of the functions. Refuses then: a limit in which nothing fits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
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
from functionalize.planner.tuning.policy import Mesh
from functionalize.planner.tuning.search import Search
from functionalize.planner.tuning.short_plans import ShortPlans
from functionalize.planner.tuning.solver import check_solver
from functionalize.planner.tuning.space import Space
from functionalize.planner.tuning.tuned import SearchFacts, Tuned
from functionalize.planner.tuning.variants import VariantBuilder
from functionalize.util.text import human_bytes

OWN = ("mesh", "batch", "accumulate", "variant")  # keys that the search sets


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
    progress: Callable[[str], None] | None = None,
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
    progress: called with a text. fixed: other keys, as those of `fz.plan`.
    Raises `TuneError`, and the errors of `fz.plan`.
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
    say = progress or (lambda text: None)
    planner = Planner(asked.functions)
    with planner.searching():
        short = ShortPlans(planner, asked.keys, asked.space, asked.machine, world, say)
        search = Search(short, asked.limit, pipelines, say)
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
    searched = sorted({*OWN, "passes", "reshard", "checkpoint"} & fixed.keys())
    own = inspect.signature(build).parameters
    taken = [key for key in searched if key in OWN or key not in own]
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
