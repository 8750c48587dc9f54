"""Lifted hyperparameters: inputs of the program, read at every call: `lr`, and those that were seen to change.

    keys = liftable(roots.optimizers)                      {("optimizer", 0, "lr")}
    with lifted(roots.optimizers, keys, recorder) as hyper, recorder:
        ...                                                optimizer.param_groups[0]["lr"] is a live number
    hyper.effects                                          what the step assigned and a replay assigns, with its value
    hyper.changed                                          text about another assignment by the step, or None

A number that the step changes itself (`group["step"] += 1` in `optimizer.step()`) is lifted from the next recording on.
In a program a lifted hyperparameter is a tensor of one element, made from the number at every call.

Invariant: after the step, also after an exception, `param_groups` holds no live number, and values that the step
assigned are kept. Refusal: a number whose type changed (or that became a tensor): its source raises, as a guard fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from functionalize._compat.stacks import CapturedTraceback
from functionalize.calls.late_numbers import LateNumber
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.ir.scalars import NUMBER_DTYPES
from functionalize.scalars.live_scalars import as_live, is_live, plain
from functionalize.util.reading import (
    elements_of,
    entry_of,
    item_of,
    items_of,
    put_entry,
    size_of,
)

if TYPE_CHECKING:
    from functionalize.recorder.recorder import Recorder
    from functionalize.scalars.scalar_log import ScalarLog

Key = tuple[str, int, str]  # optimizer, group, name of the hyperparameter
Optimizers = Mapping[str, torch.optim.Optimizer]


def is_liftable(value: Any) -> bool:
    """Whether a hyperparameter is a number, or a tuple of them."""
    if isinstance(value, tuple):
        return bool(value) and all(type(v) in NUMBER_DTYPES for v in value)
    return type(value) in NUMBER_DTYPES


def liftable(optimizers: Optimizers, names: Collection[str] = ("lr",)) -> frozenset[Key]:
    """Every hyperparameter with one of these names that can be lifted."""
    return frozenset(
        (name, i, key)
        for name, optimizer in optimizers.items()
        for i, group in enumerate(elements_of(optimizer.param_groups))
        for key in names
        if is_liftable(entry_of(group, key))
    )


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterNumber:
    """The source of a lifted hyperparameter: a number of a parameter group, as a tensor.

    index, length: the number is element `index` of a tuple of `length`; `index` None: it is no element of a tuple.
    kind: the type of the number, float or int.
    """

    optimizer: torch.optim.Optimizer
    name: str
    group: int
    key: str
    index: int | None
    length: int
    kind: type
    category: ClassVar[Category] = Category.OPTIMIZER_STATE

    def number(self) -> Any:
        """The number now. Raises `LookupError` if it is of another type or missing."""
        value = item_of(item_of(self.optimizer.param_groups, self.group), self.key)
        where = f"`{self.name}` group {self.group}: {self.key}"
        if self.index is not None:
            if not isinstance(value, tuple) or len(value) != self.length:
                raise LookupError(f"{where} is {value!r}, was a tuple of {self.length} numbers")
            value = value[self.index]
        check_kind(value, self.kind, where)
        return value

    def resolve(self, call: Call) -> Any:
        return number_tensor(self.number(), self.kind, f"`{self.name}`: {self.key}")


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumber:
    """A number of a parameter group, or element `index` of a tuple there, that a call has set."""

    group: dict[str, Any]
    name: str
    index: int | None

    def now(self) -> Any:
        """The number now."""
        value = self.group[self.name]
        return value if self.index is None else value[self.index]


def check_kind(value: Any, kind: type, where: str) -> None:
    """Raise `LookupError` unless a number is of this type. where: its place, for the message."""
    if type(value) is not kind:
        what = f"{value!r}, {'an' if isinstance(value, int) else 'a'} {type(value).__name__}"
        raise LookupError(f"{where} is {what}; the program was made for a {kind.__name__}")


def number_tensor(value: Any, kind: type, where: str) -> torch.Tensor:
    """A number of Python as an input of a program; raises `LookupError` for another type, or more than 64 bits."""
    check_kind(value, kind, where)
    try:
        return torch.tensor(value, dtype=NUMBER_DTYPES[kind])
    except (OverflowError, RuntimeError, ValueError) as error:
        raise LookupError(f"{where} does not fit 64 bits") from error


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterSet:
    """The effect of a step that assigns a number, made of other numbers, to a parameter group."""

    optimizer: torch.optim.Optimizer
    key: Key

    @property
    def what(self) -> str:
        """For messages."""
        return "sets `{}` group {}: {}".format(*self.key)

    def repeat(self, call: Call, value: Any) -> None:
        """Assign the value of this replay."""
        self.optimizer.param_groups[self.key[1]][self.key[2]] = value


@dataclass(slots=True)
class _Put:
    """A lifted hyperparameter: its group, its live value, its value before the step.

    late: its value after a call that a replay makes again; plain: the number of that.
    """

    group: dict[str, Any]
    key: Key
    live: Any
    was: Any
    late: Any = None
    plain: Any = None

    @property
    def name(self) -> str:
        """The hyperparameter."""
        return self.key[2]


class Lifted:
    """The result of `lifted`.

    effects: live numbers that the step assigned to lifted hyperparameters. changed: text about another assignment.
    wanted: hyperparameters that the step or a repeated call has set and that were no live numbers: they must become
    some.
    """

    def __init__(self, optimizers: Optimizers, log: ScalarLog | None) -> None:
        self.changed: str | None = None
        self.effects: list[tuple[HyperparameterSet, Any]] = []
        self.wanted: set[Key] = set()
        self._optimizers, self._log = optimizers, log
        self._put: list[_Put] = []
        self._entry = {
            (name, i, key): value
            for name, optimizer in optimizers.items()
            for i, group in enumerate(elements_of(optimizer.param_groups))
            for key, value in items_of(group)
            if type(value) in NUMBER_DTYPES
        }
        self._before: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = []

    def lift(self, keys: Collection[Key]) -> None:
        """Put live numbers into the groups of the optimizers."""
        assert self._log is not None
        for key in sorted(keys):
            optimizer = self._optimizers.get(key[0])
            groups = optimizer.param_groups if optimizer is not None else []
            if optimizer is None or key[1] >= size_of(groups):
                continue
            group = item_of(groups, key[1])
            was = entry_of(group, key[2])
            if is_liftable(was):
                put = _Put(group, key, _live(self._log, optimizer, key, was), was)
                self._put.append(put)
                put_entry(group, key[2], put.live)

    def restore(self) -> None:
        """Put plain numbers in the place of live ones, and hold none of these any more."""
        puts, self._put = self._put, []
        self._find_moved({put.key for put in puts})
        for put in puts:
            now = entry_of(put.group, put.name, put.was)
            if put.late is not None and now is put.late:
                put_entry(put.group, put.name, put.plain)
                continue
            left = put.was if now is put.live else _plain(now)
            put_entry(put.group, put.name, left)
            effect = HyperparameterSet(self._optimizers[put.key[0]], put.key)
            if is_live(now) and now is not put.live:
                self.effects.append((effect, now))
            elif now is not put.live and left != put.was:
                self.changed = (
                    f"{effect.what} to {left!r} (it was {put.was!r}), which a replay would not: change "
                    "it outside the step"
                )
            elif now is not put.live and self._log is not None:
                # A replay leaves what it finds, which must be this.
                self._log.learn_late(put.live.node)

    def _find_moved(self, lifted: Collection[Key]) -> None:
        """Numbers that are no live ones and that the step has changed: those of the next recording."""
        entry, self._entry = self._entry, {}
        for key, was in entry.items():
            groups = self._optimizers[key[0]].param_groups
            now = entry_of(item_of(groups, key[1]), key[2]) if key[1] < size_of(groups) else None
            now = _plain(now)  # read from a tensor
            if key not in lifted and type(now) is type(was) and now != was:
                self.wanted.add(key)

    def begin_change(self, optimizers: Sequence[Any]) -> str | None:
        """A call that a replay makes again sets hyperparameters: put plain numbers in their place.

        Returns why a replay could not make it again.
        """
        names = {id(optimizer): name for name, optimizer in self._optimizers.items()}
        if not all(id(optimizer) in names for optimizer in optimizers):
            return "of an optimizer that the search does not find"
        groups = {id(g) for optimizer in optimizers for g in optimizer.param_groups}
        mine = [put for put in self._put if id(put.group) in groups]
        for put in mine:
            if put.group.get(put.name) is not (put.live if put.late is None else put.late):
                return f"after the step has set {put.name}"
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(isinstance(group.get(name), torch.Tensor) for name in _SCHEDULED):
                    return "of hyperparameters that are tensors"
        for put in mine:
            put.group[put.name] = put.was if put.late is None else put.plain
        self._before = [
            (names[id(optimizer)], i, group, dict(group))
            for optimizer in {id(o): o for o in optimizers}.values()
            for i, group in enumerate(elements_of(optimizer.param_groups))
        ]
        return None

    def end_change(self, by: str, effect: Any) -> str | None:
        """The call has returned: what it may have set are late numbers from now on.

        by: the call. effect: that of a replay. Returns a change that is none of a number.
        """
        refused = None
        lifted = {(id(put.group), put.name): put for put in self._put}
        for name, i, group, before in self._before:
            for key in group.keys() | before.keys():
                now, was = group.get(key), before.get(key)
                put = lifted.get((id(group), key))
                if put is not None and self._log is not None:
                    put.plain, put.late = now, _late(self._log, put, now, effect)
                    group[key] = put.late
                elif now is not was and not (type(now) is type(was) and _same(now, was)):
                    if is_liftable(now) and is_liftable(was):
                        self.wanted.add((name, i, key))
                    else:
                        refused = f"{by} sets `{name}` group {i}: {key}, which is no number; step it outside the step"
        self._before = []
        return refused


_SCHEDULED = ("lr", "momentum", "betas", "initial_lr")


def _same(now: Any, was: Any) -> bool:
    return bool(now == was) if is_liftable(now) else False


@contextmanager
def lifted(optimizers: Optimizers, keys: Collection[Key], recorder: Recorder) -> Iterator[Lifted]:
    """A context in which these hyperparameters are live numbers of the recording, if its numbers are live."""
    found = recorder.calls.hyperparameters = Lifted(optimizers, recorder.scalar_log)
    try:
        if recorder.scalar_log is not None:
            found.lift(keys)
        yield found
    finally:
        found.restore()


def _late(log: ScalarLog, put: _Put, value: Any, effect: Any) -> Any:
    """The late numbers of a hyperparameter that a call has set."""

    def one(number: Any, index: int | None) -> Any:
        what = f"`{put.key[0]}` group {put.key[1]}: {put.name}"
        now = GroupNumber(put.group, put.name, index).now
        late = LateNumber(what, now, effect, CapturedTraceback.extract())
        return as_live(log.from_source(late, f"late_{put.name}", number))

    if isinstance(value, tuple):
        return tuple(one(v, i) for i, v in enumerate(value))
    return one(value, None)


def _live(log: ScalarLog, optimizer: torch.optim.Optimizer, key: Key, value: Any) -> Any:
    name, group, hyperparameter = key

    def one(number: Any, index: int | None, length: int) -> Any:
        source = HyperparameterNumber(
            optimizer, name, group, hyperparameter, index, length, type(number)
        )
        text = f"{name}.{hyperparameter}_{group}" + ("" if index is None else f"_{index}")
        return as_live(log.from_source(source, text, number))

    if isinstance(value, tuple):
        return tuple(one(v, i, len(value)) for i, v in enumerate(value))
    return one(value, None, 0)


def _plain(value: Any) -> Any:
    """A value that the step assigned, with live numbers replaced by plain ones."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(v) for v in value)
    return plain(value) if is_live(value) else value
