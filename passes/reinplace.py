"""Replace functional ops by their in-place forms where the old value has no later reader, as in eager.

    add = aten._foreach_add.Scalar([a, b], 1)           commit()
    return add[0], add[1]                       ->      _foreach_add_ = aten._foreach_add_.Scalar([a, b], 1)
    epilogue:
        copy_(a, add[0])
        copy_(b, add[1])

Where the epilogue would copy a result to an input, the op writes the input itself: parameters and states have no
second copy. Every collective, random op, number read by Python and value of a guard comes before the one `commit`
(ir/commit.py); every op that writes an input comes after it. An op on a temporary without later readers writes it in
place, anywhere in the graph (`temporaries=false`: nowhere).

analysis/inplace_forms.py lists the ops whose in-place form has bitwise equal results. torch's own passes
(`torch.fx.passes.reinplace`, Inductor's) support neither lists (foreach, fused), nor an epilogue, nor a `commit`.

Invariant: each op computes the same result, by the same kernel, from the same values. Memory in use only shrinks,
except that operands of a hoisted number or collective may live longer.
Refuses to write an input
- whose new contents are not computed from its old ones by a chain of ops that have an in-place form;
- if its old contents, or an intermediate value of that chain, are read later, or by another argument of the op;
- that shares its storage with another input, or that the epilogue resizes, replaces or overwrites otherwise;
- whose new contents are returned to the caller, or are needed by a guard, number, random op or collective;
- before an optimizer, if that has few of the bytes (a counter, statistics of a norm): ops that fail before the first
  write leave the step as it was;
- if the size, stride or dtype of the result differs.
A list op is in place if this saves more bytes than are needed to clone the elements whose old contents are still read.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from functionalize._compat.graphs import input_nodes, set_arguments
from functionalize.analysis.aliases import Aliases, results, results_of, storage_classes
from functionalize.analysis.dead_code import is_number, keeps_its_place
from functionalize.analysis.inplace_forms import Write, fits, form_of, parts_of, writes_of
from functionalize.ir.commit import commit
from functionalize.ir.epilogue import Copy, Set
from functionalize.ir.ops import geometry_of
from functionalize.ir.phases import OPTIMIZER, phase_of
from functionalize.ir.waits import is_functional_collective
from functionalize.passes.base import FUNCTIONAL, INPLACE, Pass
from functionalize.passes.metadata import NewValues, origin_meta, set_value
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_results
from functionalize.util.by_address import by_address

aten = torch.ops.aten


@dataclass(frozen=True)
class Reinplace(Pass):
    """Write in place where the old value has no later reader. temporaries: also write temporaries of the graph."""

    name: ClassVar[str] = "reinplace"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    produces: ClassVar[str | None] = INPLACE
    temporaries: bool = True

    def apply(self, program: Program) -> int:
        if program.stage == INPLACE:  # the pass has run: the graph has its one `commit`
            return 0
        plan = InplacePlan(program)
        replaced = plan.epilogue_copies()
        if replaced:
            _hoist(program.graph, plan.early, plan.first_input_writer(replaced))
        chosen = plan.chosen(replaced, self.temporaries)
        if chosen:
            _rewrite(program, plan, chosen, replaced)
        return len(chosen)


_FEW_BYTES = 1 / 64  # of all that is written


# -- analysis --------------------------------------------------------------------------------------


@dataclass(slots=True)
class MemoryUse:
    """Facts about the memory of one group of aliases.

    own: whether ops of torch in this graph made it (it is no input, constant or result of a custom op).
    returned: whether the graph returns it. members: the nodes on it.
    readers: the last two nodes that read it (two, because one of them may be the op in question).
    """

    own: bool = True
    returned: bool = False
    readers: list[fx.Node] = field(default_factory=list)
    members: list[fx.Node] = field(default_factory=list)

    def add_reader(self, node: fx.Node, place: dict[fx.Node, int]) -> None:
        """Note a node that reads the memory. place: of each node."""
        readers = self.readers
        if node not in readers:
            readers.append(node)
            if len(readers) > 1:
                if place[readers[-2]] > place[node]:  # else they are in order
                    readers.sort(key=place.__getitem__)
                del readers[:-2]


class _Uses(NamedTuple):
    """What a node reads, wherever it is moved.

    read: the groups of aliases of the tensors, once per occurrence. waits: the nodes that wait for it. is_torch_op:
    whether the node calls an op of torch.
    """

    read: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    is_torch_op: bool

    @staticmethod
    def of(node: fx.Node, group: Mapping[fx.Node, fx.Node]) -> _Uses:
        is_torch_op = node.op == "call_function" and _is_torch_op(node)
        read = tuple(map(group.__getitem__, _read(node)))
        return _Uses(read, tuple(_waits(node)), is_torch_op)


class InplacePlan:
    """Decides which ops of a program write in place, and where."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.slots = results(program.graph)
        aliases = Aliases(program.graph)
        self.group = {n: aliases.of(n) for n in program.graph.nodes}
        self.uses = {n: _Uses.of(n, self.group) for n in program.graph.nodes}
        self.writes = {n: w for n in program.graph.nodes if (w := writes_of(n)) is not None}
        self.made = {new: w for writes in self.writes.values() for w in writes for new in w.new}
        self._group_counts: dict[fx.Node, Counter[fx.Node]] = {}  # per op: its arguments by group
        self.roots: dict[Any, fx.Node] = {}
        for new, write in self.made.items():  # in the order of the graph
            self.roots[new] = self.roots.get(write.old, write.old)
        self.early = _before_commit(program, self.slots)
        self.placeholders = self.graph.find_nodes(op="placeholder")
        slots = (role.slot for role in _returned(program))
        nodes = (n for slot in slots if isinstance(n := self.slots[slot], fx.Node))
        self.returned = {self.group[n] for n in nodes}
        self._find_readers(early_first=True)

    def _find_readers(self, early_first: bool) -> None:
        """Find the readers of all memory. early_first: order nodes as if those in `early` came first."""
        self.place = {n: i for i, n in enumerate(self.graph.nodes)}
        if early_first:
            for node in self.early:
                self.place[node] -= len(self.place)
        self.memory = {group: MemoryUse() for group in self.group.values()}
        for node in self.graph.nodes:
            groups, waits, is_torch_op = self.uses[node]
            memory = self.memory[self.group[node]]
            memory.members.append(node)
            memory.own &= is_torch_op
            for group in dict.fromkeys(groups) if len(groups) > 1 else groups:
                read = self.memory[group]
                read.add_reader(node, self.place)
                for wait in waits:
                    read.add_reader(wait, self.place)
        (output,) = self.graph.find_nodes(op="output")
        for group in self.uses[output].read:
            self.memory[group].returned = True

    def of(self, node: fx.Node) -> MemoryUse:
        """The memory of a node."""
        return self.memory[self.group[node]]

    def dies(self, write: Write) -> bool:
        """Whether the old contents have no reader after the op, and the op reads them by one argument only."""
        at = self.place[write.op]
        group = self.group[write.old]
        counts = self._group_counts.get(write.op)
        if counts is None:
            counts = self._group_counts[write.op] = Counter(self.uses[write.op].read)
        others = (r for r in self.memory[group].readers if r is not write.op)
        return counts[group] == 1 and all(self.place[r] < at for r in others)

    def is_reusable(self, write: Write) -> bool:
        """Whether the old value is a whole temporary storage whose last reader is this op."""
        memory = self.of(write.old)
        if not memory.own or memory.returned or not self.dies(write) or not fits(write):
            return False
        value = write.old.meta["val"]
        whole = value.untyped_storage().nbytes() == geometry_of(value).nbytes
        return bool(whole and write.value.storage_offset() == 0)

    # -- inputs ------------------------------------------------------------------------------------

    def epilogue_copies(self) -> dict[Copy, list[Write]]:
        """The copies of the epilogue that in-place ops can replace, each with the writes that replace it."""
        found = {a: chain for a in self._exclusive_copies() if (chain := self._write_chain(a))}
        return self._without_costly(self._of_optimizers(self._without_costly(found)))

    def _of_optimizers(self, found: dict[Copy, list[Write]]) -> dict[Copy, list[Write]]:
        """Without the copies of what a forward or a backward writes, if that has few of the bytes.

        Until the first write an op may fail, and nothing has changed: a counter that moves in the forward would let
        an error of the backward leave the step half done.
        """
        updates = {a: ws for a, ws in found.items() if {phase_of(w.op) for w in ws} == {OPTIMIZER}}
        nbytes, of_updates = (sum(a.geometry.nbytes for a in copies) for copies in (found, updates))
        return updates if nbytes - of_updates <= nbytes * _FEW_BYTES else found

    def _without_costly(self, found: dict[Copy, list[Write]]) -> dict[Copy, list[Write]]:
        """Without the copies that list ops replace at the cost of more clones."""
        while True:  # dropping one copy may make another list op too costly
            to_inputs = {write for chain in found.values() for write in chain}
            ops = {write.op for write in to_inputs}
            costly = {op for op in ops if not self._saves_memory(op, to_inputs)}
            if not costly:
                return found
            found = {a: ws for a, ws in found.items() if not any(w.op in costly for w in ws)}

    def _exclusive_copies(self) -> Iterator[Copy]:
        """The copies to a whole input that shares no storage and that no other action names."""
        classes = storage_classes(self.program)
        inputs = Counter(classes)
        actions: Counter[int] = Counter()
        for action in self.program.epilogue:
            named = [action.input, action.other if isinstance(action, Set) else None]
            actions.update(classes[i] for i in named if i is not None)
        for action in self.program.epilogue:
            storage, spec = classes[action.input], self.program.inputs[action.input]
            alone = inputs[storage] == 1 and actions[storage] == 1
            if isinstance(action, Copy) and alone and action.geometry == spec.geometry:
                yield action

    def _write_chain(self, action: Copy) -> list[Write]:
        """The writes that lead from an input to its new contents; empty if one of them cannot be in place."""
        source, node = self.placeholders[action.input], self.slots[action.slot]
        if self.roots.get(node) is not source or self.group[node] in self.returned:
            return []
        chain: list[Write] = []
        while node is not source:
            write = self.made.get(node)
            assert write is not None
            if write.spared or write.op in self.early:
                return []
            if not self.dies(write) or not fits(write):
                return []
            chain.append(write)
            node = write.old
        return chain

    def _saves_memory(self, op: fx.Node, to_inputs: set[Write]) -> bool:
        """Whether in-place writes save more bytes than the clones of the elements that are still read."""
        writes = [w for w in self.writes[op] if not w.spared]
        clones = [w for w in writes if w not in to_inputs and not self.is_reusable(w)]
        return sum(w.nbytes for w in writes if w in to_inputs) > sum(w.nbytes for w in clones)

    def first_input_writer(self, replaced: dict[Copy, list[Write]]) -> fx.Node:
        """The first op that writes an input."""
        ops = (write.op for chain in replaced.values() for write in chain)
        return min(ops, key=self.place.__getitem__)

    # -- all ---------------------------------------------------------------------------------------

    def chosen(
        self, replaced: dict[Copy, list[Write]], temporaries: bool
    ) -> dict[fx.Node, set[Write]]:
        """The ops that write in place, in the order of the graph, each with the writes that need a clone first."""
        self._find_readers(early_first=False)  # `_hoist` has moved nodes
        to_inputs = {write for chain in replaced.values() for write in chain}
        input_writers = {write.op for write in to_inputs}
        found: dict[fx.Node, set[Write]] = {}
        for node in self.graph.nodes:
            if node not in self.writes:
                continue
            rest = [w for w in self.writes[node] if w not in to_inputs]
            if node in input_writers:  # a spared element (a gradient) is not written
                rest = [w for w in rest if not w.spared or any(n.users for n in w.new)]
            cloned = {w for w in rest if not self.is_reusable(w)}
            if node in input_writers or (temporaries and not cloned):
                found[node] = cloned
        return found


