"""A vote of the ranks on replay or capture, for programs on which they could differ: mostly those that read a number.

Eager and replay issue the same collectives in the same order, so a replaying rank can communicate with a recording
rank, whichever guard failed before. A number that Python reads (`.item()`) is known only after the graph, with its
collectives, has run: a rank that then ran the step again would issue its collectives a second time, alone. So the
ranks of such a program vote three times: after a recording (all keep their programs, or none does), before each replay
(all have a program, or all record), and after the graph ran: every number has its recorded value, or all replay a
program that was recorded with the numbers of this call, or all run the step.

A replay makes calls that communicate (`self.log(..., sync_dist=True)`) at its end, eager in the middle: then all ranks
must replay, or none.

A pass may merge, split or drop collectives. Ranks can then communicate only if all replay programs with equal
collectives: they vote in the same way, and before a replay each sends the fingerprint of the collectives in its graph.
If two differ (other shapes, other budgets), all ranks run the step eagerly; if an optional pass may be the reason,
they record it again without that pass. That a program reads numbers is part of this vote: if none does, no rank votes
after the graph.

A program that is predicted for other sizes counts as a rank's own, and its first call, if it is compared, as an audit.
It is compared, too, if all ranks run the call eagerly because it is rare on another one.

Note [Who records]
A number may be read on one rank alone (`if rank == 0: print(loss.item())`), so a rank cannot know from its own
recording whether the others vote. Ranks without a vote learn it from those that record the same call, without waiting
for any that does not (`Rendezvous`): before the step runs, each writes that it begins to record into the store of each
of its process groups; after it, that it has ended, and whether it reads numbers. A rank that begins always ends, also
by an exception. So only a group whose ranks have all begun is waited for. If any rank relies on a number, all vote from
then on. If some rank of a group replays or runs eagerly, nobody votes, and no program that relies on a number is kept.
Where passes may change collectives, all vote once all keep the program of a call, and none that a rank has alone is
kept: another one may run eagerly, as it makes the parameters of a lazy module.

Refusals: a rank that does not vote, or does not end its recording, in time; a rank that has ended (`LostRankError`).
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from functionalize._compat.distributed import (
    group_of_name,
    process_groups,
    sequence_number,
    store_of_group,
)
from functionalize.errors import FunctionalizeError, LostRankError, UncapturableError
from functionalize.ir.ops import refs_in
from functionalize.ir.point_to_point import is_message
from functionalize.ir.scalars import is_known_before_run
from functionalize.program.collective_order import groups_of
from functionalize.program.early_guard import is_early
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder

_NAMESPACE = "_c10d_functional"
_PATIENCE = timedelta(minutes=5)
RARE = "on a rank, calls of this kind came too seldom to be recorded or optimised"
DIFFER = (
    "after the passes the programs of the ranks issue different collectives for this call, as they may where ranks "
    "have arguments of different sizes: give passes that decide by memory no budget"
)
CHOSE = (
    "the ranks, whose arguments differ in size, chose different parameters to keep gathered: all programs are made "
    "again, and keep none"
)

# process group -> fingerprint of the collectives in it, see program/collective_order.py
Fingerprints = Mapping[str, int]


def collectives(program: Program) -> Counter[str]:
    """The number of collectives in the graph, by kind."""
    return Counter(
        str(n.target).split(".")[1]
        for n in program.graph.nodes
        if getattr(n.target, "namespace", "") == _NAMESPACE
        and not str(n.target).split(".")[1].startswith(("wait_tensor", "_wrap"))
    )


class Level(enum.IntEnum):
    """The vote of one rank. All ranks act on the worst one, which has the greatest value.

    KEPT: the rank keeps its recording, or has a program whose guards hold.
    READS: such a program also has guards on numbers that its graph computes: all vote again when it has run.
    AUDITED: such a program is due for an audit, in which all ranks run eagerly.
    DIFFERENT: all ranks have such a program, but their programs issue different collectives.
    NOT_YET: the rank warms up, or a guard failed.
    READ: a thread of the user's on some rank may read the numbers of a recording; all ranks run eagerly.
    RARE: calls of this kind came too seldom on the rank to be recorded; all ranks run eagerly.
    VAIN: its programs miss the call, and none like it is worth a recording; all ranks run eagerly.
    REFUSED: the rank cannot capture the step.
    """

    KEPT = 0
    READS = 1
    AUDITED = 2
    DIFFERENT = 3
    NOT_YET = 4
    READ = 5
    RARE = 6
    VAIN = 7
    REFUSED = 8

    @property
    def runs_eagerly(self) -> bool:
        """Whether all ranks run the call eagerly, with no vote after it."""
        return self in (Level.READ, Level.RARE, Level.VAIN)


class Votable(Protocol):
    """What a rank votes on before a replay: `CachedProgram`."""

    program: Any
    fingerprints: Fingerprints
    prediction: Any


@dataclass(frozen=True, slots=True)
class RankVote:
    """A vote of the ranks of some process groups.

    groups: the names of the process groups. device: the device of the tensors that are sent.
    compares: whether ranks compare fingerprints, since passes may have changed collectives.
    """

    groups: tuple[str, ...]
    device: torch.device
    compares: bool = False

    @staticmethod
    def of(recorder: Recorder, compares: bool = False) -> RankVote | None:
        """The vote for the program of a recording; None if its ranks cannot differ in the collectives they issue."""
        if not compares and not must_vote(recorder):
            return None
        vote = RankVote.among(recorder)
        return replace(vote, compares=compares) if vote is not None else None

    @staticmethod
    def among(recorder: Recorder) -> RankVote | None:
        """The vote of all ranks that the recorded collectives communicate with; None without collectives.

        Not of those to which messages go alone: a program with messages relies on no number that would need a vote.
        """
        names: dict[str, torch.device] = {}
        for record in recorder.records:
            if is_message(record.target):
                continue
            for name in groups_of(record.target, record.args):
                refs = refs_in(record.args)
                device = (
                    recorder.storages.infos[refs[0].storage].device if refs else torch.device("cpu")
                )
                names.setdefault(name, device)
        return RankVote(tuple(names), next(iter(names.values()))) if names else None

    def __or__(self, other: RankVote | None) -> RankVote:
        """The vote for programs of both: all groups of either."""
        if other is None:
            return self
        groups = tuple(dict.fromkeys((*other.groups, *self.groups)))
        return RankVote(groups, self.device, self.compares or other.compares)

    def any_failed(self, failure: str | None) -> bool:
        """Whether a guard failed on any rank of any of the groups. failure: of this rank."""
        return self.worst(Level.NOT_YET if failure is not None else Level.KEPT) is not Level.KEPT

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank of any of the groups: one small all-reduce per group."""
        sent = torch.tensor(flags, dtype=torch.int64, device=self.device)
        for name in self.groups:
            _all_reduce_max(sent, name)
        return [bool(each) for each in sent.tolist()]

    def worst(self, mine: Level) -> Level:
        """The worst level on any rank of any of the groups: one small all-reduce per group."""
        flag = torch.tensor(int(mine), device=self.device)
        for name in self.groups:
            _all_reduce_max(flag, name)
        return Level(int(flag))

    def before_replay(
        self,
        found: Votable | None,
        is_due: bool = False,
        is_rare: bool = False,
        is_vain: bool = False,
        is_read: bool = False,
    ) -> Level:
        """The decision of all ranks on this call. found: this rank's program; None: it has none.

        is_due: whether this rank's program is due for an audit. is_rare, is_vain: whether this rank would not record
        the call. is_read: whether it can neither record nor audit, as a thread may read the numbers.
        `KEPT`, `READS`: replay. `AUDITED`: audit. `NOT_YET`: record. `DIFFERENT`: every rank has a program, but they
        issue different collectives. `DIFFERENT`, `READ`, `RARE`, `VAIN`: run eagerly.
        """
        mine: Level
        unread: Level
        if found is None:
            mine = Level.VAIN if is_vain else Level.RARE if is_rare else Level.NOT_YET
            unread = Level.READ if mine is Level.NOT_YET else mine
        else:  # ranks that compare no collectives always vote again
            mine = Level.READS if found.program.value_guards or not self.compares else Level.KEPT
            # One that was predicted is compared before it is replayed.
            unread = Level.READ if is_due and found.prediction is not None else mine
            mine = Level.AUDITED if is_due else mine
        votes = [int(mine), int(unread), int(is_read)]
        for name in self.groups:
            # The maximum of -f is -min(f): the fingerprints f of all ranks are equal if max(f) == min(f).
            sent = found.fingerprints.get(name, 0) if found is not None and self.compares else 0
            flag = torch.tensor([*votes, sent, -sent], device=self.device)
            _all_reduce_max(flag, name)
            *votes, high, low = flag.tolist()
            if high != -low:
                votes[:2] = [max(vote, Level.DIFFERENT) for vote in votes[:2]]
        # A second round over the earlier groups, whose ranks do not have the result of a later group yet.
        for name in self.groups[:-1]:
            flag = torch.tensor(votes, device=self.device)
            _all_reduce_max(flag, name)
            votes = flag.tolist()
        _, _, some_is_read = votes
        return Level(votes[1] if some_is_read else votes[0])


