"""The generators in Python from which a step may draw, while it is recorded: see `calls/draws.py`.

    with Drawing(places, recorder) as drawing, recorder: ...
    drawing.finish()          the effect of the draws, the generators that they explain, or what else moves one

Those of the modules `random` and `numpy.random`, and those that the walk finds in one place alone: a guard says that
the place holds the generator still. In the place of one of numpy there is a stand-in during the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from functionalize._compat.dispatch import current_modes
from functionalize.calls.draws import (
    Draws,
    kind_of_generator,
    process_generators,
    stand_in,
)
from functionalize.ir.inputs import Call
from functionalize.recorder.recorder import Recorder
from functionalize.util.number_uses import any_needs_exact
from functionalize.util.unchanged import Unchanged
from functionalize.walk.fact_text import text_of
from functionalize.walk.live_places import content, is_writable, put
from functionalize.walk.parts import Held
from functionalize.walk.walker import PythonState


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorPlace:
    """A generator that the step finds. place: None for that of a module."""

    name: str
    generator: Any
    place: Held | None = None

    def failure(self, call: Call) -> str | None:
        """Why draws of a replay would not be those of the step, or None."""
        if self.place is None or content(self.place) is self.generator:
            return None
        return f"`{self.name}` is another generator"

    def watched(self, call: Call, facts: Unchanged) -> None:
        if self.place is not None:
            self.place.watched(call, facts)


def generators_of(state: PythonState) -> Iterator[GeneratorPlace]:
    """Those from which a replay can draw as the step does."""
    if state.hooks_run_outside:  # a captured forward repeats nothing in Python
        return
    own = dict(process_generators())
    for name, generator in own.items():
        yield GeneratorPlace(name, generator)
    known = set(map(id, own.values()))
    needs_exact = any_needs_exact(state.roots.functions)
    for path, (generator, place) in state.movers.items():
        kind = kind_of_generator(generator)
        if kind is None or place is None or id(generator) in state.shared | known:
            continue
        if kind == "Random" or (is_writable(place) and not needs_exact):
            yield GeneratorPlace(text_of(path), generator, place)


class Drawing:
    """A context in which draws from these generators are live numbers, if the numbers of the recording are live.

    explained: ids of the generators that the draws have moved as the step has. unexplained: text about a generator that
    is moved by anything else.
    """

    def __init__(self, generators: Sequence[GeneratorPlace], recorder: Recorder) -> None:
        self.explained: set[int] = set()
        self.unexplained: str | None = None
        self._generators, self._recorder = generators, recorder
        self._draws: Draws | None = None
        self._stand_ins: list[tuple[GeneratorPlace, Any]] = []

    def __enter__(self) -> Self:
        recorder = self._recorder
        if recorder.scalar_log is None or not self._generators:
            return self
        self._draws = recorder.calls.draws = Draws()
        for each in self._generators:
            self._draws.know(each.generator, each.name)
            if each.place is not None and kind_of_generator(each.generator) != "Random":
                found = stand_in(self._active, each.generator)
                self._stand_ins.append((each, found))
                put(each.place, found)
        return self

    def _active(self) -> list[Any]:
        """The recorder, if it records in this thread."""
        recorder = self._recorder
        is_active = recorder.calls.draws is not None and not recorder.suspended
        return [recorder] if is_active and recorder in current_modes() else []

    def __exit__(self, *error: object) -> None:
        self._recorder.calls.draws = None
        for each, found in self._stand_ins:
            assert each.place is not None
            if content(each.place) is found:
                put(each.place, each.generator)
        self._stand_ins.clear()

    def finish(self) -> None:
        """After the step: add the effect to those of the recording."""
        draws = self._draws
        if draws is None:
            return
        for each in self._generators:
            if not any(each.generator is moved for moved in draws.moved()):
                continue
            if draws.is_all_of(each.generator):
                self.explained.add(id(each.generator))
                self._recorder.calls.guard(each)
            else:
                what = f"draws from `{each.name}`, reads or writes it, which a replay would not"
                self.unexplained = self.unexplained or what
        if self.explained:
            self._recorder.python_effects.insert(0, (draws, "; ".join(draws.texts)))
        draws.finish()
