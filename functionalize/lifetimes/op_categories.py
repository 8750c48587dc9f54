"""What the storages that a recorded step makes are for, told by the ops that make and use them.

    fsdp.all_gather_copy_in, c10d._allgather_base_      what they read and write: all-gather buffers
    fsdp.split_with_sizes_copy                          what it writes: unsharded parameters
    fsdp.chunk_cat, chunk_cat_mixed_dtype               read unsharded gradients, write a reduce-scatter buffer
    c10d._reduce_scatter_base_                          reads such a buffer, writes sharded gradients
    made in a backward, read by the optimizer           sharded gradients
    made in a recomputation                             recomputed
    made in a forward, used or freed in a backward      saved activations
    all else                                            temporaries

Collectives of activations (tensor parallelism) come as functional ops, and are activations like all others.
`planning/timeline/categories.py` tells the same of a program, by the flow of values.
Linear in ops. Invariant: every storage has one category.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.generators import GET_STATE
from functionalize.ir.ops import OpRecord, TensorRef, refs_in
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planning.timeline.timeline import Allocation, Category

_BACKWARDS = (BACKWARD, RECOMPUTE)


def phases_of(records: Sequence[OpRecord], updates: Iterable[range]) -> list[str]:
    """The phase of every op, as `core.phases` gives them to nodes. updates: the ops of each step of an optimizer."""
    updated = {i for each in updates for i in each if not records[i].meta.get("module")}
    phases: list[str] = []
    update, had_backward = 0, False
    for i, record in enumerate(records):
        if i in updated:
            update = i + 1
        elif record.phase is not None:
            _settle(phases, update, i, FORWARD)
            phases.append(record.phase)
            had_backward = True
    _settle(phases, update, len(records), OPTIMIZER if had_backward else FORWARD)
    return phases


def _settle(phases: list[str], update: int, end: int, rest: str) -> None:
    """The ops since the last backward; `update`: the end of the last step of an optimizer."""
    phases += [OPTIMIZER] * max(update - len(phases), 0)
    phases += [rest] * (end - len(phases))


class Purposes:
    """The categories of one recording. gradients: those that outlive it. own: bytes that hold something, not padding.

    uses: the ops that read or write each storage, in order. heirs: sums, and the storages that they take over.
    """

    def __init__(
        self,
        records: Sequence[OpRecord],
        phases: Sequence[str],
        gradients: Mapping[int, Category],
        own: Mapping[int, int],
    ) -> None:
        self.phases, self.own = phases, dict(own)
        self.uses: dict[int, list[int]] = {}
        self._records, self._gradients = records, dict(gradients)
        self.heirs: dict[int, int] = {}
        self._told: dict[int, Category] = {}
        self._read: dict[str, set[int]] = {phase: set() for phase in (*_BACKWARDS, OPTIMIZER)}
        for i, record in enumerate(records):
            given = refs_in([record.args, record.kwargs])
            if record.target is not RESIZE_STORAGE:
                self._note(i, given, refs_in(record.outputs))
            if record.target is GET_STATE:
                self._tell(refs_in(record.outputs), Category.RNG_STATE)
            elif getattr(record.target, "namespace", "") in ("c10d", "fsdp"):
                self._communicates(record, phases[i])

    def _note(self, i: int, given: list[TensorRef], made: list[TensorRef]) -> None:
        storages = {ref.storage for ref in given}
        read = self._read.get(self.phases[i])
        if read is not None:
            read |= storages
        for storage in storages.union(ref.storage for ref in made):
            self.uses.setdefault(storage, []).append(i)

    def _tell(self, refs: Iterable[TensorRef], category: Category) -> None:
        for ref in refs:
            self._told.setdefault(ref.storage, category)

    def _communicates(self, record: OpRecord, phase: str) -> None:
        """What an op of FSDP2's, or a collective, says of the storages it is given."""
        name = record.target.overloadpacket.__name__
        if name == "record_grad_output_stream":
            return
        first, rest = refs_in(record.args[:1]), refs_in([record.args[1:], record.kwargs])
        if name == "split_with_sizes_copy":
            self._tell(rest, Category.UNSHARDED_PARAMETERS)
            self._gathered(first, rest)
        elif name in ("chunk_cat", "chunk_cat_mixed_dtype"):
            self._tell(first, Category.UNSHARDED_GRADIENTS)
            self._tell(rest, Category.REDUCE_SCATTER_BUFFERS)
            elements = sum(ref.geometry.numel for ref in first)
            self.own.update({r.storage: elements * r.geometry.dtype.itemsize for r in rest})
        elif "gather" in name:
            outputs = refs_in(record.outputs)
            self._tell([*first, *rest, *outputs], Category.ALL_GATHER_BUFFERS)
        elif "reduce_scatter" in name:
            self._tell(first, Category.SHARDED_GRADIENTS)
            self._tell(rest, Category.REDUCE_SCATTER_BUFFERS)
        elif phase == BACKWARD:
            self._tell([*first, *rest], Category.REDUCE_SCATTER_BUFFERS)

    def _gathered(self, buffers: list[TensorRef], parameters: list[TensorRef]) -> None:
        """A buffer of gathered shards holds as much as the parameters that it is split into."""
        if len(buffers) == 1 and all(ref.storage in self.own for ref in parameters):
            item = buffers[0].geometry.dtype.itemsize
            elements = [self.own[r.storage] // r.geometry.dtype.itemsize for r in parameters]
            self.own[buffers[0].storage] = sum(elements) * item

    # -- sums ----------------------------------------------------------------------------------

    def summed_by_autograd(self, op: int, whole: Collection[int]) -> list[int]:
        """The storages whose tensors autograd adds where two gradients meet; none if an op is no such sum.

        The one was made by the node at hand, the other one earlier, and no op of this node has read it. whole: storages
        that are held by no view.
        """
        if not whole:
            return []
        record = self._records[op]
        a, b = (record.args[0], record.args[1]) if len(record.args) == 2 else (None, None)
        if type(a) is not TensorRef or type(b) is not TensorRef or record.autograd_node is None:
            return []
        same = a.geometry.size == b.geometry.size and a.geometry.dtype == b.geometry.dtype
        if record.kwargs or a.storage == b.storage or not same or self._read_here(op, a.storage):
            return []
        return [ref.storage for ref in (a, b) if ref.geometry.is_dense and ref.storage in whole]

    def _read_here(self, op: int, storage: int) -> bool:
        """Whether the node that runs an op has used a storage before."""
        uses = self.uses[self.heirs.get(storage, storage)]
        at = bisect_left(uses, op) - 1
        return at >= 0 and self._records[uses[at]].seq_nr == self._records[op].seq_nr

    def unite(self, storage: int, heir: int) -> None:
        """What is known of `heir` is so of the storage that it is in truth."""
        self.heirs[heir] = storage
        self.uses.setdefault(storage, []).extend(self.uses.pop(heir, []))
        for known in (self._told, self._gradients):
            if heir in known:
                known[storage] = known[heir]
        for read in self._read.values():
            if heir in read:
                read.add(storage)

    # -- answers -------------------------------------------------------------------------------

    def of_given(self, storage: int, known: Category) -> Category:
        """What a storage that existed before the step is for."""
        if known is not Category.UNKNOWN:
            return known
        return self._told.get(storage, Category.BUFFERS)

    def of_made(self, storage: int, made: int, freed: int | None) -> Category:
        """What a storage that the step makes while one op runs, and frees while another does, is for."""
        found = self._told.get(storage) or self._gradients.get(storage)
        if found is not None:
            return found
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
        """The last op that reads or writes an allocation; the one that makes it if none does."""
        end = allocation.freed if allocation.freed is not None else len(self._records)
        uses = self.uses.get(storage, [])
        at = bisect_right(uses, end) - 1
        return max(uses[at], allocation.made) if at >= 0 else allocation.made
