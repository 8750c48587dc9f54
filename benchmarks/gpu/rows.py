"""Predictions, what was measured, and whether they agree: one row for each fact, and the table of them.

    rows = Rows("facts", predictions, path)
    with rows.guarded("AdamW, fused: peak"):       an exception becomes a row with its words
        rows.add("AdamW, fused: peak", 4096)

    {"part": "facts", "fact": "AdamW, fused: peak", "predicted": 4096, "measured": 4096, "unit": "bytes",
     "agrees": true, "note": ""}

`agrees` is null where nothing was predicted or nothing was measured. A row is written as soon as it is known: what a
process has measured before it crashes or is stopped is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RULES = {
    "equal": lambda predicted, measured: predicted == measured,
    "at least": lambda predicted, measured: measured >= predicted,
    "at most": lambda predicted, measured: measured <= predicted,
}


@dataclass(frozen=True)
class Prediction:
    """A claimed value. rule: which measured values agree with it, a key of `RULES`. error: why there is none."""

    value: Any
    unit: str = ""
    rule: str = "equal"
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One fact. note: the error where nothing was measured, else what helps to read the row."""

    part: str
    fact: str
    predicted: Any
    measured: Any
    unit: str = ""
    agrees: bool | None = None
    note: str = ""


class Rows:
    """The rows of one part; each is appended to a file of JSON lines."""

    def __init__(self, part: str, predictions: Mapping[str, Prediction], path: Path) -> None:
        self.part, self._predictions, self._path = part, predictions, path

    def add(self, fact: str, measured: Any, unit: str = "", note: str = "") -> None:
        """A fact that was measured."""
        claim = self._predictions.get(fact)
        if claim is None or claim.error:
            why = "; ".join(filter(None, (note, claim.error if claim is not None else "")))
            self._write(Row(self.part, fact, None, measured, unit or _unit(claim), None, why))
            return
        agrees = bool(RULES[claim.rule](claim.value, measured))
        rule = "" if claim.rule == "equal" else f"claimed: {claim.rule}"
        note = "; ".join(filter(None, (rule, note)))
        self._write(Row(self.part, fact, claim.value, measured, claim.unit, agrees, note))

    def failed(self, fact: str, why: str) -> None:
        """A fact that could not be measured."""
        claim = self._predictions.get(fact)
        predicted = claim.value if claim is not None else None
        self._write(Row(self.part, fact, predicted, None, _unit(claim), None, why))

    @contextmanager
    def guarded(self, fact: str) -> Iterator[None]:
        """An exception inside of the `with` becomes a row."""
        try:
            yield
        except Exception as error:
            self.failed(fact, words(error))

    def _write(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _unit(claim: Prediction | None) -> str:
    return claim.unit if claim is not None else ""


def words(error: BaseException, most: int = 300) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:most]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; a last line that a crash has cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            break
    return found


def table(rows: Sequence[Row], every: bool = False) -> str:
    """How many rows of each part agree, and the rows that do not. every: all rows."""
    lines = []
    for part in dict.fromkeys(row.part for row in rows):
        of_part = [row for row in rows if row.part == part]
        claimed = [row for row in of_part if row.agrees is not None]
        lost = sum(row.measured is None for row in of_part)
        lines.append(
            f"{part}: {sum(bool(row.agrees) for row in claimed)} of {len(claimed)} predictions agree, "
            f"{len(of_part) - len(claimed) - lost} figures without one, {lost} not measured"
        )
        shown = [row for row in of_part if every or not row.agrees]
        wide = max((len(row.fact) for row in shown), default=0)
        for row in shown:
            mark = {True: "agrees", False: "DIFFERS", None: ""}[row.agrees]
            if row.measured is None:
                mark = "NOT MEASURED"
            figures = f"{_text(row.predicted, row.unit):>16}  {_text(row.measured, row.unit):>16}"
            line = f"  {row.fact:<{wide}}  {figures}  {mark:<12}  {row.note}"
            lines.append(line.rstrip())
    head = "part, and below it: fact, predicted, measured" + (
        "" if every else " (rows that agree are left out: --all)"
    )
    return "\n".join([head, *lines])


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:.3f} ms"
    number = isinstance(value, int) and not isinstance(value, bool)
    text = f"{value:,}" if number else str(value)
    return f"{text} {unit}".strip()
