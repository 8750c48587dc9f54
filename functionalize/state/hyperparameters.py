"""Lifted hyperparameters: inputs of the program, read at every call: `lr`, and those that were seen to change.

    keys = liftable(roots.optimizers)                      {("optimizer", 0, "lr")}
    with lifted(roots.optimizers, keys, recorder) as hyper, recorder:
        ...                                                optimizer.param_groups[0]["lr"] is a live number
    hyper.changed                                          text about an assignment by the step, or None

In a program a lifted hyperparameter is a tensor of one element, made from the number at every call.

Invariant: after the step, also after an exception, `param_groups` holds no live number, and values that the step
assigned are kept. Refusal: a number whose type changed (or that became a tensor): its source raises, as a guard fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from functionalize.ir.inputs import Call
from functionalize.planning.timeline.timeline import Category
from functionalize.scalars.live_scalars import as_live, is_live, plain

if TYPE_CHECKING:
    from functionalize.recorder.recorder import Recorder
    from functionalize.scalars.scalar_log import ScalarLog

Key = tuple[str, int, str]  # optimizer, group, name of the hyperparameter
Optimizers = Mapping[str, torch.optim.Optimizer]

_DTYPES: Mapping[type, torch.dtype] = {float: torch.float64, int: torch.int64}


def is_liftable(value: Any) -> bool:
    """Whether a hyperparameter is a number, or a tuple of them."""
    if isinstance(value, tuple):
        return bool(value) and all(type(v) in _DTYPES for v in value)
    return type(value) in _DTYPES


def liftable(optimizers: Optimizers, names: Collection[str] = ("lr",)) -> frozenset[Key]:
    """Every hyperparameter with one of these names that can be lifted."""
    return frozenset(
        (name, i, key)
        for name, optimizer in optimizers.items()
        for i, group in enumerate(optimizer.param_groups)
        for key in names
        if is_liftable(group.get(key))
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
        value = self.optimizer.param_groups[self.group][self.key]
        where = f"`{self.name}` group {self.group}: {self.key}"
        if self.index is not None:
            if not isinstance(value, tuple) or len(value) != self.length:
                raise LookupError(f"{where} is {value!r}, was a tuple of {self.length} numbers")
            value = value[self.index]
        if type(value) is not self.kind:
            what = f"{value!r}, {'an' if isinstance(value, int) else 'a'} {type(value).__name__}"
            raise LookupError(f"{where} is {what}; the program was made for a {self.kind.__name__}")
        return value

    def resolve(self, call: Call) -> Any:
        try:
            return torch.tensor(self.number(), dtype=_DTYPES[self.kind])
        except OverflowError as error:
            raise LookupError(f"`{self.name}`: {self.key} does not fit 64 bits") from error


class Lifted:
    """The result of `lifted`. changed: text about an assignment by the step to a lifted hyperparameter, or None."""

    def __init__(self) -> None:
        self.changed: str | None = None


@contextmanager
def lifted(optimizers: Optimizers, keys: Collection[Key], recorder: Recorder) -> Iterator[Lifted]:
    """A context in which these hyperparameters are live numbers of the recording, if its numbers are live."""
    found = Lifted()
    log = recorder.scalar_log
    if log is None:
        yield found
        return
    put: list[tuple[dict[str, Any], Key, Any, Any]] = []  # group, key, live value, value before
    try:
        for key in sorted(keys):
            optimizer = optimizers.get(key[0])
            groups = optimizer.param_groups if optimizer is not None else []
            if optimizer is None or key[1] >= len(groups):
                continue
            group, was = groups[key[1]], groups[key[1]].get(key[2])
            if is_liftable(was):
                put.append((group, key, _live(log, optimizer, key, was), was))
                group[key[2]] = put[-1][2]
        yield found
    finally:
        for group, key, live, was in put:
            now = group.get(key[2], was)
            group[key[2]] = was if now is live else _plain(now)
            if now is not live and group[key[2]] != was:
                found.changed = (
                    f"sets `{key[0]}` group {key[1]}: {key[2]} to {group[key[2]]!r} (it was {was!r}), which "
                    "a replay would not: change it outside the step (call `scheduler.step()` after it)"
                )


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
