"""CUDA's caching allocator: which block serves a request, and when more memory is reserved.

    machine = CachingAllocator(Settings())
    block = machine.malloc(nbytes, stream, owner)   None: out of memory, even after the cache was released
    machine.free(block)
    machine.reserved, machine.allocated             bytes: of all segments, of the blocks in use
    machine.segments()                              the segments and their blocks
    machine.log                                     its actions, in order

        segment    |  block in use   | free |  block in use  |   free   |
                                      ^ the smallest free block that is large enough serves a request; among blocks
                                        of that size the lowest address. If the remainder is large enough it is
                                        split off as a free block. A freed block merges with free neighbours.

A pool per stream and kind: small requests (up to 1 MiB) from segments of 2 MiB, others from larger ones. A segment is
reserved when no free block is large enough, and released only when the limit is reached. An expandable segment
(`Arena`) is a range of addresses whose pages are mapped when they are needed: 2 MiB each in a small pool, 20 MiB in a
large one.
Invariants: the blocks of a segment are contiguous; two free blocks are never neighbours.
Addresses increase with every segment and are never reused, because the driver's choice of addresses is unknown.
O(log blocks) per request, plus a list insertion and, for expandable segments, a walk over the unmapped ranges.
Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`; left out: `record_stream`, private pools, several devices.
"""

from __future__ import annotations

from bisect import bisect_left

from functionalize.planner.allocator.alloc_conf import (
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Settings,
)
from functionalize.planner.allocator.blocks import (
    Action,
    Arena,
    Block,
    Piece,
    Pool,
    Segment,
    run,
    size_when_mapped,
)
from functionalize.planner.timeline.timeline import Allocation

_FIRST_ADDRESS = 0x7F0000000000
_UNLIMITED_ARENA = 1 << 43  # bytes of an arena's address range if the device has no limit


