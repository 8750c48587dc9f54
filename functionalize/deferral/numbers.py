"""The floats among the arguments of pending ops: constants of a program, or its inputs if they change.

    x.mul_(0.9); p.addcdiv_(m, v, value=-0.1)       the first time: 0.9 and -0.1 are constants
    x.mul_(0.9); p.addcdiv_(m, v, value=-0.053)     the second time: the second one is an input

A loop computes some of them anew in each iteration (a learning rate, the bias correction of Adam), and most never
change. So each is a constant until it was another one. Floats that decide the size of a result are part of the kind.
Invariant: two numbers are equal if they have the same bits, so 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functionalize.deferral.stream import PendingOp
from functionalize.ir.inputs import Argument
from functionalize.ir.ops import OpRecord
from functionalize.ir.scalars import LiveNumber, ScalarInput

# Changes of one kind, each with a program that has more inputs than the one before; the last has all floats as inputs.
_MOST_CHANGES = 3


class Numbers:
    """The floats of the streams of one kind. inputs: the positions of those that have changed."""

    def __init__(self, entries: Iterable[PendingOp]) -> None:
        self.inputs: tuple[int, ...] = ()
        self._first = [repr(each) for each in floats_of(entries)]
        self._changes = 0

    def compare(self, entries: Iterable[PendingOp]) -> bool:
        """Compare those of another stream; whether one has changed that is a constant so far."""
        found = [i for i, each in enumerate(floats_of(entries)) if repr(each) != self._first[i]]
        if set(found) <= set(self.inputs):
            return False
        self._changes += 1
        every = self._changes >= _MOST_CHANGES
        self.inputs = tuple(range(len(self._first)) if every else sorted({*self.inputs, *found}))
        return True

    def tensors(self, entries: Iterable[PendingOp]) -> list[Tensor]:
        """What a program gets for its inputs."""
        numbers = floats_of(entries)
        return [torch.tensor(numbers[i], dtype=torch.float64) for i in self.inputs]

    def records(self, entries: Iterable[PendingOp], inputs_before: int) -> Iterator[OpRecord]:
        """The ops of a stream, with live numbers for its inputs. inputs_before: how many storages come first."""
        leaf = {at: inputs_before + i for i, at in enumerate(self.inputs)}
        at = 0
        for entry in entries:
            first, at = at, at + len(entry.floats)
            if leaf.keys().isdisjoint(range(first, at)):
                yield entry.record
                continue
            numbers = iter(
                [
                    _input(leaf[i], each) if i in leaf else each
                    for i, each in enumerate(entry.floats, first)
                ]
            )
            record = entry.record
            args = tuple([_replaced(each, numbers) for each in record.args])
            kwargs = {k: _replaced(each, numbers) for k, each in record.kwargs.items()}
            yield replace(record, args=args, kwargs=kwargs, live=True)


def floats_of(entries: Iterable[PendingOp]) -> list[float]:
    """Those of a stream, in order: derived, since an interruption leaves an entry in the stream or none of it."""
    return [each for entry in entries for each in entry.floats]


def _input(leaf: int, value: float) -> LiveNumber:
    return LiveNumber(ScalarInput(Argument(leaf), f"number_{leaf}", value), value)


def _replaced(arg: Any, numbers: Iterator[Any]) -> Any:
    """`arg` with the next one of `numbers` for every float, in the order of `Stream.refer`."""
    kind = type(arg)
    if kind is float:
        return next(numbers)
    if kind is list or kind is tuple:
        return kind([_replaced(each, numbers) for each in arg])
    return arg
