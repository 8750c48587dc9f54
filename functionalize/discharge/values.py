"""What storages, view ops and emitters share: values, the views that hold them, the steps between views.

    emit.call(aten.sin.default, value)              a node of a graph, or a tensor: the emitter decides
    View(child, parent, step)                       `step.regenerate(emit, view of parent)` is the child's value
    with emit.made_for(record): ...                 what is emitted inside is attributed to `record`

Invariant: a value has exactly the size, stride and dtype of the geometry it is bound to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize.ir.ops import Geometry, OpRecord

Value = Any  # an fx.Node while a graph is built, a torch.Tensor while substituting


class Emitter(ABC):
    """Turns an op on values into a value: a node of a graph, or the op's result.

    now: the record that values are made for; only `made_for` changes it.
    """

    now: OpRecord | None = None

    @contextmanager
    def made_for(self, record: OpRecord | None) -> Iterator[None]:
        """What is emitted inside is made for `record`; what was made for another before, is again after it."""
        before, self.now = self.now, record
        try:
            yield
        finally:
            self.now = before

    @abstractmethod
    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The value of `target` applied to values and constants."""

    @abstractmethod
    def part(self, values: Value, index: int) -> Value:
        """One of the several values that an op made."""

    @abstractmethod
    def empty(self, geometry: Geometry, device: torch.device) -> Value:
        """A value with undefined contents and exactly this size, stride and dtype."""

    @abstractmethod
    def whole(self, serial: int, flat: Geometry) -> Value:
        """What an input's whole storage held on entry, as the one-dimensional `flat`."""


class Step(ABC):
    """One view op between a parent and a child geometry.

    scatters: whether `inverse` copies the child, whatever its strides.
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
        """The parent after `child` was written; asks for the old `parent` only if part of it survives."""

    def regenerate(self, emit: Emitter, parent: View) -> Value:
        """The child's value, from the view of the parent."""
        return self.forward(emit, parent.value)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a view op: what is called, with which arguments after the parent."""

    target: Any
    args: tuple[Any, ...]

    def on(self, emit: Emitter, parent: Value) -> Value:
        """The value of the call for `parent`."""
        return emit.call(self.target, parent, *self.args)


@dataclass(slots=True)
class View:
    """One geometry of a storage: how it is reached (`step` None: straight from the root), and its value.

    lists: the values of multi-output ops (`split`, `unbind`) on `value`, by call, so that all outputs that are read
    share one. They are views of `value`, so they keep no more memory in use than it does, and go when it goes.
    """

    geometry: Geometry
    parent: Geometry | None = None
    step: Step | None = None
    value: Value = None
    version: int = -1
    lists: dict[Call, Value] = field(default_factory=dict)

    def hold(self, value: Value, version: int) -> None:
        """Bind `value`, which is what the view holds as of `version`."""
        if value is not self.value:
            self.value, self.lists = value, {}
        self.version = version
