"""The two figures of a page, as plotly's JSON: memory event by event, and the modelled schedule.

    memory_figure([eager, program], reserved, limit)    categories stacked over events, the peak, buttons for timelines
    schedule_figure(spans)                              a row of bars per stream; hatched where compute waits

    events        ▟█▙▟██▙▟█▙   one point per event and category: bytes in the unit of the peak, exact in float64
    phases        ▔▔▔▔▔▁▁▁▁    a strip below
    hover         op, module, line, phase; the allocation or free; the bytes of every category

A browser draws about 10,000 points per category fluently. A longer timeline is divided into `POINTS` columns, each
drawn as its event with the most bytes, and all events near the peak are drawn. In a longer schedule, consecutive spans
within an invisibly short time are one bar. `chrome_trace.py` writes every event and span.
Invariants: categories of one event add up to its bytes; every peak is kept. Linear in events and spans (after sorting).
"""

from __future__ import annotations

import base64
import html
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from functionalize.planning.pictures.pictures import columns, stream_colour
from functionalize.planning.report.display import (
    BYTES,
    COLOURS,
    OTHER_PHASE,
    PHASE_COLOURS,
    SECONDS,
    Peak,
    anchors,
    brief,
    check_reserved,
    first_event,
    groups,
    human_bytes,
    human_seconds,
    placed,
    stretches,
)
from functionalize.planning.report.memory_text import short_line
from functionalize.planning.report.rows import COMPUTE, exposed, rows_of
from functionalize.planning.report.spans import Span
from functionalize.planning.timeline.timeline import BEFORE, Op, Timeline

POINTS = 10_000  # events of a timeline that are drawn, besides those near the peak
NEAR = 500  # events on each side of the peak that are all drawn
BARS = 5_000  # bars per stream, approximately
_LINE_POINTS = 2_000  # points of a timeline that is drawn as a line
_LIVE = 8  # groups of allocations in the hover text of the peak
_INK, _GREY, _RED = "#1c1c1c", "#6a6a6a", "#c00032"
_WAITS = "compute waits for communication"

Figure = dict[str, Any]
Trace = dict[str, Any]


def column(values: Iterable[float], kind: str = "d") -> dict[str, str]:
    """Numbers in plotly's binary encoding: float64 (`d`) or int32 (`i`), little-endian, base64."""
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    dtype = {"d": "f8", "i": "i4"}[kind]
    return {"dtype": dtype, "bdata": base64.b64encode(numbers.tobytes()).decode()}


def _hover_lines(lines: Iterable[str]) -> str:
    """The lines of a hover text. plotly interprets HTML tags in texts, so that names and code are escaped."""
    first, *rest = (html.escape(line, quote=False) for line in lines)
    return "<br>".join([f"<b>{first}</b>", *rest])


# -- memory ----------------------------------------------------------------------------------------


def memory_figure(
    timelines: Sequence[Timeline],
    reserved: Mapping[str, Sequence[int]],
    limit: int | None = None,
) -> Figure:
    """The first timeline stacked, the others as lines; buttons select another one. All must have events."""
    held = {t.name: reserved[t.name] for t in timelines if t.name in reserved}
    top = max([t.peak for t in timelines] + [max(bytes_, default=0) for bytes_ in held.values()])
    if limit is not None and limit > 1.5 * top:
        limit = None  # far above: an axis up to the limit would flatten the rest
    name = human_bytes(max(top, limit or 0)).split()[1]
    unit = 1024 ** BYTES.index(name)
    traces: list[list[Trace]] = []
    for timeline in timelines:
        drawn = _TimelineTraces(timeline, held.get(timeline.name), unit, name)
        others = [drawn.other(each) for each in timelines if each is not timeline]
        traces.append(
            [*drawn.stack(), *others, *drawn.lines(limit), *drawn.peak(), *drawn.phases()]
        )
    for i, some in enumerate(traces):
        for trace in some:
            trace["visible"] = i == 0
    return {
        "data": [t for some in traces for t in some],
        "layout": _layout(timelines, traces, name),
    }


