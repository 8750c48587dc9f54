"""A calibration with tiny sizes: a machine whose curves are curves, that a plan takes; what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

import functionalize as fz
from functionalize.cost.costs import flops, is_collective, kind_of_kernel, moved
from functionalize.cost.machines.efficiency import COLLECTIVES, KINDS, Host
from functionalize.cost.machines.machine import Machine
from functionalize.errors import PlanError
from functionalize.planner.calibration import tiny_steps
from functionalize.planner.calibration.calibrate import (
    Calibration,
    Sample,
    calibrate,
    curve_of,
    matmuls,
    probes,
    rates,
)
from functionalize.planner.calibration.timing import Clock
from functionalize.planner.cli.app import app
from functionalize.planner.machines.files import write_machine
from functionalize.planner.time.step_time import step_time
from tests.planner.captured import recorded
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long


def tiny() -> Machine:
    """A machine, measured by the ranks of the pool with tiny probes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        calibration = Calibration("cpu", 2e-3, passes=20, largest=1 << 17, depths=(1, 2))
        told: list[tuple[int, int]] = []
        calibration.clock.tell = lambda done, of_pass: told.append((done, of_pass))
        calibration.measure()
        first = len(told)
        machine = calibration.measure()
        assert told[0] == (1, 1) and told[-1] == (2 * first, first) and told == sorted(told)
        return machine
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def machine() -> Machine:
    first, second = run_on_ranks(tiny, world=2)
    assert first.overhead == second.overhead  # the mean of both
    return first


def test_every_kind_has_a_curve_and_every_number_is_above_0(machine: Machine) -> None:
    found = dict(machine.efficiency.curves)
    assert set(found) <= KINDS and {"matmul", "attention backward", "optimizer"} <= set(found)
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= set(found) & set(COLLECTIVES)
    for curve in found.values():
        assert all(0 < share <= 1 for _, share in curve.points) and curve.source
    assert max(share for _, share in found["all-gather"].points) <= 1
    host = machine.host
    assert host is not None
    assert all(seconds >= 0 for seconds in host)  # 0 where a tiny probe took longer than the step
    assert machine.host_memory_bandwidth > 1e6
    assert 0 < machine.overhead < 1e-3 and machine.latency > 0 and not machine.streams


#: Seconds that no measurement of this test takes by chance.
KNOWN = Host(
    forward=1e-3,
    backward=2e-3,
    optimizer=3e-2,
    gather=0.4,
    reduce=0.5,
    node=6e-3,
    call=0.7,
    collective=0.8,
)


def found_again() -> Host:
    """The host of steps that take what the model says of KNOWN, instead of what a clock says."""
    machine = Machine(1e12, 1e11, 1e9, 1e-6, 0, streams=False, host=KNOWN)

    def known_phases(clock, tiny, runs):
        phases = step_time(tiny.program, machine, streams="serial").phases
        return {each.phase: each.seconds for each in phases}

    def known_replay(clock, tiny, runs):
        return step_time(tiny.program, machine, replay=True).seconds

    with (
        mock.patch.object(tiny_steps, "_phase_seconds", known_phases),
        mock.patch.object(tiny_steps, "_replay_seconds", known_replay),
    ):
        steps = tiny_steps.TinySteps.made("cpu", (1, 2))
        return tiny_steps.host_of(Clock("cpu", 1e-4), machine, steps)


def test_the_host_is_found_again_from_the_seconds_that_it_adds() -> None:
    for found in run_on_ranks(found_again, world=2):
        assert found._asdict() == pytest.approx(KNOWN._asdict(), rel=1e-6)


@pytest.mark.parametrize(
    ("ys", "expected"),
    [
        ((5.0, 9.0), (3.0, 2.0)),
        ((1.0, 5.0), (0.0, 1.6)),  # the line through both is below 0 at 0
        ((5.0, 3.0), (4.0, 0.0)),  # it falls
        ((-1.0, -2.0), (0.0, 0.0)),
    ],
)
def test_seconds_per_node_and_call_are_not_negative(ys, expected) -> None:
    assert tiny_steps.line_of((1.0, 3.0), ys) == pytest.approx(expected)


