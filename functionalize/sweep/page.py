"""The page of a sweep: which point is best, the frontier and the table, two points side by side, the best one's memory.

    write_sweep_page("plan.html", sweep.within(80e9), "Plan of train.py")

The best point is the fastest that fits; the fastest, if none does, or without a limit. The frontier is of the points
that fit: none is faster on a device of as many bytes. Of many points the table has the frontier, and all points below
it at a click; the memory of others on the frontier is a line at a click. Needs plotly, see `pictures/page.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from functionalize.planning.pictures.cards import Card, memory_cards, speed_card
from functionalize.planning.pictures.page import Exact, Table, write_page
from functionalize.planning.pictures.page_script import ComparedPlan
from functionalize.planning.pictures.page_sweep import frontier_figure
from functionalize.planning.pictures.tradeoffs import Point, frontier
from functionalize.planning.report.display import human_bytes
from functionalize.planning.report.event_times import event_times, reached
from functionalize.planning.report.memory_figures import EAGER
from functionalize.planning.timeline.timeline import Timeline
from functionalize.sweep.columns import figures_of
from functionalize.sweep.summary import Plan, Sweep, short

_FEW = 16  # points, at most, of a table that has all of them
_ASKED = 8  # lines, at most, of other points on the frontier
_MARKS = {(True, True): "fits, frontier", (True, False): "frontier", (False, True): "fits"}


class _Planned(NamedTuple):
    """A point with its row. point: where it is drawn; None for one without a modelled time."""

    plan: Plan
    row: Mapping[str, Any]
    name: str
    point: Point | None


def varying(sweep: Sweep) -> list[str]:
    """The keys that have several values."""
    return [a for a in sweep.axes if len({str(p.point[a]) for p in sweep.plans}) > 1]


def label(point: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The values of some keys as text: `batch 4, world 64`."""
    return ", ".join(f"{key} {short(point[key])}" for key in keys)


def write_sweep_page(path: str | Path, sweep: Sweep, title: str) -> None:
    """Write the page. Raises `PictureError` without plotly."""
    across, found = _planned(sweep)
    drawn = [each.point for each in found if each.point is not None]
    fitting = [point for point in drawn if point.feasible]
    best = frontier(fitting or drawn, more="/s" in across)
    ahead = [each for each in found if each.point is not None and each.point in best]
    chosen = _best(found)
    memory = _memory_of(chosen, [e for e in ahead if e is not chosen], sweep) if chosen else {}
    few = len(found) <= _FEW or not ahead
    tables = [_table("Points" if few else "Frontier", found if few else ahead, ahead, sweep)]
    tables += [] if few else [_table(f"All {len(found):,} points", found, ahead, sweep, True)]
    same = [axis for axis in sweep.axes if axis not in varying(sweep)]
    plots = {}
    if len(drawn) > 1:
        plots["Frontier" if few else "Speed and memory"] = frontier_figure(
            drawn, best, across, sweep.limit
        )
    write_page(
        path,
        title=title,
        cards=_cards(sweep, chosen, len(found)),
        plots=plots,
        first=tables,
        choices=_choices(found, ahead, chosen, sweep),
        facts={
            "points": len(found),
            "the same at all": label(sweep.plans[0].point, same),
            **{f"note {i}": note for i, note in enumerate(sweep.notes(), 1)},
        },
        limit=int(sweep.limit) if sweep.limit is not None else None,
        **memory,
    )


def _planned(sweep: Sweep) -> tuple[str, list[_Planned]]:
    """What is drawn across, and every point with its row."""
    rows, keys = sweep.rows(program=False), varying(sweep)
    has_rate = all(row.get("throughput") is not None for row in rows if "step" in row)
    name, across = ("throughput", f"{sweep.items}/s/rank") if has_rate else ("step", "step seconds")
    found = []
    for plan, row in zip(sweep.plans, rows, strict=True):
        text, x = label(plan.point, keys), row.get(name)
        point = None if x is None else Point(x, row["device"], text, row.get("fits", True))
        found.append(_Planned(plan, row, text, point))
    return across, found


