"""What a program would have computed, as digests: with which the results of an audited call are compared.

    expected = ExpectedResults.of(program, call)     runs the graph, before the step runs; nothing is written
    expected.difference(leaves)                      after the step: text about the first result that differs, or None

Compared bit for bit: the tensors and numbers that the step returns, the gradients that it leaves, and the contents of
every tensor that a replay would write. Values are kept as digests, so that the step runs with the memory that it needs.
Invariant: nothing of the step's is written: the epilogue does not run, a graph that writes inputs in place gets copies
of these, and the generators get their earlier states back.
Refused (`is_comparable`): a graph that communicates with other ranks, which would wait; one that a compiler runs, which
may round differently; ops whose sums come in any order; ops of other libraries, which may have effects of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.distributed import group_of_name
from functionalize.audit.digest import Digest, digest_here
from functionalize.ir.epilogue import Copy, Set, alias, placed, window
from functionalize.ir.generators import generator_states, set_generators
from functionalize.ir.guards import same_constant
from functionalize.ir.inputs import Call
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.ir.outputs import OutputRole, Result, Wrapped
from functionalize.program.collective_order import groups_of
from functionalize.program.program import Program
from functionalize.run.boxed import boxed
from functionalize.util.process_groups import ranks_of
from functionalize.util.tensor_wrappers import plain_tensors

_KNOWN = frozenset({"aten", "prim", "prims", "functionalize", "fsdp", "_c10d_functional"})
_OF_GROUPS = ("functionalize", "_c10d_functional")
_IN_ANY_ORDER = ("index_put", "_unsafe_index_put", "put", "scatter", "index_add", "index_reduce")


def is_comparable(program: Program) -> bool:
    """Whether the graph can be run beside the step: it has no effect, waits for no rank, gives the bits of eager."""
    if program.runner not in (None, boxed):
        return False
    if torch.are_deterministic_algorithms_enabled():
        in_any_order: tuple[str, ...] = ()
    elif any(spec.device.type != "cpu" for spec in program.inputs):
        return False  # on a GPU any op may sum by atomic additions
    else:
        in_any_order = _IN_ANY_ORDER
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    targets = {id(node.target): node.target for node in calls}.values()
    for target in targets:
        space = getattr(target, "namespace", "aten")
        if space not in _KNOWN or getattr(target, "__name__", "").startswith(in_any_order):
            return False
    communicating = {
        id(target) for target in targets if getattr(target, "namespace", "") in _OF_GROUPS
    }
    return not any(
        ranks_of(group_of_name(group)) > 1
        for node in calls
        if id(node.target) in communicating
        for group in groups_of(node.target, node.args)
    )


@dataclass(frozen=True, slots=True)
class WrittenInput:
    """An input that a replay writes. tensor: on its storage. contents: what it would hold after the replay."""

    name: str
    tensor: Tensor
    geometry: Geometry
    contents: Digest


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """The digests of one run of a graph. leaves: for each leaf of the result and its gradients, what it should be:
    the digests of its tensors, a number, or None if another comparison covers it. written: see `WrittenInput`.
    """

    leaves: tuple[Any, ...]
    written: tuple[WrittenInput, ...]

    @staticmethod
    def of(program: Program, call: Call) -> ExpectedResults:
        """Run the graph on resolved inputs; raises `GuardError` if a guard on a number fails, as a replay does."""
        states = generator_states()
        inplace = {at: call.inputs[at] for at in program.writes}
        with torch.no_grad(), disable_current_modes():
            copies = {at: _with_own_storage(tensor) for at, tensor in inplace.items()}
        for at, copied in copies.items():
            call.inputs[at] = copied
        try:
            with torch.no_grad():
                results = program.results(call, None)
        finally:
            for at, tensor in inplace.items():
                call.inputs[at] = tensor
            with disable_current_modes():
                set_generators(states)
        with torch.no_grad(), disable_current_modes():
            leaves = tuple(_expected(role, results) for role in program.outputs)
            moved = {action.input for action in program.epilogue if isinstance(action, Set)}
            written = [
                WrittenInput(
                    program.inputs[at].name,
                    inplace[at],
                    geometry_of(inplace[at]),
                    digest_here(copied),
                )
                for at, copied in copies.items()
            ]
            written += [
                WrittenInput(
                    program.inputs[action.input].name,
                    call.inputs[action.input],
                    action.geometry,
                    digest_here(_as_written(results[action.slot], action.geometry)),
                )
                for action in program.epilogue
                if isinstance(action, Copy) and action.input not in moved
            ]
        return ExpectedResults(leaves, tuple(written))

    def difference(self, leaves: Sequence[Any]) -> str | None:
        """The first result that differs. leaves: of the result and of the assigned gradients, as eager left them."""
        with torch.no_grad(), disable_current_modes():
            # A forward's program also returns the values that its backward needs, after the leaves.
            for at, (expected, leaf) in enumerate(zip(self.leaves, leaves, strict=False)):
                if expected is not None and not _is_as(expected, leaf):
                    return f"leaf {at} of the result has other bits than the program computes"
            for each in self.written:
                if each.geometry.end > each.tensor.untyped_storage().nbytes():
                    return f"`{each.name}` was freed, the program writes it"
                if digest_here(window(each.tensor, each.geometry)) != each.contents:
                    return f"`{each.name}` holds other bits than the program writes"
        return None


def _with_own_storage(tensor: Tensor) -> Tensor:
    """A tensor of the same geometry on a copy of the storage."""
    octets = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return alias(octets.set_(tensor.untyped_storage().clone()), geometry_of(tensor))


def _as_written(value: Tensor, geometry: Geometry) -> Tensor:
    """A result as `copy_` writes it into a window."""
    return value.to(geometry.dtype).expand(geometry.size)


def _expected(role: OutputRole, results: Sequence[Any]) -> Any:
    if isinstance(role, Wrapped):
        inner = [_expected(each, results) for each in role.inner.values()]
        return None if None in inner else [part for each in inner for part in each]
    if not isinstance(role, Result):
        return None
    value = results[role.slot]
    if not isinstance(value, Tensor):
        return value
    if role.geometry is not None:
        value = alias(value, placed(value, role.geometry))
    return [digest_here(value)]


def _is_as(expected: Any, leaf: Any) -> bool:
    if isinstance(expected, list):
        return expected == list(_digests(leaf))
    return same_constant(leaf, expected)


def _digests(leaf: Any) -> Iterator[Digest]:
    if isinstance(leaf, Tensor):
        yield from map(digest_here, plain_tensors(leaf))
