"""Python values as JSON and back, for exactly the types that a program consists of.

    encoder.value((0.5, aten.sin.default))   ->  {"tuple": [{"float": "0x1.0p-1"}, {"op": "aten.sin.default"}]}
    encoder.value(guard)    ->  {"record": 7}, and encoder.records[7] is {"is": "TensorGuard", "with": [...]}
    encoder.value(model)    ->  {"live": "module model"}, by the name that `live` returns for it

Numbers, containers, torch's dtypes and devices, ops and types by name, tree structures and the dataclasses
of `forms` are written out. An object of a form is written once, however many others refer to it. An object outside
the program (a module, an optimizer) is written as a name, which is resolved to an object of the reading process.

Invariant: reading imports nothing, unpickles nothing, and calls nothing but the constructors of `forms`,
numpy's and torch's own. Types are those that are imported already.
Refusals: `SaveError`, with the path to the value, for a value without a form or name, or of a type defined inside a
function; `LoadError` for a type, op or object that does not exist here, and for damaged JSON.
"""

from __future__ import annotations

import base64
import builtins
import enum
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from functionalize._compat.dispatch import auto_functionalized
from functionalize._compat.graphs import pytree
from functionalize.errors import LoadError, SaveError
from functionalize.ir.commit import commit
from functionalize.ir.scalars import OF_MATH

Json = Any


@dataclass(frozen=True, slots=True)
class Form:
    """The encoding of one class.

    kind: the class. save: the values that an object is written as. load: an equal object, made from these values.
    before: parts that are written first, so that a deeply nested object needs no deep recursion.
    """

    kind: type
    save: Callable[[Any], tuple[Any, ...]]
    load: Callable[..., Any]
    before: Callable[[Any], Iterable[Any]] = lambda value: ()


def plain_form(kind: Any) -> Form:
    """The form of a dataclass or a named tuple: its fields."""
    if issubclass(kind, tuple):
        return Form(kind, tuple, kind)
    names = tuple(f.name for f in fields(kind))
    return Form(kind, lambda value: tuple(getattr(value, n) for n in names), kind)


# -- functions -------------------------------------------------------------------------------------

_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub "
    "truediv truth xor"
)
_FUNCTIONS: Mapping[str, Any] = {
    **{f"operator.{n}": getattr(operator, n) for n in _OPERATORS.split()},
    **{f"math.{n}": getattr(math, n) for n in ("trunc", "floor", "ceil", *OF_MATH)},
    **{n: getattr(builtins, n) for n in ("bool", "int", "float", "abs", "format", "repr", "round")},
    "float.is_integer": float.is_integer,
    "auto_functionalized": auto_functionalized,
    "commit": commit,
}
_NAMES: Mapping[Any, str] = {function: name for name, function in _FUNCTIONS.items()}


_OVERLOAD: type = type(torch.ops.aten.add.Tensor)


def is_function(value: Any) -> bool:
    """Whether a value is one of the functions that programs call beside ops."""
    try:
        return callable(value) and value in _NAMES
    except TypeError:  # not hashable
        return False


def is_target(value: Any) -> bool:
    """Whether a value is an op or a function that programs call."""
    return isinstance(value, _OVERLOAD) or is_function(value)


def _op_of(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, _OVERLOAD):
        raise AttributeError(name)
    return found


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def type_of(name: str) -> type:
    """The type of that name in a module that is imported; raises `LoadError`."""
    if name == _type_name(type(None)):
        return type(None)
    module, _, path = name.partition(":")
    if module not in sys.modules:
        raise LoadError(f"needs the type {path} of the module {module}, which is not imported here")
    try:
        found = functools.reduce(getattr, path.split("."), sys.modules[module])
    except AttributeError:
        found = None
    if not isinstance(found, type):
        raise LoadError(f"needs the type {path}, which is not in the module {module}")
    return found


_ATTRIBUTES: Mapping[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}

# -- writing ---------------------------------------------------------------------------------------


