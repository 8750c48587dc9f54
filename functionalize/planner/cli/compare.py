"""`compare`: two plans, or two reports on memory, side by side: files that `plan --json` and `memory --json` printed.

    functionalize plan train.py --world 64 --json > a.json
    functionalize compare a.json b.json          figure, first, second, change; a table for each point

Points with the same keys are compared; where each file has one point, these two, whatever their keys.
Refuses (`UsageError`): a file that cannot be read, is none of these, or is of the other kind than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from functionalize.errors import UsageError
from functionalize.planner.cli.console import Out, plain, table
from functionalize.planner.machines.files import read_json
from functionalize.planner.sweep.summary import COLUMNS
from functionalize.planner.timeline.timeline import EAGER
from functionalize.util.text import human_bytes

_KINDS = {"points": "plan", "timelines": "memory"}
_OF_TIMELINE = ("levels", "by_category")
_SHOWN = {name: (head, show) for name, head, show in COLUMNS if name != "planned in"}


class _Pair(NamedTuple):
    """Two figures of the same name; None where a file has none. show: a figure as text."""

    name: str
    first: float | None
    second: float | None
    show: Callable[[Any], str]

    @property
    def change(self) -> float | None:
        """The second over the first, less 1; None where that is no number."""
        if self.first is None or self.second is None or not self.first:
            return None
        return self.second / self.first - 1

    def cells(self) -> tuple[str, str, str, str]:
        """The row of a table."""
        first, second = (
            self.show(each) if each is not None else "" for each in (self.first, self.second)
        )
        change = self.change
        if change is None:
            return self.name, first, second, ""
        return self.name, first, second, f"{change:+.1%}" if abs(change) >= 0.0005 else "same"


class _Compared(NamedTuple):
    """What is compared: a point, or a timeline. differing: keys that the files have different values of."""

    title: str
    pairs: list[_Pair]
    differing: list[str]


def side_by_side(out: Out, first: str, second: str) -> int:
    """Print two plans, or two reports, side by side; return exit code 1 if they have no point in common."""
    files = first, second
    one, other = _read(first), _read(second)
    kinds = [next(name for key, name in _KINDS.items() if key in each) for each in (one, other)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{first} is of `{kinds[0]} --json` and {second} of `{kinds[1]} --json`: compare two of one kind"
        )
    if kinds[0] == "plan":
        found, alone = _points(one, other)
    else:
        found, alone = list(_timelines(one, other)), ([], [])

    def data() -> dict[str, Any]:
        return {
            "files": files,
            "compared": [
                {
                    "what": each.title,
                    "differing": each.differing,
                    "figures": {
                        p.name: {"first": p.first, "second": p.second, "change": p.change}
                        for p in each.pairs
                    },
                }
                for each in found
            ],
            "only in the first": alone[0],
            "only in the second": alone[1],
        }

    def show(console: Console) -> None:
        for each in found:
            plain(console, each.title)
            for line in each.differing:
                plain(console, f"  {line}", "dim")
            table(console, ("", *map(_stem, files), "change"), [p.cells() for p in each.pairs])
        for file, points in zip(files, alone, strict=True):
            for point in points:
                plain(console, f"only in {file}: {point}")

    out.emit(data, show)
    return int(not found)


def _read(file: str) -> Mapping[str, Any]:
    """The content of a file that `plan --json` or `memory --json` printed."""
    found = read_json(file, UsageError)
    if not isinstance(found, dict) or not any(key in found for key in _KINDS):
        raise UsageError(f"{file} is not what `plan --json` or `memory --json` prints")
    if "points" in found and "keys" not in found:
        raise UsageError(f"{file} does not name its keys: write it again with `plan --json`")
    if not (_is_plan(found) if "points" in found else _is_report(found)):
        kind = next(name for key, name in _KINDS.items() if key in found)
        raise UsageError(
            f"{file} has other fields than what `{kind} --json` prints: write it again"
        )
    return found


def _is_plan(found: Mapping[str, Any]) -> bool:
    """Whether every point has its keys, and numbers for its figures."""
    keys, rows = found["keys"], found["points"]
    return (
        isinstance(keys, list)
        and isinstance(rows, list)
        and "script" in found
        and all(
            isinstance(row, dict)
            and {*map(str, keys)} <= row.keys()
            and _are_numbers({name: row.get(name, 0) for name in _SHOWN})
            and _are_numbers(row.get("categories", {}))
            for row in rows
        )
    )


def _is_report(found: Mapping[str, Any]) -> bool:
    """Whether every timeline has the bytes of its levels and categories."""
    timelines = found["timelines"]
    return (
        isinstance(timelines, dict)
        and {"source", "world", "target"} <= found.keys()
        and all(
            isinstance(each, dict) and all(map(_are_numbers, map(each.get, _OF_TIMELINE)))
            for each in timelines.values()
        )
    )


def _are_numbers(found: Any) -> bool:
    """Whether it maps names to numbers, or to nothing."""
    numbers = (int, float, type(None))
    return isinstance(found, dict) and all(isinstance(each, numbers) for each in found.values())


def _stem(file: str) -> str:
    return Path(file).stem


# -- plans -----------------------------------------------------------------------------------------


def _points(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[list[_Compared], tuple[list[str], list[str]]]:
    """The points in both plans, and the names of those that are in one."""
    firsts, seconds = _by_key(one), _by_key(other)
    kinds = {_items(one), _items(other)}
    items = kinds.pop() if len(kinds) == 1 else "items"
    if len(firsts) == len(seconds) == 1:
        pairs = [(*firsts.values(), *seconds.values())]
    else:
        pairs = [(row, seconds[key]) for key, row in firsts.items() if key in seconds]
    found = []
    for a, b in pairs:
        keys = [*dict.fromkeys([*one["keys"], *other["keys"]])]
        same = [f"{key} {a[key]}" for key in keys if key in a and a.get(key) == b.get(key)]
        source = one["script"] if one["script"] == other["script"] else "two scripts"
        differing = [
            f"{key}: {a.get(key, '-')} -> {b.get(key, '-')}"
            for key in keys
            if a.get(key) != b.get(key)
        ]
        differing += [f"error: {row['error']}" for row in (a, b) if "error" in row]
        made = [
            _Pair(head.replace("items", items), a.get(name), b.get(name), show)
            for name, (head, show) in _SHOWN.items()
            if a.get(name) is not None or b.get(name) is not None
        ]
        found.append(_Compared(", ".join([source, *same]), made, differing))
    paired = {id(row) for pair in pairs for row in pair}
    alone = [
        [key for key, row in rows.items() if id(row) not in paired] for rows in (firsts, seconds)
    ]
    return found, (alone[0], alone[1])


def _items(plan: Mapping[str, Any]) -> str:
    """What a plan's steps train on."""
    return str(plan.get("items", "items"))


