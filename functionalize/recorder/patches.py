"""The functions of torch and Python that are replaced while a capture runs, and restored in every case.

    torch.UntypedStorage.resize_     does not dispatch: the recorder of the current thread records it
    torch.Tensor.numpy, .tolist,     Python reads numbers without an op: as a list, as text, by pickling
    .__repr__, .__reduce_ex__, ...
    torch.Tensor.item, fused optimizers   return and accept live numbers, see scalar_patches.py
    torch.get_rng_state, ...         set and read generators: each calls an op of this package, which is recorded
    torch.linalg.svdvals, ...        compute no vectors, as in eager, see eager_formulas.py
    torch.distributed.ProcessGroup   reduces with a factor that the dispatcher does not pass
    torch.cond, while_loop, ...      run as in eager and are refused, see Note [Higher-order ops]
    torch.jit.trace                  is refused likewise: its graph would contain what a recorder asks of tensors
    builtins.print, logging, ...     effects, which a replay does not repeat: see effects.py
    torch._dynamo's frame hook       code under torch.compile runs uncompiled: compiled code calls kernels without
                                     the dispatcher, and Dynamo would trace the recorder
    torch.distributed.pipelining     groups weights in their order, and not in that of addresses
    torch.distributed Work.wait      gloo runs ops inside it: they are part of the collective and not recorded
    torch.profiler.record_function   enters the profiler without the dispatch modes: it makes an eighth of the
                                     ops of an FSDP2 step; the names of ranges are noted
    torch.autograd's engine          the nodes of a backward are noted; one in another thread is refused
    torch.autograd.Function          makes an autograd node, see tape/notes.py
    saved_tensors_hooks              are noted, see tape/hooks.py
    torch.UntypedStorage.nbytes      in a call to a substituted function only, where resizes are not carried out:
    torch.UntypedStorage.size        the size that the function has set

A replacement calls the original unless the current thread's stack of dispatch modes has a watcher: a mode with a method
`resize_storage`. Captures that run at the same time share the replacements; the last one removes them. They come in
groups, of which a watcher installs those that it needs: `trace`, which runs a function on fakes once, sees neither
effects nor live numbers, and no collectives where there are no process groups.

Refusals: `torch.seed()`, which a replay cannot repeat, and `initial_seed()`, which returns a number to Python that no
guard checks (`Checks.check_generators` detects generators set by other means: `torch.default_generator.set_state`);
every higher-order op that runs while a step is recorded, but for custom Functions inside of `torch.func`: eager never
compiles them, and the ops inside are recorded.

Note [Higher-order ops]
    torch.cond(x.sum() > 0, f, g, (x,))     refused by name; the call that is recorded runs as eager does
    torch.cond(True, f, g, (x,))            calls `f`: no higher-order op, captured like all else

Eager compiles a higher-order op by Dynamo, which makes tensors in closures (the parameters of modules) operands of the
op, with gradients of zeros where the branch that was not taken uses them. A recorder runs compiled code uncompiled, and
would lose these gradients. Therefore the op is compiled as in eager, and no mode of a recorder sees what is inside.
Of flex attention no program is made, although it runs by ops where it is not compiled: users compile it, and the kernel
that Inductor generates rounds and allocates otherwise. On CPUs it has no backward.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from functionalize._compat import compilers
from functionalize._compat.autograd import (
    backward_position,
    custom_function_call,
    engine_entry,
    function_entry,
    saved_hooks_entry,
)
from functionalize._compat.dispatch import (
    HigherOrderOperator,
    TorchDispatchMode,
    current_modes,
    disable_current_modes,
    kernel_settings,
    no_python_dispatch,
)
from functionalize._compat.distributed import (
    EXCHANGES_OF_OBJECTS,
    object_functions,
    ordered_weight_groups,
    work_classes,
)
from functionalize._compat.fsdp import FSDP_LABEL
from functionalize._compat.modules import OPTIMIZER_LABEL
from functionalize.ir.generators import GET_STATE, SEED, SET_STATE
from functionalize.recorder import eager_formulas, effects
from functionalize.recorder.checks import Checks
from functionalize.recorder.eager_formulas import EagerFormulas, note_autocast
from functionalize.scalars import scalar_patches as number_patches
from functionalize.scalars.scalar_arguments import ScalarArguments
from functionalize.tape.notes import TapeNotes
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.patching import Patch, Patches
from functionalize.util.process_groups import PremulSum

# How Python reads a tensor without an op, and what to do instead.
_READS = {
    "numpy": (
        "by .numpy()",
        "call .item() for a number, or return the tensor, and call .numpy() outside the step",
    ),
    "data_ptr": ("by .data_ptr()", "compare tensors by `is`"),
    "tolist": ("by .tolist()", "use .item()"),
    "__dlpack__": ("by .__dlpack__()", "return the tensor, and pass it on outside the step"),
    "__repr__": ("as text", "return the tensor, and make the text outside the step"),
    "__reduce_ex__": ("by pickling it", "return the tensor, and save it outside the step"),
}
_OF_TORCH = ("torch.", "functionalize.")  # which decide nothing else by an address


class Watcher(TorchDispatchMode):
    """A dispatch mode that records: torch is patched while it is active. It can be entered more than once.

    suspended: the number of callers that have suspended it; at 0 it records.
    checks: notes what a replay cannot repeat; None if there will be no replay.
    scalar_arguments: the live numbers of the recording as arguments of ops; None if its numbers are not live.
    module_calls: what observes the calls of modules (see state/module_calls.py), while it does.
    tape: the notes about autograd's nodes, of a recording that becomes a program.
    formulas: computes what eager does where torch does something else under a mode.
    steps_optimizers: whether an optimizer's `step` was called, which calls the global hooks of optimizers.
    arrays: by the ids of arrays among the arguments, the tensors on them that are inputs, see walk/converted_arrays.py.
    other_arrays: the `OtherArrays` there, which are no inputs; None: there are none.
    """

    checks: Checks | None = None
    scalar_arguments: ScalarArguments | None = None
    module_calls: Any = None
    tape: TapeNotes | None = None
    arrays: Mapping[int, torch.Tensor] = MappingProxyType({})
    other_arrays: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.suspended = 0
        self.formulas = EagerFormulas()
        self.steps_optimizers = False
        self._entered = 0
        self._installed = ExitStack()
        self._covered: list[Watcher] = []

    def start(self) -> None:
        """Called before the outermost `__enter__`."""

    def stop(self) -> None:
        """Called after the outermost `__exit__`, or if `__enter__` has failed."""

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def cover(self) -> None:
        """Another watcher is about to be entered inside this one."""

    def uncover(self) -> None:
        """A watcher of which `cover` told has been left."""

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        """`UntypedStorage.resize_` was called, which does not dispatch; `original(storage, size)` carries it out."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides the handler from Dynamo costs as much as an op

    def note_wait(self, work: Any) -> None:
        """A caller has waited for the work of a collective or a message."""

    def note_question(self, work: Any) -> None:
        """A caller asks whether a collective or a message has ended, or for its future."""

    def __enter__(self) -> Self:
        outermost = not self._entered
        if outermost:
            self._covered = _recorders()
            for below in self._covered:
                below.cover()
            self.start()
        with ExitStack() as undo:
            if outermost:
                undo.callback(self._uncover)
                undo.callback(self.stop)
                _ACTIVE.add(self)
                undo.callback(_ACTIVE.remove, self)
                undo.callback(self._installed.close)
                for patches in patches_for(self):
                    patches.install()
                    self._installed.callback(patches.remove)
                note_autocast(True)
            super().__enter__()
            undo.pop_all()
        self._entered += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self._entered -= 1
            if not self._entered:
                try:
                    self._installed.close()
                finally:  # also after Ctrl-C
                    _ACTIVE.remove(self)
                    note_autocast(bool(_watchers()))
                    self._uncover()
                    self.stop()

    def _uncover(self) -> None:
        for below in self._covered:
            below.uncover()
        self._covered = []


