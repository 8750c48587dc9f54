"""The memory of a step as one offline HTML page: a figure with zoom and hover, the peaks, tables, assumptions.

    write_page("memory.html", title="Llama-3-8B on 64 ranks", timelines=[eager, program],
               tables=[Table("By module", ["module", "bytes"], rows)], facts={"machine": "H100"})

    memory of a step     categories stacked over events, by plotly, whose script is inlined; phases in a strip below
    hover                op, module, line, phase; the allocation or free; the bytes of every category
    below                sentences on the peaks, what is live at each, tables; a cell's tooltip has the exact number

Needs plotly: `pip install "functionalize[page]"`. There is no script of ours, and a content security policy in the page
forbids every request. Names and lines of code are escaped. Colours and units are those of the pictures. The modelled
schedule is in the trace for Perfetto (`chrome_trace.py`).

A browser draws about 10,000 points per category fluently. A longer timeline is divided into `POINTS` columns, each
drawn as its event with the most bytes, and all events near the peak are drawn. `chrome_trace.py` writes every event.
Invariants: categories of one event add up to its bytes; every peak is kept. Linear in events.
Refuses: a page without content; plotly not installed.
"""

from __future__ import annotations

import base64
import html
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from functionalize.cost.categories import Category
from functionalize.errors import PictureError
from functionalize.planner.pictures.canvas import GREY, INK, RED, upper_end
from functionalize.planner.pictures.pictures import columns
from functionalize.planner.report.figures import Peak, brief, check_held, groups, pattern, place
from functionalize.planner.report.rows import (
    COLOURS,
    OTHER_PHASE,
    PHASE_COLOURS,
    anchors,
    first_event,
    placed,
    stretches,
)
from functionalize.planner.report.text import short_line
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Op, Timeline
from functionalize.util.text import BYTES, human_bytes, human_seconds

