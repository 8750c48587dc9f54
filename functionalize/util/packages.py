"""Where code comes from: the standard library, an installed package, or the user.

is_users("train")                   by the name of a module
is_users_function(step)             by the namespace in which it was defined: `functools.wraps` gives a function the
                                    name of another one's module
is_users_class(Meter)               by the name of its module, unless that cannot be: code that is run by `exec` in a
                                    dict without a name makes classes of "builtins"
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from typing import Any

from functionalize.util.by_class import by_class
from functionalize.util.code_objects import is_generated

_STDLIB = sysconfig.get_path("stdlib") + os.sep


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether a Python module is the user's: not of the standard library, not installed, not this package."""
    if module is not None and type(module) is not str:  # a class may have a descriptor there
        return False
    package = (module or "").partition(".")[0]
    return (
        not is_standard(package)
        and package not in ("torch", "functionalize")
        and not is_installed(module)
    )


@by_class
def has_own_equality(kind: type) -> bool:
    """Whether `==` of two objects of a class runs code of the user's, other than what `dataclasses` makes."""
    found = next((vars(each)["__eq__"] for each in kind.__mro__ if "__eq__" in vars(each)), None)
    if type(found) is not types.FunctionType:
        return type(found) is not types.WrapperDescriptorType
    return is_users_function(found) and not is_generated(found.__code__)


@by_class
def compares_classes(metaclass: type) -> bool:
    """Whether classes of a metaclass are compared or hashed by code of the user's."""
    found = (vars(each).get(name) for each in metaclass.__mro__ for name in ("__eq__", "__hash__"))
    return any(isinstance(each, types.FunctionType) and is_users_function(each) for each in found)


def is_users_function(function: types.FunctionType) -> bool:
    """Whether the code of a function is the user's, whatever module it says that it is of."""
    return _is_users_namespace(function.__globals__)


def _is_users_namespace(space: dict[str, Any]) -> bool:
    name = space.get("__name__")
    if type(name) is not str:
        return True
    if is_users(name):
        return True
    found = sys.modules.get(name)
    if found is None or vars(found) is not space:  # it may have put another object in its place
        file = space.get("__file__")
        return not (type(file) is str and (is_installed_file(file) or is_standard_file(file)))
    return False


@by_class
def is_users_class(kind: type) -> bool:
    """Whether a class is the user's."""
    if is_users(kind.__module__):
        return True
    if not kind.__flags__ & _MADE_BY_CODE or kind.__flags__ & _OF_C:
        return False
    if kind.__module__ in _OF_NO_MODULE:
        return vars(sys.modules[kind.__module__]).get(kind.__name__) is not kind
    spaces = [f.__globals__ for each in list(vars(kind).values()) if (f := _function_of(each))]
    if any(_is_users_namespace(s) for s in spaces if not _is_of_module(s)):
        return True
    return bool(spaces) and all(
        map(_is_users_namespace, spaces)
    )  # its module is a name that it was given


def _function_of(value: Any) -> types.FunctionType | None:
    """The function in what a class holds: below decorators."""
    for name in ("__func__", "fget"):
        value = getattr(value, name, value) if isinstance(value, _METHODS) else value
    while type(value) is types.FunctionType and type(value.__dict__.get("__wrapped__")) is (
        types.FunctionType
    ):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value if type(value) is types.FunctionType else None


def _is_of_module(space: dict[str, Any]) -> bool:
    """Whether a namespace is that of the module that it names. Those of a library may hold functions of scripts."""
    name = space.get("__name__")
    found = sys.modules.get(name) if type(name) is str else None
    return found is not None and vars(found) is space


_METHODS = (staticmethod, classmethod, property)
_MADE_BY_CODE, _OF_C = 1 << 9, 1 << 8  # flags of types: on the heap, and immutable
_OF_NO_MODULE = ("builtins", "types")  # of code in a dict without a name, and `make_dataclass`


@functools.cache
def is_installed(module: str | None) -> bool:
    """Whether a Python module belongs to an installed package and is not the user's own code."""
    return is_installed_file(getattr(sys.modules.get(module or ""), "__file__", None) or "")


def is_installed_file(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def is_standard_file(file: str) -> bool:
    """Whether a file belongs to Python's standard library."""
    return file.startswith(_STDLIB) and not is_installed_file(file)


def is_standard(package: str) -> bool:
    """Whether a package belongs to Python's standard library."""
    return package in sys.stdlib_module_names and package != "__main__"


def home_of(module: str) -> str:
    """The name by which other processes know a module: a script is `__main__` here, `__mp_main__` in processes that
    it spawns, and has its own name where it is imported."""
    if module not in ("__main__", "__mp_main__"):
        return module
    found = sys.modules.get(module)
    spec = getattr(found, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        return str(spec.name)
    file = getattr(found, "__file__", None)
    if not file:  # an interactive session
        return "__main__"
    return os.path.splitext(os.path.basename(file))[0]
