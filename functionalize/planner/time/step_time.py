"""The modelled time of a step: a time for every op, on streams as FSDP2 has them. A model, not a measurement.

    time = step_time(program, MACHINES["h100"])
    time.seconds, time.compute, time.exposed     seconds = compute + exposed
    time.communication, time.overlap             communication = exposed + overlap
    time_range(program, time)                    the seconds at both ends of the machine's published efficiencies
    time.mfu                                     model FLOPs (without recomputation) / peak FLOPs in that time
    time.spans                                   start and end of everything that runs, for pictures
    print(time.text())

    times = step_times([program_0, program_1], machine)      of ranks that exchange messages, as a pipeline's stages
    times[0].waiting                             seconds = compute + exposed + waiting: its bubbles

    compute        ████████░░████████████   the stream on which ops run
    all-gather     ██████████    ███
    exposed                ██               communication while the compute stream is idle

The time of an op is by `costs.py`, that of a collective by `Machine.collective_seconds`: over the slowest link of its
group, between nodes, if its ranks are on several. One of three sets of rules says when each op runs on which stream:

    fsdp2     the streams of eager FSDP2 on a GPU
                  compute                │ copy-out 0 │ layer 0    │ copy-out 1 │ layer 1 …
                  all-gather 0           │ gather 0 │ gather 1   │ gather 2 …
                  reduce-scatter 0       …
    replay    a replay of the program, in its present order, on a GPU
    serial    one op after the other on one stream: a CPU

Rules that fsdp2 and replay share: a stream runs one op at a time, in the order of the program; a collective starts when
its inputs are ready, its stream is free, and the previous collective of its process group is complete.

fsdp2: the host always launches in time, so that data dependencies and the order on each stream decide when an op
starts, not the place of a collective in the program.
- The copy-in of an all-gather (casts and `cat` that depend on inputs alone) runs on a stream `all-gather copy-in 0`.
- An all-gather of parameters waits for an earlier copy-out, after which eager frees the gathered buffer: in forward the
  copy-out of the second all-gather before it, in backward of the one directly before it. If that copy-out comes later
  in the program than the all-gather (after the `prefetch` pass), the all-gather does not wait for it.
- Compute waits for its inputs. In backward, before it packs gradients, it waits for the previous reduce-scatter (as
  eager does with its default of one input buffer).
- Casts, sums and copies to the host of reduced gradients run on the stream of their reduction; compute waits for them
  after the backward. Ops on the host run on the compute stream, as their thread issues no kernel meanwhile.

replay: a collective starts after all compute that precedes it in the program, as on one stream, and compute waits at
every `wait_tensor`. The captured program has the forward's all-gathers where eager issues them, right before their
layer, so that nothing overlaps; the `prefetch` pass moves them.

serial: with the host's own seconds (`Host` of the machine), those of eager dispatch or of a replay.

Messages between two ranks, by all rules: one is posted when compute has come to it, moves when the other rank has
posted its half (`meetings.py`), on a stream of its pair and direction, and compute waits for it where the program does.
Of one rank alone, the other is taken to be there. A step of several ranks ends with the last of them: `waiting` is the
time in which a rank neither computes nor communicates.

Not modelled: a host that launches late on a GPU, memory bandwidth shared between streams, synchronization when Python
reads a number. The model is of one rank in steady state, with others exactly as fast: no stragglers, failures or input
pipeline.
Invariants: spans of one stream do not overlap, and no op starts before its inputs are ready; the seconds of the phases
add up to those of the step. Linear in nodes and edges, plus one sort.
"""

from __future__ import annotations

import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize._compat.references import address
from functionalize.cost.calls import arguments_of
from functionalize.cost.costs import Cost, check_collective, is_collective, op_seconds
from functionalize.cost.machines.efficiency import Host
from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.cost.messages import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    Message,
    kind_of,
    sent,
)
from functionalize.errors import PassError
from functionalize.ir.phases import OPTIMIZER, in_backward, phase_of
from functionalize.ir.waits import WAIT
from functionalize.planner.report.rows import COMPUTE, Span, outside
from functionalize.planner.time.communication import Groups, RankGroup, partner_of
from functionalize.planner.time.compute import Costs, call_costs
from functionalize.planner.time.meetings import Alone, Meetings, Posted, run_together
from functionalize.program.program import Program
from functionalize.util.text import human_seconds

