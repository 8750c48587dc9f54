"""The recorder: every op below autograd, and every storage resize, as an op stream.

    with Recorder() as recorder:      a dispatch mode; torch is patched, see patches.py
        fn(*args)
    recorder.records                  [OpRecord(aten.sin.default, ...), OpRecord(resize_storage_bytes_, ...)]
    recorder.storages                 which tensors are on which storage, see storage_table.py
    recorder.checks                   reasons why a replay cannot repeat the step, see checks.py

Invariant: leaving the context restores torch's methods and the mode stack, also after an exception.
Refusals: tensors without a storage; resizes of storages of which no tensor is known; ops that read freed storages.
All are raised before the op runs, so that nothing segfaults.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from functionalize._compat.autograd import autograd_position
from functionalize._compat.dispatch import disable_current_modes, is_traceable_wrapper_subclass_type
from functionalize._compat.distributed import is_dtensor_type, work_of
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.references import address
from functionalize._compat.stacks import stack_here
from functionalize.calls.call_log import CallLog
from functionalize.discharge.resize import checked_nbytes
from functionalize.discharge.rules.mutations import written_arguments
from functionalize.discharge.rules.resizes import RESIZE_STORAGE, is_inplace_view
from functionalize.errors import ForeignStorageError, FunctionalizeError
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, refs_in
from functionalize.ir.point_to_point import EAGER_SEND, SENT, is_message
from functionalize.ir.worlds import FakeWorld, placed, world_directly_below
from functionalize.program.early_guard import early_records
from functionalize.recorder.checks import Checks
from functionalize.recorder.op_kinds import OpKind, kind_of, storage_of
from functionalize.recorder.patches import Watcher
from functionalize.recorder.stand_ins import StandIns, restore_strides
from functionalize.recorder.storage_table import RecordingObserver, StorageTable
from functionalize.scalars.live_scalars import SYMBOLIC, as_live, plain, settled
from functionalize.scalars.live_text import learn_texts
from functionalize.scalars.scalar_arguments import ScalarArguments, has_live, live_arguments
from functionalize.scalars.scalar_log import FOREIGN_NUMBER, FrozenScalar, ScalarLog
from functionalize.tape.notes import TapeNotes
from functionalize.util.tensor_wrappers import plain_tensors
from functionalize.util.user_stack import line_of, located

aten = torch.ops.aten
_LIFT_FRESH = aten.lift_fresh.default
_DEVICE = torch.ops.prim.device.default
_TENSORS = frozenset({Tensor, Parameter})
_CONSTANTS = frozenset({bool, int, float, str, type(None), torch.dtype})
_NO_BYTES = Geometry((0,), (1,), 0, torch.uint8)


class _Message(NamedTuple):
    """A message between two ranks that has started. number: of a send, in the op stream; None: it is a receive."""

    work: Any
    record: OpRecord
    device: torch.device
    number: int | None


class Recorder(Watcher):
    """Records while active.

    ignore_fake: ops on fake tensors are not recorded (DTensor's sharding propagation runs some).
    stand_ins: the fakes that stand in for tensors from outside, if the run is on fakes.
    live: the numbers that Python reads are live (see live_scalars.py).
    for_real: the step must run to its end, also if an op cannot be recorded. None: as `ignore_fake`; a step in a fake
    world runs on fakes alone and passes it.
    observer: notes when storages are allocated and freed (see planner/lifetimes/step_memory.py).
    records: the op stream. tape: the notes about autograd's nodes.
    scalars: the numbers that Python read, if numbers are not live; live ones are in `scalar_log`.
    started: whether it was ever entered. failed: the exception that an op raised, and the op's record.
    early_storages: numbers of the storages whose contents are known before a call, for `early_records`.
    calls: see `CallLog`.
    python_effects: what the step did to Python objects and a replay repeats, in order: pairs of an effect and its value
    (see state/python_effects.py), which may hold tensors and live numbers.
    """

    def __init__(
        self,
        ignore_fake: bool = False,
        stand_ins: StandIns | None = None,
        live: bool = False,
        for_real: bool | None = None,
        observer: RecordingObserver | None = None,
    ) -> None:
        super().__init__()
        self.live, self.started = live, False
        self.records: list[OpRecord] = []
        self.tape: TapeNotes = TapeNotes(self.records)
        self.scalars: list[FrozenScalar] = []
        self.failed: tuple[BaseException, OpRecord] | None = None
        self.early_storages: set[int] = set()
        self.python_effects: list[tuple[Any, Any]] = []
        self.storages = StorageTable(observer)
        self.storages.holds_externals = observer is None
        self.checks: Checks = Checks(self.storages, ignore_fake if for_real is None else for_real)
        self.scalar_log = ScalarLog(self.checks.note) if live else None
        self.scalar_arguments = ScalarArguments(self.scalar_log) if self.scalar_log else None
        self.observer = observer
        self.calls = CallLog()
        # By the address of its work: the messages for which the step has not waited.
        self._messages: dict[int, _Message] = {}
        self._sent = 0  # how many were sent
        self.ignore_fake = ignore_fake
        self._met_number = False  # whether an argument of the current op is a symbolic number
        self._stand_ins = stand_ins
        self._ref = self.storages.ref
        self._world: FakeWorld | None = None  # whose results are asked for directly
        self._kinds: dict[int, OpKind] = {}  # by the address of the op: hashing one calls Python
        if observer is not None:
            observer.attach(self.records)

    def start(self) -> None:
        self.started = True
        self._world = world_directly_below()
        self.storages.holds_externals = True
        self.tape.start()
        self.calls.streams = (sys.stdout, sys.stderr)
        self.checks.begin()
        if self.observer is not None:
            self.observer.start(self)

    def stop(self) -> None:
        self.tape.end()
        self._end_messages()
        if self.scalar_log is not None:
            learn_texts(self.scalar_log)
            self.scalar_log.close()
        if self.observer is not None:
            self.observer.stop()

    def resume(self) -> None:
        """Prepare to be entered again: changes to generators since the last exit are not the step's."""
        self.checks.forget_generators()
        self.calls.were_made = False
        if self.scalar_log is not None:
            self.scalar_log.active = True

    def early_records(self) -> frozenset[int]:
        """Ids of the records that are computed from arguments, constants and numbers in buffers alone."""
        learned = self.scalars or (self.scalar_log is not None and self.scalar_log.facts)
        known = {e.ref.storage for e in self.storages.externals if e.literal or e.is_index}
        # Without a number that Python has learned, no guard needs them.
        return early_records(self.records, known | self.early_storages) if learned else frozenset()

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:  # two thirds of the calls on fakes
            return args[0].fake_device
        if self.suspended:
            self.calls.note_op(func, (args, kwargs), self.storages.info_of)
            if self.checks.in_effect and func.namespace == "c10d":
                self.calls.communicates = True
            return func(*args, **kwargs)
        for kind in types:
            if kind is FakeTensor:
                if self.ignore_fake:
                    return func(*args, **kwargs)
            elif is_traceable_wrapper_subclass_type(kind):
                if func is RESIZE_STORAGE:
                    return self._resize_inner(args[0], args[1])
                if self.scalar_arguments is not None and is_dtensor_type(kind):
                    return self._past_dtensor(self.scalar_arguments, func, args, kwargs)
                return NotImplemented
        op = self._kinds.get(address(func))
        if op is None:
            op = self._kinds[address(func)] = kind_of(func)
        if op.metadata:
            return op.run(*args, **kwargs)
        if op.composite or op.has_formula:
            out = self.formulas.by_other_ops(self, op, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if op.random:
            out = self.calls.own_generators.drawn(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        record = self.tape.record(func)
        if func is _LIFT_FRESH and self.storages.info_of(args[0]) is None:
            return self._literal(args[0], record)
        checks = self.checks
        try:
            args, kwargs = self._begin(op, record, args, kwargs)
        except FunctionalizeError as error:
            checks.note_or_raise(located(error, record))
            with self.quiet():
                return func(*args, **kwargs)
        if op.random:
            checks.before(op, record)
        if op.sized_by_data:
            checks.read_sizes(self, record, args, kwargs)
        self.suspended += 1
        try:
            if self._world is None:
                out = op.run(*args, **kwargs)
            else:
                out = self._world.known(func, op.run, args, kwargs, record.args)
        except BaseException as error:
            self.failed = (error, record)
            raise
        finally:
            self.suspended -= 1
        if op.communicates and is_message(func):
            self._note_message(record, out, args[0][0].device)
        if op.random:
            checks.generators_moved()
        if op.foreign:
            checks.after_foreign(op, record)
        if op.to_python:
            out = self._to_python(record, out)
        try:
            self._finish(op, record, args, kwargs, out)
        except FunctionalizeError as error:
            checks.note_or_raise(located(error, record))
        return out

    def _begin(
        self, op: OpKind, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the arguments into the record, and refuse the op if it cannot run.

        Returns the arguments to run it with: fakes for tensors from outside, plain values for live numbers.
        """
        storages, scalars = self.storages, self.scalar_arguments
        storages.met_resized = False
        if self._stand_ins is not None:
            args, kwargs = self._to_fake(args), self._to_fake(kwargs)
        record.args = tuple(self._map_all(args))
        if kwargs:
            record.kwargs = {k: self._map_in(v) for k, v in kwargs.items()}
        if self._met_number or (scalars is not None and scalars.carrying is not None):
            args, kwargs = self._take_numbers(record, args, kwargs)
        if op.reads_grad_mode:
            record.meta["gradients"] = torch.is_grad_enabled()
        if op.may_be_refused or storages.met_resized:
            self.checks.refuse(op, record)
        return args, kwargs

    # -- numbers -------------------------------------------------------------------------------

    def _to_python(self, record: OpRecord, out: Any) -> Any:
        """The number that Python reads: a live one, or a plain one with a guard."""
        out = plain(out)  # it is live in an enclosing recording
        if self.scalar_log is None or type(out) not in (int, float):
            self.scalars.append(FrozenScalar(record, out))
            return out
        number = self.scalar_log.read(record, out)
        record.meta["read"], record.meta["hint"] = number.expression, out
        return as_live(number)

    def _past_dtensor(self, scalars: ScalarArguments, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on a DTensor with plain numbers; local ops are recorded with live ones: Note [Carried numbers]."""
        if not has_live([args, list(kwargs.values())]):
            return NotImplemented
        schema = func._schema
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        # Numbers on which a shape depends are constants.
        carried = live_arguments(schema)
        given = {k: v if k in carried else settled(v) for k, v in given.items()}
        with self, scalars.carry(schema.name, given) as plain_ones:
            names = [argument.name for argument in schema.arguments[: len(args)]]
            return func(*[plain_ones[n] for n in names], **{k: plain_ones[k] for k in kwargs})

    def _take_numbers(self, record: OpRecord, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put live numbers into the record, and return the arguments with their plain values."""
        self._met_number = False
        if self.scalar_arguments is None:
            if has_live([record.args, list(record.kwargs.values())]):
                self.checks.note(FOREIGN_NUMBER)
            return args, kwargs  # other symbolic numbers: sizes of an enclosing tracer
        return self.scalar_arguments.put_into(record, args, kwargs)

    # -- arguments and results ---------------------------------------------------------------------

    def _to_fake(self, arg: Any) -> Any:
        """`arg` with tensors from outside replaced by their fakes."""
        kind = type(arg)
        if kind is list or kind is tuple:
            return kind(self._to_fake(a) for a in arg)
        if kind is dict:
            return {k: self._to_fake(v) for k, v in arg.items()}
        if self._stand_ins is None or not isinstance(arg, Tensor) or isinstance(arg, FakeTensor):
            return arg
        with self.quiet():
            return self._stand_ins.stand_in(arg, self.storages)

    def _literal(self, tensor: Tensor, record: OpRecord) -> Any:
        """`lift_fresh`: a tensor made from Python numbers, a constant of the program, which keeps a copy."""
        with disable_current_modes():
            contents = tensor.detach().clone()
        with self.quiet():
            out = _LIFT_FRESH(tensor)
            name = f"constant_{len(self.storages.externals)}"
            ref = self.storages.bring_in(out, name, literal=contents)
        if self.other_arrays is not None:
            with disable_current_modes():
                self.other_arrays.note(ref.storage, contents, record.traceback)
        return out

    def describe(self, record: OpRecord) -> str:
        """The tensors among an op's arguments, for messages."""
        infos, refs = self.storages.infos, refs_in([record.args, record.kwargs])
        named = (f"`{infos[r.storage].name}` ({r.geometry})" for r in refs)
        return ", ".join(named) or "no tensors"

    def _map_in(self, arg: Any) -> Any:
        kind = type(arg)
        if kind in _CONSTANTS:
            return arg
        if isinstance(arg, Tensor):
            return self._ref(arg)
        if isinstance(arg, (list, tuple)):
            return self._map_all(arg)
        if kind in SYMBOLIC:
            self._met_number = True
        return placed(arg) if kind is torch.device else arg

    def _map_all(self, args: Any) -> list[Any]:
        ref, known = self._ref, _CONSTANTS
        return [
            ref(a) if type(a) in _TENSORS else a if type(a) in known else self._map_in(a)
            for a in args
        ]

    def _map_out(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self.storages.out_ref(out)
        if isinstance(out, (list, tuple)):
            return [self._map_out(o) for o in out]
        return None

    def _finish(self, op: OpKind, record: OpRecord, args: Any, kwargs: Any, out: Any) -> None:
        storages = self.storages
        if op.reads_no_data and (op.restrides or storages.met_resized):
            self.checks.after_view(record, args, out)
        if record.target is RESIZE_STORAGE:
            storages.note_size(storage_of(args[0]))
        elif op.changes_geometry:
            self._after_mutation(record, args, kwargs)
        if storages.born:  # most ops make no storage: the dict of the last op is empty
            storages.born = {}
        outputs = storages.out_ref(out) if isinstance(out, Tensor) else self._map_out(out)
        record.outputs = outputs
        if storages.born:
            record.meta["born"] = storages.born
        self.records.append(record)
        if self.observer is not None:
            self.observer.recorded(record, args)

    def _after_mutation(
        self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Update the record if the op resized a tensor (`out=`, `resize_`) or its storage, or moved it (`set_`)."""
        changed = []
        keep = is_inplace_view(record.target)
        new_args, new_kwargs = list(record.args), record.kwargs
        for at, name in written_arguments(record.target):
            inside = at is not None and at < len(args)
            written = args[at] if inside else kwargs.get(name)  # type: ignore[index]
            if not keep and isinstance(written, FakeTensor):
                before = record.args[at] if inside else record.kwargs[name]  # type: ignore[index]
                with self.quiet():
                    restore_strides(written, before)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if keep and isinstance(tensor, Tensor) and self.storages.info_of(tensor) is None:
                    continue  # `set_()` made a storage: it is an output
                if isinstance(tensor, Tensor):
                    self._ref(tensor)
                    size = self.storages.note_size(storage_of(tensor))
                    if size is not None:
                        changed.append(size)
            if keep or written is None:
                continue
            if inside:
                new_args[at] = self._map_in(written)  # type: ignore[index]
            else:
                new_kwargs[name] = self._map_in(written)
        record.args, record.resized = tuple(new_args), tuple(changed)

    # -- messages between two ranks ----------------------------------------------------------------

    def _note_message(self, record: OpRecord, out: Any, device: torch.device) -> None:
        """A message has started. out: its work."""
        work, number = work_of(out), None
        if record.target is EAGER_SEND:
            number, self._sent = self._sent, self._sent + 1
        self._messages[address(work)] = _Message(work, record, device, number)

    def note_wait(self, work: Any) -> None:
        """Record where the step waits for a send: its wait in the graph must not come earlier."""
        message = self._messages.pop(address(work), None)
        if message is not None and message.number is not None:
            SENT(message.number)

    def note_question(self, work: Any) -> None:
        """Refuse a question whose answer depends on another rank's time."""
        if address(work) in self._messages:
            self.checks.note(
                "asks whether a message between two ranks has ended (`is_completed`, `get_future`) "
                f"{line_of(stack_here())}, which is another answer at each call: call `wait()`"
            )

    def _end_messages(self) -> None:
        """Refuse receives that outlive the step. On a device it may wait by another work, of a group of messages."""
        for message in self._messages.values():
            if message.number is None and message.device.type == "cpu":
                self.checks.note(
                    f"starts to receive {line_of(message.record.traceback)}, and does not wait for it: call `wait()` "
                    "of what dist.irecv returns in the step"
                )
        self._messages.clear()  # which hold what is sent

    # -- resizes -------------------------------------------------------------------------------

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called, which does not dispatch; `original` carries it out."""
        record = OpRecord(RESIZE_STORAGE, (), {}, None, (), stack_here())
        if not self.tape.is_off:
            record.seq_nr, record.autograd_node, record.phase = autograd_position(self.tape.names)
            record.tape = self.tape
        info = self.storages.info_at(storage)
        size = plain(size)
        try:
            if info is None:
                raise ForeignStorageError(
                    f"resizes a storage of {storage.nbytes()} bytes to {size}, which belongs to no "
                    "argument and no result of the program: pass its tensor as an argument"
                )
            checked_nbytes(size, info.name)
        except FunctionalizeError as error:
            self.checks.note_or_raise(located(error, record))
            return original(storage, size)
        result = original(storage, size)
        self.storages.note_size(storage)
        record.args = (TensorRef(info.serial, _NO_BYTES), size)
        self.records.append(record)
        if self.observer is not None:
            self.observer.recorded(record, ())
        return result

    def _resize_inner(self, tensor: Any, nbytes: int) -> None:
        """Resize a wrapper subclass: each of its inner tensors."""
        with self:
            for inner in plain_tensors(tensor):
                RESIZE_STORAGE(inner, nbytes)
