"""The parts of a bound method: of an object of a library, only the attributes that the method reads or writes.

    trainer.forward_backward      def forward_backward(self, batch): return self.loss_fn(self.model(batch))
    method_parts(...)             the code, `self.loss_fn` and `self.model`; not `self.step`, which the Trainer counts

The attributes are read from the bytecode: every use of `self` is followed by the name of an attribute. What the methods
and properties among them use counts, too.
Invariant: what is not understood is the whole object: `self` that is passed on, stored or seen by a nested function,
`super()`, names found by data, class methods, other descriptors, objects of the user, modules, optimizers.
"""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

import torch

from functionalize.util.packages import is_users
from functionalize.walk.code_names import NameFilter
from functionalize.walk.parts import SAME, Part, Parts, attribute

_OF_FRAMES = frozenset({"super", "locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})
_WHOLE = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, type, types.ModuleType)
_OURS = ("torch", "functionalize")


WHOLE = "method"  # the fact about a method all attributes of whose object count


def method_parts(method: types.MethodType, names: NameFilter) -> Parts:
    """The parts of a bound method."""
    function, owner = method.__func__, method.__self__
    if not names.is_dynamic and type(function) is types.FunctionType and _is_of_library(owner):
        held = _parts(function, owner)
        if held is not None:
            fact = ("method of", type(owner), tuple(part.key for part in held))
            return Parts(fact, [Part(SAME, function), *held])
    return Parts(WHOLE, [Part(SAME, function), Part("self", owner)])


def _is_of_library(owner: Any) -> bool:
    kind = type(owner)
    if issubclass(kind, _WHOLE) or kind.__module__.partition(".")[0] in _OURS:
        return False
    if any(is_users(base.__module__) for base in kind.__mro__):
        return False
    plain = type.__getattribute__(kind, "__getattribute__") is object.__getattribute__
    return plain and isinstance(getattr(owner, "__dict__", None), dict)


def _parts(function: types.FunctionType, owner: Any) -> list[Part] | None:
    """A part for each attribute that the function, or a method or property that it uses, reads or writes."""
    table, held = object.__getattribute__(owner, "__dict__"), dict[str, Part]()
    todo, done = [function], {function}
    while todo:
        used = attributes_of_self(todo.pop().__code__)
        if used is None:
            return None
        for name in sorted(used - held.keys()):
            of_class: Any = next(
                (vars(k)[name] for k in type(owner).__mro__ if name in vars(k)), None
            )
            kind = type(of_class)
            if kind is property:
                inner = [of_class.fget, of_class.fset, of_class.fdel]
            elif hasattr(kind, "__set__"):
                return None
            elif name in table:
                held[name] = attribute(table, name)
                continue
            elif of_class is None and hasattr(type(owner), "__getattr__"):
                return None
            else:
                inner = [of_class]
            inner = [each for each in inner if each is not None]
            if any(type(each) is not types.FunctionType for each in inner):
                return None
            held[name] = Part(name, of_class, name)
            todo += [each for each in inner if each not in done]
            done |= set(inner)
    return list(held.values())


@functools.lru_cache(maxsize=4096)
def attributes_of_self(code: types.CodeType) -> frozenset[str] | None:
    """The attributes of its first parameter that a function uses; None: it may use the object in another way."""
    if not code.co_argcount or not _OF_FRAMES.isdisjoint(code.co_names):
        return None
    self = code.co_varnames[0]
    if self in code.co_cellvars:
        return None
    steps = [each for each in dis.get_instructions(code) if each.opname not in _BETWEEN]
    found = set()
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step.argval, tuple) and self in step.argval:  # two variables at once
            return None
        if step.argval != self or step.opname == "LOAD_CONST" or step.opname in _ATTRIBUTE:
            continue
        loads = step.opname.startswith("LOAD_FAST")
        if not loads or then is None or then.opname not in _ATTRIBUTE:
            return None
        found.add(str(then.argval))
    return frozenset(found)
