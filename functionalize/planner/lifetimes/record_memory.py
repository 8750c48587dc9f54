"""`record_memory`: the bytes that a step holds at every moment, recorded while it runs eagerly.

    step = fz.record_memory(train_step)
    step(batch)                 runs eagerly, and records when storages are allocated and freed
    step.memory.peak            of that call; see `planner/report/text.py`: eager's lifetimes, without a program's

Any call can be recorded: a first step, a step that cannot be captured, one that fails half-way, a captured step that
replays. It costs less than half of `capture(memory=True)`, which also reports the memory of the program. The recorder
costs little more than an empty dispatch mode:

    recorder = MemoryRecorder()
    recorder.add_place(name, source, tensor)      for every tensor that the step can reach when it begins
    with recorder: fn(*args)
    recorder.lifetimes(...)                       the same `Lifetimes` as from a `LifetimeObserver` of a `Recorder`

Half of the ops of a step are views: they allocate nothing and are not recorded. For every other op the recorder notes
the user's line, the module, the position in the backward, and the tensors as (storage, size, stride, dtype). It makes
no checks and no guards, and does not track numbers read from tensors. `lifetimes` turns the notes into `OpRecord`s.
Invariants: the step runs as in eager. An exception of the step propagates, and `memory` ends at it. The recorder keeps
no tensor alive. A storage is forgotten when it is freed, because another one may get its address.
Refuses: see `record_memory`. Tensors without a storage that the step itself makes are left out.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, NoneType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from functionalize._compat.autograd import ENGINE, Position, backward_position, graph_task
from functionalize._compat.dispatch import is_traceable_wrapper_subclass_type
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.stacks import CapturedTraceback
from functionalize.cost.categories import Category
from functionalize.discharge.rules.factories import SHAPE_ONLY
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.inputs import Source
from functionalize.ir.ops import Geometry, OpRecord, TensorRef
from functionalize.ir.worlds import in_world
from functionalize.planner.lifetimes.input_categories import (
    Origin,
    Place,
    gradients,
    origin,
    parameter_names,
    payload_bytes,
)
from functionalize.planner.lifetimes.lifetimes import EagerMemory, LastSeen, Lifetimes
from functionalize.planner.lifetimes.notes import ADD, StepNotes
from functionalize.planner.scratch.scratch import is_shaped
from functionalize.recorder.op_kinds import kind_of, storage_of, tensors_in
from functionalize.recorder.patches import Watcher
from functionalize.state import arguments
from functionalize.state.arguments import leaf_names
from functionalize.state.sources import Slot, candidates, parameters, slots
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.user_stack import UserLine, is_internal
from functionalize.walk.roots import Roots
from functionalize.walk.walker import reachable

log = logging.getLogger("functionalize")


def record_memory(train_step: Callable[..., Any]) -> RecordedMemory:
    """Record the memory of every call of `train_step` (any callable; also a decorator), for `.memory`.

    The calls run eagerly, on real tensors or in an `fz.world`, and return what `train_step` returns. Bytes are as
    requested from the allocator.
    Raises `UnsupportedTensorError`, before anything runs, if the step can reach a tensor that has no storage (a sparse
    gradient). Such tensors that the step itself makes are left out, and a warning lists their layouts.

        >>> step = fz.record_memory(lambda x: (x * 2).sum())
        >>> step(torch.ones(1024))
        tensor(2048.)
        >>> step.memory.timeline("eager").peak  # bytes of the argument, the product and the sum
        8196
    """
    return RecordedMemory(train_step)


class RecordedMemory:
    """A step that runs eagerly; `memory` is that of its last call."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, train_step)
        self._fn, self._name = train_step, getattr(train_step, "__name__", "the step")
        self._memory: EagerMemory | None = None
        self._lifetimes: Callable[[], Lifetimes] | None = (
            None  # of the last call, not yet in `_memory`
        )

    def __repr__(self) -> str:
        return f"<record_memory of {self._name}: {self.memory!r}>"

    @property
    def memory(self) -> EagerMemory | None:
        """The bytes that the last call held at every moment; None before the first call."""
        if self._lifetimes is not None:
            self._memory, self._lifetimes = EagerMemory(self._lifetimes()), None
        return self._memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step, run eagerly."""
        recorder = MemoryRecorder(in_world())
        leaves, spec = arguments.flatten(args, kwargs)
        with only_young_collections():
            roots = reachable(self._fn, leaves, leaf_names(self._fn, spec))
            gradient_slots = list(slots(roots, list(parameters(roots, leaves))))
            for name, source, tensor in candidates(roots, leaves, gradient_slots):
                recorder.add_place(name, source, tensor)
            recorder.step_notes.calls.register(roots)
            try:
                with recorder:
                    return self._fn(*args, **kwargs)
            finally:
                self._keep_report(recorder, roots, gradient_slots, leaves)

    def _keep_report(
        self,
        recorder: MemoryRecorder,
        roots: Roots,
        gradient_slots: Sequence[tuple[str, Slot]],
        leaves: Sequence[Any],
    ) -> None:
        """Keep what `memory` is computed from, and no tensor of the call."""
        payload = payload_bytes(roots, recorder.serial_of)
        remaining = gradients(gradient_slots, leaves, recorder.serial_of)
        self._lifetimes = partial(recorder.lifetimes, payload, remaining, parameter_names(roots))
        if recorder.without_storage:
            log.warning(
                "the memory of %s leaves out tensors without a storage of their own: %s",
                self._name,
                ", ".join(sorted(recorder.without_storage)),
            )


# -- the recorder ----------------------------------------------------------------------------------

_TensorNote = tuple[int, Any, tuple[int, ...], torch.dtype]  # storage, size, stride, dtype
_Line = tuple[CodeType, int]


class _Watched(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with its number and its address."""

    __slots__ = ("address", "serial")

    serial: int
    address: int