class VoteAfterGraph:
    """The vote of a replay whose graph has run, and what all ranks do if a guard on a number failed on one of them.

    has_other: whether this rank has another program, which answers as this call does. may_record: whether it would
    record the call otherwise. Both are asked with the failure on this rank, None if its guards hold.
    failure: on this rank, once it has voted. tries_others, records: what all ranks do.
    """

    def __init__(
        self,
        vote: RankVote,
        has_other: Callable[[str | None], bool],
        may_record: Callable[[str | None], bool],
    ) -> None:
        self._vote, self._has_other, self._may_record = vote, has_other, may_record
        self.failure: str | None = None
        self.tries_others = False
        self.records = True

    def any_failed(self, failure: str | None) -> bool:
        """See `RankVote`."""
        self.failure = failure
        lacks_other, is_left = not self._has_other(failure), not self._may_record(failure)
        failed, some_lacks, some_leaves = self._vote.any_of(
            failure is not None, lacks_other, is_left
        )
        self.tries_others = failed and not some_lacks
        self.records = not some_leaves
        return failed


def _all_reduce_max(flag: torch.Tensor, name: str) -> None:
    with _explaining_lost_ranks(name):
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group_of_name(name), async_op=True)
        if work is not None:
            _await(work, name)


def _await(work: dist.Work, name: str) -> None:
    try:
        work.wait(_PATIENCE)
    except RuntimeError as error:
        if not _is_timeout(error):
            raise
        raise UncapturableError(
            f"a rank of process group {name!r} does not say whether it replays the step: every rank must "
            "read numbers (`.item()`) at the same places of the step"
        ) from error


