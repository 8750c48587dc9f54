"""Ops on fake tensors, with a cache of results by op and geometries: the layers of a model repeat.

    fakes = Fakes()
    with disable_current_modes(), torch.no_grad():
        out = fakes.run(aten.mm.default, (x, w), {})       runs the op's fake kernel
        out = fakes.run(aten.mm.default, (y, v), {})       same geometries: made as the first result was

FakeTensorMode has a cache too, but a look-up there costs several times as much as making the result, since it handles
modes, symbolic sizes and constants, which a finished graph does not have.
Invariant: a cached result has the geometry, device and storage size of the op's own; its storage is a new one, or
that of the same argument where the op returns a view, or the argument itself. An op whose result has no such
description is run each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.dispatch import has_kernel, no_dispatch
from functionalize._compat.fakes import FakeMaker, FakeTensor, FakeTensorMode
from functionalize._compat.references import address
from functionalize.ir.fake_mode import fake_mode
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, geometry_fields, geometry_of

aten = torch.ops.aten
_OVERLOAD = type(aten.mm.default)
_META = torch.device("meta")
_BUILTIN = type(operator.add)
_PYTHON_NUMBERS = frozenset({int, float, bool})
_NUMBERS = frozenset({int, type(None)})  # as sizes of an attention's arguments, among its results
_CONSTANTS = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


class _Uncacheable(Exception):
    """An argument or a result that the cache has no key or description for."""


class _TensorRecipe(NamedTuple):
    """The description of one tensor of a result. base: the argument whose storage it is on; None: a new storage."""

    geometry: Geometry
    device: torch.device
    base: int | None


class _Arguments(NamedTuple):
    """The result of an op that writes. index: the argument, or arguments, that it returns; None: it returns nothing."""

    index: Any

    def of(self, tensors: list[Tensor]) -> Any:
        """The result of a call. tensors: its arguments."""
        if self.index is None or type(self.index) is int:
            return None if self.index is None else tensors[self.index]
        return type(self.index)(tensors[i] for i in self.index)


def _state(tensors: list[Tensor]) -> list[Any]:
    """What an op that writes may change of fakes."""
    return [
        (geometry_of(t), (s := t.untyped_storage())._cdata, s.nbytes(), t._version) for t in tensors
    ]


class FakeResultCache:
    """The results of ops in one fake mode, made again without running the op for calls with the same key."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.make = FakeMaker(mode).make
        self._recipes: dict[Any, Any] = {}  # of calls that write: which arguments they return
        # By the address of an op, as hashing one calls Python: the op, and whether it writes; None: not cached.
        self._ops: dict[int, tuple[Any, bool | None]] = {}

    def run(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        op: Callable[[], Any],
        refs: Any = None,
        record: OpRecord | None = None,
    ) -> Any:
        """The result of `target` for these arguments: from the cache, as recorded, or by calling `op`.

        Autograd must not see the call: gradients are off, or the caller is below autograd.
        refs: `args` with a `TensorRef` in place of each tensor, if their geometries have been read.
        record: a call, of any op, that may have been this one.
        """
        known = self._ops.get(address(target))
        if known is None:
            known = self._ops[address(target)] = (
                target,
                writes(target) if isinstance(target, _OVERLOAD) else None,
            )
        if known[1] is None:
            return op()
        tensors: list[Tensor] = []
        try:
            also = _key(tuple(kwargs.items()), tensors) if kwargs else None
            key = address(target), _key(args, tensors, refs), also, torch.get_default_dtype()
        except _Uncacheable:
            return op()
        recipe = self._recipes.get(key)
        if recipe is not None:
            return self.made(recipe, tensors)
        if known[1]:
            return self._written(key, tensors, op)
        if record is not None and (recipe := _recorded(record, target, args, kwargs)) is not None:
            self._recipes[key] = recipe
            return self.made(recipe, tensors)
        if len(tensors) == 1 and (recipe := _viewed(target, args, kwargs, tensors[0])) is not None:
            self._recipes[key] = recipe
            return self.made(recipe, tensors)
        out = op()
        try:
            self._recipes[key] = _recipe(out, tensors)
        except _Uncacheable:
            if not _is_all_fake(out):
                self._ops[address(target)] = target, None
        return out

    def _written(self, key: Any, tensors: list[Tensor], op: Callable[[], Any]) -> Any:
        """The result of an op that writes. Writing data changes no fake: only what it returns is kept.

        An op that changes a geometry, the size of a storage or a version (autograd's kernels, above this cache, count
        the versions of most ops) runs each time, as does one that returns other tensors than its arguments.
        """
        state = _state(tensors)
        out = op()
        if _state(tensors) == state:
            index = {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
            if out is None:
                self._recipes[key] = _Arguments(None)
            elif type(out) in (list, tuple) and all(id(each) in index for each in out):
                self._recipes[key] = _Arguments(type(out)(index[id(each)] for each in out))
            elif id(out) in index:
                self._recipes[key] = _Arguments(index[id(out)])
        return out

    def made(self, recipe: Any, tensors: list[Tensor]) -> Any:
        """The result that a recipe describes. tensors: the arguments."""
        kind = type(recipe)
        if kind is _TensorRecipe:
            (size, stride, offset, dtype, _, _), device, base = recipe
            with no_dispatch():
                meta = torch.empty_strided(size, stride, dtype=dtype, device=_META)
                if base is not None:
                    meta.set_(tensors[base].untyped_storage(), offset, size, stride)
            return self.make(meta, device)
        if kind is _Arguments:
            return recipe.of(tensors)
        if kind is tuple or kind is list:
            return kind([self.made(each, tensors) for each in recipe])
        return recipe  # a number


class Fakes:
    """A new fake mode with a cache, to run the ops of a graph in. For use with no mode active and gradients off."""

    def __init__(self) -> None:
        self.mode = fake_mode(allow_non_fake_inputs=True)
        self._cache = FakeResultCache(self.mode)
        self._lists: dict[int, bool] = {}  # address of an op -> whether it acts on lists by index

    def like(self, geometry: Geometry, nbytes: int, device: torch.device) -> Any:
        """A fake tensor of `geometry` on a new storage; that is empty if `nbytes` is 0."""
        size, stride, offset, dtype = geometry[:4]
        meta = torch.empty(geometry.end // dtype.itemsize, dtype=dtype, device="meta")
        value = meta.as_strided(size, stride, offset)
        if nbytes == 0:
            meta.untyped_storage().resize_(0)
        value = aten._conj.default(value) if geometry.conj else value
        value = aten._neg_view.default(value) if geometry.neg else value
        return self._cache.make(value, device)

    def sized(self, made: Any) -> Any:
        """A result of which the size depends on data. made: (geometry, device), or a list of them, as recorded."""
        if isinstance(made, list):
            return tuple(map(self.sized, made))
        geometry, device = made
        return self.like(geometry, geometry.end, device)

    def run(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: Any,
        record: OpRecord | None = None,
    ) -> Any:
        """The result of one call. record: a call, of any op, that may have been this one: then no fake kernel runs."""
        if target is operator.getitem and type(args[0]) in (list, tuple):
            return args[0][args[1]]
        if not kwargs and type(target) is _BUILTIN and _PYTHON_NUMBERS.issuperset(map(type, args)):
            return target(*args)  # the mode takes ten times as long as the sum

        def op() -> Any:
            with self.mode:
                if target is aten._grouped_mm.default and args[0].device.type == "cpu":
                    return _grouped_mm(*args, **kwargs)
                return target(*args, **kwargs)

        on_lists = self._lists.get(address(target))
        if on_lists is None:
            on_lists = self._lists[address(target)] = _acts_by_index(target)
        found = self._by_index(target, args, kwargs) if on_lists else None
        if found is not None:
            return found
        return self._cache.run(target, args, kwargs, op, record=record)

    def recipe(self, target: Any, out: Any, tensors: list[Tensor]) -> Any:
        """A description from which `made` makes the result of a call with arguments of the same looks.

        tensors: those of its arguments. None if there is no such description: the op must be run.
        """
        if target is not operator.getitem and not isinstance(target, _OVERLOAD):
            return None
        try:
            return _recipe(out, tensors)
        except _Uncacheable:
            return None

    def made(self, recipe: Any, tensors: list[Tensor]) -> Any:
        """The result that a recipe describes. tensors: those of the arguments; of no use if it reads none."""
        return self._cache.made(recipe, tensors)

    def _by_index(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of a fused or foreach op, which acts on each index of its lists alone: run once for those alike.

        None: its lists are not all of tensors and of one length, or no two indices are alike.
        """
        lists = {i: arg for i, arg in enumerate(args) if isinstance(arg, (list, tuple)) and arg}
        one_length = len({len(each) for each in lists.values()}) == 1
        if not one_length or any(isinstance(each, (list, tuple)) for each in kwargs.values()):
            return None
        if not all(isinstance(each, Tensor) for arg in lists.values() for each in arg):
            return None
        try:
            looks = zip(
                *([_key((each,), []) for each in arg] for arg in lists.values()), strict=True
            )
            first: dict[Any, int] = {}
            at = [first.setdefault(look, len(first)) for look in looks]
            if len(first) == len(at):
                return None
            places = [at.index(n) for n in range(len(first))]
            fewer = [
                [lists[i][place] for place in places] if i in lists else arg
                for i, arg in enumerate(args)
            ]
            with self.mode:
                out = target(*fewer, **kwargs)
            recipe = _at(_recipe(out, [t for i in lists for t in fewer[i]]), at, len(first))
        except _Uncacheable:
            return None
        return self._cache.made(recipe, [])


def _viewed(target: Any, args: Any, kwargs: Any, base: Any) -> Any:
    """The recipe of a view of torch's, by its kernel for the meta tensor that a fake is: a tenth of a fake's time.

    base: the one tensor among the arguments. None of other ops, and where the result is not on its storage.
    """
    if type(target) is not _OVERLOAD or not _is_view(target):
        return None
    size, stride, offset, dtype, *bits = geometry_fields(base)
    if any(bits) or not args or args[0] is not base:
        return None
    storage, device = base.untyped_storage(), base.fake_device
    with no_dispatch():
        meta = torch.empty(0, dtype=dtype, device=_META).set_(storage, offset, size, stride)
        out = target(meta, *args[1:], **kwargs)
    many = type(out) is list or type(out) is tuple
    found = []
    for each in out if many else (out,):
        if not isinstance(each, Tensor) or each.untyped_storage()._cdata != storage._cdata:
            return None
        geometry = geometry_of(each)
        if geometry.conj or geometry.neg or geometry.end > storage.nbytes():
            return None
        found.append(_TensorRecipe(geometry, device, 0))
    return type(out)(found) if many else found[0]


@cache
def _is_view(target: Any) -> bool:
    """Whether an op is always a view, by a kernel of its own: `to` and `reshape` call others, which may copy."""
    calls_others = has_kernel(target.name(), "CompositeImplicitAutograd")
    return bool(target.is_view and target.namespace == "aten" and not calls_others)


def _acts_by_index(target: Any) -> bool:
    """Whether a target is a functional fused or foreach op."""
    if not isinstance(target, _OVERLOAD) or writes(target):
        return False
    return bool(target._schema.name.startswith(("aten::_foreach_", "aten::_fused_")))


def _at(recipe: Any, at: list[int], count: int) -> Any:
    """The recipe of a result with a list of `count` tensors, repeated: those at these places. Raises `_Uncacheable`."""
    if type(recipe) not in (list, tuple):
        raise _Uncacheable
    if not any(type(each) is _TensorRecipe for each in recipe):
        return type(recipe)(_at(each, at, count) for each in recipe)
    for each in recipe:
        if type(each) is not _TensorRecipe or each.base is not None:
            raise _Uncacheable
    if len(recipe) != count:
        raise _Uncacheable
    return type(recipe)(recipe[i] for i in at)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`_grouped_mm` on a CPU (torch 2.11 to 2.13): any dtype, rows padded to 16 bytes.

    torch's meta kernel describes CUDA's, which accepts bfloat16 only.
    """
    dtype = a.dtype if out_dtype is None else out_dtype
    rows, columns = a.size(-2), b.size(-1)
    each = 16 // dtype.itemsize
    width = -(-columns // each) * each
    if a.dim() != b.dim():
        return torch.empty_strided((rows, columns), (width, 1), dtype=dtype, device=a.device)
    groups = offs.size(0) if a.dim() == 2 and offs is not None else a.size(0)
    size, strides = (groups, rows, columns), (rows * width, width, 1)
    return torch.empty_strided(size, strides, dtype=dtype, device=a.device)


def _key(args: Any, tensors: list[Tensor], refs: Any = None) -> Any:
    """A key of a list of arguments, equal for those with the same result; appends the tensors in it to `tensors`.

    Of a tensor, its geometry, device and storage size; of any other value, its type first. refs: see
    `FakeResultCache.run`. The default dtype, which factory functions read, is no argument.
    """
    found: list[Any] = []
    for i, arg in enumerate(args):
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None:
                raise _Uncacheable
            tensors.append(arg)
            look = geometry_fields(arg) if refs is None else refs[i][1]
            found += look, arg.fake_device, arg.untyped_storage().nbytes()
        elif kind in _CONSTANTS:
            found += kind, arg
        elif isinstance(arg, (list, tuple)):
            inside = None if refs is None else refs[i]
            found += kind is list, _key(arg, tensors, inside)
        else:
            raise _Uncacheable
    return tuple(found)


def writes(target: Any) -> bool:
    """Whether an op may change its arguments."""
    return isinstance(target, _OVERLOAD) and bool(target._schema.is_mutable)


def reads(recipe: Any) -> bool:
    """Whether a result is made from the arguments of the call."""
    if type(recipe) is _TensorRecipe:
        return recipe.base is not None
    return type(recipe) is _Arguments or (type(recipe) in (list, tuple) and any(map(reads, recipe)))


def _recipe(out: Any, tensors: list[Tensor]) -> Any:
    """The description of a result: a recipe per tensor, in the same lists and tuples. tensors: the arguments.

    Raises `_Uncacheable`.
    """
    arguments = {id(each): i for i, each in enumerate(tensors)}
    by_storage: dict[int, list[int]] = {}
    for i, each in enumerate(tensors):
        by_storage.setdefault(each.untyped_storage()._cdata, []).append(i)
    return _described(out, arguments, by_storage, set())


def _recorded(record: OpRecord, target: Any, args: Any, kwargs: Any) -> Any:
    """The recipe of what was recorded for a call; None if this is another call, or its result needs a description.

    Only results on storages of their own, all of which they cover: what shares one is left to the fake kernel.
    """
    if record.target is not target or record.live:
        return None
    if not (_is_same(args, record.args) and _is_same(kwargs, record.kwargs)):
        return None
    found = _recipe_of(record.outputs, dict(record.meta.get("born", ())))
    # Records have lists, as an op with one result that is a list returns; several results are a tuple.
    return tuple(found) if type(found) is list and len(target._schema.returns) > 1 else found


def _is_same(arg: Any, recorded: Any) -> bool:
    """Whether an argument has the geometries and the constants of a recorded one."""
    kind = type(recorded)
    if kind is TensorRef:
        return type(arg) is FakeTensor and bool(geometry_fields(arg) == recorded.geometry)
    if kind is list or kind is tuple:
        return (
            isinstance(arg, (list, tuple))
            and len(arg) == len(recorded)
            and all(map(_is_same, arg, recorded))
        )
    if kind is dict:
        return arg.keys() == recorded.keys() and all(
            _is_same(arg[n], recorded[n]) for n in recorded
        )
    return type(arg) is kind and kind in _CONSTANTS and bool(arg == recorded)


def _recipe_of(outputs: Any, born: dict[int, Any]) -> Any:
    """The recipe of recorded results. born: the storages that the op made and no result before this one is on."""
    kind = type(outputs)
    if kind is TensorRef:
        geometry = outputs.geometry
        nbytes, device = born.pop(outputs.storage, (-1, None))
        if geometry.offset or geometry.conj or geometry.neg or nbytes != geometry.end:
            return None
        return _TensorRecipe(geometry, device, None)
    if (kind is list or kind is tuple) and outputs:
        found = kind(_recipe_of(each, born) for each in outputs)
        return None if None in found else found
    return None


def _leaves(out: Any) -> Iterator[Any]:
    for each in out if type(out) in (list, tuple) else [out]:
        yield from _leaves(each) if type(each) in (list, tuple) else (each,)


def _is_all_fake(out: Any) -> bool:
    """Whether a result consists of fake tensors and numbers only."""
    return all(type(leaf) is FakeTensor or type(leaf) in _NUMBERS for leaf in _leaves(out))


def _described(
    out: Any, arguments: dict[int, int], by_storage: dict[int, list[int]], new: set[int]
) -> Any:
    """The recipe of one result, or of a list of them.

    arguments: the index of an argument, by its id; by_storage: the indices of those on a storage. new: the storages of
    the results described before, which are no argument's.
    """
    if type(out) in (list, tuple):
        return type(out)(_described(each, arguments, by_storage, new) for each in out)
    if type(out) in _NUMBERS:
        return out
    if type(out) is not FakeTensor or out.constant is not None:
        raise _Uncacheable
    geometry, storage = geometry_of(out), out.untyped_storage()
    bases = by_storage.get(storage._cdata, [])
    if len(bases) > 1:
        raise _Uncacheable  # the next call may have these arguments on different storages
    if id(out) in arguments:
        return _Arguments(arguments[id(out)])
    whole = geometry.offset == 0 and storage.nbytes() == geometry.end
    if geometry.conj or geometry.neg or not (bases or (whole and storage._cdata not in new)):
        raise _Uncacheable
    if bases and storage.nbytes() < geometry.end:
        raise _Uncacheable  # `set_` in `made` would grow the argument's storage
    new.add(storage._cdata)
    return _TensorRecipe(geometry, out.fake_device, bases[0] if bases else None)
