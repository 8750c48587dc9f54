"""The annotations of a class or a function, as far as they can be evaluated, without its bases'.

Up to Python 3.13 they were evaluated when it was defined. Since then a function of its own evaluates them when somebody
asks; a name that is imported for type checkers only is a `ForwardRef`. To ask here leaves no trace in the object.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any


def annotations_of(value: Any) -> Mapping[str, Any]:
    """Types, or texts, by the names of attributes or parameters."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(value, format=annotationlib.Format.FORWARDREF)
    if isinstance(value, type):
        found: Mapping[str, Any] = vars(value).get("__annotations__", {})
        return found
    of_function: Mapping[str, Any] = value.__annotations__
    return of_function


Place = tuple[
    str, int
]  # of the function that evaluates annotations: its qualified name and its first line


def evaluated_in(scope: dict[str, Any]) -> Iterator[Place]:
    """Evaluate the annotations of a module and of its functions and classes, which keep them: the places of these.

    Since Python 3.14. Those that cannot be evaluated, and those of what nothing in the module leads to, are left out.
    """
    name = scope.get("__name__")
    todo: list[Any] = [sys.modules.get(str(name)), *scope.values()]
    done: set[int] = set()
    while todo:
        value = todo.pop()
        value = (
            getattr(value, "__func__", value)
            if isinstance(value, (classmethod, staticmethod))
            else value
        )
        if isinstance(value, property):
            todo += [value.fget, value.fset, value.fdel]
        is_own_class = isinstance(value, type) and value.__module__ == name
        is_own_module = isinstance(value, ModuleType) and vars(value) is scope
        if not (is_own_class or is_own_module or type(value) is FunctionType) or id(value) in done:
            continue
        done.add(id(value))
        table = vars(value)
        todo += table.values() if is_own_class else [table.get("__wrapped__")]
        annotate = getattr(value, "__annotate__", None)
        if type(annotate) is not FunctionType or annotate.__globals__ is not scope:
            continue
        try:
            _ = value.__annotations__
        except Exception:  # a name that is imported for type checkers only
            continue
        yield annotate.__code__.co_qualname, annotate.__code__.co_firstlineno
