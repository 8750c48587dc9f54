"""One replay's sizes of results: which of them the program takes, and what becomes of a replay that meets another one.

    admission.begin()
    index, s1 = admission.admit(0, index)      after the first op whose result has a size that depends on data
    admission.failure()                        after the graph, for its guard: None, or which size does not fit

A replay must not end in the middle of its graph: other ranks wait in its collectives. So a result of a size that does
not fit is repeated, or cut, to one that does, and the graph runs to its end. The guard fails before any write.
Invariant: every op of the graph gets tensors of sizes for which the functions of the program were compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

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
class Definition:
    """Where a size is read: at one dimension of a tensor, whose size is `coefficient * it + rest`.

    tensor: -1 where the result of the op is the size.
    """

    symbol: int
    tensor: int
    dim: int
    coefficient: int
    rest: Formula


@dataclass(frozen=True, slots=True)
class SizedOp:
    """An op whose result has a size that depends on data.

    dims: the number of dimensions of each tensor of its result. evaluate: from all sizes to those of these tensors.
    count: an op that counts: the function that gives its result; None: another op.
    """

    text: str
    defines: tuple[Definition, ...]
    dims: tuple[int, ...]
    evaluate: Callable[..., tuple[int, ...]]
    count: Formula | None = None


class Admission:
    """arguments: the sizes of the arguments. count: of all symbols."""

    def __init__(self, ops: Sequence[SizedOp], rules: Rules, arguments: Sizes, count: int) -> None:
        self._ops, self._rules, self._arguments = ops, rules, arguments
        self._count = count
        self.sizes: list[int] = []
        self.fits = True
        self._why: str | None = None
        self.begin()

    def begin(self) -> None:
        """A replay begins."""
        self.sizes = [*self._arguments, *[0] * (self._count - len(self._arguments))]
        self.fits, self._why = True, None

    def admit(self, number: int, value: Any) -> tuple[Any, ...]:
        """The result of an op, or one of another size in its place, and the sizes that it defines."""
        op, sizes = self._ops[number], self.sizes
        tensors = list(_tensors(value))
        for each in op.defines:
            now = value if each.tensor < 0 else tensors[each.tensor].shape[each.dim]
            size, rest = divmod(now - each.rest.value(tuple(sizes)), each.coefficient)
            why = "is no multiple" if rest else self._rules.why_refused(each.symbol, size)
            if why is not None:
                self._refuse(f"the result of {op.text}: its size {size} {why}")
                size = self._rules.compared_size(each.symbol, self._arguments)
            sizes[each.symbol] = size
        if op.count is not None and op.count.value(tuple(sizes)) != value:
            self._refuse(f"the result of {op.text}: it is {value}, expected was another size")
        found = iter(op.evaluate(*sizes))
        shapes = [tuple(islice(found, dims)) for dims in op.dims]
        if any(t.shape != shape for t, shape in zip(tensors, shapes, strict=True)):
            if self.fits:
                other = [tuple(t.shape) for t in tensors]
                self._refuse(f"the result of {op.text}: its size is {other}, expected was {shapes}")
            pairs = zip(tensors, shapes, strict=True)
            made = iter([_resized(t, shape) for t, shape in pairs])
            value = _replaced(value, lambda: next(made))
        return (value, *[sizes[each.symbol] for each in op.defines])

    def _refuse(self, why: str) -> None:
        self.fits, self._why = False, self._why or why

    def failure(self) -> str | None:
        """Why the sizes of this replay do not fit the program, or None."""
        return self._why or self._rules.why_not(tuple(self.sizes))


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
        return "the size of a result"

    def failure_of(self, results: Any) -> str | None:
        """Why the sizes do not fit, or None."""
        return self.admission.failure() if self.is_last else None


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another size with the same elements, some of them several times; zeros if there are none."""
    for dim, (now, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if now != size and now:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % now)
    return tensor if tensor.shape == shape else tensor.new_zeros(shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _replaced(value: Any, following: Callable[[], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return following()
    if isinstance(value, (list, tuple)):
        return tuple([_replaced(each, following) for each in value])
    return value
