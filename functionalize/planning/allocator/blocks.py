"""Blocks of reserved memory: between their neighbours, in the pool of the free ones, and as they are shown.

    pool.insert(block); pool.remove(block)   the free blocks of a stream and kind, by size and then address
    run(head)                                the mapped blocks from one on
    Segment, Piece, Action                   what the allocator has, and did, for people and files

Invariant: the blocks of a segment follow each other without a gap, linked both ways.
O(log blocks) to find, and a list insertion, which moves memory, to change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from functionalize.planning.timeline.timeline import Allocation


class Piece(NamedTuple):
    """A block as it is shown. owner: whose it is; None: it is free."""

    address: int
    nbytes: int
    owner: Allocation | None

    @property
    def requested(self) -> int:
        """The bytes of it that were asked for."""
        return self.owner.nbytes if self.owner is not None else 0


class Segment(NamedTuple):
    """Memory reserved in one piece, and its blocks in the order of their addresses."""

    address: int
    nbytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[Piece, ...]


class Action(NamedTuple):
    """What the allocator did at an event of the timeline. kind: as the entries of a memory snapshot are named.

    alloc, free: nbytes as requested; segment_alloc, segment_free, segment_map, segment_unmap: nbytes reserved.
    """

    event: int
    kind: str
    address: int
    nbytes: int
    stream: int
    owner: Allocation | None


class Arena(NamedTuple):
    """The addresses of an expandable segment."""

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
        self.calls = 0  # how many requests the pool had seen when the block became free

    @property
    def whole(self) -> bool:
        """Whether the block is all of its segment."""
        return self.prev is None and self.next is None

    def before(self, block: Block) -> None:
        """Become the one before a block."""
        self.prev, self.next, block.prev = block.prev, block, self
        if self.prev is not None:
            self.prev.next = self

    def after(self, block: Block) -> None:
        """Become the one after a block."""
        self.prev, self.next, block.next = block, block.next, self
        if self.next is not None:
            self.next.prev = self


class Pool:
    """The free blocks of one stream and kind by size and address, and its unmapped ranges by address."""

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
        """The free blocks, the smallest first."""
        return [self.free[address] for _, address in self.order]


def could_be(block: Block) -> int:
    """The size of a block with the unmapped addresses after it."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def run(head: Block) -> Iterator[Block]:
    """The mapped blocks from one on."""
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next
