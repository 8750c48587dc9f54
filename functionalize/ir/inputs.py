"""Where a program's inputs come from: a source for each placeholder, resolved again at every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from functionalize.ir.epilogue import window
from functionalize.ir.ops import Geometry
from functionalize.util.unchanged import Unchanged


class Source(Protocol):
    """Where an input's value is found at every call.

    With a method `watched(call, facts) -> bool` it need not be looked up at every call, see `program/known_inputs.py`.
    """

    def resolve(self, call: Call) -> Any:
        """The current tensor (or constant); raises `LookupError` if it is not there any more."""
        ...


@dataclass(slots=True)
class Call:
    """One replay: the flat leaves of the arguments, and the inputs resolved so far.

    committed: whether the replay may have changed something. memo: what sources remember during the call.
    """

    leaves: Sequence[Any]
    inputs: list[Any]
    committed: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Argument:
    """A leaf of `(args, kwargs)`, or an inner tensor of a wrapper subclass (DTensor), at the path `attributes`."""

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
    """A tensor or object that the callable read from elsewhere than its arguments; the program keeps a reference."""

    value: Any

    def resolve(self, call: Call) -> Any:
        return self.value

    def watched(self, call: Call, facts: Unchanged) -> bool:
        return True


def watch(source: Any, call: Call, facts: Unchanged) -> bool:
    """Whether a source finds the same object as long as these facts hold, to which it may add some."""
    watched = getattr(source, "watched", None)
    return watched is not None and bool(watched(call, facts))


def chain_of(source: Any) -> Iterator[Any]:
    """A source, and those that it reads from: `.grad` of a parameter, the parameter."""
    while source is not None:
        yield source
        source = getattr(source, "of", None)


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One placeholder of the graph. nbytes: the size of its storage on entry."""

    name: str
    geometry: Geometry
    nbytes: int
    device: torch.device
    source: Source