def _returned(program: Program) -> Iterator[Any]:
    """The outputs and `set_` actions by which the caller obtains results of the graph."""
    for role in program.outputs:
        yield from results_of(role)
    for action in program.epilogue:
        if isinstance(action, Set) and action.slot is not None:
            yield action


def _waits(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that wait for a collective; until then it reads its operands."""
    if not is_functional_collective(node.target):
        return
    for user in node.users:
        yield user
        if user.target is operator.getitem:
            yield from user.users


def _is_torch_op(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_torch_op(node.args[0])
    return _is_of_torch(node.target)


@by_address
def _is_of_torch(target: Any) -> bool:
    return getattr(target, "namespace", "") in ("aten", "prims", "_c10d_functional")


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads, once per occurrence; for a tuple-valued argument also its `getitem` nodes."""
    if node.target is operator.getitem:
        return
    arguments: list[fx.Node] = []
    if input_nodes(node):
        fx.node.map_arg((node.args, node.kwargs), arguments.append)
    for each in arguments:
        yield each
        if isinstance(each.meta.get("val"), (list, tuple)):
            yield from _all_parts(each)


def _all_parts(node: fx.Node) -> Iterator[fx.Node]:
    for parts in parts_of(node).values():
        for part in parts:
            yield part
            yield from _all_parts(part)


def _before_commit(program: Program, slots: Sequence[Any]) -> dict[fx.Node, None]:
    """The nodes that must precede `commit`, in graph order: all that may fail or wait, and their ancestors.

    Reads of a generator's state are among them, since draws are.
    """
    guarded = {slots[guard.slot] for guard in program.value_guards}
    early = {n for n in program.graph.nodes if n in guarded or keeps_its_place(n) or is_number(n)}
    for node in reversed(program.graph.nodes):
        if node in early:
            early.update(input_nodes(node))
    return {n: None for n in program.graph.nodes if n in early and n.op == "call_function"}


# -- rewriting -------------------------------------------------------------------------------------


def _hoist(graph: fx.Graph, early: dict[fx.Node, None], point: fx.Node) -> None:
    """Move the nodes in `early` that come after `point` before it."""
    after = False
    for node in list(graph.nodes):
        after |= node is point
        if after and node in early:
            point.prepend(node)


def _rewrite(
    program: Program,
    plan: InplacePlan,
    chosen: dict[fx.Node, set[Write]],
    replaced: dict[Copy, list[Write]],
) -> None:
    graph = program.graph
    (output,) = graph.find_nodes(op="output")
    guards = [plan.slots[guard.slot] for guard in program.value_guards]
    point = plan.first_input_writer(replaced) if replaced else output
    with graph.inserting_before(point):
        node = graph.create_node("call_function", commit, (), name="commit")
    node.meta["val"] = None
    moved: dict[fx.Node, fx.Node] = {}  # functional result -> node whose memory was written
    for op, cloned in chosen.items():
        _put_in_place(op, plan.writes[op], cloned, moved)
    node.args = tuple(_now(guard, moved) for guard in guards)

    def now(node: fx.Node) -> Any:
        return _now(node, moved)

    # One node at a time: `replace_all_uses_with` would be quadratic in long lists.
    for each in graph.nodes:
        if each not in moved and not moved.keys().isdisjoint(input_nodes(each)):
            set_arguments(each, *fx.node.map_arg((each.args, each.kwargs), now))
    values = NewValues(program.fakes)
    for new in moved:
        for member in plan.of(new).members:  # views of the result lie in other memory now
            if member not in moved:
                values.set(member)
    for op in reversed(chosen):
        _erase(op)
    program.epilogue = tuple(action for action in program.epilogue if action not in replaced)
    program.writes = tuple(sorted(action.input for action in replaced))
    drop_unused_results(program)


def _now(node: Any, moved: dict[fx.Node, fx.Node]) -> Any:
    """The node whose memory holds the value of `node` after the rewrite."""
    while node in moved:
        node = moved[node]
    return node


def _put_in_place(
    op: fx.Node, writes: Sequence[Write], cloned: set[Write], moved: dict[fx.Node, fx.Node]
) -> None:
    """Insert the in-place form before an op; `moved` maps each result to the node that was written."""
    found = form_of(op)
    assert found is not None
    arguments: Any = fx.node.map_arg((op.args, op.kwargs), lambda n: _now(n, moved))
    args: dict[int | str, Any] = dict(enumerate(arguments[0]))
    args.update(arguments[1])
    args = {at: list(arg) if isinstance(arg, (list, tuple)) else arg for at, arg in args.items()}
    with op.graph.inserting_before(op):
        for write in writes:
            memory = _now(write.old, moved)
            if write in cloned:
                memory = op.graph.create_node(
                    "call_function", aten.clone.default, (memory,), name="clone"
                )
                memory.meta.update(origin_meta(op))
                set_value(memory)
                at, index = write.at
                if index is None:
                    args[at] = memory
                elif not write.spared:
                    args[at][index] = memory
            for new in write.new:
                moved[new] = memory
            if write.at[0] == "out":
                args["out"] = memory
        positional = tuple(args.pop(i) for i in range(len(op.args)))
        name = found[0]._schema.name.rpartition("::")[2]
        named = {str(key): value for key, value in args.items()}
        node = op.graph.create_node("call_function", found[0], positional, named, name)
    node.meta.update(origin_meta(op), val=None)
    if op in moved:  # an in-place op with one output returns the tensor that it writes
        written = moved[op].meta
        node.meta.update(val=written["val"], tensor_meta=written["tensor_meta"])
        moved[op] = node


def _erase(op: fx.Node) -> None:
    """Erase an op that was replaced, and the `getitem` nodes of its results."""
    for user in list(op.users):
        _erase(user)
    op.graph.erase_node(op)
