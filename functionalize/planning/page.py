"""A plan as one HTML page that needs no network: memory with zoom and hover, the schedule, tables, facts.

    write_page("plan.html", title="Llama-3-8B on 64 ranks", timelines=[eager, program], spans=spans,
               tables=[Table("Communication", ["kind", "count", "bytes"], rows)], facts={"machine": "H100"})

The page holds every event, not a picture of them, so that zooming in shows all there is:

    strings ──┐
    ops, allocations, events, spans ── columns of numbers ── deflate ── base64 ──▶ page.html (page.css, page.js inlined)

Its script is written by hand and asks nothing of a network; a content policy in the page forbids it to. All text of
the plan reaches the page as data, never as HTML. Invariant: what the page shows is computed from the same events as
the timeline's own numbers; colours and units are those of the pictures. Refuses: nothing to show. Linear in events.
"""

from __future__ import annotations

import base64
import html
import json
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from functionalize.errors import PictureError
from functionalize.planning.display import (
    COLOURS,
    COMPUTE_COLOURS,
    OTHER_PHASE,
    OTHER_STREAM,
    PHASE_COLOURS,
    STREAM_COLOURS,
    Peak,
    anchors,
    check_reserved,
    first_event,
)
from functionalize.planning.rows import exposed, rows_of
from functionalize.planning.spans import Span
from functionalize.planning.timeline import Category, Timeline

_ORDER = {category: i for i, category in enumerate(Category)}


class Table(NamedTuple):
    """A table of the page. Numbers in a column whose name has the word bytes, or seconds, are shown in such units."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


def write_page(
    path: str | Path,
    *,
    title: str = "Plan of a step",
    timelines: Sequence[Timeline] = (),
    spans: Sequence[Span] = (),
    tables: Sequence[Table] = (),
    facts: Mapping[str, Any] | None = None,
    reserved: Mapping[str, Sequence[int]] | None = None,
    limit: int | None = None,
) -> None:
    """Write the page. The first timeline is shown first, the others at a click.

    reserved: bytes that an allocator holds after each event of the timeline of that name. limit: bytes of the device.
    """
    text = page(title, timelines, spans, tables, facts, reserved, limit)
    Path(path).write_text(text, encoding="utf-8")


def page(
    title: str,
    timelines: Sequence[Timeline] = (),
    spans: Sequence[Span] = (),
    tables: Sequence[Table] = (),
    facts: Mapping[str, Any] | None = None,
    reserved: Mapping[str, Sequence[int]] | None = None,
    limit: int | None = None,
) -> str:
    """The page as text."""
    timelines = [timeline for timeline in timelines if timeline.events]
    if not (timelines or spans or tables):
        raise PictureError(
            f"The page `{title}` would be empty: it was given no timeline with events, no span and no table. "
            "Capture the step with memory=True, or give it what to show."
        )
    columns = _Columns()
    data = {
        "timelines": [
            _timeline(t, columns, timelines, (reserved or {}).get(t.name)) for t in timelines
        ],
        "schedule": _schedule(spans, columns) if spans else None,
        "tables": [_table(table) for table in tables],
        "facts": [[str(key), _cell(value)] for key, value in (facts or {}).items()],
        "limit": limit,
        "categories": [{"name": c.value, "colour": COLOURS[c]} for c in Category],
        "phases": {**PHASE_COLOURS, "": OTHER_PHASE},
        "compute": {**COMPUTE_COLOURS, "": OTHER_PHASE},
        "streams": {**STREAM_COLOURS, "": OTHER_STREAM},
        "strings": list(columns.strings),
        "columns": columns.places,
    }
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _resource("page.css"),
        "DATA": _packed(json.dumps(data, separators=(",", ":")).encode()),
        "COLUMNS": _packed(bytes(columns.content)),
        "SCRIPT": _resource("page.js"),
    }
    pieces = _resource("page.html").split("{{")
    filled = (parts[name] + rest for name, _, rest in (p.partition("}}") for p in pieces[1:]))
    return pieces[0] + "".join(filled)


class _Columns:
    """Columns of numbers one after the other, each at a multiple of 8 bytes; strings by their number."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.content = bytearray()
        self.places: list[tuple[str, int, int]] = []  # type, offset in bytes, length

    def add(self, kind: str, values: Iterable[float]) -> int:
        """A column of `B`, `i`, `I` or `d` (as in `array`); its number."""
        column = array(kind, values)
        if sys.byteorder == "big":
            column.byteswap()
        self.content += bytes(-len(self.content) % 8)
        self.places.append((kind, len(self.content), len(column)))
        self.content += column.tobytes()
        return len(self.places) - 1

    def text(self, values: Iterable[str]) -> int:
        """A column of strings."""
        strings = self.strings
        return self.add("I", [strings.setdefault(value, len(strings)) for value in values])


def _timeline(
    timeline: Timeline,
    columns: _Columns,
    all_: Sequence[Timeline],
    reserved: Sequence[int] | None,
) -> dict[str, Any]:
    """The columns of a timeline, and what its page says in words."""
    if reserved is not None:
        check_reserved(reserved, timeline)
    ops, made = list(timeline.ops), timeline.allocations
    number = {id(allocation): i for i, allocation in enumerate(made)}
    peak = Peak.of(timeline)
    return {
        "name": timeline.name,
        "first": first_event(timeline),
        "peak": {"event": peak.event, "bytes": peak.nbytes, "words": peak.words()},
        "anchors": [None if each is timeline else anchors(timeline, each) for each in all_],
        "reserved": None if reserved is None else columns.add("d", reserved),
        "op_name": columns.text(op.name for op in ops),
        "op_phase": columns.text(op.phase for op in ops),
        "op_module": columns.text(op.module for op in ops),
        "op_line": columns.text(op.line for op in ops),
        "bytes": columns.add("d", (a.nbytes for a in made)),
        "padding": columns.add("d", (a.padding for a in made)),
        "category": columns.add("B", (_ORDER[a.category] for a in made)),
        "name_of": columns.text(a.name for a in made),
        "shape": columns.text(a.shape for a in made),
        "made": columns.add("i", (a.made for a in made)),
        "freed": columns.add("i", (-2 if a.freed is None else a.freed for a in made)),
        "last_use": columns.add("i", (a.last_use for a in made)),
        "event_op": columns.add("i", (event.op for event in timeline.events)),
        "event": columns.add("I", (2 * number[id(e.allocation)] + e.made for e in timeline.events)),
    }


def _schedule(spans: Sequence[Span], columns: _Columns) -> dict[str, Any]:
    """The columns of each stream's spans, in order of time."""
    waits = exposed(spans)
    return {
        "end": max(span.end for span in spans) or 1.0,
        "waits": [columns.add("d", (w[0] for w in waits)), columns.add("d", (w[1] for w in waits))],
        "rows": [
            {
                "stream": stream,
                "name": columns.text(span.name for span in row),
                "phase": columns.text(span.phase for span in row),
                "module": columns.text(span.module for span in row),
                "start": columns.add("d", (span.start for span in row)),
                "end": columns.add("d", (span.end for span in row)),
                "bytes": columns.add("d", (span.nbytes for span in row)),
            }
            for stream, row in rows_of(spans).items()
        ],
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "note": table.note,
        "columns": [str(column) for column in table.columns],
        "rows": [[_cell(value) for value in row] for row in table.rows],
    }


def _cell(value: Any) -> Any:
    """What JSON can hold and a reader can read: numbers stay numbers, all else is text."""
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")):
        return value
    return str(value)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _resource(name: str) -> str:
    return files("functionalize.planning").joinpath(name).read_text(encoding="utf-8")