class _ActiveWatchers:
    """The watchers that are active, of all threads."""

    def __init__(self) -> None:
        self._found: dict[int, Watcher] = {}

    def add(self, watcher: Watcher) -> None:
        self._found[id(watcher)] = watcher

    def remove(self, watcher: Watcher) -> None:
        self._found.pop(id(watcher), None)

    def all(self) -> list[Watcher]:
        return list(self._found.values())


_ACTIVE = _ActiveWatchers()


def _watchers() -> list[Any]:
    """The watchers active in this thread, innermost first: a capture may run inside another."""
    modes = current_modes()
    if len(modes) == 1:
        return modes if hasattr(modes[0], "resize_storage") else []
    return [mode for mode in reversed(modes) if hasattr(mode, "resize_storage")]


def _recorders() -> list[Watcher]:
    """The watchers of this thread that are not suspended, innermost first."""
    return [m for m in reversed(current_modes()) if isinstance(m, Watcher) and not m.suspended]


def recorded_checks() -> Iterator[Checks]:
    """The checks of `_recorders()`."""
    return (recorder.checks for recorder in _recorders() if recorder.checks is not None)


def _checked_recorders() -> list[Watcher]:
    """Those of `_recorders()` that have checks."""
    return [recorder for recorder in _recorders() if recorder.checks is not None]


