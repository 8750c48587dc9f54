"""Tensors on one storage: a program has one input for all of them, so each place that held one is looked at.

    head.weight is embed.weight        one input, `embed.weight`
    head.weight = Parameter(...)       `head.weight` no longer shares a storage: the guard fails

Invariant: what a program reads and writes through an input is what the step would, wherever it finds the tensor.
Places that other guards know by identity (parameters of optimizers and of FSDP2) are looked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from functionalize.fsdp.objects import FSDPTensor
from functionalize.ir.inputs import Call, InputSpec, Source
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.state.sources import Inner, ModuleTensor, OptimizerParameter


class Shared(NamedTuple):
    """A place that holds a tensor on some storage. tensor: its identity, while the recording lasts."""

    name: str
    source: Source
    geometry: Geometry
    tensor: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedGuard:
    """Every place beside an input's own still holds a tensor on that input's storage, which looks as it did.

    places: name, source, the index of the input, geometry.
    """

    places: tuple[tuple[str, Source, int, Geometry], ...]

    @staticmethod
    def of(
        inputs: Sequence[InputSpec], places: Sequence[Sequence[Shared]]
    ) -> tuple[SharedGuard, ...]:
        """The guard, if it has something to look at; `places`: those on the storage of each input."""
        found = tuple(
            (place.name, place.source, index, place.geometry)
            for index, (spec, several) in enumerate(zip(inputs, places, strict=True))
            if len(several) != 1 or several[0].source is not spec.source
            for place in _beside(spec, several)
        )
        return (SharedGuard(found),) if found else ()

    def failure(self, call: Call) -> str | None:
        for name, source, index, geometry in self.places:
            try:
                now = source.resolve(call)
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


def _beside(spec: InputSpec, places: Sequence[Shared]) -> Iterator[Shared]:
    seen = {place.tensor for place in places if place.source is spec.source}
    managed = {place.tensor for place in places if isinstance(_outer(place.source), FSDPTensor)}
    for place in places:
        outer = _outer(place.source)
        if isinstance(outer, ModuleTensor) and place.tensor in managed:
            continue  # which parameter FSDP2 has registered there is a part of its guarded state
        known = place.tensor in seen and isinstance(outer, (OptimizerParameter, FSDPTensor))
        if place.source is not spec.source and not known:
            yield place
        seen.add(place.tensor)


def _outer(source: Source) -> Source:
    while isinstance(source, Inner):
        source = source.of
    return source
