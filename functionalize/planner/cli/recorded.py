"""Record the step of a script in a fake world, or read a recorded one from a file.

    with recorded(job, say) as found:           the fake world exists inside the block
        found.program, found.eager, found.input_categories, found.stats

        script ──build, inputs──▶ step, called until it settles ──▶ Recorded ──passes──▶ Recorded

Invariant: nothing of the fake world remains after the `with`.
Refuses: `UsageError` for an invalid world or unknown keys, `UncapturableError` for a step that cannot be captured.
Errors of the script propagate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import functionalize as fz
from functionalize.errors import PlanError, UncapturableError, UsageError
from functionalize.planner.cli.recorded_step import Recorded, Say, read_graph
from functionalize.planner.cli.scripts import (
    DEFAULT_WORLD,
    FunctionNames,
    Mesh,
    Script,
    as_usage,
    opened,
)
from functionalize.planner.fake_world.target import Target
from functionalize.planner.fake_world.world import World
from functionalize.planner.sweep.plan import (
    idle_dimensions,
    items_of,
    offloaded,
    record,
)
from functionalize.planner.sweep.points import Point, StepFunctions, check_points
from functionalize.planner.sweep.summary import assumptions, short
from functionalize.planner.time.communication import members_of
from functionalize.step.captured_step import CapturedStep
from functionalize.util.gc_pause import only_young_collections


@dataclass(frozen=True)
class Job:
    """The options of a recording.

    source: a script, or a file written by `capture -o`. names: of the script's functions.
    parameters: arguments of these functions by name (`--set`).
    """

    source: str
    names: FunctionNames = field(default_factory=FunctionNames)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    mesh: Mesh | None = None
    rank: int = 0
    target: str | Target = "cuda"

    @property
    def is_file(self) -> bool:
        """Whether the source is the file of a recorded graph."""
        return Path(self.source).suffix == ".fzp"

    @property
    def ranks(self) -> int | None:
        """The size of the world; None: the product of the mesh sizes."""
        return DEFAULT_WORLD if self.world is None and self.mesh is None else self.world


@contextmanager
def recorded(job: Job, say: Say, eagerly: bool = False) -> Iterator[Recorded]:
    """Read a file, or record a script's step. say: called with a status text at each stage.

    eagerly: whether a step that cannot be captured is recorded without a program.
    """
    if job.is_file:
        _check_file(job)
        say(f"reading {job.source}")
        yield read_graph(job.source)
        return
    with opened(job.source, job.names) as script:
        point = {"world": job.ranks, "mesh": job.mesh, "rank": job.rank, "target": job.target}
        functions = wants(script, [*job.parameters], [{**point, **job.parameters}])
        made = fz.world(job.ranks, job.mesh, rank=job.rank, target=job.target)
        with only_young_collections(), made as world:
            yield _recorded(script.name, functions, job, world, say, eagerly)


def _check_file(job: Job) -> None:
    """Raises `UsageError` for a file that is not there, options without effect on a graph that is already recorded."""
    if not Path(job.source).is_file():
        raise UsageError(
            f"{job.source} is not there: `functionalize capture -o` writes such a file"
        )
    of_script = Job(job.source)
    options = {"names": "build, --step or --inputs", "parameters": "set"}
    for field_ in fields(Job):
        if getattr(job, field_.name) != getattr(of_script, field_.name):
            raise UsageError(
                f"{job.source} is recorded already: --{options.get(field_.name, field_.name)} is for a script"
            )


def wants(script: Script, keys: list[str], every: Sequence[Point]) -> StepFunctions:
    """Assign each key to the functions that have it as a parameter; raises `UsageError` if none has.

    every: points of which none can have a value that is refused.
    """
    with as_usage():
        functions = StepFunctions.of(keys, script.build, script.inputs, script.step)
        check_points(every, functions)
    return functions


def _recorded(
    source: str, functions: StepFunctions, job: Job, world: World, say: Say, eagerly: bool
) -> Recorded:
    start, keys = time.perf_counter(), job.parameters
    say("building the model")
    with as_usage(PlanError):
        built = functions.built(keys)
        made, args, kwargs = functions.call(built, keys)
    captured = fz.capture(functions.step, passes=(), memory=True, on_uncapturable="raise")
    name = ", ".join([source, *(f"{key} {value}" for key, value in job.parameters.items())])
    text = _world_text(world, job)
    try:
        memory, program, calls = record(captured, args, kwargs, say)
    except (UncapturableError, PlanError) as error:
        if not eagerly:
            raise
        say("recording the memory of the step as it is")
        noted = fz.record_memory(functions.step)
        noted(*args, **kwargs)
        assert noted.memory is not None
        why = " ".join(str(error).split())
        remark = (
            f"no program was made, so its time is not known; the step cannot be captured: {why}"
        )
        remarks = [remark, *offloaded(built, noted.memory)]
        assumed = assumptions(world.choices.rows, world.assumed, remarks)
        spread = {str(i): () for i, size in enumerate(world.mesh.shape) if size > 1}
        eager, target, host = noted.memory.eager, world.target.name, noted.memory.host_peak
        return Recorded(name, None, {}, text, target, {}, spread, tuple(assumed), eager, host=host)
    say("reading the graph")
    program.describe()
    stats = {**_stats(captured), "calls": calls, "seconds": time.perf_counter() - start}
    groups = members_of(program)
    remarks = [*idle_dimensions(world, groups), *offloaded(built, memory)]
    notes = tuple(assumptions(world.choices.rows, world.assumed, remarks))
    return Recorded(
        name,
        program,
        memory.input_categories,
        text,
        world.target.name,
        stats,
        groups,
        notes,
        memory.eager,
        items_of(made, built, world.size),
        memory.host_peak,
    )


def _stats(captured: CapturedStep[..., Any]) -> dict[str, Any]:
    stats = captured.stats
    names = ("ops", "resizes", "nodes", "inputs", "guards")
    return {
        **{name: getattr(stats, name) for name in names},
        "collectives": dict(stats.collectives),
    }


def _world_text(world: World, job: Job) -> str:
    shape = f", mesh {short(job.mesh)}" if job.mesh is not None else ""
    rank = f", seen from rank {world.rank}" if world.rank else ""
    ranks = "1 rank" if world.size == 1 else f"{world.size:,} ranks"
    return f"{ranks}{shape}{rank}"
