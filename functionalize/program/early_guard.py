"""Guards on numbers that are known before the graph runs: Python computes them from arguments and small buffers alone.

    if mask.all(): ...          the mask is an argument    ->  EarlyGuard, a guard like all others
    queue[int(ptr):] = ...      a number in a buffer       ->  the same
    loss = model(x)[mask]       its size is known before   ->  an EarlyGuard of its own, that on sizes
    if loss.item() > 9: ...     the loss is computed       ->  ValueGuard, checked when the graph has run

A Hugging Face model reads its attention mask to see whether there is any padding. An early guard selects the one of
several programs that fits the mask: no graph runs in vain, and the ranks need not vote on the outcome.

The sizes that ops make of arguments are counted before each call, and are a part of its kind: `lengths/data_sizes.py`.
Invariant: whether a record is early follows from the ops before it, not from values: every rank that issues the
same ops decides alike. A graph is pure, so a part of it may be computed at any time before the epilogue.
Refusals: a value that depends on a parameter, a random number, another rank or a live number is not early.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from functionalize._compat.autograd import below_autograd
from functionalize._compat.graphs import pytree
from functionalize.discharge.rules.mutations import is_mutating, written_arguments
from functionalize.ir.guards import Guard, TensorGuard, ValueGuard, first_failure
from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.ops import OpRecord, refs_in
from functionalize.ir.scalars import LiveNumber, Read, ScalarInput, bottom_up
from functionalize.program.executable import Executable
from functionalize.program.prune_unused import drop_unused_inputs

A_SIZE = "the size of a result"


def early_records(records: Iterable[OpRecord], storages: Iterable[int]) -> frozenset[int]:
    """Ids of the records that depend on these storages only (those of arguments and constants)."""
    early: set[int] = set()
    clean = set(storages)  # storages whose contents depend on `storages` only
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
            clean -= read if not alone else _written(record)
    return frozenset(early)


def _written(record: OpRecord) -> set[int]:
    """The storages that an op of torch writes."""
    found: set[int] = set()
    for at, name in written_arguments(record.target) if is_mutating(record.target) else ():
        inside = at is not None and at < len(record.args)
        written = record.args[at or 0] if inside else record.kwargs.get(name)
        found |= {ref.storage for ref in refs_in(written)}
    return found


def is_early(expression: Any, early: Container[int]) -> bool:
    """Whether an expression depends only on numbers that Python read by early records, and on constants."""
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
    """A guard that numbers which Python read of the arguments are the same as at capture.

    program: the part of the graph that computes these numbers from the arguments, with its value guards.
    """

    program: Executable

    @staticmethod
    def of(
        readings: Sequence[tuple[fx.Node, Any, str, str]],
        inputs: Sequence[InputSpec],
        constants: Mapping[str, Any],
        runner: Any,
    ) -> EarlyGuard:
        """The guard for these readings, all of one graph with these inputs.

        readings: (node, its value at capture, the user's line that read it, a description for messages).
        """
        nodes = list(dict.fromkeys(node for node, *_ in readings))
        program = Executable(
            graph=_part(nodes),
            constants=dict(constants),
            inputs=tuple(inputs),
            outputs=(),
            epilogue=(),
            guards=(),
            value_guards=tuple(
                ValueGuard(nodes.index(node), value, where, what)
                for node, value, where, what in readings
            ),
            in_spec=None,
            out_spec=pytree.tree_structure(()),
            runner=runner,
        )
        drop_unused_inputs(program)
        program.guards = tuple(TensorGuard(i, spec) for i, spec in enumerate(program.inputs))
        return EarlyGuard(program)

    @staticmethod
    def several(
        readings: Sequence[tuple[fx.Node, Any, str, str]], sizing: Collection[int], *parts: Any
    ) -> list[Guard]:
        """One guard on the readings that are sizes of results, and one on the others.

        sizing: ids of the records that read such a size. parts: see `of`.
        """
        others, sizes = [], []
        for node, value, where, what in readings:
            if id(node.meta.get("record")) in sizing:
                sizes.append((node, value, where, A_SIZE))
            else:
                others.append((node, value, where, what))
        return [EarlyGuard.of(each, *parts) for each in (others, sizes) if each]

    @property
    def is_on_sizes(self) -> bool:
        """Whether its numbers are sizes of results."""
        return all(guard.what == A_SIZE for guard in self.program.value_guards)

    @property
    def values(self) -> tuple[Any, ...]:
        """The numbers at capture."""
        return tuple(guard.value for guard in self.program.value_guards)

    @property
    def readings(self) -> list[tuple[int, str]]:
        """For each number, which one it is, and the user's line that read it."""
        return [(i, guard.where) for i, guard in enumerate(self.program.value_guards)]

    def numbers(self, leaves: Sequence[Any]) -> list[Any] | str:
        """The numbers of a call, in the order of `values`; text: why its inputs are others."""
        results = self._results(leaves)
        if isinstance(results, str):
            return results
        return [results[guard.slot] for guard in self.program.value_guards]

    def failure(self, call: Call) -> str | None:
        results = self._results(call.leaves)
        if isinstance(results, str):
            return results
        guards = self.program.value_guards
        failed = first_failure(guards, [results[guard.slot] for guard in guards])
        return failed[1] if failed is not None else None

    def _results(self, leaves: Sequence[Any]) -> Sequence[Any] | str:
        found = self.program.resolve(leaves)
        if isinstance(found, str):
            return found
        try:
            with torch.no_grad(), below_autograd():
                return self.program.run(found.inputs)
        except Exception as error:
            # Sizes that ops made are constants in the part; or the step itself fails for these arguments.
            return f"the numbers that Python read of the arguments cannot be computed: {error}"


def _part(wanted: Sequence[fx.Node]) -> fx.Graph:
    """A separate graph with all placeholders that computes and returns `wanted`."""
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
            made = copied[node] = graph.node_copy(node, copied.__getitem__)
            made.meta = {}  # a count that was recorded is no constant of what counts it again
    graph.output(tuple(copied[node] for node in wanted))
    return graph
