"""Where a program's inputs come from: a source for each placeholder, resolved again at every call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from functionalize.ir.epilogue import window
from functionalize.ir.ops import Geometry
from functionalize.util.reader import READER, Reader


class Source(Protocol):
    """Where an input's value is found at every call.

    It reads Python by the reader of the call. If what it finds is what a read of it has returned, it need not be looked
    up at every call, see `program/known_inputs.py`.
    """

    def resolve(self, call: Call) -> Any:
        """The current tensor (or constant); raises `LookupError` if it is not there any more."""
        ...


@dataclass(slots=True)
class Call:
    """One replay: the flat leaves of the arguments, and the inputs resolved so far.

    committed: whether the replay may have changed something. memo: what sources remember during the call.
    owners: of places in which the replay leaves tensors, if they are known.
    freed: the inputs that nothing but the graph reads: the graph frees each after its last use.
    reader: by which guards and sources read Python.
    """

    leaves: Sequence[Any]
    inputs: list[Any]
    committed: bool = False
    memo: dict[Any, Any] = field(default_factory=dict)
    owners: Owners | None = None
    freed: Sequence[int] = ()
    reader: Reader = READER

    def take_inputs(self) -> list[Any]:
        """The inputs for the graph, without those that it frees from now on."""
        inputs = list(self.inputs)
        for i in self.freed:
            self.inputs[i] = None
        return inputs


class Owners:
    """Places that are attributes of objects known since an earlier call: hundreds of them are assigned at once.

    known: place -> the object, the name of its attribute.
    """

    def __init__(self, known: Mapping[Any, tuple[Any, str]]) -> None:
        self._known = known
        self._lists: dict[int, tuple[Sequence[Any], list[tuple[Any, str]]]] = {}

    def assign(self, places: Sequence[Any], values: Sequence[Any]) -> bool:
        """Assign to each place its value. False: some place is not known, and nothing was assigned."""
        if id(places) not in self._lists:
            found = [self._known[place] for place in places if place in self._known]
            self._lists[id(places)] = places, found
        found = self._lists[id(places)][1]
        if len(found) != len(places):
            return False
        for (owner, name), value in zip(found, values, strict=True):
            setattr(owner, name, value)
        return True


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
        return call.reader.constant(self.value)


def chain_of(source: Any) -> Iterator[Any]:
    """A source, and those that it reads from: `.grad` of a parameter, the parameter."""
    while source is not None:
        yield source
        source = getattr(source, "of", None)


# Its own is raised, as by any write; or stays, as eager's did; or is raised with that of the tensor around it.
VERSIONS = ("raised", "kept", "raised around")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One placeholder of the graph.

    nbytes: the size of its storage on entry. version: what a replay that writes to it does to version counters, one of
    `VERSIONS`.
    """

    name: str
    geometry: Geometry
    nbytes: int
    device: torch.device
    source: Source
    version: str = "raised"
