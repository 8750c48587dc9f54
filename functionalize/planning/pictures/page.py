"""A plan as one offline HTML page: memory with zoom and hover, the schedule, tables, assumptions.

    write_page("plan.html", title="Llama-3-8B on 64 ranks", timelines=[eager, program], spans=spans,
               tables=[Table("Communication", ["kind", "count", "bytes"], rows)], facts={"machine": "H100"})

    title, cards, first figures and tables    what a reader asks first (`cards.py`, `page_sweep.py`)
    two plans side by side                    chosen among `choices` (`page_script.py`)
    sentences on the peaks                    text
    memory of a step, modelled schedule       figures drawn by plotly (`page_figures.py`), whose script is inlined
    live at each peak, other tables, facts    HTML tables; the tooltip of a cell has the exact number

Needs plotly: `pip install "functionalize[page]"`. A content security policy in the page forbids every request. Names
and lines of code are escaped. Colours and units are those of the pictures.
Invariant: the page is computed from the same events as the timeline's own numbers.
Refuses: a page without content; plotly not installed. Linear in events.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from functionalize.errors import PictureError
from functionalize.planning.pictures.cards import Card, cards_html
from functionalize.planning.pictures.page_figures import memory_figure
from functionalize.planning.pictures.page_parts import Figure
from functionalize.planning.pictures.page_schedule import schedule_figure
from functionalize.planning.pictures.page_script import (
    AXIS,
    FIGURES,
    ComparedPlan,
    side_by_side_html,
)
from functionalize.planning.report.display import (
    OTHER_PHASE,
    PHASE_COLOURS,
    Peak,
    groups,
    human_bytes,
    human_seconds,
    pattern,
    stretches,
)
from functionalize.planning.report.memory_figures import place
from functionalize.planning.report.memory_text import short_line
from functionalize.planning.report.rows import exposed, total
from functionalize.planning.report.spans import Span
from functionalize.planning.timeline.timeline import Allocation, Category, Timeline

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
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.card { border: 1px solid #d6d9de; border-top: 4px solid #8a929c; border-radius: 6px; padding: .6rem .9rem; }
.card.good { border-top-color: #0a7a50; } .card.bad { border-top-color: #c00032; }
.card h2 { font-size: .87rem; font-weight: 400; color: #55595f; margin: 0; } .card b { font-size: 1.1rem; }
.card p { font-size: .87rem; color: #55595f; margin: .25rem 0 0; } .card * { overflow-wrap: anywhere; }
.small { font-size: .87rem; color: #55595f; }
.small i { display: inline-block; width: 1rem; height: .8rem; margin-right: .35rem; vertical-align: -.05rem; }
.pick { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: center; }
.pick select { font: inherit; max-width: 100%; padding: .2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.5rem; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


class Table(NamedTuple):
    """A table of the page. Numbers in a column whose name contains `bytes` or `seconds` are shown with a unit.

    is_folded: whether a click on the title shows the rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    is_folded: bool = False


class Exact(NamedTuple):
    """A number in a table with its text; the tooltip of the cell has the number."""

    number: float
    text: str


