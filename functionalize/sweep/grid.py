"""The points of a what-if grid, and who takes what of a point: the world, the model, the step, what is asked of both.

    points({"world": [64, 1024], "batch": [1, 2]})    ->  4 dicts, the first key slowest
    Wants.of(["layers"], build, inputs, step)            the keyword arguments that each function takes

    key                            goes to
    world, mesh, rank, target      `fz.world`
    reshard, checkpoint            every wrapped module but the root, unless `build` takes them itself
    passes, machine                the finished program
    any other                      `build`, `inputs` and `step`, whichever have a parameter of that name

Refuses (`PlanError`): a key that nobody takes, and a grid with an empty axis.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from functionalize.errors import PlanError

WORLD_KEYS = ("world", "mesh", "rank", "target")
MODEL_KEYS = ("reshard", "checkpoint")
PROGRAM_KEYS = ("passes", "machine")
Point = Mapping[str, Any]


def points(grid: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Every point of a grid; one axis is a key and its values, or one value."""
    axes = {key: _values(key, given) for key, given in (grid or {}).items()}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _values(key: str, given: Any) -> list[Any]:
    if key == "mesh" and isinstance(given, (tuple, Mapping)):  # one mesh, not several sizes
        return [given]
    if callable(getattr(given, "tolist", None)):  # an array
        given = given.tolist()
    if isinstance(given, (str, Mapping)) or not isinstance(given, (Sequence, Set, Iterator)):
        return [given]
    values = list(given)
    if not values:
        raise PlanError(f"the axis `{key}` of the grid has no values")
    return values


@dataclass(frozen=True, slots=True)
class Wants:
    """The names of a point that each function takes."""

    build: frozenset[str]
    inputs: frozenset[str]
    step: frozenset[str]

    @staticmethod
    def of(
        keys: Sequence[str],
        build: Callable[..., Any],
        inputs: Callable[..., Any] | None,
        step: Callable[..., Any],
    ) -> Wants:
        """Raises `PlanError` for a key that neither they nor the plan itself takes."""
        named = [key for key in keys if key not in (*WORLD_KEYS, *PROGRAM_KEYS)]
        wants = Wants(*(_taken(fn, named) for fn in (build, inputs, step)))
        lost = [
            key
            for key in named
            if key not in wants.build | wants.inputs | wants.step | set(MODEL_KEYS)
        ]
        if lost:
            own = ", ".join((*WORLD_KEYS, *MODEL_KEYS, *PROGRAM_KEYS))
            raise PlanError(
                f"nobody takes `{lost[0]}`: give `build`, `inputs` or `step` a parameter of that name "
                f"(the plan itself takes {own})"
            )
        return wants

    def model(self, point: Point) -> dict[str, Any]:
        """What the model depends on, besides its world."""
        return {key: point[key] for key in point if key in self.build or key in MODEL_KEYS}

    def call(self, point: Point) -> dict[str, Any]:
        """What a call of the step depends on, besides the model."""
        return {key: point[key] for key in point if key in self.inputs | self.step}


def of(point: Point, keys: frozenset[str] | Sequence[str]) -> dict[str, Any]:
    """The part of a point with these keys."""
    return {key: point[key] for key in point if key in keys}


def _taken(fn: Callable[..., Any] | None, keys: Sequence[str]) -> frozenset[str]:
    if fn is None:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(keys)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return frozenset(key for key in keys if key in named)
