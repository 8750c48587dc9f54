"""Live numbers that outlive their recording: plain ones take their places, whoever holds them.

    outliving(log, leaves)                         after the step: these numbers, which are no leaves of its result
    settle_escaped(log, leaves)                    they become constants of the program, too
    replace_escaped(log)                           after an exception
    without_live(log, result)                      the result, in which no live number is left, either

Invariant: what Python holds is what eager leaves there. Where it cannot be changed (a tuple of any class, a frozenset,
a slice), whoever holds it gets another one: the result and a place that hold the same one hold the same one afterwards.
Objects of C code whose contents Python cannot set keep a live number, which behaves as a constant from then on.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from functionalize.scalars.live_scalars import is_live, left_behind, plain_tree
from functionalize.scalars.scalar_log import ScalarLog
from functionalize.util.reading import is_a, table_of
from functionalize.util.structure import are_leaves, attributes_of

_MOST_NESTED = 8  # tuples, and other objects that cannot be changed
_NOT_OPENED = (type, types.ModuleType, types.FrameType, Tensor, nn.Module, torch.optim.Optimizer)


def outliving(log: ScalarLog, leaves: Sequence[Any]) -> list[Any]:
    """The live numbers that exist still, other than as `leaves` of the result; those inside of such a leaf count."""
    held = set(map(id, leaves)) - set(map(id, _inside(leaves)))
    if log.escaped(held):
        gc.collect()  # some may be garbage in cycles
    return log.escaped(held)


def _inside(leaves: Sequence[Any]) -> list[Any]:
    """The live numbers in objects that no replay opens: in a default argument, a partial, an exception."""
    found: list[Any] = []
    pending = [(leaf, 0) for leaf in leaves if not (are_leaves([leaf]) or is_live(leaf))]
    seen: set[int] = set()
    while pending:
        value, depth = pending.pop()
        if is_live(value):
            found.append(value)
        elif depth <= _MOST_NESTED and id(value) not in seen and not is_a(value, _NOT_OPENED):
            seen.add(id(value))
            is_function = is_a(value, types.FunctionType)
            held = _held_by(value) if is_function else gc.get_referents(value)
            pending += [(each, depth + 1) for each in held]
    return found


def _held_by(fn: types.FunctionType) -> tuple[Any, ...]:
    """What a function has of its own, without the names of its module."""
    return fn.__closure__, fn.__defaults__, fn.__kwdefaults__, vars(fn)


def settle_escaped(log: ScalarLog, leaves: Sequence[Any]) -> None:
    """Make constants of the live numbers that outlive their recording other than as `leaves` of the result.

    A closure, an object of C code or a queue holds them: a replay returns or leaves this object as it is.
    """
    late = outliving(log, leaves)
    for number in late:
        log.learn_late(number.node)
    _replace_by_plain(late)


def replace_escaped(log: ScalarLog | None) -> None:
    """Put plain numbers in the places of all live ones of a recording that exist still. None: it has none."""
    if log is not None:
        _replace_by_plain(log.escaped(()))


def without_live(log: ScalarLog | None, result: list[Any]) -> Any:
    """The result of a step, without live numbers, when these are replaced wherever they are.

    result: a list of it alone, since another holder would keep what is replaced there.
    """
    replace_escaped(log)
    try:
        return plain_tree(result[0])
    except RecursionError:  # it contains itself
        return result[0]


def _replace_by_plain(live: Sequence[Any]) -> None:
    """Put plain numbers in the places of live ones: in dicts, lists, cells and attributes, whoever holds them."""
    _replace(live, {id(number): left_behind(number) for number in live}, _MOST_NESTED)


def _replace(live: Sequence[Any], wanted: dict[int, Any], depth: int) -> None:
    """Put others in the places of objects. wanted: by the ids of these. depth: of unchangeable objects around them."""
    if not live:
        return
    fixed: list[Any] = []  # holders that cannot be changed
    for holder in gc.get_referrers(*live):
        kind = type(holder)
        if holder is live or holder is wanted:
            continue
        if issubclass(kind, (tuple, frozenset, slice)):
            fixed.append(holder)
        elif kind is types.CellType:
            holder.cell_contents = wanted.get(id(holder.cell_contents), holder.cell_contents)
        elif issubclass(kind, (list, deque)):
            base: Any = list if issubclass(kind, list) else deque
            for i, value in enumerate(list(base.__iter__(holder))):
                if id(value) in wanted:
                    base.__setitem__(holder, i, wanted[id(value)])
        elif issubclass(kind, set):
            members = [wanted.get(id(each), each) for each in set.__iter__(holder)]
            set.clear(holder)
            set.update(holder, members)
        elif issubclass(kind, dict):
            _replace_in(holder, wanted)
        else:
            _replace_in_object(holder, wanted)
    if fixed and depth:
        others = {id(old): _rebuilt(old, wanted) for old in fixed}
        _replace(fixed, {at: new for at, new in others.items() if new is not None}, depth - 1)


def _rebuilt(old: Any, wanted: dict[int, Any]) -> Any:
    """An object that cannot be changed, with others in it; None if none can be made: a type of C code."""
    kind: Any = type(old)
    if kind is slice:
        parts = (wanted.get(id(each), each) for each in (old.start, old.stop, old.step))
        return slice(*parts)
    base: Any = tuple if issubclass(kind, tuple) else frozenset
    try:
        new = base.__new__(kind, [wanted.get(id(each), each) for each in base.__iter__(old)])
    except TypeError:
        return None
    if table := table_of(old):
        object.__getattribute__(new, "__dict__").update(table)
    return new


def _replace_in(table: dict[Any, Any], wanted: dict[int, Any]) -> None:
    """In a dict, whose order stays."""
    kind: Any = OrderedDict if issubclass(type(table), OrderedDict) else dict
    items = list(kind.items(table))
    if any(id(key) in wanted for key, _ in items):
        kind.clear(table)
        for key, value in items:
            kind.__setitem__(table, wanted.get(id(key), key), wanted.get(id(value), value))
        return
    for key, value in items:
        if id(value) in wanted:
            kind.__setitem__(table, key, wanted[id(value)])


def _replace_in_object(holder: Any, wanted: dict[int, Any]) -> None:
    """In the attributes of an object, in its slots, and in what functions, partials and exceptions hold in C."""
    table = table_of(holder)
    for name, value in attributes_of(holder).items():
        if id(value) in wanted and table is not None and name in table:
            table[name] = wanted[id(value)]
        elif id(value) in wanted:
            with suppress(AttributeError, TypeError):  # no slot, but a property of that name
                object.__setattr__(holder, name, wanted[id(value)])
    if is_a(holder, types.FunctionType) and id(holder.__defaults__) in wanted:
        holder.__defaults__ = wanted[id(holder.__defaults__)]
    elif is_a(holder, BaseException) and id(holder.args) in wanted:
        holder.args = wanted[id(holder.args)]
    elif is_a(holder, functools.partial) and id(holder.args) in wanted:
        state = holder.func, wanted[id(holder.args)], holder.keywords, table
        functools.partial.__setstate__(holder, state)  # type: ignore[attr-defined]
