"""The sizes in the key of a call in the cache.

shapes_of(key)               the sizes of the tensors among the arguments
open_key(key)                the key without them; 0 and 1 stay, which torch treats in their own way
with_made_sizes(key, (17,))  the key with sizes that ops make of the arguments, as of one more tensor, at its end
with_late_sizes(key, (5,))   the key of a recorded call with sizes that were known when ops had run, in the same way
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch

from functionalize.templates.symbols import Shapes

MADE = "results of ops"  # stands for a tensor whose shape are the sizes that ops make of arguments
LATE = "computed results"  # the same for sizes that ops make of what the step computes


def open_key(key: Any) -> Hashable:
    """The key of a call in the cache, without the sizes of its tensors that are neither 0 nor 1."""
    return tuple([_opened(part) if _is_tensor(part) else part for part in key])


def shapes_of(key: Any) -> Shapes:
    """The sizes of the tensors among the arguments of a call, from its key in the cache."""
    return [part[0] for part in key if _is_tensor(part)]


def has_made_sizes(key: Any) -> bool:
    """Whether a key has sizes that ops make."""
    return type(key[-1]) is tuple and len(key[-1]) == 2 and key[-1][1] == MADE


def with_made_sizes(key: Any, sizes: Iterable[int]) -> Hashable:
    """A key, with the sizes that ops make of the arguments."""
    return (*key, (torch.Size(map(int, sizes)), MADE))


def with_late_sizes(key: Any, sizes: Iterable[int]) -> Hashable:
    """A key, with the sizes that were known when ops had run."""
    return (*key, (torch.Size(sizes), LATE))


def _is_tensor(part: Any) -> bool:
    return type(part) is tuple and bool(part) and type(part[0]) is torch.Size


def _opened(part: Any) -> Any:
    return (tuple([min(size, 2) for size in part[0]]), *part[1:])
