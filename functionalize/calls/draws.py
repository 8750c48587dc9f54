"""Numbers that a step draws from generators of Python and numpy: a replay draws them anew, from the same generators.

    lam = np.random.beta(0.2, 0.2)         a live number; `x * lam` is computed with the number of the replay
    scale = self.rng.uniform(0.8, 1.2)     `random.Random`, `numpy.random.Generator`, `numpy.random.RandomState`
    if random.random() < 0.5: ...          a guard on the comparison, checked before the graph runs

    draws.values(call)                     the numbers of a replay: drawn from copies of the generators
    draws.repeat(call, None)               the effect of a replay: the same draws, from the generators themselves

So a replay whose guards fail has moved no generator. A recording draws from the generators themselves.
Invariant: a generator is moved by a replay only if the draws of the recording, made again on a copy of its state on
entry, gave the same numbers and left the state that the step has left (`is_all_of`).
Refusals: whatever moves a generator otherwise (arrays, `shuffle`, a method that the step holds) is seen by that.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch

from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.ir.scalars import NUMBER_DTYPES
from functionalize.scalars.live_scalars import as_live, plain, settled

_SHARED = "uniform triangular"
_RANDOM = f"""{_SHARED} random randint randrange getrandbits gauss normalvariate lognormvariate expovariate
    gammavariate betavariate paretovariate weibullvariate vonmisesvariate choice"""
_NUMPY = f"""{_SHARED} random normal standard_normal lognormal exponential standard_exponential beta gamma
    standard_gamma binomial poisson geometric laplace logistic choice"""
METHODS: Mapping[str, frozenset[str]] = {
    "Random": frozenset(_RANDOM.split()),
    "Generator": frozenset([*_NUMPY.split(), "integers"]),
    "RandomState": frozenset([*_NUMPY.split(), "rand", "randn", "randint", "random_sample"]),
}
# What sets a generator, by any name that leads to it.
SETTERS = frozenset({"seed", "setstate", "set_state"})
_CONSTANTS = frozenset({bool, int, float, str, type(None), type, range})


class Draw(NamedTuple):
    """A call of a method of a generator that returns a number."""

    generator: Any
    method: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def made(self, generator: Any) -> Any:
        """The number, as an int or a float, drawn from `generator`."""
        return as_number(getattr(generator, self.method)(*self.args, **self.keywords))


def as_number(value: Any) -> Any:
    """A number of Python or numpy as an int or a float; None for anything else."""
    if type(value) not in NUMBER_DTYPES and type(value).__module__ == "numpy":
        value = value.item() if getattr(value, "ndim", 1) == 0 else None
    is_long = type(value) is int and not -(2**63) <= value < 2**63
    return value if type(value) in NUMBER_DTYPES and not is_long else None


class Draws:
    """The draws of one recording, in their order, and afterwards an effect of its program.

    names: of the generators that the step finds in the same places at every call, by id.
    were_set: ids of those that the step has set, be it to the state that they had.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.were_set: set[int] = set()
        self._made: list[Draw] = []
        self._numbers: list[Any] = []
        self._entries: dict[int, tuple[Any, Any]] = {}  # id -> the generator, a copy of it on entry
        self._copies: dict[int, Any] = {}

    def know(self, generator: Any, name: str) -> None:
        """A generator from which the step may draw."""
        self.names[id(generator)] = name
        self._entries[id(generator)] = generator, copied(generator, None)

    def draw(self, log: Any, draw: Draw, number: Any) -> Any:
        """The live number that a draw of the step has returned. log: that of the recording."""
        self._made.append(draw)
        self._numbers.append(number)
        source = DrawnNumber(self, len(self._made) - 1, type(number))
        return as_live(log.from_source(source, f"draw_{len(self._made)}", number))

    def is_all_of(self, generator: Any) -> bool:
        """Whether these draws alone have moved a generator from its state on entry to its state now."""
        if id(generator) in self.were_set:
            return False
        copy = copied(self._entries[id(generator)][1], None)
        for draw, number in zip(self._made, self._numbers, strict=True):
            if draw.generator is generator and repr(draw.made(copy)) != repr(number):
                return False
        return state_of(copy) == state_of(generator)

    def used(self) -> list[Any]:
        """The generators that the step has drawn from or set, or whose state is not that on entry."""
        ids = self.were_set | {id(draw.generator) for draw in self._made}
        return [
            each
            for key, (each, before) in self._entries.items()
            if key in ids or state_of(each) != state_of(before)
        ]

    def finish(self) -> None:
        """Release what only a recording needs."""
        self._entries.clear()
        self._numbers.clear()

    @property
    def what(self) -> str:
        """For messages."""
        names = {id(draw.generator): self.names[id(draw.generator)] for draw in self._made}
        return " and ".join(f"draws from `{name}`" for name in names.values())

    def method(self, index: int) -> str:
        """The name of the method that made a number."""
        return self._made[index].method

    @property
    def texts(self) -> list[str]:
        """Each draw, equal for two recordings that draw alike."""
        return [
            f"{self.names[id(d.generator)]}.{d.method}{d.args}{d.keywords or ''}"
            for d in self._made
        ]

    # -- in a replay ---------------------------------------------------------------------------

    def values(self, call: Call) -> list[Any]:
        """The numbers of a call, drawn from copies; raises `LookupError` where a draw fails."""
        found: list[Any] | None = call.memo.get(self)
        if found is None:
            fresh: dict[int, Any] = {}
            found = call.memo[self] = []
            for draw in self._made:
                key = id(draw.generator)
                if key not in fresh:
                    fresh[key] = copied(draw.generator, self._copies.get(key))
                try:
                    found.append(draw.made(fresh[key]))
                except (ArithmeticError, TypeError, ValueError) as error:
                    raise LookupError(f"`{self.texts[len(found)]}` fails: {error}") from error
            self._copies = fresh
        return found

    def repeat(self, call: Call, value: Any) -> None:
        """Make the draws, from the generators themselves."""
        for draw in self._made:
            draw.made(draw.generator)


