"""A category for every storage that a recorded step allocates, derived from the ops that create and use it.

    fsdp.all_gather_copy_in, c10d._allgather_base_      arguments and results: all-gather buffers
    fsdp.split_with_sizes_copy                          `out=` arguments: unsharded parameters
    fsdp.chunk_cat, chunk_cat_mixed_dtype               read unsharded gradients, write a reduce-scatter buffer
    c10d._reduce_scatter_base_                          reads a reduce-scatter buffer, writes sharded gradients
    a parameter's copy in a smaller dtype               cast parameters: autocast makes them, outside the optimizer
    created in a backward, read by the optimizer        sharded gradients
    created in a recomputation                          recomputed
    created in a forward, used or freed in a backward   saved activations
    any other                                           temporaries

Collectives on activations (tensor parallelism) are recorded as functional ops; their results are activations like any
other. `cost/categories.py` derives the same categories for a program, from the flow of values.
Cost: linear in the number of ops. Invariant: every storage has exactly one category.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.cost.categories import Category, is_narrower
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.generators import GET_STATE
from functionalize.ir.ops import OpRecord, TensorRef, refs_in, storages_in
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.timeline.timeline import Allocation

_BACKWARDS = (BACKWARD, RECOMPUTE)
_CAST = torch.ops.aten._to_copy.default


def phases_of(records: Sequence[OpRecord], updates: Iterable[range]) -> list[str]:
    """The phase of every op, by the rules of `ir/phases.py` for nodes.

    updates: for each `optimizer.step()`, the range of its op indices.
    """
    updated = {i for each in updates for i in each if not records[i].meta.get("module")}
    phases: list[str] = []
    update, had_backward = 0, False
    for i, record in enumerate(records):
        if i in updated:
            update = i + 1
        elif record.phase is not None:
            _append_phases(phases, update, i, FORWARD)
            phases.append(record.phase)
            had_backward = True
    _append_phases(phases, update, len(records), OPTIMIZER if had_backward else FORWARD)
    return phases


def _append_phases(phases: list[str], update: int, end: int, rest: str) -> None:
    """Append a phase for each op from `len(phases)` to `end`: OPTIMIZER before index `update`, then `rest`."""
    phases += [OPTIMIZER] * max(update - len(phases), 0)
    phases += [rest] * (end - len(phases))


class OpCategories:
    """The categories of one recording.

    gradients: the categories of storages that still hold a gradient when the step has ended.
    payload: the bytes of a storage that are not padding.
    parameters: the storages of parameters that existed before the step.
    uses: for each storage, the indices of the ops that read or write it, in ascending order.
    reused: for the storage of a gradient sum, the operand's storage that eager adds into: Note [Sums in place].
    """

    def __init__(
        self,
        records: Sequence[OpRecord],
        phases: Sequence[str],
        gradients: Mapping[int, Category],
        payload: Mapping[int, int],
        parameters: Collection[int] = (),
    ) -> None:
        self.phases, self.payload = phases, dict(payload)
        self.uses: dict[int, list[int]] = {}
        self._records, self._gradients = records, dict(gradients)
        self.reused: dict[int, int] = {}
        self._assigned: dict[int, Category] = {}
        self._parameters, self._casts = frozenset(parameters), set[int]()
        self._read: dict[str, set[int]] = {phase: set() for phase in (*_BACKWARDS, OPTIMIZER)}
        for i, record in enumerate(records):
            target = record.target
            if target is not RESIZE_STORAGE:
                self._note(i, record)
            if target is GET_STATE:
                self._assign(refs_in(record.outputs), Category.RNG_STATE)
            elif getattr(target, "namespace", "") in ("c10d", "fsdp"):
                self._assign_by_communication(record, phases[i])
            elif target is _CAST and phases[i] != OPTIMIZER:
                self._note_cast(refs_in([record.args, record.kwargs]), refs_in(record.outputs))

    def _note(self, i: int, record: OpRecord) -> None:
        storages, outputs = storages_in((record,)), record.outputs
        read = self._read.get(self.phases[i])
        if read is not None:
            read |= storages
        if type(outputs) is TensorRef:  # nearly all
            storages.add(outputs[0])
        elif outputs is not None:
            storages.update([ref[0] for ref in refs_in(outputs)])
        for storage in storages:
            self.uses.setdefault(storage, []).append(i)

    def _note_cast(self, inputs: list[TensorRef], outputs: list[TensorRef]) -> None:
        """Note a copy of a parameter in a smaller dtype, unless a collective sends it later."""
        for source, made in zip(inputs, outputs, strict=False):
            category = self._assigned.get(source.storage)
            known = source.storage in self._parameters or category is Category.UNSHARDED_PARAMETERS
            if known and is_narrower(made.geometry.dtype, source.geometry.dtype):
                self._casts.add(made.storage)

    def _assign(self, refs: Iterable[TensorRef], category: Category) -> None:
        for ref in refs:
            self._assigned.setdefault(ref.storage, category)

    def _assign_by_communication(self, record: OpRecord, phase: str) -> None:
        """Assign categories to the arguments of an `fsdp::` op or of a collective."""
        name = record.target.overloadpacket.__name__
        if name == "record_grad_output_stream":
            return  # it marks a stream and allocates nothing
        first, rest = refs_in(record.args[:1]), refs_in([record.args[1:], record.kwargs])
        if name == "split_with_sizes_copy":
            self._assign(rest, Category.UNSHARDED_PARAMETERS)
            self._note_gathered_bytes(first, rest)
        elif name in ("chunk_cat", "chunk_cat_mixed_dtype"):
            self._assign(first, Category.UNSHARDED_GRADIENTS)
            self._assign(rest, Category.REDUCE_SCATTER_BUFFERS)
            # `chunk_cat` pads every gradient to a multiple of the ranks; the gradients alone are payload.
            elements = sum(ref.geometry.numel for ref in first)
            self.payload.update({r.storage: elements * r.geometry.dtype.itemsize for r in rest})
        elif "gather" in name:
            outputs = refs_in(record.outputs)
            self._assign([*first, *rest, *outputs], Category.ALL_GATHER_BUFFERS)
        elif "reduce_scatter" in name:
            self._assign(first, Category.SHARDED_GRADIENTS)
            self._assign(rest, Category.REDUCE_SCATTER_BUFFERS)
        elif phase == BACKWARD:  # an all-reduce of FSDP2 between replicas (HSDP)
            self._assign([*first, *rest], Category.REDUCE_SCATTER_BUFFERS)

    def _note_gathered_bytes(self, buffers: list[TensorRef], parameters: list[TensorRef]) -> None:
        """The payload of an all-gather buffer is that of the parameters that it is split into."""
        if len(buffers) == 1 and all(ref.storage in self.payload for ref in parameters):
            item = buffers[0].geometry.dtype.itemsize
            elements = [self.payload[r.storage] // r.geometry.dtype.itemsize for r in parameters]
            self.payload[buffers[0].storage] = sum(elements) * item

    # -- sums ----------------------------------------------------------------------------------

    def summed_by_autograd(self, op: int, unviewed: Collection[int]) -> list[int]:
        """The operands' storages of an op by which autograd accumulates two gradients; empty for any other op.

        An addition of the engine differs from one in a backward formula in its first operand: an earlier autograd node
        computed it, and no op of the current node has used it.
        unviewed: the storages of those operands that are no views.
        """
        if not unviewed:
            return []
        record = self._records[op]
        a, b = (record.args[0], record.args[1]) if len(record.args) == 2 else (None, None)
        if type(a) is not TensorRef or type(b) is not TensorRef or record.autograd_node is None:
            return []
        same = a.geometry.size == b.geometry.size and a.geometry.dtype == b.geometry.dtype
        if (
            record.kwargs
            or a.storage == b.storage
            or not same
            or self._read_by_same_node(op, a.storage)
        ):
            return []
        return [ref.storage for ref in (a, b) if ref.geometry.is_dense and ref.storage in unviewed]

    def _read_by_same_node(self, op: int, storage: int) -> bool:
        """Whether an earlier op of the autograd node that runs `op` has used the storage."""
        uses = self.uses[self.reused.get(storage, storage)]
        at = bisect_left(uses, op) - 1
        return at >= 0 and self._records[uses[at]].seq_nr == self._records[op].seq_nr

    def merge_sum(self, storage: int, total: int) -> None:
        """Merge facts about `total`, a gradient sum's output, into `storage`, which eager reuses for it."""
        self.reused[total] = storage
        self.uses.setdefault(storage, []).extend(self.uses.pop(total, []))
        for known in (self._assigned, self._gradients):
            if total in known:
                known[storage] = known[total]
        for read in self._read.values():
            if total in read:
                read.add(storage)

    # -- queries -------------------------------------------------------------------------------

    def of_existing(self, storage: int, known: Category) -> Category:
        """The category of a storage that existed before the step; `known`: by its places."""
        if known is not Category.UNKNOWN:
            return known
        return self._assigned.get(storage, Category.BUFFERS)

    def of_made(self, storage: int, made: int, freed: int | None) -> Category:
        """The category of a storage that op `made` allocates and op `freed` frees (None: it outlives the step)."""
        found = self._assigned.get(storage) or self._gradients.get(storage)
        if found is not None:
            return found
        if storage in self._casts:
            return Category.CAST_PARAMETERS
        phase = self.phases[made] if made < len(self.phases) else FORWARD
        if phase == RECOMPUTE:
            return Category.RECOMPUTED
        if phase == BACKWARD and storage in self._read[OPTIMIZER]:
            return Category.SHARDED_GRADIENTS
        if phase == FORWARD and self._is_saved(storage, freed):
            return Category.SAVED_ACTIVATIONS
        return Category.TEMPORARIES

    def _is_saved(self, storage: int, freed: int | None) -> bool:
        return any(storage in self._read[phase] for phase in _BACKWARDS) or (
            freed is not None and self.phases[freed] in _BACKWARDS
        )

    def last_use(self, allocation: Allocation, storage: int) -> int:
        """The last op that reads or writes an allocation; the op that creates it if there is none."""
        end = allocation.freed if allocation.freed is not None else len(self._records)
        uses = self.uses.get(storage, [])
        at = bisect_right(uses, end) - 1
        return max(uses[at], allocation.made) if at >= 0 else allocation.made
