"""A guard on aliases: a program has one input for all tensors on a storage, so every place that held one is checked.

    head.weight is embed.weight        one input, `embed.weight`
    head.weight = Parameter(...)       `head.weight` no longer shares a storage: the guard fails

Invariant: through one input the program reads and writes the same storage as the step does through every alias.
Places that other guards compare by identity (parameters of optimizers and of FSDP2) are not checked twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from functionalize.fsdp.objects import FSDPTensor
from functionalize.ir.inputs import Call, InputSpec, Source
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.state.sources import Inner, ModuleTensor, OptimizerParameter


class AliasPlace(NamedTuple):
    """A place that holds a tensor. tensor: the `address` of the tensor, valid during the recording."""

    name: str
    source: Source
    geometry: Geometry
    tensor: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedGuard:
    """Every other alias of an input still has the same geometry on the same storage.

    places: for each alias, its name, its source, the index of the input, its geometry.
    """

    places: tuple[tuple[str, Source, int, Geometry], ...]
    is_read_by_reader: ClassVar[bool] = True

    @staticmethod
    def of(
        inputs: Sequence[InputSpec], places: Sequence[Sequence[AliasPlace]]
    ) -> tuple[SharedGuard, ...]:
        """The guard, or an empty tuple if no input has an alias.

        places: for each input, the places that hold a tensor on its storage.
        """
        found = tuple(
            (place.name, place.source, index, place.geometry)
            for index, (spec, several) in enumerate(zip(inputs, places, strict=True))
            if len(several) != 1 or several[0].source is not spec.source
            for place in _unguarded_aliases(spec, several)
        )
        return (SharedGuard(found),) if found else ()

    def parts(self) -> list[SharedGuard]:
        """A guard for each place."""
        return [SharedGuard((place,)) for place in self.places]

    def failure(self, call: Call) -> str | None:
        read = call.reader
        for name, source, index, geometry in self.places:
            try:
                now = read.window(read.find(source, call), index)
            except (LookupError, AttributeError):
                return f"`{name}` is gone, which shared a storage with another input"
            whole = call.inputs[index]
            if not isinstance(now, Tensor) or not _on_one_storage(now, whole):
                return f"`{name}` no longer shares a storage with another input"
            if geometry_of(now) != geometry:
                return f"`{name}` is {geometry_of(now)}, was {geometry}"
        return None


def _on_one_storage(a: Tensor, b: Tensor) -> bool:
    return a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _unguarded_aliases(spec: InputSpec, places: Sequence[AliasPlace]) -> Iterator[AliasPlace]:
    """The aliases of an input that no other guard compares."""
    seen = {place.tensor for place in places if place.source is spec.source}
    managed = {place.tensor for place in places if isinstance(outermost(place.source), FSDPTensor)}
    for place in places:
        outer = outermost(place.source)
        if isinstance(outer, ModuleTensor) and place.tensor in managed:
            continue  # `FSDPStateGuard` compares which parameter is registered here
        known = place.tensor in seen and isinstance(outer, (OptimizerParameter, FSDPTensor))
        if place.source is not spec.source and not known:
            yield place
        seen.add(place.tensor)


def outermost(source: Source) -> Source:
    """The source of the wrapper around an inner tensor; else the source itself."""
    while isinstance(source, Inner):
        source = source.of
    return source
