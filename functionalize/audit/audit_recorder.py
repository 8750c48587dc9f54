"""The recorder of an audited call: it follows the signature, and compares each op when it runs.

    recorder = AuditRecorder(signature)
    comparison = recorder.begin(call)      looks up the storages and numbers from outside, before the step runs
    with recorder: fn(*args)
    comparison.verdict(...)

Most ops are those that the signature has next, with the same arguments: that takes a look at the storage, size, stride,
offset and type of each argument, and no record, stack or check. Every other op, and each one that needs more than that
(random ones, collectives, those that change geometries or have live numbers), goes the way of `Recorder`, and the
record is compared. From the first difference on, ops only run.
Invariants: the step runs as in eager, and may free what it frees there. Geometries of results are not read: they follow
from an op and its arguments.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from functionalize._compat.bindings import without_function_modes
from functionalize._compat.stacks import stack_here
from functionalize.audit.comparison import Comparison
from functionalize.audit.signature import Row, Signature
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.inputs import Call
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.recorder.op_kinds import kind_of
from functionalize.recorder.storage_table import StorageInfo
from functionalize.recorder.watched_recorder import WatchedRecorder
from functionalize.state.drawing import GeneratorState
from functionalize.util.patching import set_profile

_TENSORS = frozenset({Tensor, Parameter})
_EXACT = frozenset(
    {bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
# As they are before a step is observed, which replaces them.
_storage_of, _stride_of, _offset_of = Tensor.untyped_storage, Tensor.stride, Tensor.storage_offset
_size_of = Tensor.shape.__get__  # type: ignore[attr-defined]


class ComparedRecords(list[OpRecord]):
    """The records of a run: compared when they are appended, and not kept."""

    def __init__(self, recorder: AuditRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def append(self, record: OpRecord) -> None:
        """Compare a record with the next row of the signature."""
        comparison = self._recorder.comparison
        try:
            if comparison is not None:
                comparison.check(record)
        except Exception as error:  # the step must go on
            assert comparison is not None
            comparison.fail(error)


class AuditRecorder(WatchedRecorder):
    """Follows a signature. comparison: None until `begin`. watches: whether the profile function sees its calls."""

    def __init__(self, signature: Signature, watches: bool = False) -> None:
        super().__init__(ignore_fake=True, live=signature.live)
        self._watches = watches
        self.comparison: Comparison | None = None
        self.records = ComparedRecords(self)
        self.storages.holds_externals = False
        self.tape.stacks.handlers = 2
        self._signature = signature
        self._addresses: dict[int, int] = {}  # number of a storage in the signature -> address
        # By id of the op (hashing an op takes longer): what calls it, None for one that `Recorder` handles.
        self._runs: dict[int, Any] = {}

    def begin(self, call: Call) -> Comparison:
        """Look up every storage and number from outside that the signature knows."""
        storages = {}
        for serial, name, source in self._signature.sources:
            try:
                tensor = source.resolve(call)
            except (LookupError, AttributeError):
                continue  # the program does not read it: its own inputs were resolved
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                if isinstance(source, GeneratorState):
                    self.calls.own_generators.know(source.place.generator, tensor)
                now = storages[serial] = self.storages.bring_in(tensor, name).storage
                self._addresses[serial] = self.storages.infos[now].address
        numbers = {}
        for each in self._signature.numbers:
            try:
                numbers[each] = each.source.resolve(call).item()
            except (LookupError, AttributeError):
                continue
        self.comparison = Comparison(self._signature, self, storages, numbers)
        return self.comparison

    def start(self) -> None:
        super().start()
        self.storages.holds_externals = False

    def _watch(self) -> None:
        if self._watches:
            super()._watch()

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        calls = self._calls
        if not calls.paused:
            return self._followed(func, types, args, kwargs)
        calls.paused = False
        try:
            return self._followed(func, types, args, kwargs)
        finally:
            try:  # directly: the profile function would see a call of `set_profile`, at every op
                sys.setprofile(calls.profile)
            except RuntimeError:
                set_profile(calls.profile)

    def _followed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        comparison = self.comparison
        row = comparison.next_row if comparison is not None and not self.suspended else None
        if row is None or row.target is not func:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with without_function_modes():  # an observer of the step would see each look at a tensor
            if self._is_as_expected(row, types, args, kwargs):
                return self._run_expected(row, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _run_expected(self, row: Row, args: Any, kwargs: Any) -> Any:
        self.suspended += 1
        try:
            run = self._runs[id(row.target)]
            out = run(*args, **kwargs) if kwargs else run(*args)
        except BaseException as error:
            self.failed = (error, OpRecord(row.target, (), {}))
            raise
        finally:
            self.suspended -= 1
        self._compare_result(row, out)
        return out

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        comparison = self.comparison
        row = comparison.next_row if comparison is not None else None
        if row is None or row.target is not RESIZE_STORAGE or type(size) is not int:
            return super().resize_storage(storage, size, original)
        assert comparison is not None
        ref, expected = row.args
        address = self._addresses.get(ref.storage) or self._address_of(ref.storage)
        if expected != size or address != storage._cdata:
            return super().resize_storage(storage, size, original)
        result = original(storage, size)
        self.storages.note_size(storage)
        comparison.advance()
        return result

    def _is_as_expected(self, row: Row, types: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is simple and has the arguments of a row. False may mean undecided: then `check` decides."""
        func = row.target
        try:
            run = self._runs[id(func)]
        except KeyError:
            run = self.formulas.watched(func, kind_of(func).run) if is_simple(func) else None
            self._runs[id(func)] = run
        if run is None or len(row.args) != len(args) or not _TENSORS.issuperset(types):
            return False
        scalars = self.scalar_arguments
        if scalars is not None and scalars.carrying is not None:
            return False
        try:
            if not self._are_equal(row.args, args):
                return False
            if not (row.kwargs or kwargs):
                return True
            if kwargs is None or row.kwargs.keys() != kwargs.keys():
                return False
            return self._are_equal(list(row.kwargs.values()), [kwargs[k] for k in row.kwargs])
        except (NotImplementedError, RuntimeError):  # a tensor without a storage
            return False

    def _compare_result(self, row: Row, out: Any) -> None:
        comparison = self.comparison
        assert comparison is not None
        try:
            if self._is_result(row.outputs, out):
                comparison.advance()
            else:
                record = OpRecord(row.target, (), {}, self._map_out(out), (), stack_here())
                comparison.check_result(record)
        except Exception as error:  # the step must go on
            comparison.fail(error)

    def _are_equal(self, expected: Any, args: Any) -> bool:
        """Whether arguments are those of a row. False may mean undecided."""
        addresses = self._addresses
        for was, now in zip(expected, args, strict=True):
            if was is now:
                continue
            kind = type(was)
            if kind is TensorRef:
                if type(now) not in _TENSORS:
                    return False
                serial, (size, stride, offset, dtype, conj, neg) = was
                address = addresses.get(serial) or self._address_of(serial)
                if (
                    _storage_of(now)._cdata != address
                    or _size_of(now) != size
                    or _stride_of(now) != stride
                    or _offset_of(now) != offset
                    or now.dtype is not dtype
                    or conj
                    or neg
                    or dtype.is_complex
                ):
                    return False
            elif kind in _EXACT:
                if type(now) is not kind or was != now:
                    return False
            elif kind is float:
                if type(now) is not float or was != now or was == 0.0:  # 0.0 == -0.0
                    return False
            elif (
                kind is not list
                or type(now) not in (list, tuple)
                or len(was) != len(now)
                or not self._are_equal(was, now)
            ):
                return False
        return True

    def _address_of(self, serial: int) -> int | None:
        """The address of the storage that corresponds to one of the signature; None: it was not used yet."""
        assert self.comparison is not None
        now = self.comparison.storage_now(serial)
        if now is None:
            return None
        address = self._addresses[serial] = self.storages.infos[now].address
        return address

    def _is_result(self, expected: Any, out: Any) -> bool:
        """Whether results are on the storages of a row; adds those that the op has allocated."""
        if type(expected) is TensorRef:
            if not isinstance(out, Tensor):
                return False
            storage = _storage_of(out)
            known = self._addresses.get(expected[0]) or self._address_of(expected[0])
            if known is not None:
                return known == storage._cdata
            is_new = self.storages.info_at(storage) is None
            return is_new and self._is_new(expected, out, storage)
        if type(expected) is list:
            return (
                isinstance(out, (list, tuple))
                and len(out) == len(expected)
                and all(map(self._is_result, expected, out))
            )
        return expected is None and not isinstance(out, (Tensor, list, tuple))

    def _is_new(self, expected: TensorRef, out: Tensor, storage: torch.UntypedStorage) -> bool:
        """Add the storage that an op has allocated, where the signature has a new one, too."""
        assert self.comparison is not None
        serial, geometry = expected
        if serial in self._signature.literals or self.comparison.is_outside(serial):
            return False
        info = StorageInfo(len(self.storages.infos), out, storage, geometry)
        self.storages.register(info)
        self._addresses[serial] = info.address
        self.comparison.bind(serial, info.serial)
        return True


def is_simple(func: Any) -> bool:
    """Whether the results of an op follow from it and its arguments, and nothing about it needs a record."""
    op = kind_of(func)
    return func.namespace == "aten" and not (
        op.metadata
        or op.composite
        or op.to_python
        or op.random
        or op.sized_by_data
        or op.changes_geometry
        or op.reads_grad_mode
        or op.makes
        or func is _LIFT_FRESH
    )
