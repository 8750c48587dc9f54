"""The epilogue: the mutations of inputs that the caller must see after a replay, as data, and their execution.

    Resize(0, 64)    resize_storage_bytes_(x, 64)          Copy(0, geometry, 2)    x.copy_(result 2)
    Set(1, g, 0)     x.set_(storage of input 0, g)

Which actions a storage needs is decided in `epilogue_actions.py`.

One resize per storage, however many inputs alias it. An input tensor that ends on another storage or with
another geometry (`set_`, `resize_`, `t_`) gets a `Set`, after the copies.

Invariants: actions run only after every guard has passed. The allocation of storages that grow, which may fail, comes
first, and is undone if it fails: until it has succeeded, the caller's data is unchanged.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from functionalize.ir.ops import Geometry, geometry_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Resize:
    """`resize_storage_bytes_(input, nbytes)`."""

    input: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`copy_` of the graph's result at `slot` into the window `geometry` of the input's storage."""

    input: int
    geometry: Geometry
    slot: int


@dataclass(frozen=True, slots=True)
class Set:
    """`set_` of the input tensor to `geometry` on the storage of another input, or of the result at `slot`.

    Exactly one of `other` and `slot` is not None. For a result, `geometry.offset` counts from its first element.
    """

    input: int
    geometry: Geometry
    other: int | None
    slot: int | None


Action = Resize | Copy | Set


def window(tensor: Tensor, geometry: Geometry) -> Tensor:
    """A tensor of `geometry` on `tensor`'s storage; `tensor` itself if that is its geometry."""
    return tensor if geometry == geometry_of(tensor) else alias(tensor, geometry)


def alias(tensor: Tensor, geometry: Geometry) -> Tensor:
    """A new tensor of `geometry` on `tensor`'s storage, even if that is too small now (freed meanwhile)."""
    g, storage = geometry, tensor.untyped_storage()
    special = g.conj or g.neg or tensor.is_conj() or tensor.is_neg()
    nbytes = storage.nbytes()
    if g.dtype == tensor.dtype and not special and g.end <= nbytes:
        return tensor.detach().as_strided(g.size, g.stride, g.offset)
    made = torch.empty(0, dtype=g.dtype, device=tensor.device)
    made.set_(storage, g.offset, g.size, g.stride)
    if storage.nbytes() != nbytes:  # `set_` grows a storage to fit
        storage.resize_(nbytes)
    if g.conj:
        made = aten._conj.default(made)
    return aten._neg_view.default(made) if g.neg else made


def whole_copies(actions: Sequence[Action], geometries: Mapping[int, Geometry]) -> frozenset[int]:
    """The ids of the copies into all of an input. geometries: of inputs, as guards have compared them."""
    copies = (a for a in actions if isinstance(a, Copy))
    return frozenset(id(a) for a in copies if geometries.get(a.input) == a.geometry)


def apply_epilogue(
    actions: Sequence[Action],
    inputs: Sequence[Tensor],
    results: Sequence[Any],
    whole: Container[int] = (),
) -> Sequence[Tensor]:
    """Run every action, in order (under `no_grad`); returns, per input, a tensor on the storage it had on entry.

    whole: see `whole_copies`.
    """
    # A `Set` moves the input tensor itself: an alias keeps the storage of entry for the other actions.
    homes = inputs
    moved = {a.input for a in actions if isinstance(a, Set)}
    if moved:
        homes = [t.detach() if i in moved else t for i, t in enumerate(inputs)]
    _grow([a for a in actions if isinstance(a, Resize)], homes)
    for kind, group in groupby(actions, type):
        if kind is Copy:
            _copy_all(list(group), homes, results, whole)  # type: ignore[arg-type]
            continue
        for action in group:
            if isinstance(action, Resize):
                storage = homes[action.input].untyped_storage()
                if storage.nbytes() != action.nbytes:  # `_grow` has already resized those that grow
                    storage.resize_(action.nbytes)
                continue
            assert isinstance(action, Set)
            g, target = action.geometry, inputs[action.input]
            if action.slot is None:
                _move(target, homes[action.other or 0], g)
            else:
                _move(target, results[action.slot], placed(results[action.slot], g))
    return homes


def _grow(resizes: Sequence[Resize], homes: Sequence[Tensor]) -> None:
    """Grow every storage that an action makes larger; if one allocation fails, undo the others."""
    sizes: list[tuple[torch.UntypedStorage, int]] = []
    try:
        for action in resizes:
            storage = homes[action.input].untyped_storage()
            if action.nbytes > storage.nbytes():
                sizes.append((storage, storage.nbytes()))
                storage.resize_(action.nbytes)
    except BaseException:
        for storage, nbytes in sizes:
            storage.resize_(nbytes)
        raise


def _copy_all(
    copies: Sequence[Copy], homes: Sequence[Tensor], results: Sequence[Any], whole: Container[int]
) -> None:
    """Run several copies by one foreach call: a step writes hundreds of parameters and optimizer states.

    A result that is None was written by the graph's runner already.
    """
    copies = [c for c in copies if results[c.slot] is not None]
    if not copies:
        return
    # Reading a geometry takes as long as a fifth of a small copy.
    targets = [
        homes[c.input] if id(c) in whole else window(homes[c.input], c.geometry) for c in copies
    ]
    torch._foreach_copy_(targets, [results[c.slot] for c in copies])


def placed(whole: Tensor, geometry: Geometry) -> Geometry:
    """`geometry`, whose offset counts from the first element of `whole`, with an offset from the storage's start."""
    at = whole.storage_offset() * whole.dtype.itemsize // geometry.dtype.itemsize
    return geometry._replace(offset=geometry.offset + at)


def _move(target: Tensor, source: Tensor, geometry: Geometry) -> None:
    """Move `target` to `geometry` on `source`'s storage, whose size stays as it is."""
    g, storage = geometry, source.untyped_storage()
    if g.dtype != target.dtype or g.conj or g.neg or target.is_conj() or target.is_neg():
        target.data = alias(source, g)  # `set_` changes none of these
        return
    nbytes = storage.nbytes()
    if (
        g.end > nbytes
    ):  # freed meanwhile: grow it for the bounds check of `set_`, and shrink it again below
        storage.resize_(g.end)
    target.set_(storage, g.offset, g.size, g.stride)
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
