"""The engine's input: tensors as (storage, geometry), ops as `OpRecord`.

Before:  `aten.mul.Tensor(<tensor>, <tensor>)`, two Python objects that may alias
After:   `OpRecord(aten.mul.Tensor, (TensorRef(s0, f32[4]@0), TensorRef(s0, f32[2, 2]@0)))`

Invariant: two tensors with equal `TensorRef` have the same value, whatever Python objects they are.
A record keeps no tensor alive (see Note [Hold tensors weakly]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.graphs import TensorMetadata
from functionalize._compat.stacks import CapturedTraceback


class Geometry(NamedTuple):
    """The window of a tensor on its storage. `offset` and `stride` count elements of `dtype`.

    conj, neg: the tensor's lazy conjugate and negative bits.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return _layout(self).numel

    @property
    def nbytes(self) -> int:
        """Bytes of data, without gaps."""
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes from the start of the storage to the end of the last element; 0 if there are no elements."""
        return _layout(self).end

    @property
    def start(self) -> int:
        """Bytes from the start of the storage to the first element."""
        return self.offset * self.dtype.itemsize

    def runs(self) -> Iterator[tuple[int, int]]:
        """The bytes of the elements as [start, end) intervals: one per row, gaps left out."""
        if not self.numel:
            return
        pairs = zip(self.stride, self.size, strict=True)
        dims = sorted((st, s) for st, s in pairs if s != 1 and st)
        length = 1
        while dims and dims[0][0] == length:
            length *= dims.pop(0)[1]
        for index in itertools.product(*(range(s) for _, s in dims)):
            at = self.offset + sum(i * st for i, (st, _) in zip(index, dims, strict=True))
            yield at * self.dtype.itemsize, (at + length) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        return _layout(self).contiguous

    @property
    def is_dense(self) -> bool:
        """Whether the elements cover the bytes [start, end) without gap or overlap, in any order of dimensions."""
        layout = _layout(self)
        return not layout.overlaps and layout.span == layout.numel

    @property
    def overlaps(self) -> bool:
        """Whether two elements share a memory location."""
        return _layout(self).overlaps

    def is_writable(self, nbytes: int) -> bool:
        """Whether no two elements share memory, and all lie inside a storage of `nbytes` bytes."""
        layout = _layout(self)
        return not layout.overlaps and layout.end <= nbytes

    def __str__(self) -> str:
        # Not cached: a `SymbolicInt` equals the integer that it stands for, and is printed as its formula.
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"
        if not self.is_contiguous:
            text += f" stride {list(self.stride)}"
        if self.offset:
            text += f" offset {self.offset}"
        return text


class _Layout(NamedTuple):
    """Facts derived from a geometry. span: elements from the first to the last in memory. end: in bytes."""

    numel: int
    span: int
    contiguous: bool
    overlaps: bool
    end: int


@lru_cache(maxsize=2**16)
def _layout(geometry: Geometry) -> _Layout:
    size, stride = geometry.size, geometry.stride
    numel = math.prod(size)
    if numel == 0:
        return _Layout(0, 0, True, False, 0)
    dims = [(st, s) for s, st in zip(size, stride, strict=True) if s != 1]
    span = 1 + sum((s - 1) * st for st, s in dims)
    expected, contiguous = 1, True
    for st, s in reversed(dims):
        contiguous = contiguous and st == expected
        expected *= s
    overlaps = not contiguous and _overlap(dims, numel, span)
    end = (geometry.offset + span) * geometry.dtype.itemsize
    return _Layout(numel, span, contiguous, overlaps, end)


def _overlap(dims: list[tuple[int, int]], numel: int, span: int) -> bool:
    """Whether two indices address the same element. Exact up to `_ENUMERATED` elements, else conservative (True)."""
    reach, nested = 0, True
    for st, s in sorted(dims):
        nested = nested and st > reach
        reach += (s - 1) * st
    if nested:
        return False
    if numel > span or numel > _ENUMERATED:
        return True
    places = {0}
    for st, s in dims:
        places = {at + i * st for at in places for i in range(s)}
    return len(places) < numel


_ENUMERATED = 2**14
MASKS = (torch.bool, torch.uint8)  # as indices these select elements
_NO_BITS = frozenset({torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
# By dtype, which lazy bits a tensor may have: 0: none, 1: the negative one, 2: the conjugate one, too.
_LAZY_BITS = {
    dtype: 0 if dtype in _NO_BITS else 1 + dtype.is_complex
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of a strided tensor."""
    return tuple.__new__(Geometry, geometry_fields(tensor))  # half the time of calling the class