@dataclass(frozen=True, slots=True, eq=False)
class DrawnNumber:
    """The source of a number that a replay draws. kind: its type, int or float."""

    draws: Draws
    index: int
    kind: type
    category: ClassVar[Category] = Category.BUFFERS

    @property
    def text(self) -> str:
        """The call that returns it."""
        return self.draws.texts[self.index]

    @property
    def never_returns(self) -> bool:
        """Whether no two draws are likely to be equal: a float, unless it is one of some."""
        return self.kind is float and self.draws.method(self.index) != "choice"

    def resolve(self, call: Call) -> Any:
        value = self.draws.values(call)[self.index]
        if type(value) is not self.kind:
            raise LookupError(f"a draw is {value!r}, was a number of type {self.kind.__name__}")
        return torch.tensor(value, dtype=NUMBER_DTYPES[self.kind])


# -- generators ------------------------------------------------------------------------------------


def kind_of_generator(value: Any) -> str | None:
    """`Random`, `Generator` or `RandomState`, if a copy of a generator can be made; else None."""
    kind = type(value)
    if kind is random.Random:
        return "Random"
    numpy = sys.modules.get("numpy")
    if numpy is None or kind not in (numpy.random.Generator, numpy.random.RandomState):
        return None
    return kind.__name__ if type(_bits(value)).__module__.startswith("numpy.random") else None


def process_generators() -> Iterator[tuple[str, Any]]:
    """The generators of the modules `random` and `numpy.random`, by the names of the modules."""
    yield "random", random.getstate.__self__  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random.get_state.__self__


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or generator._bit_generator


def copied(generator: Any, into: Any) -> Any:
    """A generator with the same state. into: an earlier copy, which may be used again."""
    if type(generator) is random.Random:
        copy = random.Random(0) if into is None else into
        copy.setstate(generator.getstate())
        return copy
    bits = _bits(generator)
    copy = into
    if into is None or type(_bits(into)) is not type(bits):
        copy = type(generator)(type(bits)(0))
    if hasattr(generator, "get_state"):
        copy.set_state(generator.get_state(legacy=False))
    else:
        _bits(copy).state = bits.state
    return copy


def state_of(generator: Any) -> Any:
    """The state of a generator, to be compared."""
    if type(generator) is random.Random:
        return generator.getstate()
    has_cache = hasattr(generator, "get_state")
    return _hashable(generator.get_state(legacy=False) if has_cache else _bits(generator).state)


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(each)) for key, each in value.items())
    return value.tobytes() if hasattr(value, "tobytes") else repr(value)


# -- while a step is recorded ----------------------------------------------------------------------

