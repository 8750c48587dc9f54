"""The figures of one planned point: its memory, its traffic, its work and its modelled time.

    figures = Figures.of(program, memory, machine)      inside the world of the program
    figures.row                                         all of them as numbers, found at once
    figures.program_peak, figures.program               found when they are asked for

Invariant: fake values are made inside the world, whose target decides on dtypes; outside of it, those that are
missing are made from descriptions of values there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from functionalize.cost.machines.machine import Machine
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.lifetimes.step_memory import StepMemory
from functionalize.planner.machines.constants import declared
from functionalize.planner.report.text import Memory
from functionalize.planner.sweep.training import Items
from functionalize.planner.time.communication import Traffic, communication, members_of, partners_of
from functionalize.planner.time.compute import Costs, Work, call_costs, compute
from functionalize.planner.time.step_time import Scheduled, StepTime, step_times, time_ranges
from functionalize.planner.timeline.timeline import EAGER, PROGRAM
from functionalize.program.program import Program


@dataclass(frozen=True, eq=False, repr=False)
class Figures:
    """The figures of one point.

    machine: the machine whose times are modelled. members: process group -> its ranks.
    items: what a rank trains on; None if that is not known. replay: whether the host replays the program.
    rank: whose step it is. pipeline: the ranks that it waits for; None: they are taken to be where it waits for them.
    """

    _program: Program
    memory: Memory
    machine: Machine
    members: Mapping[str, Sequence[int]]
    items: Items | None = None
    replay: bool = False
    rank: int = 0
    pipeline: Pipeline | None = None

    def __repr__(self) -> str:
        return f"<Figures: {self.memory!r}, {self.time!r}>"

    @staticmethod
    def of(
        program: Program,
        recorded: StepMemory,
        machine: Machine,
        alloc_conf: str = "",
        items: Items | None = None,
        replay: bool = False,
        rank: int = 0,
    ) -> Figures:
        """Must be called inside the world of the program."""
        program.evaluate_for_costs()
        members = members_of(program)
        memory = memory_of(program, recorded, machine, members, alloc_conf)
        return Figures(program, memory, machine, members, items, replay, rank)

    @property
    def program(self) -> Program:
        """The program of the step; its nodes have their `val`."""
        self._program.evaluate()
        return self._program

    @cached_property
    def traffic(self) -> list[Traffic]:
        """The bytes that collectives send."""
        return communication(self._program, self.members, self._costs)

    @cached_property
    def _costs(self) -> Costs:
        return call_costs(self._program)

    @cached_property
    def work(self) -> list[Work]:
        """The FLOPs and bytes of compute ops."""
        return compute(self._program, self._costs)

    @cached_property
    def partners(self) -> set[int]:
        """The ranks with which it exchanges messages."""
        return partners_of(self._program, self.members)

    @property
    def scheduled(self) -> Scheduled:
        """What its modelled time follows from."""
        return Scheduled(self._program, self.members, self._costs, self.rank)

    @property
    def _pipeline(self) -> Pipeline:
        return self.pipeline or Pipeline([self])

    @cached_property
    def time(self) -> StepTime:
        """The modelled time of a step."""
        return self._pipeline.times[self.rank]

    @cached_property
    def time_range(self) -> tuple[float, float]:
        """The modelled seconds at the high and at the low end of the ranges of the machine's efficiency."""
        return self._pipeline.time_range

    @property
    def times(self) -> dict[str, Any]:
        """The range of the modelled time, in seconds, and the efficiencies from which it follows."""
        fast, slow = self.time_range
        return {"step fastest": fast, "step slowest": slow, "efficiency": self.time.where}

    @cached_property
    def row(self) -> dict[str, Any]:
        """The figures as numbers, without the program's memory: bytes, FLOPs, seconds."""
        return {
            **levels_row(self.memory),
            "collectives": sum(row.count for row in self.traffic),
            "sent": sum(row.sent for row in self.traffic),
            "flops": self.time.flops,
            "step": self.time.seconds,
            "exposed": self.time.exposed,
            **({"waiting": self.time.waiting} if self.pipeline is not None else {}),
            "mfu": self.time.mfu,
            "throughput": self.throughput,
            "nodes": self._program.nodes(),
        }

    @property
    def program_peak(self) -> int:
        """The most requested bytes of a replay; its timeline is made when it is first asked for."""
        return self.memory.timeline(PROGRAM).peak

    @property
    def throughput(self) -> float | None:
        """Items per second and rank, modelled; None where `inputs` returns no tensor."""
        return self.items.rate(self.time.seconds) if self.items is not None else None


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """Ranks of one step that wait for each other's messages, on one machine."""

    ranks: Sequence[Figures]

    @cached_property
    def times(self) -> dict[int, StepTime]:
        """The modelled time of the step by rank."""
        first = self.ranks[0]
        every = [each.scheduled for each in self.ranks]
        found = step_times(every, first.machine, replay=first.replay)
        return {each.rank: time for each, time in zip(self.ranks, found, strict=True)}

    @cached_property
    def time_range(self) -> tuple[float, float]:
        """The modelled seconds at the high and at the low end of the ranges of the machine's efficiency."""
        every = [each.scheduled for each in self.ranks]
        return time_ranges(every, self.times[self.ranks[0].rank])


def joined(ranks: Sequence[Figures]) -> list[Figures]:
    """The same figures with times in which ranks wait for each other, where all that exchange messages are there."""
    there = {each.rank for each in ranks}
    talking = [each for each in ranks if each.partners]
    if not all(each.partners <= there for each in talking):
        return [*ranks]
    pipeline = Pipeline(talking)
    return [replace(each, pipeline=pipeline) if each.partners else each for each in ranks]


def memory_of(
    program: Program, recorded: StepMemory, machine: Machine, members: Sized, alloc_conf: str = ""
) -> StepMemory:
    """The memory of a step, with what a machine's context and process groups need. members: of its groups, by name."""
    constants = declared(machine, len(members))
    return recorded.after(program, constants, Settings.parse(alloc_conf))


def levels_row(memory: Memory) -> dict[str, Any]:
    """The bytes of eager's peak at each level; those in host memory if tensors are offloaded."""
    levels = memory.levels(EAGER)
    host = {"host": memory.host_peak} if memory.host_peak else {}
    return {
        "peak": levels.requested,
        "allocated": levels.allocated,
        "reserved": levels.reserved,
        "device": levels.device,
        **host,
    }
