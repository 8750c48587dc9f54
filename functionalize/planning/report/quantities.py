"""The memory of every op of a forward, and of its backward, in bytes: what a planner of stages or checkpoints asks.

    rows = quantities(program)
    forward_in          what the op reads: activations, parameters, inputs; each storage once
    forward_tmp         what it makes that nobody reads (outputs that only another device needs, say)
    forward_out         what it makes that is read later; a view makes nothing
    saved               of what it makes, what a backward reads: once per storage, however many values are views of it
    backward_tmp        what the ops of its backward make, and only they read
    backward_out        what they make that others read: the gradients of its inputs and parameters

    mm = aten.mm(x, w)          in: x, w   out: mm   saved: mm       (relu's backward reads relu, mm's reads x and w)
    mm_1, mm_2 (its backward)   out: the gradients of x and of w

Forward and backward belong together by autograd's number of the node (`seq_nr`), which FX keeps: the first op of a
forward that has a number and makes something stands for it. What FSDP2's hooks do in backward is counted with the
node that they run in, and so is what runs again there (checkpointing).
Invariants: a storage is counted by the one op that makes it; sums over the rows are sums over storages. Needs a
described program; linear in nodes and edges. What has no backward has zeros there, and so has a graph without phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.analysis.aliases import storage_key
from functionalize.ir.phases import FORWARD, phase_of
from functionalize.planning.timeline.categories import is_part
from functionalize.planning.timeline.liveness import Liveness, Storage
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program


class Quantities(NamedTuple):
    """One op of a forward; all numbers are bytes."""

    name: str
    op: str
    module: str
    forward_in: int
    forward_tmp: int
    forward_out: int
    saved: int
    backward_tmp: int
    backward_out: int


def quantities(program: Program) -> list[Quantities]:
    """A row for each op of the forwards (of all ops, if the graph has no phases), in their order.

    Left out is what makes nothing and has no backward: most views.
    """
    program.describe()
    live = Liveness(program.graph)
    readers = _Readers(live)
    backwards = _backwards(live.nodes)
    numbered = [n for n in live.nodes if phase_of(n) == FORWARD and "seq_nr" in n.meta]
    makers = [n for n in numbered if any(live.nodes[s.first] is n for s in live.of[n])]
    stands_for = {n.meta["seq_nr"]: n for n in (*reversed(numbered), *reversed(makers))}
    known = any(phase_of(n) for n in live.nodes)
    rows = []
    for node in live.nodes:
        if node.op != "call_function" or is_part(node) or (known and phase_of(node) != FORWARD):
            continue
        made = [s for s in live.of[node] if live.nodes[s.first] is node]
        number = node.meta.get("seq_nr", -1)
        of_it = backwards.get(number, []) if stands_for.get(number) is node else []
        if not made and not of_it:
            continue
        tmp, out = readers.split(made, {node})
        inside, gradients = readers.split(_made_by(of_it, live), set(of_it))
        saved = sum(s.nbytes for s in made if readers.in_backward(s))
        name, module = str(node.target), str(node.meta.get("module") or "")
        reads = _read_by(node)
        rows.append(Quantities(node.name, name, module, reads, tmp, out, saved, inside, gradients))
    return rows


class _Readers:
    """Who reads each storage, list items aside."""

    def __init__(self, live: Liveness) -> None:
        self._readers: dict[Storage, set[fx.Node]] = {s: set() for s in live.storages}
        for node in live.nodes:
            if is_part(node):
                continue
            for storage in {s for n in node.all_input_nodes for s in live.of[n]}:
                if live.nodes[storage.first] is not node:
                    self._readers[storage].add(node)

    def split(self, made: list[Storage], ops: set[fx.Node]) -> tuple[int, int]:
        """(bytes that nobody but these ops reads, bytes that others read)."""
        total = sum(s.nbytes for s in made)
        out = sum(s.nbytes for s in made if self._readers[s] - ops)
        return total - out, out

    def in_backward(self, storage: Storage) -> bool:
        """Whether a backward reads it."""
        return any(phase_of(n) in (BACKWARD, RECOMPUTE) for n in self._readers[storage])


def _backwards(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """The ops of each backward by autograd's number of the node that runs them."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if phase_of(node) in (BACKWARD, RECOMPUTE) and node.meta.get("autograd_node"):
            found.setdefault(node.meta["seq_nr"], []).append(node)
    return found


def _made_by(nodes: list[fx.Node], live: Liveness) -> list[Storage]:
    made = {s: None for node in nodes for s in live.of[node] if live.nodes[s.first] is node}
    return list(made)


def _read_by(node: fx.Node) -> int:
    """The bytes of the storages that a node is given, each once; of a list, what is taken out of it."""
    sizes = {storage_key(v): v.untyped_storage().nbytes() for v in _given(node)}
    return sum(sizes.values())


def _given(node: fx.Node) -> Iterator[Tensor]:
    for each in node.all_input_nodes:
        yield from tensors_of(each.meta.get("val"))
