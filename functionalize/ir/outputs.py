"""How a replay rebuilds the outputs of the callable: one role for each leaf of its result.

Result(0)            the first result of the graph         LeafItself(2)    an argument, the same object
InputView(1, g)      a view of an input's storage          SameAs(0)        the same object as output 0
Wrapped(DTensor, …)  a wrapper subclass around outputs     Constant(0.1)    a value that is no tensor
SourceItself(s)      the object at a place: a parameter
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize._compat.distributed import dtensors_like
from functionalize._compat.fast_guards import window_within
from functionalize.ir.epilogue import alias, placed
from functionalize.ir.inputs import Call, Source, watch
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.util.unchanged import Unchanged


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

    def watched(self, call: Call, facts: Unchanged) -> SourceItself | None:
        found = [watch(source, call, facts) for source in (self.source, *self.others)]
        return None if all(found) else self


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


class OutputBuilder:
    """Builds all outputs of a replay, and remembers how it built the gradients: by one call of C++ for each tensor."""

    def __init__(self, roles: Sequence[OutputRole]) -> None:
        self.roles = roles
        self._shards: list[_Shard | None] = [None] * len(roles)
        self._is_first = True

    def build(self, call: Call, homes: Sequence[Tensor], results: Sequence[Any]) -> list[Any]:
        """One output for each role. homes, results: see `output_of`."""
        outs: list[Any] = []
        returned: set[int] = set()
        for shard, role in zip(self._shards, self.roles, strict=True):
            made = shard.of(results) if shard is not None else None
            if made is None:
                if isinstance(role, SameAs):
                    made = outs[role.output]
                else:
                    made = output_of(role, call, homes, results, returned)
            outs.append(made)
        if self._is_first:
            self._is_first = False
            self._shards = [
                _Shard.like(made, role, results)
                for made, role in zip(outs, self.roles, strict=True)
            ]
        return outs


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """A DTensor around a part of the graph's result at `slot`, whose storage has the same size at every replay.

    place: size, stride and offset of the part. offset, nbytes: those of the result and of its storage.
    """

    slot: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]
    offset: int
    nbytes: int
    wrap: Callable[[Tensor], Tensor]

    @staticmethod
    def like(made: Any, role: OutputRole, results: Sequence[Any]) -> _Shard | None:
        """How to make a DTensor as this one; None if it is something else."""
        wrap = dtensors_like(made) if isinstance(role, Wrapped) else None
        if wrap is None or not isinstance(role, Wrapped):
            return None
        local, *others = [each for each in role.inner.values() if not isinstance(each, Constant)]
        if others or not isinstance(local, Result) or local.geometry is None:
            return None
        geometry, whole = local.geometry, results[local.slot]
        now, nbytes = geometry_of(whole), whole.untyped_storage().nbytes()
        if (geometry.dtype, geometry.conj, geometry.neg) != (now.dtype, now.conj, now.neg):
            return None
        if placed(whole, geometry).end > nbytes:
            return None
        place = (
            tuple(geometry.size),
            tuple(geometry.stride),
            geometry.offset,
        )  # no `torch.Size`: 2.15
        return _Shard(local.slot, place, now.offset, nbytes, wrap)

    def of(self, results: Sequence[Any]) -> Tensor | None:
        """The DTensor around these results; None if they are of other sizes."""
        whole = results[self.slot]
        if whole.storage_offset() != self.offset or whole.untyped_storage().nbytes() != self.nbytes:
            return None
        return self.wrap(window_within(whole, *self.place))