def test_a_plan_takes_the_file(machine: Machine, tmp_path) -> None:
    path = str(tmp_path / "here.json")
    write_machine(path, machine)
    model = torch.nn.Linear

    def build():
        linear = model(8, 8)
        return linear, torch.optim.SGD(linear.parameters(), lr=0.1)

    def step(linear, optimizer, x):
        linear(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    grid = {"passes": [None, "default"]}
    sweep = fz.plan(
        build, step, grid, inputs=lambda: (torch.ones(2, 8),), target="cpu", machine=path
    )
    eager, replay = (each.figures.time for each in sweep.plans)
    assert eager.seconds > 0 and replay.replay and not eager.replay
    assert f"modelled on a machine of your own ({machine.efficiency.about})" in sweep.notes()


def test_the_host_counts_for_what_it_does() -> None:
    step = recorded("transformer")
    bare = Machine(1e9, 1e9, 200e6, 1e-6, 1e-6, streams=False)

    def seconds(replay: bool = False, **host: float) -> float:
        own = replace(bare, host=Host(**host))
        return step_time(step.program, own, groups=step.groups, replay=replay).seconds

    nodes = [n for n in step.program.graph.nodes if n.op == "call_function"]
    without = seconds()
    assert seconds(replay=True, call=1.0) == pytest.approx(without + 1)
    assert seconds(replay=True, forward=1.0, gather=1.0) == pytest.approx(without)
    assert seconds(call=1.0, node=1.0, collective=1.0) == pytest.approx(without)
    by_node = seconds(replay=True, node=1.0) - without
    assert len(nodes) / 2 < by_node <= len(nodes)
    gathers = sum("all_gather" in str(n.target) for n in nodes)
    assert seconds(gather=1.0) - without == pytest.approx(gathers)
    sent = seconds(replay=True, collective=1.0) - without
    assert gathers < sent == pytest.approx(sum(map(is_collective, nodes)))
    time = step_time(step.program, replace(bare, host=Host(forward=1.0)), groups=step.groups)
    assert time.compute + time.exposed == pytest.approx(time.seconds)


def test_probes_count_the_work_that_a_plan_counts() -> None:
    """The FLOPs and bytes of a probe are those that `costs` finds for the same calls."""
    seen = set()
    for probe in probes("cpu", torch.float32, 1 << 16):
        work = 0.0
        for call in probe.calls:
            program = fz.functions.trace(call)
            program.describe()
            nodes = [n for n in program.graph.nodes if n.op == "call_function" and moved(n)]
            names = {n: n.target.overloadpacket.__name__ for n in nodes}
            own = [n for n in nodes if kind_of_kernel(names[n], flops(n)) == probe.kind]
            assert own, (probe.kind, names)
            hidden = 2 if probe.kind.startswith("attention") else 1  # by the causal mask
            work += sum(flops(n) / hidden or moved(n) for n in own)
        assert math.isclose(work, probe.work, rel_tol=0.15), probe.kind
        seen.add(probe.kind)
    assert len(seen) == 11


def test_calls_of_a_probe_read_other_tensors() -> None:
    """Of `largest` bytes together, but for small ones; lookups share a table."""
    largest, smallest = 1 << 20, dict[str, int]()
    for probe in probes("cpu", torch.float32, largest):
        calls = len(probe.calls)
        smallest.setdefault(probe.kind, calls)
        match probe.kind:
            case "lookup":
                assert calls == 1
            case "pointwise" | "copy":
                count = probe.work / calls / 4 / (3 if probe.kind == "pointwise" else 2)
                assert calls == 2 * min(largest // (4 * round(count)), 512)
            case "matmul":
                rows = round((probe.size / 32) ** (1 / 3))
                assert calls == 3 * max(largest // (96 * rows * rows), 1) or calls == 3 * 512
    # A set of an attention's tensors has more than `largest` bytes.
    alone = {kind for kind, calls in smallest.items() if calls == 1}
    assert alone == {"lookup", "attention", "attention backward"}
    assert all(calls > 3 for kind, calls in smallest.items() if kind not in alone)
    matrices = list(matmuls("cpu", torch.float32, largest))
    assert [p.size for p in matmuls("cpu", torch.float32, largest, most=2)] == [
        p.size for p in matrices[-2:]
    ]


def in_passes() -> list[list[float]]:
    """What a clock says in three passes over two measurements, of ranks with other seconds."""
    clock, mine = Clock("cpu", 1e-4), 2 * torch.distributed.get_rank()
    found = []
    for seconds in (5.0, 100.0, 7.0):
        clock.begin()
        found.append([clock.noted(seconds + mine), clock.noted(1.0)])
    return found


def test_a_measurement_is_the_median_of_the_passes() -> None:
    for found in run_on_ranks(in_passes, world=2):
        assert found == [[6.0, 1.0], [53.5, 1.0], [8.0, 1.0]]


def test_time_never_falls_with_size() -> None:
    samples = [Sample(1e3, 1e3, 2e-6), Sample(1e4, 1e4, 5e-6), Sample(1e5, 1e5, 4e-6)]
    found = rates(samples, overhead=1e-6)
    seconds = [size / rate for size, rate in found]
    assert seconds == sorted(seconds) and seconds[1] == pytest.approx(4e-6)
    curve = curve_of(found, max(rate for _, rate in found), "here")
    assert max(share for _, share in curve.points) == 1


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="needs two ranks to measure their link, not 1"):
        calibrate(ranks=1)
    with pytest.raises(PlanError, match="`passes` is 1 or more, not 0"):
        calibrate(device="cpu", passes=0)
    with fz.world(2), pytest.raises(PlanError, match="this process has a process group"):
        calibrate(device="cpu")
    with pytest.raises(PlanError, match="`device` is cpu or cuda, not 'tpu'"):
        calibrate(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="no CUDA device here"):
            calibrate(device="cuda")


def test_the_command_line(tmp_path, monkeypatch) -> None:
    from typer.testing import CliRunner

    import functionalize.planner.cli.calibrate as command
    from functionalize.cost.machines.presets import MACHINES

    def measure(file, **options):
        write_machine(file, MACHINES["a100"])
        return MACHINES["a100"]

    monkeypatch.setattr(command, "measure", measure)
    path = str(tmp_path / "here.json")
    found = CliRunner().invoke(app, ["calibrate", path])
    assert found.exit_code == 0 and "published for A100" in found.output
    assert "attention backward" in found.output and "wrote " in found.output.replace("\n", " ")
    content = json.loads(CliRunner().invoke(app, ["calibrate", path, "--json"]).stdout)
    assert content["file"] == path and content["flops"] == MACHINES["a100"].flops
    for wrong in (["here.txt"], [path, "--each", "0"]):
        assert CliRunner().invoke(app, ["calibrate", *wrong]).exit_code == 2