def _tapes() -> list[TapeNotes]:
    """The notes about autograd of `_recorders()`."""
    return [recorder.tape for recorder in _recorders() if recorder.tape is not None]


def _watched_resize() -> Any:
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: Any) -> Any:
        resize, watchers = original, _watchers()
        if len(watchers) == 1 and not watchers[0].suspended:
            return watchers[0].resize_storage(self, size, original)
        for watcher in reversed(watchers):
            if not watcher.suspended:
                resize = partial(_resize_in, watcher, resize)
        return resize(self, size)

    resize_.__doc__ = original.__doc__
    return resize_


def _resize_in(watcher: Any, resize: Any, storage: torch.UntypedStorage, size: Any) -> Any:
    return watcher.resize_storage(storage, size, resize)


def _watched_size(original: Any) -> Any:
    def size(self: torch.UntypedStorage) -> int:
        for watcher in _watchers():
            nbytes = getattr(watcher, "storage_nbytes", lambda storage: None)(self)
            if nbytes is not None:
                return int(nbytes)
        return int(original(self))

    size.__doc__ = original.__doc__
    return size


def _watched_read(name: str) -> Any:
    original = getattr(torch.Tensor, name)
    how, instead = _READS[name]

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reader = sys._getframe(1).f_globals
        if (name == "__reduce_ex__" and reader is vars(copy)) or (
            name == "data_ptr" and str(reader.get("__name__")).startswith(_OF_TORCH)
        ):
            return original(self, *args, **kwargs)
        if name == "tolist" and (found := number_patches.listed(_checked_recorders(), self)):
            return found
        for checks in recorded_checks():
            checks.note_python_read(self, how, instead)
        return original(self, *args, **kwargs)

    read.__doc__ = original.__doc__
    return read


