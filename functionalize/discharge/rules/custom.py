"""Mutating ops of `torch.library` without a functional form: torch's own wrapper makes one.

    mylib.scale_(x, 2.0)     ->  _, x' = auto_functionalized(mylib.scale_.default, x=x, factor=2.0)

The wrapper clones the arguments that the op writes, calls the op, and returns its outputs, then the clones. Inductor
runs it without the clones where the old contents are not used again.
Refusal: what `can_auto_functionalize` refuses, such as an op that returns an alias of an argument.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from functionalize._compat.dispatch import auto_functionalized, can_auto_functionalize
from functionalize.discharge.rules.mutations import functional_form, written_arguments
from functionalize.discharge.rules.registry import Engine
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import OpRecord, TensorRef, map_refs, refs_in


@cache
def needs_wrapper(target: Any) -> bool:
    """Whether a mutating op has no functional form, and torch's wrapper accepts it."""
    if not can_auto_functionalize(target):
        return False
    try:
        functional_form(target)
    except UnsupportedOpError:
        return True
    return False


def wrapped(engine: Engine, record: OpRecord) -> Any:
    """Emit the wrapper around a mutating custom op and write the clones that it returns to the op's arguments."""
    schema = record.target._schema
    parameters = [a.name for a in schema.arguments]
    arguments = {**dict(zip(parameters, record.args, strict=False)), **record.kwargs}
    for a in schema.arguments:
        if a.name not in arguments:
            arguments[a.name] = a.default_value
    names = [name for _, name in written_arguments(record.target)]
    written = [arguments[name] for name in names]
    for ref in refs_in(written):
        engine.storage(ref.storage).check_writable(ref.geometry)
    _check_disjoint(
        [(ref, name in names) for name, arg in arguments.items() for ref in refs_in(arg)]
    )

    def value_of(ref: TensorRef) -> Any:
        storage = engine.storage(ref.storage)
        if storage.valid.spans:
            return engine.read(ref)
        return engine.emit.empty(ref.geometry, storage.device)

    values = {
        name: map_refs(value_of if name in names else engine.read, arg)
        for name, arg in arguments.items()
    }
    out = engine.emit.call(auto_functionalized, record.target, **values)
    returned = max(len(schema.returns), 1)
    for i, arg in enumerate(written, returned):
        part = engine.part(out, i) if arg is not None else None
        if type(arg) is TensorRef:
            engine.write(arg, part)
        elif arg is not None:
            for j, ref in enumerate(arg):
                engine.write(ref, engine.part(part, j))
    values_out = [
        engine.part(out, i) if r.alias_info is None else None for i, r in enumerate(schema.returns)
    ]
    return values_out[0] if len(values_out) == 1 else values_out


def _check_disjoint(refs: list[tuple[TensorRef, bool]]) -> None:
    """Raise if a written argument (True) overlaps another one: the wrapper passes the op a separate clone of it."""
    for at, (ref, is_written) in enumerate(refs):
        g = ref.geometry
        for i, (other, _) in enumerate(refs if is_written else ()):
            if i != at and other.storage == ref.storage:
                h = other.geometry
                if max(g.start, h.start) < min(g.end, h.end):
                    raise UnsupportedOpError(
                        f"writes an argument ({g}) that overlaps another one ({h}), and has no functional "
                        "form that could see the write: clone() one of them"
                    )
