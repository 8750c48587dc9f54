"""What CUDA's caching allocator would reserve for a timeline: a simulation of it, event by event.

    reserved = simulate(timeline)                                     one stream, torch's defaults
    reserved = simulate(timeline, Settings.parse("expandable_segments:True", limit=80 * 2**30), fsdp2_streams)
    reserved.peak, reserved.peak_allocated, reserved.fragmentation   bytes
    reserved.segments_at(reserved.peak_at)                            the segments and their blocks

        reserved   ┌───────────┐   segments: they stay reserved when their blocks are freed
        allocated  │  ┌──┐  ┌──┘   blocks: requests, rounded
        requested ─┴──┘  └──┘      `timeline.bytes`

Tensors that existed before the step are allocated first, in the order of the timeline, on an empty device.
Invariants: reserved >= allocated >= requested after every event; either all events are replayed, in order, or an error
is raised.
Refuses (`PlannedOutOfMemoryError`): a request that exceeds the limit even after the cache was released, as torch does.
Not modelled: `record_stream` (a freed block can be reused at once), memory outside the allocator (the CUDA context,
NCCL, cuBLAS workspaces), blocks cached by earlier steps, and the addresses that the driver chooses, which break ties.
O(n log n) in events; `segments_at(event)` replays all events up to that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from functionalize._compat.references import address
from functionalize.cost.categories import Category
from functionalize.errors import PlannedOutOfMemoryError
from functionalize.planner.allocator.alloc_conf import MIB, Settings
from functionalize.planner.allocator.blocks import Action, Block, Piece, Segment
from functionalize.planner.allocator.caching import CachingAllocator
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Timeline

__all__ = [
    "Action",
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
