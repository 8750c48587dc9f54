"""Inside the nested backward of a captured forward, hooks find the `.grad` of leaves that eager has.

    with GradAccess(leaves) as access:      the leaves' `.grad` is removed
        torch.autograd.backward(...)        a hook that reads `weight.grad` finds what eager has there
    access.found                            text about the first such leaf, or None

Autograd accumulates what the nested backward returns into `.grad` afterwards, in the user's graph. So a hook that runs
inside would see no gradient of earlier calls. At the first access to a leaf the removed gradient is put back, as eager
has it at this moment, and autograd accumulates the whole sum into an empty `.grad` afterwards.

Invariant: outside of the context `torch.Tensor` has no attribute of ours. Accesses by torch's own code do not count.
Refusal: `found`: a replay runs no hook, so its program is not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from functionalize.util.patching import Patch, Patches, noted_attribute

_OWN: Any = torch.Tensor.grad  # the descriptor of the base class
_ACTIVE: list[GradAccess] = []


class GradAccess:
    """A context in which `leaves` have no `.grad`, unless code of the user reads or assigns it."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.found: str | None = None
        self._leaves = leaves
        self._removed: dict[int, Tensor | None] = {}

    def __enter__(self) -> GradAccess:
        for leaf in self._leaves:
            self._removed[id(leaf)] = leaf.grad
            leaf.grad = None
        _ACTIVE.append(self)
        _PATCHES.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _PATCHES.remove()
        _ACTIVE.remove(self)
        for leaf in self._leaves:
            if id(leaf) in self._removed:
                leaf.grad = self._removed[id(leaf)]

    def gradients(self) -> list[Tensor | None]:
        """What autograd is to accumulate into each leaf; those that code of the user has accessed have none now."""
        found = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            self._removed.setdefault(id(leaf), None)
        return found

    def accessed(self, leaf: Tensor, line: str) -> None:
        """Code of the user reads or assigns the `.grad` of a tensor."""
        if id(leaf) not in self._removed:
            return
        self.found = self.found or (
            f"a hook reads or assigns the `.grad` of a leaf ({list(leaf.shape)}) during the backward, at {line}, "
            "which a replay would not: use a post-accumulate hook of that leaf"
        )
        before, now = self._removed.pop(id(leaf)), _OWN.__get__(leaf)
        if before is not None:
            with torch.no_grad():
                _OWN.__set__(leaf, before if now is None else before.add_(now))


def _note(leaf: Tensor) -> None:
    frame = sys._getframe(2)
    if not frame.f_globals.get("__name__", "").startswith(("torch.", "functionalize.")):
        for access in _ACTIVE:
            access.accessed(leaf, f"{frame.f_code.co_filename}:{frame.f_lineno}")


def _patched() -> Iterator[Patch]:
    yield torch.Tensor, "grad", noted_attribute(_OWN, _note)


_PATCHES = Patches(_patched)
