"""One replay's sizes of results: which of them the program takes, and what becomes of a replay that meets another one.

    admission.begin()
    s1 = admission.define(0, count)         after an op that counts the elements of a result
    index = admission.admit(1, index)       after the op whose result has as many
    admission.failure()                     after the graph, for its guard: None, or which size does not fit

A replay must not end in the middle of its graph: other ranks wait in its collectives. So a result of a size that does
not fit is repeated, or cut, to one that does, and the graph runs to its end. The guard fails before any write.
Invariant: every op of the graph gets tensors of sizes for which the functions of the program were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize.program.early_guard import A_SIZE
from functionalize.program.metadata import tensors_of
from functionalize.templates.fitting import Formula, Sizes


class Rules(Protocol):
    """What is known of the sizes of a class of calls: `LateClass`."""

    def why_refused(self, symbol: int, size: int) -> str | None:
        """Why a size is none that the program takes, by itself; None: it takes it."""
        ...

    def compared_size(self, symbol: int, arguments: Sizes) -> int:
        """A size that it takes. arguments: the sizes of those of the call."""
        ...

    def why_not(self, sizes: Sizes) -> str | None:
        """Why the program does not hold for all sizes of a call; None: it does."""
        ...


@dataclass(frozen=True, slots=True)
class SizedOp:
    """An op whose result has a size that depends on data, or that counts the elements of one.

    dims: the number of dimensions of each tensor of its result. evaluate: from all sizes to those of these tensors.
    count: of an op that counts: the function that gives its result. symbol: the size that this result defines.
    """

    text: str
    dims: tuple[int, ...]
    evaluate: Callable[..., tuple[int, ...]]
    count: Formula | None = None
    symbol: int | None = None


class Admission:
    """arguments: the sizes of the arguments. count: of all symbols."""

    def __init__(self, ops: Sequence[SizedOp], rules: Rules, arguments: Sizes, count: int) -> None:
        self._ops, self._rules, self._arguments = ops, rules, arguments
        self._count = count
        self.begin()

    def begin(self) -> None:
        """A replay begins."""
        self._sizes = [*self._arguments, *[0] * (self._count - len(self._arguments))]
        self._why: str | None = None

    @property
    def fits(self) -> bool:
        """Whether all sizes so far do."""
        return self._why is None

    def admit(self, number: int, value: Any) -> Any:
        """The result of an op, or one of another size in its place."""
        op, sizes = self._ops[number], self._sizes
        if op.count is not None and op.count.value(tuple(sizes)) != value:
            self._refuse(f"the result of {op.text}: it is {value}, expected was another size")
        tensors, found = list(tensors_of(value)), iter(op.evaluate(*sizes))
        shapes = [tuple(islice(found, dims)) for dims in op.dims]
        if all(t.shape == shape for t, shape in zip(tensors, shapes, strict=True)):
            return value
        if self.fits:
            other = [tuple(t.shape) for t in tensors]
            self._refuse(f"the result of {op.text}: its size is {other}, expected was {shapes}")
        resized = map(_resized, tensors, shapes)
        return _replaced(value, lambda: next(resized))

    def define(self, number: int, size: int) -> int:
        """The size that an op has counted, or one that fits in its place."""
        op = self._ops[number]
        assert op.symbol is not None
        if (why := self._rules.why_refused(op.symbol, size)) is not None:
            self._refuse(f"the result of {op.text}: its size {size} {why}")
            size = self._rules.compared_size(op.symbol, self._arguments)
        self._sizes[op.symbol] = size
        return size

    def _refuse(self, why: str) -> None:
        self._why = self._why or why

    def failure(self) -> str | None:
        """Why the sizes of this replay do not fit the program, or None."""
        return self._why or self._rules.why_not(tuple(self._sizes))


@dataclass(frozen=True, slots=True, eq=False)
class LateSizeGuard:
    """A guard that the sizes of results fit the program, in the place of one on the count of one result.

    slot, where: of that. is_last: whether it asks; the others pass.
    """

    slot: int
    where: str
    admission: Admission
    is_last: bool

    @property
    def value(self) -> str:
        """What is expected, for texts."""
        return "any size that fits"

    @property
    def what(self) -> str:
        """What it is on, for texts."""
        return A_SIZE

    def failure_of(self, results: Any) -> str | None:
        """Why the sizes do not fit, or None."""
        return self.admission.failure() if self.is_last else None


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another size with the same elements, some of them several times; zeros if there are none."""
    for dim, (now, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if now != size and now:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % now)
    return tensor if tensor.shape == shape else tensor.new_zeros(shape)


def _replaced(value: Any, following: Callable[[], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return following()
    if isinstance(value, (list, tuple)):
        return tuple([_replaced(each, following) for each in value])
    return value
