"""Let ops write in place where nobody reads the old value, as eager did.

    add = aten._foreach_add.Scalar([a, b], 1)           commit()
    return add[0], add[1]                       ->      _foreach_add_ = aten._foreach_add_.Scalar([a, b], 1)
    epilogue:
        copy_(a, add[0])
        copy_(b, add[1])

The result of a functional op that takes the place of an input at the end of a step is written there at once:
no second copy of parameters and states is made, and none is copied back. What every guard on a value reads, every
collective, random op and number comes before the one `commit` (ir/commit.py); what writes an input comes after
it. Ops on temporaries that die there write in place, too, anywhere (`temporaries=false`: nowhere).

Which ops have an in-place form that gives the same bits is known to analysis/inplace_forms.py. torch's own passes
(`torch.fx.passes.reinplace`, Inductor's) know neither lists (foreach, fused), nor an epilogue, nor a `commit`.

Invariant: each op computes what it did, by the same kernel, on the same values; memory in use only shrinks,
but for what waits for a hoisted number or collective.
Refuses to write an input
- whose new contents are not made from its own by ops that have an in-place form, element by element;
- whose old contents, or those on the way, are read later, or by another argument of the op;
- that shares its storage with another input, or that the epilogue resizes, replaces or overwrites otherwise;
- whose new contents are handed to the caller, or are needed by a guard, number, random op or collective;
- if the size, stride or dtype of the result differs.
A list op is done in place if that saves more than the clones of those of its elements that must stay.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.analysis.aliases import (
    Aliases,
    results,
    results_of,
    storage_classes,
)
from functionalize.analysis.dead_code import is_impure, is_number
from functionalize.analysis.inplace_forms import Write, fits, form_of, parts_of, writes_of
from functionalize.ir.commit import commit
from functionalize.ir.epilogue import Copy, Set
from functionalize.ir.ops import geometry_of
from functionalize.program.program import Program
from functionalize.program.prune_unused import drop_unused_results
from passes.base import FUNCTIONAL, INPLACE, Pass
from passes.metadata import set_value

aten = torch.ops.aten


@dataclass(frozen=True)
class Reinplace(Pass):
    """Write in place where nobody reads the old value.

    temporaries: also where it is the graph's own.
    """

    name: ClassVar[str] = "reinplace"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    produces: ClassVar[str | None] = INPLACE
    temporaries: bool = True

    def apply(self, program: Program) -> int:
        if program.stage == INPLACE:  # there is one `commit`, and it stands
            return 0
        plan = Plan(program)
        paid = plan.paid_in_place()
        if paid:
            _hoist(program.graph, plan.early, plan.first_of(paid))
        chosen = plan.chosen(paid, self.temporaries)
        if chosen:
            _rewrite(program, plan, chosen, paid)
        return len(chosen)


# -- analysis --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Memory:
    """What is known of the memory of one group of aliases.

    own: ops of torch made it, in the graph. given: it is returned. readers: the last two nodes that read
    it. members: the nodes on it.
    """

    own: bool = True
    given: bool = False
    readers: list[fx.Node] = field(default_factory=list)
    members: list[fx.Node] = field(default_factory=list)


class Plan:
    """Decides which ops of a program write in place, and where."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.slots = results(program.graph)
        self.aliases = Aliases(program.graph)
        self.writes = {n: w for n in program.graph.nodes if (w := writes_of(n)) is not None}
        self.made = {new: w for writes in self.writes.values() for w in writes for new in w.new}
        self._given: dict[fx.Node, Counter[fx.Node]] = {}  # the groups that an op is given
        self.roots: dict[Any, fx.Node] = {}
        for new, write in self.made.items():  # in the order of the graph
            self.roots[new] = self.roots.get(write.old, write.old)
        self.early = _needed_early(program, self.slots)
        self.homes = self.graph.find_nodes(op="placeholder")
        slots = (role.slot for role in _handed_out(program))
        nodes = (n for slot in slots if isinstance(n := self.slots[slot], fx.Node))
        self.handed_out = {self.aliases.of(n) for n in nodes}
        self._look(early_first=True)

    def _look(self, early_first: bool) -> None:
        """Who reads what, and when. early_first: as if `early` came before all others."""
        self.place = {n: i for i, n in enumerate(self.graph.nodes)}
        if early_first:
            for node in self.early:
                self.place[node] -= len(self.place)
        self.memory: dict[fx.Node, Memory] = {}
        for node in self.graph.nodes:
            memory = self.memory.setdefault(self.aliases.of(node), Memory())
            memory.members.append(node)
            memory.own &= node.op == "call_function" and _is_torchs(node)
            for read in _read(node):
                self._add_reader(read, node)
                for wait in _waits(node):
                    self._add_reader(read, wait)

    def _add_reader(self, read: fx.Node, node: fx.Node) -> None:
        memory = self.memory.setdefault(self.aliases.of(read), Memory())
        if node.op == "output":
            memory.given = True
        if node not in memory.readers:
            memory.readers = sorted([*memory.readers, node], key=self.place.__getitem__)[-2:]

    def of(self, node: fx.Node) -> Memory:
        """The memory of a node."""
        return self.memory[self.aliases.of(node)]

    def dies(self, write: Write) -> bool:
        """Whether nobody reads the old contents once the op has run, nor the op by another argument."""
        at = self.place[write.op]
        group = self.aliases.of(write.old)
        given = self._given.get(write.op)
        if given is None:
            given = self._given[write.op] = Counter(map(self.aliases.of, _read(write.op)))
        later = (r for r in self.memory[group].readers if r is not write.op)
        return given[group] == 1 and all(self.place[r] < at for r in later)

    def is_scrap(self, write: Write) -> bool:
        """Whether the old contents are a whole storage that the graph made, and that dies here."""
        memory = self.of(write.old)
        if not memory.own or memory.given or not fits(write) or not self.dies(write):
            return False
        value = write.old.meta["val"]
        whole = value.untyped_storage().nbytes() == geometry_of(value).nbytes
        return bool(whole and write.value.storage_offset() == 0)

    # -- inputs ------------------------------------------------------------------------------------

    def paid_in_place(self) -> dict[Copy, list[Write]]:
        """The actions that ops can do instead, each with what they write on the way."""
        found = {a: links for a in self._alone() if (links := self._links(a))}
        while True:
            home = {link for links in found.values() for link in links}
            dear = {op for op in {link.op for link in home} if not self._pays(op, home)}
            if not dear:
                return found
            found = {a: ws for a, ws in found.items() if not any(w.op in dear for w in ws)}

    def _alone(self) -> Iterator[Copy]:
        """The copies to an input that is alone on its storage, and of which no other action speaks."""
        classes = storage_classes(self.program)
        inputs = Counter(classes)
        actions: Counter[int] = Counter()
        for action in self.program.epilogue:
            named = [action.input, action.other if isinstance(action, Set) else None]
            actions.update(classes[i] for i in named if i is not None)
        for action in self.program.epilogue:
            home, spec = classes[action.input], self.program.inputs[action.input]
            alone = inputs[home] == 1 and actions[home] == 1
            if isinstance(action, Copy) and alone and action.geometry == spec.geometry:
                yield action

    def _links(self, action: Copy) -> list[Write]:
        """From the input to its new contents: what is written on the way, if all of it can be in place."""
        home, node = self.homes[action.input], self.slots[action.slot]
        if self.roots.get(node) is not home or self.aliases.of(node) in self.handed_out:
            return []
        links: list[Write] = []
        while node is not home:
            link = self.made.get(node)
            assert link is not None
            if link.spared or link.op in self.early:
                return []
            if not fits(link) or not self.dies(link):
                return []
            links.append(link)
            node = link.old
        return links

    def _pays(self, op: fx.Node, home: set[Write]) -> bool:
        """Whether an op saves more than the clones of those of its elements that must stay."""
        writes = [w for w in self.writes[op] if not w.spared]
        clones = [w for w in writes if w not in home and not self.is_scrap(w)]
        return sum(w.nbytes for w in writes if w in home) > sum(w.nbytes for w in clones)

    def first_of(self, paid: dict[Copy, list[Write]]) -> fx.Node:
        """The first op that writes an input."""
        ops = (link.op for links in paid.values() for link in links)
        return min(ops, key=self.place.__getitem__)

    # -- all ---------------------------------------------------------------------------------------

    def chosen(self, paid: dict[Copy, list[Write]], temporaries: bool) -> dict[fx.Node, set[Write]]:
        """The ops that write in place, in the order of the graph; of each, what must be cloned before."""
        self._look(early_first=False)  # nodes have moved
        home = {link for links in paid.values() for link in links}
        at_home = {link.op for link in home}
        found: dict[fx.Node, set[Write]] = {}
        for node in self.graph.nodes:
            if node not in self.writes:
                continue
            rest = [w for w in self.writes[node] if w not in home]
            if node in at_home:  # a gradient that the kernel leaves alone
                rest = [w for w in rest if not w.spared or any(n.users for n in w.new)]
            stay = {w for w in rest if not self.is_scrap(w)}
            if node in at_home or (temporaries and not stay):
                found[node] = stay
        return found


