"""In-place, `out=` and other mutating overloads, found by schema.

    aten.add_.Tensor(x, y)            ->  x' = aten.add.Tensor(x, y)
    aten.mm.out(x, y, out=o)          ->  o' = aten.mm.default(x, y)
    aten._fused_adamw_(...)           ->  p', g', ... = aten._fused_adamw.default(...)

Invariant: the result is cast and laid out as the tensor it is written to, exactly as eager rounds.
Refusal: an op that has no functional form among the overloads of its own and the `_functional` packet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from functionalize.errors import UnsupportedOpError


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """How to call an op's functional counterpart.

    written: (position or None, name) of every argument the op writes, in schema order.
    dropped: whether the written arguments are not passed on (`out=`).
    results: index in the counterpart's returns of each written argument's new contents.
    fills_dtype / fills_device: the counterpart must be told what `out` decided.
    """

    target: Any
    written: tuple[tuple[int | None, str], ...]
    dropped: bool
    returned: tuple[int | None, ...]
    results: tuple[int, ...]
    single: bool
    fills_dtype: bool
    fills_device: bool


def is_mutating(target: Any) -> bool:
    """Whether the schema of `target` marks any argument as written."""
    return bool(_written(target))


@cache
def _written(target: Any) -> tuple[tuple[int | None, str], ...]:
    found: list[tuple[int | None, str]] = []
    for i, a in enumerate(target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found.append((None if a.kwarg_only else i, a.name))
    return tuple(found)


@cache
def written_arguments(target: Any) -> tuple[tuple[int | None, str], ...]:
    """(position or None, name) of every argument that the schema of `target` marks as written."""
    return _written(target)


def _signature(arguments: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in arguments]


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _packets(target: Any) -> list[Any]:
    namespace, name = target._schema.name.split("::")
    ops = getattr(torch.ops, namespace)
    names = [name]
    if name.endswith("_") and not name.endswith("__"):
        names.append(name[:-1])
    if name.startswith("__i") and name.endswith("__"):
        names.append("__" + name[3:])
    names += [f"{n}_functional" for n in names] + [f"{n}_copy" for n in names]
    return [getattr(ops, n) for n in names if hasattr(ops, n)]


def _overloads(target: Any) -> list[Any]:
    same = target._overloadname
    found = [getattr(p, o) for p in _packets(target) for o in p.overloads()]
    found.sort(key=lambda o: o._overloadname != same)
    return [o for o in found if not _written(o) and o._schema.returns]


@cache
def functional_form(target: Any) -> FunctionalForm:
    """The functional counterpart of a mutating op; raises `UnsupportedOpError` if it has none."""
    schema = target._schema
    written = _written(target)
    kept = _signature([a for a in schema.arguments if not _is_write(a)])
    whole = _signature(schema.arguments)
    keyword_out = all(position is None for position, _ in written)
    for candidate in _overloads(target):
        theirs = _signature(candidate._schema.arguments)
        if not keyword_out and theirs == whole:
            return _form(target, candidate, written, dropped=False, extra=())
        extra = _only_factory_arguments(theirs, kept)
        if extra is not None:
            returns = len(candidate._schema.returns)
            if returns == len(written) or (returns == 1 and len(written) == 1):
                return _form(target, candidate, written, dropped=True, extra=extra)
    raise UnsupportedOpError(
        f"writes {', '.join(f'`{name}`' for _, name in written)} and has no functional form: "
        "use an op that returns its result, or give it one with torch.library"
    )


def _only_factory_arguments(
    theirs: list[tuple[str, str, bool]], kept: list[tuple[str, str, bool]]
) -> tuple[str, ...] | None:
    """The names by which `theirs` exceeds `kept`, if those are only what a factory function adds."""
    added = [a for a in theirs if a not in kept]
    if [a for a in theirs if a in kept] != kept:
        return None
    names = tuple(name for name, _, _ in added)
    factory = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    return names if factory.issuperset(names) else None


def _form(
    target: Any,
    candidate: Any,
    written: tuple[tuple[int | None, str], ...],
    dropped: bool,
    extra: tuple[str, ...],
) -> FunctionalForm:
    returns = target._schema.returns
    theirs = candidate._schema.returns
    plain = [i for i, r in enumerate(returns) if r.alias_info is None]
    first = 0 if dropped else len(theirs) - len(written)
    if first < 0 or (not dropped and len(plain) != first):
        first = 0
    has_dtype = any(a.name == "dtype" for a in candidate._schema.arguments)
    returned: list[int | None] = [
        plain.index(i) if i in plain and first else None for i in range(len(returns))
    ]
    return FunctionalForm(
        target=candidate,
        written=written,
        dropped=dropped,
        returned=tuple(returned),
        results=tuple(range(first, first + len(written))),
        single=len(theirs) == 1,
        fills_dtype=dropped and has_dtype,
        fills_device="device" in extra,
    )
