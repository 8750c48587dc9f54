"""The modelled time of a step: schedules that keep their rules, overlap as FSDP2 has it, and numbers by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import fx

import functionalize as fz
from functionalize import passes
from functionalize.cost.costs import is_collective, is_free, seconds
from functionalize.cost.machines.efficiency import Efficiency
from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PassError
from functionalize.ir.barrier import BARRIER
from functionalize.ir.waits import WAIT
from functionalize.planner.report.rows import Span
from functionalize.planner.time.communication import communication
from functionalize.planner.time.compute import compute, summed
from functionalize.planner.time.step_time import StepTime, step_time
from tests.planner.captured import Recorded, recorded

functional = torch.ops._c10d_functional
# A block computes for about 0.25 ms in forward, its gather takes about 0.05.
MACHINE = Machine(1e9, 1e9, 200e6, 1e-6, 1e-6)
STEPS = ["transformer", "hsdp", "checkpointed"]
MODES = ["fsdp2", "replay", "serial"]


def timed(step: Recorded, streams: str, machine: Machine = MACHINE) -> StepTime:
    return step_time(step.program, machine, streams=streams, groups=step.groups)


def rows(time: StepTime) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in time.spans:
        found.setdefault(span.stream, []).append(span)
    return found


# -- what every schedule keeps ---------------------------------------------------------------------


@pytest.mark.parametrize("streams", MODES)
@pytest.mark.parametrize("name", STEPS)
def test_nothing_starts_before_its_inputs_are_ready(name: str, streams: str) -> None:
    step = recorded(name)
    spans = {span.name: span for span in timed(step, streams).spans}
    ready: dict[fx.Node, float] = {}
    for node in step.program.graph.nodes:
        inputs = max((ready[n] for n in node.all_input_nodes), default=0.0)
        span = spans.pop(node.name, None)
        works = is_collective(node) or not is_free(node)
        assert (span is not None) == (node.op == "call_function" and works)
        if span is not None:
            assert span.start >= inputs
        ready[node] = inputs if span is None else span.end
    assert not spans


@pytest.mark.parametrize("streams", MODES)
@pytest.mark.parametrize("name", STEPS)
def test_streams_and_groups_do_one_thing_at_a_time(name: str, streams: str) -> None:
    time = timed(recorded(name), streams)
    found = list(rows(time).values())
    by_group: dict[str, list[Span]] = {}
    for span in time.spans:
        if span.nbytes and streams != "serial":
            by_group.setdefault(span.stream.split()[1], []).append(span)
    for row in (*found, *by_group.values()):
        assert all(a.end <= b.start for a, b in pairwise(row))


@pytest.mark.parametrize("streams", MODES)
@pytest.mark.parametrize("name", STEPS)
def test_the_parts_add_up(name: str, streams: str) -> None:
    step = recorded(name)
    time = timed(step, streams)
    assert time.seconds == max(span.end for span in time.spans)
    assert math.isclose(time.compute + time.exposed, time.seconds)
    assert math.isclose(sum(phase.seconds for phase in time.phases), time.seconds)
    assert 0 < time.exposed <= time.communication and time.overlap >= 0
    assert time.flops == sum(row.flops for row in compute(step.program))
    sent = sum(row.sent for row in communication(step.program, step.groups))
    assert sum(span.nbytes for span in time.spans) == sent


# -- serial ----------------------------------------------------------------------------------------


def test_one_row_takes_as_long_as_its_parts() -> None:
    step = recorded(
        "transformer"
    )  # no all-reduce, whose ring has ranks that `seconds` does not know
    time = timed(step, "serial")
    assert set(rows(time)) == {"compute"} and time.overlap == 0
    whole = sum(seconds(node, MACHINE) for node in step.program.graph.nodes)
    assert math.isclose(time.seconds, whole)


def test_cpus_have_one_row() -> None:
    program = recorded("transformer").program
    assert step_time(program, MACHINES["cpu"]).streams == "serial"
    assert step_time(program, MACHINES["h100"]).streams == "fsdp2"


# -- the overlap of FSDP2 --------------------------------------------------------------------------


def windows(time: StepTime, phase: str) -> tuple[list[Span], list[Span]]:
    """(all-gathers, copy-outs) of a phase."""
    gathers = [s for s in time.spans if s.stream == "all-gather 0" and s.phase == phase]
    copies = [s for s in time.spans if s.name.startswith("split_with_sizes_copy")]
    return gathers, [s for s in copies if s.phase == phase]


def test_forward_gathers_a_layer_while_another_computes() -> None:
    time = timed(recorded("transformer"), "fsdp2")
    gathers, copies = windows(time, "forward")
    assert len(gathers) == len(copies) == 4
    for gather, copy, before in zip(gathers[2:], copies[2:], copies, strict=False):
        assert gather.start >= before.end  # two gathered buffers at most
        assert gather.end < copy.start  # there before its layer begins
    forward = time.phases[0]
    assert forward.phase == "forward"
    first_two = gathers[1].end
    assert forward.exposed <= first_two < forward.communication


def test_backward_gathers_one_layer_ahead() -> None:
    time = timed(recorded("transformer"), "fsdp2")
    gathers, copies = windows(time, "backward")
    assert len(gathers) == len(copies) == 3
    for gather, before, copy in zip(gathers[1:], copies, copies[1:], strict=False):
        assert before.end <= gather.start < gather.end <= copy.start
        busy = [s for s in time.spans if s.stream == "compute" and s.end > gather.start]
        assert busy[0].start <= gather.start  # while the layer before it computes
    scatters = [s for s in time.spans if s.stream.startswith("reduce-scatter")]
    packs = [s for s in time.spans if s.name.startswith("_chunk_cat")]
    assert len(scatters) == len(packs) == 4
    for scatter, pack, following in zip(scatters, packs, packs[1:], strict=False):
        assert pack.end <= scatter.start and scatter.end <= following.start
    optimizer = [s for s in time.spans if s.phase == "optimizer"]
    assert min(s.start for s in optimizer) >= scatters[-1].end


def test_a_slow_link_is_exposed_and_a_fast_one_is_not() -> None:
    step = recorded("transformer")
    slow, fast = (
        timed(step, "fsdp2", replace(MACHINE, link_bandwidth=bandwidth)) for bandwidth in (1e6, 1e9)
    )
    assert slow.exposed > 0.9 * slow.communication > 0.9 * slow.seconds * 0.9
    assert fast.exposed < 0.5 * fast.communication
    assert math.isclose(slow.compute, fast.compute)
    assert slow.mfu < fast.mfu  # type: ignore[operator]


def test_replicas_are_reduced_after_shards() -> None:
    step = recorded("hsdp")
    time = timed(step, "fsdp2")
    streams = {name.rstrip(" 0123456789") for name in rows(time)}
    assert streams == {
        *("compute", "all-gather copy-in", "all-gather"),
        *("reduce-scatter", "all-reduce"),
    }
    by_name = {span.name: span for span in time.spans}
    reduced = [s for s in time.spans if s.stream.startswith("all-reduce") and s.phase == "backward"]
    scatters = [s for s in time.spans if s.stream.startswith("reduce-scatter")]
    assert len(reduced) == len(scatters) == 4
    computing = rows(time)["compute"]
    for before, after in zip(scatters, reduced, strict=True):
        assert after.start >= before.end
    # The first gradients travel while others are computed.
    assert any(s.start < reduced[0].start < s.end for s in computing)
    assert by_name[reduced[0].name].nbytes > 0


def reduce_and_go_on(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shard = functional.reduce_scatter_tensor(grad, "avg", 2, "0")
    cast = functional.wait_tensor(shard).to(torch.float64)
    return cast, (x @ x) * 2


def test_what_becomes_of_reduced_gradients_stops_no_compute() -> None:
    program = fz.functions.trace(reduce_and_go_on, torch.ones(4), torch.ones(4, 4))
    program.describe()
    for node in program.graph.nodes:
        node.meta["phase"] = "optimizer" if node.name.startswith("mul") else "backward"
    # the reduce-scatter: 8 bytes; the cast: 24 bytes; the product: 128 FLOPs; its double: 128 bytes
    time = step_time(program, Machine(16.0, 64.0, 8.0, 20.0, 1.0))
    assert [(s.stream, s.start, s.end) for s in time.spans] == [
        ("reduce-scatter 0", 0, 21),
        ("reduce-scatter 0", 21, 22.375),
        ("compute", 0, 9),
        ("compute", 22.375, 25.375),  # the end of the backward waits for all gradients
    ]


def test_recomputation_is_no_model_flops() -> None:
    plain, again = timed(recorded("transformer"), "fsdp2"), timed(recorded("checkpointed"), "fsdp2")
    assert plain.model_flops == plain.flops
    (recompute,) = (phase for phase in again.phases if phase.phase == "recompute")
    assert again.flops - again.model_flops == recompute.flops > 0


# -- what a replay does ----------------------------------------------------------------------------


def exposed_in(time: StepTime, phase: str) -> float:
    return next(each.exposed for each in time.phases if each.phase == phase)


def test_recorded_order_hides_nothing_in_forward() -> None:
    time = timed(recorded("transformer"), "replay")
    forward = time.phases[0]
    assert math.isclose(forward.exposed, forward.communication)
    assert exposed_in(time, "backward") < time.phases[1].communication  # eager's own prefetch
    assert time.seconds > timed(recorded("transformer"), "fsdp2").seconds


def test_prefetch_hides_what_recorded_order_does_not() -> None:
    step = recorded("transformer")
    after = passes.run(step.program, "prefetch")
    before, time = timed(step, "replay"), timed(replace(step, program=after), "replay")
    assert time.exposed < before.exposed
    assert exposed_in(time, "forward") < 0.7 * exposed_in(before, "forward")
    assert math.isclose(time.compute, before.compute)
    deep = passes.run(step.program, "prefetch{depth=3}")
    for streams in MODES:  # gathers whose copy-out comes later do not wait for it
        assert timed(replace(step, program=deep), streams).seconds > 0


# -- by hand ---------------------------------------------------------------------------------------


def gather_and_multiply(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    whole = functional.wait_tensor(functional.all_gather_into_tensor(shard, 2, "0"))
    return (x @ x) @ whole


def test_seconds_by_hand() -> None:
    program = fz.functions.trace(gather_and_multiply, torch.ones(4, 4), torch.ones(2, 4))
    # a product: 128 FLOPs, 192 bytes; the gather: 32 bytes to the other rank
    machine = Machine(16.0, 64.0, 8.0, 2.0, 1.0)
    product, gather = 1 + 128 / 16, 2 + 32 / 8
    overlapped = step_time(program, machine)
    assert (overlapped.seconds, overlapped.exposed) == (2 * product, 0)
    assert (overlapped.communication, overlapped.overlap) == (gather, gather)
    assert overlapped.mfu == 2 * 8 / (2 * product)
    one_row = step_time(program, machine, streams="serial")
    assert (one_row.seconds, one_row.exposed) == (2 * product + gather, gather)
    waits = step_time(program, replace(machine, latency=20.0))
    assert (waits.seconds, waits.exposed) == (24 + product, 24 - product)


def test_a_wait_stops_the_stream_of_a_replay() -> None:
    program = fz.functions.trace(gather_and_multiply, torch.ones(4, 4), torch.ones(2, 4))
    program.describe()
    machine = Machine(16.0, 64.0, 8.0, 2.0, 1.0)
    (wait,) = program.graph.find_nodes(op="call_function", target=WAIT)
    (start,) = wait.all_input_nodes
    assert step_time(program, machine, streams="replay").exposed == 0
    start.append(wait)
    assert step_time(program, machine, streams="replay").exposed == 6


def test_a_barrier_is_waited_for() -> None:
    program = fz.functions.trace(gather_and_multiply, torch.ones(4, 4), torch.ones(2, 4))
    program.describe()
    machine = Machine(16.0, 64.0, 8.0, 2.0, 1.0)
    last = next(n for n in reversed(program.graph.nodes) if n.op == "call_function")
    with program.graph.inserting_before(last):
        node = program.graph.call_function(BARRIER, ("0", []))
    node.meta["val"] = None
    for streams in ("fsdp2", "replay"):
        time = step_time(program, machine, streams=streams)
        (barrier,) = (span for span in time.spans if span.stream == "barrier 0")
        assert (barrier.start, barrier.end, time.seconds) == (9, 11, 20)


def test_nothing_takes_no_time() -> None:
    time = step_time(fz.functions.trace(lambda x: x.t(), torch.ones(2, 3)), MACHINE)
    assert (time.seconds, time.mfu, time.phases, time.spans) == (0, None, (), ())
    assert "modelled" in time.text()


# -- nodes -----------------------------------------------------------------------------------------


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    machine = Machine(1, 1, 400.0, 0, 0, ranks_per_node=8, internode_bandwidth=30.0)
    assert machine.collective_seconds("broadcast", 400, 8, 8) == 1  # on one node
    assert (
        machine.collective_seconds("broadcast", 240, 64, 8) == 1
    )  # by the adapters of eight ranks
    assert machine.collective_seconds("broadcast", 30, 2, 1) == 1
    assert Machine(1, 1, 400.0, 0, 0).collective_seconds("broadcast", 400, 1000, 1000) == 1
    h100 = replace(MACHINES["h100"], efficiency=Efficiency(), algorithms=(), latency=0)
    assert h100.collective_seconds("broadcast", 400e9, 16, 8) == 1
    assert h100.collective_seconds("broadcast", 450e9, 8, 8) == 1


def test_replicas_on_other_nodes_are_slow() -> None:
    step = recorded("hsdp")
    near, far = (
        timed(step, "fsdp2", replace(MACHINE, ranks_per_node=n, internode_bandwidth=1e6))
        for n in (8, 4)
    )

    def longest(time: StepTime, kind: str) -> float:
        return max(s.end - s.start for s in time.spans if s.stream.startswith(kind) and s.nbytes)

    assert longest(far, "all-reduce") > 10 * longest(near, "all-reduce")
    assert longest(far, "all-gather") == longest(near, "all-gather")


# -- for people ------------------------------------------------------------------------------------


def test_text(expect: Callable[[str, str], None]) -> None:
    expect("checkpointed", timed(recorded("checkpointed"), "fsdp2").text())
    expect("serial", timed(recorded("transformer"), "serial").text())


def test_presets_have_names_in_what_people_read() -> None:
    time = step_time(recorded("transformer").program, MACHINES["b200"])
    assert "on b200" in time.text().splitlines()[0]
    assert time.to_json()["machine"] == "b200"


def test_json() -> None:
    time = timed(recorded("transformer"), "fsdp2")
    found = json.loads(json.dumps(time.to_json(spans=True)))
    assert found["modelled"] is True and found["seconds"] == time.seconds
    assert [phase["phase"] for phase in found["phases"]] == ["forward", "backward", "optimizer"]
    assert [Span(*row) for row in found["spans"]["rows"]] == list(time.spans)
    assert found["spans"]["fields"] == list(Span._fields)
    assert "spans" not in time.to_json()


def test_streams_have_names() -> None:
    with pytest.raises(PassError, match=r"^no streams `gpu`; there are fsdp2, replay, serial$"):
        timed(recorded("transformer"), "gpu")


def test_modules_are_told() -> None:
    program = recorded("transformer").program.copy()
    for node in program.graph.nodes:
        node.meta["module"] = "here"
    assert {span.module for span in step_time(program, MACHINE).spans} == {"here"}
    assert summed(compute(program))[0].module == "here"
