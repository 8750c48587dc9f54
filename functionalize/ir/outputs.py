"""How a replay rebuilds the outputs of the callable: one role for each leaf of its result.

Result(0)            the first result of the graph         LeafItself(2)    an argument, the same object
InputView(1, g)      a view of an input's storage          SameAs(0)        the same object as output 0
Wrapped(DTensor, …)  a wrapper subclass around outputs     Constant(0.1)    a value that is no tensor
SourceItself(s)      the object at a place: a parameter
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from functionalize._compat.distributed import make_dtensors, spec_of_dtensor
from functionalize._compat.fast_guards import window_within
from functionalize.ir.epilogue import alias, placed
from functionalize.ir.inputs import Call, Source
from functionalize.ir.ops import Geometry, geometry_of


@dataclass(frozen=True, slots=True)
class Result:
    """The graph's result at `slot`; or a view of it of `geometry`, whose offset counts from its first element.

    is_saved: whether a backward gets it, and not the caller: so it may share memory with another output.
    """

    slot: int
    geometry: Geometry | None = None
    is_saved: bool = False


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
    is_read_by_reader: ClassVar[bool] = True

    def failure(self, call: Call) -> str | None:
        """Why there is no such object now, or None."""
        read = call.reader
        try:
            found = read.find(self.source, call)
            same = all(read.find(other, call) is found for other in self.others)
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


class MadeAnew:
    """In the place of an object that a callable creates with objects of others in it, which a copy of it holds, too."""

    __slots__ = ("_kept", "_value")

    def __init__(self, value: Any, kept: Sequence[Any]) -> None:
        self._value, self._kept = value, kept

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self._value, {id(each): each for each in self._kept})


@dataclass(frozen=True, slots=True, eq=False)
class Wrapped:
    """A wrapper subclass around inner outputs: the arguments of its `__tensor_unflatten__`."""

    kind: type
    inner: dict[str, Any]
    context: Any
    size: Any
    stride: Any


OutputRole = Result | InputView | LeafItself | SourceItself | SameAs | Constant | Wrapped


def viewed_by(role: OutputRole) -> Iterator[int]:
    """The inputs on whose storages an output is a view."""
    if isinstance(role, InputView):
        yield role.input
    elif isinstance(role, Wrapped):
        for inner in role.inner.values():
            yield from viewed_by(inner)


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
    """Builds all outputs of a replay, and remembers how it built the gradients: by two calls of C++ for each one."""

    def __init__(self, roles: Sequence[OutputRole]) -> None:
        self.roles = roles
        self._shards: _Shards | None = None

    def build(self, call: Call, homes: Sequence[Tensor], results: Sequence[Any]) -> list[Any]:
        """One output for each role. homes, results: see `output_of`."""
        shards = self._shards
        outs = shards.of(results) if shards is not None else None
        if shards is not None and outs is not None:
            self._fill(outs, shards.others, call, homes, results)
            return outs
        outs = [None] * len(self.roles)
        self._fill(outs, range(len(outs)), call, homes, results)
        if shards is None:
            self._shards = _Shards.like(outs, self.roles, results)
        return outs

    def _fill(
        self,
        outs: list[Any],
        wanted: Iterable[int],
        call: Call,
        homes: Sequence[Tensor],
        results: Sequence[Any],
    ) -> None:
        returned: set[int] = set()
        for at in wanted:
            role = self.roles[at]
            if isinstance(role, SameAs):
                outs[at] = outs[role.output]
            else:
                outs[at] = output_of(role, call, homes, results, returned)


class _Shards:
    """Outputs that are DTensors around parts of the graph's results, whose storages have the same size at every replay.

    others: the indices of all other outputs.
    """

    def __init__(self, outputs: int, shards: Mapping[int, _Shard]) -> None:
        self.others = [at for at in range(outputs) if at not in shards]
        self._outputs, self._indices = outputs, list(shards)
        found = list(shards.values())
        self._wholes = {shard.slot: shard.whole for shard in found}
        self._slots = [shard.slot for shard in found]
        self._places = [list(each) for each in zip(*(s.place for s in found), strict=True)]
        self._specs = [shard.spec for shard in found]

    @staticmethod
    def like(outs: Sequence[Any], roles: Sequence[OutputRole], results: Sequence[Any]) -> _Shards:
        """How to make these outputs again."""
        found = {
            at: shard
            for at, (made, role) in enumerate(zip(outs, roles, strict=True))
            if (shard := _Shard.like(made, role, results)) is not None
        }
        return _Shards(len(roles), found)

    def of(self, results: Sequence[Any]) -> list[Any] | None:
        """The DTensors around these results, None for each other output; None if the results are of other sizes."""
        outs: list[Any] = [None] * self._outputs
        if not self._indices:
            return outs
        for slot, (offset, nbytes) in self._wholes.items():
            whole = results[slot]
            if whole.storage_offset() != offset or whole.untyped_storage().nbytes() != nbytes:
                return None
        wholes = map(results.__getitem__, self._slots)
        made = make_dtensors(map(window_within, wholes, *self._places), self._specs)
        for at, each in zip(self._indices, made, strict=True):
            outs[at] = each
        return outs


class _Shard(NamedTuple):
    """A DTensor with a spec around a part of the graph's result at `slot`.

    place: size, stride and offset of the part. whole: the offset of the result, and the size of its storage.
    """

    slot: int
    place: tuple[tuple[int, ...], tuple[int, ...], int]
    whole: tuple[int, int]
    spec: Any

    @staticmethod
    def like(made: Any, role: OutputRole, results: Sequence[Any]) -> _Shard | None:
        """How to make a DTensor as this one; None if it is something else."""
        spec = spec_of_dtensor(made) if isinstance(role, Wrapped) else None
        if spec is None or not isinstance(role, Wrapped):
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
        return _Shard(local.slot, place, (now.offset, nbytes), spec)
