"""Gradients of the last step that a step drops, and that a replay drops before its first op.

    optimizer.zero_grad()            eager: the old gradients are freed here; a replay assigns the new ones at its end,
    model(x).backward()              and would hold the old ones beside its activations
    optimizer.step()

    drop(call, cached.dropped)       after every guard that is checked before the graph runs
    put_back(call, cached.dropped)   if the step then runs eagerly after all: with stand-ins

Invariant: no op of the program reads a dropped gradient, no output is one, and after the step nothing else holds it.
In an eager run in place of a failed replay, Python takes the recorded path up to where the step drops the gradient,
since it has read no number before: on this path it can see that a gradient is there, and reads none of its contents.
So zeros of the parameter's form stand in for it.
Refuses to drop
- a gradient that outlives the step, or that the program reads;
- one that the step drops after it has read a number from a tensor: with another number it might read the gradient;
- one that the step drops after an op, if the step may run eagerly because an op of the replay failed: it might catch
  the exception;
- a place where FSDP2 keeps unsharded gradients, which a step adds to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor

from functionalize.ir.inputs import Call
from functionalize.ir.ops import OpRecord
from functionalize.state.sources import Gradient, Slot, assign

Deaths = MutableMapping[
    int, int
]  # the index of a slot -> how many ops had run when its gradient died


def watch(
    gradients: Sequence[Tensor | None], records: Sequence[OpRecord], deaths: Deaths
) -> list[weakref.ref[Tensor] | None]:
    """Weak references to gradients; `deaths` is filled when they die. records: the op stream so far."""

    def noting(at: int) -> weakref.ref[Tensor] | None:
        gradient = gradients[at]
        if gradient is None:
            return None
        return weakref.ref(gradient, lambda _: deaths.setdefault(at, len(records)))

    return [noting(at) for at in range(len(gradients))]


def droppable(
    slots: Sequence[Slot], deaths: Mapping[int, int], read: set[int], latest: int
) -> Iterator[Gradient]:
    """The slots whose gradients a replay may drop first.

    read: the ids of the slots that the program reads. latest: how many ops may have run before the death.
    """
    for at, count in deaths.items():
        slot = slots[at]
        if count <= latest and isinstance(slot, Gradient) and id(slot) not in read:
            yield slot


def drop(call: Call, slots: Sequence[Gradient]) -> None:
    """Empty the slots."""
    assign(call, slots, [None] * len(slots))


def put_back(call: Call, slots: Sequence[Gradient]) -> None:
    """Fill the slots that are empty with stand-ins."""
    for slot in slots:
        if slot.resolve(call) is None:
            parameter = slot.of.resolve(call)
            dtype = getattr(parameter, "grad_dtype", None)
            with torch.no_grad():
                slot.assign(call, torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
