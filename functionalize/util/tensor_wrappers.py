"""The plain tensors inside a wrapper subclass, such as `DTensor`.

    plain_tensors(value)             a tensor -> [itself];  DTensor -> [its local tensor];  3 -> []
    plain_tensors_by_path(value)     the same, each with its attributes: DTensor -> (("_local_tensor",), local)

The order is that of `__tensor_flatten__`, depth first. Attributes that are no tensors (a device mesh) are left out.
Invariant: what is yielded is a tensor and no wrapper subclass; `getattr` along its attributes leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.dispatch import is_traceable_wrapper_subclass
from functionalize._compat.distributed import is_dtensor_class
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.fast_guards import has_plain_attributes
from functionalize.util.by_class import by_class
from functionalize.util.packages import is_users_class
from functionalize.util.reading import is_a
from functionalize.util.text import with_article

_PLAIN = frozenset({Tensor, nn.Parameter})  # a parameter of a subclass has the subclass's type
_NO_WRAPPERS = _PLAIN | {FakeTensor}


def tensor_classes(kind: type = Tensor) -> Iterator[type]:
    """`Tensor` and all its subclasses, some perhaps twice."""
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for each in subclasses:
        yield from tensor_classes(each)


@by_class
def has_own_functions(kind: type) -> bool:
    """Whether torch calls code of the user's for whatever is done with a tensor of a class, even to look at it."""
    if not issubclass(kind, Tensor) or not is_users_class(kind):
        return False
    found: Any = kind.__torch_function__
    return getattr(found, "__func__", None) is not _OF_TORCH and not has_plain_attributes(kind)


_OF_TORCH: Any = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def own_functions_text(kind: type) -> str:
    """Such a class, for a message."""
    return (
        f"{with_article(kind.__name__)}, a tensor for which torch calls `{kind.__name__}.__torch_function__` whatever "
        "is done with it"
    )


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor of torch's own type, which is the usual case; False may also mean undecided."""
    return type(value) in _PLAIN


def is_no_wrapper(value: Any) -> bool:
    """Whether a value is a tensor of torch's own type, or a fake one; False may also mean undecided."""
    return type(value) in _NO_WRAPPERS


def is_wrapper(value: Any) -> bool:
    """Whether a tensor is of a wrapper subclass: it has tensors inside."""
    return not is_no_wrapper(value) and bool(is_traceable_wrapper_subclass(value))


def local_tensor(value: Any) -> Tensor | None:
    """The plain tensor inside a `DTensor` of torch's own type, the usual wrapper; None may also mean undecided."""
    kind: Any = type(value)
    if not is_dtensor_class(kind):
        return None
    local: Tensor = value._local_tensor
    return local if is_no_wrapper(local) else None


def plain_tensors(value: Any) -> list[Tensor]:
    """The plain tensors inside a value: itself, or those of a wrapper subclass."""
    if is_no_wrapper(value):
        return [value]
    local = local_tensor(value)
    if local is not None:
        return [local]
    return [tensor for _, tensor in plain_tensors_by_path(value)]


def plain_tensors_by_path(
    value: Any, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Each plain tensor inside a value with its path of attributes. above: the path of `value` itself."""
    if not is_a(value, Tensor):
        return
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from plain_tensors_by_path(getattr(value, name), (*above, name))
    else:
        yield above, value


def address_of(tensor: Tensor) -> int | None:
    """The address of a plain tensor's storage; None for other layouts, wrapper subclasses and classes of the user's."""
    plain = is_no_wrapper(tensor) or not (
        has_own_functions(type(tensor)) or is_traceable_wrapper_subclass(tensor)
    )
    plain = plain and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else None
