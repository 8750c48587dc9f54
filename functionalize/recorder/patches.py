"""The functions of torch and Python that are replaced while a capture runs, and restored in every case.

    torch.UntypedStorage.resize_     does not dispatch: the recorder of the current thread records it
    torch.Tensor.numpy, .tolist,     Python reads numbers without an op: as a list, as text, by pickling
    .__repr__, .__reduce_ex__, ...
    torch.Tensor.item, fused optimizers   return and accept live numbers, see scalar_patches.py
    torch.get_rng_state, ...         set and read generators: recorded as ops, see rng_patches.py
    torch.linalg.svdvals, ...        compute no vectors, as in eager, see eager_formulas.py
    torch.distributed.ProcessGroup   reduces with a factor that the dispatcher does not pass, see reduction_patches.py
    torch.cond, while_loop, ...      run as in eager and are refused, see higher_order.py
    builtins.print, logging, ...     effects, which a replay does not repeat: see effects.py
    torch._dynamo's frame hook       code under torch.compile runs uncompiled: compiled code calls kernels without
                                     the dispatcher, and Dynamo would trace the recorder
    torch.distributed Work.wait      gloo runs ops inside it: they are part of the collective and not recorded
    torch.profiler.record_function   enters the profiler without the dispatch modes: it makes an eighth of the
                                     ops of an FSDP2 step; the names of ranges are noted
    torch.autograd's engine          the nodes of a backward are noted; one in another thread is refused
    torch.autograd.Function          makes an autograd node, see tape/notes.py
    saved_tensors_hooks              are noted, see tape/hooks.py
    torch.UntypedStorage.nbytes      in a call to a substituted function only, where resizes are not carried out:
    torch.UntypedStorage.size        the size that the function has set

A replacement calls the original unless the current thread's stack of dispatch modes has a watcher: a mode with a method
`resize_storage`. Captures that run at the same time share the replacements; the last one removes them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch.autograd.profiler import record_function

from functionalize._compat import compilers
from functionalize._compat.autograd import engine_entry, function_entry, saved_hooks_entry
from functionalize._compat.dispatch import (
    TorchDispatchMode,
    current_modes,
    kernel_settings,
    no_python_dispatch,
)
from functionalize._compat.distributed import EXCHANGES_OF_OBJECTS, object_functions, work_class
from functionalize._compat.fsdp import FSDP_LABEL
from functionalize._compat.modules import OPTIMIZER_LABEL
from functionalize.recorder import eager_formulas, effects, higher_order, reduction_patches
from functionalize.recorder import rng_patches as generators
from functionalize.recorder.checks import Checks
from functionalize.recorder.eager_formulas import EagerFormulas, note_autocast
from functionalize.scalars import scalar_patches as number_patches
from functionalize.scalars.scalar_arguments import ScalarArguments
from functionalize.tape.notes import TapeNotes
from functionalize.util.patching import Patch, Patches

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
    """

    checks: Checks | None = None
    scalar_arguments: ScalarArguments | None = None
    module_calls: Any = None
    tape: TapeNotes | None = None
    arrays: Mapping[int, torch.Tensor] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self.suspended = 0
        self.formulas = EagerFormulas()
        self.steps_optimizers = False
        self._entered = 0
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
            PATCHES.install()
            undo.callback(PATCHES.remove)
            if outermost:
                note_autocast(True)
            super().__enter__()
            undo.pop_all()
        self._entered += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            try:
                PATCHES.remove()
            finally:  # also after Ctrl-C
                self._entered -= 1
                if not self._entered:
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

    wait.__doc__ = original.__doc__
    return wait


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


def _capture_patches() -> Iterator[Patch]:
    yield torch.UntypedStorage, "resize_", _watched_resize()
    for name in _READS:
        yield torch.Tensor, name, _watched_read(name)
    yield from generators.patches(_recorders)
    yield from number_patches.patches(_recorders)
    yield from eager_formulas.patches(lambda: bool(_watchers()), recorded_checks)
    yield from reduction_patches.patches(_recorders)
    yield from higher_order.patches(recorded_checks, lambda: bool(_watchers()))
    effects.watch_audit_events(_is_recording, recorded_checks)
    yield from effects.patches(recorded_checks, _checked_recorders)
    for owner, name, text, value in kernel_settings():
        yield owner, name, _watched_setting(getattr(owner, name), text, value)
    yield from compilers.uncompiled(lambda: bool(_watchers()))
    for name in ("__enter__", "__exit__"):
        yield record_function, name, _undispatched(getattr(record_function, name))
    owner, name = engine_entry()
    yield owner, name, _watched_engine(getattr(owner, name))
    owner, name = function_entry()
    yield owner, name, _noted_function(getattr(owner, name))
    owner, name = saved_hooks_entry()
    yield owner, name, _noted_saving(getattr(owner, name))
    for owner, name in object_functions():
        yield owner, name, _noted_exchange(getattr(owner, name))
    work = work_class()
    if work is not None:
        yield work, "wait", _unwatched_wait(getattr(work, "wait"))  # noqa: B009 (typed as a plain type)


def _live_call_patches() -> Iterator[Patch]:
    for name in ("nbytes", "size"):
        yield torch.UntypedStorage, name, _watched_size(getattr(torch.UntypedStorage, name))


PATCHES = Patches(_capture_patches)
SIZE_PATCHES = Patches(_live_call_patches)


def _is_recording() -> bool:
    """Whether anything is recorded, in any thread. One function: a hook on audit events stays for each."""
    return PATCHES.active
