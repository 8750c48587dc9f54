"""Whether tensors on one storage relate to each other as in the recordings, asked at every replay.

    known = WindowRelations(whole)        of the op streams of a class
    known.hold((37, 12))                  at these sizes; remembered for each storage, as few sizes move its windows

Torch and the engine decide by such relations, see `lengths/relations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from functionalize.lengths.relations import relations
from functionalize.lengths.signature_template import SignatureTemplate, value_at
from functionalize.templates.fitting import Sizes

_MOST = 4096  # sizes that are remembered


@dataclass(slots=True)
class _Storage:
    """A storage with several windows, or one whose layout depends on sizes. symbols: those of its windows."""

    functions: list[Any]
    related: Any
    symbols: tuple[int, ...]
    known: set[Sizes] = field(default_factory=set)

    def holds(self, sizes: Sizes) -> bool:
        own = tuple([sizes[symbol] for symbol in self.symbols])
        if own in self.known:
            return True
        windows: list[Any] = [value_at(each, sizes) for each in self.functions]
        if relations(windows) != self.related:
            return False
        if len(self.known) < _MOST:
            self.known.add(own)
        return True


class WindowRelations:
    """Those of the storages that windows share at all sizes."""

    def __init__(self, whole: SignatureTemplate) -> None:
        self._storages = []
        for windows, related in zip(whole.storages, whole.related, strict=True):
            if len(windows) > 1 or not whole.layout_is_known(windows[0]):
                functions: list[Any] = [whole.functions[number] for number in windows]
                symbols = {n for _, formulas in functions for f in formulas for n in f.symbols}
                self._storages.append(_Storage(functions, related, tuple(sorted(symbols))))

    def hold(self, sizes: Sizes) -> bool:
        """Whether they are as in the recordings."""
        return all(each.holds(sizes) for each in self._storages)
