"""What the figures of a page share: numbers in plotly's encoding, hover texts, fonts and margins."""

from __future__ import annotations

import base64
import html
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from functionalize.planning.pictures.canvas import INK

LAYOUT: Mapping[str, Any] = {
    "template": "none",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
    "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
    "dragmode": "zoom",
    "hoverlabel": {"align": "left", "namelength": -1},
}

Figure = dict[str, Any]
Trace = dict[str, Any]


def column(values: Iterable[float], kind: str = "d") -> dict[str, str]:
    """Numbers in plotly's binary encoding: float64 (`d`) or int32 (`i`), little-endian, base64."""
    numbers = array(kind, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    dtype = {"d": "f8", "i": "i4"}[kind]
    return {"dtype": dtype, "bdata": base64.b64encode(numbers.tobytes()).decode()}


def hover_lines(lines: Iterable[str]) -> str:
    """The lines of a hover text. plotly interprets HTML tags in texts, so that names and code are escaped."""
    first, *rest = (html.escape(line, quote=False) for line in lines)
    return "<br>".join([f"<b>{first}</b>", *rest])
