"""Where the tensors of a step are when it begins: for every storage that the step can reach, the places that hold it.

    places = Places.now(roots, leaves, found, recorder.storages)
    places.widest[3]        ("model.head.weight", ModuleTensor(...), TensorRef(s3, f32[8, 24]))
    places.shared[3]        every place that holds a tensor on it, the most telling first
    places.slots            where the step may leave gradients

The recorder's table learns of each storage here. Invariant: no tensor is held; a storage is told by the widest tensor
on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize.ir.inputs import Argument, Source
from functionalize.ir.ops import TensorRef
from functionalize.recorder.storage_table import StorageTable
from functionalize.state.alias_guard import AliasPlace
from functionalize.state.discovery import Roots
from functionalize.state.sources import Slot, candidates, slots

Named = tuple[str, Source, Tensor]


@dataclass(slots=True)
class Places:
    """What a step can reach, and where. leaves: of its arguments."""

    roots: Roots
    leaves: Sequence[Any]
    slots: list[tuple[str, Slot]]
    widest: dict[int, tuple[str, Source, TensorRef]]
    shared: dict[int, list[AliasPlace]]

    @staticmethod
    def now(
        roots: Roots, leaves: Sequence[Any], found: Sequence[Named], storages: StorageTable
    ) -> Places:
        """Look at every place. found: the leaves of autograd that it may leave gradients of."""
        held = list(slots(roots, found))
        widest: dict[int, tuple[str, Source, TensorRef]] = {}
        shared: dict[int, list[AliasPlace]] = {}
        for name, source, tensor in candidates(roots, leaves, held):
            ref = storages.bring_in(tensor, name)
            before = widest.get(ref.storage)
            if before is None or ref.geometry.end > before[2].geometry.end:
                widest[ref.storage] = (name, source, ref)
            place = AliasPlace(name, source, ref.geometry, id(tensor))
            shared.setdefault(ref.storage, []).append(place)
        return Places(roots, leaves, held, widest, shared)

    def arguments(self) -> set[int]:
        """The storages of tensor arguments."""
        return {s for s, (_, source, _) in self.widest.items() if isinstance(source, Argument)}
