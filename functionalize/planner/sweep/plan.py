"""`fz.plan`: the memory and time of a training step on other machines, batches and meshes, computed on this machine.

    def build(layers=32):                                 model and optimizer, as on real ranks
        model = ...; fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    def inputs(batch=1): return (torch.randint(0, 1000, (batch, 8192)),)

    def step(model, optimizer, tokens): ...               one training step

    found = fz.plan(build, step, inputs=inputs, grid={"world": [64, 1024], "batch": [1, 2, 4]})
    print(found.text())
    found.largest("batch", limit=80e9)                    the largest batch that fits

    fz.plan(model, optimizer, batch, world=64, shard=...)  the same of objects of this process, which stay as they are

The arguments of `step` are the result of `build` (a tuple is spread, a dict becomes keyword arguments), then that of
`inputs`, then the keys of the point that `step` has as parameters. Each point is a capture in a fake world
(`planner/fake_world/world.py`). Consecutive points share what is equal: the world, the model and optimizer that were
built, and the shapes that torch has cached; a point that differs only in the batch costs one recorded call.
Invariant: after `plan` torch is as before, and the figures of a point do not depend on the points planned before it.
Refuses (`PlanError`): keys that no function accepts, a `build` that returns no module where `reshard` or `checkpoint`
needs one.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from functionalize._compat.graphs import pytree
from functionalize.cost.machines.machine import Machine
from functionalize.entry import capture
from functionalize.errors import FunctionalizeError, PlanError, UncapturableError
from functionalize.fsdp.objects import fsdp_groups
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.fake_world.world import World, world
from functionalize.planner.lifetimes.record_memory import RecordedMemory, record_memory
from functionalize.planner.lifetimes.step_memory import StepMemory
from functionalize.planner.machines.constants import declared
from functionalize.planner.machines.files import machine_of
from functionalize.planner.report.text import Memory
from functionalize.planner.sweep.changes import modules_of
from functionalize.planner.sweep.figures import Figures, joined, memory_of
from functionalize.planner.sweep.live_objects import functions_of, untouched
from functionalize.planner.sweep.live_shards import LiveShards
from functionalize.planner.sweep.points import (
    WORLD_KEYS,
    Point,
    StepFunctions,
    check_functions,
    check_points,
    of,
    points,
    world_of,
)
from functionalize.planner.sweep.summary import Plan, Sweep
from functionalize.planner.sweep.training import Items
from functionalize.planner.time.communication import members_of, partners_of
from functionalize.program.program import Program
from functionalize.step.captured_step import CapturedStep
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.text import without_numbers

_ALONE = (
    "the time that a rank waits for another one's messages is not in its seconds, as not all ranks that exchange them "
    "are planned (rank {} is one): plan these, by `stages=True` or as a key `rank`"
)
_MOST_CALLS = 8  # until a step settles; `capture` may refuse it before
Progress = Callable[[int, int, Point], None]


@overload
def plan(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    step: Callable[..., Any] | None = None,
    shard: Callable[[Any], Any] | None = None,
    grid: Mapping[str, Any] | None = None,
    stages: bool = False,
    progress: Progress | None = None,
    **fixed: Any,
) -> Sweep: ...


@overload
def plan(
    build: Callable[..., Any],
    step: Callable[..., Any],
    grid: Mapping[str, Any] | None = None,
    *,
    inputs: Callable[..., Any] | None = None,
    stages: bool = False,
    progress: Progress | None = None,
    **fixed: Any,
) -> Sweep: ...


def plan(*given: Any, **options: Any) -> Sweep:
    """Plan a step at every point of a grid: of functions that make it, or of a model, an optimizer and a batch.

    grid: key -> values. fixed: keys with one value. Keys of the plan itself: `world` (the number of ranks), `mesh`
    (shape or names with sizes), `rank`, `target`, `reshard` (`reshard_after_forward` of every wrapped module but the
    root), `checkpoint` (activation checkpointing of the same modules), `passes` (a pipeline for the program),
    `machine` (a name, or a `Machine` of `cost/machines`; it also decides which kernels the target runs),
    `alloc_conf` (the text of `PYTORCH_ALLOC_CONF`). Every other key is passed to the functions with a parameter of its
    name.
    stages: whether every rank is planned that messages lead to from that of a point, as the stages of a pipeline, a
    row each. Ranks that exchange messages have the time of the slowest, in which they wait for each other, if all of
    them are planned; else a remark says that they do not wait.
    progress: called with (points done, points, the next point).

    A step that cannot be captured has the memory that eager was recorded with, no time and no traffic, and a remark.
    A point that fails has an error in place of figures; if all fail, the first error is raised.
    Raises before anything is recorded: `PlanError` for a grid that does not fit the functions, and what
    `planner/sweep/points.py` refuses.

        >>> def build(width=8):
        ...     return torch.nn.Linear(width, width)
        >>> def step(model, x):
        ...     model(x).sum().backward()
        ...     model.zero_grad()
        >>> def inputs(batch=1, width=8):
        ...     return torch.ones(batch, width)
        >>> sweep = fz.plan(build, step, {"batch": [1, 64]}, inputs=inputs, world=1, target="cpu")
        >>> [each.figures.row["peak"] for each in sweep.plans]
        [616, 4388]

    Of a model, an optimizer and a batch, all tensors are copied without data, from any device or `meta`; the objects
    stay as they are. A model that is sharded is planned so: in the world of its mesh, or in the one that is asked for.
    Else each rank has the whole model, unless `shard(model)` calls `fully_shard` on the copy.
    batch: the tensors of a rank, or a function that makes them, which may take keys. A tuple is spread, a dict becomes
    keyword arguments.
    step: `step(model, optimizer, ...)` with the batch. Without it: `model(...)`, backward of the loss (`.loss` or
    `["loss"]` of what it returns, or a tensor of one element), `optimizer.step()`, `optimizer.zero_grad()`.
    Raises `PlanError` for what `planner/sweep/live_objects.py` refuses, as tensor parallelism.

        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(model, optimizer, x):
        ...     model(x).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> sweep = fz.plan(model, optimizer, torch.ones(64, 8), step=step, world=1, target="cpu")
        >>> sweep.plans[0].figures.row["peak"]
        4972
    """
    if isinstance(given[0] if given else options.get("model"), nn.Module):
        return _plan_objects(*given, **options)
    return _plan_functions(*given, **options)


def _plan_objects(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    step: Callable[..., Any] | None = None,
    shard: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Sweep:
    build, step, inputs = functions_of(model, optimizer, batch, step, shard)
    shards = LiveShards.of(model)
    if shards is not None and not {"world", "mesh"} & {*options, *(options.get("grid") or ())}:
        options["world"] = shards.ranks
    with untouched(model):
        return _plan_functions(build, step, inputs=inputs, **options)


def _plan_functions(
    build: Callable[..., Any],
    step: Callable[..., Any],
    grid: Mapping[str, Any] | None = None,
    *,
    inputs: Callable[..., Any] | None = None,
    stages: bool = False,
    progress: Progress | None = None,
    **fixed: Any,
) -> Sweep:
    check_functions(build, step, inputs, grid, fixed)
    axes = {**{key: [value] for key, value in fixed.items()}, **(grid or {})}
    functions = StepFunctions.of(list(axes), build, inputs, step)
    planner, every = Planner(functions, stages), list(points(axes))
    check_points(every, functions)
    found: dict[int, list[Plan]] = {}
    with planner.searching():
        for i in planner.order(every):
            if progress is not None:
                progress(len(found), len(every), every[i])
            found[i] = planner.ranks(every[i])
    plans = waiting([each for i in range(len(every)) for each in found[i]])
    if all(each.error is not None for each in plans):
        assert plans[0].cause is not None
        raise plans[0].cause
    if stages and "rank" not in axes:
        axes = {"rank": [], **axes}
    return Sweep(plans, tuple(axes), planner.searching)


def waiting(plans: Sequence[Plan]) -> list[Plan]:
    """The same plans, in which ranks of one step wait for each other's messages."""
    steps: dict[str, list[int]] = {}
    for i, each in enumerate(plans):
        if each.figures is not None and each.figures.partners:
            point = {key: value for key, value in each.point.items() if key != "rank"}
            steps.setdefault(repr(point), []).append(i)
    found = [*plans]
    for step in steps.values():
        before = [figures for i in step if (figures := plans[i].figures) is not None]
        for i, figures in zip(step, joined(before), strict=True):
            alone = [] if figures.pipeline is not None else [_ALONE.format(max(figures.partners))]
            remarks = [*plans[i].remarks, *alone]
            found[i] = replace(plans[i], figures=figures, remarks=remarks)
    return found


