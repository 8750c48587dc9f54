"""How a stream runs: one by one when it is new, as a program from its second time on.

    runs = Runs(passes, max_programs)
    runs.run(stream)          computes what is pending; returns what it was: a `Kind`

Two streams are of one kind if their ops, constants, sizes and aliases are equal, and the same results are held: one
dictionary of keys finds it, which compares the keys on a hit. Floats that change are inputs of the program of a kind
(`numbers.py`). Invariant: each stream runs once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.deferral.compiled import Compiled, NotRun
from functionalize.deferral.interpreted import run_one_by_one
from functionalize.deferral.numbers import Numbers
from functionalize.deferral.stream import Stream
from functionalize.errors import FunctionalizeError
from functionalize.util.user_stack import line_of

_KINDS_PER_PROGRAM = 4  # kinds without a program that are remembered


@dataclass(slots=True, eq=False)
class Kind:
    """Streams that are alike. number: in the order of discovery. ops: of one stream. line: of its first op.

    runs: how many streams there were. replays: those that a program ran. refused: why no program can be made.
    differs: how it differs from the kind found before it that it shares most with. numbers: its floats.
    """

    number: int
    ops: int
    line: str
    differs: str
    numbers: Numbers
    runs: int = 0
    replays: int = 0
    refused: str | None = None
    compiled: Compiled | None = None


class Runs:
    """The kinds of streams met so far, and the program of each that came twice. compiles: programs made."""

    def __init__(self, pipeline: Sequence[Any], max_programs: int) -> None:
        self.compiles = 0
        self._pipeline, self._max = pipeline, max_programs
        self._kinds: OrderedDict[Any, Kind] = OrderedDict()
        self._found = 0

    def kinds(self) -> list[Kind]:
        """Those that are remembered, in the order of discovery."""
        return sorted(self._kinds.values(), key=lambda kind: kind.number)

    def run(self, stream: Stream) -> Kind | None:
        """Run a stream. None: nobody held what it computes, so nothing ran."""
        living = stream.living()
        if not living:
            return None
        key = self._key(stream, living)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._new(key, stream)
        self._kinds.move_to_end(key)
        kind.runs += 1
        if kind.runs > 1 and kind.numbers.compare(stream.entries):
            kind.compiled = None
        if kind.runs > 1 and kind.compiled is None and kind.refused is None:
            self._compile(kind, stream, living)
        if kind.compiled is not None:
            try:
                kind.compiled.run(stream)
                kind.replays += 1
                return kind
            except NotRun:
                pass  # the op that raised raises again below, with everything before it done
        run_one_by_one(stream, living)
        return kind

    def _key(self, stream: Stream, living: tuple[int, ...]) -> Any:
        elements = tuple([entry.element for entry in stream.entries])
        return elements, tuple(stream.externals()), living, stream.settings

    def _new(self, key: Any, stream: Stream) -> Kind:
        line = line_of(stream.entries[0].record.traceback)
        differs, numbers = self._difference(key, stream), Numbers(stream.entries)
        kind = Kind(self._found, stream.ops, line, differs, numbers)
        self._found += 1
        self._kinds[key] = kind
        if len(self._kinds) > self._max * _KINDS_PER_PROGRAM:
            self._kinds.popitem(last=False)
        return kind

    def _compile(self, kind: Kind, stream: Stream, living: tuple[int, ...]) -> None:
        try:
            kind.compiled = Compiled.of(stream, living, kind.numbers, self._pipeline)
        except FunctionalizeError as error:
            kind.refused = str(error)
            return
        self.compiles += 1
        programs = [each for each in self._kinds.values() if each.compiled is not None]
        for each in programs[: len(programs) - self._max]:
            each.compiled = None

    def _difference(self, key: Any, stream: Stream) -> str:
        """How a new stream differs from the known one with which it has most ops in common."""
        best, kind = -1, None
        for other, known in self._kinds.items():
            same = _common(key[0], other[0])
            if same > best:
                best, kind, found = same, known, other
        if kind is None or best == 0:
            return "the first that begins so"
        if best < min(len(key[0]), len(found[0])):
            record = stream.entries[best].record
            return (
                f"differs from {kind.number} from {record.target} on, {line_of(record.traceback)}"
            )
        if len(key[0]) != len(found[0]):
            longer = "longer" if len(key[0]) > len(found[0]) else "shorter"
            return f"is {kind.number} and {longer}"
        for part, text in ((1, "other storages from outside"), (2, "other results are held")):
            if key[part] != found[part]:
                return f"is {kind.number}, but {text}"
        return f"is {kind.number} under other settings of torch"


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
