"""Types shared by storages, view rules and emitters: values, the views that hold them, the steps between views.

    emit.call(aten.sin.default, value)              a graph node or a tensor, depending on the emitter
    View(child, parent, step)                       `step.regenerate(emit, view of parent)` returns the child's value
    with emit.made_for(record): ...                 ops emitted inside are attributed to `record`

Invariant: a value has exactly the size, stride and dtype of the geometry it is bound to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.ir.ops import Geometry, OpRecord

Value = Any  # an fx.Node while a graph is built, a torch.Tensor while substituting


class _MadeFor:
    """`Emitter.made_for`. A class, as a generator's context costs 1 us for each op of a recording."""

    __slots__ = ("_emit", "_record")

    def __init__(self, emit: Emitter, record: OpRecord | None) -> None:
        self._emit, self._record = emit, record

    def __enter__(self) -> None:
        self._emit.record, self._record = self._record, self._emit.record

    def __exit__(self, *error: object) -> None:
        self._emit.record = self._record


class Emitter(ABC):
    """Turns an op on values into a value: a node of a graph, or the op's result.

    record: the op record that emitted values are attributed to; set by `made_for` only.
    """

    record: OpRecord | None = None

    def made_for(self, record: OpRecord | None) -> _MadeFor:
        """A context: ops emitted inside are attributed to `record`; on exit the previous record is restored."""
        return _MadeFor(self, record)

    @abstractmethod
    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The value of `target` applied to values and constants."""

    @abstractmethod
    def part(self, values: Value, index: int) -> Value:
        """Output `index` of an op with several outputs."""

    @abstractmethod
    def empty(self, geometry: Geometry, device: torch.device) -> Value:
        """A value with undefined contents and exactly this size, stride and dtype."""

    @abstractmethod
    def whole(self, serial: int, flat: Geometry) -> Value:
        """The contents on entry of an input's whole storage, as a tensor of the one-dimensional geometry `flat`."""


class ViewStep(ABC):
    """One view op between a parent and a child geometry.

    scatters: whether `inverse` copies the child into the parent, so that the child may have any strides.
    """

    __slots__ = ()

    @property
    def scatters(self) -> bool:
        return False

    @abstractmethod
    def forward(self, emit: Emitter, parent: Value) -> Value:
        """The child's value."""

    @abstractmethod
    def inverse(self, emit: Emitter, child: Value, parent: Callable[[], Value]) -> Value:
        """The parent's value after a write of `child`.

        parent: returns the parent's old value; called only if part of that survives the write.
        """

    def regenerate(self, emit: Emitter, parent: View) -> Value:
        """The child's value, computed from the parent's view, whose value must be current."""
        return self.forward(emit, parent.value)


@dataclass(frozen=True, slots=True, eq=False)
class ViewCall:
    """One call of a view op: the op, and its arguments after the parent."""

    target: Any
    args: tuple[Any, ...]

    def on(self, emit: Emitter, parent: Value) -> Value:
        """The value of the call for `parent`."""
        return emit.call(self.target, parent, *self.args)


@dataclass(slots=True)
class View:
    """One geometry of a storage, with the step that derives it and its last value.

    parent, step: the geometry it is a view of, and the view op between them; both None: derived from the root by
        `as_strided`.
    value, version: the last value, and the version of the storage at which that was current.
    is_written: whether the value is one that was written here, and no view of the base.
    output_lists: the results of multi-output ops (`split`, `unbind`) on `value`, by call, so that all outputs that
        are read share one node. They are views of `value`: they keep no further memory alive, and are dropped with it.
        None: there are none, as on nearly every view.
    """

    geometry: Geometry
    parent: Geometry | None = None
    step: ViewStep | None = None
    value: Value = None
    version: int = -1
    is_written: bool = False
    output_lists: dict[ViewCall, Value] | None = None

    def hold(self, value: Value, version: int, is_written: bool = False) -> None:
        """Bind `value`, the contents of the view as of `version`."""
        if value is not self.value:
            self.value, self.output_lists = value, None
        self.version, self.is_written = version, is_written
