"""What Dynamo has in C++ for guards: many tensors compared at once, views without the dispatcher, versions of dicts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

# Inside of it, reading an attribute of a tensor subclass does not look for its `__torch_function__`.
plain_reads = torch._C.DisableTorchFunctionSubclass


def has_plain_attributes(kind: type) -> bool:
    """Whether objects of a class are tensors whose attributes are read by C code alone: parameters, DTensors."""
    found: Any = getattr(kind, "__torch_function__", None)
    return found is torch._C._disabled_torch_function_impl


_read = attrgetter("dtype", "device", "shape", "requires_grad", "layout")


def tensor_match(tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """Whether tensors, all different, have the dtype, device, size, stride and lazy bits that these have now.

    False may also mean undecided: another grad mode, another class. Dynamo tests its inputs by this class of C++, which
    has no public name (torch 2.11 to 2.15).
    """
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        guards = _dynamo.TensorGuards  # type: ignore[union-attr]
        check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*tensors):
            return lambda now: bool(check(*now))
    return tensor_match_in_python(tensors)


def tensor_match_in_python(tensors: Sequence[Tensor]) -> Callable[[Sequence[Any]], bool]:
    """The same without Dynamo."""
    were, kinds = _properties(tensors), list(map(type, tensors))
    return lambda now: list(map(type, now)) == kinds and _properties(now) == were


def _properties(tensors: Sequence[Any]) -> list[Any]:
    strides, conj, neg = (
        list(map(read, tensors)) for read in (Tensor.stride, torch.is_conj, Tensor.is_neg)
    )
    return [list(map(_read, tensors)), strides, conj, neg]


_dynamo = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_window = getattr(_dynamo, "_reinterpret_tensor", None)
# A number that is another one after each change of a dict (torch 2.11 to 2.15); None if torch has none.
dict_version: Callable[[Any], int] | None = getattr(_dynamo, "dict_version", None)


def table_of_class(kind: type) -> dict[str, Any] | None:
    """The dict that `vars(kind)` shows, which has a version; None if it is not found."""
    shown = vars(kind)
    for found in gc.get_referents(shown):
        if type(found) is dict and list(found) == list(shown):
            return found if all(map(is_, found.values(), shown.values())) else None
    return None


def window_in_python(
    tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """`window_within`, by a public function."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


# A tensor on the same storage, of the same dtype; the offset counts from the first element of the first argument.
# The caller knows that the storage is large enough. Inductor's code makes its views so (torch 2.11 to 2.15).
window_within: Callable[[Tensor, Sequence[int], Sequence[int], int], Tensor] = (
    window_in_python if _window is None else _window
)


class ChangeCount:
    """Counts how often a dict was found to hold other objects than before.

    Its version counts writes, and every recording writes to torch's namespaces: it replaces functions, which are
    restored after it.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self._table, self._changes = table, 0
        self._note()

    def _note(self) -> None:
        self._version = dict_version and dict_version(self._table)
        self._keys, self._held = tuple(self._table), tuple(self._table.values())

    def __call__(self) -> int:
        if dict_version is None or dict_version(self._table) != self._version:
            keys, held = self._keys, self._held
            self._note()
            is_same = len(keys) == len(self._keys) and all(map(is_, keys, self._keys))
            self._changes += not (is_same and all(map(is_, held, self._held)))
        return self._changes
