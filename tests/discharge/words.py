"""An emitter whose values are words, for tests of the memory model: `slice(a, 0, 1, 3)`."""

from __future__ import annotations

import operator
from typing import Any

import torch

from functionalize.discharge.rules.views import straight
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import Emitter
from functionalize.ir.ops import Geometry, contiguous_geometry

CPU = torch.device("cpu")


class Words(Emitter):
    """`calls` counts what was emitted."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self, target: Any, *args: Any, **kwargs: Any) -> str:
        self.calls += 1
        name = (
            target._schema.name.split("::")[-1] if hasattr(target, "_schema") else target.__name__
        )
        return f"{name}({', '.join([*map(str, args), *(f'{k}={v}' for k, v in kwargs.items())])})"

    def part(self, values: str, index: int) -> str:
        return self.call(operator.getitem, values, index)

    def empty(self, geometry: Geometry, device: torch.device) -> str:
        return f"empty({list(geometry.size)})"

    def whole(self, serial: int, flat: Geometry) -> str:
        return f"whole_{serial}({list(flat.size)})"


def floats(*size: int, offset: int = 0) -> Geometry:
    """A row-major float32 geometry."""
    return contiguous_geometry(size, torch.float32, offset)


def storage_of(
    root: Geometry, nbytes: int | None = None, external: bool = True
) -> FunctionalStorage:
    """The record of a storage first seen as `root`; its contents are `a`."""
    nbytes = root.end if nbytes is None else nbytes
    return FunctionalStorage(0, root, CPU, "a", nbytes, "a", straight, external)