def write_page(
    path: str | Path,
    *,
    title: str = "Plan of a step",
    timelines: Sequence[Timeline] = (),
    spans: Sequence[Span] = (),
    tables: Sequence[Table] = (),
    facts: Mapping[str, Any] | None = None,
    held: Mapping[str, Sequence[int]] = _NONE,
    times: Mapping[str, Sequence[float]] = _NONE,
    limit: int | None = None,
    cards: Sequence[Card] = (),
    plots: Mapping[str, Figure] = _NONE,
    first: Sequence[Table] = (),
    asked: Sequence[Timeline] = (),
    choices: Sequence[ComparedPlan] = (),
    drawn_of: str = "a step",
) -> None:
    """Write the page: cards, plots and the tables in `first`, two of the choices, memory, schedule, the other tables.

    The first timeline is shown at first; buttons select the others.

    held, times: name of a timeline -> bytes of the device after each of its events, and the event's modelled seconds.
    limit: bytes of the device. facts: assumptions, shown as a list of names and values.
    plots: title -> a figure of `page_sweep.py`. choices: plans of which two are shown side by side.
    asked: timelines of other steps, each a line that a click on its name shows. drawn_of: whose timelines these are.
    """
    timelines = [timeline for timeline in timelines if timeline.events]
    if not (timelines or spans or tables or first or plots or choices):
        raise PictureError(
            f"The page `{title}` would be empty: there is no timeline with events, no span and no table. "
            "Capture the step with memory=True, or pass `spans` or `tables`."
        )
    figures: dict[str, Figure] = {}
    named = {f"plot{i}": figure for i, figure in enumerate(plots.values())}
    figures.update(named)
    if timelines:
        figures["memory"] = memory_figure(timelines, held, limit, times, asked)
    if spans:
        figures["schedule"] = schedule_figure(spans)
    drawn = _figures_html(path, figures)
    parts = [f"<h1>{_text(title)}</h1>"]
    parts += [cards_html(cards)] if cards else []
    for (title_, _), name in zip(plots.items(), named, strict=True):
        parts += [f"<h2>{_text(title_)}</h2>", drawn[name]]
    parts += _tables(first)
    if len(choices) > 1:
        parts += ["<h2>Side by side</h2>", side_by_side_html(choices)]
    if timelines:
        parts += [
            f"<h2>Memory of {_text(drawn_of)}</h2>",
            *([AXIS] if times else []),
            drawn["memory"],
        ]
        parts += [_phases(timelines), *_peaks(timelines, limit)]
        parts += [_folded(_live(timeline), i == 0) for i, timeline in enumerate(timelines)]
    if spans:
        parts += ["<h2>Modelled schedule</h2>", _summary(spans), drawn["schedule"]]
    parts += _tables(tables)
    if facts:
        parts += ["<h2>What was assumed</h2>", "<dl>", *_facts(facts), "</dl>"]
    parts += [FIGURES] if figures else []
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


def _figures_html(path: str | Path, figures: Mapping[str, Figure]) -> dict[str, str]:
    """Each figure as HTML; the first one includes plotly's script."""
    if not figures:
        return {}
    try:
        from plotly.io import to_html
    except ImportError as error:
        raise PictureError(
            f"{path} cannot be written: the figures of an HTML page need plotly, which is not installed. "
            'Run pip install "functionalize[page]", or draw a picture (.png, .svg, .pdf).'
        ) from error
    drawn: dict[str, str] = {}
    for name, figure in figures.items():
        first = not drawn
        found = to_html(figure, _CONFIG, include_plotlyjs=first, full_html=False, div_id=name)
        drawn[name] = found
    return drawn


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


def _summary(spans: Sequence[Span]) -> str:
    end, waited = max(span.end for span in spans), total(exposed(spans))
    share = 100 * waited / (end or 1)
    return (
        f"<p>{human_seconds(end)} by a model of the machine; compute waits {human_seconds(waited)} "
        f"for communication ({share:.0f}%).</p>"
    )


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
            number = value.number if isinstance(value, Exact) else value
            more = f' title="{number:,}"' if _is_number(number) else ""
            if stacked and i >= _BESIDE:
                more = f' data-head="{_text(table.columns[i])}"'
            yield f"<td{style[i]}{more}>{_text(_cell(value, table.columns[i]))}</td>"
        yield "</tr>"
    yield "</table></div>"


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    for key, value in facts.items():
        yield f"<dt>{_text(key)}</dt><dd>{_text(_cell(value, str(key)))}</dd>"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Exact) and not isinstance(value, bool)


def _cell(value: Any, column: str) -> str:
    """A value as text; a number with the unit that the name of its column contains."""
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    if isinstance(value, Exact):
        return value.text
    words = column.lower().replace("_", " ").split()
    if not _is_number(value):
        return str(value)
    if "bytes" in words:
        return human_bytes(value)
    if "seconds" in words:
        return human_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
