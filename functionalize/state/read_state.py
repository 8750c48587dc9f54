"""What a step reads in Python, at one moment of it: to see what a call has changed that replays make later.

    before = ReadState.now(entry.python_state, leaves)
    log(metrics)
    before.change(ReadState.now(entry.python_state, leaves))      "it changes `self.count`", or None

Only for recordings: it walks all objects that the code of the step can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.state.moving_state import moved
from functionalize.state.python_state import SurroundingsGuard
from functionalize.util.reading import items_of
from functionalize.walk.fact_text import PLAIN, text_of
from functionalize.walk.walker import PythonState, walked_again


@dataclass(frozen=True, slots=True)
class ReadState:
    """walk: of all objects. lengths: of the lists to which the step appends. others: by name, what guards compare apart
    from the walk: hyperparameters, and whether modules are in training."""

    walk: PythonState
    lengths: list[int]
    others: dict[str, Any]

    @staticmethod
    def now(guard: SurroundingsGuard, leaves: Sequence[Any]) -> ReadState:
        """guard: that on the state around the step, from its beginning."""
        walk = walked_again(guard.fn, leaves, guard.state, is_replay=False)
        others: dict[str, Any] = {}
        for name, optimizer in guard.state.roots.optimizers.items():
            for i, group in enumerate(optimizer.param_groups):
                for key, value in items_of(group):
                    if key != "params":
                        others[f"{name}.param_groups[{i}][{key!r}]"] = value
        for name, module in guard.state.roots.walk():
            others[f"{name}.training"] = module.training
        return ReadState(walk, [len(found) for *_, found in walk.lists], others)

    def change(self, later: ReadState) -> str | None:
        """What has changed since then, for a message: None if nothing has."""
        name = next(self._changes(later), None)
        if name is not None:
            return f"it changes `{name}`, which the step reads: do so outside of that function"
        if self.walk.moving != later.walk.moving:
            return "it draws random numbers, or moves an iterator or a file that the step reads"
        return None

    def _changes(self, later: ReadState) -> Iterator[str]:
        was, now = self.walk, later.walk
        if was.paths != now.paths:
            common = zip(was.paths, now.paths, strict=False)
            path = next((new for old, new in common if old != new), (*was.paths, *now.paths)[-1])
            yield text_of(path)
        yield from (
            text_of(path)
            for path, old, new in zip(was.paths, was.facts, now.facts, strict=False)
            if old != new
        )
        changed = moved(was, now).values
        yield from (text_of(path) for path, place, _ in now.slots if place.place in changed)
        lists = zip(self.lengths, now.lists, strict=False)
        yield from (text_of(path) for count, (path, _, found) in lists if count != len(found))
        for name, value in later.others.items():
            old = self.others.get(name, self)
            if old is not value and not (
                type(old) is type(value) and type(value) in PLAIN and old == value
            ):
                yield name
