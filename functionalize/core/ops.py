"""What the engine sees: tensors as (storage, geometry), ops as `OpRecord`.

Before:  `aten.mul.Tensor(<tensor>, <tensor>)`, two Python objects that may alias
After:   `OpRecord(aten.mul.Tensor, (TensorRef(s0, f32[4]@0), TensorRef(s0, f32[2, 2]@0)))`

Invariant: two tensors with equal `TensorRef` have the same value, whatever Python objects they are.
No tensor is kept alive by a record (see Note [Hold tensors weakly]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat import CapturedTraceback, TensorMetadata


class Geometry(NamedTuple):
    """How a tensor looks at its storage. `offset` and `stride` count elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        n = 1
        for s in self.size:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of data, without gaps."""
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes from the start of the storage to past the last element; 0 when there is none."""
        last = self.offset
        for s, st in zip(self.size, self.stride, strict=True):
            if s == 0:
                return 0
            last += (s - 1) * st
        return (last + 1) * self.dtype.itemsize

    @property
    def start(self) -> int:
        """Bytes from the start of the storage to the first element."""
        return self.offset * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for s, st in zip(reversed(self.size), reversed(self.stride), strict=True):
            if s == 0:
                return True
            if s != 1:
                if st != expected:
                    return False
                expected *= s
        return True

    @property
    def is_dense(self) -> bool:
        """Covers `end - start` bytes with no gap and no overlap, in any order of dimensions."""
        return self.numel == 0 or (not self.overlaps and self.end - self.start == self.nbytes)

    @property
    def overlaps(self) -> bool:
        """Whether two elements may share a memory location."""
        if self.numel <= 1:
            return False
        reach = 0
        for st, s in sorted(
            (st, s) for s, st in zip(self.size, self.stride, strict=True) if s != 1
        ):
            if st <= reach:
                return True
            reach += (s - 1) * st
        return False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        text = f"{dtype}{list(self.size)}"
        if not self.is_contiguous:
            text += f" stride {list(self.stride)}"
        if self.offset:
            text += f" offset {self.offset}"
        return text


_NO_NEG = frozenset({torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def geometry_of(tensor: Tensor) -> Geometry:
    """The geometry of a strided tensor. Negative and conjugate bits matter only where a dtype can have them."""
    dtype = tensor.dtype
    if dtype in _NO_NEG:
        return Geometry(tensor.shape, tensor.stride(), tensor.storage_offset(), dtype)
    return Geometry(
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def contiguous_geometry(size: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Geometry:
    """The row-major geometry of `size`."""
    stride: list[int] = []
    step = 1
    for s in reversed(size):
        stride.append(step)
        step *= max(s, 1)
    return Geometry(tuple(size), tuple(reversed(stride)), offset, dtype)


class TensorRef(NamedTuple):
    """A tensor as the engine knows it: which storage, and how it looks at it."""

    storage: int
    geometry: Geometry

    def __str__(self) -> str:
        return f"s{self.storage}:{self.geometry}"


def map_refs(fn: Callable[[TensorRef], Any], arg: Any) -> Any:
    """`arg` with `fn` applied to every `TensorRef`, through lists, tuples and dicts."""
    kind = type(arg)
    if kind is TensorRef:
        return fn(arg)
    if kind is list:
        return [map_refs(fn, a) for a in arg]
    if kind is tuple:
        return tuple(map_refs(fn, a) for a in arg)
    if kind is dict:
        return {k: map_refs(fn, a) for k, a in arg.items()}
    return arg


def iter_refs(arg: Any) -> Iterator[TensorRef]:
    """Every `TensorRef` inside `arg`, in order."""
    kind = type(arg)
    if kind is TensorRef:
        yield arg
    elif kind is list or kind is tuple:
        for a in arg:
            yield from iter_refs(a)
    elif kind is dict:
        for a in arg.values():
            yield from iter_refs(a)


@dataclass(slots=True)
class OpRecord:
    """One dispatched op (below autograd), or one storage resize.

    `nbytes` of every storage the op wrote is known to the recorder only; what can change it besides a
    resize (`out=` growing its tensor, `aten.resize_`) is told in `resized`: (storage, bytes) after the op.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any = None
    resized: tuple[tuple[int, int], ...] = ()
    traceback: CapturedTraceback | None = None
    seq_nr: int | None = None
    autograd_node: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


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
