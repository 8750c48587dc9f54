"""What a run of an example leaves behind, in a form that is compared with `==`, and how many examples are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from tests.laws.programs import Example


def outcome(example: Example, fn: Any, seed: int) -> list[Any]:
    """What one run leaves behind."""
    args = example.make_args(seed)
    storages = example.storages_of(args)
    out = fn(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    return seen_by_caller([*args, *outputs], storages, example.final)


def seen_by_caller(
    values: Sequence[Any], storages: Sequence[torch.UntypedStorage], valid: Sequence[int] = ()
) -> list[Any]:
    """What can be told apart: identity, aliasing, geometry, contents; of input storages size and bytes.

    valid: which bytes of each input storage to look at, all by default.
    """
    groups = {storage._cdata: i for i, storage in enumerate(storages)}
    objects: dict[int, int] = {}
    found: list[Any] = []
    for i, t in enumerate(values):
        if not isinstance(t, Tensor):
            found.append(t)
            continue
        storage = t.untyped_storage()
        group = groups.setdefault(storage._cdata, len(groups))
        stride = [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()]
        same = objects.setdefault(id(t), i)
        found.append((i, same, group, t.dtype, list(t.shape), stride, t.is_conj(), t.is_neg()))
        found.append(t.storage_offset() if group < len(storages) else bits(t))
    for i, storage in enumerate(storages):
        held = bytes(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())
        mask = valid[i] if valid else -1
        found.append((i, storage.nbytes(), [b for j, b in enumerate(held) if mask >> j & 1]))
    return found


def bits(t: Tensor) -> list[int]:
    """The contents, as bytes."""
    plain = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    found: list[int] = plain.reshape(-1).view(torch.uint8).tolist() if t.numel() else []
    return found


def times(fixed: int) -> settings:
    """So many fixed examples, or what the long profile says."""
    return settings(max_examples=max(fixed, settings().max_examples))
