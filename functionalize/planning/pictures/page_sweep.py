"""The figures of a page on several plans: the frontier of a sweep, and what holds the memory of each.

frontier_figure(points, best, "tokens/s/rank", limit)    bytes of the device against the rate or the seconds
holding_figure([("batch 1", categories), ...])           a bar per plan, stacked by category
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from functionalize.planning.pictures.canvas import GREY, INK, RED
from functionalize.planning.pictures.page_parts import LAYOUT, Figure, Trace, hover_lines
from functionalize.planning.pictures.tradeoffs import Point, kind_of, shown
from functionalize.planning.report.display import BYTES, COLOURS, human_bytes
from functionalize.planning.timeline.timeline import Category

_BELOW = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}


def frontier_figure(
    found: Sequence[Point], best: Sequence[Point], across: str, limit: float | None
) -> Figure:
    """The points of a sweep, those of the frontier joined. across: the name of x."""
    top = max(point.y for point in found)
    drawn = limit if limit is not None and limit < 1.6 * top else None
    name = human_bytes(max(top, drawn or 0)).split()[1]
    unit = 1024 ** BYTES.index(name)
    kinds = (
        ("fits" if limit is not None else "points", True, {"color": "#5f9fd8", "size": 10}),
        ("does not fit", False, {"color": GREY, "size": 10, "symbol": "circle-open"}),
    )
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "frontier",
            "x": [point.x for point in best],
            "y": [point.y / unit for point in best],
            "line": {"color": INK, "width": 1.2, "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]
    for label, fits, marker in kinds:
        some = [point for point in found if point.feasible is fits]
        if not some:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "x": [point.x for point in some],
                "y": [point.y / unit for point in some],
                "text": [
                    hover_lines(
                        [
                            point.name or "the point",
                            f"{shown(point.x, kind_of(across))} {across}",
                            f"{human_bytes(point.y)} on the device",
                        ]
                    )
                    for point in some
                ],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {**marker, "line": {"width": 1, "color": "#1b4f8a"}},
            }
        )
    if drawn is not None:
        xs = [min(p.x for p in found), max(p.x for p in found)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"limit {human_bytes(drawn)}",
                "x": xs,
                "y": [drawn / unit] * 2,
                "line": {"width": 1.5, "color": RED},
                "hoverinfo": "skip",
            }
        )
    layout = {
        **LAYOUT,
        "height": 380,
        "hovermode": "closest",
        "xaxis": {"title": {"text": html.escape(across)}, "tickformat": ",.4~g"},
        "yaxis": {"title": {"text": f"{name} on the device"}, "rangemode": "tozero"},
        "legend": _BELOW,
    }
    return {"data": traces, "layout": layout}


def holding_figure(bars: Sequence[tuple[str, Mapping[Category, int]]]) -> Figure:
    """What holds the memory at each peak: a horizontal bar per plan, stacked by category."""
    top = max((sum(parts.values()) for _, parts in bars), default=0)
    name = human_bytes(top).split()[1]
    unit = 1024 ** BYTES.index(name)
    there = [c for c in Category if any(c in parts for _, parts in bars)]
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": category.value,
            "y": [html.escape(bar) for bar, _ in bars],
            "x": [parts.get(category, 0) / unit for _, parts in bars],
            "text": [human_bytes(parts.get(category, 0)) for _, parts in bars],
            "textposition": "none",
            "hovertemplate": "%{y}: " + category.value + " %{text}<extra></extra>",
            "marker": {"color": COLOURS[category], "line": {"width": 0}},
        }
        for category in there
    ]
    layout = {
        **LAYOUT,
        "height": 190 + 46 * len(bars),
        "barmode": "stack",
        "bargap": 0.3,
        "hovermode": "closest",
        "xaxis": {"title": {"text": f"{name} at the peak, requested"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {**_BELOW, "traceorder": "normal"},
    }
    return {"data": traces, "layout": layout}
