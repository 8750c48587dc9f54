"""The arguments of a call that a replay makes again: constants, live numbers, texts of these, tensors.

    taken = CallArguments.of(recording, frame, ("loss", loss), {"flush": True})
    taken.values                     ["loss", a live number, True]: part of what the program returns
    taken.plain                      (("loss", 0.25), {"flush": True}): for the call in the recording
    taken.form.filled(values)        (("loss", 0.125), {"flush": True}): for the call in a replay

A tensor is copied by an op of the step, so a replay has the contents that it has at the call.
Refusals, as text: tensors that require a gradient, whose text says so; objects, unless the caller knows what
the call reads of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize.calls.call_log import CallRecorder
from functionalize.calls.late_numbers import is_late, late_value
from functionalize.scalars.live_scalars import as_live, is_live, left_behind
from functionalize.scalars.live_text import Formatted, Template, taken
from functionalize.util.structure import of_leaves
from functionalize.util.text import with_article

_CONSTANTS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)


@dataclass(frozen=True, slots=True)
class LateLeaf:
    """A number that is computed when the call is repeated: see late_numbers.py."""

    expression: Any

    def filled(self, value: Any) -> Any:
        """The number."""
        return late_value(self.expression)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectLeaf:
    """An object that every call of the step finds again."""

    found: Any

    def __eq__(self, other: object) -> bool:  # the object may compute by `==`
        return isinstance(other, ObjectLeaf) and other.found is self.found

    def __hash__(self) -> int:
        return id(self.found)

    def filled(self, value: Any) -> Any:
        """The object."""
        return self.found


@dataclass(frozen=True, slots=True)
class TextLeaf:
    """A text that is put together when the call is repeated. parts: constants, and how numbers become text."""

    parts: tuple[str | TextPart, ...]

    def filled(self, values: Sequence[Any]) -> str:
        """The text. values: one for each part."""
        pairs = zip(self.parts, values, strict=True)
        return "".join(
            part if isinstance(part, str) else part.filled(value) for part, value in pairs
        )


@dataclass(frozen=True, slots=True)
class TextPart:
    """How a number becomes text. late: its expression, if it is a late number."""

    function: Callable[..., str]
    args: tuple[Any, ...]
    then: str
    late: Any = None

    def filled(self, value: Any) -> str:
        """The text of the number."""
        number = value if self.late is None else late_value(self.late)
        return format(self.function(number, *self.args), self.then)


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """The structure of the arguments of a call. leaves: how each leaf is made from its value; None: it is its value."""

    spec: pytree.TreeSpec
    leaves: tuple[LateLeaf | ObjectLeaf | TextLeaf | None, ...]

    @property
    def objects(self) -> list[Any]:
        """The objects among the arguments."""
        return [leaf.found for leaf in self.leaves if isinstance(leaf, ObjectLeaf)]

    def filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the numbers and tensors of a replay. values: one for each leaf."""
        pairs = zip(self.leaves, values, strict=True)
        leaves = [value if leaf is None else leaf.filled(value) for leaf, value in pairs]
        args, keywords = of_leaves(leaves, self.spec)
        return args, keywords


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of one call in a recording. plain: with plain numbers, for this call."""

    form: ArgumentForm
    values: list[Any]
    plain: tuple[tuple[Any, ...], dict[str, Any]]

    @staticmethod
    def of(
        recording: CallRecorder,
        frame: FrameType,
        args: Sequence[Any],
        keywords: dict[str, Any],
        first: int = 0,
        objects: tuple[type, ...] = (),
    ) -> CallArguments | str:
        """The arguments of the call that `frame` makes; a text that says which of them cannot be repeated.

        first: the position of the first of `args` in that call. objects: types of objects that may be passed.
        """
        log = recording.scalar_log
        templates: dict[int | str, Template] = {}
        if log is not None and log.texts:
            templates = taken(log, frame, [None] * first + [*args], keywords)
        tree = (tuple(args), dict(keywords))
        pairs, spec = pytree.tree_flatten_with_path(tree)
        values: list[Any] = []
        plain: list[Any] = []
        leaves: list[LateLeaf | ObjectLeaf | TextLeaf | None] = []
        for path, leaf in pairs:
            template = templates.get(_place(path, first))
            leaves.append(None)
            plain.append(leaf)
            if template is not None:
                leaves[-1] = TextLeaf(tuple(map(_part, template)))
                values.append([_number(part) for part in template])
            elif is_live(leaf):
                plain[-1] = left_behind(leaf)
                if leaf.node.alive and leaf.node.log is not log:
                    return "a number that another recording reads"
                if leaf.node.alive and is_late(leaf.node.expression):
                    leaves[-1] = LateLeaf(leaf.node.expression)
                    values.append(None)
                else:
                    values.append(leaf if leaf.node.alive else leaf.node.settle())
            elif type(leaf) in _CONSTANTS:
                values.append(leaf)
            elif isinstance(leaf, Tensor):
                if refused := _refused(leaf):
                    return refused
                with torch.no_grad():
                    values.append(leaf.detach().clone())
            elif isinstance(leaf, objects):
                leaves[-1] = ObjectLeaf(leaf)
                values.append(None)
            else:
                return with_article(type(leaf).__name__)
        return CallArguments(ArgumentForm(spec, tuple(leaves)), values, of_leaves(plain, spec))


def _place(path: Any, first: int) -> int | str:
    """The position or the name of an argument; -1 for a part of one."""
    if len(path) != 2:
        return -1
    key = path[1]
    return key.idx + first if hasattr(key, "idx") else str(key.key)


def _part(part: str | Formatted) -> str | TextPart:
    if isinstance(part, str):
        return part
    late = part.number.expression if is_late(part.number.expression) else None
    return TextPart(part.function, part.args, part.then, late)


def _number(part: str | Formatted) -> Any:
    if isinstance(part, str):
        return part
    return None if is_late(part.number.expression) else as_live(part.number)


def _refused(tensor: Tensor) -> str | None:
    if type(tensor) is not Tensor or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return with_article(type(tensor).__name__)
    if tensor.requires_grad:
        return "a tensor that requires a gradient, which that of a replay would not: detach it"
    return "a sparse tensor" if tensor.layout is not torch.strided else None
