"""Ranks agree on replay or capture where they could differ: programs that read a number in the middle.

Eager and replay issue the same collectives in the same order, so a rank that replays works with one that
records, whatever guard failed before. A number that Python reads (`.item()`) is known only after the graph
ran with its collectives: a rank that then ran the step again would issue them twice, alone. So the ranks of
such a program agree three times: when it is kept (all keep theirs, or none does), before each replay (all have
one, or all record), and after its graph ran (every number is as it was, or all run the step again).

Refusal: a rank that does not take part in time, because its step reads no number where another's does.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from functionalize._compat import group_of_name
from functionalize.core.early import is_early
from functionalize.core.groups import group_name, is_group
from functionalize.core.numbers import is_given
from functionalize.core.ops import OpRecord, refs_in
from functionalize.core.program import Program
from functionalize.errors import UncapturableError
from functionalize.frontend.dispatch import Recorder

_NAMESPACE = "_c10d_functional"
_PATIENCE = timedelta(minutes=5)


def collectives(program: Program) -> Counter[str]:
    """How many collectives of each kind the graph issues."""
    return Counter(
        str(n.target).split(".")[1]
        for n in program.graph.nodes
        if getattr(n.target, "namespace", "") == _NAMESPACE
        and not str(n.target).split(".")[1].startswith(("wait_tensor", "_wrap"))
    )


class Level(enum.IntEnum):
    """What became of a recording, or of a replay's guards; ranks go by the worst among them."""

    KEPT = 0
    NOT_YET = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Vote:
    """The process groups of a step that both communicates and reads numbers."""

    groups: tuple[str, ...]
    device: torch.device

    @staticmethod
    def of(recorder: Recorder) -> Vote | None:
        """None where the ranks cannot differ in what they issue."""
        return Vote.among(recorder) if reads_numbers(recorder) else None

    @staticmethod
    def among(recorder: Recorder) -> Vote | None:
        """The vote of all ranks that a recording talked with, None if there are none."""
        names: dict[str, torch.device] = {}
        for record in recorder.records:
            for name in _groups_of(record):
                refs = refs_in(record.args)
                device = recorder.infos[refs[0].storage].device if refs else torch.device("cpu")
                names.setdefault(name, device)
        return Vote(tuple(names), next(iter(names.values()))) if names else None

    def __or__(self, other: Vote | None) -> Vote:
        """The vote for programs of both."""
        if other is None:
            return self
        return Vote(tuple(dict.fromkeys((*other.groups, *self.groups))), self.device)

    def any_failed(self, failed: bool) -> bool:
        """Whether a guard failed on any rank of any of the groups."""
        return self.worst(Level.NOT_YET if failed else Level.KEPT) is not Level.KEPT

    def worst(self, mine: Level) -> Level:
        """The worst outcome on any rank of any of the groups, in as many small all-reduces."""
        flag = torch.tensor(int(mine), device=self.device)
        for name in self.groups:
            group = group_of_name(name)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
            if work is not None:
                _await(work, name)
        return Level(int(flag))


def _await(work: dist.Work, name: str) -> None:
    try:
        work.wait(_PATIENCE)
    except RuntimeError as error:
        raise UncapturableError(
            f"a rank of process group {name!r} does not say whether it replays the step: every rank must "
            "read numbers (`.item()`) at the same places of the step"
        ) from error


def reads_numbers(recorder: Recorder) -> bool:
    """Whether the program of a recording has guards that are known only after its graph ran."""
    ledger, early = recorder.ledger, recorder.early_records()
    learned = ledger.facts.values() if ledger is not None else ()
    if any(id(scalar.record) not in early for scalar in recorder.scalars):
        return True
    late = (f.expression for f in learned if not is_given(f.expression))
    return any(not is_early(expression, early) for expression in late)


def _groups_of(record: OpRecord) -> list[str]:
    """The names of the process groups that an op talks in."""
    if record.target.namespace == "c10d":
        return [group_name(a) for a in record.args if is_group(a)]
    if record.target.namespace == _NAMESPACE:
        return [a for a in record.args if isinstance(a, str) and a not in _REDUCTIONS]
    return []


_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})