_MODELS: Mapping[str, str] = {
    "fsdp2": "on the streams of eager FSDP2",
    "replay": "replaying the program as it stands",
    "serial": "one thing after the other",
}
_Interval = tuple[float, float, str]  # start, end, phase


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

    streams: the name of the rules used.
    compute: time in which an op runs on the compute stream.
    communication: time in which at least one collective, or a copy on a communication stream, runs.
    exposed: the part of `communication` in which no op runs on the compute stream.
    waiting: time in which the rank waits for others, and nothing runs.
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
    waiting: float = 0.0

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
            *(
                [f"  waits for other ranks {human_seconds(self.waiting)}"]
                if self.waiting > 0.0
                else []
            ),
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
            "waiting": self.waiting,
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


class Scheduled(NamedTuple):
    """What a schedule is made of: a program, the ranks of its process groups by name, its costs, its own rank."""

    program: Program
    groups: Mapping[str, Sequence[int]] | None = None
    costs: Costs | None = None
    rank: int = 0


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
    (found,) = step_times(
        [Scheduled(program, groups, costs)], machine, streams=streams, replay=replay
    )
    return found


def step_times(
    ranks: Sequence[Scheduled],
    machine: Machine,
    *,
    streams: str | None = None,
    replay: bool = False,
) -> list[StepTime]:
    """The modelled time of a step of several ranks, in their order, which wait for each other's messages.

    streams, replay: as of `step_time`. All have the seconds of the slowest. Raises `PlanError` where a message of one
    is none of another.
    """
    if streams is None:
        streams = "fsdp2" if machine.streams else "serial"
    every = _schedules(ranks, machine, streams, replay)
    seconds = _seconds(every)
    return [_time_of(pieces, seconds, machine, streams, replay) for pieces in every]


def time_ranges(ranks: Sequence[Scheduled], time: StepTime) -> tuple[float, float]:
    """The seconds of a step with every efficiency at the high, and at the low end of what was published.

    ranks: whose schedules run together. time: the modelled time of one of them; its own seconds are both ends on a
    machine without ranges.
    """
    if not time.machine.efficiency.ranges:
        return time.seconds, time.seconds
    fast, slow = (
        _seconds(_schedules(ranks, time.machine.at(end), time.streams, time.replay))
        for end in ("high", "low")
    )
    return fast, slow


def time_range(
    program: Program,
    time: StepTime,
    groups: Mapping[str, Sequence[int]] | None = None,
    costs: Costs | None = None,
) -> tuple[float, float]:
    """`time_ranges` of one rank. time: of that program. costs: of the program, if they are known."""
    return time_ranges([Scheduled(program, groups, costs)], time)


def _seconds(every: Sequence[Sequence[_ScheduledSpan]]) -> float:
    return max((piece.span.end for pieces in every for piece in pieces), default=0.0)


def _time_of(
    pieces: Sequence[_ScheduledSpan], seconds: float, machine: Machine, streams: str, replay: bool
) -> StepTime:
    """The time of one rank. seconds: of the step of all ranks."""
    phases = tuple(_phases(pieces))
    model = [piece for piece in pieces if piece.span.phase != RECOMPUTE]
    ideal = sum(piece.ideal for piece in model)
    compute, exposed = sum(p.compute for p in phases), sum(p.exposed for p in phases)
    has_messages = any(piece.meets for piece in pieces)
    return StepTime(
        machine=machine,
        streams=streams,
        seconds=seconds,
        compute=compute,
        communication=sum(phase.communication for phase in phases),
        exposed=exposed,
        flops=sum(piece.flops for piece in pieces),
        model_flops=sum(piece.flops for piece in model),
        mfu=ideal / seconds if ideal else None,
        phases=phases,
        spans=tuple(piece.span for piece in pieces),
        replay=replay,
        # Without messages nothing but rounding is left.
        waiting=max(seconds - compute - exposed, 0.0) if has_messages else 0.0,
    )


