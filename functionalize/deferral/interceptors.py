"""The functions that reach the memory of tensors past torch's dispatcher: inside the block they look first.

    x.numpy(), x.tolist(), print(x), x.data_ptr(), pickling, DLPack, torch.save
    torch.tensor([x, y]), torch.ctc_loss(...), an LSTM on packed sequences     C++ that reads numbers without an op
    threads and processes that start: they read their arguments outside of the block
    torch.set_flush_denormal(True), torch.set_num_threads(2), ...   settings that kernels read
    p.grad, p.data = ...                                            while a call waits, see `calls.py`

A function that hands out an address (`data_ptr`, `numpy`, `__dlpack__`) makes the storage one on which no op waits: who
has the address may write there. The replacements are active while a `fz.lazy` block is, and call the originals.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import (
    HigherOrderOperator,
    current_modes,
    kernel_settings,
)
from functionalize._compat.modules import packed_sequence_functions
from functionalize._compat.references import address
from functionalize.deferral.mode import LazyMode
from functionalize.recorder.eager_formulas import unseen
from functionalize.step.captured_step import CapturedStep
from functionalize.util.patching import Patch, Patches, noted_attribute

_OF_TENSORS = (
    *("tolist", "__repr__", "__reduce_ex__", "__deepcopy__", "share_memory_", "new_tensor"),
    *("tensor_split", "storage", "map_", "map2_", "apply_"),
)
_ADDRESSES = ("data_ptr", "numpy", "__dlpack__", "__array__")
_OF_STORAGES = (
    *("tolist", "__getitem__", "__setitem__", "__repr__", "__reduce__", "__deepcopy__", "fill_"),
    *("copy_", "clone", "cpu", "share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"),
    *("_write_file", "byteswap", "pin_memory"),
)
_MAKERS = ("tensor", "as_tensor", "asarray")
_NUMBERS = (bool, int, float, complex)
_MANY = 1000  # numbers in a list that are looked through
_COMPARES = "torch.distributed.fsdp."  # its code asks whether two tensors have one address

_OF_MODULES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, ("tensor", "as_tensor", "asarray", "save", "ctc_loss", "tensor_split", "from_dlpack")),
    (threading.Thread, ("start",)),
    (multiprocessing.process.BaseProcess, ("start",)),
    (os, ("fork",)),
    (HigherOrderOperator, ("__call__",)),
)


def _active() -> LazyMode | None:
    """The mode of this thread that records."""
    return next((m for m in current_modes() if isinstance(m, LazyMode)), None)


def _is_harmless(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call reads no tensor: FSDP2 compares addresses, `torch.tensor` gets numbers."""
    if name == "data_ptr":
        caller: str = sys._getframe(2).f_globals.get("__name__", "")
        return caller.startswith(_COMPARES)
    return name in _MAKERS and bool(args) and _is_number(args[0])


def _is_number(data: Any) -> bool:
    if type(data) in (list, tuple):
        return len(data) <= _MANY and all(type(each) in _NUMBERS for each in data)
    return type(data) in _NUMBERS


def _apart(owner: type) -> Any:
    """A captured callable looks at its tensors from C++ and from below all modes: nothing waits in its calls."""
    original = owner.__call__

    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _active()
        if mode is None:
            return original(*args, **kwargs)
        mode.cover()
        try:
            # Without the mode, through which every op of a replay would go.
            with unseen() if len(current_modes()) == 1 else nullcontext():
                return original(*args, **kwargs)
        finally:
            mode.uncover()

    call.__doc__, call.__name__ = original.__doc__, "__call__"
    return call


def _looking(owner: Any, name: str, hands_out: bool) -> Any:
    original = getattr(owner, name)

    def look(*args: Any, **kwargs: Any) -> Any:
        mode = _active()
        if mode is None or mode.suspended or _is_harmless(name, args):
            return original(*args, **kwargs)
        mode.look(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        if hands_out:
            self = args[0]
            try:
                mode.escape(self.untyped_storage() if isinstance(self, Tensor) else self)
            except (NotImplementedError, RuntimeError):
                pass  # it has no storage, and no op on it waits
        return original(*args, **kwargs)

    look.__doc__, look.__name__ = original.__doc__, name
    return look


def _gradients(leaf: Tensor) -> None:
    """The `.grad` of a tensor is read or assigned: a backward that waits runs before."""
    mode = _active()
    if mode is not None and mode.call is not None and mode.call.has_backward:
        mode.look("Tensor.grad")


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """A tensor gets another storage, without an op: a call that waits was to use the old one."""
    mode = _active()
    if mode is not None and mode.call is not None:
        mode.look("an assignment to Tensor.data")
    _DATA.__set__(tensor, value)


# The descriptors of the base class.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data

# As modules have bound them: a recording replaces some of them, too.
_OF_TORCH = {name: getattr(torch, name) for name in (*dict(_OF_MODULES)[torch], "to_dlpack")}


class _Importers:
    """The modules that have bound a function by its name: `from torch import tensor`.

    A module is searched again only when it has another number of names.
    """

    def __init__(self) -> None:
        self._searched: dict[str, tuple[int, list[str]]] = {}

    def of(self, replaced: dict[int, Any]) -> Iterator[Patch]:
        """(module, name, replacement) where a module has bound one of `replaced`, by address."""
        for title, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or title.partition(".")[0] == "torch":
                continue
            names = vars(module)
            known = self._searched.get(title)
            if known is None or known[0] != len(names):
                bound = [name for name, value in list(names.items()) if address(value) in replaced]
                known = self._searched[title] = len(names), bound
            for name in known[1]:
                new = replaced.get(address(names.get(name)))
                if new is not None:
                    yield module, name, new


_IMPORTERS = _Importers()


def _patches() -> Iterator[Patch]:
    replaced: dict[int, Any] = {}
    for owner, names in ((Tensor, _OF_TENSORS), (torch.UntypedStorage, _OF_STORAGES), *_OF_MODULES):
        for name in names:
            if hasattr(owner, name):
                new = _looking(owner, name, hands_out=False)
                if owner is torch:
                    replaced[address(_OF_TORCH[name])] = new
                yield owner, name, new
    for module, name in packed_sequence_functions():
        yield module, name, _looking(module, name, hands_out=False)
    yield CapturedStep, "__call__", _apart(CapturedStep)
    yield Tensor, "grad", noted_attribute(_GRAD, _gradients)
    yield Tensor, "data", property(_DATA.__get__, _set_data, _DATA.__delete__)
    for owner, name, _, _ in kernel_settings():
        yield owner, name, _looking(owner, name, hands_out=False)
    for name in _ADDRESSES:
        yield Tensor, name, _looking(Tensor, name, hands_out=True)
    for module in (torch, torch.utils.dlpack):
        new = _looking(module, "to_dlpack", hands_out=True)
        replaced[address(_OF_TORCH["to_dlpack"])] = new
        yield module, "to_dlpack", new
    yield (
        torch.UntypedStorage,
        "data_ptr",
        _looking(torch.UntypedStorage, "data_ptr", hands_out=True),
    )
    yield from _IMPORTERS.of(replaced)


INTERCEPTORS = Patches(_patches)
