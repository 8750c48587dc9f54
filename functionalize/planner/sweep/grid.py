"""The points of a grid of settings, and the keys of a plan itself.

    points({"world": [64, 1024], "batch": [1, 2]})    ->  4 dicts, the first key slowest

    key                            passed to
    world, mesh, rank, target      `fz.world`
    reshard, checkpoint            every wrapped module but the root, unless `build` accepts them
    passes, machine, alloc_conf    the finished program
    any other                      those of `build`, `inputs` and `step` that have a parameter of that name

Refuses (`PlanError`): a grid with an empty axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
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


def of(point: Point, keys: frozenset[str] | Sequence[str]) -> dict[str, Any]:
    """The part of a point with these keys."""
    return {key: point[key] for key in point if key in keys}
