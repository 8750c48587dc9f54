"""What memory a step holds at every moment: what is allocated and freed, in order.

    timeline = Timeline("eager", ops, allocations, events)
    timeline.peak, timeline.peak_at          requested bytes, and the event after which they are live
    timeline.live_at(timeline.peak_at)       the allocations of the peak
    timeline.stacked()                       category -> bytes after every event

        bytes   ┌──┐   an event is one allocation made or freed, while one op runs;
             ┌──┘  └─┐ what existed before the step is made before the first op (op -1)
         ────┘       └──

A storage that is resized is one allocation per size: that is what an allocator sees. What an op allocates and frees
inside itself (scratch) is an allocation that is made and freed at that op.
Invariants: every allocation has one event that makes it and at most one that frees it, later; the categories of a
moment sum up to its bytes. Linear in events.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

BEFORE = -1  # the op of what existed before the step


class Category(enum.StrEnum):
    """What a storage is for. The order is that of a stacked picture, from the bottom."""

    SHARDED_PARAMETERS = "sharded parameters"
    OPTIMIZER_STATE = "optimizer state"
    SHARDED_GRADIENTS = "sharded gradients"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    PADDING = "padding"
    UNSHARDED_PARAMETERS = "unsharded parameters"
    ALL_GATHER_BUFFERS = "all-gather buffers"
    UNSHARDED_GRADIENTS = "unsharded gradients"
    REDUCE_SCATTER_BUFFERS = "reduce-scatter buffers"
    SAVED_ACTIVATIONS = "saved activations"
    RECOMPUTED = "recomputed"
    TEMPORARIES = "temporaries"
    SCRATCH = "op scratch"
    RNG_STATE = "RNG state"
    UNKNOWN = "unknown"


class Op(NamedTuple):
    """An op of the step. module: the fully qualified name, empty outside every module; line: the user's, or empty."""

    name: str
    phase: str
    module: str = ""
    line: str = ""


@dataclass(slots=True, eq=False)
class Allocation:
    """A storage at one size.

    nbytes: as requested. padding: how many of them hold nothing (FSDP2's even shards). made, freed: the ops while
    which that happens; `BEFORE`, and None for what outlives the step. last_use: the last op that reads or writes it.
    """

    nbytes: int
    category: Category
    name: str
    made: int
    freed: int | None
    last_use: int
    shape: str = ""
    padding: int = 0


class Event(NamedTuple):
    """An allocation is made (`made`), or freed, while an op runs."""

    op: int
    allocation: Allocation
    made: bool

    @property
    def nbytes(self) -> int:
        """By how much the requested bytes change."""
        return self.allocation.nbytes if self.made else -self.allocation.nbytes


@dataclass(frozen=True, eq=False)
class Timeline:
    """The memory of one run of a step, or of one replay. name: whose lifetimes these are (`eager`, `program`)."""

    name: str
    ops: Sequence[Op]
    allocations: Sequence[Allocation]
    events: Sequence[Event]

    @cached_property
    def bytes(self) -> list[int]:
        """Requested bytes that are live after each event."""
        return list(accumulate(event.nbytes for event in self.events))

    @property
    def peak(self) -> int:
        """The most requested bytes that are live at once."""
        return max(self.bytes, default=0)

    @cached_property
    def peak_at(self) -> int:
        """The index of the first event after which the peak is reached."""
        return self.bytes.index(self.peak) if self.bytes else 0

    @property
    def peak_op(self) -> Op | None:
        """The op while which the peak is reached; None if that is before the step."""
        op = self.events[self.peak_at].op if self.events else BEFORE
        return self.ops[op] if op != BEFORE else None

    def live_at(self, event: int) -> list[Allocation]:
        """The allocations that are live after an event, the largest first."""
        live: dict[int, Allocation] = {}
        for _, allocation, made in self.events[: event + 1]:
            if made:
                live[id(allocation)] = allocation
            else:
                live.pop(id(allocation))
        return sorted(live.values(), key=lambda each: -each.nbytes)

    def categories_at(self, event: int) -> dict[Category, int]:
        """The bytes of every category after an event; those without any are left out."""
        return by_category(self.live_at(event))

    def stacked(self) -> dict[Category, list[int]]:
        """The bytes of every category after each event; categories that never have any are left out."""
        changes: dict[Category, list[int]] = {}
        for i, (_, allocation, made) in enumerate(self.events):
            for category, nbytes in parts(allocation):
                if category not in changes:
                    changes[category] = [0] * len(self.events)
                changes[category][i] += nbytes if made else -nbytes
        order = [category for category in Category if category in changes]
        return {category: list(accumulate(changes[category])) for category in order}


def parts(allocation: Allocation) -> Iterator[tuple[Category, int]]:
    """The bytes of an allocation by category: its padding is one of its own."""
    if allocation.nbytes > allocation.padding:
        yield allocation.category, allocation.nbytes - allocation.padding
    if allocation.padding:
        yield Category.PADDING, allocation.padding


def by_category(allocations: Iterable[Allocation]) -> dict[Category, int]:
    """The bytes of every category, in the order of `Category`."""
    found: dict[Category, int] = {}
    for allocation in allocations:
        for category, nbytes in parts(allocation):
            found[category] = found.get(category, 0) + nbytes
    return {category: found[category] for category in Category if category in found}