def geometry_fields(tensor: Tensor) -> tuple[Any, ...]:
    """The fields of `geometry_of`, a plain tuple; reads the conjugate and negative bits only of dtypes that have them.

    To compare with a `Geometry`, which it may equal: a recording compares five tensors per op, and most are known.
    """
    dtype = tensor.dtype
    bits = _LAZY_BITS[dtype]
    if bits == 1:  # nearly all
        offset = tensor.storage_offset()
        return tensor.shape, tensor.stride(), offset, dtype, False, tensor.is_neg()
    if not bits:
        return tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, False, False
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    return shape, stride, offset, dtype, tensor.is_conj(), tensor.is_neg()


def contiguous_geometry(size: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Geometry:
    """The row-major geometry of `size`."""
    stride: list[int] = []
    step = 1
    for s in reversed(size):
        stride.append(step)
        step *= max(s, 1)
    return Geometry(tuple(size), tuple(reversed(stride)), offset, dtype)


class TensorRef(NamedTuple):
    """A tensor in a record: the serial of its storage, and its geometry."""

    storage: int
    geometry: Geometry

    def __str__(self) -> str:
        return f"s{self.storage}:{self.geometry}"


def map_refs(fn: Callable[[TensorRef], Any], arg: Any) -> Any:
    """`arg` with `fn` applied to every `TensorRef`, through lists, tuples and dicts."""
    kind = type(arg)
    if kind is TensorRef:
        return fn(arg)
    if kind is list or kind is tuple:
        new = [
            fn(a) if type(a) is TensorRef else map_refs(fn, a) if type(a) in NESTED else a
            for a in arg
        ]
        return new if kind is list else tuple(new)
    if kind is dict:
        return {k: map_refs(fn, a) for k, a in arg.items()}
    return arg


NESTED = frozenset({list, tuple, dict})  # what arguments of ops may be nested in


def storages_in(records: Iterable[OpRecord]) -> set[int]:
    """The storages of all arguments of ops."""
    found: set[int] = set()
    for record in records:
        for arg in record.args:
            if type(arg) is TensorRef:
                found.add(arg[0])
            elif type(arg) in NESTED:
                found.update([ref[0] for ref in refs_in(arg)])
        if record.kwargs:
            found.update([ref[0] for ref in refs_in(record.kwargs)])
    return found


def refs_in(arg: Any) -> list[TensorRef]:
    """Every `TensorRef` inside `arg`, in order."""
    found: list[TensorRef] = []
    _collect(arg, found)
    return found


def _collect(arg: Any, found: list[TensorRef]) -> None:
    kind = type(arg)
    if kind is TensorRef:
        found.append(arg)
    elif kind is list or kind is tuple:
        for a in arg:
            if type(a) is TensorRef:
                found.append(a)
            elif type(a) in NESTED:
                _collect(a, found)
    elif kind is dict:
        for a in arg.values():
            _collect(a, found)


# Autograd nodes by their sequence numbers: the first, the last, whether gradients were enabled for the op after them.
# A plain tuple, as half of the ops of a forward make one.
Made = tuple[int, int, bool]


@dataclass(slots=True)
class OpRecord:
    """One dispatched op (below autograd), or one storage resize.

    target, args, kwargs, outputs: the call, with a `TensorRef` for every tensor.
    resized: (serial, bytes) of storages that the op resized as a side effect (`out=`, `aten.resize_`).
    traceback: the Python stack of the call.
    tape: the notes of the recording about autograd, see `tape/notes.py`. thread: that ran it; 0 is the recording's.
    seq_nr, autograd_node: the sequence number and the name of the autograd node that ran the op; None outside of one.
    phase: "backward" or "recompute" for an op that ran inside a backward, else None.
    makes: the autograd nodes that were made between the op before and this one.
    meta: "born": {serial: (bytes, device)} of the storages that the op made; further entries of single rules.
    live: whether an argument may be a `LiveNumber` (see `scalars.py`).
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None
    resized: tuple[tuple[int, int], ...] = ()
    traceback: CapturedTraceback | None = None
    tape: Any = None
    thread: int = 0
    seq_nr: int | None = None
    autograd_node: str | None = None
    phase: str | None = None
    makes: Made | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    live: bool = False


def is_sized_by_data(record: OpRecord) -> bool:
    """Whether the size of a result depends on the contents of an argument; of `x[indices]` if one of them is a mask."""
    if torch.Tag.dynamic_output_shape not in getattr(record.target, "tags", ()):
        return False
    if record.target is not torch.ops.aten.index.Tensor:
        return True
    indices = record.args[1]
    return any(each is not None and each.geometry.dtype in MASKS for each in indices)


def tensor_metadata(geometry: Geometry) -> TensorMetadata:
    """`geometry` in the form FX passes read from `node.meta["tensor_meta"]`."""
    return TensorMetadata(
        torch.Size(geometry.size),
        geometry.dtype,
        False,
        geometry.stride,
        torch.contiguous_format if geometry.is_contiguous else None,
        False,
        {},
    )
