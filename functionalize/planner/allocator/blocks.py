"""Blocks of reserved memory: linked to their neighbours, in the pool of free blocks, and as reported to users.

    pool.insert(block); pool.remove(block)   the free blocks of one stream and kind, by size and then address
    run(head)                                `head` and the mapped blocks that follow it
    Segment, Piece, Action                   the allocator's state and log, for reports and snapshot files

Invariant: the blocks of a segment are contiguous and doubly linked.
Finding a block costs O(log blocks); insertion and removal shift a Python list besides.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from functionalize.planner.timeline.timeline import Allocation


class Piece(NamedTuple):
    """A block in a report. owner: the allocation that uses it; None: the block is free."""

    address: int
    nbytes: int
    owner: Allocation | None

    @property
    def requested(self) -> int:
        """The bytes that its owner requested; 0 if it is free."""
        return self.owner.nbytes if self.owner is not None else 0


class Segment(NamedTuple):
    """A contiguous range of reserved memory, and its blocks by address."""

    address: int
    nbytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[Piece, ...]


class Action(NamedTuple):
    """One action of the allocator at an event of the timeline.

    kind: the name that entries of a memory snapshot have. nbytes: for `alloc` and `free` the requested bytes; for
    `segment_alloc`, `segment_free`, `segment_map` and `segment_unmap` the reserved bytes.
    """

    event: int
    kind: str
    address: int
    nbytes: int
    stream: int
    owner: Allocation | None


class Arena(NamedTuple):
    """The address range of an expandable segment. page: the bytes that are mapped or unmapped together."""

    address: int
    page: int


class Block:
    """Consecutive bytes of one segment: in use, free, or (mapped is False) addresses without memory."""

    __slots__ = ("address", "arena", "calls", "mapped", "next", "owner", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: Pool, arena: Arena | None = None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.arena = arena
        self.owner: Allocation | None = None
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.calls = 0  # `pool.calls` when the block became free: its age for garbage collection

    @property
    def whole(self) -> bool:
        """Whether the block spans its whole segment."""
        return self.prev is None and self.next is None

    def before(self, block: Block) -> None:
        """Link this block in front of another one."""
        self.prev, self.next, block.prev = block.prev, block, self
        if self.prev is not None:
            self.prev.next = self

    def after(self, block: Block) -> None:
        """Link this block as the successor of another one."""
        self.prev, self.next, block.next = block, block.next, self
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The free blocks of one stream and kind (small or large), and the unmapped ranges of its expandable segments.

    calls: how many requests there were so far. order: (size, address) of the free blocks, sorted. free: these blocks by
    address. holes: unmapped ranges by address; hole_order: their addresses, sorted.
    """

    def __init__(self, small: bool, stream: int) -> None:
        self.small, self.stream = small, stream
        self.calls = 0
        self.order: list[tuple[int, int]] = []
        self.free: dict[int, Block] = {}
        self.hole_order: list[int] = []
        self.holes: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        block.calls = self.calls
        insort(self.order, (block.size, block.address))
        self.free[block.address] = block

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.order[bisect_left(self.order, (block.size, block.address))]
            del self.free[block.address]
        else:
            del self.hole_order[bisect_left(self.hole_order, block.address)]
            del self.holes[block.address]

    def insert_hole(self, block: Block) -> None:
        insort(self.hole_order, block.address)
        self.holes[block.address] = block

    def blocks(self) -> list[Block]:
        """The free blocks, smallest first."""
        return [self.free[address] for _, address in self.order]


def size_when_mapped(block: Block) -> int:
    """The size of a block if the unmapped range that follows it were mapped too."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def run(head: Block) -> Iterator[Block]:
    """`head` and the mapped blocks that follow it."""
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next