def _phases(pieces: Sequence[_ScheduledSpan]) -> Iterator[PhaseTime]:
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


def _by_phase(parts: Sequence[_Interval] | Iterator[_Interval]) -> dict[str, float]:
    found: dict[str, float] = {}
    for start, end, phase in parts:
        found[phase] = found.get(phase, 0.0) + end - start
    return found


def _without_overlaps(parts: Sequence[_Interval]) -> Iterator[_Interval]:
    """Cut intervals, sorted by start, so that none overlap: an overlap counts for the one that began first."""
    at = 0.0
    for start, end, phase in parts:
        if end > at:
            yield max(start, at), end, phase
            at = end


# -- streams ---------------------------------------------------------------------------------------

aten = torch.ops.aten

# The ops that FSDP2 applies to reduced gradients.
_AFTER_REDUCE = (aten._to_copy, aten.add, aten.div, aten.mul)
# The ops by which FSDP2 packs gradients into the input buffer of a reduce-scatter.
_PACKS = (aten._chunk_cat, aten.cat)


class _ScheduledSpan(NamedTuple):
    """A span and its work.

    communicates: whether it is a collective or a copy on a communication stream.
    ideal: seconds for its FLOPs at the peak rate of its dtype. meets: whether it is a message between two ranks.
    """

    span: Span
    communicates: bool
    flops: int = 0
    ideal: float = 0.0
    meets: bool = False


def _schedules(
    ranks: Sequence[Scheduled], machine: Machine, streams: str, replay: bool
) -> list[list[_ScheduledSpan]]:
    """Schedule every node that needs time, of all ranks together, by the rules of `fsdp2`, `replay` or `serial`.

    replay: whether the host replays the program, instead of dispatching its ops eagerly; `serial` counts either.
    """
    if streams not in _STREAMS:
        raise PassError(f"no streams `{streams}`; there are {', '.join(_STREAMS)}")
    made, meetings = [], Alone() if len(ranks) == 1 else Meetings()
    for program, groups, costs, rank in ranks:
        known = Groups(program.graph, groups)
        each = _STREAMS[streams](program.graph, machine, known, costs or call_costs(program))
        each.meetings, each.rank = meetings, rank
        if streams == "serial" and machine.host is not None:
            each.host = _HostTime(machine.host, replay)
        made.append(each)
    run_together([each.steps() for each in made])
    return [each.pieces for each in made]


class _HostTime:
    """The seconds of the host that no span has yet: those of views, of waits and of the call count for the next op."""

    def __init__(self, host: Host, replay: bool) -> None:
        self._host, self._replay = host, replay
        self._open = host.call if replay else 0.0

    def note(self, node: fx.Node) -> None:
        """Count a node that runs no kernel, or is about to run one."""
        if node.target is operator.getitem:
            return
        if self._replay:
            self._open += self._host.node + is_collective(node) * self._host.collective
            return
        phase = phase_of(node)
        if phase == OPTIMIZER:
            first = node.args[0] if node.args else None
            tensors = len(first) if isinstance(first, (list, tuple)) else 1
            self._open += self._host.optimizer * tensors
        else:
            self._open += self._host.backward if phase == BACKWARD else self._host.forward
        if is_collective(node):
            kind = kind_of(node)
            self._open += self._host.gather if kind == ALL_GATHER else 0.0
            self._open += self._host.reduce if kind == REDUCE_SCATTER else 0.0

    def take(self) -> float:
        """The seconds since the last call."""
        taken, self._open = self._open, 0.0
        return taken


