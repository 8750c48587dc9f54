"""One walk over the Python state that a step can reach: what a replay needs from it, and what it must equal.

    state = walked(train_step, args)
    state.roots      Roots(modules={"model": ...}, optimizers={"optimizer": ...}, ...): where tensors are found again
    state.facts      [("self", "scale") -> 2.0, ...]: the ops of the step depend on them
    state.moving     facts about state that is read only by changing it: random generators, iterators, open files
    state.opaque     objects that the walk cannot read

The walk starts at the callable and its arguments, and goes breadth first through closures, defaults, globals, bound
objects, attributes and containers (`parts.py`), modules, their hooks and those of their parameters, and
optimizers. Attributes of the user's objects are facts if their name occurs in the code that was found
(`code_names.py`); objects in other attributes are searched for modules, optimizers and tensors alone. Since code
that is found later may name more attributes, the walk is repeated until no name is new.

Invariant: the same state gives the same facts in the same order. Facts are compared by value, tensors that no source
finds, modules and optimizers by identity. Nothing is changed.
Refusals, as text in `opaque`: objects with state that cannot be read.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from functionalize._compat.autograd import (
    accumulator_hooks,
    accumulator_tables,
    hook_functions,
    hook_tables,
    may_have_accumulator,
)
from functionalize._compat.modules import without_reports
from functionalize.errors import UncapturableError
from functionalize.scalars.live_scalars import is_live, left_behind
from functionalize.util.own_values import OWN_VALUES
from functionalize.util.packages import compares_classes, is_users_function
from functionalize.util.reading import (
    elements_of,
    item_of,
    items_of,
    modules_under,
    size_of,
    table_of,
    values_of,
)
from functionalize.util.tensor_wrappers import has_own_functions, own_functions_text
from functionalize.util.text import with_article
from functionalize.walk.code_names import NameFilter
from functionalize.walk.fact_text import NUMBERS, PLAIN, Path, has_plain_parts, text_of
from functionalize.walk.live_places import (
    LIVE_NUMBERS,
    NO_PLACES,
    LivePlaces,
    can_change,
    content,
    content_of,
    elements_in,
    is_users_object,
    may_grow,
    may_live,
    may_move,
    names_lists,
    state_now,
    state_numbers,
    states_of,
    tables_of,
    tensors_of_optimizer,
)
from functionalize.walk.parts import (
    BY_EQUALITY,
    CONTAINERS,
    SAME,
    WITH_ITEMS,
    Held,
    Is,
    Part,
    Visit,
    attribute,
    attributes_of_tensor,
    class_parts,
    inner_places,
    parts_of,
)
from functionalize.walk.probes import Probes
from functionalize.walk.roots import Identity, InPlace, Roots, free_name
from functionalize.walk.surroundings import around, process_generators, replaced, settings

_MAX_OBJECTS = 20_000  # a bound on the search for tensors in attributes that no code names
_MAX_FACTS = 200_000  # more are too many to compare at every call
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), OWN_VALUES}) - {"training"}
_OF_EVERY_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
_OF_STATES = frozenset(
    {"state", "state_dict", "step"}
)  # by which code reads the states of an optimizer
_FSDP_ATTRIBUTE = "__composable_api_"  # FSDP2's state: fsdp/python_state.py
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GUARDED = frozenset({Tensor, nn.Parameter, *NUMBERS})  # by `ModuleGuard` and by sources
_KEPT = (nn.Module, torch.optim.Optimizer, Tensor)


def walked(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    names: Sequence[str] | None = None,
    hooks_run_outside: bool = False,
    roots_only: bool = False,
    live: LivePlaces = NO_PLACES,
    asks_nodes: bool = True,
) -> PythonState:
    """The Python state that `fn` can reach. args: the leaves of its arguments. names: of these, from its signature.

    roots_only: whether only `roots` is wanted of it. live: places whose contents are no facts.
    asks_nodes: see `PythonState`.
    """
    known = _names_of(fn)
    while True:
        state = PythonState(known, False, hooks_run_outside, roots_only, live, asks_nodes)
        before = known.size
        _walk(state, fn, args, names)
        if known.size == before:
            break
    state.names = known.copy()
    state.roots.arguments = _argument_names(args, names)
    state.roots.found_elsewhere = live.holders
    return state


def walked_again(
    fn: Callable[..., Any],
    args: Sequence[Any],
    before: PythonState,
    is_replay: bool,
    names: NameFilter | None = None,
) -> PythonState:
    """The same walk at another time. is_replay: only the facts of the state are wanted. names: others than before."""
    names = before.names if names is None else names
    outside, asks = before.hooks_run_outside, before.asks_nodes
    state = PythonState(names, is_replay, outside, live=before.live, asks_nodes=asks)
    _walk(state, fn, args, before.roots.arguments or None, before.late)
    return state


def reachable(
    fn: Callable[..., Any], args: Sequence[Any] = (), names: Sequence[str] | None = None
) -> Roots:
    """The modules, optimizers and tensors that `fn` and its arguments lead to."""
    return walked(fn, args, names, roots_only=True).roots


def tensor_names(fn: Callable[..., Any]) -> dict[int, str]:
    """Names, by id, of the tensors that `fn` can reach; if `fn` is a module, relative to it."""
    roots = reachable(fn)
    names = {id(tensor): name for name, _, tensor in roots.tensors}
    for full, module in roots.walk():
        name = full.removeprefix("model").removeprefix(".") if isinstance(fn, nn.Module) else full
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            names.setdefault(id(tensor), f"{name}.{key}".removeprefix("."))
    return names


# The names of earlier walks from the same callable: most walks need no second one.
_KNOWN: weakref.WeakKeyDictionary[Any, NameFilter] = weakref.WeakKeyDictionary()


def _names_of(fn: Callable[..., Any]) -> NameFilter:
    try:
        return _KNOWN.setdefault(fn, NameFilter())
    except TypeError:  # an object without weak references, or without a hash
        return NameFilter(steps_optimizers=True)


def note_optimizer(fn: Callable[..., Any]) -> None:
    """`fn` calls an optimizer's `step`: later walks visit the hooks on all optimizers."""
    _names_of(fn).steps_optimizers = True


