"""The memory of one replay of a program, as a `Timeline`: each storage from the op that makes it to its last use.

    timeline = program_timeline(program)
    timeline.peak                       requested bytes: values of the graph, and inputs, which are live throughout
    timeline.ops[timeline.peak_at]      one `Op` for each node of the graph, and one for the epilogue

    inputs      ████████████████████████████████   made before the first op; their size on entry
    values         ███   ██████    ████            freed after the last use, as in the boxed runner (`Liveness`)
    results             ████████████████████       until the epilogue has copied them; outputs outlive the step
    epilogue                               ██      a storage that it grows is new, one that it empties is freed

The input of a collective is held until its wait. A program that draws random numbers keeps a copy of the generator's
state, to restore it if a replay fails. An op that writes in place makes no storage: at stage INPLACE, and the last one
of a replay (`analysis/last_write.py`).
One kind of device is counted: the accelerator if the program has values on one, else the CPU.

FSDP2 pads shards so that those of all ranks have one size. The padding of a storage is derived from reads: it is the
part of a shard that the optimizer does not read, the part of an all-gather's result that the model does not read, and
the part of a packed buffer that no gradient fills:

    parameter [3, 8] on 2 ranks      rank 1's shard: [1, 8] stored as [2, 8]       padding 32 bytes
    all-gather                       [2 x 16] elements, the model reads 24        padding 32 bytes
    reduce-scatter                   _chunk_cat of [3, 8] into [2, 16]            padding 32 bytes

Invariants: the live values of the graph are those of `Liveness` and of the allocator at every op; a storage counts
once, however many values are views of it; its padding is at most its size, 0 where no read is found. Linear in nodes
and edges.
Not counted: memory that backends of collectives allocate and free internally; that of ops, except for a `target`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor, fx

from functionalize._compat.fakes import accelerators
from functionalize.analysis.aliases import Aliases, is_view, results, results_of
from functionalize.analysis.last_write import in_order, last_write
from functionalize.cost.categories import Categories, Category, is_part, packet
from functionalize.cost.liveness import Liveness, Storage
from functionalize.errors import MemoryReportError
from functionalize.ir.epilogue import Resize, Set
from functionalize.ir.generators import is_random
from functionalize.ir.guards import AliasGuard
from functionalize.ir.inputs import WholeStorage
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.phases import OPTIMIZER, phase_of
from functionalize.planner.scratch.scratch import scratch_of, uncounted
from functionalize.planner.timeline.timeline import (
    BEFORE,
    Allocation,
    Event,
    LateAllocation,
    LateOps,
    Op,
    Purpose,
    Timeline,
)
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program
from functionalize.repeats import are_calls_of, calls_of
from functionalize.util.user_stack import user_line

EPILOGUE = "epilogue"
_GENERATOR_BYTES = 5056  # the state of the CPU's generator
_NO_CATEGORIES: Mapping[str, Category] = {}


def program_timeline(
    program: Program,
    known: Mapping[str, Category] = _NO_CATEGORIES,
    target: str | None = None,
) -> Timeline:
    """The memory of a replay.

    known: input name -> category, where the caller knows it; it overrides the category of the input's source.
    target: the device type or GPU model whose kernels run, to count what they allocate and free inside themselves;
    None: this is not counted.
    """
    program.evaluate()
    timeline = _ReplayMemory(program, known, target).timeline()
    if target is None:
        return timeline
    return replace(timeline, uncounted=uncounted((n.target for n in program.graph.nodes), target))


class _ReplayMemory:
    """Collects allocations and events, in the order of a replay."""

    def __init__(
        self,
        program: Program,
        known: Mapping[str, Category],
        target: str | None,
    ) -> None:
        self.program, self.known, self.target = program, known, target
        self.last = last_write(program)
        self.calls: list[Any] = []  # of the graph of the timeline
        self.device = _device(self.live.nodes)
        self.end = len(self.live.nodes)  # the index of the epilogue's op
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        # input -> the allocation of its storage at its present size
        self.home: dict[int, Allocation] = {}

    def timeline(self) -> Timeline:
        """Allocations and events of inputs, then of the graph, then of the epilogue."""
        self._inputs()
        self._constants()
        generator = self._generator()
        held = self._graph()
        self._epilogue()
        outliving = self._outliving()
        nodes, self.calls = self.live.nodes, calls_of(self.program.graph)
        for storage, result in held:
            if storage not in outliving:
                self._free(result, self.end)
        if generator is not None:
            self._free(generator, self.end)
        del self.live  # a tenth of what a plan holds; few of its purposes may be asked for
        ops = LateOps(len(nodes) + 1, partial(self._op, nodes, {}))
        return Timeline("program", ops, tuple(self.allocations), tuple(self.events))

    def _op(self, nodes: Sequence[fx.Node], lines: dict[str, str], index: int) -> Op:
        """The op of a node, or the epilogue. lines: by stack trace, which many nodes share."""
        if index == len(nodes):
            return Op(EPILOGUE, "")
        node = nodes[index]
        self.program.describe()
        trace = node.meta.get("stack_trace") or ""
        if trace not in lines:
            lines[trace] = user_line(trace)
        name = str(node.target) if node.op == "call_function" else node.op
        module = str(node.meta.get("module") or "")
        return Op(name, phase_of(node) or "", module, lines[trace])

    # -- before ------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        """A storage for each group of inputs that share one, and for each constant."""
        groups: dict[Any, list[int]] = {}
        for i, key in enumerate(_storages_of_inputs(self.program)):
            if isinstance(self.program.inputs[i].geometry, Geometry):
                groups.setdefault(key, []).append(i)
        for members in groups.values():
            specs = [self.program.inputs[i] for i in members]
            if specs[0].device.type != self.device:
                continue
            allocation = LateAllocation(specs[0].nbytes, BEFORE, partial(self._of_input, members))
            self.home.update(dict.fromkeys(members, allocation))
            if allocation.nbytes:
                self._make(allocation)

    def _constants(self) -> None:
        """An allocation for each tensor that the graph reads as an attribute."""
        nodes = (n for n in self.live.nodes if n.op == "get_attr")
        for node in {self.live.aliases.of(n): n for n in nodes}.values():
            value = node.meta["val"]
            if isinstance(value, Tensor) and value.device.type == self.device:
                nbytes = value.untyped_storage().nbytes()
                self._make(LateAllocation(nbytes, BEFORE, partial(self._of_constant, node)))

    def _generator(self) -> Allocation | None:
        """The copy of the generator's state that is restored if a replay fails."""
        if self.device != "cpu" or not any(map(is_random, self.live.nodes)):
            return None
        state = Allocation(
            _GENERATOR_BYTES, Category.RNG_STATE, "generator", BEFORE, None, self.end, "uint8[5056]"
        )
        return self._make(state)

    # -- the graph ---------------------------------------------------------------------------------

    def _graph(self) -> list[tuple[Storage, Allocation]]:
        """Make and free every value of the graph; the storages that are still live when it returns."""
        dying: list[list[tuple[Storage, Allocation]]] = [[] for _ in self.live.nodes]
        making = [(i, s) for i, s in enumerate(self.live.storages) if self._is_counted(s)]
        making.reverse()
        for place in range(len(self.live.nodes)):
            while making and making[-1][1].first == place:
                number, storage = making.pop()
                found = LateAllocation(storage.nbytes, place, partial(self._of_storage, number))
                dying[storage.last].append((storage, self._make(found)))
            self._scratch(place)
            for _, dead in dying[place] if place < len(dying) - 1 else ():
                self._free(dead, place)
        return dying[-1] if dying else []

    def _scratch(self, place: int) -> None:
        """Make an op's scratch after its results, and free it at the same op."""
        node = self.live.nodes[place]
        nbytes = scratch_of(node, self.target) if self.target is not None else 0
        if nbytes:
            scratch = Allocation(nbytes, Category.SCRATCH, node.name, place, None, place)
            self._free(self._make(scratch), place)

    def _is_counted(self, storage: Storage) -> bool:
        first = storage.nodes[0]
        if self.last is not None and first is self.last.node:
            return False
        value = next(tensors_of(first.meta["val"]))
        return storage.nbytes > 0 and value.device.type == self.device

    # -- purposes ----------------------------------------------------------------------------------

    @cached_property
    def live(self) -> Liveness:
        """Made when the timeline is, and again when purposes are asked for."""
        if self.calls and not are_calls_of(self.calls, self.program.graph):
            raise MemoryReportError(
                "the graph of the program was changed after its timeline was made, so the purposes of storages cannot "
                "be found: read the timeline before, or make a new one by `program_timeline(program)`"
            )
        return Liveness(self.program.graph, in_order(self.program.graph, self.last))

    @cached_property
    def categories(self) -> Categories:
        return Categories(self.program, self.live, self.known)

    @cached_property
    def padding(self) -> Padding:
        return Padding(self.categories, self.live.aliases)

    @cached_property
    def uses(self) -> dict[fx.Node, int]:
        return _last_uses(self.live.nodes)

    @cached_property
    def last_uses(self) -> dict[fx.Node, int]:
        """The root node of a group of aliases -> the last use of any of them."""
        found: dict[fx.Node, int] = {}
        for node, place in self.uses.items():
            root = self.live.aliases.of(node)
            found[root] = max(place, found.get(root, BEFORE))
        return found

    def _of_input(self, members: Sequence[int]) -> Purpose:
        """The purpose of the storage of these inputs."""
        homes, spec = self.categories.placeholders, self.program.inputs[members[0]]
        category = self.categories.inputs[members[0]]
        sharded = category == Category.SHARDED_PARAMETERS
        padding = self.padding.of_shard(homes[members[0]], spec.nbytes) if sharded else 0
        last = max(self.last_uses[self.live.aliases.of(homes[i])] for i in members)
        return Purpose(category, spec.name, last, str(spec.geometry), padding)

    def _of_constant(self, node: fx.Node) -> Purpose:
        last, look = self.last_uses[self.live.aliases.of(node)], str(geometry_of(node.meta["val"]))
        return Purpose(Category.BUFFERS, str(node.target), last, look)

    def _of_storage(self, number: int) -> Purpose:
        storage = self.live.storages[number]
        first = storage.nodes[0]
        if not isinstance(first.meta["val"], Tensor) and len(storage.nodes) > 1:
            first = storage.nodes[1]  # the node of the list's item has a better name
        name = self.categories.names.get(storage, first.name)
        category, value = self.categories.of(storage), first.meta["val"]
        shape = str(geometry_of(value)) if isinstance(value, Tensor) else ""
        if category == Category.UNSHARDED_PARAMETERS:
            shape = self.padding.seen(storage)[0]
        padding = self.padding.of(storage)
        last = max(self.uses[node] for node in storage.nodes)
        return Purpose(category, name, last, shape, padding)

    def _resized(self, old: Allocation) -> Purpose:
        return Purpose(old.category, old.name, self.end, old.shape)

    # -- after -------------------------------------------------------------------------------------

    def _epilogue(self) -> None:
        """Resize storages of inputs, all that grow before any that shrinks; then move inputs to other storages."""
        resizes = [a for a in self.program.epilogue if isinstance(a, Resize)]
        growing = [a for a in resizes if a.nbytes > self._nbytes(a.input)]
        for resize in (*growing, *resizes):  # the second time, one that has grown has its size
            self._resize(resize)
        for action in self.program.epilogue:
            if isinstance(action, Set) and action.input in self.home:
                self._move(action)

    def _nbytes(self, input: int) -> int:
        return self.home[input].nbytes if input in self.home else 0

    def _resize(self, action: Resize) -> None:
        old = self.home.get(action.input)
        if old is None or old.nbytes == action.nbytes:
            return
        new = LateAllocation(action.nbytes, self.end, partial(self._resized, old))
        for input, home in list(self.home.items()):
            if home is old:
                self.home[input] = new
        if new.nbytes:
            self._make(new)
        if old.nbytes:
            self._free(old, self.end)

    def _move(self, action: Set) -> None:
        """Move an input to another storage; free its former one, unless another input is on it."""
        old = self.home.pop(action.input)
        if action.other is not None:
            self.home[action.input] = self.home.get(action.other, old)
        if all(home is not old for home in self.home.values()) and old.nbytes:
            self._free(old, self.end)

    def _outliving(self) -> set[Storage]:
        """The storages of outputs, and those that inputs are moved to."""
        slots = results(self.program.graph)
        kept = [role.slot for output in self.program.outputs for role in results_of(output)]
        kept += [a.slot for a in self.program.epilogue if isinstance(a, Set) and a.slot is not None]
        nodes = [node for slot in kept if isinstance(node := slots[slot], fx.Node)]
        return {storage for node in nodes for storage in self.live.of[node]}

    # -- events ------------------------------------------------------------------------------------

    def _make(self, allocation: Allocation) -> Allocation:
        self.allocations.append(allocation)
        self.events.append(Event(allocation.made, allocation, True))
        return allocation

    def _free(self, allocation: Allocation, op: int) -> None:
        allocation.freed = op
        self.events.append(Event(op, allocation, False))


# -- sizes -----------------------------------------------------------------------------------------


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The last place that reads or writes each node; reading an item of a list does not count for the list.

    For a result of the graph it is the place of the epilogue.
    """
    found: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        found[node] = place
        if not is_part(node):
            read = place + 1 if node.op == "output" else place
            found.update(dict.fromkeys(node.all_input_nodes, read))
    return found


def _storages_of_inputs(program: Program) -> tuple[Any, ...]:
    """A key per input, equal for inputs on one storage; without an `AliasGuard` each input has its own."""
    for guard in program.guards:
        if isinstance(guard, AliasGuard) and len(guard.groups) == len(program.inputs):
            return guard.groups
    return tuple(
        spec.source.input if isinstance(spec.source, WholeStorage) else i
        for i, spec in enumerate(program.inputs)
    )


def _device(nodes: Sequence[fx.Node]) -> str:
    """The type of the accelerator on which an input, a constant or a factory's result is, else "cpu"."""
    begin = (n for n in nodes if n.op != "call_function" or "device" in n.kwargs)
    kinds = (t.device.type for n in begin for t in tensors_of(n.meta.get("val")))
    return next(iter(accelerators(kinds)), "cpu")


# -- padding ---------------------------------------------------------------------------------------

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
