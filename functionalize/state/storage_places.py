"""The places of a step's tensors when it begins, by storage.

    places = Places.now(roots, leaves, found, recorder.storages)
    places.widest[3]        ("model.head.weight", ModuleTensor(...), TensorRef(s3, f32[8, 24]))
    places.shared[3]        every place that holds a tensor on storage 3, in the order of `candidates`
    places.slots            places that may hold a gradient after the step

Each storage is added to the recorder's table here. Invariants: no tensor is held; the source of a storage is the place
of the widest tensor on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize._compat.references import address
from functionalize.ir.inputs import Argument, Source
from functionalize.ir.ops import TensorRef
from functionalize.recorder.storage_table import StorageTable
from functionalize.state.alias_guard import AliasPlace
from functionalize.state.sources import Gradient, Inner, Slot, candidates, slots
from functionalize.walk.roots import Roots

Named = tuple[str, Source, Tensor]
_new_tuple = tuple.__new__


@dataclass(slots=True)
class Places:
    """The objects that a step can reach, and the places of tensors.

    leaves: of the step's arguments.
    slots: the places that may hold a gradient.
    widest: for each storage, name, source and geometry of the widest tensor on it.
    shared: for each storage, every place that holds a tensor on it.
    """

    roots: Roots
    leaves: Sequence[Any]
    slots: list[tuple[str, Slot]]
    widest: dict[int, tuple[str, Source, TensorRef]]
    shared: dict[int, list[AliasPlace]]

    @staticmethod
    def now(
        roots: Roots, leaves: Sequence[Any], found: Sequence[Named], storages: StorageTable
    ) -> Places:
        """Read every place. found: the leaf tensors whose `.grad` the step may assign, from `parameters`."""
        held = list(slots(roots, found))
        widest: dict[int, tuple[str, Source, TensorRef]] = {}
        shared: dict[int, list[AliasPlace]] = {}
        for name, source, tensor in candidates(roots, leaves, held):
            outer = source.of if type(source) is Inner else source
            ref = storages.bring_in(tensor, name, holds=type(outer) is not Gradient)
            serial, geometry = ref
            before = widest.get(serial)
            # In half the time of calling the class, for each of hundreds.
            place = _new_tuple(AliasPlace, (name, source, geometry, address(tensor)))
            if before is None:
                widest[serial], shared[serial] = (name, source, ref), [place]
                continue
            shared[serial].append(place)
            if geometry.end > before[2].geometry.end:
                widest[serial] = (name, source, ref)
        return Places(roots, leaves, held, widest, shared)

    def arguments(self) -> set[int]:
        """The storages of tensor arguments."""
        return {s for s, (_, source, _) in self.widest.items() if isinstance(source, Argument)}
