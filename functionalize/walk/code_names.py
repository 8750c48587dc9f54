"""The names that code may read: globals, attributes, and whether it finds attributes by data.

    names_in(step.__code__)       CodeNames({"model", "config", "scale"}, is_dynamic=False)
    vars(args)["scale"]           is_dynamic: any attribute may be read
    getattr(args, "scale", 1.0)   the constant is a name
    getattr(args, key)            is_dynamic

An attribute whose name is in no code of the step cannot be read by it, and is left out of the guards.
Invariant: where the bytecode is not understood, the answer is `is_dynamic`.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from functionalize.util.bytecode import ENDS, Step, read

# Code that names one of these may read an attribute whose name is data.
_DYNAMIC = frozenset(
    {"vars", "__dict__", "asdict", "astuple", "fields", "attrgetter", "methodcaller", "globals", "eval", "exec"}
    | {"dir", "__getattribute__", "getmembers", "getmembers_static", "pickle", "__getstate__", "__reduce_ex__"}
    | {"getattr_static"}
)  # fmt: skip
_ALL_GLOBALS = frozenset({"globals", "exec"})  # code that names them may read any
_BY_CONSTANT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
# Which argument names the attribute: `object.__setattr__(self, "scale", 1.0)`, `super().__setattr__("scale", 1.0)`.
_NAMING = {**dict.fromkeys(_BY_CONSTANT, 1), "__setattr__": -2, "__delattr__": -1}
_GLOBAL_OPS = frozenset({"global", "name", "set_global", "del_global"})
# Names for the operators that call generated methods of dataclasses; for `==` and `in` of what is no constant.
EQUALITY, TEXT, OBJECTS = "==", "repr()", "== of objects"
COPY = "copy.copy"  # for this function: many objects have a method of its name
_TEXT_NAMES = frozenset({"repr", "str", "format", "print"})
_COMPARING = frozenset({"hash", "sorted", "sort", "min", "max", "index", "count", "remove"})
# Code that names one of these reads state that others read by changing it: generators, iterators, files, queues.
_STATE_READERS = frozenset(
    {
        "getstate",
        "get_state",
        "initial_seed",
        "bit_generator",
        "deepcopy",
        COPY,
        "gi_frame",
        "tee",
        "tell",
    }
    | {"length_hint", "__length_hint__", "getvalue", "getbuffer", "qsize"}
)
# Functions that read attributes or state by data, or settings of the process.
_BY_FUNCTION = _DYNAMIC | _BY_CONSTANT | _STATE_READERS
_IMPORTING = frozenset({"import_module", "__import__"})
_FIELD = re.compile(r"\{[^{}]*\}")
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class CodeNames:
    """The names in some code. is_dynamic: it may read attributes of other names too."""

    names: frozenset[str]
    is_dynamic: bool


@dataclass(slots=True)
class NameFilter:
    """The names that the code found so far may read: `key in names`. codes: this code.

    inherited: by class, the size of the filter and what it was then, with the names in code of bases from libraries.
    observed: by id of the `__dict__` of an object of a library: this, and the attributes that count (`unread.py`).
    steps_optimizers: whether a recording has shown that the code calls an optimizer's `step`, and so its global hooks.
    """

    names: set[Any] = field(default_factory=set)
    is_dynamic: bool = False
    codes: dict[types.CodeType, None] = field(default_factory=dict)
    inherited: dict[type, tuple[Any, Any]] = field(default_factory=dict, compare=False, repr=False)
    steps_optimizers: bool = False
    observed: Mapping[int, tuple[Any, frozenset[str]]] = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return self.is_dynamic or key in self.names

    def add(self, code: types.CodeType) -> None:
        """Add the names of a code object."""
        found = names_in(code)
        self.codes[code] = None
        self.names |= found.names
        self.is_dynamic |= found.is_dynamic

    def add_function(self, function: Any) -> None:
        """Add the name of a function of a library, which code may have under another one: `read = getattr`."""
        name = getattr(function, "__name__", None)
        if name == "copy" and getattr(function, "__module__", None) == "copy":
            self.names.add(COPY)
        elif type(name) is str and name in _BY_FUNCTION:
            self.names.add(name)
            is_method = "." in getattr(function, "__qualname__", name)  # `nn.Module.eval`
            self.is_dynamic |= name in _DYNAMIC | _BY_CONSTANT and not (
                name == "eval" and is_method
            )

    def add_words(self, text: str) -> None:
        """Add all words in a text: names that are data."""
        self.names.update(_WORD.findall(text))

    def add_format(self, text: str) -> None:
        """Add the names in a text for `str.format`: "{0.scale}"."""
        self.names |= names_in_format(text)

    @property
    def reads_state(self) -> bool:
        """Whether code may read state without the change by which others read it."""
        return not _STATE_READERS.isdisjoint(self.names)

    @property
    def size(self) -> tuple[int, bool]:
        """Grows if and only if something was added."""
        return len(self.names), self.is_dynamic

    def copy(self) -> NameFilter:
        """A filter of the same names, to which nothing is added."""
        return NameFilter(
            set(self.names),
            self.is_dynamic,
            dict(self.codes),
            steps_optimizers=self.steps_optimizers,
            observed=self.observed,
        )

    def observed_of(self, table: Any) -> frozenset[str] | None:
        """The attributes of an object with this `__dict__` that count; None: its reads were not observed."""
        found = self.observed.get(id(table)) if self.observed else None
        return None if found is None else found[1]

    def of(self, table: Iterable[Any]) -> list[Any]:
        """The keys of a table that may be read, in its order."""
        return list(table) if self.is_dynamic else [key for key in table if key in self.names]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> CodeNames:
    """The names in a code object and in those nested in it."""
    names: set[str] = set()
    is_dynamic = False
    for each in codes_of(code):
        names.update(each.co_names)
        steps = read(each)
        is_dynamic |= not _DYNAMIC.isdisjoint({*each.co_names} - {"eval"}) or _evaluates(each)
        for step in steps:
            if step.op == "match_class":  # it reads the attributes in `__match_args__`
                is_dynamic = True
            elif step.op in ("compare", "contains"):
                names.add(EQUALITY)
                is_order = step.op == "compare" and "=" not in step.kind
                if not (is_order or _is_number(steps, step.at)):
                    names.add(OBJECTS)
            elif step.op == "format":
                names.add(TEXT)
            elif step.op != "constant" and step.value in _NAMING:
                if step.value == each.co_name:
                    continue  # a method of that name passes on what its caller has named
                name = _constant_name(steps, step)
                is_dynamic |= name is None
                names.update(() if name is None else (name,))
        if not _TEXT_NAMES.isdisjoint(each.co_names):
            names.add(TEXT)
        if not _COMPARING.isdisjoint(each.co_names):
            names.add(EQUALITY)
        for constant in each.co_consts:
            if type(constant) is str:
                names |= names_in_format(constant)
    return CodeNames(frozenset(names), is_dynamic)


def reads_any_global(code: types.CodeType) -> bool:
    """Whether code that finds names by data may find any global of its module."""
    return _evaluates(code) or not _ALL_GLOBALS.isdisjoint(code.co_names)


@functools.lru_cache(maxsize=4096)
def _evaluates(code: types.CodeType) -> bool:
    """Whether code may evaluate a text. `model.eval()` does not: it is a method without arguments."""
    if "eval" not in code.co_names:
        return False
    return any(
        each.value == "eval"
        and each.op != "constant"
        and not (each.op in ("method", "attribute") and _is_call_of_nothing(following))
        for each, following in pairwise(read(code))
    )


def _is_call_of_nothing(step: Step) -> bool:
    return step.op == "call" and step.number == 0


def _constant_name(steps: Sequence[Step], load: Step) -> str | None:
    """The constant argument that names the attribute in a call of what a step loads; None: it may be any."""
    is_loaded = load.op == "name" or (load.op, load.number) == ("global", 1)
    if load.value in _BY_CONSTANT and not is_loaded:
        return None
    texts: list[str | None] = []  # of the arguments on the stack
    for each in steps[load.at + 1 :]:
        if each.op == "null" and each.at == load.at + 1:
            continue
        if each.op in ENDS or each.op == "call_unpacked":
            return None
        if each.op == "call" and len(texts) == each.number:
            return texts[_NAMING[load.value]] if len(texts) in (2, 3) else None
        depth = len(texts) + each.effect
        if depth < 0:
            return None
        del texts[max(depth - 1, 0) :]  # what is on top now is another expression, or was changed
        if depth > len(texts):
            is_text = each.op == "constant" and isinstance(each.value, str)
            texts += [None] * (depth - len(texts) - 1) + [each.value if is_text else None]
    return None


def _is_number(steps: Sequence[Step], at: int) -> bool:
    """Whether the right operand of step `at` is a constant, or the result of arithmetic."""
    return at > 0 and steps[at - 1].op in ("constant", "binary")


_NOT_BY_STEPS = frozenset(
    {
        "__init__",
        "__new__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__del__",
    }
    | {
        "__copy__",
        "__deepcopy__",
        "__init_subclass__",
        "__class_getitem__",
        "__dir__",
        "__sizeof__",
    }
)
_OF_TEXT = frozenset({"__repr__", "__str__", "__format__"})


def names_of_methods(bases: Iterable[type], names: NameFilter) -> NameFilter:
    """`names`, and those in methods of these classes that code with such names may call."""
    methods = {
        (base, key): each
        for base in bases
        for key, value in vars(base).items()
        if isinstance(each := _function_of(value), types.FunctionType)
    }
    found, done = NameFilter(set(names.names), names.is_dynamic), -1
    while done != len(methods):
        done = len(methods)
        for (base, key), method in list(methods.items()):
            is_special = key.startswith("__") and key.endswith("__") and key not in _NOT_BY_STEPS
            if key in found.names or (is_special and (TEXT in found.names or key not in _OF_TEXT)):
                found.add(method.__code__)
                del methods[base, key]
    return found


def _function_of(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)


def names_in_format(text: str) -> set[str]:
    """The names in the fields of a text that `str.format` fills: attributes and keys."""
    if "{" not in text or "." not in text:
        return set()
    return {word for field_ in _FIELD.findall(text) for word in _WORD.findall(field_)}


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, classes and comprehensions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> tuple[tuple[int, str | None], ...]:
    """Level and name of each module that a code object imports when it runs; name None: the name is data."""
    steps = read(code)
    found: list[tuple[int, str | None]] = []
    for step in steps:
        if step.op == "import":
            before = [s for s in steps[max(step.at - 4, 0) : step.at] if s.op == "constant"]
            levels = [s.value for s in before if type(s.value) is int]
            found.append((levels[-1] if levels else 0, step.value))
    if not _IMPORTING.isdisjoint(code.co_names) or {"sys", "modules"} <= {*code.co_names}:
        found.append((0, None))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that a code object and those nested in it use. Other names in `co_names` are attributes."""
    used = (step.value for each in codes_of(code) for step in read(each) if step.op in _GLOBAL_OPS)
    return tuple(dict.fromkeys(used))