def _noted_exchange(original: Any) -> Any:
    """A function by which torch.distributed pickles an object, to exchange it with other ranks."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        name, frame = original.__name__, sys._getframe(1)
        while (module := frame.f_globals.get("__name__")) in EXCHANGES_OF_OBJECTS:
            name = frame.f_code.co_name if str(module).endswith("distributed_c10d") else name
            if frame.f_back is None:
                break
            frame = frame.f_back
        noted = list(recorded_checks())
        for checks in noted:
            checks.note_exchange(name)
        reasons = [len(checks.unrepeatable) for checks in noted]
        try:
            return original(*args, **kwargs)
        finally:  # that it reads tensors is the same reason
            for checks, count in zip(noted, reasons, strict=True):
                del checks.unrepeatable[count:]

    convert.__doc__ = original.__doc__
    return convert


def _unwatched_wait(original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        watchers = _watchers()
        for watcher in watchers:
            watcher.suspended += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.suspended -= 1
            for recorder in _recorders()[:1]:
                recorder.note_wait(self)

    wait.__doc__ = original.__doc__
    return wait


def _noted_question(original: Any) -> Any:
    def asks(self: Any, *args: Any, **kwargs: Any) -> Any:
        for recorder in _recorders()[:1]:
            recorder.note_question(self)
        return original(self, *args, **kwargs)

    asks.__doc__ = original.__doc__
    return asks


def _undispatched(original: Any) -> Any:
    is_entry = original.__name__ == "__enter__"

    def undispatched(self: Any, *args: Any) -> Any:
        steps_optimizer = is_entry and self.name.startswith(OPTIMIZER_LABEL)
        for recorder in _recorders():
            recorder.steps_optimizers |= steps_optimizer
        for tape in _tapes():
            noted = tape.labelled if self.name.startswith(FSDP_LABEL) else tape.ranged
            noted(self.name if is_entry else None)
        watchers = _watchers()
        if not watchers or len(watchers) < len(current_modes()):
            return original(self, *args)  # another mode may record the profiler's ops
        with no_python_dispatch():
            return original(self, *args)

    undispatched.__doc__ = original.__doc__
    return undispatched


def _noted_function(original: Any) -> Any:
    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> Any:
        for tape in _tapes():
            tape.function_called(args)
        return original(args)

    unwrap_dead_wrappers.__doc__ = original.__doc__
    return unwrap_dead_wrappers


def _noted_saving(original: Any) -> Any:
    def __enter__(self: Any) -> Any:
        for tape in _tapes():
            tape.saved_by(self.pack_hook, self.unpack_hook)
        return original(self)

    __enter__.__doc__ = original.__doc__
    return __enter__


def _watched_engine(original: Any) -> Any:
    def _engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watchers():
            for recorder in _ACTIVE.all():
                if recorder.checks is not None:
                    recorder.checks.backward_elsewhere(outputs)
        for checks in recorded_checks():
            checks.backward_outside(outputs)
        tapes = _tapes()
        try:
            for tape in tapes:
                tape.backward_called(outputs, args[3] if len(args) > 3 else ())
            return original(outputs, *args, **kwargs)
        finally:
            for tape in tapes:
                tape.backward_ended()

    _engine_run_backward.__doc__ = original.__doc__
    return _engine_run_backward


def _watched_setting(original: Any, text: str, value: Any) -> Any:
    """A setter of what kernels read: a replay runs every op under the value on entry. value: its getter."""

    def setting(*args: Any, **kwargs: Any) -> Any:
        before = value(*args)
        out = original(*args, **kwargs)
        if before is None or value(*args) != before:
            for checks in recorded_checks():
                checks.refuse_here(
                    f"changes torch's setting `{text}`, which ops of a replay read",
                    "set it outside the step",
                )
        return out

    setting.__doc__ = original.__doc__
    return setting


# -- random generators -----------------------------------------------------------------------------

_Function = Callable[..., Any]
_CPU = torch.device("cpu")


def _generator_patches() -> Iterator[Patch]:
    return _replaced((torch, torch.random), _OF_EVERY_DEVICE)


def _cuda_generator_patches() -> Iterator[Patch]:
    return _replaced((torch.cuda, torch.cuda.random), _OF_CUDA)


def _replaced(
    modules: tuple[Any, ...], replaced: Mapping[str, _Function | None]
) -> Iterator[Patch]:
    for name, replacement in replaced.items():
        original = getattr(modules[0], name)
        new = _while_recording(original, replacement, modules[0].__name__)
        for module in modules:
            yield module, name, new


def _while_recording(original: _Function, replacement: _Function | None, module: str) -> _Function:
    def function(*args: Any, **kwargs: Any) -> Any:
        active = _recorders()
        if active and replacement is not None:
            return replacement(original, *args, **kwargs)
        for recorder in active:
            if recorder.checks is not None:
                what = f"{module}.{original.__name__}() is called inside the step"
                recorder.checks.note_changes_each_time(what, "call it outside the step")
        return original(*args, **kwargs)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function


# Of every device.


def _get_rng_state(original: _Function) -> Tensor:
    state: Tensor = GET_STATE(_CPU)
    return state


def _set_rng_state(original: _Function, new_state: Tensor) -> None:
    SET_STATE(new_state, _CPU)


def _manual_seed(original: _Function, seed: Any) -> torch.Generator:
    number = _as_int64(seed)
    if number is None:
        original(seed)  # raises
    SEED(number)
    return torch.default_generator


def _as_int64(seed: Any) -> int | None:
    """The signed 64-bit number with the same bits as a seed; None if the seed needs more, which eager refuses."""
    number = int(seed)
    if not -(2**63) <= number < 2**64:
        return None
    return number - 2**64 if number >= 2**63 else number


_OF_EVERY_DEVICE: dict[str, _Function | None] = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
    "seed": None,
    "initial_seed": None,
}


# Of CUDA: before it is initialized there is no generator, and eager defers the call.


def _get_cuda_rng_state(original: _Function, device: Any = "cuda") -> Tensor:
    torch.cuda.init()
    state: Tensor = GET_STATE(_cuda(device))
    return state


def _set_cuda_rng_state(original: _Function, new_state: Tensor, device: Any = "cuda") -> None:
    if torch.cuda.is_initialized():
        SET_STATE(new_state, _cuda(device))
    else:
        original(new_state, device)


def _manual_seed_cuda(original: _Function, seed: Any) -> None:
    _seed_cuda(original, seed, lambda: _cuda("cuda"))


def _manual_seed_all_cuda(original: _Function, seed: Any) -> None:
    _seed_cuda(original, seed, lambda: torch.device("cuda"))


def _seed_cuda(original: _Function, seed: Any, which: Callable[[], torch.device]) -> None:
    number = _as_int64(seed)
    if number is None or not torch.cuda.is_initialized():
        original(seed)
    else:
        SEED(number, which())


def _cuda(device: Any) -> torch.device:
    """The device that eager uses: the current one if `device` has no index."""
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


_OF_CUDA: dict[str, _Function | None] = {
    "get_rng_state": _get_cuda_rng_state,
    "set_rng_state": _set_cuda_rng_state,
    "manual_seed": _manual_seed_cuda,
    "manual_seed_all": _manual_seed_all_cuda,
    "seed": None,
    "seed_all": None,
    "initial_seed": None,
}


# -- the factor of PREMUL_SUM ----------------------------------------------------------------------

# Which of the two that scatter `dist.reduce_scatter_tensor` calls depends on the release of torch.
_REDUCING = ("allreduce", "_reduce_scatter_base", "reduce_scatter_single")


def _reduction_patches() -> Iterator[Patch]:
    """The methods of process groups that reduce: a record has `PremulSum(0.5)` for the reduce op.

    dist.reduce_scatter_tensor(out, x, PREMUL_SUM(0.5))
        -> ProcessGroup.reduce_scatter_single(out, x, options)      the reduce op has its factor
        -> c10d._reduce_scatter_base_(out, x, group, reduce_op, ..)  its kind only

    Without the factor, as in a collective of several tensors, or where it is a tensor, the op is refused by its rule
    (`util/process_groups.py`).
    """
    if dist.is_available():
        for name in _REDUCING:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                yield dist.ProcessGroup, name, _with_factors(original)


def _with_factors(original: Any) -> Any:
    def reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        factor = _factor(args[-1] if args else None)
        if factor is None:
            return original(self, *args, **kwargs)
        recorders: list[Any] = [*_recorders()]
        places = [(recorder, len(recorder.records)) for recorder in recorders]
        try:
            return original(self, *args, **kwargs)
        finally:
            for recorder, start in places:
                for record in recorder.records[start:]:
                    target = getattr(record, "target", None)  # `record_memory` notes no records
                    if getattr(target, "namespace", "") == "c10d":
                        record.args = tuple(_with_factor(a, factor) for a in record.args)

    reduce.__doc__ = original.__doc__
    return reduce


def _factor(options: Any) -> float | None:
    op = getattr(options, "reduceOp", None)
    if op is None or op != dist.ReduceOp.PREMUL_SUM:
        return None
    factor = op.__getstate__()[1]
    return factor if isinstance(factor, float) else None


def _with_factor(argument: Any, factor: float) -> Any:
    is_op = isinstance(argument, torch.ScriptObject) and hasattr(argument, "op")
    return PremulSum(factor) if is_op else argument


# -- what torch itself traces ----------------------------------------------------------------------

# Its class calls its base class with two more arguments, the tensors in closures, which Dynamo finds itself.
_FLEX, _SEEN_BY_DYNAMO = "flex_attention", 7
_BY_PRODUCT = "use torch.nn.functional.scaled_dot_product_attention with a mask"
_INSTEAD = {
    "cond": "use Python's `if` (`if x.sum().item() > 0:`)",
    "while_loop": "use Python's `while` (`while x.sum().item() > 0:`)",
    _FLEX: _BY_PRODUCT,
    f"{_FLEX}_backward": _BY_PRODUCT,
}


def _tracer_patches() -> Iterator[Patch]:
    original = HigherOrderOperator.__call__

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not _watchers() or self is custom_function_call:
            return original(self, *args, **kwargs)
        for each in recorded_checks():
            each.refuse_here(
                f"runs the higher-order op `{self._name}`, of which no program can be made",
                _INSTEAD.get(self._name, "use Python's `for` or `if`, or run it outside the step"),
            )
        with disable_current_modes():
            if backward_position() is not None:
                return original(self, *args, **kwargs)
            if self._name == _FLEX:
                args = args[:_SEEN_BY_DYNAMO]
            compiled = torch.compile(lambda *a, **k: self(*a, **k), backend="eager", fullgraph=True)
            return compiled(*args, **kwargs)

    yield HigherOrderOperator, "__call__", call
    for owner, name in compilers.tracers_of_torchscript():
        yield owner, name, _unseen(getattr(owner, name))


def _unseen(original: Any) -> Any:
    def trace(*args: Any, **kwargs: Any) -> Any:
        if not _watchers():
            return original(*args, **kwargs)
        for each in recorded_checks():
            each.refuse_here(
                "traces code for TorchScript, of which no program can be made",
                "trace it outside the step",
            )
        with disable_current_modes():
            return original(*args, **kwargs)

    return trace


# -- all of them -----------------------------------------------------------------------------------


def _engine_patches() -> Iterator[Patch]:
    """What decides which ops torch runs, and what they belong to."""
    # It replaces `torch.manual_seed` for good when it is imported, which a step may do.
    with only_young_collections():  # a third of the time of the import
        compilers.load_dynamo()
    yield torch.UntypedStorage, "resize_", _watched_resize()
    yield from eager_formulas.patches(lambda: bool(_watchers()), recorded_checks)
    yield from _tracer_patches()
    yield from compilers.uncompiled(lambda: bool(_watchers()))
    for name in ("__enter__", "__exit__"):
        yield record_function, name, _undispatched(getattr(record_function, name))
    owner, name = engine_entry()
    yield owner, name, _watched_engine(getattr(owner, name))
    owner, name = function_entry()
    yield owner, name, _noted_function(getattr(owner, name))
    owner, name = saved_hooks_entry()
    yield owner, name, _noted_saving(getattr(owner, name))


def _group_patches() -> Iterator[Patch]:
    """What only process groups call."""
    yield from _reduction_patches()
    for owner, name in object_functions():
        yield owner, name, _noted_exchange(getattr(owner, name))
    for work in work_classes():
        yield work, "wait", _unwatched_wait(getattr(work, "wait"))  # noqa: B009 (typed as a plain type)
    for work in work_classes()[:1]:
        for name in ("is_completed", "get_future"):
            yield work, name, _noted_question(getattr(work, name))


def _check_patches() -> Iterator[Patch]:
    """What `Checks` refuses wherever it runs: reads without an op, settings of kernels."""
    for name in _READS:
        yield torch.Tensor, name, _watched_read(name)
    for owner, name, text, value in kernel_settings():
        yield owner, name, _watched_setting(getattr(owner, name), text, value)


def _effect_patches() -> Iterator[Patch]:
    """What a step on the user's tensors does outside them."""
    effects.watch_audit_events(_is_recording, recorded_checks)
    yield from effects.patches(recorded_checks, _checked_recorders)


