"""The generators from which a step may draw, while it is recorded: see `calls/draws.py`, `calls/own_generators.py`.

    with Drawing(places, recorder) as drawing, recorder: ...
    drawing.finish()          the effect of the draws, the generators that they explain, or what else moves one

Those of the modules `random` and `numpy.random`, and those that the walk finds in one place alone: a guard says that
the place holds the generator still. In the place of one of numpy there is a stand-in during the recording; the state of
one of torch is a tensor from outside, and at the end a value of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from functionalize._compat.dispatch import current_modes
from functionalize.calls.draws import (
    Draws,
    kind_of_generator,
    process_generators,
    stand_in,
)
from functionalize.calls.own_generators import is_own
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.recorder.recorder import Recorder
from functionalize.util.number_uses import any_needs_exact
from functionalize.walk.code_names import names_in
from functionalize.walk.fact_text import draws_text, text_of
from functionalize.walk.live_places import content, is_writable, put
from functionalize.walk.parts import Held
from functionalize.walk.walker import PythonState

# Code that names one of these may set a generator to the state that it has on entry, which no comparison shows.
_SETTERS = frozenset({"seed", "setstate", "set_state", "manual_seed", "graphsafe_set_state"})
_SETTERS |= {"set_seed", "seed_everything"}
_MAKERS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__"})


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorPlace:
    """A generator that the step finds. place: None for that of a module."""

    name: str
    generator: Any
    place: Held | None = None
    is_read_by_reader: ClassVar[bool] = True

    def failure(self, call: Call) -> str | None:
        """Why draws of a replay would not be those of the step, or None."""
        if self.place is None or content(self.place, call.reader) is self.generator:
            return None
        return f"`{self.name}` is another generator"


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorState:
    """The source of the state of a `torch.Generator`, before the step draws from it: see calls/own_generators.py."""

    place: GeneratorPlace
    category: ClassVar[Category] = Category.RNG_STATE

    def resolve(self, call: Call) -> Any:
        return self.place.generator.get_state()


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorSet:
    """The effect of the draws from a `torch.Generator`: its state, a value of the program."""

    place: GeneratorPlace

    @property
    def what(self) -> str:
        """For messages."""
        return f"draws from `{self.place.name}`"

    def repeat(self, call: Call, value: Any) -> None:
        """Set it to the state after the draws of this replay."""
        self.place.generator.set_state(value)


def generators_of(state: PythonState) -> Iterator[GeneratorPlace]:
    """Those from which a replay can draw as the step does."""
    if state.hooks_run_outside:  # a captured forward repeats nothing in Python
        return
    codes = [code for code in state.names.codes if code.co_name not in _MAKERS]
    if not all(_SETTERS.isdisjoint(names_in(code).names) for code in codes):
        return
    own = dict(process_generators())
    for name, generator in own.items():
        yield GeneratorPlace(name, generator)
    known = set(map(id, own.values()))
    needs_exact = any_needs_exact(state.roots.functions)
    for path, (generator, place) in state.movers.items():
        kind = "torch" if is_own(generator) else kind_of_generator(generator)
        if kind is None or place is None or id(generator) in state.shared | known:
            continue
        if kind in ("Random", "torch") or (is_writable(place) and not needs_exact):
            yield GeneratorPlace(text_of(path), generator, place)


class Drawing:
    """A context in which draws from these generators are live numbers, if the numbers of the recording are live.

    explained: ids of the generators that the draws have moved as the step has. unexplained: text about a generator that
    is moved by anything else.
    """

    def __init__(self, generators: Sequence[GeneratorPlace], recorder: Recorder) -> None:
        self.explained: set[int] = set()
        self.unexplained: str | None = None
        self._recorder = recorder
        self._generators = [each for each in generators if not is_own(each.generator)]
        own = (each for each in generators if is_own(each.generator))
        self._own = [(each, each.generator.get_state()) for each in own]
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
        self._finish_own()
        draws, is_used = self._draws, False
        if draws is None:
            return
        for each in self._generators:
            if not any(each.generator is used for used in draws.used()):
                continue
            if draws.is_all_of(each.generator):
                self._explain(each)
                is_used = True
            else:
                self._refuse(each)
        if is_used:
            self._recorder.python_effects.insert(0, (draws, "; ".join(draws.texts)))
        draws.finish()

    def _finish_own(self) -> None:
        """The effects of draws from generators of torch."""
        for each, before in self._own:
            state = self._recorder.calls.own_generators.moved(each.generator)
            if state is not None:
                self._explain(each)
                self._recorder.python_effects.insert(0, (GeneratorSet(each), state))
            elif not torch.equal(each.generator.get_state(), before):
                self._refuse(each)

    def _explain(self, each: GeneratorPlace) -> None:
        self.explained.add(id(each.generator))
        self._recorder.calls.guard(each)

    def _refuse(self, each: GeneratorPlace) -> None:
        what = draws_text(each.name, each.generator)
        self.unexplained = self.unexplained or what
