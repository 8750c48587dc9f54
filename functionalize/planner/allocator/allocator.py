"""What CUDA's caching allocator would reserve for a timeline: a simulation of it, event by event.

    reserved = simulate(timeline)                                     one stream, torch's defaults
    reserved = simulate(timeline, Settings.parse("expandable_segments:True", limit=80 * 2**30), fsdp2_streams)
    reserved.peak, reserved.peak_allocated, reserved.fragmentation   bytes
    reserved.segments_at(reserved.peak_at)                            the segments and their blocks

        reserved   ┌───────────┐   segments: they stay reserved when their blocks are freed
        allocated  │  ┌──┐  ┌──┘   blocks: requests, rounded
        requested ─┴──┘  └──┘      `timeline.bytes`

Tensors that existed before the step are allocated first, in the order of the timeline, on an empty device. Which block
serves a request, and when more memory is reserved, is decided by a `CachingAllocator`:

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
reserved when no free block is large enough, and released only when the limit is reached. An expandable segment is a
range of addresses whose pages are mapped when they are needed: 2 MiB each in a small pool, 20 MiB in a large one.
Addresses increase with every segment and are never reused, because the driver's choice of addresses is unknown.

Invariants: reserved >= allocated >= requested after every event; either all events are replayed, in order, or an error
is raised. The blocks of a segment are contiguous and doubly linked; two free blocks are never neighbours.
Refuses (`PlannedOutOfMemoryError`): a request that exceeds the limit even after the cache was released, as torch does.
Not modelled: `record_stream` (a freed block can be reused at once), private pools, several devices, memory outside the
allocator (the CUDA context, NCCL, cuBLAS workspaces), blocks cached by earlier steps, and the addresses that the driver
chooses, which break ties.
O(log blocks) per request, plus insertions into Python lists and, for expandable segments, a walk over the unmapped
ranges; `segments_at(event)` replays all events up to that one.
Source: torch 2.13, `c10/cuda/CUDACachingAllocator.cpp`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from functionalize._compat.references import address
from functionalize.cost.categories import Category
from functionalize.errors import PlannedOutOfMemoryError
from functionalize.planner.allocator.alloc_conf import (
    MIB,
    MIN_BLOCK,
    ROUND_LARGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Settings,
)
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Timeline

__all__ = [
    "Action",
    "Block",
    "CachingAllocator",
    "Piece",
    "Reserved",
    "Segment",
    "Settings",
    "StreamOf",
    "fsdp2_streams",
    "simulate",
]

StreamOf = Callable[[Allocation], int]
"""The number of the stream that an allocation is made on; 0 is the default stream."""


def one_stream(allocation: Allocation) -> int:
    """Every allocation is on the default stream."""
    return 0


def fsdp2_streams(allocation: Allocation) -> int:
    """The streams of eager FSDP2: all-gather buffers are allocated on stream 1, reduce-scatter outputs on stream 2.

    Source: `foreach_all_gather` and `foreach_reduce` of torch 2.13.
    """
    return {Category.ALL_GATHER_BUFFERS: 1, Category.SHARDED_GRADIENTS: 2}.get(
        allocation.category, 0
    )


@dataclass(frozen=True, eq=False, repr=False)
class Reserved:
    """The result of `simulate`: what the allocator reserves for a timeline.

    bytes: reserved bytes after each event.
    allocated: bytes of the blocks in use (rounded sizes) after each event.
    log: the actions of the allocator, in order.
    retries: how often the limit forced the allocator to release its cache, which synchronizes with the device.
    """

    timeline: Timeline
    settings: Settings
    stream_of: StreamOf
    bytes: list[int]
    allocated: list[int]
    log: list[Action]
    retries: int

    def __repr__(self) -> str:
        return f"<Reserved for {self.timeline.name}: a peak of {self.peak:,} bytes>"

    @cached_property
    def peak(self) -> int:
        """The maximum of the reserved bytes."""
        return max(self.bytes, default=0)

    @cached_property
    def peak_at(self) -> int:
        """The index of the first event after which the peak is reached."""
        return self.bytes.index(self.peak) if self.bytes else 0

    @property
    def peak_allocated(self) -> int:
        """The maximum of the allocated bytes."""
        return max(self.allocated, default=0)

    @property
    def fragmentation(self) -> int:
        """Reserved but not allocated bytes at the peak; if it is reached several times, where most is allocated."""
        peak, moments = self.peak, zip(self.bytes, self.allocated, strict=True)
        return min((r - a for r, a in moments if r == peak), default=0)

    def segments_at(self, event: int) -> tuple[Segment, ...]:
        """The segments after an event, by address."""
        return _replay(self.timeline, self.settings, self.stream_of, event + 1)[0].segments()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments after the last event."""
        return self.segments_at(len(self.timeline.events) - 1)


