"""`fz.plan`: a training step on other machines, batches and meshes, without any of them.

    def build(layers=32):                                 model and optimizer, as on real ranks
        model = ...; fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    def inputs(batch=1): return (torch.randint(0, 1000, (batch, 8192)),)

    def step(model, optimizer, tokens): ...               one training step

    found = fz.plan(build, step, inputs=inputs, grid={"world": [64, 1024], "batch": [1, 2, 4]})
    print(found.text())
    found.largest("batch", limit=80e9)                    the largest batch that fits

`step` is called with what `build` returns (a tuple is spread, a dict becomes keyword arguments), then what `inputs`
returns, then what it takes of the point by name. Each point is a capture in a fake world (`fake_world/world.py`).
What one point shares with the last is used again: the world, the model and optimizer that were built, and what torch
has cached of shapes; a point with another batch is one recorded call.
Invariant: nothing is left behind, and a point comes out the same whatever was planned before it.
Refuses (`PlanError`): keys that nobody takes, `build`s that return no module where one is needed.
"""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from functionalize._compat.graphs import pytree
from functionalize._compat.modules import checkpoint_module
from functionalize.entry import capture
from functionalize.errors import FunctionalizeError, PlanError
from functionalize.fake_world.world import World, world
from functionalize.fsdp.objects import fsdp_states
from functionalize.program.program import Program
from functionalize.step.captured_step import CapturedStep
from functionalize.step.step_memory import StepMemory
from functionalize.sweep.grid import WORLD_KEYS, Point, Wants, of, points
from functionalize.sweep.summary import Figures, Plan, Sweep
from functionalize.util.gc_pause import only_young_collections

_MOST_CALLS = 6  # until a step has settled; `capture` refuses before
Progress = Callable[[int, int, Point], None]


def plan(
    build: Callable[..., Any],
    step: Callable[..., Any],
    grid: Mapping[str, Any] | None = None,
    *,
    inputs: Callable[..., Any] | None = None,
    progress: Progress | None = None,
    **fixed: Any,
) -> Sweep:
    """Plan a step at every point of a grid.

    grid: key -> values; fixed: keys with one value. Keys of the plan itself: `world` (ranks), `mesh` (shape or names),
    `rank`, `target`, `reshard` (`reshard_after_forward` of every wrapped module but the root), `checkpoint`
    (activation checkpointing of the same), `passes` (a pipeline for the program), `machine` (a name or a
    `costs.Machine`); every other one goes to the functions that have a parameter of its name.
    progress: called with (points done, points, the next point).
    A point that fails has its error in place of figures; if all do, the first error is raised.
    Raises `PlanError` for a grid that does not fit the functions.
    """
    _check(build, step, inputs, grid, fixed)
    axes = {**{key: [value] for key, value in fixed.items()}, **(grid or {})}
    planner = Planner(build, step, inputs, Wants.of(list(axes), build, inputs, step))
    given = list(points(axes))
    found: dict[int, Plan] = {}
    with planner.searching():
        for i in planner.order(given):
            if progress is not None:
                progress(len(found), len(given), given[i])
            found[i] = planner.at(given[i])
    plans = [found[i] for i in range(len(given))]
    if all(each.error is not None for each in plans):
        assert plans[0].cause is not None
        raise plans[0].cause
    return Sweep(plans, tuple(axes), planner.searching)


def _check(build: Any, step: Any, inputs: Any, grid: Any, fixed: Mapping[str, Any]) -> None:
    """Raises `PlanError` for what is no plan."""
    for name, function in (("build", build), ("step", step), ("inputs", inputs)):
        if not callable(function) and not (name == "inputs" and function is None):
            raise PlanError(f"`{name}` is a function, not {type(function).__name__}")
    if grid is not None and not isinstance(grid, Mapping):
        raise PlanError(f"a grid maps keys to their values, and this is a {type(grid).__name__}")
    twice = sorted(fixed.keys() & (grid or {}).keys())
    if twice:
        raise PlanError(f"`{twice[0]}` has one value and is in the grid, too: leave one out")


@dataclass(eq=False)
class _Open:
    """A world that is open, the model in it, its captured step."""

    key: Any
    manager: Any
    world: World
    model_key: Any = None
    built: Any = None
    captured: CapturedStep | None = None


