"""All that a plan knows, as plain values, for tests that compare a plan with the long way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from functionalize.ir.ops import geometry_of
from functionalize.planner.sweep.figures import Figures
from functionalize.program.metadata import tensors_of


def everything(figures: Figures) -> Any:
    """All that a plan knows, as plain values; first the costs, of which some values in equal layers are not made."""
    costs = {
        "row": figures.row,
        "times": figures.times,
        "spans": figures.time.to_json(spans=True),
        "work": figures.work,
        "traffic": figures.traffic,
    }
    memory = figures.memory
    events = [list(events_of(timeline)) for timeline in memory.timelines.values()]
    texts = [
        [str(each).replace(" at 0x", "") for each in timeline.allocations]
        for timeline in memory.timelines.values()
    ]
    graph = figures.program.graph_module.graph  # described
    nodes = [(n.name, {k: str(v) for k, v in n.meta.items()}) for n in graph.nodes]
    storages: dict[Any, int] = {}
    tensors = [t for n in graph.nodes for t in tensors_of(n.meta.get("val"))]
    values = [
        (geometry_of(t), t.device, (whole := t.untyped_storage()).nbytes(), whole._cdata)
        for t in tensors
    ]
    shared = [storages.setdefault(at, len(storages)) for *_, at in values]
    return {
        "values": [each[:-1] for each in values],
        "shared": shared,
        **costs,
        "memory": memory.to_json(timelines=True),
        "events": events,
        "allocations": texts,
        "nodes": nodes,
        "tape": str(figures.program.tape()),
    }


def events_of(timeline: Any) -> Iterator[Any]:
    number = {id(each): i for i, each in enumerate(timeline.allocations)}
    for event in timeline.events:
        yield event.op, event.made, number[id(event.allocation)]


def assert_equal(at_once: dict[str, Any], alone: dict[str, Any]) -> None:
    for key, value in at_once.items():
        assert value == alone[key], key
