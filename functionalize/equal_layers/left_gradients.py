"""The gradients that a step leaves on parameters of layers that a short run of it leaves out.

    left = LeftGradients(layers, storages)      after a whole run: where its gradients are
    left.check()                                after a short run: whether its gradients are as these
    left.leave(made, storages)                  puts gradients on the parameters, on the storages that the step has made

A step that empties its gradients at its start leaves them behind at its end. The next call frees them.
Raises `Unlike` if the gradients of layers that are left out are not like those of the layer that stands in for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize.equal_layers.layers import FIRST, EqualLayers
from functionalize.equal_layers.recorded_run import Unlike
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.recorder.storage_table import StorageTable
from functionalize.util.tensor_wrappers import plain_tensors


class _Gradient(NamedTuple):
    """One gradient of a whole run. parameter: of a layer that is left out; like: of its stand-in."""

    parameter: Tensor
    like: Tensor
    storage: int
    geometry: Geometry


class LeftGradients:
    """The gradients that a whole run has left on parameters of layers that are left out."""

    def __init__(self, layers: EqualLayers, storages: StorageTable) -> None:
        self._found: list[_Gradient] = []
        for run in layers.runs:
            like = list(run.modules[FIRST - 1].parameters())
            for place in run.left_out:
                for parameter, other in zip(run.modules[place].parameters(), like, strict=True):
                    if parameter.grad is None:
                        continue
                    inner = plain_tensors(parameter.grad)
                    serial = storages.serial_of(inner[0]) if len(inner) == 1 else None
                    if serial is None:
                        raise Unlike("gradients are no plain tensors")
                    self._found.append(_Gradient(parameter, other, serial, geometry_of(inner[0])))

    def leave(self, made: Mapping[int, int], storages: StorageTable) -> None:
        """Put gradients on the parameters.

        made: of the storages that the whole run has made, the numbers in this recording.
        """
        bases: dict[int, Tensor] = {}
        for parameter, like, serial, geometry in self._found:
            number = made.get(serial)
            if number is None:  # it was there before the step
                continue
            dtype = geometry.dtype
            if number not in bases:
                count = storages.infos[number].original_nbytes // dtype.itemsize
                bases[number] = torch.empty(count, dtype=dtype)  # of a fake world, on the CPU
            size, stride, offset = geometry[:3]
            local = bases[number].as_strided(size, stride, offset)
            storages.hold(number, local)
            parameter.grad = _as(like.grad, local)

    def check(self) -> None:
        """Raise if the short run has left other gradients than the whole one."""
        for _, like, _, geometry in self._found:
            inner = plain_tensors(like.grad) if like.grad is not None else []
            if len(inner) != 1 or geometry_of(inner[0]) != geometry:
                raise Unlike("the step leaves other gradients on layers that stand in for others")


def _as(like: Any, local: Tensor) -> Tensor:
    """A gradient as another one, with other contents."""
    if type(like) is type(local):
        return local
    names, context = like.__tensor_flatten__()
    parts = {name: getattr(like, name) for name in names}  # other than tensors, too
    inner = {n: local if isinstance(part, Tensor) else part for n, part in parts.items()}
    kind: Any = type(like)
    made: Tensor = kind.__tensor_unflatten__(inner, context, like.shape, like.stride())
    return made