class CachingAllocator:
    """The allocator of one device.

    event: the index of the timeline's event being replayed; the log records it with every action.
    retries: how often a request failed at first, so that the cache was released.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reserved = 0
        self.allocated = 0
        self.retries = 0
        self.event = 0
        self.log: list[Action] = []
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._used: dict[int, Block] = {}
        self._address = _FIRST_ADDRESS

    # -- requests ----------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int, owner: Allocation) -> Block | None:
        """Allocate a block of at least `nbytes` (> 0) bytes; None if the limit does not allow it."""
        size = self.settings.rounded(nbytes)
        pool = self._pool(size <= SMALL_REQUEST, stream)
        block = self._cached_block(pool, size)
        if block is None:
            self._collect()
            block = self._reserved_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._reserved_block(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._reserved_block(pool, size)
        if block is None:
            return None
        if self._splits(block, size):
            block = self._split(block, size)
        block.owner = owner
        self._used[block.address] = block
        self.allocated += block.size
        self._record("alloc", block.address, nbytes, pool, owner)
        return block

    def free(self, block: Block) -> None:
        """Merge a block with its free neighbours and return it to its pool."""
        assert block.owner is not None
        self._record("free", block.address, block.owner.nbytes, block.pool, block.owner)
        self.allocated -= block.size
        block.owner = None
        del self._used[block.address]
        self._merge(block, block.prev)
        self._merge(block, block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release every segment without a block in use, and unmap every unused page of expandable segments."""
        for pool in sorted(self._pools.values(), key=lambda each: (each.small, each.stream)):
            for block in pool.blocks():
                if block.arena is None and block.whole:
                    self._release(block)
                elif block.arena is not None:
                    self._unmap(block, block.arena)

    def segments(self) -> tuple[Segment, ...]:
        """The reserved segments by address; each contiguous mapped range of an expandable segment counts as one."""
        free = [block for pool in self._pools.values() for block in pool.free.values()]
        heads = [b for b in (*free, *self._used.values()) if b.prev is None or not b.prev.mapped]
        found = []
        for head in sorted(heads, key=lambda each: each.address):
            pieces = tuple(Piece(b.address, b.size, b.owner) for b in run(head))
            nbytes = sum(piece.nbytes for piece in pieces)
            pool, expandable = head.pool, head.arena is not None
            found.append(Segment(head.address, nbytes, pool.stream, pool.small, expandable, pieces))
        return tuple(found)

    # -- free blocks -------------------------------------------------------------------------------

    def _pool(self, small: bool, stream: int) -> Pool:
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = Pool(small, stream)
        return pool

    def _cached_block(self, pool: Pool, size: int) -> Block | None:
        """Remove the best fit from the free blocks of a pool; None if there is none."""
        if self._collects():
            # Upstream counts the requests of all streams together.
            for each in self._pools.values():
                each.calls += each.small == pool.small
        at = bisect_left(pool.order, (size, 0))
        if at == len(pool.order):
            return None
        block = pool.free[pool.order[at][1]]
        while self.settings.expandable_segments and at + 1 < len(pool.order):
            # Upstream compares expandable blocks by the size they reach once the pages after them are mapped.
            another = pool.free[pool.order[at + 1][1]]
            if size_when_mapped(another) >= size_when_mapped(block):
                break
            at, block = at + 1, another
        most, loss = self.settings.max_split_size, self.settings.max_non_split_rounding
        if most is not None and size < most <= block.size:
            return None  # the block must not be split
        if most is not None and most <= size <= block.size - (loss or self.settings.large_segment):
            return None  # the block must not be split, and too many of its bytes would be wasted
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        """Whether the bytes of a block beyond `size` become a free block."""
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        most = self.settings.max_split_size
        return (most is None or size < most) and rest > SMALL_REQUEST

    def _split(self, block: Block, size: int) -> Block:
        """Split the first `size` bytes off a block and return them; the remainder becomes free."""
        front = Block(block.address, size, block.pool, block.arena)
        front.before(block)
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return front

    def _merge(self, block: Block, other: Block | None) -> None:
        """Merge a neighbour into a block if both are free, or both unmapped."""
        if other is None or other.owner is not None or other.mapped != block.mapped:
            return
        other.pool.remove(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size

    # -- segments ----------------------------------------------------------------------------------

    def _reserved_block(self, pool: Pool, size: int) -> Block | None:
        """Reserve memory for a block of `size` bytes; None if the limit does not allow it."""
        nbytes = self.settings.segment_for(size)
        allowed = self.settings.allowed
        if allowed is not None and self.reserved + nbytes > allowed:
            return None
        if self.settings.expandable_segments:
            return self._expanded_block(pool, size)
        if not self._fits(nbytes):
            return None
        block = Block(self._new_address(nbytes), nbytes, pool)
        self.reserved += nbytes
        self._record("segment_alloc", block.address, nbytes, pool)
        return block

    def _fits(self, nbytes: int) -> bool:
        """Whether `nbytes` more can be reserved within the limit of the device."""
        return self.settings.limit is None or self.reserved + nbytes <= self.settings.limit

    def _new_address(self, nbytes: int) -> int:
        """The start of an unused range of `nbytes` addresses."""
        address = self._address
        self._address += -(-nbytes // ROUND_LARGE) * ROUND_LARGE
        return address

    def _release(self, block: Block) -> None:
        """Release a segment that consists of one free block."""
        block.pool.remove(block)
        self.reserved -= block.size
        self._record("segment_free", block.address, block.size, block.pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release cached blocks that must not be split until `size` bytes are available; return whether they are."""
        most = self.settings.max_split_size
        if most is None or self.settings.expandable_segments:
            return False
        wanted = max(size, most)
        at = bisect_left(pool.order, (wanted, 0))
        if at < len(pool.order):
            self._release(pool.free[pool.order[at][1]])
            return True
        released = 0
        while released < wanted and pool.order and pool.order[-1][0] >= most:
            block = pool.free[pool.order[-1][1]]
            released += block.size
            self._release(block)
        return released >= wanted

    def _collects(self) -> bool:
        """Whether garbage collection is enabled; as in torch, it needs `fraction` as well as the threshold."""
        return self.settings.garbage_collection_threshold > 0 and self.settings.allowed is not None

    def _collect(self) -> None:
        """Garbage-collect: above the threshold, release large cached segments of at least average age."""
        allowed = self.settings.allowed
        if not self._collects() or allowed is None:
            return
        target = self.reserved - int(self.settings.garbage_collection_threshold * allowed)
        pools = sorted(
            (p for p in self._pools.values() if not p.small), key=lambda each: each.stream
        )
        blocks = [b for pool in pools for b in pool.blocks() if b.whole and b.arena is None]
        while target > 0 and blocks:
            ages = {id(b): b.pool.calls - b.calls for b in blocks}
            average = sum(ages.values()) / len(blocks)
            old = [b for b in blocks if ages[id(b)] >= average]
            for block in old:
                target -= block.size
                self._release(block)
            blocks = [b for b in blocks if ages[id(b)] < average]

    # -- expandable segments -----------------------------------------------------------------------

    def _expanded_block(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` bytes of an expandable segment, of which missing pages are mapped."""
        block = self._first_fit(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        # `block` is free and an unmapped range follows: mapping that merges both.
        while block.size < size:
            hole = block.next
            assert hole is not None and not hole.mapped
            if not self._map(hole, min(size - block.size, hole.size)):
                return None
            block = hole
        pool.remove(block)
        return block

    def _first_fit(self, pool: Pool, size: int) -> Block:
        """The first block of the lowest run of free and unmapped blocks that has at least `size` bytes."""
        for address in pool.hole_order:
            first = pool.holes[address]
            if first.prev is not None and first.prev.owner is None:
                first = first.prev
            found, block = 0, first
            while found < size and block is not None and block.owner is None:
                found += block.size
                block = block.next  # type: ignore[assignment]
            if found >= size:
                return first
        return self._new_arena(pool, size)

    def _new_arena(self, pool: Pool, size: int) -> Block:
        """A new unmapped address range, as torch an eighth larger than the device's memory."""
        limit, page = (
            self.settings.limit,
            SMALL_SEGMENT if pool.small else self.settings.large_segment,
        )
        nbytes = (
            -(-max(_UNLIMITED_ARENA if limit is None else limit + limit // 8, size) // page) * page
        )
        address = self._new_address(nbytes)
        hole = Block(address, nbytes, pool, Arena(address, page))
        hole.mapped = False
        pool.insert_hole(hole)
        return hole

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for `size` bytes at the start of an unmapped block; return whether the limit allows it."""
        assert block.arena is not None
        nbytes = -(-size // block.arena.page) * block.arena.page
        if not self._fits(nbytes):
            return False
        pool = block.pool
        pool.remove(block)
        block.mapped = True
        if nbytes < block.size:
            rest = Block(block.address + nbytes, block.size - nbytes, pool, block.arena)
            rest.mapped = False
            rest.after(block)
            pool.insert_hole(rest)
            block.size = nbytes
        self.reserved += nbytes
        self._record("segment_map", block.address, nbytes, pool)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert(block)
        return True

    def _unmap(self, block: Block, arena: Arena) -> None:
        """Unmap the pages that a free block covers whole; the bytes before and after these pages stay free blocks."""
        start = arena.address + -(-(block.address - arena.address) // arena.page) * arena.page
        end = (
            arena.address + (block.address + block.size - arena.address) // arena.page * arena.page
        )
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        for address, nbytes in (
            (block.address, start - block.address),
            (end, block.address + block.size - end),
        ):
            if nbytes:
                part = Block(address, nbytes, pool, arena)
                part.before(block) if address < start else part.after(block)
                pool.insert(part)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved -= end - start
        self._record("segment_unmap", start, end - start, pool)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if not block.whole:  # else no page of the arena is mapped: its address range is dropped
            pool.insert_hole(block)

    def _record(
        self, kind: str, address: int, nbytes: int, pool: Pool, owner: Allocation | None = None
    ) -> None:
        """Append an action to the log."""
        self.log.append(Action(self.event, kind, address, nbytes, pool.stream, owner))
