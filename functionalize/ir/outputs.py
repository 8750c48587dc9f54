"""How a replay rebuilds the outputs of the callable: one role for each leaf of its result.

Result(0)            the first result of the graph         LeafItself(2)    an argument, the same object
InputView(1, g)      a view of an input's storage          SameAs(0)        the same object as output 0
Wrapped(DTensor, …)  a wrapper subclass around outputs     Constant(0.1)    a value that is no tensor
SourceItself(s)      the object at a place: a parameter
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize.ir.epilogue import alias, placed
from functionalize.ir.inputs import Call, Source
from functionalize.ir.ops import Geometry, geometry_of


@dataclass(frozen=True, slots=True)
class Result:
    """The graph's result at `slot`; or a view of it of `geometry`, whose offset counts from its first element."""

    slot: int
    geometry: Geometry | None = None


@dataclass(frozen=True, slots=True)
class InputView:
    """A view of an input's storage."""

    input: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class LeafItself:
    """The object that the caller passed as leaf number `leaf` of the arguments."""

    leaf: int


@dataclass(frozen=True, slots=True, eq=False)
class SourceItself:
    """The tensor object that `source` finds, and that the step does not replace: a parameter, an optimizer's state.

    others: other places that held this object. A replay requires that they still hold the object of `source`.
    """

    source: Source
    others: tuple[Source, ...] = ()

    def failure(self, call: Call) -> str | None:
        """Why there is no such object now, or None."""
        try:
            found = self.source.resolve(call)
            same = all(other.resolve(call) is found for other in self.others)
        except (LookupError, AttributeError) as error:
            return f"is not where it was: {error}"
        return None if same else "is no longer one tensor with others that it was"


@dataclass(frozen=True, slots=True)
class SameAs:
    """The same object as the earlier output number `output`."""

    output: int


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """An output that is no tensor. made: whether the callable created it; every replay then returns a new copy."""

    value: Any
    made: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A wrapper subclass around inner outputs: the arguments of its `__tensor_unflatten__`."""

    kind: type
    inner: dict[str, Any]
    context: Any
    size: Any
    stride: Any


OutputRole = Result | InputView | LeafItself | SourceItself | SameAs | Constant | Wrapped


def output_of(
    role: OutputRole,
    call: Call,
    homes: Sequence[Tensor],
    results: Sequence[Any],
    returned: set[int],
) -> Any:
    """One output of a replay; different outputs are different tensor objects, except by `SameAs`.

    homes: for each input a tensor on its storage of entry. results: the graph's results.
    returned: slots whose tensor object is an output already; this call may add one.
    """
    if isinstance(role, Constant):
        return copy.deepcopy(role.value) if role.made else role.value
    if isinstance(role, LeafItself):
        return call.leaves[role.leaf]
    if isinstance(role, SourceItself):
        return role.source.resolve(call)
    if isinstance(role, Wrapped):
        inner = {k: output_of(r, call, homes, results, returned) for k, r in role.inner.items()}
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
    if role.slot in returned and isinstance(whole, Tensor):
        return whole.detach()
    returned.add(role.slot)
    return whole