class _SerialSchedule:
    """One op after the other on one stream. Subclasses choose the stream of an op, and what it waits for."""

    def __init__(self, graph: fx.Graph, machine: Machine, groups: Groups, costs: Costs) -> None:
        self.graph, self.machine, self.groups, self.costs = graph, machine, groups, costs
        # By the address of a cost, which `costs` holds: seconds, and those at the peak rate.
        self._seconds: dict[int, tuple[float, float]] = {}
        self._spread: dict[
            RankGroup, tuple[int, int, bool]
        ] = {}  # process group -> where its ranks are
        self.pieces: list[_ScheduledSpan] = []
        self.free: dict[str, float] = defaultdict(float)  # stream -> when it is free
        self.link: dict[str, float] = defaultdict(float)  # process group -> when it is free
        self.ready: dict[fx.Node, float] = {}  # node -> when its value is available
        # What each node reads: `all_input_nodes` makes a list at every access.
        self.read = {node: node.all_input_nodes for node in graph.nodes}
        self.host: _HostTime | None = None
        self.rank, self.meetings = 0, Meetings()
        self.posted: dict[fx.Node, Posted] = {}  # messages that have not been waited for

    def steps(self) -> Iterator[Posted]:
        """Schedule all nodes; yields each message that is waited for before the other rank has come to it."""
        ready, costs, view, posted = self.ready, self.costs, self.view, self.posted
        for node, read in self.read.items():
            at = max([ready[n] for n in read], default=0.0)
            if node.op != "call_function":
                ready[node] = at
                continue
            if self.host is not None:
                self.host.note(node)
            cost = costs[node]
            if posted and node.target is WAIT and read[0] in posted:
                half = posted.pop(read[0])
                if not half.is_known:
                    yield half
                ready[node] = self.ended(read[0], half)
            elif cost.free:
                ready[node] = view(node, at)
            elif cost.message is None:
                ready[node] = self.op(node, at)
            elif cost.message.kind in (SEND, RECEIVE):
                posted[node] = self.post(node, max(at, self.free[COMPUTE]), cost.message)
                ready[node] = at
            else:
                ready[node] = self.collective(node, at, cost.message)
        for node, half in posted.items():
            if not half.is_known:
                yield half
            self.ended(node, half)

    def post(self, node: fx.Node, at: float, message: Message) -> Posted:
        """Come to this rank's half of a message that could start at `at`."""
        sends, group = message.kind == SEND, self.groups[message.group]
        there = partner_of(node, group)
        ends = (self.rank, there) if sends else (there, self.rank)
        nbytes = sent(message, 2)
        if self.costs[node].on_host:
            check_collective(node, nbytes)
        spread = self._spread_of(RankGroup(message.group, 2, ends))
        seconds = self.machine.collective_seconds(message.kind, nbytes, *spread)
        stream = f"send to rank {there}" if sends else f"receive from rank {there}"
        half = Posted(at, seconds, stream)
        return self.meetings.post((*ends, group.members), arguments_of(node)["tag"], sends, half)

    def ended(self, node: fx.Node, half: Posted) -> float:
        """A message has ended, for which compute waits; return its end."""
        message, meta = self.costs[node].message, node.meta
        assert message is not None
        phase, module = meta.get("phase", ""), meta.get("module", "")
        nbytes = sent(message, 2)
        span = Span(half.stream, node.name, half.start, half.end, phase, module, nbytes)
        self.pieces.append(_ScheduledSpan(span, True, meets=True))
        self.free[COMPUTE] = max(self.free[COMPUTE], half.end)
        return half.end

    def view(self, node: fx.Node, at: float) -> float:
        """Return when a view, a wait or a number whose inputs are ready at `at` is ready."""
        return at

    def op(self, node: fx.Node, at: float) -> float:
        """Schedule an op that could start at `at`; return its end."""
        return self.compute(COMPUTE, node, at)

    def collective(self, node: fx.Node, at: float, message: Message) -> float:
        """Schedule a collective that could start at `at`; return its end."""
        return self.send(COMPUTE, node, at, message)

    def compute(self, stream: str, node: fx.Node, at: float) -> float:
        """Schedule an op on a stream, no earlier than `at`; return its end."""
        cost = self.costs[node]
        known = self._seconds.get(address(cost))
        if known is None:
            known = op_seconds(node, self.machine, cost), self._ideal(cost)
            self._seconds[address(cost)] = known
        seconds, ideal = known
        return self._add(stream, node, at, seconds, stream != COMPUTE, cost.flops, 0, ideal)

    def send(self, stream: str, node: fx.Node, at: float, message: Message) -> float:
        """Schedule a collective on a stream, no earlier than `at`; return its end."""
        group = self.groups[message.group]
        nbytes = sent(message, group.size)
        if self.costs[node].on_host:
            check_collective(node, nbytes)
        seconds = self.machine.collective_seconds(message.kind, nbytes, *self._spread_of(group))
        at = max(at, self.link[group.name])
        end = self._add(stream, node, at, seconds, True, 0, nbytes)
        self.link[group.name] = end
        return end

    def _spread_of(self, group: RankGroup) -> tuple[int, int, bool]:
        """How many ranks a group has, how many of them are on one node, and whether they are in several pods."""
        spread = self._spread.get(group)
        if spread is None:
            on_a_node = group.on_a_node(self.machine.ranks_per_node)
            spread = group.size, on_a_node, group.across(self.machine.ranks_per_pod)
            self._spread[group] = spread
        return spread

    def _add(
        self,
        stream: str,
        node: fx.Node,
        at: float,
        seconds: float,
        communicates: bool,
        count: int,
        nbytes: int = 0,
        ideal: float = 0.0,
    ) -> float:
        start = max(at, self.free[stream])
        end = start + seconds + (self.host.take() if self.host is not None else 0.0)
        meta = node.meta
        span = Span(
            stream, node.name, start, end, meta.get("phase", ""), meta.get("module", ""), nbytes
        )
        self.pieces.append(_ScheduledSpan(span, communicates, count, ideal))
        self.free[stream] = end
        return end

    def _ideal(self, cost: Cost) -> float:
        return cost.flops / self.machine.rate(cost.dtype) if cost.flops else 0.0