class _TimelineTraces:
    """The traces (plotly's data series) of one timeline. x is 0 at the last event before the step."""

    def __init__(
        self, timeline: Timeline, reserved: Sequence[int] | None, unit: int, unit_name: str
    ) -> None:
        if reserved is not None:
            check_reserved(reserved, timeline)
        self.timeline, self.reserved = timeline, reserved
        self.unit, self.unit_name = unit, unit_name
        self.first, self.end = first_event(timeline), len(timeline.events)
        self.at_peak = Peak.of(timeline)
        self.events = chosen(timeline)
        self.x = column([*(e - self.first for e in self.events), self.end - self.first], "i")

    def _line(self, values: Sequence[int], **more: Any) -> Trace:
        """A step line of bytes at the drawn events."""
        y = [values[e] / self.unit for e in self.events]
        return {"type": "scatter", "mode": "lines", "x": self.x, "y": column([*y, y[-1]]), **more}

    def _hover_template(self, name: str) -> str:
        return f"{name} %{{y:,.3~f}} {self.unit_name}<extra></extra>"

    def stack(self) -> Iterable[Trace]:
        """A stacked area per category; the legend shows its bytes at the peak."""
        for category, values in self.timeline.stacked().items():
            at_peak = human_bytes(self.at_peak.categories.get(category, 0))
            yield self._line(
                values,
                name=f"{category.value}  {at_peak}",
                stackgroup=self.timeline.name,
                fillcolor=COLOURS[category],
                line={"width": 0, "shape": "hv", "color": COLOURS[category]},
                hovertemplate=self._hover_template(category.value),
            )

    def other(self, other: Timeline) -> Trace:
        """Another timeline as a line, aligned with this one phase by phase, because their events differ."""
        start, end = first_event(other), len(other.events)
        kept = columns(other.bytes, start, end, _LINE_POINTS)
        x = placed(anchors(other, self.timeline), kept)
        return {
            "type": "scatter",
            "mode": "lines",
            "name": html.escape(f"{other.name}: peak {human_bytes(other.peak)}"),
            "x": column(each - self.first for each in x),
            "y": column(other.bytes[e] / self.unit for e in kept),
            "line": {"width": 1.5, "color": _INK, "dash": "dash", "shape": "hv"},
            "hovertemplate": self._hover_template(html.escape(other.name)),
        }

    def lines(self, limit: int | None) -> Iterable[Trace]:
        """Lines of the requested bytes (with the hover text of each event), the reserved bytes, and the limit."""
        words = [self.hover_text(e) for e in self.events]
        yield self._line(
            self.timeline.bytes,
            name="requested",
            text=[*words, words[-1]],
            showlegend=False,
            line={"width": 0, "shape": "hv", "color": _INK},
            hovertemplate="%{text}<extra></extra>",
        )
        if self.reserved is not None:
            yield self._line(
                self.reserved,
                name=f"reserved (simulated): peak {human_bytes(max(self.reserved))}",
                line={"width": 1, "shape": "hv", "color": _GREY},
                hovertemplate=self._hover_template("reserved"),
            )
        if limit is not None:
            yield {
                "type": "scatter",
                "mode": "lines",
                "name": f"limit {human_bytes(limit)}",
                "x": [0, self.end - self.first],
                "y": [limit / self.unit] * 2,
                "line": {"width": 1.5, "color": _RED},
                "hoverinfo": "skip",
            }

    def hover_text(self, event: int) -> str:
        """The hover text of an event: bytes after it, op, what it allocates or frees, what is live at the peak."""
        op, allocation, made = self.timeline.events[event]
        of = self.timeline.ops[op] if op != BEFORE else Op("before the step", "")
        details = (("module", of.module), ("line", short_line(of.line)), ("phase", of.phase))
        nbytes, name = human_bytes(allocation.nbytes), brief(allocation.name)
        return _hover_lines(
            [
                f"{human_bytes(self.timeline.bytes[event])} in all",
                f"op {of.name}",
                *(f"{key} {value}" for key, value in details if value),
                f"{'allocates' if made else 'frees'} {name} {allocation.shape}, {nbytes}",
                *(self.live() if event == self.at_peak.event else ()),
            ]
        )

    def live(self) -> Iterable[str]:
        """The largest groups of what is live at the peak."""
        yield "the peak, of which the largest:"
        for each in groups(self.at_peak.live)[:_LIVE]:
            many = f" ×{each.members:,}" if each.members > 1 else ""
            yield f"{human_bytes(each.nbytes)} {brief(each.name)}{many}"

    def peak(self) -> Iterable[Trace]:
        """The marker of the peak."""
        peak, x = self.at_peak, self.at_peak.event - self.first
        yield {
            "type": "scatter",
            "mode": "markers+text",
            "name": "peak",
            "showlegend": False,
            "x": [x],
            "y": [peak.nbytes / self.unit],
            "text": [f"<b>peak {human_bytes(peak.nbytes)}</b>"],
            "textposition": f"top {'right' if x < 0.8 * (self.end - self.first) else 'left'}",
            "marker": {"size": 10, "color": _INK, "line": {"width": 2, "color": "white"}},
            "hoverinfo": "skip",
        }

    def phases(self) -> Iterable[Trace]:
        """The strip below: the phases in order, as bars."""
        found = stretches(self.timeline)
        for phase in dict.fromkeys(stretch.phase for stretch in found):
            own = [stretch for stretch in found if stretch.phase == phase]
            yield {
                "type": "bar",
                "orientation": "h",
                "name": html.escape(phase),
                "base": column(s.start - self.first for s in own),
                "x": column(s.end - s.start for s in own),
                "y": [0] * len(own),
                "yaxis": "y2",
                "marker": {"color": PHASE_COLOURS.get(phase, OTHER_PHASE), "line": {"width": 0}},
                "legend": "legend2",
                "hoverinfo": "skip",
            }


