"""The picture of a modelled schedule: a row per stream, hatched where compute waits for communication.

    schedule_picture(time.spans, "schedule.svg")

        compute 96%      ████████░░████████████
        all-gather 40%   ██████    ███              each row with the share of the step in which it is busy

Spans that are nearer than a pixel are one rectangle (`report/rows.py`). Refuses: a schedule without a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from functionalize.errors import PictureError
from functionalize.planner.pictures.canvas import COLUMNS, PALE, RED, Canvas, shorter, tick
from functionalize.planner.report.rows import (
    COMPUTE,
    COMPUTE_COLOURS,
    OTHER_PHASE,
    OTHER_STREAM,
    STREAM_COLOURS,
    Span,
    exposed,
    merged,
    rectangles,
    rows_of,
    total,
)
from functionalize.util.text import human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
