"""The step of a script, recorded in a fake world; or what a file has of one.

    with recorded(job, working) as found:       inside: the world in which it was recorded
        found.program, found.eager, found.given, found.stats

        script ──build, inputs──▶ step, called until it is settled ──▶ Recorded ──passes──▶ Recorded

Invariant: nothing is left of the world after the `with`.
Refuses: `UsageError` for a world or keys that do not fit, `UncapturableError` for a step that does not settle; what the
script raises passes through.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import functionalize as fz
from functionalize.cli.files import read_graph
from functionalize.cli.recorded_step import Recorded, Say
from functionalize.cli.scripts import Mesh, Names, Script, opened
from functionalize.errors import FunctionalizeError, PlanError, UsageError
from functionalize.fake_world.world import World
from functionalize.planning.time.communication import members_of
from functionalize.step.captured_step import CapturedStep
from functionalize.sweep.grid import MODEL_KEYS, AcceptedKeys, of
from functionalize.sweep.plan import arguments, called, change, record
from functionalize.sweep.summary import assumptions, short

DEFAULT_WORLD = 8  # ranks: one node of most machines


@dataclass(frozen=True)
class Job:
    """What is to be recorded. source: a script, or a file that `capture -o` wrote. given: parameters."""

    source: str
    names: Names = field(default_factory=Names)
    given: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    mesh: Mesh | None = None
    rank: int = 0
    target: str = "cuda"

    @property
    def is_file(self) -> bool:
        """Whether the source is a recorded graph and no script."""
        return Path(self.source).suffix == ".fzp"

    @property
    def ranks(self) -> int | None:
        """The size of the world; None: that of the mesh."""
        return DEFAULT_WORLD if self.world is None and self.mesh is None else self.world


@contextmanager
def recorded(job: Job, say: Say) -> Iterator[Recorded]:
    """Read a file, or record a script's step. say: is told what goes on."""
    if job.is_file:
        _check_file(job)
        say(f"reading {job.source}")
        yield read_graph(job.source)
        return
    with opened(job.source, job.names) as script, _world(job) as world:
        yield _recorded(script, job, world, say)


def _check_file(job: Job) -> None:
    """Raises `UsageError` for what a recorded graph can no longer be asked."""
    of_script = Job(job.source)
    options = {"names": "build, --step or --inputs", "given": "set"}
    for field_ in fields(Job):
        if getattr(job, field_.name) != getattr(of_script, field_.name):
            raise UsageError(
                f"{job.source} is recorded already: --{options.get(field_.name, field_.name)} is for a script"
            )


@contextmanager
def _world(job: Job) -> Iterator[World]:
    manager = fz.world(job.ranks, job.mesh, rank=job.rank, target=job.target)
    try:
        world = manager.__enter__()
    except FunctionalizeError as error:
        raise UsageError(str(error)) from error
    with ExitStack() as stack:
        stack.push(manager)
        yield world


def wants(script: Script, keys: list[str]) -> AcceptedKeys:
    """Which function accepts which key; raises `UsageError` for a key that none accepts."""
    try:
        return AcceptedKeys.of(keys, script.build, script.inputs, script.step)
    except PlanError as error:
        raise UsageError(str(error)) from None


def _recorded(script: Script, job: Job, world: World, say: Say) -> Recorded:
    taken, start = wants(script, list(job.given)), time.perf_counter()
    say("building the model")
    built = called("build", script.build, (), of(job.given, taken.build))()
    change(
        built, **{k: v for k, v in job.given.items() if k in MODEL_KEYS and k not in taken.build}
    )
    made = (
        called("inputs", script.inputs, (), of(job.given, taken.inputs))()
        if script.inputs is not None
        else ()
    )
    args, kwargs = arguments(built, made)
    kwargs |= of(job.given, taken.step)
    called("step", script.step, args, kwargs)
    captured = fz.capture(script.step, memory=True)
    memory, program, calls = record(captured, args, kwargs, say)
    say("reading the graph")
    program.describe()
    stats = {**_stats(captured), "calls": calls, "seconds": time.perf_counter() - start}
    notes = tuple(assumptions(world.choices.rows, world.assumed))
    return Recorded(
        ", ".join([script.name, *(f"{key} {value}" for key, value in job.given.items())]),
        program,
        memory.input_categories,
        _world_text(world, job),
        world.target.name,
        stats,
        members_of(program),
        notes,
        memory.eager,
    )


def _stats(captured: CapturedStep) -> dict[str, Any]:
    told = captured.stats
    names = ("ops", "resizes", "nodes", "inputs", "guards")
    return {**{name: getattr(told, name) for name in names}, "collectives": dict(told.collectives)}


def _world_text(world: World, job: Job) -> str:
    shape = f", mesh {short(job.mesh)}" if job.mesh is not None else ""
    rank = f", seen from rank {world.rank}" if world.rank else ""
    ranks = "1 rank" if world.size == 1 else f"{world.size:,} ranks"
    return f"{ranks}{shape}{rank}"