def _by_key(plan: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The points of a plan by their keys, as text."""
    keys: Sequence[str] = sorted(plan["keys"])
    return {", ".join(f"{key} {row[key]}" for key in keys): row for row in plan["points"]}


# -- reports on memory -----------------------------------------------------------------------------


def _timelines(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[_Compared]:
    """The timelines in both reports: levels, then the categories of the peak."""
    about = [f"{each['source']}: {each['world']}, target {each['target']}" for each in (one, other)]
    for name, a in one["timelines"].items():
        b = other["timelines"].get(name)
        if b is None:
            continue
        pairs = [_bytes(level, a["levels"], b["levels"]) for level in a["levels"]]
        if name == EAGER and (one.get("host") or other.get("host")):
            pairs.append(_bytes("host", one, other))
        categories = dict.fromkeys([*a["by_category"], *b["by_category"]])
        pairs += [_bytes(each, a["by_category"], b["by_category"]) for each in categories]
        differing = [f"{about[0]} -> {about[1]}"] if about[0] != about[1] else []
        yield _Compared(
            f"peak of {name}" + ("" if differing else f", {about[0]}"), pairs, differing
        )


def _bytes(name: str, a: Mapping[str, int], b: Mapping[str, int]) -> _Pair:
    return _Pair(name, a.get(name), b.get(name), human_bytes)
