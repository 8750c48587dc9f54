"""Ranks agree on replay or capture where they could differ: programs that read a number in the middle.

Eager and replay issue the same collectives in the same order, so a rank that replays works with one that
records, whatever guard failed before. A number that Python reads (`.item()`) is known only after the graph
ran with its collectives: a rank that then ran the step again would issue them twice, alone. So the ranks
vote before and after such a replay, and run it again together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from functionalize._compat import group_of_name
from functionalize.core.program import Program

_NAMESPACE = "_c10d_functional"


def collectives(program: Program) -> Counter[str]:
    """How many collectives of each kind the graph issues."""
    return Counter(
        str(n.target).split(".")[1]
        for n in program.graph.nodes
        if getattr(n.target, "namespace", "") == _NAMESPACE
        and not str(n.target).split(".")[1].startswith(("wait_tensor", "_wrap"))
    )


@dataclass(frozen=True, slots=True)
class Vote:
    """The process groups of a program that has both collectives and guards on values."""

    groups: tuple[str, ...]
    device: torch.device

    @staticmethod
    def of(program: Program) -> Vote | None:
        """None where the ranks cannot differ in what they issue."""
        names = [
            arg
            for n in program.graph.nodes
            if getattr(n.target, "namespace", "") == _NAMESPACE
            for arg in n.args
            if isinstance(arg, str) and arg not in _REDUCTIONS
        ]
        if not names or not program.value_guards:
            return None
        return Vote(tuple(dict.fromkeys(names)), program.inputs[0].device)

    def any_failed(self, failed: bool) -> bool:
        """Whether a guard failed on any rank of any of the groups, in as many small all-reduces."""
        flag = torch.tensor(int(failed), device=self.device)
        for name in self.groups:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group_of_name(name))
        return bool(flag)


_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})
