"""The recorder: every op below autograd, and every storage resize, as an op stream.

    with Recorder() as recorder:      a dispatch mode; what patches.py lists is replaced
        fn(*args)
    recorder.records                  [OpRecord(aten.sin.default, ...), OpRecord(resize_storage_bytes_, ...)]

Invariant: leaving the context restores torch's methods and the mode stack, whatever happened.
Refusals: tensors without a storage; resizes of storages that no tensor brought in; ops on data that is not
there. All are raised before the op runs, so that nothing segfaults.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, Self

import torch
from torch import Tensor

from functionalize._compat import (
    FakeTensor,
    Stacks,
    autograd_position,
    disable_current_modes,
    is_dtensor_type,
    is_traceable_wrapper_subclass_type,
    stack_here,
)
from functionalize.core.early import early_records
from functionalize.core.extent import check_bounds
from functionalize.core.generators import generator_states
from functionalize.core.ops import Geometry, OpRecord, TensorRef, geometry_of, refs_in
from functionalize.core.resize import checked_nbytes
from functionalize.core.rules.mutations import written_arguments
from functionalize.core.rules.resizes import RESIZE_STORAGE, is_inplace_view
from functionalize.core.where import located
from functionalize.core.wrappers import plain_tensors
from functionalize.errors import (
    ForeignStorageError,
    FunctionalizeError,
)
from functionalize.frontend.handed import handing_over, has_live, run_with, take_numbers
from functionalize.frontend.ledger import Ledger
from functionalize.frontend.live import SYMBOLIC, plain, shown
from functionalize.frontend.op_kinds import (
    LOOKS_ANYWHERE,
    MAY_GROW,
    SAME_REACH,
    OpKind,
    kind_of,
    only_looks,
    storage_of,
    tensors_in,
)
from functionalize.frontend.outsiders import Outsiders
from functionalize.frontend.refusals import Refusals
from functionalize.frontend.target import placed
from functionalize.frontend.watcher import Watcher

aten = torch.ops.aten
_LIFT_FRESH = aten.lift_fresh.default
_DEVICE = torch.ops.prim.device.default
_CONSTANTS = frozenset({bool, int, float, str, NoneType, torch.dtype})


class Scalar:
    """A number that Python read from a tensor, and that is not live."""

    __slots__ = ("record", "value")

    def __init__(self, record: OpRecord, value: Any) -> None:
        self.record, self.value = record, value


class Recorder(Refusals, Watcher):
    """Records while active.

    ignore_fake: ops on fake tensors are not the program's (DTensor's sharding propagation makes some).
    for_real: the step must run to its end, whatever cannot be recorded of it (None: as `ignore_fake`; a step in a
    fake world runs on fakes alone).
    outsiders: the fakes that stand in for tensors from outside, if the run is on fakes.
    live: Python is given live numbers for those that it reads (see live.py).
    """

    def __init__(
        self,
        ignore_fake: bool = False,
        outsiders: Outsiders | None = None,
        live: bool = False,
        for_real: bool | None = None,
    ) -> None:
        super().__init__(ignore_fake if for_real is None else for_real)
        self._ignore_fake = ignore_fake
        self.live = live
        self.records: list[OpRecord] = []
        self.scalars: list[Scalar] = []
        self.failed: tuple[BaseException, OpRecord] | None = None
        self.ledger = Ledger(self.unfaithful) if live else None
        self._near_number = False  # whether the op at hand is given a live number
        self.given: set[int] = set()  # storages whose numbers are guarded early: arguments
        self._outsiders = outsiders
        self._stacks = Stacks()

    def __enter__(self) -> Self:
        if self.for_real and self.drawn is None:
            self.drawn = generator_states()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            if self.ledger is not None and not self._entered:
                self.ledger.close()

    def resume(self) -> None:
        """Be entered once more: what happened since is not the program's."""
        self.drawn = None
        if self.ledger is not None:
            self.ledger.active = True

    def early_records(self) -> frozenset[int]:
        """Ids of the records that depend on arguments and constants alone."""
        learned = self.scalars or (self.ledger is not None and self.ledger.facts)
        if not self.given or not learned:  # nothing asks
            return frozenset()
        literals = {e.ref.storage for e in self.externals if e.literal}
        return early_records(self.records, self.given | literals)

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # two calls of three on fakes
            return args[0].fake_device
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        for kind in types:
            if kind is FakeTensor:
                if self._ignore_fake:
                    return func(*args, **kwargs)
            elif is_traceable_wrapper_subclass_type(kind):
                if func is RESIZE_STORAGE:
                    return self._resize_inner(args[0], args[1])
                if self.ledger is not None and is_dtensor_type(kind):
                    return self._past_dtensor(self.ledger, func, args, kwargs)
                return NotImplemented
        op = kind_of(func)
        if op.metadata:
            return op.run(*args, **kwargs)
        if op.composite:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        record = OpRecord(func, (), {}, None, (), self._stacks.here(), *autograd_position())
        if func is _LIFT_FRESH and self.info_of(args[0]) is None:
            return self._literal(args[0])
        try:
            self._near_resize = False
            if self._outsiders is not None:
                args, kwargs = self._to_fake(args), self._to_fake(kwargs)
            record.args = tuple(
                [self.ref(a) if isinstance(a, Tensor) else self._map_in(a) for a in args]
            )
            if kwargs:
                record.kwargs = {k: self._map_in(v) for k, v in kwargs.items()}
            if self._near_number or (self.ledger is not None and self.ledger.handed is not None):
                args, kwargs = self._take_numbers(record, args, kwargs)
            if op.reads_grad_mode:
                record.meta["gradients"] = torch.is_grad_enabled()
            if op.may_be_refused or self._near_resize:
                self.check(op, record)
        except FunctionalizeError as error:
            self.note_or_raise(located(error, record))
            return self._call(func, args, kwargs)
        if self.for_real and (op.random or op.sized_by_data):
            self.check_repeatable(op, record)
        self.suspended += 1
        try:
            out = op.run(*args, **kwargs)
        except BaseException as error:
            self.failed = (error, record)
            raise
        finally:
            self.suspended -= 1
        if self.for_real and op.random:
            self.drawn = generator_states()
        if op.to_python:
            out = self._to_python(record, out)
        try:
            self._finish(op, record, args, kwargs, out)
        except FunctionalizeError as error:
            self.note_or_raise(located(error, record))
        return out

    # -- numbers -------------------------------------------------------------------------------

    def _to_python(self, record: OpRecord, out: Any) -> Any:
        """What Python is given for a number that it reads: a live one, or one that a guard is for."""
        out = plain(out)  # live in a recording around this one
        if self.ledger is None or type(out) not in (int, float):
            self.scalars.append(Scalar(record, out))
            return out
        number = self.ledger.read(record, out)
        record.meta["read"], record.meta["hint"] = number.expression, out
        return shown(number)

    def _past_dtensor(self, ledger: Ledger, func: Any, args: Any, kwargs: Any) -> Any:
        """Live numbers go to the op on the local tensors, DTensor sees plain ones: Note [Handed over]."""
        if not has_live([args, list(kwargs.values())]):
            return NotImplemented
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        with self, handing_over(ledger, func._schema.name, given):
            return func(*run_with(ledger, args), **run_with(ledger, kwargs))

    def _take_numbers(self, record: OpRecord, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Put live numbers into the record, and into the call the plain ones that they stand for."""
        self._near_number = False
        if self.ledger is None:
            if has_live([record.args, list(record.kwargs.values())]):
                self.unfaithful.append("a number that another recording reads is used in this one")
            return args, kwargs  # else: symbolic sizes of a tracer
        take_numbers(self.ledger, record)
        return run_with(self.ledger, args), run_with(self.ledger, kwargs)

    # -- arguments and results ---------------------------------------------------------------------

    def _to_fake(self, arg: Any) -> Any:
        """`arg` with the fakes of tensors from outside in their place."""
        kind = type(arg)
        if kind is list or kind is tuple:
            return kind(self._to_fake(a) for a in arg)
        if kind is dict:
            return {k: self._to_fake(v) for k, v in arg.items()}
        if self._outsiders is None or not isinstance(arg, Tensor) or isinstance(arg, FakeTensor):
            return arg
        with self.quiet():
            return self._outsiders.stand_in(arg, self)

    def _literal(self, tensor: Tensor) -> Any:
        """A tensor that Python made from numbers; the program keeps a copy of it."""
        with disable_current_modes():
            kept = tensor.detach().clone()
        with self.quiet():
            out = _LIFT_FRESH(tensor)
            self.bring_in(out, f"constant_{len(self.externals)}", literal=kept)
        return out

    def describe(self, record: OpRecord) -> str:
        """The tensors an op was given, for messages."""
        refs = list(refs_in([record.args, record.kwargs]))
        named = [f"`{self.infos[r.storage].name}` ({r.geometry})" for r in refs]
        return ", ".join(named) or "no tensors"

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.suspended += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.suspended -= 1

    def _map_in(self, arg: Any) -> Any:
        kind = type(arg)
        if kind in _CONSTANTS:  # most of what is no tensor
            return arg
        if isinstance(arg, Tensor):
            return self.ref(arg)
        if isinstance(arg, (list, tuple)):
            return [self.ref(a) if isinstance(a, Tensor) else self._map_in(a) for a in arg]
        if kind in SYMBOLIC:
            self._near_number = True
        return placed(arg) if kind is torch.device else arg

    def _map_out(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self.out_ref(out)
        if isinstance(out, (list, tuple)):
            return [self._map_out(o) for o in out]
        return None

    def _finish(
        self,
        op: OpKind,
        record: OpRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        if op.restrides or self._near_resize:
            self._after_look(record, args, out)
        if record.target is RESIZE_STORAGE:
            self.note_size(storage_of(args[0]))
        elif op.moves:
            self._after_mutation(record, args, kwargs)
        self._born = {}
        record.outputs = self.out_ref(out) if isinstance(out, Tensor) else self._map_out(out)
        if self._born:
            record.meta["born"] = self._born
        self.records.append(record)

    def _after_look(self, record: OpRecord, args: tuple[Any, ...], out: Any) -> None:
        """Views leave a storage's size alone, and most refuse to look past its end."""
        func = record.target
        if not only_looks(func) or func in MAY_GROW or func in SAME_REACH:
            return
        for tensor in tensors_in(args):
            storage = storage_of(tensor)
            self.keep_size(self._by_address[storage._cdata], storage)
        if func in LOOKS_ANYWHERE or (func is aten.t.default and out.dim() < 2):
            return
        for tensor in tensors_in(out):
            info = self.info_of(tensor)
            if info is not None:
                try:
                    g = geometry_of(tensor)
                    check_bounds(info.name, g, info.nbytes, info.original_nbytes, "takes a view of")
                except FunctionalizeError as error:
                    raise located(error, record) from None

    def _after_mutation(
        self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """`out=` may have grown its tensor, `resize_` its storage, `set_` moved it: look again."""
        changed = []
        keep = is_inplace_view(record.target)
        new_args, new_kwargs = list(record.args), record.kwargs
        for at, name in written_arguments(record.target):
            inside = at is not None and at < len(args)
            given = args[at] if inside else kwargs.get(name)  # type: ignore[index]
            if not keep and isinstance(given, FakeTensor):
                before = record.args[at] if inside else record.kwargs[name]  # type: ignore[index]
                self._keep_strides(before, given)
            for tensor in given if isinstance(given, (list, tuple)) else (given,):
                if keep and isinstance(tensor, Tensor) and self.info_of(tensor) is None:
                    continue  # `set_()` made a storage: it is an output
                if isinstance(tensor, Tensor):
                    self.ref(tensor)
                    size = self.note_size(storage_of(tensor))
                    if size is not None:
                        changed.append(size)
            if keep or given is None:
                continue
            if inside:
                new_args[at] = self._map_in(given)  # type: ignore[index]
            else:
                new_kwargs[name] = self._map_in(given)
        record.args, record.resized = tuple(new_args), tuple(changed)

    def _keep_strides(self, before: TensorRef, fake: Tensor) -> None:
        """Eager leaves an `out` of the right size as it is; some meta kernels (`sort`) restride it."""
        g = before.geometry
        if fake.shape == g.size and fake.stride() != g.stride:
            with self.quiet():
                fake.as_strided_(g.size, g.stride, g.offset)

    # -- resizes -------------------------------------------------------------------------------

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called (it does not dispatch); `original` does it."""
        record = OpRecord(RESIZE_STORAGE, (), {}, None, (), stack_here())
        info = self._by_address.get(storage._cdata)
        size = plain(size)
        try:
            if info is None:
                raise ForeignStorageError(
                    f"resizes a storage of {storage.nbytes()} bytes to {size}, which belongs to no "
                    "tensor the program was given or made: pass its tensor as an argument"
                )
            checked_nbytes(size, info.name)
        except FunctionalizeError as error:
            self.note_or_raise(located(error, record))
            return original(storage, size)
        result = original(storage, size)
        self.note_size(storage)
        empty = Geometry((0,), (1,), 0, torch.uint8)
        record.args = (TensorRef(info.serial, empty), size)
        self.records.append(record)
        return result

    def _resize_inner(self, tensor: Any, nbytes: int) -> None:
        """A resize of a wrapper subclass is one of each inner tensor."""
        with self:
            for inner in plain_tensors(tensor):
                RESIZE_STORAGE(inner, nbytes)
