"""The padding bytes of a storage: FSDP2 pads shards so that those of all ranks have one size.

    parameter [3, 8] on 2 ranks      rank 1's shard: [1, 8] stored as [2, 8]       padding 32 bytes
    all-gather                       [2 x 16] elements, the model reads 24        padding 32 bytes
    reduce-scatter                   _chunk_cat of [3, 8] into [2, 16]            padding 32 bytes

Derived from reads: padding is the part of a shard that the optimizer does not read, the part of an all-gather's result
that the model does not read, and the part of a packed buffer that no gradient fills.
Invariant: at most the size of the storage; 0 where no read is found. Linear in nodes and edges.
"""

from __future__ import annotations

from torch import Tensor, fx

from functionalize.analysis.aliases import Aliases, is_view
from functionalize.cost.categories import Categories, Category, packet
from functionalize.cost.liveness import Storage
from functionalize.ir.ops import geometry_of
from functionalize.ir.phases import OPTIMIZER
from functionalize.program.metadata import tensors_of

_SCATTERS = ("slice_scatter", "as_strided_scatter", "select_scatter")


class Padding:
    """The padding of the storages of a program."""

    def __init__(self, categories: Categories, aliases: Aliases) -> None:
        self._categories, self._aliases = categories, aliases
        # node of a shard -> the end, in bytes, of the part that the optimizer reads
        self._read: dict[fx.Node, int] = {}
        for node in categories.live.nodes:
            updates = categories.phase(node) == OPTIMIZER and packet(node) not in _SCATTERS
            for read in node.all_input_nodes if updates and not is_view(node) else ():
                value = read.meta.get("val")
                if isinstance(value, Tensor):
                    root, end = aliases.of(read), geometry_of(value).end
                    self._read[root] = max(end, self._read.get(root, 0))

        self._seen: dict[Storage, tuple[str, int]] = {}
        named = (s for s in categories.names if s not in categories.new)
        pairs = ((_look(storage, categories), self.seen(storage)[1]) for storage in named)
        # (name, size) of an unsharded parameter -> the end of the part that one of its uses reads
        self._like = {look: end for look, end in pairs if end}

    def of_shard(self, placeholder: fx.Node, nbytes: int) -> int:
        """The padding of a sharded parameter that is an input of `nbytes` bytes."""
        return max(0, nbytes - self._read.get(self._aliases.of(placeholder), nbytes))

    def of(self, storage: Storage) -> int:
        """The padding of a storage that the graph makes."""
        found, category = self._categories, self._categories.of(storage)
        if category == Category.UNSHARDED_PARAMETERS:
            seen_end = self.seen(storage)[1] or self._like.get(
                _look(storage, found), storage.nbytes
            )
            return storage.nbytes - min(seen_end, storage.nbytes)
        if category == Category.ALL_GATHER_BUFFERS:
            if storage in found.pieces:
                shards = found.pieces[storage]
                return sum(self._of_piece(shard, storage) for shard in shards)
            return sum(self.of(part) for part in found.parts.get(storage, ()))
        if category == Category.REDUCE_SCATTER_BUFFERS:
            return storage.nbytes - min(_packed(storage), storage.nbytes)
        if storage in found.new:
            spec = found.program.inputs[found.new[storage]]
            home = found.placeholders[found.new[storage]]
            return self.of_shard(home, spec.nbytes) if storage.nbytes == spec.nbytes else 0
        return 0

    def _of_piece(self, shard: fx.Node, pack: Storage) -> int:
        """The padding of a shard inside a packed buffer, in bytes of the buffer's dtype."""
        value, like = shard.meta.get("val"), next(tensors_of(pack.nodes[0].meta["val"]))
        if not isinstance(value, Tensor):
            return 0
        unused = self.of_shard(shard, value.untyped_storage().nbytes())
        return unused // value.element_size() * like.element_size()

    def seen(self, storage: Storage) -> tuple[str, int]:
        """(the geometry in which the model reads an unsharded parameter, the bytes up to its end): 0 if unread."""
        found = self._seen.get(storage)
        if found is None:
            found = self._seen[storage] = _seen(storage)
        return found


def _seen(storage: Storage) -> tuple[str, int]:
    views = [n for n in storage.nodes if isinstance(n.meta["val"], Tensor)]
    looks = [geometry_of(n.meta["val"]) for n in views]
    read = [not n.users or not all(map(is_view, n.users)) for n in views]
    end = max((look.end for look, is_read in zip(looks, read, strict=True) if is_read), default=0)
    whole = [look for look in reversed(looks) if look.is_contiguous]
    best = next((look for look in whole if look.nbytes == end), whole[-1] if whole else "")
    return str(best), end


def _look(storage: Storage, categories: Categories) -> tuple[str | None, int]:
    return categories.names.get(storage), storage.nbytes


def _packed(storage: Storage) -> int:
    """The bytes that gradients fill in a packed buffer, or in its cast."""
    pack, value = storage.nodes[0], next(tensors_of(storage.nodes[0].meta["val"]))
    if packet(pack) == "_to_copy":
        source = pack.all_input_nodes[0]
        while is_view(source):
            source = source.all_input_nodes[0]
        pack = source
    if packet(pack) != "_chunk_cat":
        return storage.nbytes
    elements = sum(t.numel() for n in pack.all_input_nodes for t in tensors_of(n.meta["val"]))
    return elements * value.element_size()
