"""Where a program's inputs come from: a source for each placeholder, resolved again at every call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functionalize.ir.epilogue import window
from functionalize.ir.ops import Geometry


class Source(Protocol):
    """Where an input's tensor is found at every call."""

    def resolve(self, call: Call) -> Any:
        """The tensor (or constant) now; raises `LookupError` if it is gone."""
        ...


@dataclass(slots=True)
class Call:
    """One replay: the flat leaves of the arguments, and the inputs resolved so far."""

    leaves: Sequence[Any]
    inputs: list[Any]


@dataclass(frozen=True, slots=True)
class Argument:
    """A leaf of `(args, kwargs)`; `attributes` lead into a wrapper subclass (DTensor)."""

    leaf: int
    attributes: tuple[str, ...] = ()

    def resolve(self, call: Call) -> Any:
        value = call.leaves[self.leaf]
        for name in self.attributes:
            value = getattr(value, name)
        return value


@dataclass(frozen=True, slots=True)
class WholeStorage:
    """The whole storage of another input, as one flat tensor."""

    input: int
    geometry: Geometry

    def resolve(self, call: Call) -> Any:
        return window(call.inputs[self.input], self.geometry)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A tensor or object that the callable found by itself, held by the program."""

    value: Any

    def resolve(self, call: Call) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One placeholder. `nbytes`: bytes of its storage on entry."""

    name: str
    geometry: Geometry
    nbytes: int
    device: torch.device
    source: Source
