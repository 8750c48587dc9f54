"""`EagerMemory`: the memory of one recorded step, as eager ran it; computed at its first use."""

from __future__ import annotations

from functools import cached_property

from functionalize._compat.fakes import HOST
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.allocator.allocator import fsdp2_streams
from functionalize.planner.lifetimes.lifetimes import Lifetimes
from functionalize.planner.machines.constants import DeviceConstant
from functionalize.planner.report.text import Memory
from functionalize.planner.timeline.timeline import Timeline
from functionalize.util.gc_pause import only_young_collections


class EagerMemory(Memory):
    """The memory of one recorded step, as eager ran it."""

    lifetimes: Lifetimes

    def __init__(self, lifetimes: Lifetimes) -> None:
        on_device = lifetimes.target != "cpu"
        streams = fsdp2_streams if on_device else None
        vars(self).update(lifetimes=lifetimes, caching=on_device, stream_of=streams)

    def on(self, constants: tuple[DeviceConstant, ...], settings: Settings) -> EagerMemory:
        """The memory with declared constants and an allocator's settings."""
        new = EagerMemory(self.lifetimes)
        vars(new).update(eager=self.eager, constants=constants, settings=settings)
        return new

    @cached_property
    def host_peak(self) -> int:
        """The most requested bytes that are live at once in host memory, of a step in a fake world."""
        if all(seen.device != HOST.type for seen in self.lifetimes.seen):
            return 0
        return self.lifetimes.timeline(device=HOST.type).peak

    @cached_property
    def eager(self) -> Timeline:
        """The memory of the step as eager ran it."""
        with only_young_collections():  # the events made here live as long as the report
            return self.lifetimes.timeline(self.lifetimes.target)
