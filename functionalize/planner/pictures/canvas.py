"""The figure of a picture: a context manager that saves it on exit.

    with Canvas("memory.png", 12, 5.6) as figure: ...

matplotlib is imported on entering a `Canvas`, and its settings are restored on exit. Only `Figure` is used, not
`pyplot`: no global state, no window, no choice of a backend. The same drawing results in the same file.
Refuses: a file name that does not end in `.png`, `.svg` or `.pdf`; matplotlib not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functionalize.errors import PictureError
from functionalize.util.text import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

INK, GREY, RED = "#1c1c1c", "#6a6a6a", "#c00032"
# Columns of a picture at most: more than a printed page resolves, few enough for a small SVG.
COLUMNS = 900
_FAR = 3  # times as high as what is drawn: an axis up to there would flatten the rest
_SUFFIXES = (".png", ".svg", ".pdf")
_STYLE: Any = {  # matplotlib types every key of its settings
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.parse_math": False,  # names may contain a $
    "axes.edgecolor": "#9a9a9a",
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",  # text stays text: the file is small and can be searched
    "svg.hashsalt": "functionalize",
}


def upper_end(own: int, others: Iterable[int]) -> int:
    """How high an axis goes. own: of what is shown by category. others: of lines, which may leave the picture."""
    return max([own, *(each for each in others if each <= _FAR * own)])


class Canvas:
    """A figure in the style of this package, saved on exit unless the block raised. width, height: inches."""

    def __init__(self, path: str | Path, width: float, height: float) -> None:
        self.path, self.size = Path(path), (width, height)

    def __enter__(self) -> Figure:
        if self.path.suffix.lower() not in _SUFFIXES:
            raise PictureError(
                f"{self.path} cannot be drawn: a picture is {', '.join(_SUFFIXES)} by the name of its file. "
                "Give the path one of these endings, or write an HTML page with write_page."
            )
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise PictureError(
                f"{self.path} cannot be drawn: pictures need matplotlib, which is not installed. "
                'Run pip install "functionalize[plots]", or write an HTML page with write_page.'
            ) from error
        self.context = matplotlib.rc_context(_STYLE)
        self.context.__enter__()
        self.figure = Figure(figsize=self.size, facecolor="white")
        return self.figure

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                plain = {"Date": None} if self.path.suffix.lower() == ".svg" else None
                self.figure.savefig(self.path, dpi=150, metadata=plain)
        finally:
            self.context.__exit__(None, None, None)


def blank(figure: Figure, place: tuple[float, float, float, float]) -> Axes:
    """A part of a figure for text: from 0 to 1 in both directions, without a frame."""
    panel = figure.add_axes(place)
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1)
    panel.axis("off")
    return panel


def shorter(text: str, width: int) -> str:
    """The text; if it is longer than `width`, its start and end with an ellipsis between them."""
    return (
        text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[len(text) - width // 2 :]}"
    )


def round_bytes(top: float) -> list[float]:
    """Four to nine tick positions up to `top`, at multiples of a power of two."""
    step = 1.0
    while top / step > 8:
        step *= 2
    return [i * step for i in range(int(top / step) + 1)]


def tick(value: float, human: Callable[[float], str] = human_bytes) -> str:
    """The label of a tick, without trailing zeros. human: formats the number with its unit."""
    text = human(value)
    number, space, unit = text.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number}{space}{unit}"


def swatch(y: float, colour: str, size: float = 1.0) -> Rectangle:
    """A colour patch of the legend, at height `y` of its panel."""
    from matplotlib.patches import Rectangle

    width, height = 0.05 * size, 0.026 * size
    return Rectangle((0.025 - width / 2, y - height / 2), width, height, color=colour, lw=0)
