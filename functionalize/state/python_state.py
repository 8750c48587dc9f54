"""A guard on Python state that determines the ops of a step: functions, containers, classes, configurations.

    guard = SurroundingsGuard.of(fn, state)      state: `walked(fn, leaves)`, when the step begins
    criterion = nn.functional.l1_loss            `criterion` is the code of l1_loss, was the code of mse_loss
    self.weights["aux"] = 0.1                    `self.weights.aux` is 0.1, was 0.5
    model.config.scale = 2.0                     `model.config.scale` is 2.0, was 1.0
    block.forward = other                        `model.block.forward` is there, was not

A replay repeats the walk (`walker.py`) and compares the facts. After a recorded step the same comparison shows what
the step itself changed, which a replay would not; then also state that is read only by changing it: random generators,
iterators, files.

Invariant: facts are compared by value: a new list, lambda or bound method that equals the old one is no change.
Refusals: objects whose state cannot be read (`opaque`). A value that differs at every call makes the guard fail at
every call, which `ProgramCache` reports.
"""

from __future__ import annotations

import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from functionalize._compat.modules import hooks_of_optimizers
from functionalize.calls.draws import process_generators as drawn_from
from functionalize.ir.inputs import Call
from functionalize.state.step_guards import ModuleGuard
from functionalize.util.number_uses import any_needs_exact
from functionalize.util.reading import is_a, size_of, values_of
from functionalize.util.text import with_article
from functionalize.walk.code_uses import lines_of_changes, lines_of_methods, lines_of_uses
from functionalize.walk.fact_text import (
    KEPT_OBJECT,
    OUTSIDE,
    Path,
    advice_on,
    change_text,
    draws_text,
    portable,
    text_of,
)
from functionalize.walk.live_places import (
    FIXED,
    LIVE_NUMBERS,
    NO_PLACES,
    Bundle,
    LivePlaces,
    is_same_content,
)
from functionalize.walk.probes import Probes
from functionalize.walk.roots import InPlace, Roots
from functionalize.walk.surroundings import process_generators
from functionalize.walk.unread import AttributeReads, is_of_library
from functionalize.walk.walker import PythonState, note_optimizer, walked, walked_again

_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
_MOST_LINES = 3  # of the code that changes something, in a message
_ELEMENT = re.compile(r"_\d+$")
_NAMES = re.compile(r"[^.\[\]'\"]+")  # of a path: `model.0.weight`, `args[0]['labels']`
# What a message about a change says, and the attributes and methods by which code makes such a change.
_CHANGING = (
    ("another storage", ("data", "set_")),
    ("sizes or strides", ("resize_", "unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_")),
    ("a gradient", ("requires_grad", "requires_grad_")),
    ("_hooks", (*_HOOKS, "remove")),
    ("hooks on", (*_HOOKS, "register_hook", "register_post_accumulate_grad_hook", "remove")),
    ("parameter groups", ("add_param_group",)),
    ("appends to", ("append", "extend", "insert")),
)


@dataclass(slots=True)
class Filled:
    """A deque to which a call has added elements, and which takes so many and no more. size: before the call."""

    name: str
    ring: weakref.ref[deque[Any]]
    size: int

    def goes_on(self) -> str | None:
        """At the next call: why it will add more, as the one before did, or None."""
        ring = self.ring()
        if ring is None or ring.maxlen is None or not self.size < len(ring) < ring.maxlen:
            return None
        self.size = len(ring)
        return f"fills `{self.name}`, which holds {self.size} of {ring.maxlen} elements"


