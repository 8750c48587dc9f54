"""The classes of a step whose sizes the step computes, by the kind of their calls.

    classes.learn(key, reference, is_late, observer)     a recorded call; key: of the call, without computed sizes
    classes.of(key)                                      the class that is replayed, or that most recordings are of

Refusals: a kind of which `_MOST_APART` recordings are no one program, as of a step that decides by what it computes how
many ops it runs; the error says where they part.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize.errors import UncapturableError
from functionalize.late_sizes.late_class import LateClass
from functionalize.late_sizes.late_observer import LateObserver
from functionalize.lengths.references import Reference
from functionalize.templates.call_keys import open_key
from functionalize.templates.leaves import Leaves
from functionalize.templates.template import first_difference

_MOST_APART = 4  # recordings of as many classes, none of which has a template
_MOST = 16  # recordings of a kind without a program that is replayed


@dataclass(slots=True)
class _Kind:
    """One kind of call. first: the leaves of its first recording."""

    first: Leaves
    classes: list[LateClass] = field(default_factory=list)


class LateClasses:
    """every: one in so many calls is recorded, and compared."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._kinds: dict[Hashable, _Kind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Any:
        return (each for kind in self._kinds.values() for each in kind.classes)

    def learn(
        self,
        key: Any,
        reference: Reference,
        sources: Sequence[str | None],
        observer: LateObserver | None,
    ) -> LateClass:
        """The class of a recorded call. sources: of each size of a result, what gives it; None: it is known early.

        Raises `UncapturableError` if recordings of this kind are no one program.
        """
        kind = self._kinds.setdefault(open_key(key), _Kind(reference.leaves[0]))
        tokens = hash((reference.tokens, open_key(reference.key)))
        found = next((each for each in kind.classes if each.tokens == tokens), None)
        if found is None:
            found = LateClass(tokens, self._every)
            kind.classes.append(found)
        found.add(reference, [text is not None for text in sources], observer)
        why = self._why_refused(kind, reference)
        if why is not None:
            text = next(text for text in sources if text is not None)
            raise UncapturableError(f"{text}, and {why}")
        return found

    def _why_refused(self, kind: _Kind, latest: Reference) -> str | None:
        if any(each.is_ready or each.templates is not None for each in kind.classes):
            recorded = sum(each.recorded for each in kind.classes)
            if recorded < _MOST or any(each.is_ready for each in kind.classes):
                return None
        lost = next((each.lost for each in kind.classes if each.lost is not None), None)
        if lost is not None:
            return f"recorded calls are no one program: {lost}"
        if len(kind.classes) < _MOST_APART:
            return None
        difference = first_difference(kind.first, latest.leaves[0])
        where = ": ".join(difference) if difference is not None else "a size is 0 or 1"
        return f"{len(kind.classes)} recorded calls are no one program, at {where}"

    def of(self, key: Any) -> LateClass | None:
        """The class of a kind of call, if one was recorded."""
        kind = self._kinds.get(open_key(key))
        if kind is None:
            return None
        return max(kind.classes, key=lambda each: (each.is_ready, each.recorded))

    def knows(self, key: Any) -> bool:
        """Whether such calls have computed sizes."""
        return open_key(key) in self._kinds
