"""What CUDA's caching allocator would reserve for a timeline: a simulation of it, event by event.

    reserved = simulate(timeline)                                     one stream, torch's defaults
    reserved = simulate(timeline, Settings.parse("expandable_segments:True", limit=80 * 2**30), fsdp2_streams)
    reserved.peak, reserved.peak_allocated, reserved.fragmentation   bytes
    reserved.segments_at(reserved.peak_at)                            the segments and their blocks

        reserved   ┌───────────┐   segments: they stay when what was in them is freed
        allocated  │  ┌──┐  ┌──┘   blocks: requests, rounded
        requested ─┴──┘  └──┘      `timeline.bytes`

What existed before the step is allocated first, in the order of the timeline, on an empty device.
Invariants: reserved >= allocated >= requested after every event; every event is replayed, in order, or none is kept.
Refuses (`PlannedOutOfMemoryError`): a request that the limit has no room for, cache released, as torch would.
Not modelled: `record_stream` (a freed block can be used at once), memory outside the allocator (the CUDA context, NCCL,
cuBLAS workspaces), what earlier steps left cached, and the addresses that the driver picks, which decide ties.
O(n log n) in events; `segments_at` replays the events up to one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from functionalize.errors import PlannedOutOfMemoryError
from functionalize.planning.allocator.alloc_conf import MIB, Settings
from functionalize.planning.allocator.blocks import Action, Block, Piece, Segment
from functionalize.planning.allocator.caching import CachingAllocator
from functionalize.planning.timeline.timeline import BEFORE, Allocation, Category, Timeline

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
    """All on the default stream."""
    return 0


def fsdp2_streams(allocation: Allocation) -> int:
    """The streams of eager FSDP2: what it gathers into (1) and what it reduces gradients into (2) have their own.

    Source: `foreach_all_gather` and `foreach_reduce` of torch 2.13.
    """
    return {Category.ALL_GATHER_BUFFERS: 1, Category.SHARDED_GRADIENTS: 2}.get(
        allocation.category, 0
    )


@dataclass(frozen=True, eq=False)
class Reserved:
    """What a timeline makes the allocator reserve.

    bytes, allocated: reserved, and allocated (rounded) bytes after each event. log: what the allocator did.
    retries: how often a limit made it release its cache, which waits for the device.
    """

    timeline: Timeline
    settings: Settings
    stream_of: StreamOf
    bytes: list[int]
    allocated: list[int]
    log: list[Action]
    retries: int

    @cached_property
    def peak(self) -> int:
        """The most bytes that are reserved at once."""
        return max(self.bytes, default=0)

    @cached_property
    def peak_at(self) -> int:
        """The index of the first event after which the peak is reached."""
        return self.bytes.index(self.peak) if self.bytes else 0

    @property
    def peak_allocated(self) -> int:
        """The most bytes that are allocated at once."""
        return max(self.allocated, default=0)

    @property
    def fragmentation(self) -> int:
        """Reserved bytes that no block uses, at the peak: of the moments of the peak, the fullest."""
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
    """Replay a timeline through the caching allocator. stream_of: None: all of it on one stream."""
    settings, stream_of = settings or Settings(), stream_of or one_stream
    machine, reserved, allocated = _replay(timeline, settings, stream_of, len(timeline.events))
    return Reserved(
        timeline, settings, stream_of, reserved, allocated, machine.log, machine.retries
    )


def _replay(
    timeline: Timeline, settings: Settings, stream_of: StreamOf, events: int
) -> tuple[CachingAllocator, list[int], list[int]]:
    """The allocator after so many events; the bytes reserved, and allocated, after each of them."""
    machine = CachingAllocator(settings)
    blocks: dict[int, Block] = {}
    reserved: list[int] = []
    allocated: list[int] = []
    for machine.event, (_, allocation, made) in enumerate(timeline.events[:events]):
        if made and allocation.nbytes:  # torch gives no block to a request of nothing
            block = machine.malloc(allocation.nbytes, stream_of(allocation), allocation)
            if block is None:
                raise _no_room(timeline, machine, stream_of(allocation))
            blocks[id(allocation)] = block
        elif allocation.nbytes:
            machine.free(blocks.pop(id(allocation)))
        reserved.append(machine.reserved)
        allocated.append(machine.allocated)
    return machine, reserved, allocated


def _no_room(timeline: Timeline, machine: CachingAllocator, stream: int) -> PlannedOutOfMemoryError:
    """The error of the event that the machine is at."""
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
        + _advice(settings, machine.allocated, segment)
    )


def _advice(settings: Settings, allocated: int, segment: int) -> str:
    """What to do: expandable segments where fragmentation is to blame, else less memory."""
    fits = allocated + segment <= _limit(settings)
    if fits and not settings.expandable_segments:
        return "It would fit without fragmentation: try expandable_segments:True."
    return "Use a smaller batch, more ranks, checkpointing, or a larger limit."


def _limit(settings: Settings) -> int:
    return settings.allowed or settings.limit or 0


def _size(nbytes: int) -> str:
    """Bytes for people, exact where they are few."""
    for unit, name in ((MIB << 10, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