POINTS = 10_000  # events of a timeline that are drawn, besides those near the peak
NEAR = 500  # events on each side of the peak that are all drawn
_LINE_POINTS = 2_000  # points of a timeline that is drawn as a line
_LIVE_IN_HOVER = 8  # groups of allocations in the hover text of the peak
_NONE: Mapping[str, Any] = MappingProxyType({})
_BESIDE = 4  # columns of a table on a narrow page
_LIVE = 25  # rows, at most, of a table of the storages live at a peak
_CONFIG = {"displaylogo": False, "scrollZoom": True, "responsive": True}
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1c1c; max-width: 1500px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin: 2rem 0 .25rem; }
summary { font-weight: 600; margin: .75rem 0; cursor: pointer; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid #e3e5e8; vertical-align: top; }
td:not(.number) { overflow-wrap: anywhere; min-width: 5rem; } details td:not(.number) { min-width: 10rem; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
@media (max-width: 900px) {
  .stacked tr { display: grid; grid-template-columns: 5rem repeat(3, minmax(0, 1fr)); }
  .stacked tr { border-bottom: 1px solid #e3e5e8; } .stacked th, .stacked td { border: 0; }
  details .stacked td { min-width: 0; } .stacked th:nth-child(n+5) { display: none; }
  .stacked td:nth-child(n+5) { grid-column: 2 / -1; color: #55595f; }
  .stacked [data-head]::before { content: attr(data-head) ": "; }
}
.small { font-size: .87rem; color: #55595f; }
.small i { display: inline-block; width: 1rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem; }
.pick { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: center; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.5rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


_LAYOUT: Mapping[str, Any] = {
    "template": "none",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
    "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
    "dragmode": "zoom",
    "hoverlabel": {"align": "left", "namelength": -1},
}


Figure = dict[str, Any]
Trace = dict[str, Any]


class Table(NamedTuple):
    """A table of the page. Numbers in a column whose name contains `bytes` or `seconds` are shown with a unit.

    is_folded: whether a click on the title shows the rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    is_folded: bool = False


def write_page(
    path: str | Path,
    *,
    title: str = "Memory of a step",
    timelines: Sequence[Timeline] = (),
    tables: Sequence[Table] = (),
    facts: Mapping[str, Any] | None = None,
    held: Mapping[str, Sequence[int]] = _NONE,
    limit: int | None = None,
    figure: Figure | None = None,
) -> None:
    """Write the page: the memory of each timeline, its peak, the tables, the assumptions.

    The first timeline is shown at first; buttons select the others. held: name of a timeline -> bytes of the device
    after each of its events. limit: bytes of the device. facts: assumptions, shown as a list of names and values.
    figure: a figure of plotly in place of the timelines.
    Raises `PictureError` for a page without content, and without plotly.

        >>> step = fz.record_memory(lambda x: (x * 2).sum())
        >>> _ = step(torch.ones(1024))
        >>> fz.planner.write_page("memory.html", timelines=[*step.memory.timelines.values()])
    """
    timelines = [timeline for timeline in timelines if timeline.events]
    if not (timelines or tables or figure):
        raise PictureError(
            f"The page `{title}` would be empty: there is no timeline with events and no table. "
            "Capture the step with memory=True, or pass `tables`."
        )
    parts = [f"<h1>{_text(title)}</h1>"]
    if timelines:
        parts += [_figure_html(path, memory_figure(timelines, held, limit)), _phases(timelines)]
        parts += _peaks(timelines, limit)
        parts += [_folded(_live(timeline), i == 0) for i, timeline in enumerate(timelines)]
    if figure is not None:
        parts.append(_figure_html(path, figure))
    parts += _tables(tables)
    if facts:
        parts += ["<h2>What was assumed</h2>", "<dl>", *_facts(facts), "</dl>"]
    Path(path).write_text(_document(title, parts), encoding="utf-8")


def _document(title: str, parts: Iterable[str]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{chr(10).join(parts)}
</body>
</html>
"""


# -- text and tables -------------------------------------------------------------------------------


def _text(text: object) -> str:
    return html.escape(str(text))


def _peaks(timelines: Sequence[Timeline], limit: int | None) -> Iterator[str]:
    """Paragraphs on the peak of each timeline, and its difference from the first one's."""
    first = timelines[0]
    for timeline in timelines:
        less = first.peak - timeline.peak
        than = f" {human_bytes(abs(less))} {'less' if less > 0 else 'more'} than {first.name}."
        sentence = Peak.of(timeline).words() + (than if less else "")
        yield f"<p><b>Peak of {_text(timeline.name)}:</b> {_text(sentence)}</p>"
    if limit is not None:
        yield f"<p>The device has {human_bytes(limit)}.</p>"


def _phases(timelines: Sequence[Timeline]) -> str:
    """What the colours of the strip below the figure mean, and what a reader can do with the figure."""
    found = dict.fromkeys(each.phase for timeline in timelines for each in stretches(timeline))
    named = (
        f'<span><i style="background: {PHASE_COLOURS.get(phase, OTHER_PHASE)}"></i>{_text(phase)}</span>'
        for phase in found
    )
    use = "Wheel or drag: zoom. Double click: the whole step. A click on a category hides it."
    return f'<p class="pick small">{"".join(named)}<span>{use}</span></p>'


def _live(timeline: Timeline) -> Table:
    """The storages live at a peak; those whose names differ only in numbers, as in layers, share a row."""
    live, rows = Peak.of(timeline).live, []
    firsts: dict[tuple[Category, str], Allocation] = {}
    for each in live:
        firsts.setdefault((each.category, pattern(each.name)), each)
    for group in groups(live)[:_LIVE]:
        first = firsts[group.category, pattern(group.name)]
        ops = (_where(timeline, op) for op in (first.made, first.last_use, first.freed))
        many = f" ×{group.members:,}" if group.members > 1 else ""
        rows.append((group.nbytes, group.name + many, group.category.value, first.shape, *ops))
    heads = ("bytes", "what", "category", "shape", "made by", "last used by", "freed by")
    return Table(f"Live at the peak of {timeline.name}", heads, rows)


def _where(timeline: Timeline, op: int | None) -> str:
    """Index, name, module and line of an op: `12: aten.mm.default · layers.0 · train.py:31`."""
    if op is None or not 0 <= op < len(timeline.ops):
        return place(timeline, op)
    _, _, module, line = timeline.ops[op]
    code = short_line(line).partition(", in ")[0]
    return " · ".join(filter(None, (place(timeline, op), module, code)))


def _tables(tables: Iterable[Table]) -> Iterator[str]:
    for table in tables:
        if table.is_folded:
            yield _folded(table, False)
        else:
            yield f"<h2>{_text(table.title)}</h2>"
            yield from _table(table)


def _folded(table: Table, is_open: bool) -> str:
    summary = f"<summary>{_text(table.title)}</summary>"
    return f"<details{' open' if is_open else ''}>{summary}{''.join(_table(table))}</details>"


def _table(table: Table) -> Iterator[str]:
    if table.note:
        yield f"<p>{_text(table.note)}</p>"
    numbers = [
        bool(table.rows) and all(_is_number(row[i]) or row[i] is None for row in table.rows)
        for i in range(len(table.columns))
    ]
    # On a narrow page, more than four columns of text are stacked below the first four.
    stacked = len(numbers) > _BESIDE and not any(numbers[_BESIDE:])
    yield f'<div class="scroll"><table{" class=stacked" if stacked else ""}><tr>'
    style = [' class="number"' if number else "" for number in numbers]
    for i, name in enumerate(table.columns):
        yield f'<th scope="col"{style[i]}>{_text(name)}</th>'
    yield "</tr>"
    for row in table.rows:
        yield "<tr>"
        for i, value in enumerate(row):
            more = f' title="{value:,}"' if _is_number(value) else ""
            if stacked and i >= _BESIDE:
                more = f' data-head="{_text(table.columns[i])}"'
            yield f"<td{style[i]}{more}>{_text(_cell(value, table.columns[i]))}</td>"
        yield "</tr>"
    yield "</table></div>"


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    for key, value in facts.items():
        yield f"<dt>{_text(key)}</dt><dd>{_text(_cell(value, str(key)))}</dd>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, column: str) -> str:
    """A value as text; a number with the unit that the name of its column contains."""
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    words = column.lower().replace("_", " ").split()
    if not _is_number(value):
        return str(value)
    if "bytes" in words:
        return human_bytes(value)
    if "seconds" in words:
        return human_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


# -- the figure ------------------------------------------------------------------------------------


def _figure_html(path: str | Path, figure: Figure) -> str:
    """The figure as HTML, with plotly's script."""
    try:
        from plotly.io import to_html
    except ImportError as error:
        raise PictureError(
            f"{path} cannot be written: the figure of an HTML page needs plotly, which is not installed. "
            'Run pip install "functionalize[page]", or draw a picture (.png, .svg, .pdf).'
        ) from error
    drawn: str = to_html(figure, _CONFIG, include_plotlyjs=True, full_html=False, div_id="memory")
    return drawn


def memory_figure(
    timelines: Sequence[Timeline], held: Mapping[str, Sequence[int]], limit: int | None = None
) -> Figure:
    """The first timeline stacked, the others as lines; buttons select another one. All must have events.

    held: by name of a timeline, the bytes that the device holds after each event.
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
        traces.append(
            [*drawn.stack(), *others, *drawn.lines(limit), *drawn.peak(), *drawn.phases()]
        )
    for i, some in enumerate(traces):
        for trace in some:
            trace["visible"] = i == 0
    ends = [1.06 * max(top, limit or 0) / unit for top in tops]
    layout = _layout(timelines, [len(some) for some in traces], name, ends)
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
        self.x = _column([*(e - self.first for e in self.events), self.end - self.first], "i")

    def _line(self, values: Sequence[int], **more: Any) -> Trace:
        """A step line of bytes at the drawn events."""
        y = [values[e] / self.unit for e in self.events]
        return {"type": "scatter", "mode": "lines", "x": self.x, "y": _column([*y, y[-1]]), **more}

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
            "x": _column(each - self.first for each in x),
            "y": _column(other.bytes[e] / self.unit for e in kept),
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
        for each in groups(self.at_peak.live)[:_LIVE_IN_HOVER]:
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
                "base": _column(s.start - self.first for s in own),
                "x": _column(s.end - s.start for s in own),
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


def _layout(
    timelines: Sequence[Timeline],
    counts: Sequence[int],
    unit: str,
    ends: Sequence[float],
) -> dict[str, Any]:
    """Axes, legends, and two buttons per timeline: the whole step, and the events around the peak.

    counts: the number of traces of each timeline. ends: how high the axis goes for it.
    """
    buttons: list[dict[str, Any]] = []
    for i, timeline in enumerate(timelines):
        visible = [i == j for j, count in enumerate(counts) for _ in range(count)]
        peak, name = timeline.peak_at - first_event(timeline), html.escape(timeline.name)
        whole = [0, len(timeline.events) - first_event(timeline)]
        for label, x in ((name, whole), (f"{name}: the peak", [peak - 60, peak + 60])):
            args = [{"visible": visible}, {"xaxis.range": x, "yaxis.range": [0, ends[i]]}]
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
            "range": buttons[0]["args"][1]["yaxis.range"],
            "fixedrange": True,
        },
        "yaxis2": {"domain": [0, 0.035], "visible": False, "fixedrange": True},
        # Below the figure, whatever the width of the page: two short entries share a row.
        "legend": {
            "traceorder": "reversed",
            "title": {"text": "at the peak:"},
            "orientation": "h",
            "x": 0,
            "y": -0.16,
            "yanchor": "top",
        },
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


def _column(values: Iterable[float], kind: str = "d") -> dict[str, str]:
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
