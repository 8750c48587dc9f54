"""The version counters of what a replay writes: autograd compares those of what graphs of eager have saved.

    versions = Versions(program.inputs)
    with versions.kept(call.inputs): ...      writes leave some counters as they are
    versions.raise_around(call)               the counters of wrapper subclasses, whose inner tensors were written

Such a graph may be older than the replay, and go backward after it. A counter that eager leaves (the statistics of
batch norm, writes to `.data`) would make its backward fail, one that eager raises and a replay does not would let it
compute with other values, without a word.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import KeptVersions
from functionalize.ir.inputs import Call, InputSpec

_NOTHING = nullcontext()


class Versions:
    """What replays of one program do to version counters. It holds no tensor.

    around: for each input with a tensor around it, its index, its source, what finds that tensor where it was looked up
    last, and the name by which that holds the input.
    """

    def __init__(self, inputs: Sequence[InputSpec]) -> None:
        self._kept = [i for i, spec in enumerate(inputs) if spec.version == "kept"]
        self._around: list[tuple[int, Any, Any, str]] = [
            (i, spec.source, _gone, spec.source.attribute)  # type: ignore[attr-defined]
            for i, spec in enumerate(inputs)
            if spec.version == "raised around"
        ]

    def kept(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context in which writes leave the counters that eager leaves."""
        return KeptVersions([inputs[i] for i in self._kept]) if self._kept else _NOTHING

    def raise_around(self, call: Call) -> None:
        """Raise the counters of the tensors around inputs, as writes by their own ops do."""
        if not self._around:
            return
        found: list[Tensor] = []
        for at, (index, source, known, name) in enumerate(self._around):
            outer = known()
            if getattr(outer, name, None) is not call.inputs[index]:
                outer = source.of.resolve(call)
                self._around[at] = index, source, _finder(source.of, outer), name
            found.append(outer)
        torch.autograd.graph.increment_version(found)


def _finder(source: Any, found: Tensor) -> Callable[[], Any]:
    """What finds a tensor again: no weak reference to a parameter, which torch could not swap then."""
    table = getattr(source, "entries", None)
    return weakref.ref(found) if table is None else functools.partial(table.get, source.name)


def _gone() -> None:
    return None