def _is_timeout(error: RuntimeError) -> bool:
    """Whether a rank is silent: of a rank that has ended, the connection is closed, which is noticed at once."""
    return _TIMEOUT.search(str(error)) is not None


_TIMEOUT = re.compile(r"time(d |-)?out", re.IGNORECASE)


@contextmanager
def _explaining_lost_ranks(name: str) -> Iterator[None]:
    """A context in which the error of a broken connection to another rank says that this rank is lost."""
    try:
        yield
    except FunctionalizeError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise LostRankError(
            f"a rank of process group {name!r} has ended or cannot be reached, so the ranks cannot agree whether they "
            f"replay this call; the error of that rank says why, look there first: {reason}"
        ) from error


def must_vote(recorder: Recorder) -> bool:
    """Whether a program has guards that can be checked only after its graph ran, or makes calls that communicate."""
    if recorder.calls.communicates:
        return True
    log, early = recorder.scalar_log, recorder.early_records()
    learned = log.facts.values() if log is not None else ()
    if any(id(scalar.record) not in early for scalar in recorder.scalars):
        return True
    late = (f.expression for f in learned if not is_known_before_run(f.expression))
    return any(not is_early(expression, early) for expression in late)


def has_messages(recorder: Recorder) -> bool:
    """Whether a recorded step sends or receives messages between two ranks."""
    return any(is_message(record.target) for record in recorder.records)