def simulate(
    timeline: Timeline, settings: Settings | None = None, stream_of: StreamOf | None = None
) -> Reserved:
    """Replay a timeline through the caching allocator. stream_of: None means one stream for all allocations."""
    settings, stream_of = settings or Settings(), stream_of or one_stream
    machine, reserved, allocated = _replay(timeline, settings, stream_of, len(timeline.events))
    return Reserved(
        timeline, settings, stream_of, reserved, allocated, machine.log, machine.retries
    )


def _replay(
    timeline: Timeline, settings: Settings, stream_of: StreamOf, events: int
) -> tuple[CachingAllocator, list[int], list[int]]:
    """The allocator after the first `events` events; the bytes reserved, and allocated, after each of them."""
    machine = CachingAllocator(settings)
    blocks: dict[int, Block] = {}
    reserved: list[int] = []
    allocated: list[int] = []
    for machine.event, (_, allocation, made) in enumerate(timeline.events[:events]):
        if made and allocation.nbytes:  # torch makes no block for an empty request
            block = machine.malloc(allocation.nbytes, stream_of(allocation), allocation)
            if block is None:
                raise _out_of_memory(timeline, machine, stream_of(allocation))
            blocks[address(allocation)] = block
        elif allocation.nbytes:
            machine.free(blocks.pop(address(allocation)))
        reserved.append(machine.reserved)
        allocated.append(machine.allocated)
    return machine, reserved, allocated


def _out_of_memory(
    timeline: Timeline, machine: CachingAllocator, stream: int
) -> PlannedOutOfMemoryError:
    """The error for the allocation event that is being replayed (`machine.event`)."""
    op, allocation, _ = timeline.events[machine.event]
    settings = machine.settings
    segment = settings.segment_for(settings.rounded(allocation.nbytes))
    live = timeline.bytes[machine.event - 1] if machine.event else 0
    idle = machine.reserved - machine.allocated
    where = "before the step" if op == BEFORE else f"at op {op}, {timeline.ops[op].name}"
    if op != BEFORE and timeline.ops[op].module:
        where += f" in {timeline.ops[op].module}"
    return PlannedOutOfMemoryError(
        f"Out of memory {where}: {allocation.name} ({allocation.category}, {_size(allocation.nbytes)}) needs "
        f"{_size(segment)} more on stream {stream}, and the limit is {_size(_limit(settings))}. "
        f"Reserved are {_size(machine.reserved)}, of which {_size(machine.allocated)} are allocated "
        f"({_size(live)} as requested) and {_size(idle)} are free, but split, on another stream, or too small. "
        + _advice(settings, max(machine.allocated + segment, timeline.peak))
    )


def _advice(settings: Settings, needed: int) -> str:
    """What to do: expandable segments where fragmentation is the cause, else less memory.

    needed: bytes without fragmentation, of this allocation and of the peak, which may come later.
    """
    fits = needed <= _limit(settings)
    if fits and not settings.expandable_segments:
        return "It would fit without fragmentation: try expandable_segments:True."
    return "Use a smaller batch, more ranks, checkpointing, or a larger limit."


def _limit(settings: Settings) -> int:
    return settings.allowed or settings.limit or 0


