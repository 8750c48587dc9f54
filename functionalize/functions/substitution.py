"""The live front end: a function runs as it is, on values in place of storages that come and go.

    with Substitution(inputs) as mode:     a R(p, 64)             nothing runs; p is taken over
        out = fn(*args)                    p.copy_(buf)           value = clone(buf)
    mode.pay()                             mm(p, p)               mm(value, value)
                                           R(p, 0)                nothing runs; the value is dropped

Only storages that are empty on entry or are resized are taken over; everything else passes through unchanged,
for whoever is below (autograd has been above all along). So what autograd saves is the parameter itself.

Invariant: no storage is resized, no taken over tensor written, before `pay`; nothing of torch stays patched.
Refusals, all before the op runs: reads of data that is not there, resizes of storages without a tensor.

Note [Paying below functionalization]
AOTAutograd runs a function on FunctionalTensors, twice, and works out by itself what was mutated. It has no
words for most of what a storage can owe (a resize between two sizes other than 0, aliases of what is resized,
subclasses, a write that is dropped because the data went), its first run would leave the fake inputs of the
second resized, and a `copy_` that it knows of makes it save the new contents, full-sized, where eager saves
the parameter. So it is told nothing: the epilogue goes straight into the graph being traced, on the inner
tensors, as nodes that belong in the forward. A write that came before the storage was taken over is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from functionalize._compat.graphs import proxy_mode, pytree
from functionalize._compat.stacks import CapturedTraceback
from functionalize.discharge.emitters import TensorEmitter
from functionalize.discharge.functionalizer import Functionalizer
from functionalize.discharge.rules import RULES
from functionalize.discharge.rules.lists import one_by_one
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.discharge.rules.resizes import RESIZE_STORAGE, is_inplace_view
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import View
from functionalize.errors import ForeignStorageError, FunctionalizeError, UnsupportedOpError
from functionalize.functions.input_epilogue import (
    Debtor,
    EntrySizes,
    Held,
    Move,
    geometry,
    inner,
    is_functional,
    nbytes_of,
    number_at,
    onto_storage_of,
    pay,
    remake,
    span_of,
)
from functionalize.functions.live_calls import map_tensors, on_original, plain_int, returned
from functionalize.ir.epilogue import window
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.recorder.op_kinds import is_composite, is_data_free, is_metadata, tensors_in
from functionalize.recorder.patches import PATCHES, SIZE_PATCHES
from functionalize.util.tensor_wrappers import plain_tensors, plain_tensors_by_path
from functionalize.util.user_stack import located

aten = torch.ops.aten


class Substitution(TorchDispatchMode):
    """The mode for one call of a function.

    inputs: gives the name and tensor of each of its inputs. sizes: shared by all calls of one function.
    """

    def __init__(
        self, inputs: Callable[[], Iterable[tuple[str, Tensor]]], sizes: EntrySizes | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes or EntrySizes()
        self.suspended = 0
        self.engine = Functionalizer(TensorEmitter(self._original))
        self._serials = itertools.count()
        self._debtors: dict[int, Debtor] = {}  # by address of a storage
        self._taken: dict[int, Debtor] = {}
        self._moved: dict[int, tuple[Tensor, Held]] = {}
        self._inputs = inputs
        self._undo: list[ExitStack] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides the handler from Dynamo costs as much as an op

    def __enter__(self) -> Substitution:
        with ExitStack() as undo:
            outermost = not self._undo  # else from inside of its own handler
            for name, tensor in self._inputs() if outermost else ():
                self._bring_in(name, tensor)
            for patches in (PATCHES, SIZE_PATCHES) if outermost else ():
                patches.install()
                undo.callback(patches.remove)
            super().__enter__()
            self._undo.append(undo.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        with self._undo.pop():
            super().__exit__(*exc)

    # -- storages ------------------------------------------------------------------------------

    def _bring_in(self, name: str, tensor: Tensor) -> None:
        """An input; those that share a storage share a debtor, though a wrapper of each may hide it."""
        if is_traceable_wrapper_subclass(tensor):
            for path, inner in plain_tensors_by_path(tensor):
                self._bring_in(".".join([name, *path]), inner)
            return
        try:
            address = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return  # sparse and the like pass through
        debtor = self._debtors.get(address)
        if debtor is None:
            fresh = Debtor(next(self._serials), name, self._sizes.of(tensor), tensor.device, True)
            same = (d for d in self._debtors.values() if is_functional(tensor) and d.holds(tensor))
            debtor = next(same, fresh)
            self._debtors[address] = debtor
        debtor.add(tensor)
        if (debtor.nbytes == 0 and tensor.numel()) or debtor.mixed:
            self._take_over(debtor)

    def _take_over(self, debtor: Debtor) -> FunctionalStorage:
        """Declare a storage to the engine; its base is the widest tensor that is known on it."""
        for address, each in self._debtors.items():
            if each is debtor:
                self._taken[address] = debtor
        found = self.engine.storages.get(debtor.serial)
        if found is None:
            home = debtor.widest()
            ref, value = TensorRef(debtor.serial, geometry(home)), debtor.value(home)
            found = self.engine.declare(
                ref, debtor.nbytes, debtor.device, value, debtor.name, external=True
            )
        for tensor in debtor.tensors:
            g = geometry(tensor)
            if g not in found.views and found.version == 0:
                value = debtor.value(tensor)
                found.views[g] = View(g, None, None, value, 0 if debtor.nbytes else -1)
        return found

    def _original(self, serial: int) -> Tensor:
        return next(d for d in self._taken.values() if d.serial == serial).widest()

    def _debtor_of(self, arg: Any) -> Debtor | None:
        """The debtor of a tensor on a storage that is taken over."""
        if not isinstance(arg, Tensor) or is_traceable_wrapper_subclass(arg):
            return None
        try:
            return self._taken.get(arg.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            if func is not RESIZE_STORAGE:
                return NotImplemented
            with self:
                for inner in plain_tensors(args[0]):
                    RESIZE_STORAGE(inner, args[1])
            return None
        parts = one_by_one(func, args, kwargs, self._place, span_of, number_at)
        if parts is not None:
            with self:
                for each, named in parts:
                    func(*each, **named)
            return returned(func, args, kwargs, None)
        resizes = func is RESIZE_STORAGE
        moves = func is aten.set_.source_Tensor and is_functional(args[0])
        if not (resizes or moves) and not any(
            self._debtor_of(t) for t in tensors_in((args, kwargs))
        ):
            return func(*args, **kwargs)
        if is_metadata(func) or func.name() in _ABOUT_VERSIONS:
            return func(*args, **kwargs)
        if not resizes and is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        record = OpRecord(func, (), {}, None, (), CapturedTraceback.extract())
        try:
            with self.engine.emit.made_for(record):
                if resizes:
                    return self._resize(self._tensor_debtor(args[0]), args[1])
                return self._substitute(record, args, kwargs)
        except FunctionalizeError as error:
            raise located(error, record) from error.__cause__

    def _place(self, tensor: Any) -> Any:
        """Where a tensor lies; AOTAutograd would do all elements of a list at once."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage()._cdata
        debtor = self._debtors.get(address)
        return address if debtor is None else debtor

    def _substitute(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = record.target
        if is_inplace_view(func):
            return self._move(func, args, kwargs)
        if func in RULES or is_mutating(func):
            return self._step(record, args, kwargs)
        if is_data_free(func):
            return self._view(record, args, kwargs)
        return func(*map_tensors(self._value, args), **map_tensors(self._value, kwargs))

    def _value(self, tensor: Tensor) -> Any:
        debtor = self._debtor_of(tensor)
        if debtor is None:
            return tensor
        return self.engine.read(TensorRef(debtor.serial, geometry(tensor)))

    def _view(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A view of the original, for autograd; the engine remembers how it was made."""

        def known(tensor: Tensor) -> Any:
            debtor = self._debtor_of(tensor)
            return tensor if debtor is None else TensorRef(debtor.serial, geometry(tensor))

        out = on_original(record.target, args, kwargs)
        record.args, record.outputs = map_tensors(known, args), map_tensors(known, out)
        self.engine.views(record)
        return out

    def _step(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the engine do an op that writes, or that has a rule; plain tensors take part for its length."""
        func = record.target
        if func.namespace in ("c10d", "fsdp") and func._schema.returns:
            raise UnsupportedOpError(
                "communicates into a storage that is resized: use a functional collective, or fz.capture"
            )
        plain: list[tuple[TensorRef, Tensor]] = []

        def ref(tensor: Tensor) -> TensorRef:
            debtor, g = self._debtor_of(tensor), geometry(tensor)
            if debtor is not None:
                return TensorRef(debtor.serial, g)
            made = TensorRef(next(self._serials), g)
            self.engine.declare(made, g.end, tensor.device, tensor, "an argument")
            plain.append((made, tensor))
            return made

        record.args, record.kwargs = map_tensors(ref, args), map_tensors(ref, kwargs)
        try:
            values = self.engine.step(record)
            for made, tensor in plain:
                if self.engine.storages[made.storage].written:
                    aten.copy_.default(tensor, self.engine.read(made))
        finally:
            for made, _ in plain:
                self.engine.storages.pop(made.storage, None)
        return returned(func, args, kwargs, values)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`set_`, `t_` and their like change the tensor object, which the engine knows by its geometry."""
        if func in (aten.resize_.default, aten.resize_as_.default):
            raise UnsupportedOpError(
                "resizes a tensor whose storage is resized too: use fz.resize_storage_bytes_ and a view"
            )
        debtor = self._debtors.get(args[0].untyped_storage()._cdata)
        held = debtor.let_go(args[0]) if debtor is not None else None
        out = func(*args, **kwargs)
        if func is aten.set_.source_Tensor and is_functional(args[0]):
            onto_storage_of(args[0], args[1])
            if held is not None:
                self._moved.setdefault(id(args[0]), (args[0], held))
        return out

    # -- resizes -------------------------------------------------------------------------------

    def _tensor_debtor(self, tensor: Tensor) -> Debtor:
        address = tensor.untyped_storage()._cdata
        debtor = self._debtors.get(address)
        if debtor is None:
            device, nbytes = tensor.device, nbytes_of(tensor)
            debtor = Debtor(next(self._serials), "a temporary", nbytes, device, False)
            self._debtors[address] = debtor
            debtor.add(tensor)
        return debtor

    def _resize(self, debtor: Debtor, nbytes: Any) -> None:
        storage = self._take_over(debtor)
        self.engine.resize(debtor.serial, plain_int(nbytes))
        if storage.nbytes == 0:
            for view in storage.views.values():
                if view.version != storage.version and view.value is not storage.base:
                    view.hold(None, view.version)  # the data goes now, as it does in eager

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called (it does not dispatch); `original` is not."""
        record = OpRecord(RESIZE_STORAGE, (), {}, None, (), CapturedTraceback.extract())
        try:
            debtor = self._debtors.get(storage._cdata)
            if debtor is None:
                raise ForeignStorageError(
                    f"resizes a storage of {storage.nbytes()} bytes to {size} that belongs to no tensor the "
                    "function was given: pass its tensor, or call fz.resize_storage_bytes_(tensor, nbytes)"
                )
            self._resize(debtor, size)
        except FunctionalizeError as error:
            raise located(error, record) from None
        return storage

    def storage_nbytes(self, storage: torch.UntypedStorage) -> int | None:
        """The size that the function has given a storage; None for one that is not taken over."""
        debtor = self._taken.get(storage._cdata)
        return None if debtor is None else self.engine.storages[debtor.serial].nbytes

    # -- exit ----------------------------------------------------------------------------------

    def pay(self) -> None:
        """Leave every storage as the function would have; call it after the mode has been left."""
        with torch.no_grad():
            moves = [self._come_back(tensor, held) for tensor, held in self._moved.values()]
            left = {move.held.name for move in moves}
            steps: list[Callable[[], None]] = [m.pay for m in moves if m.before]
            for debtor in dict.fromkeys(self._taken.values()):
                # what a tensor moves away from is paid first, what it moves to last
                storage = self.engine.storages[debtor.serial]
                at = 0 if debtor.name in left else len(steps)
                steps.insert(at, partial(pay, debtor, storage, self.engine.emit))
            for step in [*steps, *(m.pay for m in moves if not m.before)]:
                step()

    def outputs(self, out: Any) -> Any:
        """What the function returned, views of storages that were taken over as a tracer must see them."""
        if proxy_mode() is None:
            return out

        def traced(tensor: Tensor) -> Tensor:
            if is_traceable_wrapper_subclass(tensor):
                for inner in filter(is_functional, plain_tensors(tensor)):
                    traced(inner)
                return tensor
            debtor = self._debtor_of(tensor)
            if debtor is None or any(tensor is t for t in debtor.tensors):
                return tensor
            if not is_functional(tensor):
                return window(debtor.widest(), geometry(tensor))
            remake(debtor, tensor, self.engine.storages[debtor.serial].nbytes)
            return tensor

        return pytree.tree_map_only(Tensor, traced, out)

    def _come_back(self, tensor: Tensor, held: Held) -> Move:
        """Undo a `set_` of an input, and say how to do it in the graph."""
        debtor = self._debtors.get(tensor.untyped_storage()._cdata)
        if debtor is None:
            move = Move(held, inner(tensor), True)
        else:
            g = geometry(tensor)
            same = (
                i for t, i in zip(debtor.tensors, debtor.insides, strict=True) if geometry(t) == g
            )
            source = next(same, None)
            if source is None:
                raise UnsupportedOpError(
                    f"makes `{held.name}` a view of `{debtor.name}` by set_: AOTAutograd can express set_ to "
                    "another argument as it is, or to a new tensor"
                )
            move = Move(held, source, debtor.nbytes >= g.end)
        aten.set_.source_Tensor(tensor, held.alias)
        onto_storage_of(tensor, held.alias)
        return move


# Ops of Dynamo's that look at a tensor object alone.
_ABOUT_VERSIONS = frozenset({"prims::_tensor_version", "prims::_unsafe_set_version_counter"})
