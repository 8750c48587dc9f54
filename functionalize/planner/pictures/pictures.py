"""The picture of a plan's memory: PNG, SVG or PDF by the suffix of the file.

Needs matplotlib: `pip install "functionalize[plots]"`.

    memory_picture([eager, program], "memory.png")      bytes by category, event by event; the peak in detail
    memory_picture(..., times=times)                    the same over modelled time (`event_times` of `report/rows.py`)

        ┌─────────────────┬──────────┐
        │      peak •     │ legend   │     a column of the picture shows all categories of one event, the one with
        │   ▟█▙▟██▙▟█▙    │ bytes at │     the most bytes in that column: so the stack adds up, and no peak is lost,
        │ ▟███████████▙   │ the peak │     however many events there are
        ├─────────────────┤ what it  │
        │ forward│backward│ is, where│
        └─────────────────┴──────────┘

Figures are built without `pyplot`: no global state, no window, no backend. The same plan results in the same file.
Refuses: another file suffix; nothing to draw. Linear in events and spans (after sorting).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from functionalize.errors import PictureError
from functionalize.planner.pictures.canvas import (
    COLUMNS,
    GREY,
    INK,
    RED,
    Canvas,
    blank,
    round_bytes,
    shorter,
    swatch,
    tick,
    upper_end,
)
from functionalize.planner.report.figures import Peak, brief, check_held, groups
from functionalize.planner.report.rows import (
    COLOURS,
    OTHER_PHASE,
    PHASE_COLOURS,
    anchors,
    coarse,
    first_event,
    placed,
    stretches,
)
from functionalize.planner.timeline.timeline import BEFORE, Timeline
from functionalize.util.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_NO_TIMES: Mapping[str, Sequence[float]] = MappingProxyType({})


def memory_picture(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    title: str = "",
    held: Sequence[int] | None = None,
    limit: int | None = None,
    times: Mapping[str, Sequence[float]] = _NO_TIMES,
) -> None:
    """Draw the memory of a step: the first timeline by category, the others as lines.

    held: bytes that the device holds after each event of the first timeline. limit: bytes of the device.
    times: by name of a timeline, the seconds of its events; without, events are drawn in order, and the other timelines
    are aligned with the first one phase by phase, because their events differ.

        >>> step = fz.record_memory(lambda x: (x * 2).sum())
        >>> _ = step(torch.ones(1024))
        >>> fz.planner.memory_picture([*step.memory.timelines.values()], "memory.png")
    """
    if not timelines or not any(timeline.events for timeline in timelines[:1]):
        raise PictureError(
            f"{path} cannot be drawn: there is no event in the timeline. Was the step captured with memory=True?"
        )
    main, peak = timelines[0], Peak.of(timelines[0])
    if held is not None:
        check_held(held, main)
    with Canvas(path, 12, 5.6) as figure:
        axes = figure.add_axes((0.068, 0.145, 0.605, 0.765))
        strip = figure.add_axes((0.068, 0.075, 0.605, 0.04))
        across = _Across.of(main, times.get(main.name))
        _stack(axes, main, across)
        top = upper_end(max([main.peak, *(held or ())]), (t.peak for t in timelines[1:]))
        lines = []
        for each in timelines[1:]:
            _other_line(axes, each, main, times)
            far = ", far above" if each.peak > top else ""
            lines.append((f"{each.name}: peak {human_bytes(each.peak)}{far}", "--"))
        if held is not None:
            chosen = across.columns(held)
            heights = [held[i] for i in (*chosen, chosen[-1])]
            lines.append((f"on the device: peak {human_bytes(max(held))}", "-"))
            at = across.places(chosen)
            axes.plot(at, heights, color=GREY, lw=1.1, drawstyle="steps-post")
        _memory_axes(axes, across, top, limit)
        _phases(strip, main, across)
        _mark_peak(axes, peak, across)
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


def time_columns(values: Sequence[int], at: Sequence[float], start: int) -> list[int]:
    """For each of `COLUMNS` parts of the time its event with the most bytes, and its last one; all events if few.

    at: the seconds of each event. The last one holds in the parts that have no event.
    """
    if len(at) - start <= COLUMNS:
        return list(range(start, len(at)))
    width = (at[-1] - at[start]) / COLUMNS or 1.0
    parts = groupby(range(start, len(at)), key=lambda i: int((at[i] - at[start]) / width))
    found: list[int] = []
    for _, part in parts:
        events = [*part]
        found += sorted({max(events, key=values.__getitem__), events[-1]})
    return found


class _Across(NamedTuple):
    """The horizontal axis: events in order, or their modelled seconds.

    first: the first event that is drawn. at: the place of each event. end: the right end.
    """

    first: int
    at: Sequence[float]
    end: float
    is_time: bool

    @classmethod
    def of(cls, timeline: Timeline, times: Sequence[float] | None) -> _Across:
        """The axis of a timeline. times: of its events; None: events in order."""
        count = len(timeline.events)
        if times is None:
            return cls(first_event(timeline), range(count), count, False)
        return cls(first_event(timeline), times, times[-1] or 1.0, True)

    @property
    def span(self) -> tuple[float, float]:
        """Both ends."""
        return self.at[self.first], self.end

    def columns(self, values: Sequence[int]) -> list[int]:
        """The events that are drawn: of those that share a column of the picture, that with the most bytes."""
        if self.is_time:
            return time_columns(values, self.at, self.first)
        return columns(values, self.first, len(self.at))

    def places(self, events: Iterable[int]) -> list[float]:
        """Where events are drawn, and the right end."""
        return [*(self.at[i] for i in events), self.end]

    def place(self, event: int) -> float:
        """Where an event is drawn; the right end for one after the last."""
        return self.at[event] if event < len(self.at) else self.end


def _stack(axes: Axes, timeline: Timeline, across: _Across) -> None:
    """The stacked categories. Each is filled from 0 to its top, the uppermost first, which halves the points."""
    stacked, chosen = timeline.stacked(), across.columns(timeline.bytes)
    heights = [0] * len(chosen)
    layers = []
    for category, values in stacked.items():
        heights = [below + values[i] for below, i in zip(heights, chosen, strict=True)]
        layers.append((category, heights))
    for category, tops in reversed(layers):
        kept = [i for i in range(len(tops)) if i == 0 or tops[i] != tops[i - 1]]
        axes.fill_between(
            across.places(chosen[i] for i in kept),
            [*(tops[i] for i in kept), tops[-1]],
            color=COLOURS[category],
            step="post",
            lw=0,
            snap=False,
            antialiased=False,  # else the category behind shows through at the edge
        )


def _other_line(
    axes: Axes, timeline: Timeline, main: Timeline, times: Mapping[str, Sequence[float]]
) -> None:
    """Draw a timeline as a line over the main one."""
    across = _Across.of(timeline, times.get(timeline.name))
    chosen = across.columns(timeline.bytes)
    at = [across.at[i] for i in chosen] if times else placed(anchors(timeline, main), chosen)
    heights = [timeline.bytes[i] for i in chosen]
    for width, colour, style in ((2.6, "white", "-"), (1.2, INK, (0, (4, 1.5)))):
        axes.plot(at, heights, color=colour, lw=width, ls=style, drawstyle="steps-post")


def _memory_axes(axes: Axes, across: _Across, top: int, limit: int | None) -> None:
    from matplotlib.ticker import FuncFormatter

    shown = limit is not None and limit < 1.6 * top
    height = max(top, limit or 0) if shown else top
    axes.set_xlim(*across.span)
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


def _phases(strip: Axes, timeline: Timeline, across: _Across) -> None:
    """A strip below: the phases in order, each stretch labelled if its name fits."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    found, span = stretches(timeline), across.span
    width = (span[1] - span[0]) / COLUMNS
    drawn = span[0] - width
    for phase, *ends in found:
        start, end = map(across.place, ends)
        if end - drawn < width:  # thinner than a column: left out, the next one extends over it
            continue
        strip.axvspan(max(start, span[0]), end, color=PHASE_COLOURS.get(phase, OTHER_PHASE), lw=0)
        drawn = end
    for phase, *ends in coarse(found):
        start, end = map(across.place, ends)
        if (end - start) / (span[1] - span[0]) > 0.0125 * len(phase):
            strip.text((start + end) / 2, 0.46, phase, ha="center", va="center", fontsize=8.5)
    strip.set_xlim(*span)
    strip.set_ylim(0, 1)
    strip.set_yticks([])
    if across.is_time:
        strip.xaxis.set_major_locator(MaxNLocator(9))
        strip.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick(x, human_seconds)))
        strip.tick_params(axis="x", length=2, labelsize=8.5, pad=1)
    else:
        strip.set_xticks([])
    count = sum(event.op != BEFORE for event in timeline.events)
    how = f"over {human_seconds(span[1])}, modelled" if across.is_time else "in order"
    strip.set_xlabel(f"{count:,} allocations and frees, {how}", fontsize=9, loc="left")
    strip.spines[:].set_visible(False)
    names = dict.fromkeys(phase for phase, _, _ in found)
    strip.legend(
        handles=[Patch(color=PHASE_COLOURS.get(name, OTHER_PHASE), label=name) for name in names],
        loc="upper right",
        bbox_to_anchor=(1.01, -0.4 if across.is_time else 0.12),
        ncols=len(names),
        frameon=False,
        fontsize=9,
        handlelength=1,
        columnspacing=1.3,
    )


def _mark_peak(axes: Axes, peak: Peak, across: _Across) -> None:
    at, (left, right) = across.place(peak.event), across.span
    axes.axvline(at, color=INK, lw=0.8, ls=(0, (1, 2)))
    axes.plot([at], [peak.nbytes], "o", color=INK, ms=5.5, mec="white", mew=1.2, zorder=5)
    share = (at - left) / (right - left or 1)
    axes.annotate(
        f"peak {human_bytes(peak.nbytes)}",
        (at, peak.nbytes),
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
