"""What a callable returns, as a replay makes it again: one role for each leaf of its result.

Result(0)            the first value of the graph          LeafItself(2)    an argument, the same object
InputView(1, g)      a view of an input's storage          SameAs(0)        the object that an earlier output is
Wrapped(DTensor, …)  a wrapper subclass around outputs     Constant(0.1)    no tensor
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize.ir.epilogue import alias, placed
from functionalize.ir.inputs import Call
from functionalize.ir.ops import Geometry, geometry_of


@dataclass(frozen=True, slots=True)
class Result:
    """What the graph returns at `slot`, as it is, or as `geometry`, which counts from its first element."""

    slot: int
    geometry: Geometry | None = None


@dataclass(frozen=True, slots=True)
class InputView:
    """A view of an input's storage."""

    input: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class LeafItself:
    """The object the caller passed as that leaf."""

    leaf: int


@dataclass(frozen=True, slots=True)
class SameAs:
    """The very object that an earlier output is."""

    output: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An output that is no tensor. made: by the program, which gives out a copy of its own at every replay."""

    value: Any
    made: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A wrapper subclass around inner outputs."""

    kind: type
    inner: dict[str, Any]
    context: Any
    size: Any
    stride: Any


OutputRole = Result | InputView | LeafItself | SameAs | Constant | Wrapped


def output_of(
    role: OutputRole,
    call: Call,
    homes: Sequence[Tensor],
    results: Sequence[Any],
    given: set[int],
) -> Any:
    """One output of a replay, an object of its own; `given`: slots that were given out as they are."""
    if isinstance(role, Constant):
        return copy.deepcopy(role.value) if role.made else role.value
    if isinstance(role, LeafItself):
        return call.leaves[role.leaf]
    if isinstance(role, Wrapped):
        inner = {k: output_of(r, call, homes, results, given) for k, r in role.inner.items()}
        rebuild: Any = role.kind
        return rebuild.__tensor_unflatten__(inner, role.context, role.size, role.stride)
    if isinstance(role, InputView):
        return alias(homes[role.input], role.geometry)
    assert isinstance(role, Result)
    whole = results[role.slot]
    if role.geometry is not None:
        geometry = placed(whole, role.geometry)
        if geometry != geometry_of(whole):
            return alias(whole, geometry)
    if role.slot in given and isinstance(whole, Tensor):
        return whole.detach()
    given.add(role.slot)
    return whole