@dataclass(frozen=True, slots=True, eq=False)
class SurroundingsGuard:
    """The Python state around a step equals that at the capture.

    state: the walk at the capture; its probes are those of the last walk that found the same facts.
    stale: text about a difference that was found when the program was loaded, or None.
    entries: the number of entries in each optimizer's state, per parameter. Their values are inputs of the program.
    """

    fn: Callable[..., Any]
    state: PythonState
    stale: str | None = None
    entries: tuple[tuple[str, tuple[int, ...]], ...] = ()
    is_read_by_reader: ClassVar[bool] = True
    is_slow: ClassVar[bool] = True  # it walks all objects where something has changed

    @staticmethod
    def of(fn: Callable[..., Any], state: PythonState) -> SurroundingsGuard:
        """The guard for the Python state around `fn` as it was at the walk."""
        return SurroundingsGuard(fn, state, None, _entries(state.roots))

    def without_unread(self, leaves: Sequence[Any], reads: AttributeReads) -> SurroundingsGuard:
        """The guard without the attributes of libraries' objects that the step, which has just run, did not touch.

        The step has changed nothing that is guarded, so that the facts are those of the entry.
        """
        observed, was = reads.observed(), self.state
        if not observed:
            return self
        names = was.names.copy()
        names.observed = observed
        now = walked_again(self.fn, leaves, was, is_replay=True, names=names)
        now.roots = was.roots
        return SurroundingsGuard(self.fn, now, self.stale, self.entries)

    def failure(self, call: Call) -> str | None:
        if self.stale is not None:
            return self.stale
        was, read = self.state, call.reader
        if was.probes.hold(call.leaves):
            read.walked(was.probes, SameObjects(was.probes))
            return None
        # Right after a walk they do not hold where a part of an object is made anew whenever it is read.
        read.moves()
        now = walked_again(self.fn, call.leaves, was, is_replay=True)
        failure = _difference(was.facts, was.paths, now.facts, now.paths)
        if failure is None:
            was.probes = now.probes
        return failure

    def varied(self, now: PythonState) -> LivePlaces:
        """The places of numbers that the step reads and that are others by this walk, of the same types."""
        was = self.state
        if self.stale is not None:
            return NO_PLACES
        paths = {
            path
            for new, old, path, was_path in zip(
                now.facts, was.facts, now.paths, was.paths, strict=False
            )
            if new != old and path == was_path and _kind_of(new) is _kind_of(old) is not None
        }
        owners = {path: now.owners.get(id(path[0])) for path in paths if path}
        of_libraries = {path for path, kind in owners.items() if kind and is_of_library(kind)}
        paths -= of_libraries  # their code reads these numbers in ways that nobody looks at
        return LivePlaces({p.place: p for path, p, _ in now.slots if path in paths})

    def filled(self) -> list[Filled]:
        """The deques that hold more elements than at the walk, and take so many and no more."""
        found = ((path, ring(), ring, size) for path, ring, size in self.state.rings)
        return [
            Filled(text_of(path), ring, size)
            for path, items, ring, size in found
            if items is not None and len(items) > size
        ]

    def change(self, call: Call, explained: Container[int] = ()) -> str | None:
        """A change that the step itself made and a replay would not; None without one.

        explained: ids of generators that a replay moves alike.
        """
        was = self.state
        generators = list(process_generators())
        if len(was.moving) == len(generators) and was.probes.hold(call.leaves):  # nearly always
            moving, found, advice = [state for _, state in generators], None, ""
        else:
            now = walked_again(self.fn, call.leaves, was, is_replay=False)
            moving, found = now.moving, _difference(was.facts, was.paths, now.facts, now.paths)
            changes = zip(now.facts, was.facts, now.paths, strict=False)
            advices = [
                advice_on(new, old, now.owners.get(id(path[0])) if path else None)
                for new, old, path in changes
                if new != old
            ]
            if found is not None and found.endswith("another object"):
                # What it holds may have more to say.
                advices = [*(each for each in advices if each != OUTSIDE), KEPT_OBJECT]
            advice = next(iter(advices), OUTSIDE)
            if found is None and (name := _replaced(was, now)) is not None:
                found, advice = f"`{name}` is another object", KEPT_OBJECT
        if found is None:
            for (name, before), (_, after) in zip(self.entries, _entries(was.roots), strict=True):
                if before != after:
                    counts = f"{sum(after)} entries for {len(after)} parameters, was {sum(before)} for {len(before)}"
                    found, advice = f"`{name}.state` has {counts}", OUTSIDE
        if found is not None:
            return f"changes Python state, which a replay would not: {found}{advice}"
        own = {((), name): (generator, None) for name, generator in drawn_from()}
        movers = {path: each for path, (each, _) in {**was.movers, **own}.items()}
        for fact, path, old in zip(moving, was.moving_paths, was.moving, strict=False):
            mover = movers.get(path)
            if fact != old and (mover is None or id(mover) not in explained):
                return draws_text(text_of(path), mover)
        return None

    @property
    def knows_hooks(self) -> bool:
        """Whether the walk has visited the hooks on all optimizers, or there are none."""
        return self.state.names.steps_optimizers or not any(
            hooks for _, hooks in hooks_of_optimizers()
        )

    @property
    def refusal(self) -> str | None:
        """Why no replay can compare the state, or None."""
        if not self.state.opaque:
            return None
        name = self.state.opaque[0].split("`")[1]
        more = f" and {len(self.state.opaque) - 1} more" if len(self.state.opaque) > 1 else ""
        return (
            f"reaches {self.state.opaque[0]}{more}, which may hold state that cannot be seen: pass what the step "
            f"needs of it as an argument{self.origin(name)}"
        )

    def origin(self, name: str, change: str = "") -> str:
        """Whose `name` is, a path as text, and the lines of the step's code that change it; for a message.

        Where no line does: those that use it. change: the text about the change.
        """
        state, last = self.state, name.rpartition(".")[2]
        paths = [p for p in (*state.paths, *state.moving_paths) if p and text_of(p) == name]
        owners = (state.owners.get(id(path[0])) for path in paths)
        owner = next((each for each in owners if each is not None), None)
        is_named = owner is not None and owner not in (types.FunctionType, types.MethodType)
        text = f"\n  `{last}` of {with_article(owner.__name__)}" if owner and is_named else ""
        is_moved = any(text_of(path) == name for path in state.moving_paths)
        found, lines = self._lines(name, change, is_moved)
        return text + "".join(f"\n  {found} at {line}" for line in lines[:_MOST_LINES])

    def _lines(self, name: str, change: str, is_moved: bool) -> tuple[str, list[str]]:
        """ "changed" or "used", and the lines that do so. is_moved: whether reads move it."""
        codes, (first, *rest) = self.state.names.codes, _NAMES.findall(name) or [name]
        last, *holders = [each for each in reversed(rest) if not each.isdigit()] or [first]
        if (
            held := _ELEMENT.sub("", last)
        ) != last:  # an input that is an element of what an attribute holds
            holders = [held, *holders]
        if lines := lines_of_changes(codes, last):
            return "changed", lines
        if is_moved and (lines := lines_of_uses(codes, last)):
            return "used", lines
        methods = {each for text, names in _CHANGING if text in change for each in names}
        if lines := lines_of_methods(codes, methods):
            return "changed", lines
        for holder in holders:
            if lines := lines_of_changes(codes, holder):
                return "changed", lines
        # The first name may be `self`, which too many lines use.
        used = (lines_of_uses(codes, each) for each in (last, *holders, first))
        return "used", next((each for each in used if 0 < len(each) <= _MOST_LINES), [])

    def portable(self) -> list[list[str]]:
        """Pairs of path and fact, as texts that are comparable between processes."""
        found = zip(self.state.paths, self.state.facts, strict=True)
        return [[text_of(p), portable(f)] for p, f in found]

    @staticmethod
    def loaded(
        fn: Callable[..., Any], saved: Sequence[Sequence[str]], live: LivePlaces = NO_PLACES
    ) -> SurroundingsGuard:
        """The guard for saved facts: it fails if a fact differs in this process. live: places that are none."""
        note_optimizer(
            fn
        )  # the hooks on all optimizers are among the facts if the step has called them
        here = SurroundingsGuard.of(fn, walked(fn, live=live))
        found: dict[str, list[str]] = {}
        for path, fact in here.portable():
            found.setdefault(path, []).append(fact)
        for path, fact in saved:  # a path through an argument is not found here, and is skipped
            if path in found and fact not in found[path]:
                stale = f"`{path}` is not what it was when the program was saved"
                return SurroundingsGuard(fn, here.state, stale)
        return here


