"""One walk over the Python state that a step can reach: what a replay needs from it, and what it must equal.

    state = walked(train_step, args)
    state.roots      Roots(modules={"model": ...}, optimizers={"optimizer": ...}, ...): where tensors are found again
    state.facts      [("self", "scale") -> 2.0, ...]: the ops of the step depend on them
    state.moving     facts about state that is read only by changing it: random generators, iterators, open files

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

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from functionalize.walk.code_names import NameFilter
from functionalize.walk.fact_text import PLAIN
from functionalize.walk.live_places import NO_PLACES, LivePlaces
from functionalize.walk.parts import Visit
from functionalize.walk.roots import Roots
from functionalize.walk.walker import PythonState


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
    state.roots.only_appended = frozenset(live.lists)
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
        elif not state.hooks_run_outside and (hooks := state.hooks_on(leaf)):
            visits.append(Visit(((), f"{name}.hooks"), "hook", tuple(hooks)))
            state.probes.give_up()  # the next argument is another tensor, with hooks of its own
    state.walk(visits, late)


def _argument_names(args: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    return [f"args_{i}" for i in range(len(args))] if names is None else [*names]
