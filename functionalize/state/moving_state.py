"""State in Python that a step moves and that a replay moves alike: counters, sums, kept losses, lists of losses.

    self.n += 1; self.total += loss.item()     numbers: live in the recording, and assigned by a replay
    self.is_first = False                      flags: guarded on entry, and assigned by a replay
    self.phase = "hot"                         texts that code of the step writes out, or that are guarded: as flags
    self.last = loss.detach()                  tensors: inputs if the step reads them, and assigned by a replay
    self.state = h.detach(), c.detach()        bundles (tuples, lists, dicts, dataclasses) of tensors: as these, a
                                               replay makes another one of the same type
    losses.append(loss.item())                 lists that code of the step only appends to, `history["loss"]` as well

    with MovingState(places, recorder) as moving, recorder:    places that an earlier call was seen to move
        ...                                                    they hold live numbers
    moving.finish()
    moving.effects                                             what a replay repeats: (effect, value), ...
    moving.refusal                                             text about a change that none repeats, or None
    moving.key                                                 equal in two recordings that move state alike

Note [What moves alike]
A number that the step leaves in a place is repeated if it is a live number: an expression of numbers of the entry and
of numbers that the step read. Constants in the expression, and numbers that code of the step assigns as they are
(`self.n = 0`), might come from a clock. So a recording is kept only if an earlier one has moved the same places by the
same expressions with the same constants (`key`). A list must not be read: of its name, code of the step has calls of
`append` alone, one path leads to it, and no code finds attributes by data.

Invariant: after the step, also after an exception, no place holds a live number; the number it holds is that of eager.
Refusals: another type than on entry, a number that is no 64-bit integer (as a guard fails), a container, appended or in
place of another one, that anything else holds and could change, what `python_effects.py` refuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.calls.draws import Draws
from functionalize.calls.own_generators import is_own
from functionalize.ir.scalars import Applied, ScalarInput, bottom_up, is_expression
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.float_calls import Scope, float_scopes, live_floats
from functionalize.scalars.live_scalars import (
    as_live,
    expression_of,
    is_live,
    left_behind,
    plain_tree,
)
from functionalize.state.arguments import flatten, flatten_result, unflatten_result
from functionalize.state.carried_containers import (
    Memo,
    NumbersInside,
    copies,
    holds_live,
    marked,
    one_object,
    reaches,
    with_plain,
)
from functionalize.state.drawing import (
    Drawing,
    GeneratorPlace,
    GeneratorSet,
    GeneratorState,
    generators_of,
)
from functionalize.state.number_arguments import NumberArgument, with_numbers
from functionalize.state.place_effects import (
    Appended,
    Assigned,
    AssignedLeaf,
    FlagGuard,
    PlaceNumber,
)
from functionalize.state.storage_places import Places
from functionalize.util.number_uses import any_needs_exact
from functionalize.util.structure import KeptObject
from functionalize.util.tensor_wrappers import address_of
from functionalize.walk.code_uses import only_appended, stored_constants, texts_in
from functionalize.walk.fact_text import (
    CARRIED,
    COMPUTED,
    FEWER_ITEMS,
    HELD_TOO,
    MORE_ITEMS,
    NUMBERS,
    OUTSIDE,
    OWN_TEXTS,
    WRITE_INTO,
    Path,
    text_of,
)
from functionalize.walk.generated_reads import GeneratedReads
from functionalize.walk.live_places import (
    FIXED,
    LIVE_NUMBERS,
    NO_PLACES,
    Bundle,
    LivePlaces,
    changeable_in,
    computed_alike,
    content,
    contents,
    difference_in,
    elements_in,
    held_elsewhere,
    is_absent,
    is_alone,
    is_bundle,
    is_same_content,
    may_grow,
    numbers_moved,
    part_at,
    put,
    structure_of,
    tables_of,
    without_values,
)
from functionalize.walk.parts import CONTAINERS, Held, MovedPlace
from functionalize.walk.unread import AttributeReads
from functionalize.walk.walker import PythonState

_COPIES = {"list": "[*items]", "dict": "{**items}"}


class Moves(NamedTuple):
    """How a recording moved state: places and expressions, their constants, and the facts learned of numbers.

    shape: what the first effect does, and so on.
    """

    shape: tuple[Hashable, ...]
    constants: Hashable
    facts: Hashable

    def is_as(self, other: Moves) -> bool:
        """Whether another recording moved the same places alike."""
        return self[:2] == other[:2]

    def differs_in_constants(self, other: Moves) -> bool:
        """Whether another one differs in constants alone, which no guard explains."""
        return self.shape == other.shape and self.facts == other.facts and not self.is_as(other)


@dataclass(frozen=True, slots=True, eq=False)
class MovingPlaces:
    """The live places of one recording, with their names: values, and lists; generators from which it may draw.

    floats: the globals in which calls of `float` are live, see `scalars/float_calls.py`.
    flags: the flags and texts in `values`, which are no numbers: facts. constants: those that code writes out and
    assigns to a place, by its name. texts: those that code writes out, or that are guarded. kept: the places of objects
    that the step returns as they are. list_holders: the classes of the objects that lists are found in.
    arguments: the numbers among the arguments that are live.
    """

    live: LivePlaces
    values: tuple[tuple[str, Held], ...] = ()
    lists: tuple[tuple[str, Held], ...] = ()
    constants: dict[str, frozenset[tuple[type, str]]] = field(default_factory=dict)
    generators: tuple[GeneratorPlace, ...] = ()
    floats: tuple[Scope, ...] = ()
    flags: tuple[tuple[str, Held, bool | str], ...] = ()
    kept: tuple[Held, ...] = ()
    texts: frozenset[str] = frozenset()
    list_holders: frozenset[type] = frozenset()
    arguments: tuple[NumberArgument, ...] = ()

    @property
    def facts(self) -> tuple[FlagGuard, ...]:
        """The guards on the flags."""
        return tuple(FlagGuard(*flag) for flag in self.flags)

    def __bool__(self) -> bool:
        return bool(self.live or self.generators or self.floats or self.kept or self.arguments)

    def learn(self, reads: AttributeReads) -> None:
        """Add the constants that code of libraries was seen to assign."""
        for name, place in self.values:
            if (constant := reads.assigned(place.place)) is not None:
                self.constants[name] |= {constant}

    def left_with(self, effects: Sequence[Any], leaves: Sequence[Any]) -> MovingPlaces:
        """Those of a recording with these effects, and these leaves of all that it has left.

        Without generators, if it has drawn from none.
        """
        has_drawn = any(isinstance(each, (Draws, GeneratorSet)) for each in effects)
        kept = tuple(each.place for each in leaves if type(each) is KeptObject)
        return replace(self, generators=self.generators if has_drawn else (), kept=kept)

    def objects(self) -> dict[int, tuple[Held, Any]]:
        """By id, the objects that a recording has returned as they are, each with its place."""
        return {
            id(found): (place, found)
            for place in self.kept
            if not is_absent(found := content(place))
        }

    def bring_in(self, places: Places, recorder: Recorder) -> None:
        """Add the states of the generators of torch to the tensors that a recording may read."""
        for each in self.generators if recorder.live else ():
            if is_own(each.generator):
                state, name = each.generator.get_state(), f"{each.name}.state"
                ref = recorder.storages.bring_in(state, name)
                places.widest[ref.storage] = name, GeneratorState(each), ref
                recorder.calls.own_generators.know(each.generator, state)

    @staticmethod
    def of(state: PythonState, leaves: Sequence[Any] = ()) -> MovingPlaces:
        """Those of `state.live` that a walk has found, in its order. leaves: of the arguments."""
        live, generators = state.live, tuple(generators_of(state))
        floats = float_scopes(state.roots.functions)
        if not live:
            return MovingPlaces(NO_PLACES, generators=generators, floats=floats)
        values = {p.place: (text_of(path), p) for path, p, _ in state.slots}
        lists = [(text_of(path), p) for path, p, found in state.lists if id(found) in live.lists]
        found = tuple(values[key] for key in values if key in live.values)
        codes = state.names.codes
        flags = tuple(
            (name, p, flag) for name, p in _flags(found, live) if type(flag := content(p)) in FIXED
        )
        return MovingPlaces(
            live,
            found,
            tuple(lists),
            {name: stored_constants(codes, name.rpartition(".")[2]) for name, _ in found},
            generators,
            floats,
            flags,
            texts=_texts(state, leaves, flags),
            list_holders=frozenset(_list_holders(state)),
        )


def _list_holders(state: PythonState) -> Iterator[type]:
    """The classes of the objects by which code finds live lists: those that hold them, or a table that does."""
    for path, _, found in state.lists:
        holder: Any = path[0] if id(found) in state.live.lists else ()
        while holder:
            if (kind := state.owners.get(id(holder))) is not None:
                yield kind
            holder = holder[0]


def _texts(
    state: PythonState, leaves: Sequence[Any], flags: Sequence[tuple[str, Held, bool | str]]
) -> frozenset[str]:
    """The texts that a step may put in a place, and that are the same at every call which passes the guards.

    A text that code computes may have the time in it, or a number that no guard knows.
    """
    if all(type(flag) is not str for _, _, flag in flags):
        return frozenset()
    written = (text for code in state.names.codes for text in texts_in(code))
    guarded = (*state.facts, *leaves, *(flag for _, _, flag in flags))
    return frozenset((*written, *(each for each in guarded if type(each) is str)))


def _flags(found: Sequence[tuple[str, Held]], live: LivePlaces) -> Iterator[tuple[str, Held]]:
    """The places in which flags may be: live ones, and of bundles those of what moves in them."""
    for name, place in found:
        yield name, place
        for keys in sorted(live.numbers_at(place), key=repr):
            inside = place
            for key in keys:
                inside = Held(inside, key)
            yield ".".join(map(str, (name, *keys))), inside


def moved(before: PythonState, after: PythonState) -> LivePlaces:
    """The places that differ between two walks and that a replay may be able to move."""
    were = {p.place: value for _, p, value in before.slots}
    # The first step of an optimizer makes its state, and later ones write into it.
    made_once = {id(t) for o in after.roots.optimizers.values() for t in tables_of(o)}
    values = {
        p.place: p
        for _, p, value in after.slots
        if not is_same_content(were.get(p.place, before), value)
        and (p.place in were or id(p.container) not in made_once or type(value) in NUMBERS)
        and (type(value) is not Bundle or value.may_replace(were.get(p.place)))
    }
    numbers = {
        p.place: numbers_moved(was.structure, value.structure)
        for _, p, value in after.slots
        if p.place in values and type(value) is Bundle
        if type(was := were.get(p.place)) is Bundle
    }
    new = [
        found
        for _, p, value in after.slots
        if type(value) is Bundle and value.is_another(were.get(p.place))
        # To an empty dict or list the step has added the first numbers.
        if before.empty.get(id(found := content(p))) is not found
    ]
    inside = {id(each) for bundle in new for each in changeable_in(bundle)}
    values = {key: p for key, p in values.items() if key[0] not in inside}
    lists = {
        id(found): found
        for path, place, found in after.lists
        if place.place not in values and is_only_appended(after, path, place, found)
    }
    if values and any_needs_exact(after.roots.functions):
        values = {k: p for k, p in values.items() if _is_no_number(content(p))}
        numbers = {}
    return LivePlaces(values, lists, {k: found for k, found in numbers.items() if k in values})


def with_live_places(live: LivePlaces, walk: Callable[[LivePlaces], PythonState]) -> PythonState:
    """The walk with these live places; without the lists that code can read by now."""
    state = walk(live)
    kept = {
        id(found): found
        for path, place, found in state.lists
        if id(found) in live.lists and is_only_appended(state, path, place, found)
    }
    return (
        state if len(kept) == len(live.lists) else walk(LivePlaces(live.values, kept, live.numbers))
    )


def is_only_appended(state: PythonState, path: Path, place: Held, found: list[Any]) -> bool:
    """Whether code of the step appends to a list and cannot read it.

    The list may be an entry of a table that code finds by a name: in a table that is an element itself, code finds it
    by keys alone (`logs[k]["loss"]`), which are data.
    """
    # A list in an attribute is in the `__dict__` of its object, which is no object that the walk has seen.
    in_table = id(place.container) in state.seen
    named: Any = path[0] if in_table else path
    holder = state.owners.get(id(named[0])) if in_table and named else None
    if in_table and (len(named) != 2 or (holder is not None and issubclass(holder, CONTAINERS))):
        return False
    return (
        isinstance(named[1], str)
        and not state.names.is_dynamic
        and state.shared.isdisjoint((id(found), id(place.container)))
        and only_appended(state.names.codes, named[1], in_table)
    )


def _is_no_number(value: Any) -> bool:
    return isinstance(value, (Tensor, bool, str)) or is_bundle(value)


class MovingState:
    """A context in which these places hold live numbers, if the numbers of the recording are live.

    on_entry: the tensors that they held, with the place of each. result: of the step, set before the context ends;
    after it with the live numbers of the recording, while `returned` has none in the containers that a place holds.
    one_object: the containers that the step leaves in several places, see `carried_containers.py`.
    replaced: by their places, the tensors in whose place the step has put others.
    fresh: the ids of objects in the result, and at the places, that can be changed and that nothing else holds.
    """

    def __init__(
        self,
        places: MovingPlaces,
        recorder: Recorder,
        kept: Mapping[int, tuple[Held, Any]] = MappingProxyType({}),
    ) -> None:
        """kept: by id, objects that are there on entry, each with its place: a result holds these very objects."""
        self.effects: list[tuple[Any, Any]] = []
        self.refusal: str | None = None
        self.moved: dict[Any, Held] = {}
        self.numbers: dict[Any, frozenset[Any]] = {}  # of bundles among these, see `LivePlaces`
        self.result: Any = None
        self.returned: Any = None
        self.one_object: list[tuple[Any, Any]] = []
        self.fresh: set[int] = set()
        self.replaced: dict[Any, weakref.ref[Tensor]] = {}
        self._kept = kept
        self._unopened: list[Any] = []  # the result, if it cannot be opened
        self._places, self._recorder = places, recorder
        self._drawing = Drawing(places.generators, recorder)
        self._floats = live_floats(places.floats, recorder.scalar_log)
        self._reads = GeneratedReads(places.list_holders)
        self._were: list[Any] = []  # for each place: a live number, a weak reference to a tensor
        self._addresses: list[int | None] = []  # of the storages of tensors
        self._left: list[Any] = []  # what is there now, with live numbers
        self._objects: list[Any] = []  # the very containers that are there now
        self.on_entry: list[tuple[weakref.ref[Tensor], MovedPlace]] = []
        self._one_object: list[
            tuple[Any, Any]
        ] = []  # `one_object`, with the index of a place for an effect
        self._elsewhere: set[int] = set()  # ids of containers that something else holds, too
        # The bundles on entry, so that no new one has the id of an old one.
        self._old: list[Any] = []
        self._inside: dict[int, NumbersInside] = {}  # by the index of the place of a bundle
        self._unchanged: set[int] = set()  # indices of bundles
        self._items: list[tuple[Any, list[Any]]] = []  # for each list: itself, its elements

    @property
    def explained(self) -> set[int]:
        """Ids of the generators that a replay moves as the step has."""
        return self._drawing.explained

    @property
    def unexplained(self) -> str | None:
        """What moved a generator otherwise, which the guards on Python state see after a recording, too; or None."""
        return self._drawing.unexplained

    def __enter__(self) -> Self:
        self._drawing.__enter__()
        self._floats.__enter__()
        self._reads.__enter__()
        log = self._recorder.scalar_log
        for name, place in self._places.values:
            was = content(place)
            self._addresses.append(address_of(was) if isinstance(was, Tensor) else None)
            self.on_entry += _tensors_at(place, was)
            if isinstance(was, Tensor):
                self._were.append(weakref.ref(was))
                continue
            if is_bundle(was):
                numbers = self._places.live.numbers_at(place)
                if numbers and log is not None:
                    inside = NumbersInside(place, name, numbers)
                    inside.put(log)
                    self._inside[len(self._were)], was = inside, content(place)
                self._were.append(Bundle(was, numbers))
                self._old.append(was)
                continue
            if log is not None and type(was) in LIVE_NUMBERS:
                was = as_live(log.from_source(PlaceNumber(place, name, type(was)), name, was))
                put(place, was)
            self._were.append(was)
        for _, place in self._places.lists:
            found = content(place)
            self._items.append((found, list(found) if may_grow(found) else []))
        return self

    def called(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        spec: pytree.TreeSpec,
    ) -> Any:
        """The result of the step, which receives live numbers where the program has inputs."""
        log = self._recorder.scalar_log
        if log is None or not self._places.arguments:
            return fn(*args, **kwargs)
        leaves = flatten(args, kwargs)[0]
        live = {
            each.leaf: as_live(log.from_source(each, each.name, leaves[each.leaf]))
            for each in self._places.arguments
        }
        args, kwargs = with_numbers(args, kwargs, spec, live)
        live.clear()
        return fn(*args, **kwargs)

    def take(self, result: Any, may_refuse: bool) -> None:
        """Take the result of the step.

        may_refuse: whether one that cannot be opened is refused, and given to the caller as it is: it contains itself.
        """
        try:
            flatten_result(result)
        except Exception as error:
            if not may_refuse:
                raise
            what = (
                "an object that contains itself" if type(error) is RecursionError else repr(error)
            )
            self.refusal = f"returns {what}, which a replay cannot make anew: return its tensors"
            self._unopened.append(result)
        else:
            self.result = result

    def __exit__(self, *error: object) -> None:
        self._reads.__exit__()
        self._floats.__exit__(None, None, None)
        self._drawing.__exit__(*error)
        self._leave_containers()
        for at, (_, place) in enumerate(self._places.values):
            now = self._left[at]
            if is_live(now):
                put(place, left_behind(now))

    def _leave_containers(self) -> None:
        """Note what is at each place, and leave no live number in a bundle there."""
        held = [place for _, place in self._places.values]
        self._elsewhere, self.fresh = held_elsewhere(
            chain(filter(is_bundle, contents(held)), self._results()), self._kept
        )
        self.returned = self._unopened.pop() if self._unopened else self.result
        if self._kept:
            self.result = marked(self.result, self._kept)
        now = self._objects = list(contents(held))
        self._left = list(now)
        for at, was in enumerate(self._were):
            if type(was) is Bundle and was.is_same(now[at]):
                inside = self._inside.get(at)
                if inside is None or inside.are_in(now[at]):
                    self._unchanged.add(at)
        bundles = [at for at, each in enumerate(now) if is_bundle(each)]
        changed = [(at, now[at]) for at in bundles if at not in self._unchanged]
        self._one_object = one_object([(None, self.result), *changed]) if changed else []
        has_live = any(holds_live(now[at]) for at in bundles)
        copied: Memo = {}
        plain: Memo = {}
        if has_live:
            for at in bundles:
                self._left[at] = copies(now[at], copied)
            self.fresh |= {id(made) for at, (_, made) in copied.items() if at in self.fresh}
            if reaches(self.result, copied):
                self.result = copies(self.result, copied)
        for inside in self._inside.values():
            inside.take_away(plain)
        if has_live:
            for at in bundles:
                left = with_plain(now[at], plain)
                if left is not now[at]:
                    put(held[at], left)
            if self.result is not self.returned and self.result is not None:
                self.returned = with_plain(self.returned, plain)

    def _results(self) -> Iterator[Any]:
        yield self.result

    def finish(self) -> None:
        """After the step: the effects, or the refusal."""
        self._drawing.finish()
        places, hints = self._places, list(map(left_behind, self._were))
        found = zip(places.values, self._were, hints, self._left, self._addresses, strict=True)
        for at, ((name, place), was, hint, now, address) in enumerate(found):
            if type(was) is weakref.ReferenceType and now is was():
                if isinstance(now, Tensor) and address_of(now) != address:
                    what = f"gives `{name}` another storage (`.data = ...` or `set_`){WRITE_INTO}"
                    self.refusal = self.refusal or what
                continue
            if now is was:
                continue
            if type(was) is Bundle:
                self._finish_bundle(at, name, place, was, now)
                continue
            known = is_live(now) or isinstance(now, Tensor) or self._is_constant(name, now)
            known = known or self._is_fixed(now, hint)
            if not known and (type(now) not in LIVE_NUMBERS or not is_same_content(hint, now)):
                self._refuse(name, now, hint)
                continue
            self.moved[place.place] = place
            if type(was) is weakref.ReferenceType:
                self.replaced[place.place] = was
            if self._is_new_leaf(now):
                self.effects.append((AssignedLeaf(name, place), (now, now.grad)))
            else:
                self.effects.append((Assigned(name, place), now))
        self.one_object = self._assigned_alike()
        for each in (self._were, self._left, self._objects, self._old):
            each.clear()
        self._inside.clear()
        for (name, place), (was, items) in zip(places.lists, self._items, strict=True):
            self._finish_list(name, place, was, items)
        self._items.clear()

    def _finish_bundle(self, at: int, name: str, place: Held, was: Bundle, now: Any) -> None:
        """Of a bundle. A replay makes another one, so that no code but what it leaves may hold one that can change."""
        if at in self._unchanged:
            if was.has_other_storages():
                what = f"gives a tensor in `{name}` another storage (`.data = ...` or `set_`)"
                self.refusal = self.refusal or what + WRITE_INTO
            return
        # Numbers that the step computes and that were the same so far: a guard has their values on entry, and later
        # recordings have them as inputs.
        computed = frozenset(computed_alike(now, was.structure))
        numbers = self._places.live.numbers_at(place) | computed
        structure, before = structure_of(now, numbers), without_values(was.structure, computed)
        if structure != before or not is_bundle(now):
            inside, new, old = difference_in(name, before, structure)
            self.refusal = self.refusal or (
                f"changes Python state, which a replay would not: `{inside}` is {new}, was {old}: of a container that "
                "is made anew, a replay moves tensors and numbers; keep other things that change in attributes of "
                "their own"
            )
            return
        for keys, hint in was.hints.items():
            number = part_at(now, keys)
            known = is_live(number) or self._is_fixed(number, hint)
            if not known and not is_same_content(hint, number):
                advice = OWN_TEXTS if type(hint) is str else COMPUTED
                self._refuse(".".join(map(str, (name, *keys))), number, hint, advice)
                return
        found = self._objects[at]
        kind, can_change = type(found).__name__, next(changeable_in(found), None) is not None
        if can_change and was.is_at(found):
            self.refusal = self.refusal or (
                f"changes the {kind} in `{name}` in place, where earlier calls put another one{CARRIED}"
            )
            return
        if any(id(each) in self._elsewhere for each in changeable_in(found)):
            self.refusal = self.refusal or (
                f"leaves in `{name}` a {kind} {HELD_TOO}: put a copy there (`{_COPIES.get(kind, 'copy.copy(...)')}`), "
                "or a tuple, which nobody can change"
            )
            return
        self.moved[place.place] = place
        self.numbers[place.place] = numbers
        self.effects.append((Assigned(name, place), now))

    def _assigned_alike(self) -> list[tuple[Any, Any]]:
        """The containers in several places, without those at places to which the step assigns nothing."""
        places = self._places.values
        found = {e.place.place: e for e, _ in self.effects if type(e) is Assigned}
        effects = {at: found[p.place] for at, (_, p) in enumerate(places) if p.place in found}

        def named(where: Any) -> Any:
            return (None if where[0] is None else effects[where[0]]), where[1]

        return [
            (named(source), named(to))
            for source, to in self._one_object
            if all(where[0] is None or where[0] in effects for where in (source, to))
        ]

    def _is_new_leaf(self, now: Any) -> bool:
        """Whether a value is a tensor that the step has made and that requires a gradient."""
        if type(now) is not Tensor or not now.requires_grad or not now.is_leaf:
            return False
        storages = self._recorder.storages
        return all(e.ref.storage != storages.serial_of(now) for e in storages.externals)

    def _is_fixed(self, now: Any, was: Any) -> bool:
        """Whether what stands in the place of a flag or a text is the same at every call that passes the guards."""
        if type(now) is not type(was):
            return False
        return type(now) is bool or (type(now) is str and (now in self._places.texts or now == was))

    def _is_constant(self, name: str, now: Any) -> bool:
        return (type(now), repr(now)) in self._places.constants[name]

    def _refuse(self, name: str, now: Any, was: Any, advice: str = OUTSIDE) -> None:
        new = "gone" if is_absent(now) else _brief(now)
        change = f"`{name}` is {new}, was {_brief(was)}{advice}"
        self.refusal = self.refusal or f"changes Python state, which a replay would not: {change}"

    def _finish_list(self, name: str, place: Held, was: Any, items: list[Any]) -> None:
        now = content(place)
        if self._reads.found is not None and may_grow(now) and len(now) != len(items):
            self.refusal = self.refusal or (
                f"appends to `{name}`, and reads it by {self._reads.found}: a replay appends alone: compare or print "
                "the object outside the step"
            )
            return
        if now is not was and may_grow(now):
            self.refusal = self.refusal or (
                f"changes Python state, which a replay would not: `{name}` is another list, to which the step appends: "
                f"make it with all its items (`[a, b]`), or keep one list and read it outside the step"
            )
            return
        if now is not was or not may_grow(now) or len(now) < len(items):
            self._refuse(name, now, items, FEWER_ITEMS)
            return
        if any(a is not b for a, b in zip(now, items, strict=False)):
            self._refuse(name, now, items, MORE_ITEMS)
            return
        for at in range(len(items), len(now)):
            is_fresh = is_alone(Held(now, at))
            leaves, spec = flatten_result(now[at])
            if not is_fresh or not all(map(_is_repeatable, leaves)):
                self.refusal = self.refusal or (
                    f"appends to `{name}` a {type(now[at]).__name__} that a replay cannot make again: `{name}` "
                    f"is a {type(now).__name__} of {len(now)}, was one of {len(items)}: append numbers and tensors, or "
                    "tuples and dicts of these"
                )
                return
            self.effects.append((Appended(name, place), unflatten_result(leaves, spec)))
            if any(map(is_live, leaves)):
                now[at] = plain_tree(now[at])

    @property
    def key(self) -> Moves | None:
        """How the state was moved; None: it was not."""
        if not self.effects:
            return None
        log = self._recorder.scalar_log
        shape: list[Hashable] = []
        constants: list[Hashable] = []
        for source, to in self.one_object:
            shape += [(of and of.what, *keys) for of, keys in (source, to)]
        for effect, value in self.effects:
            leaves, spec = flatten_result(value)
            shape += [effect.what, str(spec)]
            shape += [_shape(leaf, expression_of(leaf, log), constants) for leaf in leaves]
        facts: list[Hashable] = [(name, flag) for name, _, flag in self._places.flags]
        for fact in log.facts.values() if log is not None else ():
            facts += [_shape(None, fact.expression, facts), repr(fact.value)]
        return Moves(tuple(shape), tuple(constants), tuple(facts))


def _tensors_at(place: Held, value: Any) -> Iterator[tuple[weakref.ref[Tensor], MovedPlace]]:
    """The tensors at a place, alone or in a bundle, each with its own place."""
    if isinstance(value, Tensor):
        yield weakref.ref(value), MovedPlace(place.container, place.key)
    elif is_bundle(value):
        for key, each in elements_in(value) or ():
            yield from _tensors_at(Held(place, key), each)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor) or type(value) is weakref.ReferenceType:
        return "a tensor"
    if type(value) is Bundle or is_bundle(value):
        return "a container of tensors"
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)


def _is_repeatable(leaf: Any) -> bool:
    return is_live(leaf) or isinstance(leaf, Tensor) or type(leaf) in NUMBERS


def _shape(leaf: Any, expression: Any, constants: list[Hashable]) -> Hashable:
    """What a leaf is made of, without its constants, which are added to `constants`."""
    if isinstance(leaf, Tensor):
        return "tensor", str(leaf.dtype)
    if expression is None:
        constants.append((type(leaf), repr(leaf)))
        return "constant"
    steps: list[Hashable] = []
    numbers: dict[Any, int] = {}  # of each subexpression
    for part in bottom_up(expression, numbers):
        numbers[part] = len(numbers)
        if not isinstance(part, Applied):
            steps.append(part.name if isinstance(part, ScalarInput) else "item")
            continue
        constants += [(type(a), repr(a)) for a in part.args if not is_expression(a)]
        steps.append((part.function, *(numbers.get(a) for a in part.args if is_expression(a))))
    return tuple(steps)
