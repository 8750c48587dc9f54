"""Lazy against eager, bit for bit: values, strides, gradients, generator states.

    same_as_eager(make, call)      runs `call(*make())` in eager and, three times, inside `fz.lazy`

In the first lazy run every op is learned, in the second the stream runs op by op, in the third by its program. What is
pending is filled with numbers that no op of a test computes: who reads it too early is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize.deferral.learned import NewTensor

RUNS = 3


@contextmanager
def poisoned(number: float = float("nan")) -> Iterator[None]:
    """What is pending holds this number, or 3."""
    make = NewTensor.make

    def poison(self: NewTensor) -> Tensor:
        made = make(self)
        return made.fill_(number if made.is_floating_point() or made.is_complex() else 3)

    with mock.patch.object(NewTensor, "make", poison):
        yield


def image(value: Any) -> Any:
    """What can be seen of a result: numbers, and for a tensor its geometry and bytes."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.layout is not torch.strided:
        return str(value.layout), image(value.detach().to_dense())
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), data


def outcome(make: Callable[[], Any], call: Callable[..., Any], lazy: Any) -> Any:
    """The images of what a run returned, or its error; and the state of the generator after it."""
    torch.manual_seed(0)
    args = make()
    found: Any
    try:
        with lazy:
            found = call(*args)
        found = [image(leaf) for leaf in pytree.tree_leaves((found, args))]
    except Exception as error:
        found = type(error), str(error).splitlines()[:1]
    return found, image(torch.get_rng_state())


class Empty(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def same_as_eager(
    make: Callable[[], Any], call: Callable[..., Any], passes: str = "", eager: Any = None
) -> Any:
    """Assert equality; returns the `fz.lazy` object.

    make: returns fresh arguments, which are compared too. eager: a context for the eager run.
    """
    want = outcome(make, call, eager or nullcontext())
    lazy = fz.lazy(passes=passes)
    with poisoned():
        for run in range(RUNS):
            got = outcome(make, call, lazy)
            assert got == want, f"run {run} differs from eager"
    return lazy
