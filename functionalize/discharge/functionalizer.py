"""The only loop: op stream → storage SSA → values.

For each op the engine does one of:

    rule       its schema does not say what it does (resize, copies, collectives, random): see `rules/`
    view       its output shares a storage with an input: record the step, emit nothing
    mutation   emit the functional counterpart, write the result through the view
    pure       read every tensor argument, emit the op, bind the outputs

The same loop runs over a recorded op stream with graph nodes as values, and live with tensors as values.
Work is O(1) amortised per op and per tensor argument. Named after JAX's state discharge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from functionalize._compat.references import address
from functionalize.discharge.layout import UNKNOWN, result_geometries
from functionalize.discharge.loops import operands_of
from functionalize.discharge.resize import checked_nbytes, resize
from functionalize.discharge.rules import rule_of
from functionalize.discharge.rules.custom import needs_wrapper, wrapped
from functionalize.discharge.rules.lists import OF_REFS, one_by_one
from functionalize.discharge.rules.mutations import (
    FunctionalForm,
    expands,
    functional_form,
    is_mutating,
    leaves_gradients,
)
from functionalize.discharge.rules.views import step_of, straight
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import Emitter, Value, ViewCall
from functionalize.errors import (
    ForeignStorageError,
    FunctionalizeError,
    InvariantError,
    UnsupportedOpError,
)
from functionalize.ir.ops import NESTED, Geometry, OpRecord, TensorRef, map_refs, refs_in
from functionalize.util.user_stack import located

aten = torch.ops.aten
# Ops that a BLAS computes: their bits depend on the addresses of their arguments.
_BY_ADDRESS = frozenset(
    {
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
        *(aten.mv.default, aten.addmv.default, aten.dot.default, aten.vdot.default),
        *(aten.linear.default, aten.matmul.default, aten.addbmm.default),
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class Functionalizer:
    """Storage SSA over one op stream; rules see it as the protocol `Engine`.

    emit: makes values, as graph nodes or as tensors.
    storages: the records of all storages seen so far, by serial.
    sends: per message that is sent, the token with which it is waited for; None: it has been.
    """

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.storages: dict[int, FunctionalStorage] = {}
        self.sends: list[Value] = []
        # By the address of the op, since hashing one calls Python; with the op, which keeps the address its own.
        self._handlers: dict[int, tuple[Callable[[Functionalizer, OpRecord], Any], Any]] = {}

    # -- storages ------------------------------------------------------------------------------

    def declare(
        self,
        ref: TensorRef,
        nbytes: int,
        device: torch.device,
        value: Value,
        name: str,
        external: bool = False,
    ) -> FunctionalStorage:
        """Add the record of a storage of `nbytes` bytes, of which `value` is the contents of the tensor `ref`.

        external: whether the storage is an input's.
        """
        record = FunctionalStorage(
            ref.storage, ref.geometry, device, value, nbytes, name, straight, external
        )
        self.storages[ref.storage] = record
        return record

    def storage(self, serial: int) -> FunctionalStorage:
        """The record of a storage of the program."""
        found = self.storages.get(serial)
        if found is None:
            raise ForeignStorageError(
                f"uses storage s{serial}, which belongs to no tensor of the program"
            )
        return found

    def read(self, ref: TensorRef) -> Value:
        """The current value of a tensor."""
        storage = self.storages.get(ref.storage) or self.storage(ref.storage)
        return storage.read(ref.geometry, self.emit)

    def write(self, ref: TensorRef, value: Value) -> None:
        """Make `value` (of exactly `ref`'s size, stride and dtype) the contents of a tensor."""
        self.storage(ref.storage).write(ref.geometry, value, self.emit)

    def resize(self, serial: int, nbytes: Any) -> None:
        """Apply the resize rule to one storage."""
        storage = self.storage(serial)
        resize(storage, checked_nbytes(nbytes, storage.name))

    def device_of(self, ref: TensorRef) -> torch.device:
        """The device of a tensor's storage."""
        return self.storage(ref.storage).device

    # -- the loop ------------------------------------------------------------------------------

    def run(self, record: OpRecord) -> None:
        """Discharge one recorded op and bind its outputs."""
        # `emit.made_for(record)`, without an object and two calls for each op of a recording.
        emit = self.emit
        before, emit.record = emit.record, record
        try:
            values, outputs = self._discharged(record), record.outputs
            if type(outputs) is not TensorRef:
                self._bind(record, outputs, values)
            elif outputs[0] not in self.storages:
                self.declare_output(record, outputs, values)
        finally:
            emit.record = before

    def step(self, record: OpRecord) -> Any:
        """Discharge one op; returns the values of its outputs, None for an output that is one of its arguments."""
        with self.emit.made_for(record):
            return self._discharged(record)

    def _discharged(self, record: OpRecord) -> Any:
        try:
            for serial, nbytes in record.resized:
                self.resize(serial, nbytes)
            found = self._handlers.get(address(record.target))
            return (found[0] if found is not None else self._handler(record.target))(self, record)
        except FunctionalizeError as error:
            raise located(error, record) from error.__cause__

    def _handler(self, target: Any) -> Callable[[Functionalizer, OpRecord], Any]:
        """Handler of an op, cached per overload; whether it aliases an input is decided per record."""
        by_schema = Functionalizer.mutated if is_mutating(target) else Functionalizer._view_or_pure
        if target in _BY_ADDRESS:
            by_schema = Functionalizer._pure_in_place
        handler = rule_of(target) or by_schema
        self._handlers[address(target)] = handler, target
        return handler

    def _view_or_pure(self, record: OpRecord) -> Value:
        out = record.outputs
        if type(out) is not TensorRef:
            return self.views(record) if self._are_views(record) else self.pure(record)
        known = self.storages.get(out.storage)
        parent = _aliased(record, out) if known is not None else None
        if known is None or parent is None:
            return self.pure(record)
        self._record_view(known, record, parent, out)
        return None

    def pure(self, record: OpRecord) -> Value:
        """Read every tensor argument, emit the op."""
        read, storages, emit = self.read, self.storages, self.emit
        args = [
            (storages.get(a[0]) or self.storage(a[0])).read(a[1], emit)  # `read`, without its call
            if type(a) is TensorRef
            else map_refs(read, a)
            if type(a) in NESTED
            else a
            for a in record.args
        ]
        if not record.kwargs:
            return emit.call(record.target, *args)
        return emit.call(record.target, *args, **map_refs(read, record.kwargs))

    def _pure_in_place(self, record: OpRecord) -> Value:
        """The same of an op whose bits depend on where its arguments lie: see Note [Bits by address]."""

        def read(ref: TensorRef) -> Value:
            return self.storage(ref.storage).read_in_place(ref.geometry, self.emit)

        args, kwargs = map_refs(read, record.args), map_refs(read, record.kwargs)
        return self.emit.call(record.target, *args, **kwargs)

    def _bind(self, record: OpRecord, outputs: Any, values: Value) -> None:
        if type(outputs) is TensorRef:
            if outputs.storage not in self.storages:
                self.declare_output(record, outputs, values)
        elif isinstance(outputs, (list, tuple)):
            for i, out in enumerate(outputs):
                if any(ref.storage not in self.storages for ref in refs_in(out)):
                    self._bind(record, out, self.part(values, i))

    def declare_output(self, record: OpRecord, ref: TensorRef, value: Value) -> None:
        """Add the record of a storage that the current op made; `value` is that of its first output on it."""
        if value is None:
            raise InvariantError(f"{record.target} returned no value for its output {ref}")
        serial, geometry = ref
        nbytes, device = record.meta["born"][serial]
        # `declare`, without its call.
        self.storages[serial] = FunctionalStorage(
            serial, geometry, device, value, nbytes, record.target, straight
        )

    def declare_undefined(self, record: OpRecord, ref: TensorRef, why: str) -> None:
        """Add the record of a storage that the current op made, no byte of which is defined."""
        _, device = record.meta["born"][ref.storage]
        self.declare_output(record, ref, self.emit.empty(ref.geometry, device))
        made = self.storages[ref.storage]
        made.intact, made.copied = False, why
        made.valid.truncate(0)

    # -- views ---------------------------------------------------------------------------------

    def _are_views(self, record: OpRecord) -> bool:
        inputs = {ref.storage for ref in refs_in(record.args)}
        return any(ref.storage in inputs for ref in refs_in(record.outputs))

    def views(self, record: OpRecord) -> None:
        """Record the steps from the arguments of a view op to the outputs that alias them."""
        single = type(record.outputs) is TensorRef
        call = ViewCall(record.target, record.args[1:])
        for i, out in enumerate([record.outputs] if single else record.outputs):
            if type(out) is not TensorRef:
                continue
            parent = _aliased(record, out)
            if parent is None:
                raise InvariantError(
                    f"{record.target} returns {out}, which aliases none of its arguments"
                )
            index = None if single else i
            self._record_view(self.storage(out.storage), record, parent, out, index, call)

    def _record_view(
        self,
        storage: FunctionalStorage,
        record: OpRecord,
        parent: TensorRef,
        out: TensorRef,
        index: int | None = None,
        call: ViewCall | None = None,
    ) -> None:
        if out.geometry in storage.views:
            return  # the usual case: a forward and its backward make the same views
        if record.args[0] == parent:
            call = call or ViewCall(record.target, record.args[1:])
            step = step_of(call, parent.geometry, out.geometry, index)
            if step is not None:
                storage.add_view(parent.geometry, out.geometry, step)

    # -- mutations -----------------------------------------------------------------------------

    def mutated(self, record: OpRecord) -> Any:
        """Emit the functional counterpart, write the result through the view."""
        if needs_wrapper(record.target):
            return wrapped(self, record)
        form = functional_form(record.target)
        elements = one_by_one(record.target, record.args, record.kwargs, *OF_REFS)
        if elements is not None:
            for args, kwargs in elements:
                self.mutated(replace(record, args=args, kwargs=kwargs))
            return None
        unwritten = "grads" if leaves_gradients(record.target, record.kwargs) else None
        written = [
            None
            if name == unwritten
            else record.kwargs.get(name)
            if at is None or at >= len(record.args)
            else record.args[at]
            for at, name in form.written
        ]
        for ref in refs_in(written):
            self.storage(ref.storage).check_writable(ref.geometry)
        args, kwargs = self._functional_arguments(record, form, written)
        have = result_geometries(form, args, kwargs, written)
        values, have = operands_of(self, form.target, args, kwargs, written, have)
        results = self.emit.call(form.target, *values, **map_refs(self.read, kwargs))
        for index, target in zip(form.results, written, strict=True):
            value = results
            if not form.single:
                value = None if target is None else self.part(results, index)
            self._write_result(target, value, have[index] if have else None)
        if all(at is None for at in form.returned):
            return None
        single = len(form.returned) == 1
        outputs = [record.outputs] if single else record.outputs or [None] * len(form.returned)
        returned = [
            None if at is None else self._as_eager(self.part(results, at), have and have[at], out)
            for at, out in zip(form.returned, outputs, strict=True)
        ]
        return returned[0] if single else returned

    def _as_eager(self, value: Value, have: Any, out: Any) -> Value:
        """A returned value with the strides of eager's output (`rrelu_with_noise` returns a contiguous tensor)."""
        known = type(out) is TensorRef and have and have is not UNKNOWN
        if known and out.geometry.is_contiguous and not have.is_contiguous:
            return self.emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        return value

    def part(self, values: Value, index: int) -> Value:
        """One of several outputs."""
        if isinstance(values, (list, tuple)):
            return values[index]
        return self.emit.part(values, index)

    def _functional_arguments(
        self, record: OpRecord, form: FunctionalForm, written: list[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not form.dropped:
            return form.complete(record.args), record.kwargs
        names = {name for _, name in form.written}
        positions = {at for at, _ in form.written if at is not None}
        args = form.complete(tuple(a for i, a in enumerate(record.args) if i not in positions))
        kwargs = {k: v for k, v in record.kwargs.items() if k not in names}
        first = refs_in(written)[0]
        if form.fills_dtype and kwargs.get("dtype") is None:
            kwargs["dtype"] = first.geometry.dtype
        if form.fills_device and kwargs.get("device") is None:
            kwargs["device"] = self.device_of(first)
        return args, kwargs

    def _write_result(self, target: Any, value: Value, have: Any) -> None:
        if type(target) is TensorRef:
            self.put(target, value, have)
            return
        if target is None:
            return
        for i, ref in enumerate(target):
            if have is None and type(ref) is TensorRef:  # `put`, without three calls
                self.storage(ref.storage).write(ref.geometry, self.part(value, i), self.emit)
                continue
            each = have[i] if isinstance(have, list) else have
            self._write_result(ref, self.part(value, i), each)

    def put(self, target: TensorRef, value: Value, have: Geometry | None) -> None:
        """Cast `value` and write it; broadcast and re-stride only if no scatter on the way would.

        have: the geometry of `value`; None if it is that of `target`, UNKNOWN if the op has no usable meta kernel.
        """
        storage, want = self.storage(target.storage), target.geometry
        if have is None:
            storage.write(want, value, self.emit)
            return
        if (
            have is UNKNOWN
            or have.stride == want.stride
            or not expands(have.size, want.size)
            or not storage.scatters(want)
        ):
            storage.write(want, self.fit(value, have, target), self.emit)
            return
        if have.dtype != want.dtype:
            value = self.emit.call(aten._to_copy.default, value, dtype=want.dtype)
        if have.size != want.size:
            value = self.emit.call(aten.expand.default, value, list(want.size))
        storage.write(want, value, self.emit, exact=False)

    def fit(self, value: Value, have: Geometry | None, target: TensorRef) -> Value:
        """`value`, broadcast, cast and re-strided to the geometry of `target`.

        have: the geometry of `value`; None if it is that of `target`, UNKNOWN if the op has no usable meta kernel.
        """
        want = target.geometry
        if have is None:
            return value
        if have is UNKNOWN and want.size != (0,):
            empty = self.emit.empty(want, self.device_of(target))
            return self.emit.call(aten.copy.default, empty, value)
        if have is UNKNOWN or not expands(have.size, want.size):
            raise UnsupportedOpError(
                f"returns a result that fits no `out` of size {list(want.size)}, which eager resizes and torch's "
                "fake kernel does not: give it an `out` of the right size"
            )
        if have.dtype != want.dtype:
            value = self.emit.call(aten._to_copy.default, value, dtype=want.dtype)
        if have.size != want.size:
            value = self.emit.call(aten.expand.default, value, list(want.size))
        elif have.stride == want.stride or (have.is_contiguous and want.is_contiguous):
            return value
        return self.laid_out(value, target)

    def laid_out(self, value: Value, target: TensorRef) -> Value:
        """A fresh copy of `value` (right size and dtype) with the strides of `target`."""
        want = target.geometry
        if want.is_contiguous:
            return self.emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)
        empty = self.emit.empty(want, self.device_of(target))
        return self.emit.call(aten.copy.default, empty, value)


def _aliased(record: OpRecord, out: TensorRef) -> TensorRef | None:
    """The first argument on the storage of `out`, or None."""
    for arg in record.args:
        if type(arg) is TensorRef:
            if arg.storage == out.storage:
                return arg
        elif isinstance(arg, (list, tuple)):
            found = next((r for r in refs_in(arg) if r.storage == out.storage), None)
            if found is not None:
                return found
    return None
