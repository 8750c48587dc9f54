"""The signature of a recording: what its op stream was, in a compact form with which later runs are compared.

    signature = Signature.of(recorder, places, state)      when a program is made
    signature.rows[3]        Row(aten.mul.Tensor, (TensorRef(s2, f32[4]), 0.5), ...)
    signature.sources        [(0, "model_weight", ModuleTensor(...)), ...]: the storages that existed before the step
    signature.literals       {7: digest}: tensors that Python made from numbers, by their contents

A live number is kept as its expression, so that a later run can compute the value that it must have there. Storages
have the numbers of their recording; a comparison maps them to those of the other run.
Invariant: a signature keeps no tensor alive that its program does not, and is never changed. Arguments of unknown types
are kept as their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize._compat.stacks import CapturedTraceback
from functionalize.audit.digest import Digest, digest
from functionalize.ir.inputs import Captured, Source
from functionalize.ir.ops import OpRecord, TensorRef, refs_in, storages_in
from functionalize.ir.scalars import LiveNumber, Read, ScalarInput, bottom_up, map_numbers
from functionalize.program.json_codec import Form, plain_form
from functionalize.program.program_file import group_arguments
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.live_scalars import expression_of
from functionalize.state.hyperparameters import Key
from functionalize.state.moving_state import MovingPlaces
from functionalize.state.sources import Slot
from functionalize.util.process_groups import group_name, is_group, is_reduction, reduction_text
from functionalize.util.tensor_wrappers import plain_tensors

_PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device),
        *(torch.layout, torch.memory_format),
    }
)


@dataclass(frozen=True, slots=True)
class GroupName:
    """The process group of a collective, by its name in this process."""

    name: str


class Row(NamedTuple):
    """One op. gradients: the grad mode, for ops that compute another result without gradients. read: the number that
    the op returned to Python, as a leaf of expressions. stack: where it was recorded; None in a program from a file.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    resized: tuple[tuple[int, int], ...]
    gradients: bool | None
    read: Read | None
    stack: CapturedTraceback | None


class NumberFact(NamedTuple):
    """A guard on a number: the step relied on `expression` having this value."""

    expression: Any
    value: Any