@dataclass(eq=False)
class _Open:
    """The fake world that is entered now, the model built in it, and its captured step.

    key: of the world. manager: the context manager of the world. built: the result of `build`.
    """

    key: Any
    manager: Any
    world: World
    model_key: Any = None
    built: Any = None
    captured: CapturedStep[..., Any] | None = None


class Planner:
    """Plans points one after the other; keeps the world and the model for the next point."""

    def __init__(self, functions: StepFunctions, stages: bool = False) -> None:
        self.functions, self.stages = functions, stages
        self._open: _Open | None = None
        self._reasons: dict[
            str, str
        ] = {}  # why steps cannot be captured, by kind: a line each in the report

    def order(self, every: Sequence[Point]) -> list[int]:
        """The indices of points, ordered so that equal worlds, and in these equal models, are consecutive."""
        seen: dict[Any, int] = {}

        def rank(*key: Any) -> int:
            return seen.setdefault(repr(key), len(seen))

        def key(i: int) -> tuple[int, int, int]:
            try:
                where = world_of(every[i])
            except FunctionalizeError:  # the error of this point, when it is planned
                where = of(every[i], WORLD_KEYS)
            model = self.functions.of_model(every[i])
            return rank("world", where), rank("model", where, model), i

        return sorted(range(len(every)), key=key)

    def at(self, point: Point, timed: bool = True) -> Plan:
        """Plan one point. timed: whether its figures are wanted, or its memory alone, for which fewer are found."""
        start = time.perf_counter()
        try:
            with only_young_collections():
                return self._planned(point, self._settled(point), start, timed)
        except Exception as error:
            self.close()
            return Plan(point, error=in_short(error), cause=error)

    def ranks(self, point: Point, timed: bool = True) -> list[Plan]:
        """Plan one point; with `stages`, on every rank that messages lead to. timed: as of `at`."""
        if not self.stages:
            return [self.at(point, timed)]
        found: dict[int, Plan] = {}
        left = [int(point.get("rank", 0))]
        while left:
            rank = left.pop()
            found[rank] = self.at({**point, "rank": rank}, timed)
            left += sorted(found[rank].partners - {*found, *left}, reverse=True)
        return [found[rank] for rank in sorted(found)]

    @contextmanager
    def searching(self) -> Iterator[Planner]:
        """A `with` in which `at` may be called; closes the world at its end."""
        try:
            yield self
        finally:
            self.close()

    def close(self) -> None:
        """Leave the world that is open, if any."""
        now, self._open = self._open, None
        if now is not None:
            now.built = now.captured = None
            now.manager.__exit__(None, None, None)
            gc.collect()  # models are in reference cycles and refer to destroyed process groups

    def _settled(self, point: Point) -> _Open:
        """The world, model and captured step for a point; those of the last point are used again if they are equal."""
        where = world_of(point)
        key = repr(where)
        if self._open is None or self._open.key != key:
            self.close()
            size, mesh = where.pop("world", None), where.pop("mesh", None)
            manager = world(size if size is not None or mesh is not None else 1, mesh, **where)
            self._open = _Open(key, manager, manager.__enter__())
        now, model_key = self._open, repr(self.functions.of_model(point))
        if now.captured is None or now.model_key != model_key:
            if now.captured is not None:
                now.built = now.captured = None
                gc.collect()
            now.built = self.functions.built(point)
            now.captured = capture(self.functions.step, memory=True, on_uncapturable="raise")
            now.model_key = model_key
        return now

    def _planned(self, point: Point, now: _Open, start: float, timed: bool) -> Plan:
        assert now.captured is not None
        step = now.captured
        made, args, kwargs = self.functions.call(now.built, point)
        step.forget()
        machine = machine_of(point.get("machine"), now.world.target.name)
        conf = point.get("alloc_conf") or ""
        try:
            captured, why = settled(step, args, kwargs), step.explain()
        except UncapturableError as error:
            captured, why = None, str(error)
        if captured is None:
            noted = record_memory(self.functions.step)
            noted(*args, **kwargs)
            memory = without_program(noted, machine, Settings.parse(conf), now.world)
            reason = self._reasons.setdefault(without_numbers(why), " ".join(why.split()))
            remarks = [
                "no program was made, so time and traffic are not known; the step cannot be captured: "
                + reason
            ]
            return self._plan(point, now, start, remarks + offloaded(now.built, memory), memory)
        recorded, program, _ = captured
        if not timed:
            members = members_of(program)
            memory = memory_of(program, recorded, machine, members, conf)
            partners = partners_of(program, members) if self.stages else set()
            return self._plan(point, now, start, [], memory, partners)
        if point.get("passes"):
            from functionalize import passes  # here, as `passes` imports `functionalize`

            program = passes.run(program, point["passes"])
        items = items_of(made, now.built, now.world.size)
        replay = bool(point.get("passes"))
        figures = Figures.of(program, recorded, machine, conf, items, replay, now.world.rank)
        _ = figures.row  # computed now: process groups exist only inside the world
        remarks = idle_dimensions(now.world, figures.members)
        remarks += offloaded(now.built, figures.memory)
        return self._plan(point, now, start, remarks, figures, figures.partners)

    def _plan(
        self,
        point: Point,
        now: _Open,
        start: float,
        remarks: list[str],
        found: Figures | Memory,
        partners: Set[int] = frozenset(),
    ) -> Plan:
        """The plan of a point. found: its figures; its memory alone if it has no program."""
        choices, assumed = now.world.choices.rows, dict(now.world.assumed)
        figures = found if isinstance(found, Figures) else None
        memory = found.memory if isinstance(found, Figures) else found
        remarks += [memory.uncounted] if memory.uncounted else []
        seconds = time.perf_counter() - start
        recorded = None if figures is not None else memory
        return Plan(
            point,
            figures,
            choices,
            assumed,
            seconds,
            remarks=remarks,
            recorded=recorded,
            partners=partners,
        )


