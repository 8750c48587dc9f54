"""The registry from op to rule, filled at import time and never changed after, and the engine that rules use.

    @rule(aten.zero_.default)
    def zero_(engine: Engine, record: OpRecord) -> None:
        engine.write(record.args[0], engine.emit.call(aten.full.default, ...))

A rule returns the values of the outputs in the structure of `record.outputs`, None where the output is one of the
op's arguments. It may also pass the record on to `engine.pure` or `engine.mutated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from functionalize._compat.dispatch import OpOverload
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import Emitter, Value
from functionalize.ir.ops import Geometry, OpRecord, TensorRef


class Engine(Protocol):
    """What a rule may use of the engine that discharges its op (`discharge.Functionalizer`).

    A rule raises a `FunctionalizeError` that names neither op nor line: the engine adds the op and the user's line.
    """

    @property
    def emit(self) -> Emitter:
        """Makes values: `emit.call(op, *values)` for an op, `emit.empty(geometry, device)` for undefined contents.

        For every rule that computes. A value becomes the contents of a tensor only by `write` or `put`.
        """
        ...

    @property
    def storages(self) -> Mapping[int, FunctionalStorage]:
        """The records of all storages that the program has, by serial.

        For a rule that must find out whether a storage is new (an op that may return its argument or a new tensor).
        """
        ...

    def storage(self, serial: int) -> FunctionalStorage:
        """The record of storage `serial`; raises `ForeignStorageError` if the program has none.

        For checks before a write (`check_writable`), and for rules that depend on which bytes are defined.
        """
        ...

    def declare_undefined(self, record: OpRecord, ref: TensorRef, why: str) -> None:
        """Add the record of a storage that `record` made, no byte of which is defined; `why`: what a read says.

        For ops that eager may run on undefined bytes: their output must not be read before it is written.
        """
        ...

    # Per message that is sent, the token with which it is waited for; None: it has been.
    sends: list[Value]

    def device_of(self, ref: TensorRef) -> torch.device:
        """The device of `ref`'s storage: for ops that make a tensor like one of their arguments."""
        ...

    def read(self, ref: TensorRef) -> Value:
        """The current value of `ref`, of exactly its geometry; a stale view is regenerated.

        For every argument whose contents the op reads. Raises if its storage is empty or its bytes undefined.
        """
        ...

    def write(self, ref: TensorRef, value: Value) -> None:
        """Make `value` the contents of `ref`; its size, stride and dtype are `ref`'s already.

        For results that are laid out right by construction; else `put`, or `fit` before it.
        """
        ...

    def put(self, target: TensorRef, value: Value, have: Geometry | None) -> None:
        """Write `value` of geometry `have` (None: as `target`), cast, broadcast and re-strided as needed.

        For results that may differ from their target in dtype, size or strides; it skips the re-striding where the
        write copies the value anyway.
        """
        ...

    def fit(self, value: Value, have: Geometry | None, target: TensorRef) -> Value:
        """`value` of geometry `have` (None: as `target`) in the dtype, size and strides of `target`; writes nothing.

        For `out=` ops: the functional op computes in its own dtype and layout, and eager casts into `out`.
        Raises `UnsupportedOpError` if `have` does not broadcast to `target`.
        """
        ...

    def laid_out(self, value: Value, target: TensorRef) -> Value:
        """A copy of `value`, which has the size and dtype of `target`, with the strides of `target`.

        For values that share memory with another one (expanded or permuted): a base must have memory of its own.
        """
        ...

    def part(self, values: Value, index: int) -> Value:
        """Output `index` of an op that has several, whether `values` is one value or a list of values."""
        ...

    def pure(self, record: OpRecord) -> Value:
        """Discharge `record` as an op that writes nothing: read its tensors, emit it; returns the value of its outputs.

        For calls that need no rule of their own, and for records that a rule has rewritten.
        """
        ...

    def mutated(self, record: OpRecord) -> Any:
        """Discharge `record` as an op that writes what its schema says; returns the values of its outputs.

        As `pure`: for calls that need no rule of their own, and for records that a rule has rewritten.
        """
        ...

    def resize(self, serial: int, nbytes: Any) -> None:
        """Apply the resize rule: storage `serial` holds `nbytes` bytes from now on; emits nothing.

        For ops that resize a storage. Raises `ResizeError` if `nbytes` is no size.
        """
        ...


Rule = Callable[[Engine, OpRecord], Any]
RULES: dict[Any, Rule] = {}
BY_NAME: dict[
    str, Rule
] = {}  # `namespace::name` of ops that not every build of torch has at the import of this package
RuleT = TypeVar("RuleT", bound="Callable[..., Any]")


def rule(*targets: Any) -> Callable[[RuleT], RuleT]:
    """Register a rule for each of `targets` (`OpOverload`s)."""

    def register(fn: RuleT) -> RuleT:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has a rule already")
            RULES[target] = fn
        return fn

    return register


def rule_of(target: Any) -> Rule | None:
    """The rule of an op; None if it has none."""
    found = RULES.get(target)
    if found is None and isinstance(target, OpOverload):
        return BY_NAME.get(target.name())
    return found
