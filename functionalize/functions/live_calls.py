"""Arguments and results of an op in a substituted call: mapped, run on the originals, assembled.

    map_tensors(read, args)           args with the value of every tensor
    on_original(aten.t.default, ...)  a view of a tensor whose storage may be empty
    returned(aten.add_.Tensor, ...)   what `x.add_(1)` returns: `x` itself, whatever the engine wrote

Invariant: this module holds no state about storages or values. Storage sizes changed for an op are restored after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.graphs import untraced
from functionalize.functions.input_epilogue import (
    geometry,
    is_functional,
    nbytes_of,
    resize_for_real,
)
from functionalize.recorder.op_kinds import tensors_in


def plain_int(nbytes: Any) -> Any:
    """A symbolic size as a plain integer, which adds a guard."""
    return int(nbytes) if isinstance(nbytes, torch.SymInt) else nbytes


def map_tensors(fn: Callable[[Tensor], Any], arg: Any) -> Any:
    """`arg` with `fn` applied to every tensor."""
    if isinstance(arg, Tensor):
        return fn(arg)
    if isinstance(arg, list):
        return [map_tensors(fn, a) for a in arg]
    if isinstance(arg, tuple):
        return tuple(map_tensors(fn, a) for a in arg)
    if isinstance(arg, dict):
        return {k: map_tensors(fn, a) for k, a in arg.items()}
    return arg


def on_original(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def returned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Any) -> Any:
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
