"""Numbers that Python reads of the arguments alone: guarded before the graph runs.

    if mask.all(): ...          the mask is an argument    ->  EarlyGuard, a guard like all others
    if loss.item() > 9: ...     the loss is made from it   ->  ValueGuard, known when the graph has run

A Hugging Face model reads its attention mask to see whether there is any padding. Guarded early, a call finds the
one of several programs that fits its mask, nothing runs in vain, and the ranks need not agree on anything.

Invariant: whether a record is early follows from the ops before it, not from values: every rank that issues the
same ops decides alike. A graph is pure, so a part of it may be computed at any time before the epilogue.
Refusals: what depends on a parameter, a random number, another rank or a live number is not early.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from functionalize._compat.autograd import below_autograd
from functionalize._compat.graphs import pytree
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.ir.guards import TensorGuard, ValueGuard
from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.ops import OpRecord, refs_in
from functionalize.ir.scalars import LiveNumber, Read, ScalarInput, bottom_up
from functionalize.program.executable import Executable
from functionalize.program.prune_unused import drop_unused_inputs


def early_records(records: Iterable[OpRecord], given: Iterable[int]) -> frozenset[int]:
    """Ids of the records that only depend on the storages `given` (those of arguments, and constants)."""
    early: set[int] = set()
    clean = set(given)
    for record in records:
        read = {ref.storage for ref in refs_in([record.args, record.kwargs])}
        made = {ref.storage for ref in refs_in(record.outputs)}
        alone = torch.Tag.nondeterministic_seeded not in record.target.tags
        alone = alone and record.target.namespace in ("aten", "prim")
        if alone and read <= clean and not _is_live([record.args, record.kwargs]):
            early.add(id(record))
            clean |= made
        else:
            clean -= made
            if is_mutating(record.target) or not alone:
                clean -= read
    return frozenset(early)


def is_early(expression: Any, early: Container[int]) -> bool:
    """Whether an expression is made from numbers that early records gave Python, and from constants."""
    done: dict[Any, None] = {}
    for part in bottom_up(expression, done):
        if isinstance(part, ScalarInput) or (
            isinstance(part, Read) and id(part.record) not in early
        ):
            return False
        done[part] = None
    return True


def _is_live(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_is_live, arg))
    if isinstance(arg, dict):
        return any(map(_is_live, arg.values()))
    return isinstance(arg, LiveNumber)


@dataclass(frozen=True, slots=True, eq=False)
class EarlyGuard:
    """What Python learned of the arguments' values still holds. program: the part of the graph that tells."""

    program: Executable

    @staticmethod
    def of(
        learned: Sequence[tuple[fx.Node, Any, str, str]],
        inputs: Sequence[InputSpec],
        constants: Mapping[str, Any],
        runner: Any,
    ) -> EarlyGuard:
        """The guard for (node, its value, where it was read, what it is), all in one graph with these inputs."""
        nodes = list(dict.fromkeys(node for node, *_ in learned))
        program = Executable(
            graph=_part(nodes),
            constants=dict(constants),
            inputs=tuple(inputs),
            outputs=(),
            epilogue=(),
            guards=(),
            value_guards=tuple(
                ValueGuard(nodes.index(node), value, where, what)
                for node, value, where, what in learned
            ),
            in_spec=None,
            out_spec=pytree.tree_structure(()),
            runner=runner,
        )
        drop_unused_inputs(program)
        program.guards = tuple(TensorGuard(i, spec) for i, spec in enumerate(program.inputs))
        return EarlyGuard(program)

    def failure(self, call: Call) -> str | None:
        found = self.program.resolve(call.leaves)
        if isinstance(found, str):
            return found
        with torch.no_grad(), below_autograd():
            results = self.program.run(found.inputs)
        failures = (guard.failure_of(results) for guard in self.program.value_guards)
        return next((f for f in failures if f is not None), None)


def _part(wanted: Sequence[fx.Node]) -> fx.Graph:
    """A graph of its own with all placeholders, and what `wanted` are made from."""
    source = wanted[0].graph
    needed: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "placeholder" or node in needed:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in wanted))
    return graph
