"""The modelled time of a step: a time for every op, on streams as FSDP2 has them. A model, not a measurement.

    time = step_time(program, MACHINES["h100"])
    time.seconds, time.compute, time.exposed     seconds = compute + exposed
    time.communication, time.overlap             communication = exposed + overlap
    time_range(program, time)                    the seconds at both ends of the machine's published efficiencies
    time.mfu                                     model FLOPs (without recomputation) / peak FLOPs in that time
    time.spans                                   start and end of everything that runs, for pictures
    print(time.text())

    compute        ████████░░████████████   the stream on which ops run
    all-gather     ██████████    ███
    exposed                ██               communication while the compute stream is idle

The time of an op is by `costs.py`, that of a collective by `Machine.collective_seconds`: over the slowest link of its
group, between nodes, if its ranks are on several. `streams.py` has the rules of what waits for what. The model is of
one rank in steady state, with others exactly as fast: no stragglers, failures or input pipeline.
Invariant: the seconds of the phases add up to those of the step. Linear in nodes and edges, plus one sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from functionalize._compat.autograd import RECOMPUTE
from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.planner.report.rows import Span, outside
from functionalize.planner.time.call_costs import Costs, call_costs
from functionalize.planner.time.communication import Groups
from functionalize.planner.time.streams import ScheduledSpan, schedule
from functionalize.program.program import Program
from functionalize.util.text import human_seconds

_MODELS: Mapping[str, str] = {
    "fsdp2": "on the streams of eager FSDP2",
    "replay": "replaying the program as it stands",
    "serial": "one thing after the other",
}
Interval = tuple[float, float, str]  # start, end, phase


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step: modelled seconds. seconds: compute + exposed. flops: of all its ops."""

    phase: str
    seconds: float
    compute: float
    communication: float
    exposed: float
    flops: int


@dataclass(frozen=True, eq=False, repr=False)
class StepTime:
    """The modelled time of a step, in seconds, of one rank.

    streams: the name of the rules used, see `streams.py`.
    compute: time in which an op runs on the compute stream.
    communication: time in which at least one collective, or a copy on a communication stream, runs.
    exposed: the part of `communication` in which no op runs on the compute stream.
    flops: of all ops; model_flops: without those of recomputation.
    mfu: None if there are no FLOPs. replay: whether the host replays.
    """

    machine: Machine
    streams: str
    seconds: float
    compute: float
    communication: float
    exposed: float
    flops: int
    model_flops: int
    mfu: float | None
    phases: tuple[PhaseTime, ...]
    spans: tuple[Span, ...]
    replay: bool = False

    def __repr__(self) -> str:
        exposed = human_seconds(self.exposed)
        return f"<StepTime: {human_seconds(self.seconds)} modelled, of which {exposed} exposed>"

    def __str__(self) -> str:
        return self.text()

    @property
    def overlap(self) -> float:
        """Seconds of communication that compute hides."""
        return self.communication - self.exposed

    def text(self) -> str:
        """The result as a table for people."""
        lines = [
            f"modelled step time: {human_seconds(self.seconds)} per rank, {_MODELS[self.streams]}, "
            f"on {self.machine_name}",
            f"  compute {human_seconds(self.compute)}; communication {human_seconds(self.communication)}, of which "
            f"{human_seconds(self.exposed)} exposed and {human_seconds(self.overlap)} behind compute",
            f"  {self.flops:.3g} FLOPs, {self.model_flops:.3g} of them the model's"
            + ("" if self.mfu is None else f": a modelled MFU of {self.mfu:.1%}"),
            f"  {'phase':<10}{'seconds':>10}{'compute':>10}{'comm.':>10}{'exposed':>10}{'FLOPs':>10}",
        ]
        for each in self.phases:
            times = (each.seconds, each.compute, each.communication, each.exposed)
            cells = "".join(f"{human_seconds(t):>10}" for t in times)
            lines.append(f"  {each.phase or 'other':<10}{cells}{each.flops:>10.3g}")
        kernels = self.machine.efficiency.about or "every kernel at its peak"
        late = (
            "a host that is never late" if self.machine.host is None else "the host's seconds too"
        )
        lines.append(f"  modelled, not measured: {kernels}, {late}")
        return "\n".join(lines)

    def to_json(self, spans: bool = False) -> dict[str, Any]:
        """The result as plain values, for `json.dumps`. spans: include all spans, one list for each."""
        found: dict[str, Any] = {
            "modelled": True,
            "machine": self.machine_name,
            "efficiency": self.machine.efficiency.about or None,
            "streams": self.streams,
            "seconds": self.seconds,
            "compute": self.compute,
            "communication": self.communication,
            "exposed": self.exposed,
            "overlap": self.overlap,
            "flops": self.flops,
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "phases": [asdict(phase) for phase in self.phases],
        }
        if spans:
            found["spans"] = {"fields": list(Span._fields), "rows": [list(s) for s in self.spans]}
        return found

    @property
    def where(self) -> str:
        """The machine, and which efficiencies its kernels have."""
        about = self.machine.efficiency.about or "every kernel at its peak"
        return f"{self.machine_name} ({about})"

    @property
    def machine_name(self) -> str:
        """The name of the machine."""
        names = (name for name, machine in MACHINES.items() if machine == self.machine)
        return next(names, "a machine of your own")


