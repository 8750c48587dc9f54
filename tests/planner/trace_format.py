"""The rules of the Trace Event Format and of Perfetto, as checks of a trace; and its counters and threads by name."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

_REQUIRED = {"X": {"name", "ts", "dur", "pid", "tid"}, "C": {"name", "ts", "pid", "args"}}
_NAMES = {"process_name", "thread_name"}
Json = dict[str, Any]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def nanoseconds(microseconds: float) -> int:
    """As Perfetto reads a time: rounded to whole nanoseconds."""
    return math.floor(microseconds * 1000.0 + 0.5)


def checked(trace: Json) -> list[Json]:
    """The events of a trace; asserts every rule of the format that concerns them."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "C", "M"), event
        assert isinstance(event["name"], str) and event["name"], event
        assert isinstance(event["pid"], int), event
        assert isinstance(event.get("tid", 0), int), event
        assert isinstance(event.get("args", {}), dict), event
        if event["ph"] == "M":
            assert event["name"] in _NAMES and isinstance(event["args"]["name"], str), event
            continue
        assert _REQUIRED[event["ph"]] <= set(event), event
        assert is_number(event["ts"]) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert is_number(event["dur"]) and event["dur"] >= 0, event
            assert isinstance(event["cat"], str) and event["cat"], event
        else:
            assert event["args"] and all(map(is_number, event["args"].values())), event
    check_names(events)
    check_nesting(events)
    for counter in counters(events).values():
        times = [at for at, _ in counter]
        assert times == sorted(times)
    return events


def check_names(events: list[Json]) -> None:
    """Every process and every thread has one name, told before its events."""
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    assert len(named) == sum(e["ph"] == "M" for e in events)
    seen: set[tuple[str, int, int]] = set()
    for event in events:
        if event["ph"] == "M":
            seen.add((event["name"], event["pid"], event["tid"]))
            continue
        assert ("process_name", event["pid"], 0) in seen, event
        assert event["ph"] == "C" or ("thread_name", event["pid"], event["tid"]) in seen, event


def check_nesting(events: list[Json]) -> None:
    """Complete events of a thread lie in one another or apart, in whole nanoseconds as well."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
            assert abs(event["ts"] * 1000 - start) <= 1e-3
            threads[event["pid"], event["tid"]].append((start, start + duration))
    for spans in threads.values():
        open_: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= start:
                open_.pop()
            assert not open_ or end <= open_[-1], f"{start}..{end} is partly in one to {open_[-1]}"
            open_.append(end)


def counters(events: list[Json]) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """(process, name) of each counter -> (microseconds, bytes)."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            found[processes[event["pid"]], event["name"]].append(
                (event["ts"], event["args"]["bytes"])
            )
    return found


def threads(events: list[Json]) -> dict[tuple[str, str], list[Json]]:
    """(process, thread) by their names -> complete events."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            key = event["pid"], event["tid"]
            found[processes[event["pid"]], names[key]].append(event)
    return found
