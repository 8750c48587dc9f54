"""One recorded run of a step, in terms that hold in its other runs: names of tensors from outside, layers of ops.

    run = RunRecord(recorder, notes, entry.places.widest, layers)
    run.names[17]           "model.blocks.3.gate.weight": the tensor from outside on storage 17
    run.layers[8]           (0, 3): the layer that op 8 belongs to, see `layers.py`; None: it is a shared op
    run.sizes[17]           [8192, 8192]: the bytes that storage 17 got at each of its allocations

An op belongs to the layer that was called, or whose backward ran, or else (an optimizer's) to the one layer of all
tensors that it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from functionalize._compat.references import address
from functionalize.equal_layers.layers import EqualLayers, Layer
from functionalize.ir.ops import OpRecord, refs_in
from functionalize.lifetimes.notes import StepNotes
from functionalize.recorder.recorder import Recorder
from functionalize.state.sources import Inner, OptimizerState


class Unlike(Exception):
    """Why a short run cannot stand for a whole one."""


class RunRecord:
    """A recorded run. places: by storage, name, source and geometry of the tensor that a place of the step held."""

    def __init__(
        self,
        recorder: Recorder,
        notes: StepNotes,
        places: Mapping[int, tuple[str, Any, Any]],
        layers: EqualLayers,
    ) -> None:
        self.storages, self.notes, self._layers = recorder.storages, notes, layers
        self.records, self.tape = recorder.records, recorder.tape
        self.infos = recorder.storages.infos
        log = recorder.scalar_log
        self.facts = tuple(log.facts.values()) if log is not None else ()
        self.frozen = {id(scalar.record) for scalar in recorder.scalars}
        self.names: dict[int, str] = {}
        seen: Counter[str] = Counter()
        for external in recorder.storages.externals:
            serial = external.ref.storage
            kind = "a literal" if external.literal else "a tensor that no place holds"
            name = self._name(*places[serial][:2]) if serial in places else kind
            seen[name] += 1
            self.names[serial] = name if seen[name] == 1 else f"{name} ({seen[name]})"
        self.serials = {name: serial for serial, name in self.names.items()}

    def _name(self, name: str, source: Any) -> str:
        """The name of a tensor at a place; of an optimizer's state, that of the parameter with the key."""
        state = source.of if type(source) is Inner else source
        if type(state) is OptimizerState:
            parameter = state.optimizer.param_groups[state.group]["params"][state.index]
            if (known := self._layers.parameters.get(address(parameter))) is not None:
                return f"{known}.state.{state.key}"
        return name

    @cached_property
    def layers(self) -> list[Layer | None]:
        """The layer of each op."""
        found: list[Layer | None] = []
        layer_of, of_storage = self._layers.of_module, self.layers_of_storages
        for record in self.records:
            module = record.meta.get("module", "")
            layer = layer_of(module)
            if layer is None and not module:
                used = {of_storage.get(r.storage) for r in refs_in([record.args, record.kwargs])}
                used.discard(None)
                layer = used.pop() if len(used) == 1 else None
            for serial in born(record):
                of_storage[serial] = layer
            found.append(layer)
        return found

    @cached_property
    def layers_of_storages(self) -> dict[int, Layer | None]:
        """The layer of each storage: of a tensor from outside by its name, else of the op that made it."""
        return {s: self._layers.of_tensor(name) for s, name in self.names.items()}

    @cached_property
    def sizes(self) -> dict[int, list[int]]:
        """The bytes of each storage whenever it is allocated, resized or first seen; not when it is freed."""
        found: dict[int, list[int]] = {}
        for _, serial, nbytes in self.notes.changes:
            if nbytes:
                found.setdefault(serial, []).append(nbytes)
        return found


def born(record: OpRecord) -> dict[int, Any]:
    """Bytes and device of the storages that an op has allocated, by their numbers."""
    return record.meta.get("born") or {}
