"""The values of a record in a file against the annotations of its class.

    checked(InputView, (0, geometry))       (0, geometry)
    checked(InputView, ("0", geometry))     LoadError: it has an InputView whose `input` is no int

Invariant: every annotation that can be evaluated is checked, containers part by part. A protocol is fulfilled by an
object whose class has its methods, one of ours by an object of ours alone (a file names objects of the user's, too); an
annotation of another kind (a type variable, a name imported for type checkers only) allows everything.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from functionalize.errors import LoadError
from functionalize.util.annotations import annotations_of

Check = Callable[[Any], bool]
_OURS = "functionalize."


def checked(kind: Any, values: Sequence[Any]) -> Sequence[Any]:
    """`values`, if they are of the types that the fields of `kind` declare; raises `LoadError`."""
    declared = _checks(kind)
    if len(values) != len(declared):
        raise LoadError(f"has a {kind.__name__} of {len(values)} fields: damaged")
    for value, (name, check) in zip(values, declared, strict=True):
        if not check(value):
            raise _damaged(kind, name, value)
    return values


def fields_checked(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Some fields of `kind` by name, if they are of the declared types; raises `LoadError`."""
    declared = dict(_checks(kind))
    for name, value in values.items():
        if not declared[name](value):
            raise _damaged(kind, name, value)
    return dict(values)


def _damaged(kind: Any, name: str, value: Any) -> LoadError:
    return LoadError(f"has a {kind.__name__} whose `{name}` is a {type(value).__name__}: damaged")


@cache
def _checks(kind: Any) -> tuple[tuple[str, Check], ...]:
    is_tuple = issubclass(kind, tuple)
    names = list(kind._fields) if is_tuple else [f.name for f in dataclasses.fields(kind)]
    space = vars(sys.modules[kind.__module__])
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        found |= annotations_of(each)
    if not found and hasattr(kind, "__annotations__"):
        found = dict(kind.__annotations__)
    return tuple((name, _check(_evaluated(found.get(name), space))) for name in names)


def _evaluated(annotation: Any, space: dict[str, Any]) -> Any:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if not isinstance(annotation, str):
        return Any if annotation is None else annotation
    try:
        return eval(annotation, dict(space))  # of our own classes' source, never of a file
    except Exception:  # a name that is imported for type checkers only
        return Any


def _check(annotation: Any) -> Check:
    """Whether a value is of the annotated type."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return lambda value: value is None
    if origin is typing.Union or isinstance(annotation, types.UnionType):
        checks = [_check(part) for part in parts]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        return _tuple_check(parts)
    if origin in (list, set, frozenset, collections.abc.Sequence, collections.abc.Iterable):
        kinds = (list, tuple) if origin not in (list, set, frozenset) else (origin,)
        each = _check(parts[0])
        return lambda value: isinstance(value, kinds) and all(map(each, value))
    if origin in (dict, collections.abc.Mapping):
        key, content = map(_check, parts)
        return lambda value: (
            isinstance(value, dict)
            and all(map(key, value.keys()))
            and all(map(content, value.values()))
        )
    if origin is type or annotation is type:
        return lambda value: isinstance(value, type)
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return callable
    if origin is typing.Literal:
        return lambda value: value in parts
    if annotation in (Any, object) or not isinstance(annotation, type):
        return lambda value: True
    if getattr(annotation, "_is_protocol", False):
        needed = [n for n, _ in inspect.getmembers(annotation, callable) if not n.startswith("_")]
        is_ours = annotation.__module__.startswith(_OURS)
        return lambda value: (
            all(hasattr(type(value), name) for name in needed)
            and (not is_ours or type(value).__module__.startswith(_OURS))
        )
    if annotation is float:
        return lambda value: isinstance(value, (int, float))
    if annotation is int:
        return lambda value: type(value) is int
    return lambda value: isinstance(value, annotation)


def _tuple_check(parts: Sequence[Any]) -> Check:
    if len(parts) == 2 and parts[1] is Ellipsis:
        each = _check(parts[0])
        return lambda value: isinstance(value, tuple) and all(map(each, value))
    if parts == ((),):
        return lambda value: value == ()
    checks = [_check(part) for part in parts]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(checks)
        and all(check(part) for check, part in zip(checks, value, strict=True))
    )