def _best(found: Sequence[_Planned]) -> _Planned | None:
    """The fastest point that fits; the fastest, if none does; None if no point could be planned."""

    def speed(each: _Planned) -> tuple[bool, float]:
        seconds = each.row.get("step")
        rate = each.row.get("throughput") or (1 / seconds if seconds else 0.0)
        return each.row.get("fits", True), rate

    return max((each for each in found if each.plan.memory), key=speed, default=None)


def _cards(sweep: Sweep, chosen: _Planned | None, count: int) -> list[Card]:
    """Cards of the best point, with the point first where there are several."""
    if chosen is None or chosen.plan.memory is None:
        return []
    figures = chosen.plan.figures
    machine = figures.time.machine_name if figures is not None else "the device"
    machine = short(chosen.plan.point.get("machine") or machine)
    limit = int(sweep.limit) if sweep.limit is not None else None
    cards = memory_cards(chosen.plan.memory, EAGER, machine, limit)
    if figures is not None:
        cards.insert(1, speed_card(figures.time, figures.throughput, sweep.items))
    if count > 1 and chosen.name:
        fits = sweep.limit is not None and chosen.row.get("fits")
        which = "the fastest that fits" if fits else "the fastest"
        cards.insert(0, Card("Which point?", chosen.name, f"{which} of {count}, as modelled"))
    return cards


def _table(
    title: str,
    found: Sequence[_Planned],
    ahead: Sequence[_Planned],
    sweep: Sweep,
    is_folded: bool = False,
) -> Table:
    """A row per point: its keys, whether it fits and is on the frontier, its figures or its error."""
    keys = varying(sweep) or list(sweep.axes)
    cells = [figures_of(each.row, sweep.items) for each in found]
    heads = list(dict.fromkeys(head for row in cells for head in row))
    rows: list[list[Any]] = []
    for each, figures in zip(found, cells, strict=True):
        mark = _MARKS.get((each in ahead, bool(each.row.get("fits"))), "")
        mark = mark or ("does not fit" if "fits" in each.row else each.plan.error or "")
        values = [figures.get(head) for head in heads]
        exact = [Exact(*each) if each is not None else None for each in values]
        rows.append([*(short(each.plan.point[key]) for key in keys), mark, *exact])
    note = "Frontier: no other point that fits is faster on a device of as many bytes."
    return Table(
        title, [*keys, "", *heads], rows, note if ahead and not is_folded else "", is_folded
    )


def _choices(
    found: Sequence[_Planned], ahead: Sequence[_Planned], chosen: _Planned | None, sweep: Sweep
) -> list[ComparedPlan]:
    """The points for the comparison, the best one first, then the others of the frontier."""
    first = [each for each in (chosen, *ahead) if each is not None]
    order = dict.fromkeys(map(id, [*first, *found]))
    by_id = {id(each): each for each in found}
    choices = []
    for each in (by_id[key] for key in order):
        if each.plan.memory is not None:
            held = each.plan.memory.by_category(EAGER).items()
            more = {f"at the peak: {c.value}": (n, human_bytes(n)) for c, n in held}
            choices.append(ComparedPlan(each.name, {**figures_of(each.row, sweep.items), **more}))
    return choices


def _memory_of(chosen: _Planned, others: Sequence[_Planned], sweep: Sweep) -> dict[str, Any]:
    """The arguments of `write_page` on the memory of the best point, and on that of others."""
    memory, figures = chosen.plan.memory, chosen.plan.figures
    assert memory is not None
    spans = figures.time.spans if figures is not None else ()
    steps = reached(figures.program.graph, spans) if figures is not None else ()
    times = event_times([*memory.timelines.values()], steps)
    asked: list[Timeline] = []
    for each in others[:_ASKED]:
        if each.plan.memory is not None:
            asked.append(replace(each.plan.memory.timeline(EAGER), name=each.name))
    return {
        "timelines": [*memory.timelines.values()],
        "drawn_of": chosen.name or "a step",
        "asked": asked,
        "spans": spans,
        "held": {EAGER: memory.held(EAGER, sweep.limit)},
        "times": times,
    }
