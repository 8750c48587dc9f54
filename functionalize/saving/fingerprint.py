"""The environment that a saved step's programs depend on, as JSON, and its differences from this process.

    saved = fingerprint(fn, names)             world, devices, packages, code, modules, tensors, optimizers
    mismatch(saved, fingerprint(fn, names))    "`model.layers.3` (a Block) is not there", or None

A script has one name in all processes (`home_of`): where it is `__main__`, spawned by itself, or imported.
Code is compared by its bytecode, without line numbers and comments: the step, the user's functions that it reaches,
and the methods of modules. An installed package is compared by its version.
Invariant: if fingerprints are equal, names (see object_names.py) resolve to corresponding objects.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functionalize.fsdp.objects import fsdp_registered
from functionalize.saving.object_names import Names
from functionalize.util.code_objects import compiled, is_generated
from functionalize.util.packages import home_of, is_installed, is_users
from functionalize.walk.fact_text import NUMBERS
from functionalize.walk.roots import Roots

Json = Any


def world() -> dict[str, int]:
    """The world size and the rank of this process."""
    there = dist.is_available() and dist.is_initialized()
    size, rank = (dist.get_world_size(), dist.get_rank()) if there else (1, 0)
    return {"world size": size, "rank": rank}


def fingerprint(fn: Callable[..., Any], names: Names) -> dict[str, Json]:
    """The facts that programs of `fn` depend on, besides versions."""
    roots = names.roots
    tensors = dict(_tensors(roots))
    return {
        **world(),
        "step": getattr(fn, "__qualname__", type(fn).__qualname__),
        "devices": sorted({t.device.type for t in tensors.values() if t is not None}),
        "packages": _packages(roots),
        "code": _code(roots),
        "modules": {name: f"a {_kind(module)}" for name, module in roots.walk()},
        "tensors": {name: _described(tensor) for name, tensor in tensors.items()},
        "optimizers": _optimizers(roots),
    }


def mismatch(saved: Mapping[str, Json], here: Mapping[str, Json]) -> str | None:
    """The first difference, as the end of a sentence that begins with 'it'; None if there is none."""
    for key in ("world size", "rank"):
        if saved[key] != here[key]:
            return f"was saved for {key} {saved[key]}, this is {key} {here[key]}"
    missing = [d for d in saved["devices"] if not _has_device(d)]
    if missing:
        return f"was saved for {missing[0]}, of which there is none here"
    for name, version in saved["packages"].items():
        now = _version(name)
        if now != version:
            return f"was saved with {name} {version}, this is {name} {now or 'nowhere imported'}"
    parts = (
        ("modules", "modules"),
        ("tensors", "parameters or buffers"),
        ("optimizers", "optimizers"),
    )
    for key, what in parts:
        different = _difference(saved[key], here[key])
        if different is not None:
            return f"was saved for other {what}: {different}"
    code = [k for k in saved["code"] | here["code"] if saved["code"].get(k) != here["code"].get(k)]
    if code:
        changed = ", ".join(name.partition(":")[2] for name in code)
        return f"was saved before the step's code changed: {changed}"
    return None


def _difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    gone = [name for name in saved if name not in here]
    if gone:
        return f"`{gone[0]}` ({saved[gone[0]]}) is not there"
    for name, now in here.items():
        if name not in saved:
            return f"`{name}` ({now}) was not there"
        if saved[name] != now:
            return f"`{name}` is {now}, was {saved[name]}"
    return None


def _has_device(kind: str) -> bool:
    return kind != "cuda" or torch.cuda.is_available()


# -- code ------------------------------------------------------------------------------------------


def reached_functions(roots: Roots) -> Iterator[types.FunctionType]:
    """The user's functions that the step reaches, and the methods of modules; some of them twice."""
    yield from roots.functions
    yield from _methods(roots)


def _code(roots: Roots) -> dict[str, str]:
    """A digest per name of a function; functions of one name (lambdas) are digested together."""
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for fn in reached_functions(roots):
        if id(fn.__code__) in seen or is_generated(fn.__code__) or not is_users(fn.__module__):
            continue
        seen.add(id(fn.__code__))
        found.setdefault(f"{home_of(fn.__module__)}:{fn.__qualname__}", []).append(_digest(fn))
    return {name: "".join(sorted(digests)) for name, digests in sorted(found.items())}


def _methods(roots: Roots) -> Iterator[types.FunctionType]:
    """The methods that the user's module classes define."""
    for kind in dict.fromkeys(type(m) for _, m in roots.walk()):
        for base in kind.__mro__:
            if is_users(base.__module__):
                yield from (f for f in vars(base).values() if isinstance(f, types.FunctionType))


def _digest(fn: types.FunctionType) -> str:
    defaults = [repr(d) for d in fn.__defaults__ or () if isinstance(d, NUMBERS)]
    return hashlib.sha256(repr((compiled(fn.__code__), defaults)).encode()).hexdigest()[:16]


def _packages(roots: Roots) -> dict[str, str]:
    """Versions of installed packages whose modules are used."""
    kinds = {type(module).__module__ for _, module in roots.walk()}
    tops = {k.partition(".")[0] for k in kinds if is_installed(k)} - {"torch"}
    found = {name: _version(name) for name in sorted(tops)}
    return {name: version for name, version in found.items() if version is not None}


def _version(package: str) -> str | None:
    version = getattr(sys.modules.get(package), "__version__", None)
    return None if version is None else str(version)


# -- objects ---------------------------------------------------------------------------------------


def _kind(value: object) -> str:
    kind = type(value)
    return f"{home_of(kind.__module__)}.{kind.__qualname__}"


def _tensors(roots: Roots) -> Iterator[tuple[str, Tensor | None]]:
    """Parameters and buffers by full name; for a parameter of FSDP2, its sharded parameter."""
    sharded = _sharded(roots)
    for name, module in roots.walk():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                yield f"{name}.{key}", sharded.get((id(module), key), value)


def _sharded(roots: Roots) -> dict[tuple[int, str], Tensor]:
    return {
        (id(module), key): param.sharded_param
        for root in roots.modules.values()
        for module, key, param in fsdp_registered(root)
    }


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return text
    placements = ", ".join(map(str, getattr(tensor, "placements", ())))
    return f"{text} as {placements} on a mesh of {list(mesh.shape)}"


def _optimizers(roots: Roots) -> dict[str, str]:
    """Their classes and, per group, the names of parameters."""
    sharded, names = _sharded(roots), dict[int, str]()
    for name, module in roots.walk():
        for key, value in module._parameters.items():
            names.setdefault(id(sharded.get((id(module), key), value)), f"{name}.{key}")
    found: dict[str, str] = {}
    for name, optimizer in roots.optimizers.items():
        found[name] = f"a {_kind(optimizer)}"
        for i, group in enumerate(optimizer.param_groups):
            found[f"{name} group {i}"] = ", ".join(names.get(id(p), "?") for p in group["params"])
    return found


def hook_names(table: Mapping[Any, Any]) -> list[str]:
    """The names of a module's hooks, in order. The table's keys are process-wide counters, so they are not used."""
    return [_kind(h) if not hasattr(h, "__qualname__") else h.__qualname__ for h in table.values()]
