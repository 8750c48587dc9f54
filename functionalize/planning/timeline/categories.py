"""What the storages of a program are for: a `Category` for each input, and for each storage that its graph makes.

    w ─▶ view ─▶ cat ─▶ all_gather ─▶ wait ─▶ split_with_sizes_copy ─▶ view ─▶ addmm ─▶ relu ─▶ ...
    └ sharded    └ all-gather buffers ┘       └ unsharded parameters     └ temporaries, or saved
      parameters                                                            if backward reads them
    mm ─▶ view ─▶ _chunk_cat ─▶ reduce_scatter ─▶ wait ─▶ view ─▶ _fused_adamw ─▶ copy_ to w, exp_avg
    └ unsharded   └ reduce-scatter └ sharded gradients            └ as what they are copied to
      gradients     buffers

Told by the flow of values alone, not by names. A parameter is unsharded by a collective of what is made of parameters
alone; a buffer that the model itself reads is the parameter. Gradients are what is made in backward and goes, over
casts, sums, packing and collectives, to the optimizer or the caller. So an all-gather or a reduce-scatter of
activations (tensor parallelism) is none of these: its values are activations like all others.
Inputs are told by their sources, which say where they live. Needs `val` and `phase`; linear in nodes and edges.
Invariant: every storage has one category. `UNKNOWN` is an input whose source tells nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property, reduce
from typing import Any

from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.analysis.aliases import is_view, results
from functionalize.ir.epilogue import Copy
from functionalize.ir.generators import GET_STATE
from functionalize.ir.inputs import Argument, Captured, InputSpec, Source, WholeStorage
from functionalize.ir.phases import FORWARD, OPTIMIZER, phase_of
from functionalize.ir.waits import WAIT
from functionalize.planning.timeline.liveness import Liveness, Storage
from functionalize.planning.timeline.timeline import Category
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program

_PARAMETERS = (Category.SHARDED_PARAMETERS, Category.UNSHARDED_PARAMETERS)
_PACKS = ("cat", "_chunk_cat", "stack", "slice_scatter", "split_with_sizes_copy", "constant_pad_nd")
_ARITHMETIC = ("add", "sub", "mul", "div", "_to_copy", "clone", "copy", "copy_", "add_", "mul_")
_LISTS = tuple(f"_foreach_{name}" for name in ("add", "mul", "div", "copy", "add_", "mul_", "div_"))
_TRANSFERS = frozenset((*_PACKS, *_ARITHMETIC, *_LISTS, "div_", "select_scatter", "as_strided"))
_REDUCTION, _UPDATE = 1, 2  # what may lie on the way of a gradient


class Categories:
    """The categories of a described program. given: of inputs by name, where the caller knows better."""

    def __init__(
        self, program: Program, live: Liveness, given: Mapping[str, Category] | None = None
    ) -> None:
        self.program, self.live = program, live
        given = given or {}
        self.inputs = tuple(
            given.get(spec.name) or category_of_input(spec, program.inputs)
            for spec in program.inputs
        )
        self.placeholders = [n for n in live.nodes if n.op == "placeholder"]
        self._input = dict(zip(self.placeholders, self.inputs, strict=True))
        self._phase = _phases(live.nodes)
        self._found: dict[Storage, Category] = {}  # the first that is found holds
        self.names: dict[Storage, str] = {}  # of unsharded parameters, and of new values of inputs
        self.new: dict[Storage, int] = {}  # the input that each is copied to in the end
        self.parts: dict[
            Storage, list[Storage]
        ] = {}  # what is copied out of an all-gather's result
        self.pieces: dict[Storage, list[fx.Node]] = {}  # the inputs that are packed for one
        self.gathers = self._parameters()
        self._results()
        self._gradients()
        self._optimizer()

    def of(self, storage: Storage) -> Category:
        """What a storage that the graph makes is for."""
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
        """The phase of a node; of one without, that which it lies in."""
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
        """Buffers of the gathers of parameters, and what is made of the gathered alone; whether there are any."""
        shards = {n for n, category in self._input.items() if category in _PARAMETERS}
        starts: dict[fx.Node, None] = {}
        whole: dict[fx.Node, None] = {}
        for node in self.live.nodes:
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
                whole[node] = None
        for node in _leading_to(starts, shards):
            self._set(node, Category.ALL_GATHER_BUFFERS)
        for node in shards:  # of a group of one rank, and what autocast casts
            if packet(node) in ("clone", "_to_copy") and self._phase[node] != OPTIMIZER:
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
        for node in whole:  # what only others of these are copied from
            for storage in self.live.of[node]:
                if storage not in read_by_model and (node in starts or storage in copied):
                    self._found.setdefault(storage, Category.ALL_GATHER_BUFFERS)
        for node in whole:
            self._set(node, Category.UNSHARDED_PARAMETERS)
        for start in starts:
            self._name(start)
        return bool(starts)

    def _name(self, start: fx.Node) -> None:
        """Note what one gather's result is split into, and the inputs that each part is gathered from."""
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
        """What is made in backward and goes to the optimizer, or to the caller, with nothing computed of it."""
        sums = self._sums_of_messages()
        bound: dict[fx.Node, int] = {}  # goes there -> what lies on the way
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
            given_on = node in sums or _is_transfer(node)
            if is_communication(node) or (given_on and any(n in reduced for n in read)):
                reduced.add(node)
                self._set(node, Category.SHARDED_GRADIENTS)
                continue
            if packet(node) in _PACKS or any(n in packed for n in read):
                packed.add(node)
            self._set(node, self._unreduced(bound[node], node in packed))

    def _sums_of_messages(self) -> set[fx.Node]:
        """Sums over what other ranks sent: a reduction that somebody wrote by hand."""
        after: set[fx.Node] = set()
        found: set[fx.Node] = set()
        for node in self.live.nodes:
            read = any(n in after for n in node.all_input_nodes)
            if is_communication(node) or (read and _is_transfer(node)):
                after.add(node)
            elif read and packet(node) in ("sum", "mean"):
                after.add(node)
                found.add(node)
        return found

    def _way(
        self, user: fx.Node, bound: Mapping[fx.Node, int], sums: Collection[fx.Node]
    ) -> int | None:
        """What lies on the way over `user`; None if that way leads elsewhere."""
        if user.op == "output":
            return 0
        if self._phase[user] == OPTIMIZER:
            return _UPDATE
        if user in bound and is_communication(user):
            return bound[user] | _REDUCTION
        given_on = user in bound and (_is_transfer(user) or user in sums)
        return bound[user] if given_on else None

    def _unreduced(self, way: int, packed: bool) -> Category:
        if way & _REDUCTION:
            return Category.REDUCE_SCATTER_BUFFERS if packed else Category.UNSHARDED_GRADIENTS
        kept = self.gathers and not way & _UPDATE  # by FSDP2, for a later microbatch to reduce
        return Category.UNSHARDED_GRADIENTS if kept else Category.SHARDED_GRADIENTS

    # -- the optimizer -----------------------------------------------------------------------------

    def _optimizer(self) -> None:
        """What a gradient becomes by a factor, as clipping and unscaling do, is the gradient."""
        gradients = {n for n, c in self._input.items() if c == Category.SHARDED_GRADIENTS}
        for node in self.live.nodes:
            if node.op != "call_function":
                continue
            looks = is_part(node) or is_view(node)
            if self._phase[node] == BACKWARD or (looks and node.args[0] in gradients):
                gradients.add(node)  # whatever the optimizer reads of a backward
            elif self._phase[node] == OPTIMIZER and not looks:
                read = _tensors_read(node)
                sizes = {t.numel() for n in read if n in gradients for t in _values(n)}
                others = (t for n in read if n not in gradients for t in _values(n))
                made = {t.numel() for t in _values(node)}
                if made and made <= sizes and all(t.numel() == 1 for t in others):
                    gradients.add(node)
                    self._set(node, Category.SHARDED_GRADIENTS)

    def _results(self) -> None:
        """What is copied to an input in the end is for what that input is for."""
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
    """What a tensor is for, by where it lives: sources of the front end have a `category`."""
    if isinstance(source, Argument):
        return Category.INPUTS
    if isinstance(source, Captured):
        return Category.BUFFERS
    found: Category = getattr(source, "category", Category.UNKNOWN)
    return found


def category_of_input(spec: InputSpec, inputs: tuple[InputSpec, ...]) -> Category:
    """What an input is for; the whole storage of another input is for what that one is for."""
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
    """The phase of every node; one without is of the phase it lies in."""
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
    """Whether a node gives on what it reads: moved, cast, packed or summed up."""
    return (
        is_part(node) or is_view(node) or node.target is WAIT or packet(node) in _TRANSFERS
    ) and node.op == "call_function"


def _tensors_read(node: fx.Node) -> list[fx.Node]:
    """The tensors and lists of tensors that a node reads; numbers aside."""
    kinds = (Tensor, list, tuple)
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), kinds)]


def _values(node: fx.Node) -> Iterable[Tensor]:
    return tensors_of(node.meta.get("val"))


def _origin(piece: fx.Node) -> fx.Node:
    """The input that a piece is made of."""
    while piece.op == "call_function" and piece.all_input_nodes:
        piece = piece.all_input_nodes[0]
    return piece


def _leading_to(ends: Iterable[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """The nodes of a set that `ends` are made of."""
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in among and node not in found:
                found.add(node)
                todo.append(node)
    return found