def _size(nbytes: int) -> str:
    """Bytes as text with a unit; exact below 1 KiB."""
    for unit, name in ((MIB << 10, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


# -- the allocator ---------------------------------------------------------------------------------

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
        self._pools: dict[tuple[bool, int], _Pool] = {}
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
            pieces = tuple(Piece(b.address, b.size, b.owner) for b in _run(head))
            nbytes = sum(piece.nbytes for piece in pieces)
            pool, expandable = head.pool, head.arena is not None
            found.append(Segment(head.address, nbytes, pool.stream, pool.small, expandable, pieces))
        return tuple(found)

    # -- free blocks -------------------------------------------------------------------------------

    def _pool(self, small: bool, stream: int) -> _Pool:
        pool = self._pools.get((small, stream))
        if pool is None:
            pool = self._pools[small, stream] = _Pool(small, stream)
        return pool

    def _cached_block(self, pool: _Pool, size: int) -> Block | None:
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
            if _size_when_mapped(another) >= _size_when_mapped(block):
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

    def _reserved_block(self, pool: _Pool, size: int) -> Block | None:
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

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
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

    def _expanded_block(self, pool: _Pool, size: int) -> Block | None:
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

    def _first_fit(self, pool: _Pool, size: int) -> Block:
        """The first block of the lowest run of free and unmapped blocks that has at least `size` bytes."""
        for place in pool.hole_order:
            first = pool.holes[place]
            if first.prev is not None and first.prev.owner is None:
                first = first.prev
            found, block = 0, first
            while found < size and block is not None and block.owner is None:
                found += block.size
                block = block.next  # type: ignore[assignment]
            if found >= size:
                return first
        return self._new_arena(pool, size)

    def _new_arena(self, pool: _Pool, size: int) -> Block:
        """A new unmapped address range, as torch an eighth larger than the device's memory."""
        limit, page = (
            self.settings.limit,
            SMALL_SEGMENT if pool.small else self.settings.large_segment,
        )
        nbytes = (
            -(-max(_UNLIMITED_ARENA if limit is None else limit + limit // 8, size) // page) * page
        )
        address = self._new_address(nbytes)
        hole = Block(address, nbytes, pool, _Arena(address, page))
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

    def _unmap(self, block: Block, arena: _Arena) -> None:
        """Unmap the pages that a free block covers whole; the bytes before and after these pages stay free blocks."""
        start = arena.address + -(-(block.address - arena.address) // arena.page) * arena.page
        end = (
            arena.address + (block.address + block.size - arena.address) // arena.page * arena.page
        )
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        for place, nbytes in (
            (block.address, start - block.address),
            (end, block.address + block.size - end),
        ):
            if nbytes:
                part = Block(place, nbytes, pool, arena)
                part.before(block) if place < start else part.after(block)
                pool.insert(part)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved -= end - start
        self._record("segment_unmap", start, end - start, pool)
        self._merge(block, block.prev)
        self._merge(block, block.next)
        if not block.whole:  # else no page of the arena is mapped: its address range is dropped
            pool.insert_hole(block)

    def _record(
        self, kind: str, address: int, nbytes: int, pool: _Pool, owner: Allocation | None = None
    ) -> None:
        """Append an action to the log."""
        self.log.append(Action(self.event, kind, address, nbytes, pool.stream, owner))


# -- blocks, segments, arenas ----------------------------------------------------------------------


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


class _Arena(NamedTuple):
    """The address range of an expandable segment. page: the bytes that are mapped or unmapped together."""

    address: int
    page: int


class Block:
    """Consecutive bytes of one segment: in use, free, or (mapped is False) addresses without memory."""

    __slots__ = ("address", "arena", "calls", "mapped", "next", "owner", "pool", "prev", "size")

    def __init__(self, address: int, size: int, pool: _Pool, arena: _Arena | None = None) -> None:
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


class _Pool:
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


def _size_when_mapped(block: Block) -> int:
    """The size of a block if the unmapped range that follows it were mapped too."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _run(head: Block) -> Iterator[Block]:
    """`head` and the mapped blocks that follow it."""
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next