class Encoder:
    """Writes values. live: the name of an object outside the program; None for any other value."""

    def __init__(
        self, forms: Iterable[Form], live: Callable[[Any], str | None] = lambda value: None
    ) -> None:
        self.records: list[Json] = []
        self._forms = {form.kind: form for form in forms}
        self._live = live
        self._record_ids: dict[int, int] = {}  # id of an object -> its record
        self._alive: list[Any] = []  # keeps written objects alive, so that their ids are not reused
        self._path: list[str] = []

    def value(self, value: Any, where: str = "") -> Json:
        """`value` as JSON; `where`: its place in the enclosing value, for error messages."""
        self._path.append(where)
        try:
            return self._value(value)
        finally:
            self._path.pop()

    def _value(self, value: Any) -> Json:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        written = _written(value, kind)
        if written is not None:
            return written
        name = self._live(value)  # before containers: a table of attributes is a dict
        if name is not None:
            return {"live": name}
        if kind in (list, tuple, torch.Size) or isinstance(value, (slice, range)):
            return self._sequence(value, kind)
        if kind is dict:
            return {"dict": [[self.value(k), self.value(v, str(k))] for k, v in value.items()]}
        if kind in (set, frozenset):
            parts = sorted((self.value(v) for v in value), key=repr)
            return {kind.__name__: parts}
        if isinstance(value, pytree.TreeSpec):
            return {"tree": self._tree(value)}
        form = self._forms.get(kind)
        if form is not None:
            return self._record(value, form)
        if isinstance(value, (list, dict)):  # FX keeps lists and dicts of its own kind
            return self._value(list(value) if isinstance(value, list) else dict(value))
        if isinstance(value, enum.Enum):
            return {"enum": [self._type(kind), value.name]}
        if isinstance(value, type):
            return {"type": self._type(value)}
        return self._refuse(f"a {kind.__module__}.{kind.__qualname__}")

    def _sequence(self, value: Any, kind: type) -> Json:
        if kind is list:
            return [self.value(v, str(i)) for i, v in enumerate(value)]
        if isinstance(value, (slice, range)):
            ends = [value.start, value.stop, value.step]
            return {kind.__name__: [self.value(v) for v in ends]}
        return {kind.__name__: [self.value(v, str(i)) for i, v in enumerate(value)]}

    def _type(self, kind: type) -> str:
        name = _type_name(kind)
        if "<locals>" in name:
            self._refuse(f"the type {kind.__qualname__}, which is defined inside a function")
        return name

    def _tree(self, spec: pytree.TreeSpec) -> Json:
        if spec.is_leaf():
            return None
        children = [self._tree(child) for child in spec.children()]
        return [self._type(spec.type), self.value(spec.context, "context"), children]

    def _record(self, value: Any, form: Form) -> Json:
        if id(value) not in self._record_ids:
            for part in form.before(value):
                if part is not value:
                    self.value(part)
            name = form.kind.__name__
            values = [self.value(v, f"{name} {i}") for i, v in enumerate(form.save(value))]
            self._record_ids[id(value)] = len(self.records)
            self._alive.append(value)
            self.records.append({"is": name, "with": values})
        return {"record": self._record_ids[id(value)]}

    def _refuse(self, what: str) -> Any:
        path = " > ".join(part for part in self._path if part)
        raise SaveError(
            f"holds {what} ({path}), which has no name that another process would find it by"
        )


def _written(value: Any, kind: type) -> Json:
    """The JSON of a scalar, op, function or array; None for other values."""
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if value is Ellipsis:
        return {"ellipsis": None}
    if kind is torch.device:
        return {"device": str(value)}
    for name, attribute in _ATTRIBUTES.items():
        if kind is attribute:
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, _OVERLOAD):
        return {"op": str(value)}
    if is_function(value):
        return {"function": _NAMES[value]}
    if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        data = base64.b64encode(value.tobytes()).decode()
        return {"numpy": [value.dtype.str, list(value.shape), data, kind.__name__ == "ndarray"]}
    return None


# -- reading ---------------------------------------------------------------------------------------


class Decoder:
    """Reads the output of an `Encoder` with the same forms. live: the object of a name."""

    def __init__(
        self,
        records: Iterable[Json],
        forms: Iterable[Form],
        live: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self._forms = {form.kind.__name__: form for form in forms}
        self._live = live
        self._made: list[Any] = []
        for record in records:  # a record refers to earlier ones only
            form = self._forms[record["is"]]
            self._made.append(form.load(*[self.value(v) for v in record["with"]]))

    def value(self, code: Json) -> Any:
        """The value that was written as `code`; raises `LoadError` if something it names does not exist."""
        if isinstance(code, list):
            return [self.value(v) for v in code]
        if not isinstance(code, dict):
            return code
        ((tag, inner),) = code.items()
        if tag == "record":
            return self._made[inner]
        if tag == "live":
            return self._live(inner)
        if tag == "tree":
            return self._tree(inner)
        if tag == "dict":
            return {self.value(k): self.value(v) for k, v in inner}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self.value(v) for v in inner])
        if tag == "enum":
            kind: Any = type_of(inner[0])
            return kind.__members__[inner[1]]
        return _READERS[tag](inner)

    def _tree(self, code: Json) -> pytree.TreeSpec:
        if code is None:
            return pytree.tree_structure(0)
        kind, context = type_of(code[0]), self.value(code[1])
        if kind not in pytree.SUPPORTED_NODES and not hasattr(kind, "_fields"):
            raise LoadError(
                f"needs pytree to know the type {code[0]}, which is not registered here"
            )
        if isinstance(context, type) and not issubclass(context, tuple):
            raise LoadError(f"has {context.__qualname__} where a named tuple is expected: damaged")
        return pytree.TreeSpec(kind, context, [self._tree(child) for child in code[2]])


def _size(parts: list[int]) -> torch.Size:
    return torch.Size(parts)


_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "Size": _size,
    "set": set,
    "frozenset": frozenset,
    "slice": lambda ends: slice(*ends),
    "range": lambda ends: range(*ends),
}


def _attribute(kind: type) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        found = getattr(torch, name, None)
        if not isinstance(found, kind):
            raise LoadError(f"needs torch.{name}, which this torch does not have")
        return found

    return read


def _numpy(code: Json) -> Any:
    import numpy

    dtype, shape, data, is_array = code
    array = numpy.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    return array.copy() if is_array else array[()]


def _read_op(name: str) -> Any:
    try:
        return _op_of(name)
    except (AttributeError, ValueError) as error:
        raise LoadError(f"needs the op {name}, which is not registered here") from error


_READERS: Mapping[str, Callable[[Json], Any]] = {
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": base64.b64decode,
    "ellipsis": lambda nothing: Ellipsis,
    "device": torch.device,
    "op": _read_op,
    "function": _FUNCTIONS.__getitem__,
    "type": type_of,
    "numpy": _numpy,
    **{name: _attribute(kind) for name, kind in _ATTRIBUTES.items()},
}
