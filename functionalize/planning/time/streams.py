"""When every op of a program runs on a model of a machine with streams: spans, by one of three sets of rules.

    fsdp2     what eager FSDP2 does on a GPU
                  compute                │ copy-out 0 │ layer 0    │ copy-out 1 │ layer 1 …
                  all-gather 0           │ gather 0 │ gather 1   │ gather 2 …
                  reduce-scatter 0       …
    replay    what a replay of the program, as it stands, does on a GPU
    serial    one thing after the other, in one row: a CPU

Rules that fsdp2 and replay share: a stream runs one thing at a time, in the order of the program; a collective starts
when its inputs are ready, its stream is free, and its process group is done with the one before it.

fsdp2: the host is never late, so that order and data decide, and not the place of a collective in the program.
- What is computed of inputs alone for an all-gather (casts, the cat) runs on a stream `all-gather copy-in 0`.
- An all-gather of parameters waits for the copy-out of the one two before it, in backward for that of the one before
  it: eager frees the gathered buffers so. A copy-out not yet there where the gather stands in the program (`prefetch`)
  is not waited for.
- Compute waits for what it reads. In backward, before it packs gradients, it waits for the reduce-scatter before them
  (as eager does with its default of one input buffer).
- Casts and sums of reduced gradients run where they were reduced; compute waits for them at the end of the backward.

replay: collectives start no earlier than the compute that the program has before them, as those of one stream do, and
compute waits at every `wait_tensor`. The program as captured has its all-gathers of forward where eager issues them,
right before their layer, so that nothing overlaps; the `prefetch` pass is what moves them.

Left out: hosts that are late, the memory bandwidth that copies of one stream take from another, Python that reads a
number. Invariant: spans of one stream do not overlap, and no op starts before its inputs are ready. Linear in nodes
and edges.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import fx

from functionalize._compat.autograd import BACKWARD
from functionalize.errors import PassError
from functionalize.ir.phases import in_backward, phase_of
from functionalize.ir.waits import WAIT
from functionalize.planning.report.spans import Span
from functionalize.planning.time.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    REDUCE_SCATTER,
    Groups,
    Traffic,
    kind_of,
    traffic_of,
)
from functionalize.planning.time.costs import (
    Machine,
    dtype_of,
    flops,
    is_collective,
    is_free,
    moved,
    op_seconds,
)

aten = torch.ops.aten

COMPUTE = "compute"
_AFTER_REDUCE = (
    aten._to_copy,
    aten.add,
    aten.div,
    aten.mul,
)  # what FSDP2 does to reduced gradients
_PACKS = (aten._chunk_cat, aten.cat)


class Piece(NamedTuple):
    """A span. communicates: whether it is a collective, or a copy on a communication stream."""

    span: Span
    communicates: bool
    flops: int = 0
    ideal: float = 0.0  # seconds at the peak rate of its dtype


def schedule(graph: fx.Graph, machine: Machine, groups: Groups, streams: str) -> list[Piece]:
    """When everything that takes time runs, by the rules of `fsdp2`, `replay` or `serial`."""
    if streams not in STREAMS:
        raise PassError(f"no streams `{streams}`; there are {', '.join(STREAMS)}")
    return STREAMS[streams](graph, machine, groups).run()


class _Serial:
    """One thing after the other. Subclasses say what runs where, and what it waits for."""

    def __init__(self, graph: fx.Graph, machine: Machine, groups: Groups) -> None:
        self.graph, self.machine, self.groups = graph, machine, groups
        self.pieces: list[Piece] = []
        self.free: dict[str, float] = defaultdict(float)  # stream -> when it is
        self.link: dict[str, float] = defaultdict(float)  # process group -> when it is free
        self.ready: dict[fx.Node, float] = {}

    def run(self) -> list[Piece]:
        for node in self.graph.nodes:
            at = max((self.ready[n] for n in node.all_input_nodes), default=0.0)
            if node.op != "call_function":
                self.ready[node] = at
            elif is_free(node):
                self.ready[node] = self.view(node, at)
            elif is_collective(node):
                self.ready[node] = self.collective(node, at, traffic_of(node, self.groups))
            else:
                self.ready[node] = self.op(node, at)
        return self.pieces

    def view(self, node: fx.Node, at: float) -> float:
        """When a view, a wait or a number is ready."""
        return at

    def op(self, node: fx.Node, at: float) -> float:
        """When an op that could start at `at` has run."""
        return self.compute(COMPUTE, node, at)

    def collective(self, node: fx.Node, at: float, traffic: Traffic) -> float:
        """When a collective that could start at `at` has run."""
        return self.send(COMPUTE, node, at, traffic)

    def compute(self, stream: str, node: fx.Node, at: float) -> float:
        """Run an op on a stream."""
        count = flops(node)
        seconds = op_seconds(node, self.machine, count, moved(node))
        return self._add(stream, node, at, seconds, stream != COMPUTE, count)

    def send(self, stream: str, node: fx.Node, at: float, traffic: Traffic) -> float:
        """Run a collective on a stream."""
        group = self.groups[traffic.group]
        on_a_node = group.on_a_node(self.machine.ranks_per_node)
        bandwidth = self.machine.ring_bandwidth(group.size, on_a_node)
        seconds = self.machine.latency + traffic.sent / bandwidth
        at = max(at, self.link[group.name])
        end = self._add(stream, node, at, seconds, True, 0, traffic.sent)
        self.link[group.name] = end
        return end

    def _add(
        self,
        stream: str,
        node: fx.Node,
        at: float,
        seconds: float,
        communicates: bool,
        count: int,
        nbytes: int = 0,
    ) -> float:
        start = max(at, self.free[stream])
        end = start + seconds
        meta = node.meta
        span = Span(
            stream, node.name, start, end, meta.get("phase", ""), meta.get("module", ""), nbytes
        )
        self.pieces.append(Piece(span, communicates, count, self._ideal(node, count)))
        self.free[stream] = end
        return end

    def _ideal(self, node: fx.Node, count: int) -> float:
        return count / self.machine.rate(dtype_of(node)) if count else 0.0


class _Replay(_Serial):
    """Collectives are issued in the order of the program by the one stream that computes."""

    def view(self, node: fx.Node, at: float) -> float:
        if node.target is WAIT:
            self.free[COMPUTE] = max(self.free[COMPUTE], at)
        return at

    def collective(self, node: fx.Node, at: float, traffic: Traffic) -> float:
        at = max(at, self.free[COMPUTE])
        end = self.send(f"{traffic.kind} {traffic.group}", node, at, traffic)
        if traffic.kind == BARRIER:
            self.free[COMPUTE] = end
        return end


class _Fsdp2(_Serial):
    """Data decide when things start, and what eager FSDP2 waits for to bound its memory."""

    def __init__(self, graph: fx.Graph, machine: Machine, groups: Groups) -> None:
        super().__init__(graph, machine, groups)
        self.number, self.feeds = _gathers_of_inputs(graph)
        self.gathers = list(self.number)
        self.packs = _packs(graph)
        self.source: dict[fx.Node, int] = {}  # a view of what a gather gave -> its number
        self.opened: dict[int, float] = {}  # gather -> the end of its copy-out
        self.given = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        self.reduced: dict[fx.Node, str] = {}  # reduced gradients -> where they were reduced
        self.last_reduce = self.all_reduced = 0.0
        self.was_backward = False

    def view(self, node: fx.Node, at: float) -> float:
        for n in node.all_input_nodes[:1]:
            if n in self.source:
                self.source[node] = self.source[n]
            if n in self.reduced:
                self.reduced[node] = self.reduced[n]
            if n in self.given:
                self.given.add(node)
        return at

    def op(self, node: fx.Node, at: float) -> float:
        if node in self.feeds:
            gather = self.feeds[node]
            group = traffic_of(gather, self.groups).group
            return self.compute(f"{ALL_GATHER} copy-in {group}", node, max(at, self._gate(gather)))
        stream = self._where_reduced(node)
        if stream is not None:
            self.reduced[node] = stream
            self.all_reduced = max(self.all_reduced, end := self.compute(stream, node, at))
            return end
        if in_backward(node):
            self.was_backward = True
        elif self.was_backward and phase_of(node) is not None:
            at, self.was_backward = max(at, self.all_reduced), False
        if node in self.packs:
            at = max(at, self.last_reduce)
        end = self.compute(COMPUTE, node, at)
        for n in node.all_input_nodes:
            if n in self.source:
                self.opened.setdefault(self.source[n], end)
        return end

    def collective(self, node: fx.Node, at: float, traffic: Traffic) -> float:
        if traffic.kind == BARRIER:
            at = max((at, *self.free.values()))
        if node in self.number:
            at = max(at, self._gate(node))
            self.source[node] = self.number[node]
        stream = f"{traffic.kind} {traffic.group}"
        end = self.send(stream, node, at, traffic)
        if traffic.kind == BARRIER:
            self.free[COMPUTE] = end
        again = any(n in self.reduced for n in node.all_input_nodes)
        if in_backward(node) and (
            traffic.kind == REDUCE_SCATTER or (traffic.kind == ALL_REDUCE and again)
        ):
            self.reduced[node] = stream
            self.all_reduced = max(self.all_reduced, end)
            if traffic.kind == REDUCE_SCATTER:
                self.last_reduce = end
        return end

    def _gate(self, gather: fx.Node) -> float:
        """The copy-out that an all-gather of parameters waits for."""
        number = self.number[gather]
        before = self.gathers[number - 1] if number else gather
        back = 1 if in_backward(gather) or in_backward(before) else 2
        return self.opened.get(number - back, 0.0)

    def _where_reduced(self, node: fx.Node) -> str | None:
        """The stream of what an op goes on to reduce; None for any other op."""
        if phase_of(node) != BACKWARD or getattr(node.target, "overloadpacket", None) not in (
            _AFTER_REDUCE
        ):
            return None
        found = [self.reduced[n] for n in node.all_input_nodes if n in self.reduced]
        others = (n for n in node.all_input_nodes if n not in self.reduced)
        return found[-1] if found and all(n in self.given for n in others) else None


def _gathers_of_inputs(graph: fx.Graph) -> tuple[dict[fx.Node, int], dict[fx.Node, fx.Node]]:
    """(all-gathers of what is made from inputs alone -> number, what is made for them alone -> the gather)."""
    given: set[fx.Node] = set()
    number: dict[fx.Node, int] = {}
    for node in graph.nodes:
        made = node.op in ("placeholder", "get_attr")
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(n in given for n in inputs):
            made = not is_collective(node)
            if not made and kind_of(node) == ALL_GATHER:
                number[node] = len(number)
        if made:
            given.add(node)
    feeds: dict[fx.Node, fx.Node] = {}
    for node in reversed(graph.nodes):
        if node in given and node.op == "call_function" and node.users:
            ends = [n if n in number else feeds.get(n) for n in node.users]
            if all(end is not None for end in ends):
                feeds[node] = ends[0]  # type: ignore[assignment]
    return number, feeds


def _packs(graph: fx.Graph) -> set[fx.Node]:
    """The copies of gradients into the buffers of reduce-scatters."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not (is_collective(node) and in_backward(node) and kind_of(node) == REDUCE_SCATTER):
            continue
        for source in node.all_input_nodes:
            while is_free(source) or getattr(source.target, "overloadpacket", None) is (
                aten._to_copy
            ):
                if len(source.all_input_nodes) != 1:
                    break
                (source,) = source.all_input_nodes
            if getattr(source.target, "overloadpacket", None) in _PACKS:
                found.add(source)
    return found


STREAMS: Mapping[str, Callable[[fx.Graph, Machine, Groups], _Serial]] = types.MappingProxyType(
    {"fsdp2": _Fsdp2, "replay": _Replay, "serial": _Serial}
)