def chosen(timeline: Timeline) -> list[int]:
    """The events of a step to draw: all; or, of a long step, the largest per column and all near the peak."""
    start, end = first_event(timeline), len(timeline.events)
    if end - start <= POINTS:
        return list(range(start, end))
    near = range(max(timeline.peak_at - NEAR, start), min(timeline.peak_at + NEAR, end))
    return sorted({*columns(timeline.bytes, start, end, POINTS), *near})


def _layout(
    timelines: Sequence[Timeline], traces: Sequence[Sequence[Trace]], unit: str
) -> dict[str, Any]:
    """Axes, legends, and two buttons per timeline: the whole step, and the events around the peak."""
    buttons: list[dict[str, Any]] = []
    for i, timeline in enumerate(timelines):
        visible = [i == j for j, some in enumerate(traces) for _ in some]
        peak, name = timeline.peak_at - first_event(timeline), html.escape(timeline.name)
        whole = [0, len(timeline.events) - first_event(timeline)]
        for label, x in ((name, whole), (f"{name}: the peak", [peak - 60, peak + 60])):
            args = [{"visible": visible}, {"xaxis.range": x}]
            buttons.append({"label": label, "method": "update", "args": args})
    few = len(timelines) <= 2
    menu = {"type": "buttons", "direction": "right"} if few else {"type": "dropdown"}
    return {
        **_LAYOUT,
        "height": 640,
        "barmode": "overlay",
        "hovermode": "x unified",
        "xaxis": {
            "anchor": "y2",
            "range": buttons[0]["args"][1]["xaxis.range"],
            "tickformat": ",d",
            "title": {"text": "events, in order"},
            "unifiedhovertitle": {"text": "event %{x:,d}"},
        },
        "yaxis": {
            "title": {"text": unit},
            "domain": [0.06, 1],
            "rangemode": "tozero",
            "fixedrange": True,
        },
        "yaxis2": {"domain": [0, 0.035], "visible": False, "fixedrange": True},
        "legend": {"traceorder": "reversed", "title": {"text": "bytes at the peak"}},
        "legend2": {"orientation": "h", "y": -0.14, "yanchor": "top"},
        "updatemenus": [
            {
                **menu,
                "buttons": buttons,
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
                "showactive": True,
            }
        ],
    }


# -- schedule --------------------------------------------------------------------------------------


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
        hatch = {"shape": "/", "fgcolor": _RED, "bgcolor": "#f8d3db", "size": 6}
        marker = {"color": "#f8d3db", "pattern": hatch, "line": {"width": 0}}
        traces.append({**_bars(waits, 0, end, unit), "name": _WAITS, "marker": marker})
    ticks = {"tickvals": [*range(len(rows))], "ticktext": [html.escape(row) for row in rows]}
    layout = {
        **_LAYOUT,
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
    return _hover_lines(
        [
            *names,
            *(f"{key} {value}" for key, value in details if value),
            f"from {human_seconds(span.start)}, for {used}",
            *([f"sends {human_bytes(nbytes)} per rank"] if nbytes else []),
        ]
    )


_LAYOUT: Mapping[str, Any] = {
    "template": "none",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
    "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
    "dragmode": "zoom",
    "hoverlabel": {"align": "left", "namelength": -1},
}
