"""Process groups in a saved program: by the device mesh that has them, or by their ranks.

    described = describe(["0", "5"], names)    [{"ranks": [0, 1], "backend": "gloo", ...}, ...]
    names_here(described, names)               ["0", "7"]

A group's name is a counter of the groups that a process has made, so it is not saved. A group of a reachable device
mesh is resolved by that mesh. Any other group is resolved to one with the same ranks and backend: the one
with the same index among these, in order of creation, which is equal on all ranks.
Refusal: `LoadError` for ranks that have no group here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from functionalize._compat.distributed import group_of_name, process_groups
from functionalize.errors import LoadError
from functionalize.saving.object_names import Names

Json = Any


def describe(groups: Sequence[str], names: Names) -> list[Json]:
    """A description of each group, by which `names_here` finds it in another process."""
    found = []
    for name in groups:
        group = group_of_name(name)
        alike = [g.group_name for g in _alike(_ranks(group), dist.get_backend(group))]
        at = alike.index(name) if name in alike else 0
        home = next(((m, dim) for m, dim, g in _of_meshes(names) if g == name), (None, 0))
        found.append(
            {
                "name": name,
                "ranks": _ranks(group),
                "backend": dist.get_backend(group),
                "mesh": home[0],
                "dimension": home[1],
                "place": at,
            }
        )
    return found


def names_here(described: Sequence[Json], names: Names) -> list[str]:
    """The name of each group in this process; raises `LoadError`."""
    return [_name_here(group, names) for group in described]


def _name_here(described: Json, names: Names) -> str:
    ranks, backend = described["ranks"], described["backend"]
    for mesh, dim, name in _of_meshes(names):
        if (mesh, dim) == (described["mesh"], described["dimension"]):
            group = group_of_name(name)
            if _ranks(group) == ranks and dist.get_backend(group) == backend:
                return name
    alike = _alike(ranks, backend)
    if not alike:
        raise LoadError(f"communicates in a {backend} group of ranks {ranks}, which is not there")
    return str(alike[min(described["place"], len(alike) - 1)].group_name)


def _ranks(group: Any) -> list[int]:
    return list(dist.get_process_group_ranks(group))


def _alike(ranks: list[int], backend: str) -> list[Any]:
    groups = process_groups()
    return [g for g in groups if _ranks(g) == ranks and dist.get_backend(g) == backend]


def _of_meshes(names: Names) -> Iterator[tuple[str, int, str]]:
    """The groups of meshes that have names, as mesh, dimension and name of the group."""
    for name, mesh in names.meshes():
        if mesh.get_coordinate() is not None:
            for dim in range(mesh.ndim):
                yield name, dim, str(mesh.get_group(dim).group_name)
