"""Copies and pickles of a captured step: the callable is copied as in eager, programs are not.

    copy.deepcopy(trainer)           its step is a captured step of the copied trainer's method, with the same options
    pickle.dumps(trainer)            as above; fails where pickling the callable fails, with its error
    torch.save(trainer, path)        as `pickle`

A step that its module or class holds under its own name (`@capture`) is copied and pickled as functions are: by name.
The step that `@capture` on a method made for one trainer becomes that of the copied trainer.
Where an order matters: the copy exists before what its callable refers to is copied, because a trainer that holds the
step may be among it.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import types
from typing import Any

from functionalize.step.options import CaptureOptions
from functionalize.util.own_values import held_value

_ABSENT = object()
# The callable, or an object and the name of its method; the options; the kind; the attributes that a script has set.
State = tuple[Any, str | None, CaptureOptions, Any, dict[str, Any]]


def copied(step: Any) -> Any:
    """What `copy.copy` of a captured step gives."""
    if _name_of(step) is not None:
        return step
    new = step.like(step.callable)
    vars(new).update(_set_by_script(step))
    return new


def deep_copied(step: Any, memo: dict[int, Any]) -> Any:
    """What `copy.deepcopy` gives."""
    if _name_of(step) is not None:
        return step
    of = _attribute_of(step)
    if of is not None:
        return getattr(copy.deepcopy(of[0], memo), of[1])
    new = memo[id(step)] = object.__new__(type(step))
    new.__setstate__((copy.deepcopy(step.callable, memo), None, *_made_with(step), {}))
    vars(new).update(copy.deepcopy(_set_by_script(step), memo))
    return new


def reduced(step: Any) -> Any:
    """What pickling writes of a captured step: its name, the object that holds it, or its `State`."""
    name, of = _name_of(step), _attribute_of(step)
    if name is not None:
        return name
    if of is not None:
        return getattr, of
    method = _method(step.callable)
    callable_ = (step.callable, None) if method is None else method
    state = (*callable_, *_made_with(step), _set_by_script(step))
    return copyreg.__newobj__, (type(step),), state  # type: ignore[attr-defined]


def set_state(step: Any, state: State) -> None:
    """Begin as a new captured step."""
    owner, name, options, kind, attributes = state
    method = owner if name is None else getattr(type(owner), name).__get__(owner)
    type(step).__init__(step, method, options, kind)
    vars(step).update(attributes)


def _made_with(step: Any) -> tuple[CaptureOptions, Any]:
    """The options and the kind of a step."""
    return step.core.options, step._kind


def _name_of(step: Any) -> str | None:
    """The name under which the module of a step holds it, as pickling looks up functions; None: it holds it not."""
    found = sys.modules.get(getattr(step, "__module__", ""))
    name: str = getattr(step, "__qualname__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is step else None


def _attribute_of(step: Any) -> tuple[Any, str] | None:
    """The object whose attribute makes this step, as `@capture` on a method does, and the attribute; None: none."""
    owner, name = getattr(step.callable, "__self__", None), getattr(step.callable, "__name__", "")
    if owner is None or held_value(owner, step) is None:
        return None
    return (owner, name) if getattr(owner, name, None) is step else None


def _method(method: Any) -> tuple[Any, str] | None:
    """The object of a bound method and the method's name in its class, where pickling asks for the object's attribute.

    The object may hold this very step under that name (`model.forward = capture(model.forward)`).
    """
    if type(method) is not types.MethodType or isinstance(method.__self__, type):
        return None
    name = method.__func__.__name__
    found = getattr(type(method.__self__), name, None)
    return (method.__self__, name) if found is method.__func__ else None


def _set_by_script(step: Any) -> dict[str, Any]:
    """The attributes that a script has set on a step."""
    known = vars(step.like(_nothing)).keys()
    of_callable = getattr(step.callable, "__dict__", {})
    return {
        key: value
        for key, value in vars(step).items()
        if not key.startswith("_") and key not in known
        if of_callable.get(key, _ABSENT) is not value
    }


def _nothing() -> None:
    """Stands for a callable."""