# -- Note [Who records] ----------------------------------------------------------------------------

_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class _Room:
    """The entries of one recorded call in the store of one process group."""

    group: str
    store: Any
    size: int
    key: str

    def count(self, what: str, by: int) -> int:
        """Add to a counter of all ranks of the group; its value."""
        return int(self.store.add(f"{self.key}/{what}", by))

    def end(self, said: Iterable[str]) -> None:
        """This rank has ended its recording. said: what it says; also what it may say no more."""
        for each in said:
            self.store.set(f"{self.key}/says/{each}", "")
        if self.count("ended", 1) == self.size:
            self.store.set(f"{self.key}/all", "")

    def wait(self, words: Iterable[str]) -> set[str]:
        """Those of `words` that any rank of the group has said, once all have ended."""
        with _explaining_lost_ranks(self.group):
            try:
                self.store.wait([f"{self.key}/all"], _PATIENCE)
            except RuntimeError as error:
                if not _is_timeout(error):
                    raise
                raise UncapturableError(
                    f"a rank of process group {self.group!r} began to record this call of the step and does not end it"
                ) from error
        return {word for word in words if self.store.check([f"{self.key}/says/{word}"])}


class Rendezvous:
    """The ranks that record one call of a step: made when this rank begins to.

    A call is known by the step's name and by how many collectives each group has issued, which its ranks agree on.
    """

    def __init__(self, step: str) -> None:
        self._rooms: dict[str, _Room] = {}
        for group in process_groups():
            name, store = str(group.group_name), store_of_group(group)
            if store is not None and group.size() > 1:
                key = f"functionalize/{step}/{sequence_number(group)}"
                self._rooms[name] = _Room(name, store, group.size(), key)
                self._rooms[name].count("begun", 1)

    def leave(self) -> None:
        """This rank takes no part: its step has raised an exception, or has issued no collective."""
        for room in self._rooms.values():
            room.end([_ABSENT])

    def gather(
        self, groups: Iterable[str], mine: Iterable[str], words: Iterable[str]
    ) -> set[str] | None:
        """Those of `words` that any rank says; None if some rank of these groups does not record this call.

        groups: those with collectives, in an order in which all ranks name theirs. mine: the words of this rank.
        """
        rooms = [self._rooms.pop(name, None) for name in groups]
        self.leave()
        whole = [room is None or room.count("begun", 0) == room.size for room in rooms]
        said = {*mine, *([] if all(whole) and None not in rooms else [_ABSENT])}
        for room, is_whole in zip(rooms, whole, strict=True):
            if room is not None:
                room.end(said)
                if is_whole:
                    said |= room.wait([*words, _ABSENT])
        return None if _ABSENT in said else said


class ReaderNotes:
    """Says to ranks that do not vote yet that a call is not recorded here, as a thread may read its numbers.

    Without the note they would record alone, again and again, and be at rest when that thread has ended. A note is not
    waited for: it holds for the call in which it is written and the next one. call: the number of the call of the step.
    """

    def __init__(self, step: str) -> None:
        self._step = step

    def write(self, call: int) -> None:
        """A thread may read the numbers of this call on this rank."""
        for store, key in self._places():
            store.set(key, str(call))

    def are_there(self, call: int) -> bool:
        """Whether a rank has written one for this call or for the one before."""
        return any(
            store.check([key]) and int(store.get(key)) in (call - 1, call)
            for store, key in self._places()
        )

    def _places(self) -> Iterator[tuple[Any, str]]:
        """For each group of several ranks, its store and the key of the note there."""
        for group in process_groups():
            store = store_of_group(group)
            if store is not None and group.size() > 1:
                yield store, f"functionalize/{self._step}/read/{group.group_name}"
