"""The memory of every op of a forward and of its backward, in bytes: the input of a stage or checkpoint planner.

    rows = quantities(program)
    forward_in          read by the op: activations, parameters, inputs; each storage once
    forward_tmp         made by the op and never read (for example outputs for another device)
    forward_out         made by the op and read later; a view makes nothing
    saved               made by the op and read by a backward: once per storage, however many views it has
    backward_tmp        made by the ops of its backward and read by these only
    backward_out        made by these and read by others: the gradients of its inputs and parameters

    mm = aten.mm(x, w)          in: x, w   out: mm   saved: mm       (relu's backward reads relu, mm's reads x and w)
    mm_1, mm_2 (its backward)   out: the gradients of x and of w

Forward and backward are matched by autograd's nodes (`tape/queries.py`): a backward belongs to the first op of the
forward that made its node and makes a storage. Ops of FSDP2's hooks in backward are counted with the autograd node in
which they run, and so are recomputed ops (checkpointing).
Invariants: a storage is counted by the one op that makes it; sums over the rows are sums over storages. Needs a
described program; linear in nodes and edges. The backward's columns are 0 for an op without one, and without phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.analysis.aliases import storage_key
from functionalize.cost.categories import is_part
from functionalize.cost.liveness import Liveness, Storage
from functionalize.ir.phases import FORWARD, phase_of
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program
from functionalize.tape.queries import forward_number, made_by


class Quantities(NamedTuple):
    """One op of a forward; all numbers are bytes, see the top of the file."""

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

    Ops that make no storage and have no backward are left out: most views.
    """
    program.describe()
    live = Liveness(program.graph)
    readers = _Readers(live)
    backwards = _backwards(live.nodes)
    numbered = [n for n in live.nodes if phase_of(n) == FORWARD and made_by(n) is not None]
    makers = [n for n in numbered if any(live.nodes[s.first] is n for s in live.of[n])]
    # Later entries overwrite: the first op that makes a storage, else the first op.
    owner = {made_by(n): n for n in (*reversed(numbered), *reversed(makers))}
    known = any(phase_of(n) for n in live.nodes)
    rows = []
    for node in live.nodes:
        if node.op != "call_function" or is_part(node) or (known and phase_of(node) != FORWARD):
            continue
        made = [s for s in live.of[node] if live.nodes[s.first] is node]
        number = made_by(node)
        backward = backwards.get(number, []) if owner.get(number) is node else []
        if not made and not backward:
            continue
        tmp, out = readers.split(made, {node})
        inside, gradients = readers.split(_made_by(backward, live), set(backward))
        saved = sum(s.nbytes for s in made if readers.in_backward(s))
        name, module = str(node.target), str(node.meta.get("module") or "")
        reads = _read_by(node)
        rows.append(Quantities(node.name, name, module, reads, tmp, out, saved, inside, gradients))
    return rows


class _Readers:
    """The nodes that read each storage; taking an item of a list is no read."""

    def __init__(self, live: Liveness) -> None:
        self._readers: dict[Storage, set[fx.Node]] = {s: set() for s in live.storages}
        for node in live.nodes:
            if is_part(node):
                continue
            for storage in {s for n in node.all_input_nodes for s in live.of[n]}:
                if live.nodes[storage.first] is not node:
                    self._readers[storage].add(node)

    def split(self, made: list[Storage], ops: set[fx.Node]) -> tuple[int, int]:
        """(bytes of the storages that no node outside of `ops` reads, bytes of the others)."""
        total = sum(s.nbytes for s in made)
        out = sum(s.nbytes for s in made if self._readers[s] - ops)
        return total - out, out

    def in_backward(self, storage: Storage) -> bool:
        """Whether a backward reads it."""
        return any(phase_of(n) in (BACKWARD, RECOMPUTE) for n in self._readers[storage])


def _backwards(nodes: list[fx.Node]) -> dict[int | None, list[fx.Node]]:
    """The number of an autograd node -> the ops of its backward."""
    found: dict[int | None, list[fx.Node]] = {}
    for node in nodes:
        number = forward_number(node)
        if phase_of(node) in (BACKWARD, RECOMPUTE) and number is not None:
            found.setdefault(number, []).append(node)
    return found


def _made_by(nodes: list[fx.Node], live: Liveness) -> list[Storage]:
    made = {s: None for node in nodes for s in live.of[node] if live.nodes[s.first] is node}
    return list(made)


def _read_by(node: fx.Node) -> int:
    """The bytes of the storages that a node reads, each once."""
    sizes = {storage_key(v): v.untyped_storage().nbytes() for v in _inputs(node)}
    return sum(sizes.values())


def _inputs(node: fx.Node) -> Iterator[Tensor]:
    for each in node.all_input_nodes:
        yield from tensors_of(each.meta.get("val"))