def items_of(made: Any, built: Any, size: int) -> Items | None:
    """What a rank trains on: the tokens of the first tensor of integers that `inputs` returned, else its samples.

    Ranks of a world of `size` that FSDP2 does not spread the batch over, as those of tensor parallelism, share them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors:
        return None
    groups = (group for root in modules_of(built) for group in fsdp_groups(root))
    first = next(groups, None)
    ranks = max(size // first.mesh_info.mesh.size(), 1) if first is not None else 1
    for each in tensors:
        if each.dim() >= 2 and not each.is_floating_point():
            return Items(each.numel(), "tokens", ranks, size)
    return Items(tensors[0].shape[0], "samples", ranks, size)


def idle_dimensions(world: World, members: Mapping[str, Sequence[int]]) -> list[str]:
    """Remarks: each dimension of a world's mesh over which nothing is communicated; a mesh that no group follows.

    members: process group -> its ranks, of the groups in which the program communicates.
    """
    mesh, found = world.mesh, []
    places = itertools.product(*map(range, mesh.shape))
    place = dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))
    names = mesh.mesh_dim_names or range(len(mesh.shape))
    for dimension, (name, length) in enumerate(zip(names, mesh.shape, strict=True)):
        spans = (
            len({place[rank][dimension] for rank in each if rank in place}) > 1
            for each in members.values()
        )
        if length > 1 and not any(spans):
            where = f" over the dimension `{name}` of the mesh" if mesh.mesh_dim_names else ""
            found.append(
                f"nothing is sharded or communicated{where}: {'its' if where else 'all'} {length:,} ranks do the same"
            )
    several = sum(length > 1 for length in mesh.shape) > 1
    if several and members and all(len(ranks) == world.size for ranks in members.values()):
        found.append("the mesh is not used: all that is communicated is over all ranks, as without")
    return found


def offloaded(built: Any, memory: Memory) -> list[str]:
    """A remark on tensors that `CPUOffloadPolicy` keeps in host memory, and on how their time is modelled."""
    if not memory.host_peak:
        return []
    groups = (group for root in modules_of(built) for group in fsdp_groups(root))
    unpinned = any(p.offload_to_cpu and not p.pin_memory for g in groups for p in g.fsdp_params)
    copies = "; copies of unpinned memory are modelled as of pinned memory" if unpinned else ""
    return [
        "offloaded to host memory, which has no limit here: the optimizer is modelled at the peak of a rank's part of "
        f"its channels{copies}"
    ]


def without_program(
    noted: RecordedMemory, machine: Machine, settings: Settings, world: World
) -> Memory:
    """The memory of the last call of a step that has no program; a communicator for each dimension of the mesh."""
    memory = noted.memory
    assert memory is not None
    communicators = sum(size > 1 for size in world.mesh.shape)
    return memory.on(declared(machine, communicators), settings)


def record(
    step: CapturedStep[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[StepMemory, Program, int]:
    """Call a step with `memory=True` until it is captured: its memory, its program, the number of calls.

    say: reports progress. Raises `PlanError` for a step that never is.
    """
    found = settled(step, args, kwargs, say)
    if found is None:
        raise PlanError(f"the step did not settle in {_MOST_CALLS} calls\n{step.explain()}")
    return found


def settled(
    step: CapturedStep[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[StepMemory, Program, int] | None:
    """The same, or None."""
    for call in range(1, _MOST_CALLS + 1):
        say(f"recording the step, call {call}")
        step(*args, **kwargs)
        if step.program is not None and step.memory is not None:
            return step.memory, step.program, call
    return None


def in_short(error: Exception) -> str:
    """The first line of an error; the name of its type, too, if it is none of this package's."""
    name = "" if isinstance(error, FunctionalizeError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0]