@dataclass(frozen=True, slots=True)
class StateAround:
    """What the signature needs of the state around a recording.

    places: for each storage that was found before the step: name, source, geometry.
    leaves, spec: those of the step's `ExitState`.
    slots: all places that may hold a gradient. assigned: those that the step assigned.
    lifted, optimizers: the hyperparameters that were live numbers, and the optimizers of the step by name.
    moving: the places in Python that the step moves.
    records, facts: how many of the records, and of the facts on numbers, are the callable's own; None: all.
    """

    places: Mapping[int, tuple[str, Source, TensorRef]]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    slots: Sequence[tuple[str, Slot]]
    assigned: Sequence[Slot]
    lifted: frozenset[Key]
    optimizers: Mapping[str, torch.optim.Optimizer]
    moving: MovingPlaces
    records: int | None = None
    facts: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """What one recording did.

    sources: (number, name, source) of each storage from outside that the step used. literals: contents of tensors that
    Python made from numbers. leaves: of the result, of the assigned gradients and of the values of effects in Python,
    with `TensorRef`s for tensors.
    assigned: for each slot, whether the step assigned it. numbers: the numbers of Python that are inputs.
    live: whether numbers were live in the recording. The other fields: see `StateAround`.
    """

    rows: tuple[Row, ...]
    sources: tuple[tuple[int, str, Source], ...]
    literals: dict[int, Digest]
    facts: tuple[NumberFact, ...]
    numbers: tuple[ScalarInput, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    slots: tuple[tuple[str, Slot], ...]
    assigned: tuple[bool, ...]
    live: bool
    lifted: frozenset[Key]
    optimizers: dict[str, torch.optim.Optimizer]
    moving: MovingPlaces | None = None

    @staticmethod
    def of(recorder: Recorder, state: StateAround) -> Signature:
        """The signature of a recording that has ended and is in the steady state."""
        return Signature.later(recorder, state)()

    @staticmethod
    def later(recorder: Recorder, state: StateAround) -> Callable[[], Signature]:
        """What makes the signature of such a recording: its rows are made when a run is to be compared, if ever.

        Like the signature, it keeps no tensor alive; until it is called, it keeps the records.
        """
        frozen = {id(each.record): each.value for each in recorder.scalars}
        records, log = recorder.records[: state.records], recorder.scalar_log
        found = list(log.facts.values())[: state.facts] if log is not None else []
        known = [NumberFact(fact.expression, fact.value) for fact in found]
        leaves = tuple([leaf_of(leaf, recorder) for leaf in state.leaves])
        outside, literals = [], {}
        for each in recorder.storages.externals:
            serial = each.ref.storage
            if each.literal:
                literals[serial] = digest(each.tensor)
            elif serial in state.places:
                outside.append((serial, *state.places[serial][:2]))
            else:
                outside.append((serial, each.info.name, Captured(each.tensor)))
        assigned = set(map(id, state.assigned))
        around = (
            state.spec,
            tuple(state.slots),
            tuple(id(slot) in assigned for _, slot in state.slots),
            recorder.live,
            state.lifted,
            dict(state.optimizers),
            state.moving if state.moving else None,
        )

        def made() -> Signature:
            rows = tuple([row_of(r, bool(frozen) and id(r) in frozen) for r in records])
            pairs = list(zip(rows, records, strict=True))
            facts = [
                NumberFact(row.read, frozen[id(record)])
                for row, record in pairs
                if row.read is not None and id(record) in frozen
            ]
            facts += known
            used = storages_in(records)
            used |= {ref.storage for ref in refs_in([p for p in leaves if type(p) is list])}
            return Signature(
                rows,
                tuple([source for source in outside if source[0] in used]),
                {serial: each for serial, each in literals.items() if serial in used},
                tuple(facts),
                _numbers_in([row for row, record in pairs if record.live], facts, leaves),
                leaves,
                *around,
            )

        return made


def row_of(record: OpRecord, reads: bool) -> Row:
    """The row of a record. reads: whether the op returned a number to Python that is not live."""
    args, kwargs = record.args, record.kwargs
    args = tuple([a if type(a) in _KEPT else constant(a) for a in args])
    if kwargs:
        kwargs = {k: constant(v) for k, v in kwargs.items()}
    for at in _group_arguments(record.target):
        if isinstance(at, int) and at < len(args):
            args = (*args[:at], GroupName(str(args[at])), *args[at + 1 :])
        elif isinstance(at, str) and at in kwargs:
            kwargs = {**kwargs, at: GroupName(str(kwargs[at]))}
    read = gradients = None
    if record.meta:
        read, gradients = record.meta.get("read"), record.meta.get("gradients")
    if read is None and reads:
        read = Read(record)
    outputs, resized = record.outputs, record.resized
    fields = (record.target, args, kwargs, outputs, resized, gradients, read, record.traceback)
    return tuple.__new__(Row, fields)  # half the time of calling the class


@cache
def _group_arguments(target: Any) -> list[int | str]:
    """The positions and names of an op's arguments that are names of process groups, of ops that communicate."""
    space = getattr(target, "namespace", "")
    return group_arguments(target) if space in ("_c10d_functional", "functionalize") else []


_KEPT = frozenset({*_PLAIN, TensorRef, LiveNumber})


def constant(value: Any) -> Any:
    """An argument of an op: process groups and reductions by name, objects of unknown types as their type."""
    kind = type(value)
    if kind in _KEPT:
        return value
    if kind is list or kind is tuple:
        return [a if type(a) in _KEPT else constant(a) for a in value]
    if isinstance(value, torch.Size):
        return list(value)
    if is_group(value):
        return GroupName(group_name(value))
    if is_reduction(value):
        return reduction_text(value)
    return f"a {kind.__module__}.{kind.__qualname__}"


def leaf_of(leaf: Any, recorder: Recorder) -> Any:
    """A leaf of a result: the references of its tensors as a list, the expression of a live number, or a constant."""
    if isinstance(leaf, Tensor):
        return [recorder.storages.ref(tensor) for tensor in plain_tensors(leaf)]
    expression = expression_of(leaf, recorder.scalar_log)
    if expression is not None:
        return leaf.node.carried()
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes"):
        return (str(leaf.dtype), str(leaf.shape), leaf.tobytes())
    found = constant(leaf)
    return tuple(found) if type(found) is list else found


def _numbers_in(*parts: Any) -> tuple[ScalarInput, ...]:
    """The numbers of Python that expressions depend on."""
    done: dict[Any, None] = {}

    def visit(number: LiveNumber) -> None:
        for part in bottom_up(number.expression, done):
            done[part] = None

    rows, facts, leaves = parts
    for row in rows:
        map_numbers(visit, [row.args, row.kwargs])
    map_numbers(visit, list(leaves))
    for fact in facts:
        visit(LiveNumber(fact.expression, None))
    return tuple(part for part in done if isinstance(part, ScalarInput))


# -- files -----------------------------------------------------------------------------------------


def _load_row(*values: Any) -> Row:
    return Row._make((*values, None))


def forms(group: Any, groups: Sequence[str] = ()) -> list[Form]:
    """The encodings of a signature (see program/json_codec.py).

    group: the index of a process group in the file, by its name. groups: the names here of the groups in a file.
    Stacks are not written: a comparison then shows the line of the audited call alone.
    """
    return [
        Form(Row, lambda row: tuple(row)[:-1], _load_row),
        Form(Read, lambda read: (), lambda: Read(None)),  # type: ignore[arg-type]
        Form(GroupName, lambda g: (group(g.name)["group"],), lambda at: GroupName(groups[at])),
        # `Captured` is found only where the program itself does not need the tensor.
        Form(Captured, lambda captured: (), lambda: Captured(None)),
        *map(plain_form, (NumberFact, Signature, TensorRef, LiveNumber)),
    ]
