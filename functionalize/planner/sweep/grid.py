"""The points of a grid of settings, and which function receives which key of a point.

    points({"world": [64, 1024], "batch": [1, 2]})    ->  4 dicts, the first key slowest
    AcceptedKeys.of(["layers"], build, inputs, step)     the keyword arguments that each function accepts

    key                            passed to
    world, mesh, rank, target      `fz.world`
    reshard, checkpoint            every wrapped module but the root, unless `build` accepts them
    passes, machine, alloc_conf    the finished program
    any other                      those of `build`, `inputs` and `step` that have a parameter of that name

Refuses (`PlanError`): a key that no function accepts, and a grid with an empty axis.
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


@dataclass(frozen=True, slots=True)
class AcceptedKeys:
    """The keys of a point that each function accepts as keyword arguments."""

    build: frozenset[str]
    inputs: frozenset[str]
    step: frozenset[str]

    @staticmethod
    def of(
        keys: Sequence[str],
        build: Callable[..., Any],
        inputs: Callable[..., Any] | None,
        step: Callable[..., Any],
    ) -> AcceptedKeys:
        """Raises `PlanError` for a key that neither a function nor the plan itself accepts."""
        named = [key for key in keys if key not in (*WORLD_KEYS, *PROGRAM_KEYS)]
        accepted = AcceptedKeys(*(_accepted(fn, named) for fn in (build, inputs, step)))
        unused = [
            key
            for key in named
            if key not in accepted.build | accepted.inputs | accepted.step | set(MODEL_KEYS)
        ]
        if unused:
            own = ", ".join((*WORLD_KEYS, *MODEL_KEYS, *PROGRAM_KEYS))
            raise PlanError(
                f"no function accepts `{unused[0]}`: give `build`, `inputs` or `step` a parameter of that name "
                f"(the plan itself accepts {own})"
            )
        return accepted

    def model(self, point: Point) -> dict[str, Any]:
        """The keys on which the model depends, besides those of its world."""
        return {key: point[key] for key in point if key in self.build or key in MODEL_KEYS}

    def call(self, point: Point) -> dict[str, Any]:
        """The keys on which a call of the step depends, besides those of the model."""
        return {key: point[key] for key in point if key in self.inputs | self.step}


def of(point: Point, keys: frozenset[str] | Sequence[str]) -> dict[str, Any]:
    """The part of a point with these keys."""
    return {key: point[key] for key in point if key in keys}


def _accepted(fn: Callable[..., Any] | None, keys: Sequence[str]) -> frozenset[str]:
    if fn is None:
        return frozenset()
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(keys)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return frozenset(key for key in keys if key in named)
