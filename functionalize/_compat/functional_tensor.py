"""The tensor inside AOTAutograd's `FunctionalTensor`, which has no public access."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.functional_tensor import (  # AOTAutograd passes these to the function that it traces
    FunctionalTensor,
)

__all__ = [
    "FunctionalTensor",
]  # names of torch that are used elsewhere


def functional_sync(tensor: Any) -> None:
    """Apply pending writes."""
    torch._sync(tensor)


def functional_inside(tensor: Any) -> torch.Tensor:
    """The tensor inside the wrapper."""
    return torch._from_functional_tensor(tensor.elem)


def functional_was_written(tensor: Any) -> bool:
    """Whether AOTAutograd saw a write to the storage."""
    return bool(torch._functionalize_has_data_mutation(tensor.elem))  # type: ignore[attr-defined]


def functional_put_inside(tensor: Any, inside: torch.Tensor) -> None:
    """Replace the tensor inside, and drop pending writes."""
    torch._functionalize_replace(tensor.elem, inside)
    torch._functionalize_commit_update(tensor.elem)
    torch._functionalize_sync(tensor.elem)


_WITHOUT_BOUNDS_CHECK = {"view_ViewMeta", "detach_ViewMeta", "alias_ViewMeta"}


def functional_needs_storage(view: Any) -> bool:
    """Whether a view can only be computed on a storage that is not empty: most view ops check its bounds."""
    from torch._C import _functionalization

    steps = _functionalization.get_view_meta_sequence(view.elem)
    return any(type(step).__name__ not in _WITHOUT_BOUNDS_CHECK for step in steps)


def functional_remake(view: Any, base: torch.Tensor) -> None:
    """Replace the tensor inside a view by the result of its view ops on `base`, the tensor inside its base."""
    from torch._C import _functionalization

    steps = _functionalization.get_view_meta_sequence(view.elem)
    torch._functionalize_replace(
        view.elem, _functionalization.apply_view_meta_sequence(base, steps)
    )
