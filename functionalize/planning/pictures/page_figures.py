"""The figure of a step's memory on a page, as plotly's JSON: event by event, or over modelled time.

    memory_figure([eager, program], held, limit)    categories stacked over events, the peak, buttons for timelines
    memory_figure(..., times=times)                 `page_script.py` can place the events at their modelled time, too

    events        ▟█▙▟██▙▟█▙   one point per event and category: bytes in the unit of the peak, exact in float64
    phases        ▔▔▔▔▔▁▁▁▁    a strip below
    hover         op, module, line, phase; the allocation or free; the bytes of every category

A browser draws about 10,000 points per category fluently. A longer timeline is divided into `POINTS` columns, each
drawn as its event with the most bytes, and all events near the peak are drawn. `chrome_trace.py` writes every event.
Invariants: categories of one event add up to its bytes; every peak is kept. Linear in events.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from functionalize.planning.pictures.canvas import GREY, INK, RED, upper_end
from functionalize.planning.pictures.page_parts import LAYOUT, Figure, Trace, column, hover_lines
from functionalize.planning.pictures.pictures import columns
from functionalize.planning.report.display import (
    BYTES,
    COLOURS,
    OTHER_PHASE,
    PHASE_COLOURS,
    SECONDS,
    Peak,
    anchors,
    brief,
    check_held,
    first_event,
    groups,
    human_bytes,
    placed,
    stretches,
)
from functionalize.planning.report.memory_text import short_line
from functionalize.planning.timeline.timeline import BEFORE, Op, Timeline

POINTS = 10_000  # events of a timeline that are drawn, besides those near the peak
NEAR = 500  # events on each side of the peak that are all drawn
_LINE_POINTS = 2_000  # points of a timeline that is drawn as a line
_LIVE = 8  # groups of allocations in the hover text of the peak
_NO_TIMES: Mapping[str, Sequence[float]] = MappingProxyType({})


def memory_figure(
    timelines: Sequence[Timeline],
    held: Mapping[str, Sequence[int]],
    limit: int | None = None,
    times: Mapping[str, Sequence[float]] = _NO_TIMES,
    asked: Sequence[Timeline] = (),
) -> Figure:
    """The first timeline stacked, the others as lines; buttons select another one. All must have events.

    asked: timelines of other steps, each a line that a click on its name in the legend shows.
    held, times: by name of a timeline, the bytes that the device holds after each event, and the event's seconds.
    """
    held = {t.name: held[t.name] for t in timelines if t.name in held}
    own = [max([t.peak, *held.get(t.name, ())]) for t in timelines]
    tops = [upper_end(each, own) for each in own]
    if limit is not None and limit > 1.5 * tops[0]:
        limit = None  # far above: an axis up to the limit would flatten the rest
    name = human_bytes(max(tops[0], limit or 0)).split()[1]
    unit = 1024 ** BYTES.index(name)
    traces: list[list[Trace]] = []
    for timeline in timelines:
        drawn = _TimelineTraces(timeline, held.get(timeline.name), unit, name)
        others = [drawn.other(each) for each in timelines if each is not timeline]
        others += [{**drawn.other(each), "visible": "legendonly"} for each in asked]
        traces.append(
            [*drawn.stack(), *others, *drawn.lines(limit), *drawn.peak(), *drawn.phases()]
        )
    ends = [1.06 * max(top, limit or 0) / unit for top in tops]
    layout = _layout(timelines, traces, name, ends)
    layout["meta"] = {"legends": _legends(len(traces[0]), len(asked))}
    for i, some in enumerate(traces):
        for trace in some:
            trace["visible"] = i == 0 and trace.get("visible", True)
    if times:
        layout["meta"] |= _clock(timelines, traces, times)
    return {"data": [t for some in traces for t in some], "layout": layout}


class _TimelineTraces:
    """The traces (plotly's data series) of one timeline. x is 0 at the last event before the step."""

    def __init__(
        self, timeline: Timeline, held: Sequence[int] | None, unit: int, unit_name: str
    ) -> None:
        if held is not None:
            check_held(held, timeline)
        self.timeline, self.held = timeline, held
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
            "line": {"width": 1.5, "color": INK, "dash": "dash", "shape": "hv"},
            "hovertemplate": self._hover_template(html.escape(other.name)),
        }

    def lines(self, limit: int | None) -> Iterable[Trace]:
        """Lines of the requested bytes (with the hover text of each event), the device's bytes, and the limit."""
        words = [self.hover_text(e) for e in self.events]
        yield self._line(
            self.timeline.bytes,
            name="requested",
            text=[*words, words[-1]],
            showlegend=False,
            line={"width": 0, "shape": "hv", "color": INK},
            hovertemplate="%{text}<extra></extra>",
        )
        if self.held is not None:
            yield self._line(
                self.held,
                name=f"on the device: peak {human_bytes(max(self.held))}",
                line={"width": 1, "shape": "hv", "color": GREY},
                hovertemplate=self._hover_template("on the device"),
            )
        if limit is not None:
            yield {
                "type": "scatter",
                "mode": "lines",
                "name": f"limit {human_bytes(limit)}",
                "x": [0, self.end - self.first],
                "y": [limit / self.unit] * 2,
                "line": {"width": 1.5, "color": RED},
                "hoverinfo": "skip",
            }

    def hover_text(self, event: int) -> str:
        """The hover text of an event: bytes after it, op, what it allocates or frees, what is live at the peak."""
        op, allocation, made = self.timeline.events[event]
        of = self.timeline.ops[op] if op != BEFORE else Op("before the step", "")
        details = (("module", of.module), ("line", short_line(of.line)), ("phase", of.phase))
        nbytes, name = human_bytes(allocation.nbytes), brief(allocation.name)
        return hover_lines(
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
            "marker": {"size": 10, "color": INK, "line": {"width": 2, "color": "white"}},
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
                "showlegend": False,
                "hoverinfo": "skip",
            }


