"""The purpose of each storage of a program: a `Category` for each input, and for each storage that the graph makes.

    w ─▶ view ─▶ cat ─▶ all_gather ─▶ wait ─▶ split_with_sizes_copy ─▶ view ─▶ addmm ─▶ relu ─▶ ...
    └ sharded    └ all-gather buffers ┘       └ unsharded parameters     └ temporaries, or saved
      parameters                                                            if backward reads them
    mm ─▶ view ─▶ _chunk_cat ─▶ reduce_scatter ─▶ wait ─▶ view ─▶ _fused_adamw ─▶ copy_ to w, exp_avg
    └ unsharded   └ reduce-scatter └ sharded gradients            └ as what they are copied to
      gradients     buffers

Derived from the data flow, not from names. An unsharded parameter is the result of a collective whose inputs derive
from parameters only; if the model reads the collective's buffer itself, that buffer is the unsharded parameter. A
copy of a parameter in a smaller dtype that no collective sends is a cast parameter: autocast makes them. A gradient is
made in backward and reaches the optimizer or the caller through casts, sums, packing and collectives only.
So an all-gather or a reduce-scatter of activations (tensor parallelism) matches neither rule: its values are
activations like all others. The category of an input follows from its `Source`.
Needs `val` and `phase` in `node.meta`; linear in nodes and edges.
Invariant: every storage has one category. `UNKNOWN` is an input whose source has no category.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.analysis.aliases import is_view, results
from functionalize.cost.liveness import Liveness, Storage
from functionalize.ir.epilogue import Copy
from functionalize.ir.generators import GET_STATE
from functionalize.ir.inputs import Argument, Captured, InputSpec, Source, WholeStorage
from functionalize.ir.phases import FORWARD, OPTIMIZER, phase_of
from functionalize.ir.waits import WAIT
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program


class Category(enum.StrEnum):
    """The purpose of a storage. The order is that of a stacked picture, from the bottom."""

    SHARDED_PARAMETERS = "sharded parameters"
    OPTIMIZER_STATE = "optimizer state"
    SHARDED_GRADIENTS = "sharded gradients"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    PADDING = "padding"
    UNSHARDED_PARAMETERS = "unsharded parameters"
    CAST_PARAMETERS = "cast parameters"
    ALL_GATHER_BUFFERS = "all-gather buffers"
    UNSHARDED_GRADIENTS = "unsharded gradients"
    REDUCE_SCATTER_BUFFERS = "reduce-scatter buffers"
    SAVED_ACTIVATIONS = "saved activations"
    RECOMPUTED = "recomputed"
    TEMPORARIES = "temporaries"
    SCRATCH = "op scratch"
    RNG_STATE = "RNG state"
    UNKNOWN = "unknown"


PARAMETERS = (Category.SHARDED_PARAMETERS, Category.UNSHARDED_PARAMETERS)
_PACKS = ("cat", "_chunk_cat", "stack", "slice_scatter", "split_with_sizes_copy", "constant_pad_nd")
_ARITHMETIC = ("add", "sub", "mul", "div", "_to_copy", "clone", "copy", "copy_", "add_", "mul_")
_LISTS = tuple(f"_foreach_{name}" for name in ("add", "mul", "div", "copy", "add_", "mul_", "div_"))
_TRANSFERS = frozenset((*_PACKS, *_ARITHMETIC, *_LISTS, "div_", "select_scatter", "as_strided"))
# Flags of a gradient's way to its readers: it passes a collective; it ends in the optimizer.
_REDUCTION, _UPDATE = 1, 2


class Categories:
    """The categories of a described program.

    known: input name -> category, where the caller knows it; it overrides the category of the input's source.
    """

    def __init__(
        self, program: Program, live: Liveness, known: Mapping[str, Category] | None = None
    ) -> None:
        self.program, self.live = program, live
        known = known or {}
        self.inputs = tuple(
            known.get(spec.name) or category_of_input(spec, program.inputs)
            for spec in program.inputs
        )
        self.placeholders = [n for n in live.nodes if n.op == "placeholder"]
        self._input = dict(zip(self.placeholders, self.inputs, strict=True))
        self._phase = _phases(live.nodes)
        self._found: dict[Storage, Category] = {}  # a storage keeps its first category
        # The names of unsharded parameters, and of new values of inputs.
        self.names: dict[Storage, str] = {}
        # storage -> the input into which the epilogue copies it
        self.new: dict[Storage, int] = {}
        # result of an all-gather -> the storages of the parameters that are copied out of it
        self.parts: dict[Storage, list[Storage]] = {}
        # input of an all-gather -> the placeholders of the shards that are packed into it
        self.pieces: dict[Storage, list[fx.Node]] = {}
        self.gathers = self._parameters()
        self._results()
        self._gradients()
        self._optimizer()

    def of(self, storage: Storage) -> Category:
        """The category of a storage that the graph makes."""
        found = self._found.get(storage)
        if found is not None:
            return found
        maker = self.live.nodes[storage.first]
        if maker.target is GET_STATE:
            return Category.RNG_STATE
        if self._phase[maker] == RECOMPUTE:
            return Category.RECOMPUTED
        saved = self._phase[maker] == FORWARD and storage in self._read_in_backward
        return Category.SAVED_ACTIVATIONS if saved else Category.TEMPORARIES

    def phase(self, node: fx.Node) -> str | None:
        """The phase of a node; a node without one is of the phase of the node before it."""
        return self._phase[node]

    def _set(self, node: fx.Node, category: Category) -> None:
        for storage in self.live.of[node]:
            self._found.setdefault(storage, category)

    @cached_property
    def _read_in_backward(self) -> set[Storage]:
        readers = (n for n in self.live.nodes if self._phase[n] in (BACKWARD, RECOMPUTE))
        read = {n for reader in readers for n in reader.all_input_nodes if not is_part(reader)}
        return {storage for node in read for storage in self.live.of[node]}

    # -- parameters --------------------------------------------------------------------------------

    def _parameters(self) -> bool:
        """Find the all-gathers of parameters, their buffers and the unsharded parameters; whether there are any."""
        # shards: nodes that derive from parameters only, before a collective. whole: those after one.
        shards = {n for n, category in self._input.items() if category in PARAMETERS}
        starts: dict[fx.Node, None] = {}
        whole: dict[fx.Node, None] = {}
        casts: list[fx.Node] = []
        for node in self.live.nodes:
            inputs = node.all_input_nodes
            if shards.isdisjoint(inputs) and whole.keys().isdisjoint(inputs):
                continue
            read = _tensors_read(node)
            if node.op != "call_function" or not read:
                continue
            if all(n in shards for n in read):
                if is_communication(node):
                    starts[node] = None
                    whole[node] = None
                else:
                    shards.add(node)
            elif all(n in whole for n in read):
                if _is_cast(node):  # the model reads the parameter itself
                    casts.append(node)
                else:
                    whole[node] = None
        for node in _leading_to(starts, shards):
            self._set(node, Category.ALL_GATHER_BUFFERS)
        # Without a collective between: an all-gather in a group of one rank is a clone.
        for node in (*shards, *casts):
            if self._phase[node] == OPTIMIZER:
                continue
            if _is_cast(node):
                self._set(node, Category.CAST_PARAMETERS)
            elif packet(node) in ("clone", "_to_copy"):
                self._set(node, Category.UNSHARDED_PARAMETERS)
        models = (n for n in whole if any(u not in whole for u in n.users))
        read_by_model = {storage for n in models for storage in self.live.of[n]}
        copied = {
            storage
            for node in whole
            if not is_part(node) and not is_view(node)
            for source in node.all_input_nodes
            for storage in self.live.of[source]
            if storage not in self.live.of[node]
        }
        # A buffer of the all-gather is read by copies into parameters only, never by the model.
        for node in whole:
            for storage in self.live.of[node]:
                if storage not in read_by_model and (node in starts or storage in copied):
                    self._found.setdefault(storage, Category.ALL_GATHER_BUFFERS)
        for node in whole:
            self._set(node, Category.UNSHARDED_PARAMETERS)
        for start in starts:
            self._name(start)
        return bool(starts)

    def _name(self, start: fx.Node) -> None:
        """Record the parameters into which the result of an all-gather is split, and the inputs of each."""
        sent: Any = start.args[0]
        packed = isinstance(sent, fx.Node) and packet(sent) == "cat"
        pieces = sent.args[0] if packed else [sent] if isinstance(sent, fx.Node) else sent
        origins = [_origin(piece) for piece in pieces]
        if packed:
            self.pieces.update(dict.fromkeys(self.live.of[sent], origins))
        node = start
        while isinstance(node.meta.get("val"), Tensor) and len(node.users) == 1:
            (node,) = node.users
        value: Any = node.meta.get("val")
        if isinstance(value, (list, tuple)) and len(value) == len(origins):
            copies = self.live.of[node]
            self.parts.update({whole: list(copies) for whole in self.live.of[start]})
            if len(copies) == len(origins):  # else they are views of the result
                names = (origin.name for origin in origins)
                self.names.update(zip(copies, names, strict=True))
        elif len(origins) == 1:
            self.names.update(dict.fromkeys(self.live.of[start], origins[0].name))

    # -- gradients ---------------------------------------------------------------------------------

    def _gradients(self) -> None:
        """Find values of backward that only transfers and collectives carry to the optimizer or the caller."""
        sums = self._sums_of_messages()
        bound: dict[fx.Node, int] = {}  # a gradient -> the flags of its way
        for node in reversed(self.live.nodes):
            if self._phase[node] == BACKWARD and node.op == "call_function" and node.users:
                ways = [self._way(user, bound, sums) for user in node.users]
                known = [way for way in ways if way is not None]
                if len(known) == len(ways):
                    bound[node] = reduce(operator.or_, known)
        reduced: set[fx.Node] = set()
        packed: set[fx.Node] = set()
        for node in self.live.nodes:
            if node not in bound:
                continue
            read = node.all_input_nodes
            carries = node in sums or _is_transfer(node)
            if is_communication(node) or (carries and any(n in reduced for n in read)):
                reduced.add(node)
                self._set(node, Category.SHARDED_GRADIENTS)
                continue
            if packet(node) in _PACKS or any(n in packed for n in read):
                packed.add(node)
            self._set(node, self._unreduced(bound[node], node in packed))

    def _sums_of_messages(self) -> set[fx.Node]:
        """Sums over the results of collectives: a reduction written by hand, as an all-gather and a sum."""
        after: set[fx.Node] = set()
        found: set[fx.Node] = set()
        for node in self.live.nodes:
            read = not after.isdisjoint(node.all_input_nodes)
            if is_communication(node) or (read and _is_transfer(node)):
                after.add(node)
            elif read and packet(node) in ("sum", "mean"):
                after.add(node)
                found.add(node)
        return found

    def _way(
        self, user: fx.Node, bound: Mapping[fx.Node, int], sums: Collection[fx.Node]
    ) -> int | None:
        """The flags of the way through `user`; None if `user` computes something else from the value."""
        if user.op == "output":
            return 0
        if self._phase[user] == OPTIMIZER:
            return _UPDATE
        if user in bound and is_communication(user):
            return bound[user] | _REDUCTION
        carries = user in bound and (_is_transfer(user) or user in sums)
        return bound[user] if carries else None

    def _unreduced(self, way: int, packed: bool) -> Category:
        if way & _REDUCTION:
            return Category.REDUCE_SCATTER_BUFFERS if packed else Category.UNSHARDED_GRADIENTS
        # FSDP2 keeps unreduced gradients for the reduction in a later microbatch.
        kept = self.gathers and not way & _UPDATE
        return Category.UNSHARDED_GRADIENTS if kept else Category.SHARDED_GRADIENTS

    # -- the optimizer -----------------------------------------------------------------------------

    def _optimizer(self) -> None:
        """A gradient multiplied by a scalar, as in clipping and unscaling, is still a gradient."""
        gradients = {n for n, c in self._input.items() if c == Category.SHARDED_GRADIENTS}
        for node in self.live.nodes:
            if node.op != "call_function":
                continue
            looks = is_part(node) or is_view(node)
            if self._phase[node] == BACKWARD or (looks and node.args[0] in gradients):
                gradients.add(node)  # every value of backward that the optimizer reads
            elif self._phase[node] == OPTIMIZER and not looks:
                read = _tensors_read(node)
                sizes = {t.numel() for n in read if n in gradients for t in _values(n)}
                others = (t for n in read if n not in gradients for t in _values(n))
                made = {t.numel() for t in _values(node)}
                if made and made <= sizes and all(t.numel() == 1 for t in others):
                    gradients.add(node)
                    self._set(node, Category.SHARDED_GRADIENTS)

    def _results(self) -> None:
        """A value that the epilogue copies into an input has the category of that input."""
        slots = results(self.program.graph)
        for action in self.program.epilogue:
            node = slots[action.slot] if isinstance(action, Copy) else None
            if isinstance(action, Copy) and isinstance(node, fx.Node):
                self._set(node, self.inputs[action.input])
                name = f"{self.program.inputs[action.input].name} (new)"
                for storage in self.live.of[node]:
                    self.names[storage], self.new[storage] = name, action.input


# -- inputs ----------------------------------------------------------------------------------------


def category_of(source: Source) -> Category:
    """The category of a tensor from its source; sources of captured state have an attribute `category`."""
    if isinstance(source, Argument):
        return Category.INPUTS
    if isinstance(source, Captured):
        return Category.BUFFERS
    found: Category = getattr(source, "category", Category.UNKNOWN)
    return found


def category_of_input(spec: InputSpec, inputs: tuple[InputSpec, ...]) -> Category:
    """The category of an input; the whole storage of another input has the category of that input."""
    while isinstance(spec.source, WholeStorage):
        spec = inputs[spec.source.input]
    return category_of(spec.source)


# -- nodes -----------------------------------------------------------------------------------------


def is_communication(node: fx.Node) -> bool:
    """Whether a node sends tensors to other ranks; waits do not."""
    space = getattr(node.target, "namespace", "")
    return space in ("_c10d_functional", "_dtensor") and node.target is not WAIT


def is_part(node: fx.Node) -> bool:
    """Whether a node only takes an item out of a list."""
    return node.target is operator.getitem


def _phases(nodes: Iterable[fx.Node]) -> dict[fx.Node, str | None]:
    """The phase of every node; a node without one is of the phase of the node before it."""
    found: dict[fx.Node, str | None] = {}
    latest: str | None = None
    for node in nodes:
        if node.op == "call_function":
            latest = phase_of(node) or latest
        found[node] = latest
    return found


def packet(node: fx.Node) -> str:
    """The name of a node's op, whatever its overload."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _is_transfer(node: fx.Node) -> bool:
    """Whether a node carries on the values that it reads: moved, cast, packed or added up."""
    return (
        is_part(node) or is_view(node) or node.target is WAIT or packet(node) in _TRANSFERS
    ) and node.op == "call_function"


def _is_cast(node: fx.Node) -> bool:
    """Whether a node copies a tensor into a smaller floating-point dtype, as autocast does."""
    if packet(node) != "_to_copy":
        return False
    source, made = node.args[0], node.meta.get("val")
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(before, Tensor) or not isinstance(made, Tensor):
        return False
    return is_narrower(made.dtype, before.dtype)


def is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether both are floating-point, and the first has fewer bytes: a quantized shard that is unpacked is no cast."""
    floating = dtype.is_floating_point and than.is_floating_point
    return floating and dtype.itemsize < than.itemsize


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    """The tensors and lists of tensors that a node reads, without symbolic numbers."""
    kinds = (Tensor, list, tuple)
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), kinds)]


def _values(node: fx.Node) -> Iterable[Tensor]:
    return tensors_of(node.meta.get("val"))


def _origin(piece: fx.Node) -> fx.Node:
    """The input from which a packed piece is computed."""
    while piece.op == "call_function" and piece.all_input_nodes:
        piece = piece.all_input_nodes[0]
    return piece


def _leading_to(ends: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """The nodes of `among` from which `ends` are computed, through nodes of `among` only."""
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in among and node not in found:
                found.add(node)
                todo.append(node)
    return found
