"""What a plan is asked for, checked before anything is recorded.

    check_functions(build, step, inputs, grid, fixed)      functions that are functions, keys with one value
    check_points(every, functions)                          values with which no point can be planned
    world_of(point), target_on("cuda", "a100")             the world of a point; a target with a machine's kernels

Refuses (`PlanError`, `WorldError`, `TargetError`, `AllocatorSettingsError`, `PassError`): a value (of a rank, a mesh, a
target, a machine, `reshard`, ...) if every point that has it is impossible. A point that is impossible only beside the
values of other keys has its error in its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from functionalize.errors import FunctionalizeError, PassError, PlanError
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.fake_world.target import Target, target_named
from functionalize.planner.fake_world.world import world_shape
from functionalize.planner.machines.files import machine_of
from functionalize.planner.sweep.changes import check_changes
from functionalize.planner.sweep.functions import StepFunctions
from functionalize.planner.sweep.grid import WORLD_KEYS, Point, of


def check_functions(
    build: Any, step: Any, inputs: Any, grid: Any, fixed: Mapping[str, Any], error: type = PlanError
) -> None:
    """Raises `error` for arguments of the wrong kind."""
    for name, function in (("build", build), ("step", step), ("inputs", inputs)):
        if not callable(function) and not (name == "inputs" and function is None):
            raise error(f"`{name}` is a function, not {type(function).__name__}")
    if grid is not None and not isinstance(grid, Mapping):
        raise error(f"a grid maps keys to their values, and this is a {type(grid).__name__}")
    twice = sorted(fixed.keys() & (grid or {}).keys())
    if twice:
        raise error(f"`{twice[0]}` has one value and is in the grid, too: leave one out")


def check_points(every: Sequence[Point], functions: StepFunctions) -> None:
    """Raises the error of a value with which no point can be planned."""
    errors = [_error(point, functions) for point in every]
    for key in every[0]:
        of_value: dict[str, list[FunctionalizeError | None]] = {}
        for point, error in zip(every, errors, strict=True):
            of_value.setdefault(repr(point[key]), []).append(error)
        for found in of_value.values():
            if found[0] is not None and None not in found:
                raise found[0]


def _error(point: Point, functions: StepFunctions) -> FunctionalizeError | None:
    """Why a point cannot be planned, as far as its values alone tell."""
    try:
        where = world_of(point)
        size, mesh = where.get("world"), where.get("mesh")
        size = 1 if size is None and mesh is None else size
        _, _, ranks = world_shape(size, mesh, where.get("rank", 0))
        check_changes(ranks=ranks, **of(point, functions.changing))
        Settings.parse(point.get("alloc_conf") or "")
        check_pipeline(point.get("passes"))
    except FunctionalizeError as error:
        return error
    return None


def check_pipeline(pipeline: Any) -> None:
    """Raises `PassError` for the text of a pipeline that cannot be read, or that would change nothing in a plan."""
    if isinstance(pipeline, str):
        from functionalize.passes.pipeline import parse  # here, as `passes` imports `functionalize`

        if any(each.name == "offload" for each in parse(pipeline)):
            raise PassError(
                "the pass `offload` cannot be planned: it moves values of an accelerator, and the tensors of a fake "
                "world are on the CPU. Leave it out, or use it in `fz.capture` on a GPU; plan CPUOffloadPolicy"
            )


def world_of(point: Point) -> dict[str, Any]:
    """The arguments of the world of a point; its target is that of the machine. Raises `PlanError`, `TargetError`."""
    target = target_on(point.get("target", "cuda"), point.get("machine"))
    return {**of(point, WORLD_KEYS), "target": target}


def target_on(target: str | Target, machine: Any) -> Target:
    """The target with the capability and the attention of a machine; your own `Target` stays as it is."""
    if isinstance(target, Target):
        return target
    named = target_named(target)
    chosen = machine_of(machine, named.name)
    if named.name == "cpu" or chosen.capability is None:
        return named
    return replace(named, capability=chosen.capability, attention=chosen.attention)