@dataclass(slots=True)
class ObservedState:
    """The guard on the Python state around one recording, and the attributes of libraries' objects that it touches.

    whole: the guard on all of it. without: the one without the others, once the step has run, and what it had touched.
    """

    whole: SurroundingsGuard
    reads: AttributeReads
    without: tuple[SurroundingsGuard, Any] | None = None

    def leave_unread(self, leaves: Sequence[Any]) -> None:
        """The step, or its forward, has ended, and has changed nothing that is guarded."""
        self.without = self.whole.without_unread(leaves, self.reads), self.reads.size

    @property
    def guard(self) -> SurroundingsGuard:
        """The guard of a program."""
        guard, size = self.without or (self.whole, None)
        return guard if size == self.reads.size else self.whole

    def forget_slots(self) -> None:
        """Release what only a recording needs."""
        for guard in {self.whole, self.guard}:
            guard.state.forget_slots()


class VaryingNumbers:
    """The places of numbers that code outside of a step changes: once it has, a number is live."""

    def __init__(self) -> None:
        self.found = NO_PLACES

    def learned(self, facts: Sequence[Any], now: PythonState) -> LivePlaces:
        """The numbers that may be live in the recording that begins. facts: at the last one. now: the walk before it.

        None while code may hand a number on to C code that takes exact ones alone.
        """
        found = NO_PLACES
        for fact in facts:
            if isinstance(fact, SurroundingsGuard):
                found |= fact.varied(now)
            elif isinstance(fact, ModuleGuard):
                found |= fact.varied()
        if found and not any_needs_exact(now.roots.functions):
            self.found |= found
        return self.found