def _number_patches() -> Iterator[Patch]:
    return number_patches.patches(_recorders)


def _size_patches() -> Iterator[Patch]:
    for name in ("nbytes", "size"):
        yield torch.UntypedStorage, name, _watched_size(getattr(torch.UntypedStorage, name))


# No function is in two of them: the last watcher of each puts its own back.
ENGINE, GROUPS = Patches(_engine_patches, keeps=True), Patches(_group_patches, keeps=True)
ORDERS = Patches(ordered_weight_groups)
GENERATORS = Patches(_generator_patches, keeps=True)
CUDA_GENERATORS = Patches(_cuda_generator_patches, keeps=True)
CHECKS = Patches(_check_patches, keeps=True)
NUMBERS, EFFECTS = Patches(_number_patches), Patches(_effect_patches)
SIZES = Patches(_size_patches, keeps=True)


def patches_for(watcher: Watcher) -> Iterator[Patches]:
    """Those that a watcher needs."""
    yield ENGINE  # before those of generators: it imports what replaces `torch.manual_seed`
    # A step that makes its first process group connects, which is an effect.
    if dist.is_available() and dist.is_initialized():
        yield GROUPS
        yield ORDERS
    yield GENERATORS
    is_real = watcher.checks is not None and watcher.checks.for_real
    # Eager defers what seeds CUDA before there is any, which a step may do in every call.
    if is_real or torch.cuda.is_available() or torch.cuda.is_initialized():
        yield CUDA_GENERATORS
    if watcher.checks is not None:
        yield CHECKS
    if is_real:
        yield NUMBERS
        yield EFFECTS


def _is_recording() -> bool:
    """Whether effects are noted, in any thread. One function: a hook on audit events stays for each."""
    return EFFECTS.active
