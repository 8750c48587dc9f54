"""State of the process that a step may depend on: functions of torch that were replaced, settings that code reads.

    torch.nn.functional.relu = mine     ("torch.nn.functional.relu", mine) is among `replaced()`
    os.getcwd()                         in the code of the step: the folder is among `settings(names)`

Libraries read functions of torch through its namespaces (`nn.ReLU` calls `F.relu`), where the walk does not look: so
what stands there is compared with what stood there when this package was imported. Settings are read if the code of the
step names the function that returns them.
Invariant: nothing is changed; names that torch adds later, and what a recording puts there, are no facts.
"""

from __future__ import annotations

import decimal
import gc
import locale
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functionalize.walk.code_names import NameFilter
from functionalize.walk.parts import Part

MODULES: dict[str, dict[str, Any]] = {"torch": vars(torch), "torch.nn.functional": vars(F)}
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


# What stood in the namespaces at the import, without functions that others had put there.
_FIRST = {name: {k: v for k, v in s.items() if _is_torchs(v)} for name, s in _SPACES.items()}


def replaced() -> Iterator[Part]:
    """The functions in the namespaces of torch that are not torch's own, each under its full name."""
    for name, space in _SPACES.items():
        first = _FIRST[name]
        for key, value in list(space.items()):
            was = first.get(key, replaced)
            if was is value or (was is replaced and _is_torchs(value)) or not callable(value):
                continue
            if not str(getattr(value, "__module__", None)).startswith("functionalize"):
                yield Part(f"{name}.{key}", value, key)


def _decimals() -> Any:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)() if "numpy" in sys.modules else None


def _cudnn() -> Any:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32


_SETTINGS: dict[str, Callable[[], Any]] = {
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
