"""The figure of a modelled schedule on a page: a row of bars per stream; hatched where compute waits.

In a long schedule, consecutive spans within an invisibly short time are one bar; `chrome_trace.py` writes every span.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from functionalize.planning.pictures.canvas import PALE, RED
from functionalize.planning.pictures.page_parts import LAYOUT, Figure, Trace, column, hover_lines
from functionalize.planning.pictures.schedule_picture import stream_colour
from functionalize.planning.report.display import SECONDS, human_bytes, human_seconds
from functionalize.planning.report.rows import COMPUTE, exposed, rows_of
from functionalize.planning.report.spans import Span

BARS = 5_000  # bars per stream, approximately
_WAITS = "compute waits for communication"


def schedule_figure(spans: Sequence[Span]) -> Figure:
    """The modelled schedule: a row of bars per stream."""
    rows = rows_of(spans)
    end = max(span.end for span in spans)
    name, unit = next((u for u in SECONDS if end >= u[1]), SECONDS[-1])
    traces: list[Trace] = []
    for y, (stream, row) in enumerate(rows.items()):
        for phase in dict.fromkeys(span.phase for span in row):
            own = [span for span in row if span.phase == phase]
            trace = _bars(own, y, end, unit)
            trace["marker"] = {"color": stream_colour(stream, phase), "line": {"width": 0}}
            traces.append(
                {**trace, "name": html.escape(phase) or "other", "showlegend": stream == COMPUTE}
            )
    waits = [Span(COMPUTE, _WAITS, start, stop) for start, stop in exposed(spans)]
    if waits and COMPUTE in rows:
        hatch = {"shape": "/", "fgcolor": RED, "bgcolor": PALE, "size": 6}
        marker = {"color": PALE, "pattern": hatch, "line": {"width": 0}}
        traces.append({**_bars(waits, 0, end, unit), "name": _WAITS, "marker": marker})
    ticks = {"tickvals": [*range(len(rows))], "ticktext": [html.escape(row) for row in rows]}
    layout = {
        **LAYOUT,
        "height": 170 + 34 * len(rows),
        "barmode": "overlay",
        "bargap": 0.25,
        "hovermode": "closest",
        "xaxis": {"title": {"text": name}, "side": "bottom", "range": [0, end / unit or 1]},
        "yaxis": {**ticks, "autorange": "reversed", "fixedrange": True, "automargin": True},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": traces, "layout": layout}


def _bars(row: Sequence[Span], y: int, end: float, unit: float) -> Trace:
    found = together(row, 2 * end / BARS if len(row) > BARS else 0.0)
    return {
        "type": "bar",
        "orientation": "h",
        "base": column(some[0].start / unit for some in found),
        "x": column((some[-1].end - some[0].start) / unit for some in found),
        "y": [y] * len(found),
        "hovertext": [_span_words(some) for some in found],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def together(row: Sequence[Span], width: float) -> list[list[Span]]:
    """The spans of each bar: consecutive ones that lie within `width` seconds."""
    found: list[list[Span]] = []
    for span in row:
        if found and span.end - found[-1][0].start < width:
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _span_words(some: Sequence[Span]) -> str:
    span, nbytes = some[0], sum(each.nbytes for each in some)
    names = [span.name] if len(some) == 1 else [f"{len(some)} from {span.name} to {some[-1].name}"]
    details = (("module", span.module), ("phase", span.phase))
    used = human_seconds(sum(each.end - each.start for each in some))
    return hover_lines(
        [
            *names,
            *(f"{key} {value}" for key, value in details if value),
            f"from {human_seconds(span.start)}, for {used}",
            *([f"sends {human_bytes(nbytes)} per rank"] if nbytes else []),
        ]
    )
