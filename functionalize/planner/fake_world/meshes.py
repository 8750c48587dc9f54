"""Device meshes in a fake world: their tensors of ranks are real, and equal tuples of ranks are one object.

`fully_shard` makes a mesh for each module, of all ranks, and DTensor compares meshes: at 16,384 ranks the tuples of
127 meshes are 80 MB, and their comparisons a second.
Refuses (`WorldError`): a mesh of a tensor of ranks that is fake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.distributed import mesh_methods, share_ranks
from functionalize._compat.fakes import FakeTensor
from functionalize.errors import WorldError
from functionalize.util.patching import Patch


def patches(in_world: Callable[[], bool]) -> Iterator[Patch]:
    """(owner, name, replacement) per method of `DeviceMesh`. in_world: whether the calling thread is in a world."""
    known: dict[Any, Any] = {}
    for owner, name in mesh_methods():
        yield owner, name, _for_real(vars(owner)[name], known, in_world)


def _for_real(original: Any, known: dict[Any, Any], in_world: Callable[[], bool]) -> Any:
    """A method of `DeviceMesh`, run without modes in a world: the tensors of ranks that a mesh keeps stay real.

    known: the tuples of ranks that meshes share.
    """
    if isinstance(original, property):
        return property(_for_real(original.fget, known, in_world))
    if isinstance(original, staticmethod):
        return staticmethod(_for_real(original.__func__, known, in_world))

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not in_world():
            return original(*args, **kwargs)
        with disable_current_modes():
            if original.__name__ != "__init__":
                return original(*args, **kwargs)
            args, kwargs = _on_cpu(args, kwargs)
            original(*args, **kwargs)
            share_ranks(args[0], known)

    return method


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of `DeviceMesh.__init__` (`self` included) with the device "cpu" and a real tensor of ranks."""
    mesh = args[2] if len(args) > 2 else kwargs.get("mesh")
    if isinstance(mesh, FakeTensor):
        raise WorldError(
            "a mesh is made of a tensor of ranks, which holds none in a fake world: use "
            "torch.distributed.init_device_mesh(device, shape), or give DeviceMesh the ranks as a list"
        )
    ranks = kwargs.get("_rank_map")
    if isinstance(ranks, FakeTensor):  # `init_device_mesh` has just counted them
        kwargs = {**kwargs, "_rank_map": torch.arange(ranks.numel(), dtype=ranks.dtype)}
    if len(args) > 1:
        return (args[0], "cpu", *args[2:]), kwargs
    return args, {**kwargs, "device_type": "cpu"}
