"""Recorded calls of a step, as programs for other sizes are made from them, and the kinds of calls.

open_key(key)            the key of a call in the cache, without its sizes
Reference.of(...)        a recorded call: its sizes, its program before the passes, its op stream
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functionalize.audit.signature import Signature
from functionalize.lengths.data_sizes import has_sizes
from functionalize.lengths.signature_template import relations_in
from functionalize.program.program import Program
from functionalize.templates.leaves import identity, leaves_of
from functionalize.templates.symbols import Shapes
from functionalize.templates.template import MADE


def open_key(key: Any) -> Hashable:
    """The key of a call in the cache, without the sizes of its tensors that are neither 0 nor 1."""
    return tuple([_opened(part) if _is_tensors(part) else part for part in key])


def shapes_of(key: Any) -> Shapes:
    """The sizes of the tensors among the arguments of a call, from its key in the cache."""
    return [part[0] for part in key if _is_tensors(part)]


def _is_tensors(part: Any) -> bool:
    return type(part) is tuple and bool(part) and type(part[0]) is torch.Size


def _opened(part: Any) -> Any:
    return (tuple([min(size, 2) for size in part[0]]), *part[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One recorded call. key: in the cache. names: of its tensors. program: as recorded, before the passes.

    rest: the `CachedProgram`.
    """

    key: Any
    names: Sequence[str]
    program: Program
    signature: Signature
    rest: Any

    @property
    def shapes(self) -> Shapes:
        """The sizes of its tensors."""
        return shapes_of(self.key)

    @property
    def token(self) -> Any:
        """What else must be equal in all recordings of a class."""
        rest = self.rest
        changed = (rest.slots, rest.python_effects, rest.dropped, rest.has_grad_fn)
        return identity((rest.effects, *map(tuple, changed)))

    def replayed_by(self, program: Program, op_stream: Callable[[], Signature]) -> None:
        """A template has made an equal program, for which nothing is compiled: it is replayed, unless passes ran."""
        if self.rest.program is self.program:
            program.facts = self.program.facts
            self.rest.program, self.rest.op_stream = program, op_stream

    @staticmethod
    def of(
        key: Any, names: Sequence[str], leaves: Sequence[Any], program: Program, cached: Any
    ) -> Reference | None:
        """The reference of a `CachedProgram`; None if it has no signature, or an argument has no sizes.

        key: in the cache. names, leaves: of the arguments. program: as recorded.
        """
        tensors = [n for n, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]
        tensors += [MADE] if has_sizes(key) else []
        if cached.signature is None or len(tensors) != len(shapes_of(key)):
            return None
        return Reference(key, tensors, program, cached.signature, cached)


def tokens_of(reference: Reference) -> int:
    """What all recordings of a class have in common."""
    tokens = tuple(leaves_of(reference.program).tokens)
    return hash((tokens, reference.token, relations_in(reference.signature)))
