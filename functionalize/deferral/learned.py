"""What an op returns, learned from its first run: later calls of the same geometries make the result without a kernel.

    shape = Shape(...)                     of one call: the op, geometries, devices and constants
    learned.get(shape)                     None: not known, the op must run
    learned.put(shape, learn(...))         what a run has returned
    made.outputs(tensors)                  new tensors of the same geometry, contents undefined

torch's meta kernels are not asked: some make other strides than the kernels do. Invariant: what is made has the
geometry, the device, the dtype and the storage size of the op's own result, and is the same object where the op returns
an argument. A result without such a description makes its op run at once, `AT_ONCE`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize.ir.ops import Geometry, geometry_of
from functionalize.recorder.op_kinds import QUANTISED

AT_ONCE = "at once"
_LIMIT = 2**14
_CPU = torch.device("cpu")


class NewTensor(NamedTuple):
    """A tensor on a storage of its own. nbytes: the size of that storage. usual: whether `empty_strided` makes it."""

    geometry: Geometry
    nbytes: int
    usual: bool

    def make(self) -> Tensor:
        """The tensor, contents undefined."""
        size, stride, offset, dtype = self.geometry[:4]
        if self.usual:
            return torch.empty_strided(size, stride, dtype=dtype, device=_CPU)
        storage = torch.UntypedStorage(self.nbytes, device=_CPU)
        return torch.empty(0, dtype=dtype, device=_CPU).set_(storage, offset, size, stride)


class TheArgument(NamedTuple):
    """The argument of this number itself, counted over all tensors of the call."""

    position: int


class Made(NamedTuple):
    """What the op returns: `NewTensor`, `TheArgument`, None, or a list or tuple of these. number: of this call.

    nbytes: of all new storages.
    """

    result: Any
    number: int
    nbytes: int

    def outputs(self, arguments: Sequence[Tensor]) -> Any:
        """The result of a call with these tensors among its arguments."""
        return _outputs(self.result, arguments)


class NoDescription(Exception):
    """A result that `Made` cannot describe."""


class Learned:
    """Results by call; the least recently learned are dropped."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, Made | str] = OrderedDict()
        self._count = 0

    def get(self, shape: Any) -> Made | str | None:
        """The description of the result, AT_ONCE if there is none, None if the call is not known."""
        return self._found.get(shape)

    def learn(
        self, shape: Any, before: Sequence[Geometry], tensors: Sequence[Tensor], out: Any
    ) -> None:
        """Note the result `out` of a call. before: the geometries of its tensors before it ran."""
        sizes: list[int] = []
        made: Made | str
        try:
            if [geometry_of(t) for t in tensors] != list(before):
                raise NoDescription
            result = description(out, tensors, {t.untyped_storage()._cdata for t in tensors}, sizes)
            made = Made(result, self._count, sum(sizes))
            self._count += 1
        except (NoDescription, NotImplementedError, RuntimeError):
            made = AT_ONCE
        self._found[shape] = made
        if len(self._found) > _LIMIT:
            self._found.popitem(last=False)


def _outputs(result: Any, arguments: Sequence[Tensor]) -> Any:
    kind = type(result)
    if kind is NewTensor:
        return result.make()
    if kind is TheArgument:
        return arguments[result.position]
    if kind is list or kind is tuple:
        return kind([_outputs(each, arguments) for each in result])
    return None


def description(out: Any, tensors: Sequence[Tensor], taken: set[int], sizes: list[int]) -> Any:
    """What `out` is; raises `NoDescription`. tensors: those of which it may be one.

    taken: addresses of storages that it may not share; its own are added. sizes: gets the bytes of its storages.
    """
    if out is None:
        return None
    if isinstance(out, (list, tuple)):
        kind = list if isinstance(out, list) else tuple
        return kind([description(each, tensors, taken, sizes) for each in out])
    if type(out) is not Tensor or out.layout is not torch.strided or out.device != _CPU:
        raise NoDescription
    for index, tensor in enumerate(tensors):
        if tensor is out:
            return TheArgument(index)
    storage, geometry = out.untyped_storage(), geometry_of(out)
    odd = geometry.conj or geometry.neg or geometry.overlaps or out._is_zerotensor()
    if odd or out.is_nested or out.dtype in QUANTISED or storage._cdata in taken:
        raise NoDescription
    nbytes = storage.nbytes()
    if geometry.end > nbytes or not storage.resizable():
        raise NoDescription
    taken.add(storage._cdata)
    sizes.append(nbytes)
    size, stride, offset, dtype = geometry[:4]
    alike = torch.empty_strided(size, stride, dtype=dtype, device=_CPU)
    usual = offset == 0 and alike.untyped_storage().nbytes() == nbytes
    return NewTensor(geometry, nbytes, usual)