Recorders = Callable[[], list[Any]]


def drawn(
    recorders: Recorders,
    frame: FrameType,
    generator: Any,
    method: str,
    original: Any,
    args: Any,
    keywords: Any,
) -> Any:
    """What a call of a method of a generator returns to the step: a live number where a replay can draw it.

    frame: that of the caller. original: the method.
    """
    found = [r for r in recorders() if r.checks is not None and r.checks.for_real]
    draws = found[0].calls.draws if len(found) == 1 and not found[0].checks.in_effect else None
    is_inner = frame.f_code.co_filename == random.__file__
    if draws is None or id(generator) not in draws.names or is_inner:
        return original(*args, **keywords)
    args, keywords = tuple(settled(args)), settled(keywords)
    given = [*args, *keywords.values()]
    is_choice = method == "choice" and type(generator) is random.Random
    if is_choice and len(given) == 1:  # of objects: a draw of their index
        index = _live(found[0], Draw(generator, method, (range(len(given[0])),), {}), original)
        return given[0][plain(index)]
    if not all(type(each) in _CONSTANTS for each in given):
        return original(*args, **keywords)
    number = _live(found[0], Draw(generator, method, args, keywords), original)
    if type(number) is _Plain:
        return number.value
    is_live = found[0].scalar_log.is_live_for(frame)
    return number if is_live else plain(number)


class _Plain(NamedTuple):
    """A value that is no live number for the step."""

    value: Any


def _live(recording: Any, draw: Draw, original: Any) -> Any:
    value = original(*draw.args, **draw.keywords)
    number = as_number(value)
    if number is None:
        return _Plain(value)
    live = recording.calls.draws.draw(recording.scalar_log, draw, number)
    if type(value) is type(number):
        return live
    plain(live)  # a number of numpy: a guard on it
    return _Plain(value)


def draw_patches(recorders: Recorders) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): methods of `random.Random`, functions of the modules `random` and `numpy.random`."""
    for name in METHODS["Random"]:
        yield random.Random, name, _method(recorders, name, getattr(random.Random, name))
    for name in ("seed", "setstate"):
        yield random.Random, name, _setter(recorders, None, getattr(random.Random, name))
    for module, generator in process_generators():
        for name in METHODS[str(kind_of_generator(generator))]:
            original = getattr(sys.modules[module], name, None)
            if getattr(original, "__self__", None) is generator:
                function = _function(recorders, generator, name, original)
                yield sys.modules[module], name, function
        for name in SETTERS & vars(sys.modules[module]).keys():
            original = getattr(sys.modules[module], name)
            yield sys.modules[module], name, _setter(recorders, generator, original)


def _method(recorders: Recorders, name: str, original: Any) -> Any:
    def method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        bound = original.__get__(self)
        return drawn(recorders, sys._getframe(1), self, name, bound, args, keywords)

    method.__name__, method.__doc__ = name, original.__doc__
    return method


def _function(recorders: Recorders, generator: Any, name: str, original: Any) -> Any:
    def function(*args: Any, **keywords: Any) -> Any:
        return drawn(recorders, sys._getframe(1), generator, name, original, args, keywords)

    function.__name__, function.__doc__ = name, original.__doc__
    return function


def _setter(recorders: Recorders, generator: Any, original: Any) -> Any:
    """generator: None: the first argument, of a method."""

    def setter(*args: Any, **keywords: Any) -> Any:
        found = args[0] if generator is None and args else generator
        for recorder in recorders():
            draws = recorder.calls.draws
            if draws is not None and id(found) in draws.names:
                draws.were_set.add(id(found))
        return original(*args, **keywords)

    setter.__name__, setter.__doc__ = original.__name__, original.__doc__
    return setter


def stand_in(recorders: Recorders, generator: Any) -> Any:
    """An object to take the place of a generator of numpy, whose methods cannot be replaced: it calls those of it."""
    kind = type(generator)
    known = METHODS[kind.__name__]

    class Drawer(kind):  # type: ignore[misc, valid-type]
        """An instance of the class, for code of C, on the same source of bits."""

        def __getattribute__(self, name: str) -> Any:
            method = getattr(generator, name)
            if name in SETTERS:
                return _setter(recorders, generator, method)
            return _function(recorders, generator, name, method) if name in known else method

    return Drawer(_bits(generator))
