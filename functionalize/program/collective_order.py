"""The collectives of a program or of an op stream: per process group, in order, as texts that its ranks share.

    sequences(graph)["0"]    ("all_gather_into_tensor(float32[568])", "reduce_scatter_tensor(float32[568], avg)")

Ranks of one group must issue the same collectives in the same order, or they deadlock. A text contains only what is
equal on all ranks: sizes where the op requires equal ones (the splits of an all-to-all differ), the reduction, the
number of ranks; not the group's name, which each rank numbers by itself. Messages between two ranks are compared on
one rank alone.
Invariant: the texts depend on the collectives alone, not on the rest of the graph. Linear in the nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from functionalize.ir.barrier import BARRIER
from functionalize.ir.ops import OpRecord, refs_in
from functionalize.ir.point_to_point import is_message
from functionalize.program.metadata import tensors_of
from functionalize.util.by_address import by_address
from functionalize.util.process_groups import group_name, is_group, is_reduction, reduction_text

Texts = tuple[str, ...]

_FUNCTIONAL = "_c10d_functional"
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "_allgather_into_tensor_out_c10d")
_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})
_SAME_SIZES = (
    *("all_reduce", "allreduce", "all_gather_into", "_allgather_base", "allgather_into"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "broadcast"),
)


def sequences(graph: fx.Graph, messages: bool = True) -> dict[str, Texts]:
    """The texts of a graph's collectives by group; every node needs its `val`.

    messages: also of those between two ranks, which a rank has in an order of its own.
    """
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or (not messages and is_message(node.target)):
            continue
        names = _names_of_groups(node.target)
        if names is None:
            continue
        for group in names(node.args):
            tensors = [t for n in node.all_input_nodes for t in tensors_of(n.meta["val"])]
            looks = [(tuple(t.shape), t.dtype) for t in tensors]
            found.setdefault(group, []).append(_text(node.target, looks, node.args))
    return {group: tuple(texts) for group, texts in found.items()}


def recorded_sequences(records: Iterable[OpRecord]) -> dict[str, Texts]:
    """The texts of an op stream's collectives by group, from the recorded ops."""
    found: dict[str, list[str]] = {}
    for record in records:
        if is_message(record.target):
            continue
        for group in groups_of(record.target, record.args):
            looks = [(ref.geometry.size, ref.geometry.dtype) for ref in refs_in(record.args)]
            found.setdefault(group, []).append(_text(record.target, looks, record.args))
    return {group: tuple(texts) for group, texts in found.items()}


def fingerprints(graph: fx.Graph) -> dict[str, int]:
    """A 56-bit number per group: equal if the collectives are equal."""
    return {group: _fingerprint(texts) for group, texts in sequences(graph, messages=False).items()}


def _fingerprint(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(texts).encode()).digest()[:7], "big")


def groups_of(target: Any, args: Iterable[Any]) -> list[str]:
    """The names of the process groups that an op communicates in; none for a wait."""
    names = _names_of_groups(target)
    return names(args) if names is not None else []


@by_address
def _names_of_groups(target: Any) -> Callable[[Iterable[Any]], list[str]] | None:
    """What finds the names of the groups among the arguments of an op; None for an op that does not communicate."""
    space = getattr(target, "namespace", "")
    if space == "c10d":
        return lambda args: [group_name(a) for a in args if is_group(a)]
    if space == _FUNCTIONAL and not str(target).split(".")[1].startswith(_SILENT):
        return lambda args: [
            a for a in args if isinstance(a, str) and a.lower() not in _REDUCTIONS
        ][-1:]
    return (lambda args: [a for a in args if isinstance(a, str)][:1]) if target is BARRIER else None


def _text(
    target: Any, looks: Sequence[tuple[Sequence[int], torch.dtype]], args: Iterable[Any]
) -> str:
    name = str(target).split(".")[1]
    sized = name.startswith(_SAME_SIZES)
    tensors = [f"{str(dtype)[6:]}{list(size) if sized else ''}" for size, dtype in looks]
    ends = [str(a) for a in args if type(a) is int] if is_message(target) else []
    return f"{name}({', '.join([*tensors, *ends, *_reductions(args)])})"


def _reductions(args: Iterable[Any]) -> list[str]:
    named = [a for a in args if isinstance(a, str) and a.lower() in _REDUCTIONS]
    factors = [f"premul_sum({a!r})" for a in args if isinstance(a, float)]
    boxed = [a for a in args if is_reduction(a)]
    return named + factors + [reduction_text(each) for each in boxed]
