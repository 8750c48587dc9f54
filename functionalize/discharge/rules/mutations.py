"""In-place, `out=` and other mutating overloads, found by schema.

    aten.add_.Tensor(x, y)            ->  x' = aten.add.Tensor(x, y)
    aten.mm.out(x, y, out=o)          ->  o' = aten.mm.default(x, y)
    aten._fused_adamw_(...)           ->  p', g', ... = aten._fused_adamw.default(...)

Invariant: the result is cast to the dtype and strides of the tensor that it is written to, and rounded as in eager.
Refusal: an op without a functional form among the overloads of its own, the `_functional` and the `_copy` packets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.errors import UnsupportedOpError
from functionalize.util.by_address import by_address


@dataclass(frozen=True, slots=True)
class FunctionalForm:
    """How to call an op's functional counterpart.

    target: the counterpart.
    written: (position or None, name) of every argument the op writes, in schema order.
    dropped: whether the written arguments are not passed to the counterpart (`out=`).
    returned: for each return of the op, its index in the counterpart's returns; None if it is a written argument.
    results: for each written argument, the index of its new contents in the counterpart's returns.
    single: whether the counterpart returns one tensor (or list).
    order: for each positional argument of the counterpart, its position in the op; () if all are the same.
    defaults: (position, value) of arguments for which only the op has a default (`bernoulli_`).
    fills_dtype, fills_device: whether the counterpart needs the dtype or device of `out` as an argument.
    """

    target: Any
    written: tuple[tuple[int | None, str], ...]
    dropped: bool
    returned: tuple[int | None, ...]
    results: tuple[int, ...]
    single: bool
    order: tuple[int, ...]
    defaults: tuple[tuple[int, Any], ...]
    fills_dtype: bool
    fills_device: bool

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The positional arguments of the op, as those of its counterpart."""
        for at, value in self.defaults:
            if len(args) == at:
                args = (*args, value)
        return tuple(args[i] for i in self.order) if self.order else args


def is_mutating(target: Any) -> bool:
    """Whether the schema of `target` marks any argument as written."""
    return bool(_written(target))


@by_address
def _written(target: Any) -> tuple[tuple[int | None, str], ...]:
    found: list[tuple[int | None, str]] = []
    for i, a in enumerate(target._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            found.append((None if a.kwarg_only else i, a.name))
    return tuple(found)


@by_address
def written_arguments(target: Any) -> tuple[tuple[int | None, str], ...]:
    """(position or None, name) of every argument that the schema of `target` marks as written."""
    return _written(target)


def leaves_gradients(target: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a fused optimizer step without `grad_scale`: it leaves the gradients as they are.

    Its schema says that it writes them, which it does only to unscale them.
    """
    return _may_unscale(target) and kwargs.get("grad_scale") is None


@by_address
def _may_unscale(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::_fused_"):
        return False
    # `_fused_rms_norm` and others are no optimizers.
    return any(argument.name == "grad_scale" for argument in schema.arguments)


def expands(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Whether a tensor of size `have` broadcasts to `want`."""
    if have == want:
        return True
    pairs = zip(reversed(have), reversed(want), strict=False)
    return len(have) <= len(want) and all(h in (1, w) for h, w in pairs)


def _signature(arguments: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in arguments]


def _is_write(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _packets(target: Any) -> list[Any]:
    """The op packets that may hold a counterpart: `add_` -> `add_`, `add`, `add_functional`, `add_copy`, ..."""
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
    """The functional overloads of these packets, those with the overload name of `target` first."""
    same = target._overloadname
    found = [getattr(p, o) for p in _packets(target) for o in p.overloads()]
    found.sort(key=lambda o: o._overloadname != same)
    return [o for o in found if not _written(o) and o._schema.returns]


@by_address
def functional_form(target: Any) -> FunctionalForm:
    """The functional counterpart of a mutating op; raises `UnsupportedOpError` if it has none."""
    schema = target._schema
    written = _written(target)
    kept = _signature([a for a in schema.arguments if not _is_write(a)])
    whole = _signature(schema.arguments)
    keyword_out = all(position is None for position, _ in written)
    for candidate in _overloads(target):
        theirs = _signature(candidate._schema.arguments)
        if not keyword_out and sorted(theirs) == sorted(whole):
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


@by_address
def inplace_form(target: Any) -> tuple[Any, FunctionalForm] | None:
    """The op that writes the result of `target` to one of its arguments, with its functional form; None: no such op."""
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}_", None)
    found = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    found.sort(key=lambda o: o._overloadname != target._overloadname)
    for candidate in filter(is_mutating, found):
        try:
            form = functional_form(candidate)
        except UnsupportedOpError:
            continue
        alone = all(at is None for at in form.returned)  # it returns only the tensors that it wrote
        if form.target is target and alone and not (form.dropped or form.order or form.defaults):
            return candidate, form
    return None


def _only_factory_arguments(
    theirs: list[tuple[str, str, bool]], kept: list[tuple[str, str, bool]]
) -> tuple[str, ...] | None:
    """The names of the arguments in `theirs` beside `kept`, if a factory function adds all of them; else None."""
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
    # The counterpart of an op that returns other tensors too returns these first, then the new contents.
    first = 0 if dropped else len(theirs) - len(written)
    if first < 0 or (not dropped and len(plain) != first):
        first = 0
    ours = [a for a in target._schema.arguments if not (dropped and _is_write(a))]
    has_dtype = any(a.name == "dtype" and a.kwarg_only for a in candidate._schema.arguments)
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
        order=_order(ours, candidate._schema.arguments),
        defaults=_defaults(ours, candidate._schema.arguments),
        fills_dtype=dropped and has_dtype,
        fills_device="device" in extra,
    )


def _order(ours: list[Any], theirs: list[Any]) -> tuple[int, ...]:
    names = [a.name for a in ours if not a.kwarg_only]
    order = tuple(names.index(a.name) for a in theirs if a.name in names)
    return () if order == tuple(range(len(names))) else order


def _defaults(ours: list[Any], theirs: list[Any]) -> tuple[tuple[int, Any], ...]:
    needed = {a.name for a in theirs if not a.has_default_value()}
    return tuple(
        (at, a.default_value)
        for at, a in enumerate(ours)
        if a.name in needed and a.has_default_value() and not a.kwarg_only
    )
