"""The guards of a recorded program on sizes that are known late, and the symbols of these sizes.

    late_guards(program)        one for each size of a result that was counted and does not follow from arguments
    late_places(symbols, 3)     their places among the symbols, in the same order; 3: how many there are
    first_late(symbols)         the number of the first symbol that is known late

In the key of a recording its late sizes stand at the end (`with_late_sizes`), so their symbols are the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from functionalize.ir.guards import ValueGuard
from functionalize.program.early_guard import A_SIZE
from functionalize.program.executable import Executable
from functionalize.templates.call_keys import LATE
from functionalize.templates.symbols import Symbols


def late_guards(program: Executable) -> list[ValueGuard]:
    """The guards on sizes of results that are known only while the graph runs."""
    return [guard for guard in program.value_guards if guard.what == A_SIZE]


def late_places(symbols: Symbols, count: int) -> Sequence[tuple[str, int, int]]:
    """For each of the last sizes: its name, the number of its symbol, or -1 and its constant."""
    return symbols.places[len(symbols.places) - count :]


def first_late(symbols: Symbols) -> int:
    """The number of the first symbol that is known late; of none: the number of all symbols."""
    late = (n for n, name in enumerate(symbols.names) if name.endswith(f"`{LATE}`"))
    return next(late, len(symbols.names))
