"""What one catalogue entry is, and the few helpers its programs are written with.

A `ResizeProgram` is a plain Python function over tensors together with everything a runner needs:
how to make its arguments, and how to give freed parameters their data back before the backward
pass, as FSDP2's pre-backward hook does. It imports torch alone, so it runs in plain eager mode.

Words used below: `z(...)` is a tensor whose storage is 0 bytes on entry though its shape is not
empty; `R(t, n)` resizes the storage under `t` to `n` bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

preserve_version = torch.autograd._unsafe_preserve_version_counter

Fn = Callable[..., Any]
Args = tuple[Tensor, ...]


@dataclass(frozen=True)
class ResizeProgram:
    """One program of the catalogue.

    name: unique; letters, digits and underscores.
    section: which kind of program it is, 1 to 10 (see `examples/programs.py`).
    fn: the function, or a tuple of functions run one after the other on the same arguments, whose
        only link is the state of the arguments (a graph break between them).
    make_args: builds fresh arguments with the same values, aliasing and storage sizes every time.
    refill: called between forward and backward; grows emptied parameters and writes them again.
    grad: whether the program is also run backward.
    note: what the program shows, in one line.
    """

    name: str
    section: int
    fn: Fn | tuple[Fn, ...]
    make_args: Callable[[], Args]
    refill: Callable[[Args], None] | None
    grad: bool
    note: str

    @property
    def fns(self) -> tuple[Fn, ...]:
        """The functions to run in a row: one, except across a graph break."""
        return self.fn if isinstance(self.fn, tuple) else (self.fn,)


def program(
    section: int,
    note: str,
    make_args: Callable[[], Args],
    *fns: Fn,
    name: str | None = None,
    refill: Callable[[Args], None] | None = None,
    grad: bool = False,
) -> ResizeProgram:
    """A catalogue entry; its name is that of its (first) function unless `name` says otherwise."""
    fn: Fn | tuple[Fn, ...] = fns[0] if len(fns) == 1 else fns
    return ResizeProgram(
        name or fns[0].__name__, section, fn, make_args, refill, grad or refill is not None, note
    )


def R(t: Tensor, nbytes: int) -> None:
    """Resize the storage under `t` to `nbytes` bytes, as a dispatched op."""
    torch.ops.inductor.resize_storage_bytes_(t, nbytes)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random values (rounded and scaled for integer dtypes), the same for the same seed."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype) if dtype.is_floating_point else (drawn * 100).to(dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Like `values`, requiring a gradient."""
    return values(*shape, seed=seed, dtype=dtype).requires_grad_()


def z(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape whose storage has been emptied, as FSDP2 leaves a resharded weight."""
    t = torch.zeros(shape, dtype=dtype)
    t.untyped_storage().resize_(0)
    return t.requires_grad_(grad)


def refill_parameter(p: Tensor, data: Tensor) -> None:
    """Grow `p` to full size and write `data`, unseen by its version counter (FSDP2's unshard)."""
    with torch.no_grad(), preserve_version(p):
        p.untyped_storage().resize_(p.numel() * p.element_size())
        p.copy_(data)


def refill_with(*data: Callable[[], Tensor] | None) -> Callable[[Args], None]:
    """A `refill` that gives argument i the tensor made by `data[i]` (None: leave it alone)."""

    def refill(args: Args) -> None:
        for arg, make in zip(args, data, strict=False):
            if make is not None:
                refill_parameter(arg, make())

    return refill
