"""CUDA's caching allocator: which request is served from where, and when more memory is reserved.

    machine = CachingAllocator(Settings())
    block = machine.malloc(nbytes, stream, owner)   None: no room, even after the cache was released
    machine.free(block)
    machine.reserved, machine.allocated             bytes: of all segments, of the blocks in use
    machine.segments()                              what is where
    machine.log                                     what it did, in order

        segment    |  block in use   | free |  block in use  |   free   |
                                      ^ a request takes the smallest free block that is large enough, the lowest of
                                        these; the rest of it stays a block if it is large enough; neighbours merge

A pool per stream and kind: small requests (up to 1 MiB) from segments of 2 MiB, others from larger ones. A segment is
reserved when no free block serves, and released only when the limit is reached. An expandable one (`Arena`) is a range
of addresses of which pages are mapped as they are needed: 2 MiB in a small pool, 20 MiB in a large one.
Invariants: the blocks of a segment follow each other without a gap; no two free ones are neighbours.
Addresses rise with every segment and are never used twice: the driver's choice among them is not known.
O(log blocks) per request but for a list insertion, which moves memory, and for the walk over unmapped ranges.
Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`; left out: `record_stream`, private pools, several devices.
"""

from __future__ import annotations

from bisect import bisect_left

from functionalize.planning.allocator.alloc_conf import (
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Settings,
)
from functionalize.planning.allocator.blocks import (
    Action,
    Arena,
    Block,
    Piece,
    Pool,
    Segment,
    could_be,
    run,
)
from functionalize.planning.timeline.timeline import Allocation

_FIRST_ADDRESS = 0x7F0000000000
_ENDLESS = 1 << 43  # addresses of an arena on a device without end


class CachingAllocator:
    """One device's allocator. event: what the log books actions under; retries: how often the cache was released."""

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
        """A block of at least so many bytes (more than none); None: there is no room for it."""
        size = self.settings.rounded(nbytes)
        pool = self._pool(size <= SMALL_REQUEST, stream)
        block = self._cached(pool, size)
        if block is None:
            self._collect()
            block = self._fresh(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._fresh(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._fresh(pool, size)
        if block is None:
            return None
        if self._splits(block, size):
            block = self._split(block, size)
        block.owner = owner
        self._used[block.address] = block
        self.allocated += block.size
        self._book("alloc", block.address, nbytes, pool, owner)
        return block

    def free(self, block: Block) -> None:
        """Put a block back into its pool, as one with its free neighbours."""
        assert block.owner is not None
        self._book("free", block.address, block.owner.nbytes, block.pool, block.owner)
        self.allocated -= block.size
        block.owner = None
        del self._used[block.address]
        self._merge(block, block.prev)
        self._merge(block, block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Release every segment that holds nothing, and every empty page of the expandable ones."""
        for pool in sorted(self._pools.values(), key=lambda each: (each.small, each.stream)):
            for block in pool.blocks():
                if block.arena is None and block.whole:
                    self._release(block)
                elif block.arena is not None:
                    self._unmap(block, block.arena)

    def segments(self) -> tuple[Segment, ...]:
        """What is reserved now, by address; of an expandable segment, one per range that is mapped throughout."""
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

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best fit among the free blocks of a pool, taken out of it."""
        if self._collects():
            for (
                each
            ) in self._pools.values():  # upstream counts the requests of all streams together
                each.calls += each.small == pool.small
        at = bisect_left(pool.order, (size, 0))
        if at == len(pool.order):
            return None
        block = pool.free[pool.order[at][1]]
        while self.settings.expandable_segments and at + 1 < len(pool.order):
            another = pool.free[
                pool.order[at + 1][1]
            ]  # a block that could grow counts as large as it could be
            if could_be(another) >= could_be(block):
                break
            at, block = at + 1, another
        most, loss = self.settings.max_split_size, self.settings.max_non_split_rounding
        if most is not None and size < most <= block.size:
            return None  # it must not be split
        if most is not None and most <= size <= block.size - (loss or self.settings.large_segment):
            return None  # too much of it would be lost
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        most = self.settings.max_split_size
        return (most is None or size < most) and rest > SMALL_REQUEST

    def _split(self, block: Block, size: int) -> Block:
        """The front of a block; the rest of it becomes free."""
        front = Block(block.address, size, block.pool, block.arena)
        front.before(block)
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return front

    def _merge(self, block: Block, other: Block | None) -> None:
        """Let a block take in a neighbour that is as free, or as unmapped, as itself."""
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

    def _fresh(self, pool: Pool, size: int) -> Block | None:
        """A block of memory that is reserved for it; None: the limit is reached."""
        nbytes = self.settings.segment_for(size)
        allowed = self.settings.allowed
        if allowed is not None and self.reserved + nbytes > allowed:
            return None
        if self.settings.expandable_segments:
            return self._grown(pool, size)
        if not self._fits(nbytes):
            return None
        block = Block(self._addresses(nbytes), nbytes, pool)
        self.reserved += nbytes
        self._book("segment_alloc", block.address, nbytes, pool)
        return block

    def _fits(self, nbytes: int) -> bool:
        """Whether the device has so many bytes more."""
        return self.settings.limit is None or self.reserved + nbytes <= self.settings.limit

    def _addresses(self, nbytes: int) -> int:
        address = self._address
        self._address += -(-nbytes // ROUND_LARGE) * ROUND_LARGE
        return address

    def _release(self, block: Block) -> None:
        """Give a segment back that is one free block."""
        block.pool.remove(block)
        self.reserved -= block.size
        self._book("segment_free", block.address, block.size, block.pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release free blocks that are too large to be split, as many as the request needs; whether that is enough."""
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
        return self.settings.garbage_collection_threshold > 0 and self.settings.allowed is not None

    def _collect(self) -> None:
        """Above the threshold, release large segments that were free for longer than the average one."""
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

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A free block of so many bytes, from pages mapped after, or between, what is mapped already."""
        block = self._room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:  # it is free, and followed by unmapped addresses: they become one
            hole = block.next
            assert hole is not None and not hole.mapped
            if not self._map(hole, min(size - block.size, hole.size)):
                return None
            block = hole
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int) -> Block:
        """The first of the free and unmapped blocks, at the lowest address, that are large enough together."""
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
        return self._arena(pool, size)

    def _arena(self, pool: Pool, size: int) -> Block:
        """Addresses for an eighth more than the device has, none of them mapped."""
        limit, page = (
            self.settings.limit,
            SMALL_SEGMENT if pool.small else self.settings.large_segment,
        )
        nbytes = -(-max(_ENDLESS if limit is None else limit + limit // 8, size) // page) * page
        address = self._addresses(nbytes)
        hole = Block(address, nbytes, pool, Arena(address, page))
        hole.mapped = False
        pool.insert_hole(hole)
        return hole

    def _map(self, block: Block, size: int) -> bool:
        """Map the first pages of an unmapped block, enough for a size; whether the device has them."""
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
        self._book("segment_map", block.address, nbytes, pool)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert(block)
        return True

    def _unmap(self, block: Block, arena: Arena) -> None:
        """Unmap the pages that lie in a free block as a whole; what is before and after them stays free."""
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
        self._book("segment_unmap", start, end - start, pool)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if not block.whole:  # else the arena is given back
            pool.insert_hole(block)

    def _book(
        self, kind: str, address: int, nbytes: int, pool: Pool, owner: Allocation | None = None
    ) -> None:
        self.log.append(Action(self.event, kind, address, nbytes, pool.stream, owner))
