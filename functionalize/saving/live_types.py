"""The types and the namespaces of custom ops that a live step names, which its file may therefore name as well.

    LiveTypes.of(Names(state), step)       {Output, Batch, ...}, {"mylib"}

Types are those that the code of the step names: as a global or an attribute of a module that is a global, in its
annotations and in those of its dataclasses; in the methods of the modules that it reaches, a library's too; and the
types of the objects that it reaches. An op is named by its function (`torch.library.custom_op`), or as
`torch.ops.mylib.fused`.
Invariant: everything is read from objects that are there; nothing is looked up by a name of a file.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from functionalize._compat.dispatch import all_op_names
from functionalize.saving.object_names import Names
from functionalize.util.annotations import annotations_of
from functionalize.util.packages import is_users
from functionalize.walk.code_names import codes_of

_WORD = re.compile(r"[^\W\d]\w*")
_OURS = ("torch", "functionalize", "builtins")


@dataclass(frozen=True, slots=True)
class LiveTypes:
    """types: classes. namespaces: of custom ops."""

    types: frozenset[type]
    namespaces: frozenset[str]

    @staticmethod
    def of(names: Names, fn: Callable[..., Any]) -> LiveTypes:
        """What the step `fn` names."""
        found = _Named()
        for function in names.roots.functions:
            found.add_function(function)
        found.add_value(getattr(fn, "__func__", fn))
        for value in names.objects():
            found.add_object(value)
        return LiveTypes(frozenset(found.types), frozenset(found.namespaces))


class _Named:
    def __init__(self) -> None:
        self.types: dict[type, None] = {}
        self.namespaces: dict[str, None] = {}
        self._done: set[int] = set()

    def add_object(self, value: Any) -> None:
        """The types of an object of the step and of what it holds; of a module, also what its methods name."""
        kind = type(value)
        if kind is dict:
            for each in value.values():
                self._add_type(type(each))
            return
        self._add_type(kind)
        for each in getattr(value, "__dict__", {}).values():
            self._add_type(type(each))
        if isinstance(value, nn.Module):
            for tensor in (*value._parameters.values(), *value._buffers.values()):
                self._add_type(type(tensor))
            for base in kind.__mro__:
                if base.__module__.partition(".")[0] not in _OURS:
                    for each in vars(base).values():
                        self.add_value(each)

    def add_value(self, value: Any) -> None:
        """What a global, an enclosed variable or a method is."""
        if isinstance(value, type):
            self._add_type(value)
            return
        for _ in range(16):  # decorators
            if isinstance(value, types.FunctionType):
                self.add_function(value)
            value = getattr(value, "__wrapped__", None)
            if value is None:
                return

    def add_function(self, function: types.FunctionType) -> None:
        """What the code of a function names."""
        if id(function) in self._done:
            return
        self._done.add(id(function))
        space, users = function.__globals__, is_users(function.__module__)
        words: dict[str, None] = {}
        for code in codes_of(function.__code__):
            words |= dict.fromkeys(code.co_names)
        self._add_words(words, space, users)
        self._add_annotations(annotations_of(function), space)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if isinstance(content, (type, types.FunctionType)):
                self.add_value(content)
            self._add_op(content)
        if "ops" in words:
            self.namespaces |= {word: None for word in words if word in _namespaces()}

    def _add_words(self, words: Iterable[str], space: dict[str, Any], users: bool) -> None:
        for word in words:
            value = space.get(word)
            if isinstance(value, type):
                self._add_type(value)
            elif isinstance(value, types.ModuleType):
                for other in words:
                    inner = vars(value).get(other)
                    if isinstance(inner, type):
                        self._add_type(inner)
                    self._add_op(inner)
            elif users and isinstance(value, types.FunctionType):
                self.add_value(value)
            self._add_op(value)

    def _add_annotations(self, annotations: Any, space: dict[str, Any]) -> None:
        for each in annotations.values():
            if isinstance(each, str):
                found: Iterator[Any] = (space.get(word) for word in _WORD.findall(each))
            else:
                found = iter((each, *getattr(each, "__args__", ())))
            for kind in found:
                if isinstance(kind, type):
                    self._add_type(kind)

    def _add_op(self, value: Any) -> None:
        # Of a function that `torch.library.custom_op` made.
        name = getattr(value, "_qualname", None)
        if isinstance(name, str) and "::" in name and type(value).__module__.startswith("torch."):
            self.namespaces[name.partition("::")[0]] = None

    def _add_type(self, kind: type) -> None:
        if kind in self.types or not isinstance(kind, type):
            return
        self.types[kind] = None
        if not is_users(kind.__module__) and not dataclasses.is_dataclass(kind):
            return
        if issubclass(kind, (nn.Module, enum.Enum)):
            return
        space = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        for base in kind.__mro__:
            self._add_annotations(annotations_of(base), space)
            if is_users(base.__module__):
                for each in list(vars(base).values()):
                    self.add_value(each)


def _namespaces() -> frozenset[str]:
    """The namespaces of ops that this process has."""
    return frozenset(name.partition("::")[0] for name in all_op_names())
