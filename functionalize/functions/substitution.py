"""A dispatch mode that runs a function unchanged, with values substituted for the storages that it resizes.

    with Substitution(inputs) as mode:     resize(p, 64)          nothing runs; p becomes a substituted storage
        out = fn(*args)                    p.copy_(buf)           value = clone(buf)
    mode.apply_epilogue()                  mm(p, p)               mm(value, value)
                                           resize(p, 0)           nothing runs; the value is dropped

A storage is substituted only if it is empty on entry, is resized, or has functional tensors of several dtypes. Ops
on other storages are passed unchanged to the modes below. Autograd runs above this mode, so it saves the parameter
itself, as in eager. A view op runs on the tensor itself, whose storage may be empty; an op that returns an argument, as
`x.add_(1)` does, returns it, whatever the engine wrote.

Invariant: before `apply_epilogue` no storage is resized, but for an op after which it has its size again, and no tensor
on a substituted storage is written. Every patch of torch is removed when the mode exits.
Refusals, all before the op runs: reads of freed or undefined data, resizes of storages without a tensor.

Note [Epilogue below functionalization]
AOTAutograd runs a function twice on FunctionalTensors and derives the mutations itself. It cannot express most
epilogues: a resize between two nonzero sizes, aliases of a resized storage, subclasses, a write whose data is freed
before exit. Its first run would leave the fake inputs of the second one resized. A `copy_` that it sees makes
it save the new contents at full size, where eager saves the parameter. So the epilogue is hidden from it: the
nodes are traced directly into the graph, on the tensors inside the FunctionalTensors, and belong to the forward.
A write that AOTAutograd saw before the storage was substituted is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from functionalize._compat.graphs import proxy_mode, pytree, untraced
from functionalize._compat.stacks import CapturedTraceback
from functionalize.discharge.emitters import TensorEmitter
from functionalize.discharge.functionalizer import Functionalizer
from functionalize.discharge.rules import rule_of
from functionalize.discharge.rules.lists import one_by_one
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.discharge.rules.resizes import RESIZE_STORAGE, is_inplace_view
from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import View
from functionalize.errors import ForeignStorageError, FunctionalizeError, UnsupportedOpError
from functionalize.functions.input_epilogue import (
    EntrySizes,
    LiveStorage,
    Move,
    MovedInput,
    geometry,
    inner,
    is_functional,
    nbytes_of,
    number_at,
    onto_storage_of,
    remake,
    resize_for_real,
    span_of,
    write_back,
)
from functionalize.ir.epilogue import window
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.recorder.op_kinds import is_composite, is_data_free, is_metadata, tensors_in
from functionalize.recorder.patches import ENGINE, GROUPS, SIZES
from functionalize.util.tensor_wrappers import plain_tensors, plain_tensors_by_path
from functionalize.util.user_stack import located

aten = torch.ops.aten


class Substitution(TorchDispatchMode):
    """The mode for one call of a function.

    inputs: yields the name and tensor of each input. sizes: the entry sizes, shared by all calls of one function.
    """

    def __init__(
        self, inputs: Callable[[], Iterable[tuple[str, Tensor]]], sizes: EntrySizes | None = None
    ) -> None:
        super().__init__()
        self._sizes = sizes or EntrySizes()
        self.suspended = 0
        self.engine = Functionalizer(TensorEmitter(self._original))
        self._serials = itertools.count()
        # Both by the address of the StorageImpl; the second holds a subset of the first.
        self._storages: dict[int, LiveStorage] = {}
        self._substituted: dict[int, LiveStorage] = {}
        self._moved: dict[int, tuple[Tensor, MovedInput]] = {}  # by id of the tensor
        self._inputs = inputs
        self._undo: list[ExitStack] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides the handler from Dynamo costs as much as an op

    def __enter__(self) -> Substitution:
        with ExitStack() as undo:
            outermost = not self._undo  # otherwise the handler below re-enters its own mode
            for name, tensor in self._inputs() if outermost else ():
                self._bring_in(name, tensor)
            for patches in (ENGINE, GROUPS, SIZES) if outermost else ():
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
        """Register an input. Inputs on one storage share a `LiveStorage`, even if their wrappers differ."""
        if is_traceable_wrapper_subclass(tensor):
            for path, inner in plain_tensors_by_path(tensor):
                self._bring_in(".".join([name, *path]), inner)
            return
        try:
            address = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return  # a tensor without a storage (sparse, for example) needs no substitution
        live = self._storages.get(address)
        if live is None:
            fresh = LiveStorage(
                next(self._serials), name, self._sizes.of(tensor), tensor.device, True
            )
            same = (d for d in self._storages.values() if is_functional(tensor) and d.holds(tensor))
            live = next(same, fresh)
            self._storages[address] = live
        live.add(tensor)
        if (live.nbytes == 0 and tensor.numel()) or live.mixed:
            self._substitute_storage(live)

    def _substitute_storage(self, live: LiveStorage) -> FunctionalStorage:
        """Declare a storage to the engine; its base is the tensor that covers most of it."""
        for address, each in self._storages.items():
            if each is live:
                self._substituted[address] = live
        found = self.engine.storages.get(live.serial)
        if found is None:
            target = live.widest()
            ref, value = TensorRef(live.serial, geometry(target)), live.value(target)
            found = self.engine.declare(
                ref, live.nbytes, live.device, value, live.name, external=True
            )
        for tensor in live.tensors:
            g = geometry(tensor)
            if g not in found.views and found.version == 0:
                # Version -1 is stale: the contents of an empty storage cannot be read before a write.
                value = live.value(tensor)
                found.views[g] = View(g, None, None, value, 0 if live.nbytes else -1)
        return found

    def _original(self, serial: int) -> Tensor:
        return next(d for d in self._substituted.values() if d.serial == serial).widest()

    def _substituted_storage(self, arg: Any) -> LiveStorage | None:
        """The substituted storage of a tensor; None for any other argument."""
        if not isinstance(arg, Tensor) or is_traceable_wrapper_subclass(arg):
            return None
        try:
            return self._substituted.get(arg.untyped_storage()._cdata)
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
        parts = one_by_one(func, args, kwargs, self._location, span_of, number_at)
        if parts is not None:
            with self:
                for each, named in parts:
                    func(*each, **named)
            return _returned(func, args, kwargs, None)
        resizes = func is RESIZE_STORAGE
        moves = func is aten.set_.source_Tensor and is_functional(args[0])
        if not (resizes or moves) and not any(
            self._substituted_storage(t) for t in tensors_in((args, kwargs))
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
                    return self._resize(self._storage_of(args[0]), args[1])
                return self._substitute(record, args, kwargs)
        except FunctionalizeError as error:
            raise located(error, record) from error.__cause__

    def _location(self, tensor: Any) -> Any:
        """The identity of a tensor's storage: a list op whose elements share one is run element by element."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage()._cdata
        live = self._storages.get(address)
        return address if live is None else live

    def _substitute(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = record.target
        if is_inplace_view(func):
            return self._move(func, args, kwargs)
        if rule_of(func) is not None or is_mutating(func):
            return self._step(record, args, kwargs)
        if is_data_free(func):
            return self._view(record, args, kwargs)
        return func(*_map_tensors(self._value, args), **_map_tensors(self._value, kwargs))

    def _value(self, tensor: Tensor) -> Any:
        live = self._substituted_storage(tensor)
        if live is None:
            return tensor
        return self.engine.read(TensorRef(live.serial, geometry(tensor)))

    def _view(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the view of the original tensor, for autograd; the engine records the view op."""

        def ref_of(tensor: Tensor) -> Any:
            live = self._substituted_storage(tensor)
            return tensor if live is None else TensorRef(live.serial, geometry(tensor))

        out = _on_original(record.target, args, kwargs)
        record.args, record.outputs = _map_tensors(ref_of, args), _map_tensors(ref_of, out)
        self.engine.views(record)
        return out

    def _step(self, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the engine discharge an op that writes or has a rule; other tensors are declared for this op only."""
        func = record.target
        if func.namespace in ("c10d", "fsdp") and func._schema.returns:
            raise UnsupportedOpError(
                "communicates into a storage that is resized: use a functional collective, or fz.capture"
            )
        plain: list[tuple[TensorRef, Tensor]] = []

        def ref(tensor: Tensor) -> TensorRef:
            live, g = self._substituted_storage(tensor), geometry(tensor)
            if live is not None:
                return TensorRef(live.serial, g)
            made = TensorRef(next(self._serials), g)
            self.engine.declare(made, g.end, tensor.device, tensor, "an argument")
            plain.append((made, tensor))
            return made

        record.args, record.kwargs = _map_tensors(ref, args), _map_tensors(ref, kwargs)
        try:
            values = self.engine.step(record)
            for made, tensor in plain:
                if self.engine.storages[made.storage].written:
                    aten.copy_.default(tensor, self.engine.read(made))
        finally:
            for made, _ in plain:
                self.engine.storages.pop(made.storage, None)
        return _returned(func, args, kwargs, values)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that changes the tensor object (`set_`, `t_`); the engine identifies views by geometry alone."""
        if func in (aten.resize_.default, aten.resize_as_.default):
            raise UnsupportedOpError(
                "resizes a tensor whose storage is resized too: use fz.functions.resize_storage_bytes_ and a view"
            )
        live = self._storages.get(args[0].untyped_storage()._cdata)
        moved = live.replace_by_alias(args[0]) if live is not None else None
        out = func(*args, **kwargs)
        if func is aten.set_.source_Tensor and is_functional(args[0]):
            onto_storage_of(args[0], args[1])
            if moved is not None:
                self._moved.setdefault(id(args[0]), (args[0], moved))
        return out

    # -- resizes -------------------------------------------------------------------------------

    def _storage_of(self, tensor: Tensor) -> LiveStorage:
        address = tensor.untyped_storage()._cdata
        live = self._storages.get(address)
        if live is None:
            device, nbytes = tensor.device, nbytes_of(tensor)
            live = LiveStorage(next(self._serials), "a temporary", nbytes, device, False)
            self._storages[address] = live
            live.add(tensor)
        return live

    def _resize(self, live: LiveStorage, nbytes: Any) -> None:
        storage = self._substitute_storage(live)
        self.engine.resize(live.serial, _plain_int(nbytes))
        if storage.nbytes == 0:
            for view in storage.views.values():
                if view.version != storage.version and view.value is not storage.base:
                    view.hold(None, view.version)  # release the data now, as eager does

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """Replaces `UntypedStorage.resize_`, which does not dispatch; `original` is not called."""
        record = OpRecord(RESIZE_STORAGE, (), {}, None, (), CapturedTraceback.extract())
        try:
            live = self._storages.get(storage._cdata)
            if live is None:
                raise ForeignStorageError(
                    f"resizes a storage of {storage.nbytes()} bytes to {size} that belongs to no tensor that was "
                    "passed to the function: pass its tensor, "
                    "or call fz.functions.resize_storage_bytes_(tensor, nbytes)"
                )
            self._resize(live, size)
        except FunctionalizeError as error:
            raise located(error, record) from None
        return storage

    def storage_nbytes(self, storage: torch.UntypedStorage) -> int | None:
        """The size in bytes to which the function resized a storage; None if it is not substituted."""
        live = self._substituted.get(storage._cdata)
        return None if live is None else self.engine.storages[live.serial].nbytes

    # -- exit ----------------------------------------------------------------------------------

    def apply_epilogue(self) -> None:
        """Resize and write the real storages as the function would have. Call it after the mode has exited."""
        with torch.no_grad():
            moves = [self._undo_set(tensor, moved) for tensor, moved in self._moved.values()]
            left = {move.moved.name for move in moves}
            steps: list[Callable[[], None]] = [m.emit_set for m in moves if m.before]
            for live in dict.fromkeys(self._substituted.values()):
                # The storage that a `set_` moves a tensor away from is written first, the new one last.
                storage = self.engine.storages[live.serial]
                at = 0 if live.name in left else len(steps)
                steps.insert(at, partial(write_back, live, storage, self.engine.emit))
            for step in [*steps, *(m.emit_set for m in moves if not m.before)]:
                step()

    def outputs(self, out: Any) -> Any:
        """The function's result; while tracing, its views of substituted storages are remade after the epilogue."""
        if proxy_mode() is None:
            return out

        def traced(tensor: Tensor) -> Tensor:
            if is_traceable_wrapper_subclass(tensor):
                for inner in filter(is_functional, plain_tensors(tensor)):
                    traced(inner)
                return tensor
            live = self._substituted_storage(tensor)
            if live is None or any(tensor is t for t in live.tensors):
                return tensor
            if not is_functional(tensor):
                return window(live.widest(), geometry(tensor))
            remake(live, tensor, self.engine.storages[live.serial].nbytes)
            return tensor

        return pytree.tree_map_only(Tensor, traced, out)

    def _undo_set(self, tensor: Tensor, moved: MovedInput) -> Move:
        """Undo a `set_` of an input; returns the `set_` that the graph has to run."""
        live = self._storages.get(tensor.untyped_storage()._cdata)
        if live is None:
            move = Move(moved, inner(tensor), True)
        else:
            g = geometry(tensor)
            same = (i for t, i in zip(live.tensors, live.insides, strict=True) if geometry(t) == g)
            source = next(same, None)
            if source is None:
                raise UnsupportedOpError(
                    f"makes `{moved.name}` a view of `{live.name}` by set_: AOTAutograd can express set_ to "
                    "another argument as it is, or to a new tensor"
                )
            move = Move(moved, source, live.nbytes >= g.end)
        aten.set_.source_Tensor(tensor, moved.alias)
        onto_storage_of(tensor, moved.alias)
        return move


# Ops that Dynamo inserts and that read or set a tensor's version counter only.
_ABOUT_VERSIONS = frozenset({"prims::_tensor_version", "prims::_unsafe_set_version_counter"})


# -- arguments and results of an op ----------------------------------------------------------------


def _plain_int(nbytes: Any) -> Any:
    """A symbolic size as a plain integer, which adds a guard."""
    return int(nbytes) if isinstance(nbytes, torch.SymInt) else nbytes


def _map_tensors(fn: Callable[[Tensor], Any], arg: Any) -> Any:
    """`arg` with `fn` applied to every tensor."""
    if isinstance(arg, Tensor):
        return fn(arg)
    if isinstance(arg, list):
        return [_map_tensors(fn, a) for a in arg]
    if isinstance(arg, tuple):
        return tuple(_map_tensors(fn, a) for a in arg)
    if isinstance(arg, dict):
        return {k: _map_tensors(fn, a) for k, a in arg.items()}
    return arg


def _on_original(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view op on the tensor itself, whose storage may be too small for torch's bounds checks.

    The op is hidden from a tracer: in its graph, the view would be made of an empty input.
    """
    if is_functional(args[0]):
        return func(*args, **kwargs)
    with untraced():
        return _with_enough_storage(func, args, kwargs)


def _with_enough_storage(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        short = [t for t in tensors_in(args) if nbytes_of(t) < geometry(t).end]
        if not short:
            raise
    # Grow each storage temporarily so that the bounds checks pass; nothing reads the added bytes.
    sizes = [(t.untyped_storage(), t.untyped_storage().nbytes(), geometry(t).end) for t in short]
    try:
        for storage, _, enough in sizes:
            resize_for_real(storage, enough)
        return func(*args, **kwargs)
    finally:
        for storage, nbytes, _ in sizes:
            resize_for_real(storage, nbytes)


@cache
def _returns(func: Any) -> tuple[str | None, ...]:
    """For each output of `func`, the name of the argument that it is, by its schema."""
    sets: dict[str, str] = {}
    for argument in func._schema.arguments:
        info = argument.alias_info
        if info is not None and info.is_write:
            for alias in info.before_set:
                sets.setdefault(alias, argument.name)
    names: list[str | None] = []
    for each in func._schema.returns:
        info = each.alias_info
        written = [] if info is None else [sets[a] for a in info.before_set if a in sets]
        names.append(written[0] if written else None)
    return tuple(names)


def _returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Any) -> Any:
    """The op's outputs: for an output that aliases a written argument, that argument; else the engine's value."""
    names = [a.name for a in func._schema.arguments]
    out: list[Any] = []
    for index, name in enumerate(_returns(func)):
        if name is None:
            out.append(_value(func, args, values, index))
        else:
            at = names.index(name)
            out.append(args[at] if at < len(args) else kwargs.get(name))
    if not out:
        return None
    return out[0] if len(out) == 1 else tuple(out)


def _value(func: Any, args: tuple[Any, ...], values: Any, index: int) -> Any:
    """The engine's value for one output; the first tensor argument if the engine has none."""
    schema = func._schema.returns
    is_single = len(schema) == 1 and not (
        isinstance(values, list) and str(schema[0].type) == "Tensor"
    )
    value = values if is_single or values is None else values[index]
    return next(tensors_in(args)) if value is None else value
