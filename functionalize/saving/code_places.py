"""Lines of the live step's code by names, for what a replay says of where it was made: a warning, a log record.

    places = CodePlaces(names)
    places.name("train.py", 12)                  ("train:step", 0, 48): the instruction at 48 of that function
    places.line("train:step", 0, 48)             Line("train.py", 12, "step", "train")

The digest of a step's code (fingerprint.py) leaves out the numbers of lines, so a file has the position of an
instruction, and the line is that of the code here.
Invariant: what is returned is read from code objects that the live step reaches: Python's `linecache`, and the handlers
of a script, open the file that a warning or a record names.
Refusals: `SaveError` for a line of no such code (that of the loop around the step, by `stacklevel`); `LoadError` for a
name without code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from functionalize.errors import LoadError, SaveError
from functionalize.saving.fingerprint import reached_functions
from functionalize.saving.object_names import Names
from functionalize.util.packages import home_of
from functionalize.walk.code_names import codes_of

# (name of a function, index among those of this name, position of an instruction)
CodeName = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of code. module: the name of that in which the function was defined."""

    file: str
    line: int
    function: str
    module: str


class CodePlaces:
    """The code that a walk has found, by name."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[str, list[tuple[CodeType, str]]] | None = None

    @property
    def _codes(self) -> dict[str, list[tuple[CodeType, str]]]:
        """By name, code and its module; made when it is asked for."""
        if self._found is None:
            self._found = {}
            seen: set[int] = set()
            for function in reached_functions(self._names.roots):
                module = function.__globals__.get("__name__")
                module = module if type(module) is str else ""
                for code in codes_of(function.__code__):
                    if id(code) not in seen:
                        seen.add(id(code))
                        name = f"{home_of(module)}:{code.co_qualname}"
                        self._found.setdefault(name, []).append((code, module))
        return self._found

    def name(self, file: str, line: int, function: str | None = None) -> CodeName:
        """The name of a line. function: of which it is, if that is known. Raises `SaveError`."""
        for name, codes in self._codes.items():
            for i, (code, _) in enumerate(codes):
                if code.co_filename == file and function in (None, code.co_name):
                    for start, _, number in code.co_lines():
                        if number == line:
                            return name, i, start
        raise SaveError(
            f"warns or logs as {file}:{line}, which is no line of the code that the step reaches by itself: leave out "
            "the `stacklevel`, or call it from a function that is a global, a method or a closure of the step"
        )

    def line(self, *name: Any) -> Line:
        """The line of a name; raises `LoadError`."""
        for code, module, number in self._lines(name):
            return Line(code.co_filename, number, code.co_name, module)
        raise LoadError("warns or logs as a line of code that the step does not reach: damaged")

    def _lines(self, name: tuple[Any, ...]) -> Iterator[tuple[CodeType, str, int]]:
        if tuple(map(type, name)) != (str, int, int):
            return
        function, i, at = name
        codes = self._codes.get(function, [])
        if 0 <= i < len(codes):
            code, module = codes[i]
            for start, end, number in code.co_lines():
                if start <= at < end and number is not None:
                    yield code, module, number