class MemoryRecorder(Watcher):
    """Records one step while active.

    in_world: the step runs on fake tensors. If not, ops on fakes are DTensor's sharding propagation and are skipped.
    records: [op, arguments, keyword arguments, line, position, module, results] of each op.
    places: by number of the storage, the places that hold it before the step. These storages have the lowest numbers.
    without_storage: the layouts of tensors that have no storage of their own.
    """

    def __init__(self, in_world: bool = False) -> None:
        super().__init__()
        self.records: list[list[Any]] = []
        self.step_notes = StepNotes(self.records)
        self.places: list[list[Place]] = []
        self.without_storage: set[str] = set()
        self._in_world = in_world
        self._serials: dict[int, int] = {}  # address of a live storage -> its number
        self._sizes: list[int] = []  # by number: bytes now
        self._seen: list[tuple[torch.device, _TensorNote]] = []
        # Storages that existed before the step and are at no known place -> their bytes.
        self._captured: dict[int, int] = {}
        self._calls, self._changes = self.step_notes.calls, self.step_notes.changes
        self.module_calls = self._calls
        self._alive = self.step_notes.alive
        self._task = -1  # the id of autograd's graph task that ran last
        self._task_line: _Line | None = None  # the user's line that called backward
        self._handlings: dict[
            int, tuple[str, Any, Any]
        ] = {}  # by id of the op: hashing an op takes longer

    def add_place(self, name: str, source: Source, tensor: Tensor) -> None:
        """Add a place that the step can reach, before it begins.

        Raises `UnsupportedTensorError` if the tensor has no storage.
        """
        storage = storage_of(tensor)
        serial = self._serials.get(storage._cdata)
        if serial is None:
            self._add(tensor, storage)
            self.places.append([(name, source)])
        else:
            self.places[serial].append((name, source))

    def start(self) -> None:
        self.step_notes.start()

    def stop(self) -> None:
        self.step_notes.stop()

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is FakeTensor:
                if not self._in_world:
                    return func(*args, **kwargs)
            elif is_traceable_wrapper_subclass_type(kind):
                return NotImplemented
        known = self._handlings.get(id(func))
        if known is None:
            op = kind_of(func)
            formula = self.formulas.applied if op.has_formula else None
            known = self._handlings[id(func)] = _handling_of(func), op.run, formula
        handling, run, formula = known
        if formula is not None and not self.suspended:
            out = formula(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if handling is _SKIPPED or self.suspended:
            out = run(*args, **kwargs)
            if self._in_world:
                self._keep_sizes(args)
            return out
        if handling is _COMPOSITE:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if handling is _LITERAL:  # a tensor of Python numbers, which is allocated for the next op
            self._result(args[0], 1)
            return run(*args, **kwargs)
        position = backward_position()
        module = self._calls.running if position is None else self._calls.module_at(position)
        refs: Any = self._storages(args) if handling is _PLAIN else None
        if refs is None:
            find = self._argument
            refs = [find(a) if type(a) in _TENSORS else _map(find, a) for a in args]
        named = {k: _map(self._argument, v) for k, v in kwargs.items()} if kwargs else kwargs
        record = [func, refs, named, self._line(position), position, module, None]
        self.records.append(record)
        out = run(*args, **kwargs)
        record[6] = self._result(out) if type(out) in _TENSORS else _map(self._result, out)
        if handling is _WRITES:
            self._note_moved_storages(args, kwargs)
        elif handling is _ADDS and position is not None and not torch.is_grad_enabled():
            self._note_sum(args)
        return out

    def _storages(self, args: tuple[Any, ...]) -> tuple[int, ...] | None:
        """The storages of arguments, -1 for a number. None if a storage is new or an argument is of another type."""
        serials = self._serials
        try:
            found = [
                serials.get(a.untyped_storage()._cdata)
                if (kind := type(a)) in _TENSORS
                else -1
                if kind in _NUMBERS
                else None
                for a in args
            ]
        except (NotImplementedError, RuntimeError):
            return None
        return None if None in found else tuple(found)  # type: ignore[arg-type]

    def _argument(self, tensor: Tensor) -> _TensorNote | None:
        """An argument. If its storage is new to the recorder, it existed before the step."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            self.without_storage.add(str(tensor.layout))
            return None
        serial = self._serials.get(storage._cdata)
        if serial is None:
            note = self._add(tensor, storage)
            self._captured[note[0]] = storage.nbytes()
            return note
        return serial, tensor.shape, tensor.stride(), tensor.dtype

    def _result(self, tensor: Tensor, later: int = 0) -> _TensorNote | None:
        """A result. If its storage is new, the op has allocated it.

        later: 1 if the allocation counts as made by the next op, else 0.
        """
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            self.without_storage.add(str(tensor.layout))
            return None
        serial = self._serials.get(storage._cdata)
        if serial is None:
            return self._add(tensor, storage, later)
        return serial, tensor.shape, tensor.stride(), tensor.dtype

    def _add(self, tensor: Tensor, storage: torch.UntypedStorage, later: int = 0) -> _TensorNote:
        address, serial, nbytes = storage._cdata, len(self._sizes), storage.nbytes()
        note = serial, tensor.shape, tensor.stride(), tensor.dtype
        self._serials[address] = serial
        self._sizes.append(nbytes)
        self._seen.append((tensor.device, note))
        alive = _Watched(storage, self._freed)
        alive.serial, alive.address = serial, address
        self._alive.append(alive)
        self._changes.append((len(self.records) - 1 + later, serial, nbytes))
        return note

    def _freed(self, died: _Watched) -> None:
        self._changes.append((len(self.records) - 1, died.serial, 0))
        self._serials.pop(died.address, None)

    def _line(self, position: Position | None) -> _Line | None:
        """The innermost line of the user's code.

        Ops that the engine calls directly share the line that called backward: it is looked up once per graph task.
        """
        frame = sys._getframe(2)
        if position is None or frame.f_code is not ENGINE:
            return _user_line(frame)
        task = graph_task()
        if task != self._task:
            self._task, self._task_line = task, _user_line(frame)
        return self._task_line

    def _note_moved_storages(self, args: Any, kwargs: Any) -> None:
        """Note the storages of an op that may have resized a storage or moved a tensor to another one."""
        for tensor in tensors_in([list(args), kwargs]):
            note = self._argument(tensor)
            if note is not None:
                self._note_size(note[0], tensor.untyped_storage())

    def _note_size(self, serial: int, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        if nbytes != self._sizes[serial]:
            self._sizes[serial] = nbytes
            self._changes.append((len(self.records) - 1, serial, nbytes))

    def _note_sum(self, args: tuple[Any, ...]) -> None:
        """See Note [Sums in place] in `lifetimes.py`."""
        whole = [self._argument(t) for t in args[:2] if isinstance(t, Tensor) and t._base is None]
        storages = frozenset(note[0] for note in whole if note is not None)
        self.step_notes.sums[len(self.records) - 1] = storages

    def _keep_sizes(self, args: Any) -> None:
        """See Note [Views of an emptied fake] in `storage_table.py`."""
        for tensor in tensors_in(args):
            note, storage = self._argument(tensor), tensor.untyped_storage()
            if note is not None and storage.nbytes() != self._sizes[note[0]]:
                storage.resize_(self._sizes[note[0]])

    # -- calls that do not dispatch ----------------------------------------------------------------

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called; `original` carries it out."""
        serial = self._serials.get(storage._cdata)
        if serial is None:  # no recorded tensor is on it
            return original(storage, size)
        position = backward_position()
        bytes_of = (serial, (0,), (1,), torch.uint8)
        module, arguments = self._calls.module_at(position), [bytes_of, size]
        line = _user_line(sys._getframe(1))
        self.records.append([RESIZE_STORAGE, arguments, {}, line, position, module, None])
        result = original(storage, size)
        self._note_size(serial, storage)
        return result

    # -- the result --------------------------------------------------------------------------

    def serial_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None if the recorder has not seen it."""
        try:
            return self._serials.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    def lifetimes(
        self,
        payload: Mapping[int, int],
        gradients: Mapping[int, Category],
        parameters: Mapping[int, str],
    ) -> Lifetimes:
        """The lifetimes of the step, once it has ended.

        payload, gradients, parameters: what `payload_bytes`, `gradients` and `parameter_names` return, see
        `input_categories.py`.
        """
        seen = [LastSeen(_geometry(note), device.type) for device, note in self._seen]
        first = {serial: nbytes for _, serial, nbytes in reversed(self._changes)}
        origins = {
            serial: origin(
                places, seen[serial].geometry, first[serial], payload.get(serial), parameters
            )
            for serial, places in enumerate(self.places)
        }
        for i, (serial, nbytes) in enumerate(self._captured.items()):
            geometry = seen[serial].geometry
            origins[serial] = Origin(Category.UNKNOWN, f"captured_{i}", geometry, nbytes)
        births = [TensorRef(serial, each.geometry) for serial, each in enumerate(seen)]
        records = [_op_record(births, *record) for record in self.records]
        return self.step_notes.lifetimes(records, seen, origins, gradients)


def _map(find: Callable[[Tensor], _TensorNote | None], value: Any) -> Any:
    """Apply `find` to each tensor in nested lists. Numbers stay; any other object becomes None."""
    if type(value) in _NUMBERS:
        return value
    if isinstance(value, (list, tuple)):
        return [find(v) if type(v) in _TENSORS else _map(find, v) for v in value]
    return find(value) if isinstance(value, Tensor) else None


def _user_line(frame: FrameType | None) -> _Line | None:
    while frame is not None:
        code = frame.f_code
        if not is_internal(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back
    return None


# -- records, when the step has ended --------------------------------------------------------------


def _op_record(
    births: Sequence[TensorRef],
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    line: _Line | None,
    position: Position | None,
    module: str,
    result: Any,
) -> OpRecord:
    if (
        type(args) is tuple
    ):  # from `_storages`: take the geometry of the first tensor on each storage
        arguments: Any = tuple(births[serial] if serial >= 0 else None for serial in args)
    else:
        arguments = tuple(map(_refs, args))
    seq_nr, phase = position if position is not None else (None, None)
    refs = arguments, {k: _refs(v) for k, v in kwargs.items()}, _refs(result)
    node = "" if seq_nr is not None else None
    traceback = cast(CapturedTraceback, UserLine(*line)) if line is not None else None
    return OpRecord(
        func, *refs, (), traceback, None, 0, seq_nr, node, phase, meta={"module": module}
    )


def _refs(value: Any) -> Any:
    if type(value) is tuple:
        return TensorRef(value[0], _geometry(value))
    return [_refs(v) for v in value] if type(value) is list else value


def _geometry(note: _TensorNote) -> Geometry:
    _, size, stride, dtype = note
    return Geometry(tuple(size), stride, 0, dtype)


# -- handling of ops -------------------------------------------------------------------------------

_NUMBERS = frozenset({bool, int, float, str, torch.dtype, NoneType})
_TENSORS = frozenset({Tensor, Parameter, FakeTensor})  # other types: by `isinstance`
_SKIPPED, _COMPOSITE, _LITERAL = "skipped", "composite", "literal"
_WRITES, _ADDS, _EXACT, _PLAIN = "writes", "adds", "exact", "plain"


def _handling_of(func: Any) -> str:
    """How an op is recorded.

    skipped: it allocates nothing. composite: it is decomposed. literal: `lift_fresh`, only its storage is noted.
    writes: its tensors may change size or storage. adds: it may be a gradient sum. exact: every argument's geometry is
    recorded. plain: the storages of its arguments suffice.
    """
    op = kind_of(func)
    if func is torch.ops.aten.lift_fresh.default:
        return _LITERAL
    if op.metadata or (op.reads_no_data and not op.mutating and func not in SHAPE_ONLY):
        return _SKIPPED
    if op.composite:
        return _COMPOSITE
    if op.changes_geometry:
        return _WRITES
    if func is ADD:
        return _ADDS
    return _EXACT if op.communicates or is_shaped(func) else _PLAIN