def chosen(timeline: Timeline) -> list[int]:
    """The events of a step to draw: all; or, of a long step, the largest per column and all near the peak."""
    start, end = first_event(timeline), len(timeline.events)
    if end - start <= POINTS:
        return list(range(start, end))
    near = range(max(timeline.peak_at - NEAR, start), min(timeline.peak_at + NEAR, end))
    return sorted({*columns(timeline.bytes, start, end, POINTS), *near})


def _clock(
    timelines: Sequence[Timeline],
    traces: Sequence[Sequence[Trace]],
    times: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """What the page's script needs to place events at their time: per timeline, events and increasing times."""
    longest = max(times[each.name][-1] for each in timelines)
    name, unit = next((u for u in SECONDS if longest >= u[1]), SECONDS[-1])
    clocks = []
    for timeline in timelines:
        first, end = first_event(timeline), len(timeline.events)
        events, seconds = chosen(timeline), times[timeline.name]
        # Stacked areas need places that differ, and events of an op that takes no time have one: a billionth apart.
        least = (longest or 1) / unit * 1e-9
        at, now = [], -least
        for time in (*(seconds[e] / unit for e in events), longest / unit):
            now = max(time, now + least)
            at.append(now)
        clocks.append(
            [column([*(e - first for e in events), end - first])["bdata"], column(at)["bdata"]]
        )
    of = [i for i, some in enumerate(traces) for _ in some]
    return {"clocks": clocks, "of": of, "unit": name}


def _legends(entries: int, asked: int) -> dict[str, dict[str, Any]]:
    """The place of the categories: right of the figure, below it where the page is narrow. asked: long entries."""
    below = 70 + 20 * (-(-entries // 2) + asked)  # pixels: two short entries share a row
    both = {
        "legend.orientation": ("v", "h"),
        "legend.x": (1.02, 0),
        "legend.yref": ("paper", "container"),
        "legend.title.text": ("bytes at the peak", ""),
        "legend.font.size": (13, 12),
        "legend.y": (1, 0),
        "legend.yanchor": ("top", "bottom"),
        "margin.b": (LAYOUT["margin"]["b"], below),
        "height": (600, 480 + below),
    }
    return {name: {k: v[i] for k, v in both.items()} for i, name in enumerate(("wide", "narrow"))}


def _layout(
    timelines: Sequence[Timeline],
    traces: Sequence[Sequence[Trace]],
    unit: str,
    ends: Sequence[float],
) -> dict[str, Any]:
    """Axes, legends, and two buttons per timeline: the whole step, and the events around the peak.

    ends: how high the axis goes for each timeline.
    """
    buttons: list[dict[str, Any]] = []
    for i, timeline in enumerate(timelines):
        visible = [i == j and t.get("visible", True) for j, some in enumerate(traces) for t in some]
        peak, name = timeline.peak_at - first_event(timeline), html.escape(timeline.name)
        whole = [0, len(timeline.events) - first_event(timeline)]
        for label, x in ((name, whole), (f"{name}: the peak", [peak - 60, peak + 60])):
            args = [{"visible": visible}, {"xaxis.range": x, "yaxis.range": [0, ends[i]]}]
            buttons.append({"label": label, "method": "update", "args": args})
    few = len(timelines) <= 2
    menu = {"type": "buttons", "direction": "right"} if few else {"type": "dropdown"}
    return {
        **LAYOUT,
        "height": 600,
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
            "range": buttons[0]["args"][1]["yaxis.range"],
            "fixedrange": True,
        },
        "yaxis2": {"domain": [0, 0.035], "visible": False, "fixedrange": True},
        "legend": {"traceorder": "reversed", "title": {"text": "bytes at the peak"}},
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