def _walk(
    state: PythonState,
    fn: Callable[..., Any],
    args: Sequence[Any],
    names: Sequence[str] | None,
    late: Sequence[tuple[str, Any]] = (),
) -> None:
    state.probes.add_start(args)
    visits = [Visit((), "", fn)]
    for name, leaf in zip(_argument_names(args, names), args, strict=True):
        if not issubclass(type(leaf), Tensor):
            if type(leaf) not in PLAIN:
                visits.append(Visit(((), name), name, leaf))
            continue
        if not state.hooks_run_outside and (hooks := state.hooks_on(leaf)):
            visits.append(Visit(((), f"{name}.hooks"), "hook", tuple(hooks)))
            state.probes.give_up()  # the next argument is another tensor, with hooks of its own
        if table := table_of(leaf):
            given = attributes_of_tensor(leaf, table, state.names)
            path: Path = ((), name)
            visits += [Visit((path, p.key), f"{name}.{p.key}", p.value) for p in given]
            state.probes.give_up()
    state.walk(visits, late)


def _argument_names(args: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    return [f"args_{i}" for i in range(len(args))] if names is None else [*names]


class PythonState:
    """The result of one walk.

    facts, paths: what determines the ops of the step, and the path of each.
    moving, moving_paths: facts about state that is read only by changing it.
    opaque: objects with state that cannot be read.
    seen: id -> path, of every object that determines ops.
    hooks_run_outside: whether autograd runs the hooks of plain parameters after a replay, so that they are no facts.
    asks_nodes: whether the hooks on nodes that accumulate gradients count. To ask for them leaves an empty table of
    hooks at a node, which changes the tape of a graph.
    probes: a fast test that a walk would find the same facts; see `probes.py`.
    late: modules and optimizers that only attributes that no code names lead to; a replay's walk starts there too.
    live: places whose contents are no facts. slots: path, place, content (of tensors weakly) of those that may be.
    lists: path, place and list of those that code of the step finds by a name.
    movable: path and place of all of these, and of those that hold nothing yet.
    empty: by id, the containers at such places that hold nothing yet.
    rings: path, object and size of each deque that takes so many elements and no more.
    holders: by id, the objects that determine ops and can be changed, each with its place.
    movers: path -> object and place, of each whose state is read only by changing it.
    shared: ids of objects that more than one path leads to. owners: id of a path -> type of the object there.
    """

    def __init__(
        self,
        names: NameFilter,
        is_replay: bool = False,
        hooks_run_outside: bool = False,
        roots_only: bool = False,
        live: LivePlaces = NO_PLACES,
        asks_nodes: bool = True,
    ) -> None:
        """is_replay: only facts are wanted. roots_only: only roots are, and some facts are left out."""
        self.names, self.roots = names, Roots()
        self.hooks_run_outside = hooks_run_outside
        self.asks_nodes = asks_nodes and not hooks_run_outside
        self.facts: list[Any] = []
        self.paths: list[Path] = []
        self.moving: list[Any] = []
        self.moving_paths: list[Path] = []
        self.opaque: list[str] = []
        self.seen: dict[int, Path] = {}
        self.late: list[tuple[str, Any]] = []
        self._is_replay, self._roots_only = is_replay, roots_only
        self.live = live
        self.slots: list[tuple[Path, Held, Any]] = []
        self.lists: list[tuple[Path, Held, list[Any]]] = []
        self.movable: list[tuple[Path, Held]] = []
        self.empty: dict[int, Any] = {}
        self.rings: list[tuple[Path, weakref.ref[deque[Any]], int]] = []
        self.shared: set[int] = set()
        self.holders: dict[int, tuple[Held, Any]] = {}
        self.movers: dict[Path, tuple[Any, Held | None]] = {}
        self.owners: dict[int, type] = {}
        self.probes = Probes(names, live)
        if roots_only:
            self.probes.give_up()
        self._seen_moving: dict[int, Path] = {}
        self._live_tensors: set[int] = set()  # ids of the tensors at live places
        self._containers: dict[int, Held] = {}  # by id, where containers were found first
        self._searched: set[int] = set()  # ids of objects that were visited and determine no ops
        self._of_modules: set[int] = set()  # ids of lists and tuples that are attributes of modules
        # In this order: facts, objects that determine no ops, parts of what is read only by changing it.
        self._queue, self._unnamed, self._moved = (deque[Visit]() for _ in range(3))
        self._weak = deque[Visit]()  # what weak references lead to
        self._classes: set[tuple[type, bool]] = set()
        self._alive: list[Any] = []  # keeps objects alive, so that their ids are not reused

    def walk(self, visits: Sequence[Visit], late: Sequence[tuple[str, Any]] = ()) -> None:
        """Visit these objects and all that they lead to."""
        for name, state in () if self._is_replay else process_generators():
            self._note(Visit((), "", None, moving=((), name)), state)
        self._queue += visits
        self.late += late
        if not self._roots_only:
            self._of_process()
        done = 0
        while True:
            while self._queue and len(self.facts) < _MAX_FACTS:
                self._visit(self._queue.popleft())
            if self._queue:
                self.opaque.append(f"`{text_of(self._queue[0].path)}` (too many objects)")
                self._queue.clear()
            while self._unnamed and len(self._searched) < _MAX_OBJECTS:
                self._visit(self._unnamed.popleft())
            if done < len(self.late):
                if all(self.late[done][1] is not known for _, known in self.late[:done]):
                    self._inside(*self.late[done])
                done += 1  # an object of `late` may be found again
            elif self._weak:
                self._may_die(self._weak[0])
                self._visit(self._weak.popleft())
            elif self._moved:
                self._visit(self._moved.popleft())
            else:
                break
        self._alive.clear()
        self.roots.keep_outermost()

    def _of_process(self) -> None:
        """The functions of torch that were replaced, and the settings of the process that code may read."""
        surroundings = partial(around, self.names.steps_optimizers)
        for part in (*replaced(self.names), *surroundings()):
            self._push(Visit((), "", None), part)
        if any(surroundings()):
            self.probes.add_value(lambda: [Is(part.value) for part in surroundings()])
        for name, read in settings(self.names):
            self._note(Visit(((), name), "", None), read())
            self.probes.add_value(read)
        self.probes.add_torch()

    def _note(self, visit: Visit, fact: Any) -> None:
        if visit.moving is not None:
            self.moving.append(fact)
            self.moving_paths.append(visit.moving)
        elif visit.is_fact:
            self.facts.append(fact)
            self.paths.append(visit.path)

    def _visit(self, visit: Visit) -> None:
        value, kind = visit.value, type(visit.value)
        if kind in BY_EQUALITY:
            if kind is str and visit.is_fact and not self._is_replay:
                self.names.add_format(value)
            return self._note(visit, value)
        if kind in PLAIN:  # -0.0 is not 0.0, True is not 1
            return self._note(visit, (kind, repr(value)))
        if is_live(value):  # of this recording, or left behind by one in an object of C code
            return self._note(visit, ("kind", kind, repr(left_behind(value))))
        # What is found elsewhere is compared there.
        seen = self.seen if visit.moving is None or id(value) in self.seen else self._seen_moving
        place = visit.place if self.live.values and issubclass(kind, Tensor) else None
        if place is not None and self.live.has(place):
            self._live_tensors.add(id(value))
        if self.live.values and visit.place is not None and elements_in(value) is not None:
            self._note_container(value, visit.place, id(value) in seen)
        if id(value) in seen:
            self.shared.add(id(value))
            if id(value) in self._live_tensors:  # other tensors may come there, and not alike
                self.probes.give_up()
            return self._note(visit, ("again", seen[id(value)]))
        if visit.is_fact:
            seen[id(value)] = visit.path
        elif id(value) in self._searched:
            return None
        else:
            self._searched.add(id(value))
        self._alive.append(value)
        if issubclass(kind, _KEPT):  # `isinstance` may call the user's `__getattribute__`
            return self._keep(visit, value)
        if kind is types.FunctionType and visit.is_fact and is_users_function(value):
            self.roots.functions.append(value)
            if not self._is_replay:
                self.names.add(value.__code__)
        is_held = visit.place is not None and visit.is_fact and not self._is_replay
        if is_held and not self.hooks_run_outside and can_change(value):
            self.holders[id(value)] = cast(Held, visit.place), value
        if kind is deque and visit.is_fact and not self._is_replay and value.maxlen is not None:
            self.rings.append((visit.path, weakref.ref(value), len(value)))
        parts = parts_of(value, self.names)
        for part in parts.still:
            still = Visit(visit.path, visit.name, None, is_fact=visit.is_fact, is_loose=True)
            self._push(still, part)
        itself = replace(visit)  # what a script gives an object is not moved with its content
        if not issubclass(kind, (type, types.FunctionType)):
            self._class_of(itself, kind)
        if parts.own_names is not None:
            if visit.is_fact and visit.moving is None:
                self.probes.add_own(value, parts)
            for part in parts.own:
                self._push(itself, part)
        if parts.is_moved and visit.moving is None:
            visit.moving = visit.path
            self.movers[visit.path] = value, visit.place
        if visit.moving is not None and self._is_replay:
            return None
        self._note(visit, parts.fact)
        is_moved = self._is_in_bundle(visit)
        if visit.is_fact and visit.moving is None and not is_moved:
            self.probes.add(value, parts)
        if issubclass(kind, weakref.ReferenceType):
            return self._weakly(visit, value())
        if parts.is_opaque and visit.is_fact:
            self.opaque.append(f"`{text_of(visit.path)}` ({with_article(kind.__name__)})")
        if issubclass(kind, CONTAINERS):
            self.roots.containers.append((visit.name, value))
        elif parts.attributes is not None and not is_moved:
            self.roots.add_object(visit, parts.attributes)
        for part in parts.held:
            self._push(visit, part, parts.is_loose)
        return None

    def _note_container(self, value: Any, place: Held, is_again: bool) -> None:
        """A container of which the step may put others in some of its places: they hold one object still."""
        first = self._containers.setdefault(id(value), place)
        if not is_again or not (self.live.has(place) or self.live.has(first)):
            return
        if first is place:  # it was found at no place before
            self.probes.give_up()
        else:
            self.probes.add_value(partial(_is_one_object, place, first))

    def _is_in_bundle(self, visit: Visit) -> bool:
        """Whether an object is a bundle that the step replaces as a whole, or a container in one."""
        place = visit.place
        return place is not None and (
            self.live.holds_bundle(place, visit.value) or self.live.is_inside(place)
        )

    def _weakly(self, visit: Visit, value: Any) -> None:
        """What a weak reference leads to. It is visited after all that is held: see `_may_die`."""
        if not issubclass(type(value), (*_KEPT, type(None))):
            self.probes.give_up()
        reached = replace(visit, value=value, place=None)
        if value is None or visit.moving is not None or not visit.is_fact:
            return self._visit(reached)
        return self._weak.append(reached)

    def _may_die(self, visit: Visit) -> None:
        """Refuse a weak reference whose object would live as long as the program, and may die before in eager."""
        value, kind = visit.value, type(visit.value)
        is_kept = issubclass(kind, (*_KEPT, *CONTAINERS, type, types.FunctionType))
        if self._is_replay or not is_kept or id(value) in self.seen or id(value) in self._searched:
            return
        if issubclass(kind, Tensor):
            known = {id(tensor) for tensor in self._tensors_of_roots()}
        else:
            home = vars(sys.modules.get(getattr(value, "__module__", None) or "", types))
            known = {id(each) for each in list(home.values())}
        if id(value) not in known:
            what = (
                f"a weak reference to {with_article(kind.__name__)} that nothing else there holds"
            )
            self.opaque.append(f"`{text_of(visit.path)}` ({what})")

    def _tensors_of_roots(self) -> Iterator[Any]:
        for _, module in self.roots.walk():
            yield from (*module._parameters.values(), *module._buffers.values())
        for optimizer in self.roots.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _is_live_list(self, value: Any) -> bool:
        if not self.live.lists or id(value) not in self.live.lists:
            return False
        if id(value) in self.seen:
            self.shared.add(id(value))
        self.seen[id(value)] = ()
        return True

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether arguments have as many leaves as those of this walk."""
        names = self.roots.arguments
        return not names or len(names) == len(leaves)

    def forget_slots(self) -> None:
        """Release what only a recording needs."""
        self.slots, self.lists, self.rings, self.movable, self.empty = [], [], [], [], {}
        self.owners, self.movers, self.holders = {}, {}, {}

    def _note_slot(self, holder: Visit, visit: Visit) -> None:
        """Note a place whose content a replay may be able to move."""
        if holder.value is not None:
            self.owners[id(holder.path)] = type(holder.value)
        if visit.place is None or not may_move(holder, visit):
            return
        is_list = may_grow(visit.value) and names_lists(holder.value)
        lives = may_live(visit.value) or is_live(visit.value)
        if is_list:
            self.lists.append((visit.path, visit.place, visit.value))
        if lives:
            self.slots.append((visit.path, visit.place, content_of(visit.value)))
        if type(visit.value) in WITH_ITEMS and not visit.value:
            self.empty[id(visit.value)] = visit.value
        if is_list or lives or visit.value is None:
            self.movable.append((visit.path, visit.place))

    def _push(self, holder: Visit, part: Part, is_loose: bool = False) -> None:
        place = part.place
        is_replaced = issubclass(type(holder.value), tuple) or self._is_in_bundle(holder)
        if place is not None and is_replaced:  # as a whole
            place = None if holder.place is None else Held(holder.place, part.key)
        name = holder.name if part.name is None else part.name
        if name.startswith("+"):
            name = holder.name + name[1:]
        elif part.name and "." in holder.name and is_users_object(holder.value):  # of a module
            name = f"{holder.name}.{name}"
        path = holder.path if part.key is SAME else (holder.path, part.key)
        is_loose, is_fact = is_loose or holder.is_loose, holder.is_fact and part.is_named
        kind_of_class = type(type(part.value))
        if kind_of_class is not type and compares_classes(kind_of_class):
            return self._note_uncomparable(Visit(path, name, part.value))
        visit = Visit(path, name, part.value, place, is_fact, is_loose, holder.moving)
        if visit.is_fact:
            if not self._is_replay:
                self._note_slot(holder, visit)
            kind = self.live.kind_at(place, part.value)
            if kind is None and not is_loose and self._is_live_list(part.value):
                kind = type(part.value)
            if kind is not None and visit.moving is None:
                if kind is str and not self._is_replay:
                    self.names.add_format(part.value)
                # An object that takes the place of this one may have a live place there, too, and a replay reads this.
                return self._note(visit, InPlace(kind, 0 if place is None else place.home))
            (self._queue if visit.moving is None else self._moved).append(visit)
        elif not self._is_replay:
            self._unnamed.append(visit)
        return None

    def _note_uncomparable(self, visit: Visit) -> None:
        """Refuse an object whose class cannot be found in a table without code of the user's."""
        kind = type(visit.value)
        if not self._is_replay:
            raise UncapturableError(
                f"reaches `{visit.name or text_of(visit.path)}`, {with_article(kind.__name__)}, whose metaclass "
                f"{type(kind).__name__} compares classes by code of its own, which a replay would not call: keep what "
                "the step needs of it in an object of another class"
            )
        self._note(visit, "an object of a class that compares classes")

    def _class_of(self, visit: Visit, kind: type) -> None:
        """Visit the attributes of the class of an object, once."""
        key = kind, visit.moving is None
        if visit.is_fact and key not in self._classes:
            self._classes.add(key)
            parts = class_parts(kind, self.names)
            self.probes.add_class_parts(kind, parts)
            for part in parts:
                self._push(Visit(visit.path, visit.name, None, moving=visit.moving), part)

    # -- tensors, modules and optimizers -----------------------------------------------------------

    def _keep(self, visit: Visit, value: Any) -> None:
        kind, is_loose = type(value), visit.is_loose or visit.moving is not None
        if issubclass(kind, Tensor):
            self._check_class(visit, value)
            if visit.place is None or is_loose:
                holder = None if visit.place is None else visit.place.container
                holder = holder.resolve() if isinstance(holder, Held) else holder
                has_source = id(holder) in self._of_modules  # it is read through the module
                found = InPlace(kind, 0) if has_source else Identity(weakref.ref(value), kind)
                return self._note(visit, found)
            if id(value) not in self._searched or not visit.is_fact:
                self.roots.tensors.append((visit.name, visit.place, value))
                self.roots.paths.setdefault(visit.place.place, visit.path)
            self._note(visit, InPlace(kind, visit.place.home))
            if visit.is_fact:
                self._hooks_of(visit, "hooks", value)
            return self._attributes_of_tensor(visit, value)
        self._note(visit, Identity(weakref.ref(value), kind))
        is_module = issubclass(kind, nn.Module)
        if visit.moving is not None or (is_loose and is_module):  # an optimizer is its own source
            return None
        table: dict[str, Any] = self.roots.modules if is_module else self.roots.optimizers
        if any(value is known for known in table.values()):
            return None
        name = free_name(visit.name or ("model" if is_module else "optimizer"), table)
        table[name] = value
        return self._inside(name, value) if visit.is_fact else self.late.append((name, value))

    def _check_class(self, visit: Visit, tensor: Any, key: Any = None) -> None:
        """Refuse a tensor of a class whose functions are the user's, before anything looks at it.

        key: its name in what is visited; None: it is visited itself.
        """
        if not self._is_replay and has_own_functions(type(tensor)):
            name = visit.name or text_of(visit.path)
            name = f"{name}.{key}" if type(key) is str else name
            raise UncapturableError(
                f"reaches `{name}`, {own_functions_text(type(tensor))}, which a replay does not: keep "
                f"`{name}.as_subclass(torch.Tensor)` there"
            )

    def _inside(self, name: str, value: Any) -> None:
        """Visit the contents of a root module or of an optimizer."""
        if not isinstance(value, nn.Module):
            return self._optimizer(Visit(((), name), name, value), value)
        self.seen.pop(id(value), None)
        self.roots.named_modules[name] = list(modules_under(value, name))
        for fqn, module in self.roots.named_modules[name]:
            if id(module) not in self.seen:
                self.seen[id(module)] = ((), fqn)
                self._module(Visit(((), fqn), fqn, module))
        return None

    def _module(self, visit: Visit) -> None:
        """The class of a module and its code, its attributes, its hooks and those of its parameters."""
        module, kind = visit.value, type(visit.value)
        self._note(visit, kind)
        self.probes.add_kind(module)
        if (kind, True) not in self._classes:
            if hasattr(kind, "forward"):  # a scripted module has none
                self._push(visit, Part("forward", kind.forward, kind.__name__))
                self.probes.add_attribute(kind, "forward")
            self._class_of(visit, kind)
        table = vars(module)
        if not self._roots_only:  # sources find tensors in attributes, nothing leads to other roots
            self._attributes_of(visit, table)
        for hooks in _HOOKS:
            if size_of(table[hooks]):
                self.probes.add_table(table[hooks])
                self._push(visit, Part(hooks, tuple(values_of(table[hooks])), "hook"))
        for key, tensor in (*items_of(module._parameters), *items_of(module._buffers)):
            self._check_class(visit, tensor, key)
            self._attributes_of_tensor(Visit((visit.path, key), key, tensor), tensor)
        for key, parameter in items_of(module._parameters):
            self._hooks_of(visit, f"{key}.hooks", parameter)

    def _hooks_of(self, visit: Visit, key: str, leaf: Tensor | None) -> None:
        """The hooks on the gradient of a leaf tensor, that run in the step."""
        if leaf is None or (self.hooks_run_outside and not hasattr(leaf, "device_mesh")):
            return
        for table in hook_tables(leaf):
            self.probes.add_table(table)
        if self.asks_nodes and may_have_accumulator(leaf):  # it may have another node later
            self.probes.add_value(partial(_hooks_of_node, weakref.ref(leaf)))
        if found := self.hooks_on(leaf):
            self._push(visit, Part(key, tuple(found), "hook"))

    def hooks_on(self, leaf: Tensor) -> list[Any]:
        """The hooks of a tensor that run in the step."""
        return [*hook_functions(leaf), *(accumulator_hooks(leaf) if self.asks_nodes else ())]

    def _attributes_of_tensor(self, visit: Visit, tensor: Tensor | None) -> None:
        """What a script has assigned to a tensor: `p.lr_scale = 2`, as far as code names it."""
        table = None if tensor is None else table_of(tensor)
        if table is None or not visit.is_fact:
            return
        self.probes.add_names_of_tensor(table)
        for part in attributes_of_tensor(tensor, table, self.names):
            self._push(visit, part)
        for names, place, inner in () if self._is_replay else inner_places(tensor):
            path: Path = visit.path
            for each in names:
                path = path, each
            self._note_slot(Visit(path[0], "", tensor), Visit(path, "", inner, place))

    def _attributes_of(self, visit: Visit, table: dict[str, Any]) -> None:
        """Attributes of a module other than modules, tensors and numbers."""
        self.probes.add_attribute(visit.value, "__dict__")
        self.probes.add_table(table)
        loose = Visit(visit.path, visit.name, None, is_loose=True)
        for key in sorted(table.keys() - _OF_EVERY_MODULE):
            value = without_reports(table[key])
            if not self._is_replay:
                self._note_slot(visit, Visit((visit.path, key), "", value, Held(table, key)))
            if self._is_live_list(value):
                self._note(Visit((visit.path, key), "", None), ("kind", type(value)))
                continue
            if type(value) in _GUARDED or key.startswith(_FSDP_ATTRIBUTE):
                continue
            is_carried = self.live.holds_bundle(Held(table, key), value)
            # Its tensors are found again there; into an object of the user's no source of the module looks.
            is_object = is_users_object(value)
            if is_carried or is_object or self.live.keys_of(value):
                part = attribute(table, key)
                part = part._replace(name=f"{visit.name}.{key}") if is_object else part
                self._push(Visit(visit.path, visit.name, None), part)
                continue
            if issubclass(type(value), (list, tuple, deque)):  # `isinstance` asks the object
                self._of_modules.add(id(value))
            if not self._is_replay:
                self._note_elements((visit.path, key), value)
            self._push(loose, attribute(table, key)._replace(value=value))

    def _note_elements(self, path: Path, value: Any) -> None:
        """Note the places in a container of a module: the step may change it in place."""
        if type(value) in WITH_ITEMS:
            holder = Visit(path, "", value)
            for key, each in elements_in(value) or ():
                self._note_slot(holder, Visit((path, key), "", each, Held(value, key)))

    def _optimizer(self, visit: Visit, optimizer: torch.optim.Optimizer) -> None:
        """The class of an optimizer, its hooks, replaced methods, and numbers in its state."""
        self._note(visit, type(optimizer))
        self.probes.add_kind(optimizer)
        self._class_of(visit, type(optimizer))
        for key in vars(optimizer):
            if key not in _OF_EVERY_OPTIMIZER:
                self._push(visit, attribute(vars(optimizer), key))
        for table in tables_of(optimizer):
            for key, value in items_of(table):
                self._check_class(visit, value, key)
        for g, group in enumerate(elements_of(optimizer.param_groups)):
            for i, parameter in enumerate(elements_of(item_of(group, "params"))):
                self._check_class(visit, parameter, "params")
                self._hooks_of(visit, f"{g}.{i}.hooks", parameter)
        self.probes.add_attribute(optimizer, "__dict__")
        self.probes.add_table(vars(optimizer))
        reads_state = self.names.is_dynamic or not _OF_STATES.isdisjoint(self.names.names)
        if (
            self.hooks_run_outside and not reads_state
        ):  # what steps it is no part of a captured forward
            return
        self.probes.add_optimizer(optimizer, partial(state_now, live=self.live))
        for key, fact in state_numbers(optimizer, self.live):
            self._note(Visit(((visit.path, "state"), key), "", None), fact)
        states = [each for each in values_of(optimizer.state) if type(each) is dict]
        for state in () if self._is_replay else states_of(optimizer):
            for key, value in items_of(state):
                if type(value) in LIVE_NUMBERS:
                    place = Visit(((visit.path, "state"), key), "", value, Held(state, key))
                    self._note_slot(visit, place)
        # The step may put others there.
        for key, held, tensor in () if self._is_replay else tensors_of_optimizer(optimizer):
            self._note_slot(visit, Visit(((visit.path, "state"), key), "", tensor, held))
        for at, state in enumerate(states):
            self._containers_of(visit, at, state)
        self._tables_of(visit, optimizer)

    def _tables_of(self, visit: Visit, optimizer: torch.optim.Optimizer) -> None:
        """What scripts keep in an optimizer's tables beside numbers and tensors; to which of these a replay writes."""
        tables = tables_of(optimizer)
        for at, table in enumerate(tables):
            if self.live.keys_of(table):  # `load_state_dict` makes others
                self._note(Visit(((visit.path, "tables"), at), "", None), ("live", at))
        self.probes.add_table(optimizer.defaults)
        named: dict[str, Any] = {"state": optimizer.state, "defaults": optimizer.defaults}
        named |= {f"group_{i}": g for i, g in enumerate(elements_of(optimizer.param_groups))}
        for name, table in named.items():
            holder = Visit((visit.path, name), f"{visit.name}.{name}", table)
            for key, value in items_of(table):
                is_own = type(key) is str and key != "params"
                if is_own and not _is_compared(table, value, optimizer):
                    self._push(holder, Part(key, value, f"+.{key}", Held(table, key)))

    def _containers_of(self, visit: Visit, at: int, state: dict[Any, Any]) -> None:
        """The containers of tensors in an optimizer's state of one parameter: rings of gradients, histories."""
        keys = [key for key, value in state.items() if elements_in(value) is not None]
        if not keys:
            return
        self.probes.add_table(state, frozenset(keys))
        holder = Visit(((visit.path, "state"), at), f"{visit.name}.state_{at}", state)
        for key in keys:
            part = Part(key, state[key], f"+.{key}", Held(state, key))
            self._push(holder, part)


def _is_compared(table: Any, value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether something else compares what stands in an optimizer's table: tensors, numbers, hyperparameters."""
    if issubclass(type(value), Tensor):
        return True
    return table is not optimizer.defaults and (
        type(value) in PLAIN or (table is not optimizer.state and has_plain_parts(value))
    )


def _is_one_object(place: Held, other: Held) -> bool:
    return content(place) is content(other)


def _hooks_of_node(leaf: weakref.ref[Tensor]) -> list[dict[Any, Any]]:
    """The hooks on the node that accumulates the gradient of a leaf now, by the numbers that torch gives to hooks."""
    found = leaf()
    return [] if found is None else list(map(dict, accumulator_tables(found)))
