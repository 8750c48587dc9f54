"""Traces of plans, against the rules of the Trace Event Format and of Perfetto; their numbers are the report's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from functionalize.cost.categories import Category
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PictureError
from functionalize.planner.pictures.chrome_trace import ALL, WAITS, TraceRun, write_trace
from functionalize.planner.report.rows import (
    COMPUTE,
    Span,
    first_event,
    merged,
    reached,
    rows_of,
    stretches,
)
from functionalize.planner.time.step_time import step_time
from functionalize.planner.timeline.timeline import Timeline
from tests.planner.timelines import Maker, captured, large, real, schedule_of, step_of
from tests.planner.trace_format import Json, check_nesting, checked, counters, threads


def written(path: Path, *runs: TraceRun) -> list[Json]:
    write_trace(path / "trace.json", runs)
    return checked(json.loads((path / "trace.json").read_text()))


def real_run() -> TraceRun:
    eager, program, time = real()
    return TraceRun("", [eager, program], time.spans, reached(captured().step.graph, time.spans))


def check_memory(found: dict[tuple[str, str], list[tuple[float, int]]], name: str, of: Timeline):
    """The counters of a process have the bytes of a timeline, event by event."""
    start = first_event(of)
    assert [nbytes for _, nbytes in found[name, ALL]] == of.bytes[start:]
    assert max(nbytes for _, nbytes in found[name, ALL]) == of.peak
    stacked = of.stacked()
    assert {key for process, key in found if process == name} == {ALL, *map(str, stacked)}
    for category, values in stacked.items():
        told = [nbytes for _, nbytes in found[name, category.value]]
        assert max(told) == max(values[start:])
        assert told[-1] == values[-1]


def test_the_schedule_has_the_seconds_of_the_report(tmp_path: Path) -> None:
    run, (_, _, time) = real_run(), real()
    found = threads(written(tmp_path, run))
    rows = rows_of(time.spans)
    assert {thread for process, thread in found if process == "modelled schedule"} == {
        *rows,
        WAITS,
    }
    for stream, row in rows.items():
        events = found["modelled schedule", stream]
        assert [event["name"] for event in events] == [span.name for span in row]
        busy = sum(b - a for a, b in merged((span.start, span.end) for span in row))
        assert sum(event["dur"] for event in events) == pytest.approx(
            busy * 1e6, abs=1e-3 * len(row)
        )
    compute = found["modelled schedule", COMPUTE]
    assert sum(e["dur"] for e in compute) == pytest.approx(
        time.compute * 1e6, abs=1e-3 * len(compute)
    )
    waits = found["modelled schedule", WAITS]
    assert sum(e["dur"] for e in waits) == pytest.approx(time.exposed * 1e6, abs=1e-3 * len(waits))
    sent = sum(e["args"].get("bytes sent", 0) for events in found.values() for e in events)
    assert sent == sum(span.nbytes for span in time.spans) > 0
    last = max(e["ts"] + e["dur"] for events in found.values() for e in events)
    assert last == pytest.approx(time.seconds * 1e6, abs=2e-3)
    assert {e["cat"] for e in compute} == {span.phase or "other" for span in rows[COMPUTE]}


def test_the_counters_have_the_bytes_of_both_lifetimes(tmp_path: Path) -> None:
    eager, program, time = real()
    found = counters(written(tmp_path, real_run()))
    for timeline in (eager, program):
        check_memory(found, f"memory of {timeline.name}", timeline)
        times = [at for at, _ in found[f"memory of {timeline.name}", ALL]]
        assert times[0] == 0 and times[-1] <= time.seconds * 1e6 + 1e-3
        assert len({*times}) > len(times) / 3  # spread over the step, not in one heap


def test_memory_lies_under_the_op_that_makes_it(tmp_path: Path) -> None:
    _, program, _ = real()
    run = real_run()
    assert len(run.reached) == len(program.ops)
    events = written(tmp_path, run)
    spans = {e["name"]: e for e in threads(events)["modelled schedule", COMPUTE]}
    nodes = [node.name for node in captured().step.graph.nodes]
    times = [at for at, _ in counters(events)["memory of program", ALL]]
    start, seen = first_event(program), 0
    for event, at in zip(program.events[start:], times, strict=True):
        span = spans.get(nodes[event.op]) if 0 <= event.op < len(nodes) else None
        if span is not None:
            assert span["ts"] - 2e-3 <= at <= span["ts"] + span["dur"] + 2e-3
            seen += 1
    assert seen > 50


def test_the_phases_of_eager_lie_under_those_of_the_program(tmp_path: Path) -> None:
    eager, program, _ = real()
    found = counters(written(tmp_path, real_run()))
    begins = []
    for timeline in (eager, program):
        first = first_event(timeline)
        times = [at for at, _ in found[f"memory of {timeline.name}", ALL]]
        backward = next(s for s in stretches(timeline) if s.phase == "backward")
        begins.append(times[backward.start - first])
    assert begins[0] == pytest.approx(begins[1], abs=1e-2) and begins[0] > 0


@pytest.mark.parametrize("streams", ["fsdp2", "replay", "serial"])
def test_every_set_of_rules_gives_a_trace(tmp_path: Path, streams: str) -> None:
    program = captured().program
    machine = MACHINES["cpu" if streams == "serial" else "h100"]
    time = step_time(captured().step, machine, streams=streams, groups=captured().groups)
    run = TraceRun("", [program], time.spans, reached(captured().step.graph, time.spans))
    found = threads(written(tmp_path, run))
    assert {thread for _, thread in found} - {WAITS} == {span.stream for span in time.spans}


def test_without_a_schedule_ops_are_counted(tmp_path: Path) -> None:
    eager, program = step_of(3)
    events = written(tmp_path, TraceRun("", [eager, program]))
    for timeline in (eager, program):
        name = f"memory of {timeline.name} (1 µs is 1 op)"
        check_memory(counters(events), name, timeline)
        ops = threads(events)[name, "ops"]
        assert [(e["ts"], e["dur"], e["name"]) for e in ops] == [
            (i, 1, op.name) for i, op in enumerate(timeline.ops)
        ]
        at = dict(map(reversed, counters(events)[name, ALL]))[timeline.peak]
        peak = timeline.events[timeline.peak_at].op
        assert peak <= at < peak + 1


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    runs = [TraceRun(f"batch {i}", step_of(i), schedule_of(i)) for i in (1, 2)]
    events = written(tmp_path, *runs)
    assert {process for process, _ in threads(events)} >= {
        "modelled schedule batch 1",
        "modelled schedule batch 2",
    }
    assert len({e["pid"] for e in events}) == 6


@pytest.mark.long
def test_100_000_events(tmp_path: Path) -> None:
    eager, program = large()
    events = written(tmp_path, TraceRun("", [eager, program], schedule_of(126, small=100)))
    check_memory(counters(events), "memory of eager (1 µs is 1 op)", eager)


def test_a_step_that_does_nothing_but_be_there(tmp_path: Path) -> None:
    maker = Maker()
    maker.make(1 << 20, Category.INPUTS, "x")
    timeline = maker.timeline("program")
    events = written(
        tmp_path, TraceRun("", [timeline], [Span(COMPUTE, "view", 0.0, 0.0)], [(0.0, 0.0)])
    )
    assert counters(events)["memory of program", "inputs"] == [(0, 1 << 20)]


def test_times_that_are_no_whole_nanoseconds_do_not_overlap(tmp_path: Path) -> None:
    ends = [i * 1.23456789e-9 / 3 for i in range(2000)]
    spans = [Span(COMPUTE, f"op_{i}", ends[i], ends[i + 1]) for i in range(1999)]
    (events,) = threads(written(tmp_path, TraceRun("", [], spans))).values()
    assert sum(event["dur"] for event in events) == pytest.approx(ends[-1] * 1e6, abs=1e-3)


def test_the_check_of_nesting_can_fail() -> None:
    def of(start: float, duration: float) -> Json:
        return {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": start, "dur": duration}

    check_nesting([of(0, 4), of(1, 3), of(1, 1), of(4, 1)])
    with pytest.raises(AssertionError, match=r"1000\.\.5000 is partly in one to 4000"):
        check_nesting([of(0, 4), of(1, 4)])


def test_nothing_to_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for runs in ([], [TraceRun("", [Timeline("eager", [], [], [])])]):
        with pytest.raises(
            PictureError, match=r"trace\.json would be empty: .*Capture the step with memory=True"
        ):
            write_trace(path, runs)
    assert not path.exists()