def step_time(
    program: Program,
    machine: Machine,
    *,
    streams: str | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    replay: bool = False,
    costs: Costs | None = None,
) -> StepTime:
    """The modelled time of a step on a machine.

    streams: `fsdp2`, `replay` or `serial`; None: `fsdp2` on a machine with streams, else `serial`. groups: the ranks
    of process groups by name, for a program whose groups are not those of this process. replay: whether the host
    replays the program, or dispatches its ops eagerly; of effect with `serial` on a machine with `host`. costs: of
    the program, if they are known. Raises `PassError` for an unknown `streams`.
    """
    if streams is None:
        streams = "fsdp2" if machine.streams else "serial"
    costs, known = costs or call_costs(program), Groups(program.graph, groups)
    pieces = schedule(program.graph, machine, known, streams, costs, replay)
    seconds = max((piece.span.end for piece in pieces), default=0.0)
    phases = tuple(_phases(pieces))
    model = [piece for piece in pieces if piece.span.phase != RECOMPUTE]
    ideal = sum(piece.ideal for piece in model)
    return StepTime(
        machine=machine,
        streams=streams,
        seconds=seconds,
        compute=sum(phase.compute for phase in phases),
        communication=sum(phase.communication for phase in phases),
        exposed=sum(phase.exposed for phase in phases),
        flops=sum(piece.flops for piece in pieces),
        model_flops=sum(piece.flops for piece in model),
        mfu=ideal / seconds if ideal else None,
        phases=phases,
        spans=tuple(piece.span for piece in pieces),
        replay=replay,
    )


def time_range(
    program: Program,
    time: StepTime,
    groups: Mapping[str, Sequence[int]] | None = None,
    costs: Costs | None = None,
) -> tuple[float, float]:
    """The seconds of a step with every efficiency at the high, and at the low end of what was published.

    time: the modelled time of that program; its own seconds are both ends on a machine without ranges.
    costs: of the program, if they are known.
    """
    if not time.machine.efficiency.ranges:
        return time.seconds, time.seconds
    costs, known = costs or call_costs(program), Groups(program.graph, groups)
    both = (
        schedule(program.graph, time.machine.at(end), known, time.streams, costs, time.replay)
        for end in ("high", "low")
    )
    fast, slow = (max((piece.span.end for piece in pieces), default=0.0) for pieces in both)
    return fast, slow


def _phases(pieces: Sequence[ScheduledSpan]) -> Iterator[PhaseTime]:
    """The times of each phase, in the order in which the phases begin."""
    computing = [(s.start, s.end, s.phase) for s, communicates, *_ in pieces if not communicates]
    sending = sorted((s.start, s.end, s.phase) for s, communicates, *_ in pieces if communicates)
    sending = list(_without_overlaps(sending))
    compute, communication = _by_phase(computing), _by_phase(sending)
    exposed = _by_phase(outside(sending, [(start, end) for start, end, _ in computing]))
    flops: dict[str, int] = {}
    for piece in pieces:
        flops[piece.span.phase] = flops.get(piece.span.phase, 0) + piece.flops
    for phase, count in flops.items():
        busy, bare = compute.get(phase, 0.0), exposed.get(phase, 0.0)
        yield PhaseTime(phase, busy + bare, busy, communication.get(phase, 0.0), bare, count)


def _by_phase(parts: Sequence[Interval] | Iterator[Interval]) -> dict[str, float]:
    found: dict[str, float] = {}
    for start, end, phase in parts:
        found[phase] = found.get(phase, 0.0) + end - start
    return found


def _without_overlaps(parts: Sequence[Interval]) -> Iterator[Interval]:
    """Cut intervals, sorted by start, so that none overlap: an overlap counts for the one that began first."""
    at = 0.0
    for start, end, phase in parts:
        if end > at:
            yield max(start, at), end, phase
            at = end
