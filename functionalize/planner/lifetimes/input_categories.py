"""A category for every storage that existed before a step.

    origins(places, storages)         storage -> Origin(sharded parameters, "model.head.weight", padding 12)
    categories_of_inputs(program, places, found)
                                      name of a program's input -> its category, for a timeline of the program

A storage may be held at several places. Its category is that of the place with the highest priority: FSDP2's own
(padded shards, then the storages that it resizes), the optimizer's state, gradients, parameters, arguments, other
Python objects.
Padding: the bytes that FSDP2 adds to a shard so that all ranks have shards of one size, and those bytes in the
parameter that is all-gathered from the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from functionalize.cost.categories import Category, category_of
from functionalize.fsdp.objects import FSDPTensor, fsdp_padded
from functionalize.ir.inputs import Argument, Call, InputSpec, Source, WholeStorage
from functionalize.ir.ops import Geometry
from functionalize.program.program import Program
from functionalize.recorder.storage_table import StorageTable
from functionalize.state.sources import (
    Gradient,
    GroupTensor,
    Inner,
    ModuleTensor,
    OptimizerParameter,
    OptimizerState,
    Slot,
)
from functionalize.state.storage_places import Places
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.walk.roots import Roots

Place = tuple[str, Source]
SerialOf = Callable[[Tensor], int | None]  # the number of a tensor's storage in a recording


class Origin(NamedTuple):
    """A storage that existed before the step. payload: the bytes that are not padding; None if there is no padding."""

    category: Category
    name: str
    geometry: Geometry
    nbytes: int
    payload: int | None = None


_PRIORITIES: dict[type, int] = {
    OptimizerState: 3,
    GroupTensor: 3,
    Gradient: 4,
    OptimizerParameter: 5,
    ModuleTensor: 5,
    Argument: 6,
}


def _priority(source: Any) -> int:
    """Priority among the places that hold one storage; lower wins."""
    kind = type(source)
    if kind is Inner:
        return _priority(source.of)
    if kind is FSDPTensor:
        return 0 if source.category is Category.SHARDED_PARAMETERS else 1
    if kind is Gradient and type(source.of) is FSDPTensor:
        return 2
    return _PRIORITIES.get(kind, 7)


def payload_bytes(roots: Roots, serial_of: SerialOf) -> dict[int, int]:
    """The bytes of FSDP2's storages that are not padding, by number of the storage."""
    padded = (pair for root in roots.modules.values() for pair in fsdp_padded(root))
    return {
        serial: elements * tensor.dtype.itemsize
        for tensor, elements in padded
        if (serial := serial_of(tensor)) is not None
    }


def origins(places: Places, storages: StorageTable) -> dict[int, Origin]:
    """Every storage that existed before the step, by its number in the recording."""
    payload, parameters = (
        payload_bytes(places.roots, storages.serial_of),
        parameter_names(places.roots),
    )
    found = {}
    for external in storages.externals:
        serial = external.ref.storage
        info = storages.infos[serial]
        widest = places.widest.get(serial)
        if external.literal:
            continue  # Python made it during the step
        if widest is None:
            unknown = (Category.UNKNOWN, info.name, external.ref.geometry, info.original_nbytes)
            found[serial] = Origin(*unknown, payload.get(serial))
        else:
            name, source, ref = widest
            shared = [(each.name, each.source) for each in places.shared.get(serial, ())]
            made = (ref.geometry, info.original_nbytes, payload.get(serial), parameters)
            found[serial] = origin([*shared, (name, source)], *made)
    return found


def origin(
    places: Sequence[Place],
    geometry: Geometry,
    nbytes: int,
    payload: int | None,
    parameters: Mapping[int, str],
) -> Origin:
    """The origin of a storage that is held at these places: the place with the highest priority counts."""
    source = min((source for _, source in places), key=_priority)
    return Origin(
        category_of(source), _name(places[0][0], source, parameters), geometry, nbytes, payload
    )


def parameter_names(roots: Roots) -> dict[int, str]:
    """The names of parameters, by identity."""
    return {
        id(parameter): f"{name}.{key}"
        for name, module in roots.walk()
        for key, parameter in module._parameters.items()
    }


def _name(place: str, source: Any, parameters: Mapping[int, str]) -> str:
    """The name of a place; for a tensor of an optimizer's state, the name of its parameter and the key."""
    if isinstance(source, Inner):
        return _name(place, source.of, parameters)
    if isinstance(source, OptimizerState):
        parameter = source.optimizer.param_groups[source.group]["params"][source.index]
        if id(parameter) in parameters:
            return f"{parameters[id(parameter)]}: {source.key}"
    return place


def categories_of_inputs(
    program: Program, places: Places, found: Mapping[int, Origin]
) -> dict[str, Category]:
    """The category of every input of a program, by the input's name."""
    storages = {id(source): serial for serial, (_, source, _) in places.widest.items()}

    def category(spec: InputSpec) -> Category:
        if isinstance(spec.source, WholeStorage):
            return category(program.inputs[spec.source.input])
        serial = storages.get(id(spec.source))
        known = found.get(serial) if serial is not None else None
        return known.category if known is not None else category_of(spec.source)

    return {spec.name: category(spec) for spec in program.inputs}


def gradients(
    slots: Sequence[tuple[str, Slot]], leaves: Sequence[Any], serial_of: SerialOf
) -> dict[int, Category]:
    """The storages that hold a gradient when a step has ended.

    slots: the places of gradients.
    leaves: of the arguments of the step.
    """
    found = {}
    for _, slot in slots:
        for tensor in plain_tensors(slot.resolve(Call(leaves, []))):
            serial = serial_of(tensor)
            if serial is not None:
                found[serial] = category_of(slot)
    return found