class _ReplaySchedule(_SerialSchedule):
    """One host thread issues compute and collectives in the order of the program."""

    def view(self, node: fx.Node, at: float) -> float:
        if node.target is WAIT:
            self.free[COMPUTE] = max(self.free[COMPUTE], at)
        return at

    def collective(self, node: fx.Node, at: float, message: Message) -> float:
        at = max(at, self.free[COMPUTE])
        end = self.send(f"{message.kind} {message.group}", node, at, message)
        if message.kind == BARRIER:
            self.free[COMPUTE] = end
        return end


class _Fsdp2Schedule(_SerialSchedule):
    """Data dependencies decide when an op starts, and the waits by which eager FSDP2 bounds its memory."""

    def __init__(self, graph: fx.Graph, machine: Machine, groups: Groups, costs: Costs) -> None:
        super().__init__(graph, machine, groups, costs)
        # all-gather of parameters -> its number; node of a copy-in -> its all-gather
        self.number, self.copy_ins = _parameter_gathers(self.read, costs)
        self.gathers = list(self.number)
        self.packs = _packs(self.read, costs)
        self.source: dict[fx.Node, int] = {}  # all-gather result or view of it -> its number
        self.copied_out: dict[int, float] = {}  # number of an all-gather -> the end of its copy-out
        self.inputs = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}  # and views
        self.reduced: dict[fx.Node, str] = {}  # reduced gradients -> the stream of the reduction
        self.last_reduce = 0.0  # the end of the last reduce-scatter
        self.all_reduced = 0.0  # the end of all reductions and of the ops on their results
        self.was_backward = False  # whether the last compute op was of the backward

    def view(self, node: fx.Node, at: float) -> float:
        for n in self.read[node][:1]:
            if n in self.source:
                self.source[node] = self.source[n]
            if n in self.reduced:
                self.reduced[node] = self.reduced[n]
            if n in self.inputs:
                self.inputs.add(node)
        return at

    def op(self, node: fx.Node, at: float) -> float:
        if node in self.copy_ins:
            gather = self.copy_ins[node]
            message = self.costs[gather].message
            assert message is not None
            stream = f"{ALL_GATHER} copy-in {message.group}"
            return self.compute(stream, node, max(at, self._gate(gather)))
        reduction = self._where_reduced(node)
        # On the host, the thread that issues kernels waits for the copy, and then for the op.
        if reduction is not None and not self.costs[node].on_host:
            self.reduced[node] = reduction
            self.all_reduced = max(self.all_reduced, end := self.compute(reduction, node, at))
            return end
        if in_backward(node):
            self.was_backward = True
        elif self.was_backward and phase_of(node) is not None:
            at, self.was_backward = max(at, self.all_reduced), False
        if node in self.packs:
            at = max(at, self.last_reduce)
        end = self.compute(COMPUTE, node, at)
        for n in self.read[node]:
            if n in self.source:
                self.copied_out.setdefault(self.source[n], end)
        return end

    def collective(self, node: fx.Node, at: float, message: Message) -> float:
        if message.kind == BARRIER:
            at = max((at, *self.free.values()))
        if node in self.number:
            at = max(at, self._gate(node))
            self.source[node] = self.number[node]
        stream = f"{message.kind} {message.group}"
        end = self.send(stream, node, at, message)
        if message.kind == BARRIER:
            self.free[COMPUTE] = end
        again = any(n in self.reduced for n in self.read[node])
        if in_backward(node) and (
            message.kind == REDUCE_SCATTER or (message.kind == ALL_REDUCE and again)
        ):
            self.reduced[node] = stream
            self.all_reduced = max(self.all_reduced, end)
            if message.kind == REDUCE_SCATTER:
                self.last_reduce = end
        return end

    def _gate(self, gather: fx.Node) -> float:
        """The end of the copy-out that an all-gather of parameters waits for; 0 if there is none."""
        number = self.number[gather]
        before = self.gathers[number - 1] if number else gather
        back = 1 if in_backward(gather) or in_backward(before) else 2
        return self.copied_out.get(number - back, 0.0)

    def _where_reduced(self, node: fx.Node) -> str | None:
        """The stream of an op on reduced gradients: that of their reduction; None for any other op."""
        if phase_of(node) != BACKWARD or _packet(node) not in _AFTER_REDUCE:
            return None
        found = [self.reduced[n] for n in self.read[node] if n in self.reduced]
        others = (n for n in self.read[node] if n not in self.reduced)
        return found[-1] if found and all(n in self.inputs for n in others) else None


