"""The sizes of arguments that vary from call to call, as symbols.

    symbols = Symbols.of([((4, 8), (4, 8)), ((4, 12), (4, 12)), ((4, 20), (4, 20))], ["x", "y"])
    symbols.names                             ("size 1 of `x`",): s0
    symbols.sizes_of(((4, 37), (4, 37)))      (37,)
    symbols.sizes_of(((4, 37), (4, 36)))      "size 1 of `y` is 36, was equal to size 1 of `x`, which is 37"

Invariant: a call has sizes only if everything that was alike in the compared calls is alike in it: sizes that were
constant, sizes that were equal, and which sizes are 0 or 1, which torch treats in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from functionalize.templates.fitting import Sizes

Shapes = Sequence[Sequence[int]]  # of the tensors among the arguments of one call


@dataclass(frozen=True, slots=True)
class Symbols:
    """names: of the symbols, `s0` first. places: for each size, the number of its symbol, or -1 and its constant."""

    names: tuple[str, ...]
    places: tuple[tuple[str, int, int], ...]

    @staticmethod
    def of(calls: Sequence[Shapes], tensors: Sequence[str]) -> Symbols:
        """The symbols of several calls. tensors: the name of each tensor."""
        columns: dict[Sizes, int] = {}
        names: list[str] = []
        places: list[tuple[str, int, int]] = []
        labels = [name for name, _ in _sizes(calls[0], tensors)]
        for label, *column in zip(labels, *(_flat(shapes) for shapes in calls), strict=True):
            if len(set(column)) == 1:
                places.append((label, -1, column[0]))
                continue
            number = columns.setdefault(tuple(column), len(columns))
            if number == len(names):
                names.append(label)
            places.append((label, number, 0))
        return Symbols(tuple(names), tuple(places))

    def sizes_of(self, shapes: Shapes) -> Sizes | str:
        """The value of each symbol in a call; text: in what the call is of another kind."""
        return self._values(self.places, _flat(shapes), len(self.names))

    def first_of(self, shapes: Shapes, count: int) -> Sizes | str:
        """The same of the first symbols alone. shapes: of the first tensors, which have these."""
        sizes = _flat(shapes)
        return self._values(self.places[: len(sizes)], sizes, count)

    def _values(
        self, places: Sequence[tuple[str, int, int]], sizes: Sequence[int], count: int
    ) -> Sizes | str:
        found: dict[int, int] = {}
        for (label, symbol, constant), size in zip(places, sizes, strict=True):
            if symbol < 0 and size != constant:
                return f"{label} is {size}, was always {constant}"
            if symbol >= 0 and found.setdefault(symbol, size) != size:
                first = f"{self.names[symbol]}, which is {found[symbol]}"
                return f"{label} is {size}, was equal to {first}"
            if symbol >= 0 and size < 2:
                return f"{label} is {size}"
        return tuple(found[number] for number in range(count))

    def values_in(self, shapes: Shapes) -> Sizes:
        """The sizes in the places of the symbols in any call, also of another kind."""
        found: dict[int, int] = {}
        for (_, symbol, _), size in zip(self.places, _flat(shapes), strict=True):
            found.setdefault(symbol, size)
        return tuple(found[number] for number in range(len(self.names)))


def _sizes(shapes: Shapes, tensors: Sequence[str]) -> Iterator[tuple[str, int]]:
    for name, shape in zip(tensors, shapes, strict=True):
        for dim, size in enumerate(shape):
            yield f"size {dim} of `{name}`", size


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]
