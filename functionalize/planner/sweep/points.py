"""The points of a grid of settings, the functions of a script that receive their keys, and what is checked beforehand.

    points({"world": [64, 1024], "batch": [1, 2]})     4 dicts, the first key slowest
    functions = StepFunctions.of(["layers", "batch"], build, inputs, step)
    functions.keys["build"]                            {"layers"}: the keyword arguments that `build` accepts
    built = functions.built(point)                     with resharding and checkpointing, if the plan has these keys
    made, args, kwargs = functions.call(built, point)  the result of `inputs`; the arguments of `step`

    key                            passed to
    world, mesh, rank, target      `fz.world`
    reshard, checkpoint            every wrapped module but the root, unless `build` accepts them
    passes, machine, alloc_conf    the finished program
    any other                      those of `build`, `inputs` and `step` that have a parameter of that name

    check_functions(build, step, inputs, grid, fixed)  functions that are functions, keys with one value
    check_points(every, functions)                     values with which no point can be planned
    world_of(point), target_on("cuda", "a100")         the world of a point; a target with a machine's kernels

Refuses (`PlanError`): a grid with an empty axis, a key that no function accepts, arguments that do not fit a function.
Refuses before anything is recorded (also `WorldError`, `TargetError`, `AllocatorSettingsError`, `PassError`): a value
(of a rank, a mesh, a target, a machine, `reshard`, ...) if every point that has it is impossible. A point that is
impossible only beside the values of other keys has its error in its row.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from functionalize.errors import FunctionalizeError, PassError, PlanError
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.fake_world.target import Target, target_named
from functionalize.planner.fake_world.world import world_shape
from functionalize.planner.machines.files import machine_of
from functionalize.planner.sweep.changes import change, check_changes

WORLD_KEYS = ("world", "mesh", "rank", "target")
MODEL_KEYS = ("reshard", "checkpoint")
PROGRAM_KEYS = ("passes", "machine", "alloc_conf")
Point = Mapping[str, Any]


def points(grid: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Every point of a grid. grid: key -> its values (a sequence, a set, an iterator, an array), or one value."""
    axes = {key: _values(key, axis) for key, axis in (grid or {}).items()}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _values(key: str, axis: Any) -> list[Any]:
    if key == "mesh" and isinstance(axis, (tuple, Mapping)):  # one mesh, not several sizes
        return [axis]
    if callable(getattr(axis, "tolist", None)):  # an array
        axis = axis.tolist()
    if isinstance(axis, (str, Mapping)) or not isinstance(axis, (Sequence, Set, Iterator)):
        return [axis]
    values = list(axis)
    if not values:
        raise PlanError(f"the axis `{key}` of the grid has no values")
    return values


def of(point: Point, keys: frozenset[str] | Sequence[str]) -> dict[str, Any]:
    """The part of a point with these keys."""
    return {key: point[key] for key in point if key in keys}


# -- the functions of a script ---------------------------------------------------------------------


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a script. keys: name of a function -> the keys of points that it accepts by name."""

    build: Callable[..., Any]
    inputs: Callable[..., Any] | None
    step: Callable[..., Any]
    keys: Mapping[str, frozenset[str]]

    @staticmethod
    def of(
        keys: Sequence[str],
        build: Callable[..., Any],
        inputs: Callable[..., Any] | None,
        step: Callable[..., Any],
    ) -> StepFunctions:
        """Raises `PlanError` for a key that neither a function nor the plan itself accepts."""
        named = [key for key in keys if key not in (*WORLD_KEYS, *PROGRAM_KEYS)]
        every = {"build": build, "inputs": inputs, "step": step}
        accepted = {name: _accepted(function, named) for name, function in every.items()}
        known = frozenset(MODEL_KEYS).union(*accepted.values())
        unused = [key for key in named if key not in known]
        if unused:
            own = ", ".join((*WORLD_KEYS, *MODEL_KEYS, *PROGRAM_KEYS))
            raise PlanError(
                f"no function accepts `{unused[0]}`: give `build`, `inputs` or `step` a parameter of that name "
                f"(the plan itself accepts {own})"
            )
        return StepFunctions(build, inputs, step, accepted)

    def of_model(self, point: Point) -> dict[str, Any]:
        """The keys on which the model depends, besides those of its world."""
        return {key: point[key] for key in point if key in self.keys["build"] or key in MODEL_KEYS}

    @property
    def changing(self) -> list[str]:
        """The keys by which the plan changes a model, as `build` has no parameters of these names."""
        return [key for key in MODEL_KEYS if key not in self.keys["build"]]

    def built(self, point: Point) -> Any:
        """What `build` returns, changed by the keys of the plan."""
        kwargs = of(point, self.keys["build"])
        _check_call("build", self.build, (), kwargs)
        built = self.build(**kwargs)
        change(built, **of(point, self.changing))
        return built

    def call(self, built: Any, point: Point) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(what `inputs` returns, the arguments of `step`, its keyword arguments)."""
        made: Any = ()
        if self.inputs is not None:
            own = of(point, self.keys["inputs"])
            _check_call("inputs", self.inputs, (), own)
            made = self.inputs(**own)
        args, kwargs = arguments(built, made)
        kwargs |= of(point, self.keys["step"])
        _check_call("step", self.step, args, kwargs)
        return made, args, kwargs


def _accepted(fn: Callable[..., Any] | None, keys: Sequence[str]) -> frozenset[str]:
    if fn is None:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(keys)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return frozenset(key for key in keys if key in named)


def arguments(*objects: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call. A tuple is spread, a mapping becomes keyword arguments, any other object is one argument."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in objects:
        if isinstance(each, tuple):
            args += each
        elif isinstance(each, Mapping):
            kwargs |= each
        else:
            args.append(each)
    return tuple(args), kwargs


def _check_call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raises `PlanError` for arguments that do not fit the signature of a user's function."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
    except ValueError:  # a builtin may have no signature
        pass
    except TypeError as error:
        results = "the results of `build` and `inputs`, and " if name == "step" else ""
        raise PlanError(
            f"`{name}({', '.join(signature.parameters)})` cannot be called: {error}. Its arguments are {results}the "
            "keys of the plan that it has as parameters"
        ) from None


# -- what is checked before anything is recorded ---------------------------------------------------


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