class Planner:
    """Plans points one after the other, and keeps what the next one may use."""

    def __init__(
        self,
        build: Callable[..., Any],
        step: Callable[..., Any],
        inputs: Callable[..., Any] | None,
        wants: Wants,
    ) -> None:
        self._build, self._step, self._inputs, self._wants = build, step, inputs, wants
        self._open: _Open | None = None

    def order(self, given: Sequence[Point]) -> list[int]:
        """Points with the same world together, and in these those with the same model."""
        seen: dict[Any, int] = {}

        def rank(*key: Any) -> int:
            return seen.setdefault(repr(key), len(seen))

        def key(i: int) -> tuple[int, int, int]:
            where = of(given[i], WORLD_KEYS)
            return rank("world", where), rank("model", where, self._wants.model(given[i])), i

        return sorted(range(len(given)), key=key)

    def at(self, point: Point) -> Plan:
        """Plan one point."""
        start = time.perf_counter()
        try:
            with only_young_collections():
                return self._planned(point, self._settled(point), start)
        except Exception as error:
            self.close()
            return Plan(point, error=_in_short(error), cause=error)

    @contextmanager
    def searching(self) -> Iterator[Planner]:
        """Plan more points, and close at the end."""
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
            gc.collect()  # models are cycles, which lead to groups that are no more

    def _settled(self, point: Point) -> _Open:
        """The world and model of a point: those that are open if they are the same."""
        key = repr(of(point, WORLD_KEYS))
        if self._open is None or self._open.key != key:
            self.close()
            size, mesh = point.get("world"), point.get("mesh")
            given = {key: point[key] for key in ("rank", "target") if key in point}
            manager = world(size if size is not None or mesh is not None else 1, mesh, **given)
            self._open = _Open(key, manager, manager.__enter__())
        now, wanted = self._open, self._wants.model(point)
        if now.captured is None or now.model_key != repr(wanted):
            if now.captured is not None:
                now.built = now.captured = None
                gc.collect()
            now.built = self._built(point, wanted)
            now.captured = capture(self._step, memory=True)
            now.model_key = repr(wanted)
        return now

    def _built(self, point: Point, wanted: Mapping[str, Any]) -> Any:
        built = called("build", self._build, (), of(point, self._wants.build))()
        left = {key: value for key, value in wanted.items() if key not in self._wants.build}
        if left:
            change(built, **left)
        return built

    def _planned(self, point: Point, now: _Open, start: float) -> Plan:
        assert now.captured is not None
        step, wants = now.captured, self._wants
        made: Any = ()
        if self._inputs is not None:
            made = called("inputs", self._inputs, (), of(point, wants.inputs))()
        args, kwargs = arguments(now.built, made)
        kwargs |= of(point, wants.step)
        called("step", self._step, args, kwargs)
        step.forget()
        recorded, program, _ = record(step, args, kwargs)
        if point.get("passes"):
            import passes  # the arrow of imports points from passes to here

            program = passes.run(program, point["passes"])
        figures = Figures.of(program, recorded, now.world.target.name, point.get("machine"))
        _ = figures.row  # groups are looked up in the world
        choices, assumed = now.world.choices.rows, dict(now.world.assumed)
        return Plan(point, figures, choices, assumed, time.perf_counter() - start)


def arguments(built: Any, made: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the step: tuples are spread, dicts are keyword arguments, else one argument."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in (built, made):
        if isinstance(each, tuple):
            args += each
        elif isinstance(each, dict):
            kwargs |= each
        else:
            args.append(each)
    return tuple(args), kwargs


def called(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """The call of a user's function; raises `PlanError` for arguments that do not fit what it takes."""
    try:
        takes = inspect.signature(function)
        takes.bind(*args, **kwargs)
    except ValueError:  # one without a signature
        pass
    except TypeError as error:
        given = "what `build` and `inputs` return, and " if name == "step" else ""
        raise PlanError(
            f"`{name}({', '.join(takes.parameters)})` cannot be called: {error}. It is given {given}the keys of the "
            "plan that it takes by name"
        ) from None
    return functools.partial(function, *args, **kwargs)


def record(
    step: CapturedStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[StepMemory, Program, int]:
    """Call a step with `memory=True` until it is recorded: its memory, its program, the number of calls."""
    for call in range(1, _MOST_CALLS + 1):
        say(f"recording the step, call {call}")
        step(*args, **kwargs)
        if step.program is not None and step.memory is not None:
            return step.memory, step.program, call
    raise PlanError(f"the step did not settle in {_MOST_CALLS} calls\n{step.explain()}")


def _in_short(error: Exception) -> str:
    name = "" if isinstance(error, FunctionalizeError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0]


# -- what is asked of a model that was built without it --------------------------------------------


def change(built: Any, reshard: Any = None, checkpoint: Any = None) -> None:
    """Reshard after forward or not, and checkpoint activations, in every wrapped module but the root.

    False asks nothing of a model that has no such module.
    """
    for name, value in (("reshard", reshard), ("checkpoint", checkpoint)):
        if value not in (None, True, False):
            raise PlanError(
                f"`{name}` is True or False, not {value!r}: for anything else give `build` a parameter of that name"
            )
    wrapped = list(_wrapped(built))
    asks = reshard or checkpoint or (reshard is not None and not _roots(built))
    if asks and not wrapped:
        raise PlanError(
            "`reshard` and `checkpoint` change the modules that `build` wraps by `fully_shard` below a root, and it "
            "returned none: give `build` a parameter of that name, or return the model"
        )
    for module in wrapped:
        if reshard is not None:
            module.set_reshard_after_forward(bool(reshard), recurse=False)
        if checkpoint:
            checkpoint_module(module)


def _roots(built: Any) -> list[nn.Module]:
    return [leaf for leaf in pytree.tree_leaves(built) if isinstance(leaf, nn.Module)]


def _wrapped(built: Any) -> Iterator[Any]:
    for root in _roots(built):
        for state in fsdp_states(root):
            if root not in state._modules:
                yield from state._modules