def _handed_out(program: Program) -> Iterator[Any]:
    """What the caller is given of the graph's results."""
    for role in program.outputs:
        yield from results_of(role)
    for action in program.epilogue:
        if isinstance(action, Set) and action.slot is not None:
            yield action


def _waits(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that wait for a collective, which reads what it was given until then."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return
    for user in node.users:
        yield user
        if user.target is operator.getitem:
            yield from user.users


def _is_torchs(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_torchs(node.args[0])
    return getattr(node.target, "namespace", "") in ("aten", "prims", "_c10d_functional")


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node reads, once for each time it is given one; of a list, the parts that are nodes."""
    if node.target is operator.getitem:
        return
    given: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), given.append)
    for each in given:
        yield each
        if isinstance(each.meta.get("val"), (list, tuple)):
            yield from _all_parts(each)


def _all_parts(node: fx.Node) -> Iterator[fx.Node]:
    for parts in parts_of(node).values():
        for part in parts:
            yield part
            yield from _all_parts(part)


def _needed_early(program: Program, slots: Sequence[Any]) -> dict[fx.Node, None]:
    """What must come before `commit`, in the order of the graph: all that may fail or wait, and its ancestors."""
    guarded = {slots[guard.slot] for guard in program.value_guards}
    early = {n for n in program.graph.nodes if n in guarded or is_impure(n) or is_number(n)}
    for node in reversed(program.graph.nodes):
        if node in early:
            early |= set(node.all_input_nodes)
    return {n: None for n in program.graph.nodes if n in early and n.op == "call_function"}


# -- rewriting -------------------------------------------------------------------------------------


def _hoist(graph: fx.Graph, early: dict[fx.Node, None], point: fx.Node) -> None:
    """Move what is early and comes after `point` to before it."""
    after = False
    for node in list(graph.nodes):
        after |= node is point
        if after and node in early:
            point.prepend(node)


def _rewrite(
    program: Program,
    plan: Plan,
    chosen: dict[fx.Node, set[Write]],
    paid: dict[Copy, list[Write]],
) -> None:
    graph = program.graph
    (output,) = graph.find_nodes(op="output")
    guards = [plan.slots[guard.slot] for guard in program.value_guards]
    point = plan.first_of(paid) if paid else output
    with graph.inserting_before(point):
        node = graph.create_node("call_function", commit, (), name="commit")
    node.meta["val"] = None
    moved: dict[fx.Node, fx.Node] = {}  # a result -> the memory that it was written to
    for op, stay in chosen.items():
        _put_in_place(op, plan.writes[op], stay, moved)
    node.args = tuple(_now(guard, moved) for guard in guards)
    # One node at a time: `replace_all_uses_with` would be quadratic in long lists.
    for each in graph.nodes:
        if each not in moved and any(n in moved for n in each.all_input_nodes):
            each.args = fx.node.map_arg(each.args, lambda n: _now(n, moved))
            each.kwargs = fx.node.map_arg(each.kwargs, lambda n: _now(n, moved))
    for new in moved:
        for member in plan.of(new).members:  # views of it lie elsewhere now
            if member not in moved:
                set_value(member)
    for op in reversed(chosen):
        _erase(op)
    program.epilogue = tuple(action for action in program.epilogue if action not in paid)
    program.writes = tuple(sorted(action.input for action in paid))
    drop_unused_results(program)


def _now(node: Any, moved: dict[fx.Node, fx.Node]) -> Any:
    """The node whose memory holds what `node` was."""
    while node in moved:
        node = moved[node]
    return node


def _put_in_place(
    op: fx.Node, writes: Sequence[Write], stay: set[Write], moved: dict[fx.Node, fx.Node]
) -> None:
    """Put the in-place form before an op, whose results are then where they were written: noted in `moved`."""
    found = form_of(op)
    assert found is not None
    given: Any = fx.node.map_arg((op.args, op.kwargs), lambda n: _now(n, moved))
    args: dict[int | str, Any] = dict(enumerate(given[0]))
    args.update(given[1])
    args = {at: list(arg) if isinstance(arg, (list, tuple)) else arg for at, arg in args.items()}
    with op.graph.inserting_before(op):
        for write in writes:
            memory = _now(write.old, moved)
            if write in stay:
                memory = op.graph.create_node(
                    "call_function", aten.clone.default, (memory,), name="clone"
                )
                memory.meta = _like(op)
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
    node.meta = _like(op) | {"val": None}
    if op in moved:  # it returns the one tensor that it writes
        written = moved[op].meta
        node.meta |= {"val": written["val"], "tensor_meta": written["tensor_meta"]}
        moved[op] = node


def _like(node: fx.Node) -> dict[str, Any]:
    """The metadata of a node that stands for another, without what describes its value."""
    return {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}


def _erase(op: fx.Node) -> None:
    """Erase an op that was replaced, with the parts of its results."""
    for user in list(op.users):
        _erase(user)
    op.graph.erase_node(op)
