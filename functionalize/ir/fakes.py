"""Ops on fake tensors, where one that looks like an earlier one is not run again: layers of a model repeat.

    fakes = Fakes()
    with disable_current_modes(), torch.no_grad():
        out = fakes.run(aten.mm.default, (x, w), {})       fake tensors, as the op itself makes them
        out = fakes.run(aten.mm.default, (y, v), {})       of the same geometries: made from what the first one gave

FakeTensorMode has such a cache; looking in it costs several times what making the result does, as it must mind modes,
symbolic sizes and constants that a finished graph does not have.
Invariant: a result has the geometry, device and storage size that the op gives, a storage of its own where the op
makes one, and that of the same argument where it makes a view. What does not fit such a description is run each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.dispatch import plain_kernels
from functionalize._compat.fakes import FakeTensor, FakeTensorMode
from functionalize.ir.fake_mode import fake_mode
from functionalize.ir.ops import Geometry, geometry_of

aten = torch.ops.aten
_OVERLOAD = type(aten.mm.default)
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class _Unlike(Exception):
    """Two calls with such an argument cannot be told to be alike."""


class _Made(NamedTuple):
    """How one tensor of a result is made. of: the argument whose storage it views, None for one of its own."""

    geometry: Geometry
    device: torch.device
    of: int | None


class Repeats:
    """What ops gave in one fake mode, and the same again for calls that look the same."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, Any] = {}
        self._never: set[Any] = set()  # ops whose results cannot be described

    def run(self, target: Any, args: Any, kwargs: Any, op: Callable[[], Any]) -> Any:
        """What `target` gives for these arguments: by `op`, or as it did before. Gradients are off, or below us."""
        if target in self._never or not isinstance(target, _OVERLOAD):
            return op()
        if target._schema.is_mutable:
            self._never.add(target)
            return op()
        given: list[Tensor] = []
        try:
            key = (target, _key(args, given), _key(tuple(kwargs.items()), given), _default())
        except _Unlike:
            return op()
        recipe = self._known.get(key)
        if recipe is not None:
            return self._made(recipe, given)
        out = op()
        try:
            self._known[key] = _recipe(out, given)
        except _Unlike:
            if not _is_described(out):
                self._never.add(target)
        return out

    def _made(self, recipe: Any, given: list[Tensor]) -> Any:
        if not isinstance(recipe, _Made):
            return type(recipe)(self._made(each, given) for each in recipe)
        size, stride, offset, dtype = recipe.geometry[:4]
        storage = None if recipe.of is None else given[recipe.of].untyped_storage()
        with plain_kernels(self._mode):
            meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            if storage is not None:
                meta.set_(storage, offset, size, stride)
        return FakeTensor(self._mode, meta, recipe.device)


class Fakes:
    """A fake mode of its own, to run the ops of a graph in. Used with no mode active and gradients off."""

    def __init__(self) -> None:
        self.mode = fake_mode(allow_non_fake_inputs=True)
        self._repeats = Repeats(self.mode)

    def like(self, geometry: Geometry, nbytes: int, device: torch.device) -> Any:
        """A tensor that looks so, on a storage of its own; an empty one if `nbytes` is 0."""
        size, stride, offset, dtype = geometry[:4]
        meta = torch.empty(geometry.end // dtype.itemsize, dtype=dtype, device="meta")
        value = meta.as_strided(size, stride, offset)
        if nbytes == 0:
            meta.untyped_storage().resize_(0)
        value = aten._conj.default(value) if geometry.conj else value
        value = aten._neg_view.default(value) if geometry.neg else value
        return FakeTensor(self.mode, value, device)

    def run(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call gives."""

        def op() -> Any:
            with self.mode:
                if target is aten._grouped_mm.default and args[0].device.type == "cpu":
                    return _grouped_mm(*args, **kwargs)
                return target(*args, **kwargs)

        return self._repeats.run(target, args, kwargs, op)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As the CPU has it (torch 2.11 to 2.13): any dtype, rows of 16 bytes. The meta kernel is of CUDA, in bfloat16."""
    dtype = a.dtype if out_dtype is None else out_dtype
    rows, columns = a.size(-2), b.size(-1)
    each = 16 // dtype.itemsize
    width = -(-columns // each) * each
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (width, 1), dtype=dtype, device=a.device)
    groups = offs.size(0) if a.dim() == 2 and offs is not None else a.size(0)
    size, strides = (groups, rows, columns), (rows * width, width, 1)
    return torch.empty_strided(size, strides, dtype=dtype, device=a.device)


def _default() -> Any:
    """What results depend on besides the arguments: factories take these."""
    return torch.get_default_dtype()


def _key(arg: Any, given: list[Tensor]) -> Any:
    """What tells arguments apart; `given`: the tensors among them, in order."""
    if isinstance(arg, Tensor):
        if type(arg) is not FakeTensor or arg.constant is not None:
            raise _Unlike
        given.append(arg)
        return geometry_of(arg), arg.fake_device, arg.untyped_storage().nbytes()
    if isinstance(arg, (list, tuple)):
        return (type(arg) is list, *[_key(each, given) for each in arg])
    if isinstance(arg, _PLAIN):
        return type(arg), arg
    raise _Unlike


def _recipe(out: Any, given: list[Tensor]) -> Any:
    """How to make such a result again."""
    storages: dict[int, int] = {}
    for i, tensor in enumerate(given):
        storages.setdefault(tensor.untyped_storage()._cdata, i)
    return _described(out, {id(tensor) for tensor in given}, storages, set())


def _is_described(out: Any) -> bool:
    """Whether a result is made of fake tensors alone."""
    leaves = out if type(out) in (list, tuple) else [out]
    return all(type(leaf) is FakeTensor for leaf in leaves)


def _described(out: Any, given: set[int], storages: dict[int, int], own: set[int]) -> Any:
    """given: ids of the arguments. storages: theirs. own: those of the results before."""
    if type(out) in (list, tuple):
        return type(out)(_described(each, given, storages, own) for each in out)
    if type(out) is not FakeTensor or out.constant is not None or id(out) in given:
        raise _Unlike
    geometry, storage = geometry_of(out), out.untyped_storage()
    of = storages.get(storage._cdata)
    whole = geometry.offset == 0 and storage.nbytes() == geometry.end
    if geometry.conj or geometry.neg or (of is None and (not whole or storage._cdata in own)):
        raise _Unlike
    if (
        of is not None and storage.nbytes() < geometry.end
    ):  # putting it there would grow the storage
        raise _Unlike
    own.add(storage._cdata)
    return _Made(geometry, out.fake_device, of)