def _parameter_gathers(
    read: dict[fx.Node, list[fx.Node]], costs: Costs
) -> tuple[dict[fx.Node, int], dict[fx.Node, fx.Node]]:
    """The all-gathers of parameters, numbered, and their copy-ins.

    read: what each node of the graph reads. Returns (all-gathers whose input depends on graph inputs alone -> number,
    nodes that depend on graph inputs alone and whose result only such all-gathers use -> the first of these).
    """
    from_inputs: set[fx.Node] = set()
    number: dict[fx.Node, int] = {}
    for node, inputs in read.items():
        depends = node.op in ("placeholder", "get_attr")
        if node.op == "call_function" and inputs and from_inputs.issuperset(inputs):
            message = costs[node].message
            depends = message is None
            if message is not None and message.kind == ALL_GATHER:
                number[node] = len(number)
        if depends:
            from_inputs.add(node)
    copy_ins: dict[fx.Node, fx.Node] = {}
    for node in reversed(read):
        if node in from_inputs and node.op == "call_function" and node.users:
            ends = [n if n in number else copy_ins.get(n) for n in node.users]
            if all(end is not None for end in ends):
                copy_ins[node] = ends[0]  # type: ignore[assignment]
    return number, copy_ins


def _packs(read: dict[fx.Node, list[fx.Node]], costs: Costs) -> set[fx.Node]:
    """The ops that copy gradients into the input buffers of reduce-scatters. read: what each node reads."""
    found: set[fx.Node] = set()
    for node, cost in costs.items():
        if cost.message is None or cost.message.kind != REDUCE_SCATTER or not in_backward(node):
            continue
        for source in read[node]:
            while source in costs and (costs[source].free or _packet(source) is aten._to_copy):
                if len(read[source]) != 1:
                    break
                (source,) = read[source]
            if _packet(source) in _PACKS:
                found.add(source)
    return found


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


_STREAMS: Mapping[str, Callable[[fx.Graph, Machine, Groups, Costs], _SerialSchedule]] = (
    types.MappingProxyType(
        {"fsdp2": _Fsdp2Schedule, "replay": _ReplaySchedule, "serial": _SerialSchedule}
    )
)