@dataclass(frozen=True, slots=True, eq=False)
class SameObjects:
    """The objects among the arguments are those of the walk."""

    probes: Probes

    def failure(self, call: Call) -> str | None:
        return None if self.probes.starts_hold(call.leaves) else "an argument is another object"


def _difference(
    facts: list[Any], paths: list[Path], now: list[Any], paths_now: list[Path]
) -> str | None:
    if now == facts:
        return None
    for new, old, path, was_path in zip(now, facts, paths_now, paths, strict=False):
        if path != was_path:
            moved = _replaced_holder(facts, paths, now, paths_now)
            if moved is not None:
                return f"`{moved}` is another object"
            if path in paths and was_path not in paths_now:
                return f"`{text_of(was_path)}` is gone"
            return f"`{text_of(path)}` is there, was not (`{text_of(was_path)}` was)"
        if new != old:
            if _is_live(new) and _is_live(old) and path and new.kind is old.kind:
                return f"`{text_of(path[0])}` is another object"
            return change_text(path, new, old)
    longer, what = (paths_now, "new") if len(now) > len(facts) else (paths, "gone")
    return f"`{text_of(longer[min(len(now), len(facts))])}` is {what}"


def _replaced(was: PythonState, now: PythonState) -> str | None:
    """The name of a place in which the step has put another tensor, or another container of tensors; None: of none.

    No code of the step reads what is there, so that it is no fact; the loop around the step may.
    """
    before = {place.place: value for _, place, value in was.slots}
    for path, place, value in now.slots:
        is_of_tensors = type(value) is Bundle or type(value) is weakref.ReferenceType
        if not is_of_tensors or place.place not in before or place.place in was.live.values:
            continue
        if not is_same_content(before[place.place], value):
            return text_of(path)
    return None


def _kind_of(fact: Any) -> type | None:
    """The type of the number that a fact is about, or None. An int is its own fact, other numbers have a text."""
    kind = fact[0] if type(fact) is tuple and len(fact) == 2 else type(fact)
    return kind if kind in LIVE_NUMBERS else None


def _is_live(fact: Any) -> bool:
    """Whether a fact is about the number, the flag or the text at a live place."""
    return type(fact) is InPlace and (fact.kind in LIVE_NUMBERS or fact.kind in FIXED)


def _replaced_holder(
    facts: list[Any], paths: list[Path], now: list[Any], paths_now: list[Path]
) -> str | None:
    """The name of an object that another one has replaced, so that a live place in it is none any more; else None."""
    live = {text_of(path) for fact, path in zip(now, paths_now, strict=True) if _is_live(fact)}
    for fact, path in zip(facts, paths, strict=True):
        if _is_live(fact) and text_of(path) not in live and path:
            return text_of(path[0])
    return None


def _entries(roots: Roots) -> tuple[tuple[str, tuple[int, ...]], ...]:
    optimizers = roots.optimizers.items()
    return tuple((name, tuple(map(_size, values_of(o.state)))) for name, o in optimizers)


def _size(state: Any) -> int:
    """The number of entries in the state of a parameter; of what else an optimizer keeps there, one."""
    return size_of(state) if is_a(state, dict) else 1
