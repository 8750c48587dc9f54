"""The picture of a sweep: rows as points, and their Pareto frontier, on which less of one costs more of the other.

    tradeoff_picture(rows, "sweep.png")  drawn, numbered and listed
    points(rows, "seconds", "bytes")     a Point per row that has both numbers
    frontier(points)                     the points that no other one dominates: none is at most as large in both and
                                         smaller in one

     bytes  ×                            x: worse than another one in both
            •─┐   ×                     •: on the frontier
              └─•────•  seconds

Of equal points the first is kept. Refuses: no row has both numbers. n log n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    tick,
)
from functionalize.planning.report.display import human_bytes, human_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LISTED = 11  # points of the frontier, at most
_BYTES = {"bytes", "nbytes", "memory", "peak", "requested", "allocated", "reserved"}
Row = Mapping[str, Any]


class Point(NamedTuple):
    """A row of a sweep. name: its values of the columns that vary; feasible: whether y is within the limit."""

    x: float
    y: float
    name: str
    feasible: bool


class _Drawing(NamedTuple):
    """The content of a picture.

    all, best: all points, and those of the frontier. top: the upper end of the y axis; points above it are counted,
    not drawn.
    """

    all: list[Point]
    best: list[Point]
    limit: float | None
    top: float

    @classmethod
    def of(cls, found: list[Point], limit: float | None, more: bool) -> _Drawing:
        fitting = [point for point in found if point.feasible]
        highest = max(point.y for point in found)
        if limit is None or not fitting:
            best = frontier(found, more)
            return cls(found, best, limit, max(highest, limit or 0) * 1.1 or 1)
        room = max(point.y for point in fitting) if limit > 2 * highest else limit
        top = min(max(highest, room) * 1.1, 1.6 * limit) or 1
        return cls(found, frontier(fitting, more), limit, top)

    @property
    def listed(self) -> list[Point]:
        """The frontier; if it is longer than the list, evenly chosen points of it."""
        last = len(self.best) - 1
        if last < LISTED:
            return self.best
        return [self.best[i * last // (LISTED - 1)] for i in range(LISTED)]


def tradeoff_picture(
    rows: Sequence[Row],
    path: str | Path,
    *,
    x: str = "seconds",
    y: str = "bytes",
    limit: float | None = None,
    title: str = "",
) -> None:
    """Draw the rows of a sweep by two of their columns, less being better in both; of an x per second, more.

    The frontier is joined by a line, numbered, and listed with the columns that vary. limit: the largest feasible y;
    rows above it are drawn hollow, and are not on the frontier. Columns are shown as bytes or seconds by their name
    (`kind_of`).
    """
    drawn = _Drawing.of(points(rows, x, y, limit), limit, "/s" in x)
    with Canvas(path, 12, 5.4) as figure:
        axes = figure.add_axes((0.075, 0.115, 0.535, 0.79))
        _axes(axes, drawn, x, y)
        for feasible, face, edge in ((True, "#5f9fd8", "#1b4f8a"), (False, "white", GREY)):
            some = [(p.x, p.y) for p in drawn.all if p.feasible is feasible and p.y <= drawn.top]
            xs, ys = [p[0] for p in some], [p[1] for p in some]
            axes.scatter(xs, ys, s=34, c=face, edgecolors=edge, linewidths=0.9, zorder=3)
        xs, ys = [p.x for p in drawn.best], [p.y for p in drawn.best]
        axes.plot(xs, ys, color=INK, lw=1, drawstyle="steps-post", zorder=2)
        _limit(axes, drawn, y)
        _numbers(axes, drawn.listed)
        head = title or f"{y} against {x}, {len(drawn.all):,} configurations"
        figure.text(0.075, 0.945, head, fontsize=13)
        _list(figure, drawn, x, y)


def _axes(axes: Axes, drawn: _Drawing, x: str, y: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    left, right = min(p.x for p in drawn.all), max(p.x for p in drawn.all)
    room = 0.06 * (right - left) or 0.1 * abs(right) or 1
    axes.set_xlim(max(left - room, 0 if left >= 0 else left - room), right + room)
    axes.set_ylim(min(0, min(p.y for p in drawn.all)), drawn.top)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if kind_of(y) == "bytes":
        axes.set_yticks(round_bytes(drawn.top))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    for axis, name in ((axes.xaxis, x), (axes.yaxis, y)):
        human = partial(shown, kind=kind_of(name))
        axis.set_major_formatter(FuncFormatter(lambda value, _, human=human: tick(value, human)))
    axes.grid(color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _limit(axes: Axes, drawn: _Drawing, y: str) -> None:
    """The limit as a line, if it is below the top of the axis; the number of rows above the top."""
    if drawn.limit is None or drawn.limit > drawn.top:
        return
    axes.axhspan(drawn.limit, drawn.top, color=PALE, alpha=0.4, lw=0, zorder=0)
    axes.axhline(drawn.limit, color=RED, lw=1)
    kind = kind_of(y)
    texts = [(drawn.limit, f"limit {shown(drawn.limit, kind)}", "bottom", 3)]
    above = [point.y for point in drawn.all if point.y > drawn.top]
    if above:
        text = f"{len(above):,} more above, up to {shown(max(above), kind)}"
        texts.append((drawn.top, text, "top", -3))
    for height, text, side, offset in texts:
        axes.annotate(
            text,
            (0.995, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, offset),
            textcoords="offset points",
            ha="right",
            va=side,
            color=RED,
            fontsize=8.5,
        )


def _numbers(axes: Axes, listed: Sequence[Point]) -> None:
    """Number the points, each where it covers no other number; a point without such a place has none."""
    taken: list[tuple[float, float]] = []
    for number, point in enumerate(listed, 1):
        x, y = axes.transData.transform((point.x, point.y)) / axes.figure.dpi * 72
        for dx, dy in ((6, 5), (-12, -12), (6, -12), (-12, 5), (6, 17), (-12, -24)):
            if all(abs(x + dx - a) > 14 or abs(y + dy - b) > 11 for a, b in taken):
                taken.append((x + dx, y + dy))
                axes.annotate(
                    str(number),
                    (point.x, point.y),
                    xytext=(dx, dy),
                    textcoords="offset points",
                    fontsize=9,
                    weight="bold",
                    bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.6},
                )
                break


def _list(figure: Figure, drawn: _Drawing, x: str, y: str) -> None:
    """The points of the frontier as a list, at the right."""
    panel = blank(figure, (0.635, 0.05, 0.355, 0.88))
    fitting = sum(point.feasible for point in drawn.all)
    which = " that fit" if drawn.limit is not None and fitting else ""
    if drawn.limit is not None and not fitting:
        which = " (none fits)"
    count = fitting if fitting else len(drawn.all)
    head = f"{len(drawn.best):,} of {count:,}{which} are not beaten in both"
    panel.text(0, 0.975, head, weight="bold", va="center")
    for number, point in enumerate(drawn.listed, 1):
        at = 0.975 - 0.075 * number
        values = f"{shown(point.x, kind_of(x))}, {shown(point.y, kind_of(y))}"
        panel.text(0.045, at, str(number), weight="bold", ha="right", va="center")
        panel.text(0.065, at, values, va="center")
        panel.text(
            0.065, at - 0.033, shorter(point.name, 64), va="center", fontsize=8.4, color=GREY
        )


def points(rows: Sequence[Row], x: str, y: str, limit: float | None = None) -> list[Point]:
    """The rows that have numbers for x and y. Other rows are points of the sweep that failed."""
    kept = [row for row in rows if _is_number(row.get(x)) and _is_number(row.get(y))]
    if not kept:
        known = ", ".join(f"`{key}`" for key in (rows[0] if rows else ())) or "none"
        raise PictureError(
            f"There is nothing to draw: none of {len(rows)} rows has numbers for `{x}` and `{y}`. "
            f"The columns of the first row: {known}. Name two of them as x and y."
        )
    keys = [key for key in kept[0] if key not in (x, y) and _varies(kept, key)]
    return [
        Point(
            float(row[x]),
            float(row[y]),
            ", ".join(f"{key} {_value(row.get(key))}" for key in keys),
            limit is None or float(row[y]) <= limit,
        )
        for row in kept
    ]


def frontier(found: Sequence[Point], more: bool = False) -> list[Point]:
    """The Pareto frontier: points that no other one dominates, from the best x to the least y.

    more: whether more of x is better, as of a throughput.
    """
    best: list[Point] = []
    for point in sorted(found, key=lambda p: (-p.x if more else p.x, p.y)):
        if not best or point.y < best[-1].y:
            best.append(point)
    return best


def kind_of(name: str) -> str:
    """The kind of a column by its name: `bytes`, `seconds` or `number`."""
    words = set(name.lower().replace("_", " ").split())
    if words & {"seconds", "time"}:
        return "seconds"
    return "bytes" if words & _BYTES else "number"


def shown(value: float, kind: str) -> str:
    """A number as text with the unit of its kind."""
    if kind == "bytes":
        return human_bytes(value)
    if kind == "seconds":
        return human_seconds(value)
    return f"{value:,.6g}" if value < 100 or value == int(value) else f"{value:,.0f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _varies(rows: Sequence[Row], key: str) -> bool:
    """Whether a column is an axis of the sweep: not a measurement, and with more than one value."""
    if kind_of(key) != "number" or isinstance(rows[0].get(key), float):
        return False
    return len({str(row.get(key)) for row in rows}) > 1


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
