"""The dispatch mode of `fz.lazy`: an op waits, or runs at once, after what is pending if it depends on that.

    op                                what happens
    a view                            runs: it reads and writes no data
    on the list of `may_wait.py`      waits, once its result is known from a first run (`learned.py`)
    all others                        run at once: they read data for Python, communicate, draw, may raise

An op that runs at once runs after the pending ops if it reads what they write, or writes what they use. So collectives
run in the order of the program on every rank, wherever each rank looks at a tensor, and generators move as in eager.
Invariant: whoever reads a storage outside of the dispatcher goes through `interceptors.py`, or is outside of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.bindings import without_function_modes
from functionalize._compat.dispatch import handles_ops, kernels_alone
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.references import WeakStorage, address
from functionalize.ctrl_c import interrupts_held
from functionalize.deferral.learned import Learned, Made
from functionalize.deferral.may_wait import divides, draws, is_shaped_by_types, may_wait
from functionalize.deferral.runs import Runs
from functionalize.deferral.settings import read, under
from functionalize.deferral.stream import CannotWait, Stream
from functionalize.discharge.rules.factories import SHAPE_ONLY
from functionalize.discharge.rules.mutations import written_arguments
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import UnsupportedTensorError
from functionalize.ir.ops import refs_in
from functionalize.recorder.eager_formulas import unseen
from functionalize.recorder.op_kinds import MAY_GROW, OpKind, is_data_free, kind_of, tensors_in
from functionalize.recorder.patches import Watcher

_VIEW, _WAITS, _FREE, _ALL, _NOW = "view", "waits", "free", "all", "now"
_MAX_OPS = 20_000  # pending, so that Python's own memory is bounded


class Waiting(Protocol):
    """A call of a captured callable that waits, see `calls.py`. has_backward: whether its backward waits, too."""

    has_backward: bool

    def run(self) -> None:
        """Compute its results."""
        ...

    def made(self, tensor: Any) -> bool:
        """Whether a tensor is on the storage of a result."""
        ...


class LazyMode(Watcher):
    """Defers ops while it is active. budget: bytes of results that may be pending.

    call: the call that waits; no ops wait beside it.
    waited, ran: how many ops waited, and by name ran at once after pending ones. looked: why streams ran, by text.
    """

    def __init__(self, runs: Runs, budget: float) -> None:
        super().__init__()
        self.runs, self._budget = runs, budget
        self.waited = self.computed = 0
        self.looked: Counter[str] = Counter()
        self._learned = Learned()
        self._plans: dict[int, tuple[str, OpKind]] = {}
        self._escaped: dict[int, WeakStorage] = {}
        self._stream: Stream | None = None
        self._running = False
        self.call: Waiting | None = None

    # -- ops -----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended or FakeTensor in types:
            return func(*args, **kwargs)
        if types and any(map(handles_ops, types)):
            return NotImplemented  # DTensor: the ops inside come here
        plan, op = self._plans.get(address(func)) or self._plan(func)
        if self.call is not None and self._concerns(plan, op, args):
            self.look(str(func))
        if op.composite or op.has_formula:
            out = self.formulas.by_other_ops(self, op, func, args, kwargs)
            if out is not NotImplemented:
                return out
        if plan == _VIEW:
            out = op.run(*args, **kwargs)
            if self._stream is not None:
                self._stream.append_view(func, args, kwargs, out)
            return out
        if plan == _WAITS:
            return self._waits(op, func, args, kwargs)
        self._before(plan, func, args, kwargs)
        return op.run(*args, **kwargs)

    def _concerns(self, plan: str, op: OpKind, args: Any) -> bool:
        """Whether the call that waits runs before an op: all but those that read and write no data.

        While a backward waits, a view of what is no result of its forward may lead to a gradient.
        """
        if op.composite or (plan == _FREE and not op.mutating):
            return False
        call = self.call
        assert call is not None
        return plan != _VIEW or (call.has_backward and not call.made(args[0] if args else None))

    def _plan(self, func: Any) -> tuple[str, OpKind]:
        op = kind_of(func)
        if func in MAY_GROW or func is RESIZE_STORAGE or op.foreign:
            plan = _ALL
        elif func in SHAPE_ONLY or func.namespace in _OF_NO_DATA:
            plan = _FREE
        elif is_data_free(func) and not _reads_others(func):
            plan = _FREE if op.mutating else _VIEW
        else:
            plan = _WAITS if may_wait(func) else _NOW
        self._plans[address(func)] = plan, op
        return plan, op

    def _waits(self, op: OpKind, func: Any, args: Any, kwargs: Any) -> Any:
        if draws(func, args):
            self._before(_NOW, func, args, kwargs)
            return op.run(*args, **kwargs)
        settings = read()
        stream = self._stream
        if stream is None or stream.settings != settings:
            self.look("settings of torch have changed")
            stream = self._stream = Stream(settings)
        shape: list[Any] = [address(func), settings]
        own: list[Any] = []
        tensors: list[Tensor] = []
        floats: list[float] = []
        others = floats if is_shaped_by_types(func) else None
        try:
            refs = tuple([stream.refer(arg, shape, own, tensors, others) for arg in args])
            named = {k: stream.refer(v, shape, own, tensors, others) for k, v in kwargs.items()}
            self._check(func, tensors, kwargs)
        except (CannotWait, UnsupportedTensorError):
            self._before(_NOW, func, args, kwargs)
            return op.run(*args, **kwargs)
        written = _arguments(func, refs, named) if op.mutating else ()
        if op.mutating:  # which of its tensors are on one storage
            first: dict[int, int] = {}
            serials = [ref.storage for ref in refs_in([refs, named])]
            shape.append(tuple([first.setdefault(s, i) for i, s in enumerate(serials)]))
        shape.append(tuple(kwargs))
        key = tuple(shape)
        made = self._learned.get(key)
        if type(made) is not Made:
            before = [ref.geometry for ref in refs_in([refs, named])]
            self._before(_NOW, func, args, kwargs)
            out = op.run(*args, **kwargs)
            if made is None:
                self._learned.learn(key, before, tensors, out)
            return out
        out = made.outputs(tensors)
        stream.append(func, refs, named, made.number, own, out, written, tensors, floats)
        self.waited += 1
        if stream.nbytes > self._budget or stream.ops > _MAX_OPS:
            self.look("the byte budget")
        return out

    def _check(self, func: Any, tensors: list[Tensor], kwargs: Any) -> None:
        """Raises `CannotWait` for arguments with which the op may not wait."""
        if kwargs.get("pin_memory"):
            raise CannotWait
        if divides(func) and not any(t.is_floating_point() or t.is_complex() for t in tensors):
            raise CannotWait
        if self.has_escaped(tensors):
            raise CannotWait

    def _before(self, plan: str, func: Any, args: Any, kwargs: Any) -> None:
        """Run what is pending, if an op that runs at once depends on it."""
        stream = self._stream
        if stream is None or plan == _FREE:
            return
        if not stream.entries:
            self._stream = None  # it may rely on sizes that change now
            return
        depends = plan == _ALL
        if not depends:
            try:
                written = self._written(func, args, kwargs)
                depends = stream.depends(tensors_in([args, kwargs]), written)
                depends = depends or any(stream.has_met(t.untyped_storage()) for t in written)
            except (UnsupportedTensorError, NotImplementedError, RuntimeError):
                depends = True
        if depends:
            self.look(str(func))

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """What an op writes: what its schema says if it is aten's, else any of its arguments."""
        if func.namespace != "aten" or torch.Tag.maybe_aliasing_or_mutating in func.tags:
            return list(tensors_in([args, kwargs]))
        if func in _LYING or not func._schema.is_mutable:
            return list(tensors_in([args, kwargs])) if func in _LYING else []
        return list(tensors_in(_arguments(func, args, kwargs)))

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called, which does not dispatch; `original` carries it out."""
        met = self._stream is not None and self._stream.has_met(storage)
        if met or self.call is not None:
            self.look("a resize of a storage")
        return original(storage, size)

    def cover(self) -> None:
        """A recording begins inside: it and what compares it read tensors as they are, so nothing waits in it."""
        self.look("a recording")
        self.suspended += 1

    def uncover(self) -> None:
        self.suspended -= 1

    # -- observations --------------------------------------------------------------------------

    def escape(self, storage: torch.UntypedStorage) -> None:
        """Code has the address of a storage: ops on it run at once from now on."""
        self._escaped = {a: weak for a, weak in self._escaped.items() if weak.alive}
        self._escaped[storage._cdata] = WeakStorage(storage)

    def has_escaped(self, tensors: Iterable[Tensor]) -> bool:
        """Whether code has the address of one of them."""
        return bool(self._escaped) and any(
            t.untyped_storage()._cdata in self._escaped for t in tensors
        )

    def run_call(self, call: Waiting, run: Callable[[], None]) -> None:
        """Run a call that waits, by `run`, which no mode sees."""
        with interrupts_held(), unseen():
            self.call, self._running = None, True
            try:
                run()
            finally:
                self._running = False

    def look(self, what: str) -> None:
        """Run what is pending: a call, or ops. what: who looks at it."""
        stream, call = self._stream, self.call
        if self._running:
            return
        if call is not None:
            self.looked[what] += 1
            self.run_call(call, call.run)
        if stream is None:
            return
        with interrupts_held():
            self._stream, self._running = None, True
            self.suspended += 1
            try:
                if stream.entries:
                    with kernels_alone(), without_function_modes(), under(stream.settings):
                        kind = self.runs.run(stream)
                    if kind is not None:
                        self.looked[what] += 1
            finally:
                self.suspended -= 1
                self._running = False


_OF_NO_DATA = frozenset({"prim", "profiler"})

# Ops that write arguments although their schemas do not say so.
_LYING = frozenset(
    {
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.cudnn_batch_norm.default,
        torch.ops.aten.miopen_batch_norm.default,
        torch.ops.aten._batch_norm_impl_index.default,
    }
)


def _reads_others(func: Any) -> bool:
    """Whether a view op has a second tensor among its arguments: offsets of a nested tensor."""
    return sum("Tensor" in str(a.type) for a in func._schema.arguments) > 1


def _arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes, as its schema says."""
    return [
        kwargs.get(name) if at is None or at >= len(args) else args[at]
        for at, name in written_arguments(func)
    ]
