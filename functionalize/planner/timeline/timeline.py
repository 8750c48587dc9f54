"""The memory of a step over time: its allocations and frees, in order.

    timeline = Timeline("eager", ops, allocations, events)
    timeline.peak, timeline.peak_at          requested bytes, and the event after which they are live
    timeline.live_at(timeline.peak_at)       the allocations of the peak
    timeline.stacked()                       category -> bytes after every event

        bytes   ┌──┐   an event is one allocation made or freed, while one op runs;
             ┌──┘  └─┐ allocations from before the step are made at op -1
         ────┘       └──

A resized storage is one allocation per size, as in an allocator. Scratch, which an op allocates and frees inside its
kernel, is an allocation made and freed at that op.
Invariants: every allocation has one event that makes it and at most one later event that frees it; the bytes of all
categories after an event sum up to the live bytes. Linear in events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, overload

from functionalize.cost.categories import Category

EAGER, PROGRAM = "eager", "program"  # the names of the timelines of a report
BEFORE = -1  # the op index of allocations from before the step


class Op(NamedTuple):
    """An op of the step.

    module: the fully qualified name of the module whose forward runs it, or empty. line: the user's line, or empty.
    """

    name: str
    phase: str
    module: str = ""
    line: str = ""


class LateOps(Sequence[Op]):
    """The ops of a step, each made at its first access: to find the user's line costs more than the rest.

    make: returns the op of an index.
    """

    def __init__(self, count: int, make: Callable[[int], Op]) -> None:
        self._count, self._make = count, make
        self._made: dict[int, Op] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | Sequence[Op]:
        if isinstance(index, slice):
            return [self[i] for i in range(self._count)[index]]
        index = range(self._count)[index]
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]


@dataclass(slots=True, eq=False)
class Allocation:
    """A storage at one size.

    nbytes: the requested bytes. padding: how many of these are padding (FSDP2's even shards).
    made: the index of the op that allocates it; `BEFORE` if it existed before the step.
    freed: the index of the op at which it is freed; None if it outlives the step.
    last_use: the index of the last op that reads or writes it. shape: its geometry as text, or empty.
    """

    nbytes: int
    category: Category
    name: str
    made: int
    freed: int | None
    last_use: int
    shape: str = ""
    padding: int = 0


class Purpose(NamedTuple):
    """What an `Allocation` has besides its bytes, when it is made and when it is freed."""

    category: Category
    name: str
    last_use: int
    shape: str = ""
    padding: int = 0


class LateAllocation(Allocation):
    """An allocation whose purpose is found when it is first read: it follows from readers anywhere in the graph.

    Peaks and allocators read no purposes. find: returns it.
    """

    __slots__ = ("_find",)

    def __init__(self, nbytes: int, made: int, find: Callable[[], Purpose]) -> None:
        self.nbytes, self.made, self.freed = nbytes, made, None
        self._find: Callable[[], Purpose] | None = find

    def __getattr__(self, name: str) -> Any:  # called for a slot that has no value yet
        if name not in Purpose._fields or self._find is None:
            raise AttributeError(name)
        self.category, self.name, self.last_use, self.shape, self.padding = self._find()
        self._find = None
        return getattr(self, name)


class Event(NamedTuple):
    """An allocation is made (`made` is True) or freed (False) while the op of that index runs."""

    op: int
    allocation: Allocation
    made: bool

    @property
    def nbytes(self) -> int:
        """The change of the live requested bytes."""
        return self.allocation.nbytes if self.made else -self.allocation.nbytes


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The memory of one run of a step, or of one replay.

    name: the run that it describes (`eager`, `program`). uncounted: the ops whose scratch is not known, with the number
    of their calls: 0 bytes are counted for it.
    """

    name: str
    ops: Sequence[Op]
    allocations: Sequence[Allocation]
    events: Sequence[Event]
    uncounted: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<Timeline {self.name}: {len(self.events)} events, a peak of {self.peak:,} bytes>"

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
        """The op during which the peak is reached; None if it is reached before the step."""
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
        """The bytes of each category after an event, without categories of 0 bytes."""
        return by_category(self.live_at(event))

    def stacked(self) -> dict[Category, list[int]]:
        """The bytes of each category after each event, without categories that always have 0."""
        changes: dict[Category, list[int]] = {}
        for i, (_, allocation, made) in enumerate(self.events):
            for category, nbytes in parts(allocation):
                if category not in changes:
                    changes[category] = [0] * len(self.events)
                changes[category][i] += nbytes if made else -nbytes
        order = [category for category in Category if category in changes]
        return {category: list(accumulate(changes[category])) for category in order}


def parts(allocation: Allocation) -> Iterator[tuple[Category, int]]:
    """The bytes of an allocation by category: its padding has a category of its own."""
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
