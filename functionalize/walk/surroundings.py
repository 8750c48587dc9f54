"""The state of the process that code of a step may read, wherever it runs: what stands around the objects of a walk.

    replaced(names)           what a script has put into `builtins` or `torch`, such as another `torch.relu`
    around(True)              function modes, hooks on saved tensors, hooks on all modules and optimizers
    settings(names)           ("getcwd", os.getcwd), ...: those that code names
    process_generators()      ("random", its state), ("numpy.random", its state)

Invariant: nothing is changed.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import locale
import logging
import os
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from operator import is_not
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functionalize._compat.autograd import saved_tensor_hooks
from functionalize._compat.dispatch import function_modes
from functionalize._compat.modules import global_hooks
from functionalize.walk.code_names import TEXT, NameFilter
from functionalize.walk.parts import Part

# Libraries read functions of torch through its namespaces (`nn.ReLU` calls `F.relu`), where the walk does not look: so
# what stands there is compared with what stood there when this package was imported. Names that torch adds later, and
# what a recording puts there, are no facts.
MODULES: dict[str, dict[str, Any]] = {"torch": vars(torch), "torch.nn.functional": vars(F)}
NAMESPACES = (*MODULES.values(), vars(builtins))
CLASSES: dict[str, type] = {
    "torch.Tensor": Tensor,
    "torch.nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
_SPACES: dict[str, Mapping[str, Any]] = {**MODULES, **{k: vars(v) for k, v in CLASSES.items()}}
_TORCHS = ("torch", "functionalize", "typing")


def _is_torchs(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return type(value) is not types.FunctionType or str(module).partition(".")[0] in _TORCHS


_BY_DYNAMO = (
    "manual_seed",
)  # it replaces these for good when it is imported, as the first recording does
# What stood in the namespaces at the import, without functions that others had put there.
_FIRST = {
    name: {k: v for k, v in s.items() if _is_torchs(v) and k not in _BY_DYNAMO}
    for name, s in _SPACES.items()
}


# What other packages put there by themselves, and the value of the last line in an interactive session.
_FIRST_BUILTINS = dict(vars(builtins))


def replaced(names: NameFilter) -> Iterator[Part]:
    """What a script has put into Python's builtins and code names; functions in torch that are not torch's own."""
    for key, value in list(vars(builtins).items()):
        is_named = key in names.names and key != "_"
        is_ours = str(getattr(value, "__module__", None)).startswith("functionalize")
        if is_named and not is_ours and _FIRST_BUILTINS.get(key, replaced) is not value:
            yield Part(f"builtins.{key}", value, key)
    for name, space in _SPACES.items():
        first, keys, values = _FIRST[name], list(space), list(space.values())
        for key in compress(keys, map(is_not, values, map(first.get, keys))):
            value = space.get(key)
            if (key not in first and _is_torchs(value)) or not callable(value):
                continue
            if not str(getattr(value, "__module__", None)).startswith("functionalize"):
                yield Part(f"{name}.{key}", value, key)


def around(of_optimizers: bool) -> Iterator[Part]:
    """The function modes, the hooks on saved tensors and those on all modules or optimizers around the step."""
    for mode in function_modes():
        if not type(mode).__module__.startswith("functionalize"):
            yield Part(f"the function mode {type(mode).__name__}", mode)
    for i, hook in enumerate(saved_tensor_hooks()):
        yield Part(f"the hooks on saved tensors {i}", hook)
    for i, hook in enumerate(global_hooks(of_optimizers)):
        yield Part(f"the global hooks {i}", hook)


def _decimals() -> Any:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)() if "numpy" in sys.modules else None


def _cudnn() -> Any:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32


def _loggers() -> Any:
    """The loggers that have a level of their own, or are disabled."""
    known = logging.root.manager.loggerDict.items()
    found = [(n, each) for n, each in known if isinstance(each, logging.Logger)]
    levels = [(n, each.level, each.disabled) for n, each in found if each.level or each.disabled]
    return logging.root.level, logging.root.manager.disable, tuple(levels)


def _environment() -> Any:
    return tuple(os.environ.items())


_SETTINGS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("getenv", "getenvb", "environb", "expandvars", "expanduser"), _environment),
    "getLogger": _loggers,
    "current_thread": lambda: threading.current_thread().name,
    "active_count": threading.active_count,
    TEXT: _of_numpy("get_printoptions"),
    "Decimal": _decimals,
    "getcontext": _decimals,
    "getcwd": os.getcwd,
    "cwd": os.getcwd,
    "isenabled": gc.isenabled,
    "getrecursionlimit": sys.getrecursionlimit,
    "getlocale": locale.getlocale,
    "geterr": _of_numpy("geterr"),
    "get_printoptions": _of_numpy("get_printoptions"),
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "cudnn": _cudnn,
}


def settings(names: NameFilter) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and reader of each setting that code may read."""
    for name in sorted(_SETTINGS.keys() & names.names):
        yield name, _SETTINGS[name]


def process_generators() -> Iterator[tuple[str, Any]]:
    """The generators of `random` and of numpy: name and state."""
    yield "random", random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        yield "numpy.random", (keys.tobytes(), *rest)
