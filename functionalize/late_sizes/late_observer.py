"""A recorded run in which Python is observed, and whose computed sizes become known one after the other.

    observer = LateObserver(whole, symbols, (37,), (True,))       37: the size of the arguments
    recorder.checks.sizes.counted = observer.counted
    with observer: ...

Invariant: a size that has a value of its own among those known at this moment is live, others that Python asks for lose
the run, see `lengths/observed_sizes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from functionalize.late_sizes.late_guards import late_places
from functionalize.lengths.observed_sizes import ObservedSizes
from functionalize.lengths.signature_template import SignatureTemplate
from functionalize.templates.fitting import Sizes
from functionalize.templates.symbols import Symbols


class LateObserver(ObservedSizes):
    """sizes: of the arguments. is_late: for each size of a result that is counted, whether it is known late."""

    def __init__(
        self, whole: SignatureTemplate, symbols: Symbols, sizes: Sizes, is_late: Sequence[bool]
    ) -> None:
        super().__init__(whole.known_at(sizes))
        self._whole, self._sizes = whole, [*sizes]
        self._counts = iter(is_late)
        self._places = iter(late_places(symbols, sum(is_late)))

    def counted(self, count: int) -> None:
        """An op is about to make a result of this size."""
        if not next(self._counts, False):
            return
        _, symbol, _ = next(self._places)
        if symbol == len(self._sizes):
            self._sizes.append(count)
            self.learn(self._whole.known_at(tuple(self._sizes)))
