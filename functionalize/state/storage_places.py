"""The places of a step's tensors when it begins, by storage.

    places = Places.now(roots, leaves, found, recorder.storages)
    places.widest[3]        ("model.head.weight", ModuleTensor(...), TensorRef(s3, f32[8, 24]))
    places.shared[3]        every place that holds a tensor on storage 3, in the order of `candidates`
    places.slots            places that may hold a gradient after the step
    fixed_tensors(roots, ...)    the tensors that the step must leave as they are

Each storage is added to the recorder's table here. Invariants: no tensor is held; the source of a storage is the place
of the widest tensor on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from functionalize._compat.autograd import version_of
from functionalize._compat.references import address
from functionalize.fsdp.objects import fsdp_parameters
from functionalize.ir.inputs import Argument, Call, Source
from functionalize.ir.ops import TensorRef
from functionalize.recorder.storage_table import StorageTable
from functionalize.state.alias_guard import AliasPlace
from functionalize.state.sources import (
    Gradient,
    Inner,
    ModuleTensor,
    OptimizerState,
    Slot,
    candidates,
    module_tensors,
    optimizer_tensors,
    plain_attributes,
    slots,
)
from functionalize.util.tensor_wrappers import address_of, is_no_wrapper
from functionalize.walk.fact_text import CARRIED, OUTSIDE, WRITE_INTO
from functionalize.walk.live_places import NO_PLACES, LivePlaces, content
from functionalize.walk.parts import Held, MovedPlace, inner_places
from functionalize.walk.roots import Roots

Named = tuple[str, Source, Tensor]
_new_tuple = tuple.__new__


class FixedTensor(NamedTuple):
    """A tensor that the step must not replace, nor give another storage or geometry.

    address: of its storage. layout: its sizes, strides and offset. None: it is no plain tensor.
    """

    name: str
    source: Source
    tensor: Tensor
    address: int | None
    layout: Any

    @staticmethod
    def of(name: str, source: Source, tensor: Tensor) -> FixedTensor:
        """The tensor that is there now."""
        return FixedTensor(name, source, tensor, address_of(tensor), _layout(tensor))

    def change(self, call: Call) -> str | None:
        """What the step has done to it that a replay would not."""
        try:
            if self.source.resolve(call) is not self.tensor:
                return f"assigns another tensor to `{self.name}`{self._advice()}"
        except (LookupError, AttributeError):
            return f"removes `{self.name}`{OUTSIDE}"
        if address_of(self.tensor) != self.address:
            return f"gives `{self.name}` another storage (`.data = ...` or `set_`){WRITE_INTO}"
        if _layout(self.tensor) != self.layout:
            return (
                f"gives `{self.name}` other sizes or strides in place (`resize_`, `unsqueeze_`, `t_`): make another "
                "tensor (`x = x.unsqueeze(0)`)"
            )
        return None

    def _advice(self) -> str:
        place = self.source.container if isinstance(self.source, Held) else None
        kind = type(content(place)) if isinstance(place, Held) else None
        is_other = kind is not None and issubclass(kind, tuple) and kind is not tuple
        return CARRIED if kind in (list, deque) or is_other else WRITE_INTO


def fixed_inside(roots: Roots, swapped: Container[Any], live: LivePlaces) -> Iterator[FixedTensor]:
    """The tensors inside wrapper subclasses that the step finds, sharded ones of FSDP2, but what it moves.

    FSDP2 makes unsharded ones anew. swapped: see `fixed_tensors`.
    """
    held: list[Named] = [
        each for each in module_tensors(roots) if (id(each[1].entries), each[1].name) not in swapped
    ]
    for root, states in roots.states().items():
        for name, source in fsdp_parameters(states):
            if source.attribute == "sharded_param":
                held.append((f"{root}.{name}", source, source.resolve(_NO_CALL)))
    held += roots.tensors
    for name, optimizer in roots.optimizers.items():
        held += optimizer_tensors(name, optimizer)
    seen: set[int] = set()
    for name, _, tensor in held:
        if is_no_wrapper(tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        for names, place, inner in inner_places(tensor):
            if place.place not in live.values:
                yield FixedTensor.of(".".join((name, *names)), place, inner)


_NO_CALL = Call((), [])


def _layout(tensor: Tensor) -> Any:
    if address_of(tensor) is None:
        return None
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def fixed_tensors(roots: Roots, swapped: Container[Any], live: LivePlaces) -> Iterator[FixedTensor]:
    """Tensors of modules and variables, but parameters that FSDP2 swaps in every step, and what the step moves.

    swapped: (id of a table of parameters, name) of these.
    """
    for name, source, value in module_tensors(roots):
        if (id(source.entries), source.name) not in swapped:
            yield FixedTensor.of(name, source, value)
    for name, variable, value in (*plain_attributes(roots, live.holders), *roots.tensors):
        if not live.has(variable):
            yield FixedTensor.of(name, variable, value)


_FEW_BYTES = 64  # of a buffer: to compute with them once more, before the graph, costs nothing


@dataclass(slots=True)
class Places:
    """The objects that a step can reach, and the places of tensors.

    leaves: of the step's arguments.
    slots: the places that may hold a gradient.
    widest: for each storage, name, source and geometry of the widest tensor on it.
    shared: for each storage, every place that holds a tensor on it.
    versions: for each storage, the objects that are the widest tensor on it and the one around that, with their version
    counters.
    """

    roots: Roots
    leaves: Sequence[Any]
    slots: list[tuple[str, Slot]]
    widest: dict[int, tuple[str, Source, TensorRef]]
    shared: dict[int, list[AliasPlace]]
    versions: dict[int, list[tuple[int, int]]]

    @staticmethod
    def now(
        roots: Roots,
        leaves: Sequence[Any],
        found: Sequence[Named],
        storages: StorageTable,
        live: LivePlaces = NO_PLACES,
    ) -> Places:
        """Read every place. found: the leaf tensors whose `.grad` the step may assign, from `parameters`.

        live: places where the step puts other tensors.
        """
        held = list(slots(roots, found))
        widest: dict[int, tuple[str, Source, TensorRef]] = {}
        shared: dict[int, list[AliasPlace]] = {}
        at_entry, versions = Call(leaves, []), {}
        for name, source, tensor in candidates(roots, leaves, held):
            if live and type(source) is Held and live.has(source):
                source = MovedPlace(source.container, source.key)
            outer = source.of if type(source) is Inner else source
            ref = storages.bring_in(tensor, name, holds=type(outer) is not Gradient)
            serial, geometry = ref
            before = widest.get(serial)
            # In half the time of calling the class, for each of hundreds.
            place = _new_tuple(AliasPlace, (name, source, geometry, address(tensor)))
            if before is None:
                widest[serial], shared[serial] = (name, source, ref), [place]
                versions[serial] = _versions(source, tensor, at_entry)
                continue
            shared[serial].append(place)
            if geometry.end > before[2].geometry.end:
                widest[serial] = (name, source, ref)
                versions[serial] = _versions(source, tensor, at_entry)
        return Places(roots, leaves, held, widest, shared, versions)

    def version(self, serial: int) -> str:
        """What the step has done to the version counter of the widest tensor on a storage: one of `VERSIONS`."""
        before, call = self.versions.get(serial), Call(self.leaves, [])
        if before is None:
            return "raised"
        source = self.widest[serial][1]
        if type(source.of if type(source) is Inner else source) is OptimizerState:
            return "raised"  # no graph of eager has saved one
        try:
            now = _versions(source, source.resolve(call), call)
        except (LookupError, AttributeError):  # the step has left something else there
            return "raised"
        is_same = [address for address, _ in before] == [address for address, _ in now]
        if not is_same or any(count < 0 for _, count in now):
            return "raised"
        if len(now) > 1 and now[1] != before[1]:
            return "raised around"
        return "kept" if now[0] == before[0] else "raised"

    def early(self) -> set[int]:
        """The storages of tensor arguments, and of buffers that hold a few numbers: pointers, counters, flags."""
        return {
            storage
            for storage, (_, source, ref) in self.widest.items()
            if isinstance(source, Argument) or _is_number_in_buffer(source, ref)
        }


def _versions(source: Source, tensor: Any, call: Call) -> list[tuple[int, int]]:
    """A tensor and, if autograd may save it, the one around it: their addresses and version counters."""
    found = [tensor]
    if type(source) is Inner and (outer := source.of.resolve(call)).requires_grad:
        found.append(outer)
    return [(address(each), version_of(each)) for each in found if isinstance(each, Tensor)]


def _is_number_in_buffer(source: Source, ref: TensorRef) -> bool:
    is_buffer = isinstance(source, ModuleTensor) and source.table == "_buffers"
    return is_buffer and ref.geometry.end <= _FEW_BYTES
