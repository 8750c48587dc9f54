"""The classes of a step: recorded calls that differ in sizes only, by the kind of their calls.

    classes.learn(key, RecordedCall(...))         the class of a recorded call; key: in the cache
    classes.candidates(key, leaves)            the classes that another call may be in
    classes.why_compared(key, candidates)      why its first call runs for real; None: it is replayed

A kind of call is its key in the cache without its sizes; 0 and 1 stay (`open_key`).
Refusals: a kind that has `MOST` recordings in a class without a template, or of which `_MOST_FAILURES` predictions were
wrong, is left to one program for each size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

from functionalize.lengths.coverage import EVERY
from functionalize.lengths.data_sizes import agreeing
from functionalize.lengths.length_class import MOST, LengthClass
from functionalize.lengths.recorded_calls import RecordedCall, RecordedKinds
from functionalize.templates.call_keys import open_key, shapes_of
from functionalize.templates.template import EARLY, FEWEST

_MOST_OF_A_KIND = 8
_MOST_FAILURES = 3
_MOST_FAILURES_OF_KNOWN = 12  # where it is known which sizes may be other ones


class LengthClasses:
    """The classes of a step, by the kind of their calls.

    every: each so many new sizes are compared; 1: all. fewest: of how many recordings of a step a template is made.
    """

    def __init__(self, every: int = EVERY, is_auto: bool = False, fewest: int = EARLY) -> None:
        self._every, self._fewest, self.recorded = every, fewest, RecordedKinds(is_auto)
        self._classes: dict[Hashable, list[LengthClass]] = {}

    def __iter__(self) -> Iterator[LengthClass]:
        return (each for several in self._classes.values() for each in several)

    def learn(self, key: Any, reference: RecordedCall) -> LengthClass | None:
        """The class of a recorded call, if it is in one. key: in the cache."""
        if any(0 in shape for shape in reference.shapes) or not reference.shapes:
            return None
        classes = self._classes.setdefault(open_key(key), [])
        tokens = reference.tokens
        found = next((each for each in classes if each.tokens == tokens), None)
        if found is None:
            if len(classes) >= MOST:
                return None
            fewest = self._fewest if reference.backward is None else FEWEST
            found = LengthClass(tokens, every=self._every, fewest=fewest)
            classes.append(found)
        return found if found.add(reference) else None

    def restore(self, groups: Iterable[LengthClass]) -> None:
        """Add classes with templates, from a file, unless there are such."""
        for group in groups:
            assert group.coverage is not None
            group.every = group.coverage.every = group.coverage.gap = self._every
            self.recorded.compare(key := group.references[-1].key)
            classes = self._classes.setdefault(open_key(key), [])
            alike = [each for each in classes if each.tokens == group.tokens]
            if all(each.template is None for each in alike):
                classes[:] = [group, *(each for each in classes if each not in alike)]

    def candidates(self, key: Any, leaves: Sequence[Any]) -> list[LengthClass]:
        """The classes that a call may be in, the one with the nearest known sizes first.

        One of a single recording, such as a length that equals a width, comes last. Of several classes, those in whose
        calls Python has read of the arguments what it reads of these. A template of two recordings that were equal in
        what this call has otherwise is dropped: further recordings make another one.
        """
        classes, shapes = self._classes.get(open_key(key), []), shapes_of(key)
        for each in classes:
            if each.is_early and isinstance(each.sizes_of(shapes), str):
                each.begin_again()
        found = sorted(classes, key=lambda each: (len(each.known) < 2, each.distance(shapes)))
        if len(found) < 2:
            return found
        return list(
            compress(found, agreeing([each.early_guards(shapes) for each in found], leaves))
        )

    def wants(self, key: Any, leaves: Sequence[Any]) -> bool:
        """Whether a recording of such a call may lead to a template."""
        classes = self._classes.get(open_key(key), [])
        if len(classes) >= MOST:
            return False
        found = self.candidates(key, leaves) or classes[:1]
        if not found:
            may_follow = bool(shapes_of(key)) and self.recorded.are_compared(key)
            return may_follow and self.recorded.count(key) < _MOST_OF_A_KIND
        return sum(each.recorded for each in found) < _MOST_OF_A_KIND and found[0].wants

    def can_predict(self, found: Sequence[LengthClass]) -> bool:
        """Whether the first candidate has a template."""
        if not found or found[0].template is None:
            return False
        coverage = found[0].coverage
        is_known = coverage is not None and not coverage.is_hopeless
        most = _MOST_FAILURES_OF_KNOWN if is_known else _MOST_FAILURES
        return sum(each.failures for each in found) < most

    def why_compared(self, key: Any, found: Sequence[LengthClass]) -> str | None:
        """Why the first call of a kind runs for real, and is compared; None: it is replayed. found: the candidates."""
        if len(self._classes[open_key(key)]) >= MOST:
            return "there are too many classes to know which is which"
        others = [shapes for each in found[1:] for shapes in each.known]
        others += [shapes for each in found for shapes in each.differing]
        return found[0].why_compared(shapes_of(key), others)
