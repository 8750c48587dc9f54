"""Live numbers that outlive their recording: plain ones take their places, whoever holds them.

    outliving(log, leaves)                         after the step: these numbers, which are no leaves of its result
    settle_escaped(log, leaves)                    they become constants of the program, too
    replace_escaped(log)                           after an exception, or when the result is plain

Invariant: dicts, lists, sets, cells and attributes hold what eager leaves there, other tuples in place of those that
hold a live number among it. Objects of C code keep a live number, which behaves as a constant from then on.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

from functionalize.scalars.live_scalars import left_behind
from functionalize.scalars.scalar_log import ScalarLog

_MOST_NESTED = 3  # tuples


def outliving(log: ScalarLog, leaves: Sequence[Any]) -> list[Any]:
    """The live numbers that exist still, other than as `leaves` of the result."""
    held = set(map(id, leaves))
    if log.escaped(held):
        gc.collect()  # some may be garbage in cycles
    return log.escaped(held)


def settle_escaped(log: ScalarLog, leaves: Sequence[Any]) -> None:
    """Make constants of the live numbers that outlive their recording other than as `leaves` of the result.

    A closure, an object of C code or a queue holds them: a replay returns or leaves this object as it is.
    """
    late = outliving(log, leaves)
    for number in late:
        log.learn_late(number.node)
    _replace_by_plain(late)


def replace_escaped(log: ScalarLog | None) -> None:
    """Put plain numbers in the places of all live ones of a recording that exist still. None: it has none."""
    if log is not None:
        _replace_by_plain(log.escaped(()))


def _replace_by_plain(live: Sequence[Any]) -> None:
    """Put plain numbers in the places of live ones: in dicts, lists, cells and attributes, whoever holds them."""
    _replace(live, {id(number): left_behind(number) for number in live}, _MOST_NESTED)


def _replace(live: Sequence[Any], wanted: dict[int, Any], depth: int) -> None:
    """Put others in the places of objects. wanted: by the ids of these. depth: of tuples around them."""
    if not live:
        return
    tuples: list[Any] = []
    for holder in gc.get_referrers(*live):
        kind = type(holder)
        if kind is tuple and depth and holder is not live:
            tuples.append(holder)
            continue
        if kind is types.CellType:
            holder.cell_contents = wanted.get(id(holder.cell_contents), holder.cell_contents)
        elif issubclass(kind, (list, deque)) and holder is not live:
            for i, value in enumerate(list(holder)):
                if id(value) in wanted:
                    holder[i] = wanted[id(value)]
        elif kind is set:
            members = [wanted.get(id(each), each) for each in holder]
            holder.clear()
            holder.update(members)
        elif issubclass(kind, dict):
            _replace_in(holder, wanted)
        elif isinstance(getattr(holder, "__dict__", None), dict):
            _replace_in(vars(holder), wanted)

    if tuples:
        others = [tuple(wanted.get(id(each), each) for each in old) for old in tuples]
        _replace(tuples, dict(zip(map(id, tuples), others, strict=True)), depth - 1)


def _replace_in(table: dict[Any, Any], wanted: dict[int, Any]) -> None:
    for key, value in list(dict.items(table)):
        if id(value) in wanted:
            dict.__setitem__(table, key, wanted[id(value)])
