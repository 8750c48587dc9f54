"""Pictures of a plan: PNG, SVG or PDF by the suffix of the file.

Needs matplotlib: `pip install "functionalize[plots]"`.

    memory_picture([eager, program], "memory.png")      bytes by category, event by event; the peak in detail
    schedule_picture(spans, "schedule.svg")             a row per stream; hatched where compute waits
    tradeoff_picture(rows, "sweep.png")                 bytes against seconds (see `tradeoffs.py`)

        ┌─────────────────┬──────────┐
        │      peak •     │ legend   │     a column of the picture shows all categories of one event, the one with
        │   ▟█▙▟██▙▟█▙    │ bytes at │     the most bytes in that column: so the stack adds up, and no peak is lost,
        │ ▟███████████▙   │ the peak │     however many events there are
        ├─────────────────┤ what it  │
        │ forward│backward│ is, where│
        └─────────────────┴──────────┘

Figures are built without `pyplot`: no global state, no window, no backend. The same plan results in the same file.
Refuses: another file suffix; nothing to draw. Linear in events, spans (after sorting) and rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from functionalize.errors import PictureError
from functionalize.planning.pictures.canvas import (
    GREY,
    INK,
    PALE,
    RED,
    Canvas,
    blank,
    round_bytes,
    shorter,
    swatch,
    tick,
)
from functionalize.planning.pictures.tradeoffs import tradeoff_picture
from functionalize.planning.report.display import (
    COLOURS,
    COMPUTE_COLOURS,
    OTHER_PHASE,
    OTHER_STREAM,
    PHASE_COLOURS,
    STREAM_COLOURS,
    Peak,
    anchors,
    brief,
    check_reserved,
    coarse,
    first_event,
    groups,
    human_bytes,
    human_seconds,
    placed,
    stretches,
)
from functionalize.planning.report.rows import COMPUTE, exposed, merged, rectangles, rows_of, total
from functionalize.planning.report.spans import Span
from functionalize.planning.timeline.timeline import BEFORE, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = (
    900  # at most, of a picture: more than a printed page resolves, few enough for a small SVG
)

__all__ = ["memory_picture", "schedule_picture", "tradeoff_picture"]

# -- memory ----------------------------------------------------------------------------------------


def memory_picture(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    title: str = "",
    reserved: Sequence[int] | None = None,
    limit: int | None = None,
) -> None:
    """Draw the memory of a step: the first timeline by category, the others as lines.

    reserved: bytes reserved by an allocator after each event of the first timeline. limit: bytes of the device.
    The other timelines are aligned with the first one phase by phase, because their events differ.
    """
    if not timelines or not any(timeline.events for timeline in timelines[:1]):
        raise PictureError(
            f"{path} cannot be drawn: there is no event in the timeline. Was the step captured with memory=True?"
        )
    main, peak = timelines[0], Peak.of(timelines[0])
    if reserved is not None:
        check_reserved(reserved, main)
    with Canvas(path, 12, 5.6) as figure:
        axes = figure.add_axes((0.068, 0.145, 0.605, 0.765))
        strip = figure.add_axes((0.068, 0.075, 0.605, 0.04))
        start, end = first_event(main), len(main.events)
        chosen = columns(main.bytes, start, end)
        _stack(axes, main, chosen, end)
        lines = [_other_line(axes, each, main) for each in timelines[1:]]
        if reserved is not None:
            held = columns(reserved, start, end)
            lines.append((f"reserved by the allocator, peak {human_bytes(max(reserved))}", "-"))
            axes.plot(held, [reserved[i] for i in held], color=GREY, lw=1.1, drawstyle="steps-post")
        top = max([t.peak for t in timelines] + [max(reserved or [0])])
        _memory_axes(axes, (start, end), top, limit)
        _phases(strip, main, (start, end))
        _mark_peak(axes, peak, (start, end))
        figure.text(
            0.068, 0.945, title or f"Memory of a step ({main.name})", fontsize=13, color=INK
        )
        _peak_panel(figure, main, peak, lines)


def columns(values: Sequence[int], start: int, end: int, count: int = COLUMNS) -> list[int]:
    """For each of `count` columns its event with the most bytes, in order; all events if there are fewer."""
    if end - start <= count:
        return list(range(start, end))
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    return [max(range(a, b), key=values.__getitem__) for a, b in pairwise(edges)]


def _stack(axes: Axes, timeline: Timeline, chosen: Sequence[int], end: int) -> None:
    """The stacked categories. Each is filled from 0 to its top, the uppermost first, which halves the points."""
    stacked = timeline.stacked()
    heights = [0] * len(chosen)
    layers = []
    for category, values in stacked.items():
        heights = [below + values[i] for below, i in zip(heights, chosen, strict=True)]
        layers.append((category, heights))
    for category, tops in reversed(layers):
        kept = [i for i in range(len(tops)) if i == 0 or tops[i] != tops[i - 1]]
        axes.fill_between(
            [*(chosen[i] for i in kept), end],
            [*(tops[i] for i in kept), tops[-1]],
            color=COLOURS[category],
            step="post",
            lw=0,
            snap=False,
            antialiased=False,  # else the category behind shows through at the edge
        )


def _other_line(axes: Axes, timeline: Timeline, main: Timeline) -> tuple[str, str]:
    """Draw a timeline as a line over the main one; return its legend entry: (label, line style)."""
    chosen = columns(timeline.bytes, first_event(timeline), len(timeline.events))
    at = placed(anchors(timeline, main), chosen)
    heights = [timeline.bytes[i] for i in chosen]
    for width, colour, style in ((2.6, "white", "-"), (1.2, INK, (0, (4, 1.5)))):
        axes.plot(at, heights, color=colour, lw=width, ls=style, drawstyle="steps-post")
    return f"{timeline.name}: peak {human_bytes(timeline.peak)}", "--"


def _memory_axes(axes: Axes, span: tuple[int, int], top: int, limit: int | None) -> None:
    from matplotlib.ticker import FuncFormatter

    shown = limit is not None and limit < 1.6 * top
    height = max(top, limit or 0) if shown else top
    axes.set_xlim(*span)
    axes.set_ylim(0, max(height, 1) * 1.1)
    axes.set_yticks(round_bytes(max(height, 1) * 1.1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.grid(axis="y", color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if limit is None:
        return
    if shown:
        axes.axhline(limit, color=RED, lw=1.2)
    axes.annotate(
        f"limit {human_bytes(limit)}" + ("" if shown else ", far above"),
        (0.004, limit if shown else 0.985),
        xycoords=("axes fraction", "data" if shown else "axes fraction"),
        xytext=(0, 3 if shown else 0),
        textcoords="offset points",
        color=RED,
        va="bottom" if shown else "top",
        fontsize=8.5,
        bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.8},
    )


def _phases(strip: Axes, timeline: Timeline, span: tuple[int, int]) -> None:
    """A strip below: the phases in order, each stretch labelled if its name fits."""
    from matplotlib.patches import Patch

    found, width = stretches(timeline), (span[1] - span[0]) / COLUMNS
    drawn = span[0] - width
    for phase, start, end in found:
        if end - drawn < width:  # thinner than a column: left out, the next one extends over it
            continue
        strip.axvspan(max(start, span[0]), end, color=PHASE_COLOURS.get(phase, OTHER_PHASE), lw=0)
        drawn = end
    for phase, start, end in coarse(found):
        if (end - start) / (span[1] - span[0]) > 0.0125 * len(phase):
            strip.text((start + end) / 2, 0.46, phase, ha="center", va="center", fontsize=8.5)
    strip.set_xlim(*span)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    strip.set_xticks([])
    count = sum(event.op != BEFORE for event in timeline.events)
    strip.set_xlabel(f"{count:,} allocations and frees, in order", fontsize=9, loc="left")
    strip.spines[:].set_visible(False)
    names = dict.fromkeys(phase for phase, _, _ in found)
    strip.legend(
        handles=[Patch(color=PHASE_COLOURS.get(name, OTHER_PHASE), label=name) for name in names],
        loc="upper right",
        bbox_to_anchor=(1.01, 0.12),
        ncols=len(names),
        frameon=False,
        fontsize=9,
        handlelength=1,
        columnspacing=1.3,
    )


def _mark_peak(axes: Axes, peak: Peak, span: tuple[int, int]) -> None:
    axes.axvline(peak.event, color=INK, lw=0.8, ls=(0, (1, 2)))
    axes.plot([peak.event], [peak.nbytes], "o", color=INK, ms=5.5, mec="white", mew=1.2, zorder=5)
    share = (peak.event - span[0]) / max(span[1] - span[0], 1)
    axes.annotate(
        f"peak {human_bytes(peak.nbytes)}",
        (peak.event, peak.nbytes),
        xytext=(6 if share < 0.8 else -6, 5),
        textcoords="offset points",
        ha="left" if share < 0.8 else "right",
        weight="bold",
        color=INK,
        bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.2},
    )


def _peak_panel(
    figure: Figure, timeline: Timeline, peak: Peak, lines: Iterable[tuple[str, str]]
) -> None:
    """The panel at the right: a legend with the bytes at the peak, and the largest storages live there."""
    panel = blank(figure, (0.69, 0.03, 0.3, 0.94))
    y, row = 0.985, 0.0385
    panel.text(0, y, f"at the peak of {timeline.name}", va="center", weight="bold")
    for category in reversed(timeline.stacked()):
        y -= row
        nbytes = peak.categories.get(category, 0)
        _entry(panel, y, COLOURS[category], category.value, nbytes, INK if nbytes else GREY)
    for label, style in lines:
        y -= row
        colour = INK if style == "--" else GREY
        panel.plot([0, 0.05], [y, y], color=colour, lw=1.3, ls=style)
        panel.text(0.075, y, shorter(label, 46), va="center")
    y -= 1.5 * row
    panel.text(0, y, f"the peak: {human_bytes(peak.nbytes)}", va="center", weight="bold")
    for line in textwrap.wrap(shorter(peak.where(), 150), 52):
        y -= 0.85 * row
        panel.text(0, y, line, va="center", fontsize=8.8)
    y -= 0.4 * row
    for group in groups(peak.live)[: min(max(int(y / (0.85 * row)), 0), 8)]:
        y -= 0.85 * row
        name = shorter(brief(group.name), 34) + (
            f" (×{group.members})" if group.members > 1 else ""
        )
        _entry(panel, y, COLOURS[group.category], name, group.nbytes, GREY, 8.4)


def _entry(
    panel: Axes, y: float, colour: str, name: str, nbytes: int, ink: str, size: float = 9.5
) -> None:
    """A line of the legend: colour, name, bytes."""
    panel.add_patch(swatch(y, colour, size / 9.5))
    panel.text(0.075, y, name, va="center", color=ink, fontsize=size)
    panel.text(1, y, human_bytes(nbytes), va="center", ha="right", color=ink, fontsize=size)


# -- schedule --------------------------------------------------------------------------------------


def schedule_picture(spans: Sequence[Span], path: str | Path, *, title: str = "") -> None:
    """Draw a modelled schedule: a row per stream, hatched where compute waits for communication."""
    if not spans:
        raise PictureError(f"{path} cannot be drawn: the schedule has no span.")
    rows = rows_of(spans)
    end = max(span.end for span in spans)
    waits = exposed(spans)
    height = 1.5 + 0.42 * len(rows)
    with Canvas(path, 12, height) as figure:
        axes = figure.add_axes((0.15, 0.78 / height, 0.835, 0.42 * len(rows) / height))
        for y, (name, row) in enumerate(rows.items()):
            bars: dict[str, list[tuple[float, float]]] = {}
            for phase, start, stop in rectangles(row, end / COLUMNS):
                width = max(stop - start, 0.8 * end / COLUMNS)  # else thinner than a pixel
                bars.setdefault(stream_colour(name, phase), []).append((start, width))
            for colour, some in bars.items():
                axes.broken_barh(some, (y - 0.36, 0.72), facecolors=colour, lw=0)
            used = total(merged((s.start, s.end) for s in row))
            label = f"{shorter(name, 22)}  {100 * used / (end or 1):.0f}%"
            place = axes.get_yaxis_transform()
            axes.text(-0.006, y, label, transform=place, ha="right", va="center")
        if waits:
            gaps = [(start, stop - start) for start, stop in waits]
            axes.broken_barh(gaps, (-0.36, 0.72), fc=PALE, ec=RED, hatch="/////", lw=0)
        _time_axis(axes, end, len(rows))
        figure.text(0.15, 1 - 0.34 / height, title or "Modelled schedule of a step", fontsize=13)
        summary = f"{human_seconds(end)} in all; compute waits {human_seconds(total(waits))} for communication"
        figure.text(
            0.15, 0.16 / height, f"{summary} ({100 * total(waits) / (end or 1):.0f}%)", fontsize=9
        )
        _schedule_legend(
            figure, height, {span.phase for span in spans if span.stream == COMPUTE}, bool(waits)
        )


def stream_colour(stream: str, phase: str) -> str:
    """The colour of a span: of compute by phase; of communication by kind, as its buffers in pictures of memory."""
    if stream == COMPUTE:
        return COMPUTE_COLOURS.get(phase, OTHER_PHASE)
    return next((colour for kind, colour in STREAM_COLOURS.items() if kind in stream), OTHER_STREAM)


def _time_axis(axes: Axes, end: float, rows: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(0, end or 1)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick(x, human_seconds)))
    axes.grid(axis="x", color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _schedule_legend(figure: Figure, height: float, phases: set[str], waits: bool) -> None:
    """The legend of the compute colours and the hatching, right of the title."""
    from matplotlib.patches import Patch

    entries = [
        Patch(color=colour, label=phase)
        for phase, colour in COMPUTE_COLOURS.items()
        if phase in phases
    ]
    if waits:
        entries.append(Patch(fc=PALE, ec=RED, hatch="/////", lw=0, label="compute waits"))
    figure.legend(
        handles=entries,
        loc="upper right",
        bbox_to_anchor=(0.99, 1 - 0.06 / height),
        ncols=len(entries),
        frameon=False,
        handlelength=1.2,
        columnspacing=1.4,
    )
