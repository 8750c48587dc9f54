"""Python values as JSON and back, for exactly the types that a program consists of.

    encoder.value((0.5, aten.sin.default))   ->  {"tuple": [{"float": "0x1.0p-1"}, {"op": "aten.sin.default"}]}
    encoder.value(guard)    ->  {"record": 7}, and encoder.records[7] is {"is": "TensorGuard", "with": [...]}
    encoder.value(model)    ->  {"live": "module model"}, by the name that `live` returns for it

Numbers, containers, torch's dtypes and devices, ops and types by name, tree structures and the dataclasses
of `forms` are written out. An object of a form is written once, however many others refer to it. An object outside
the program (a module, an optimizer) is written as a name, which is resolved to an object of the reading process.

Invariant: reading imports nothing, unpickles nothing, and calls nothing but the constructors of `forms`,
numpy's and torch's own. Nothing is looked up by a name of a file but in tables that are made before it is read: forms,
functions, types (known_types.py), torch's ops (callable_ops.py), dtypes, live objects. The fields of a form are
checked against its annotations (field_types.py).
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
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from functionalize._compat.dispatch import auto_functionalized
from functionalize._compat.graphs import pytree
from functionalize.errors import LoadError, SaveError
from functionalize.ir.commit import commit
from functionalize.ir.scalars import OF_MATH, summed
from functionalize.program.bounded_numbers import bounded
from functionalize.program.callable_ops import op_of
from functionalize.program.field_types import checked
from functionalize.program.known_types import Types, type_name

Json = Any


def _nothing_before(value: Any) -> Iterable[Any]:
    """No parts that are written first."""
    return ()


@dataclass(frozen=True, slots=True)
class Form:
    """The encoding of one class.

    kind: the class. save: the values that an object is written as. load: an equal object, made from these values.
    before: parts that are written first, so that a deeply nested object needs no deep recursion.
    """

    kind: type
    save: Callable[[Any], tuple[Any, ...]]
    load: Callable[..., Any]
    before: Callable[[Any], Iterable[Any]] = _nothing_before


def plain_form(kind: Any) -> Form:
    """The form of a dataclass or a named tuple: its fields, which a file must hold in the declared types."""
    if issubclass(kind, tuple):
        return Form(kind, tuple, lambda *values: kind(*checked(kind, values)))
    names = tuple(f.name for f in fields(kind))
    return Form(
        kind,
        lambda value: tuple(getattr(value, n) for n in names),
        lambda *values: kind(*checked(kind, values)),
    )


# -- functions -------------------------------------------------------------------------------------

_OPERATORS = (
    "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub "
    "truediv truth xor"
)
_OF_BUILTINS = "bool int float abs min max format repr round"
_OF_MATH = ("trunc", "floor", "ceil", "isfinite", "isnan", "isinf")
_FUNCTIONS: Mapping[str, Any] = {
    **{f"operator.{n}": getattr(operator, n) for n in _OPERATORS.split()},
    **{f"math.{n}": getattr(math, n) for n in (*_OF_MATH, *OF_MATH)},
    **{n: getattr(builtins, n) for n in _OF_BUILTINS.split()},
    "float.is_integer": float.is_integer,
    "sum": summed,
    "auto_functionalized": auto_functionalized,
    "commit": commit,
}
_NAMES: Mapping[Any, str] = {
    each: name for name, function in _FUNCTIONS.items() for each in (function, bounded(function))
}


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
        name = type_name(kind)
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
    """Reads the output of an `Encoder` with the same forms.

    live: the object of a name. types: those that the file may name. ops: the namespaces that it may name beside
    torch's.
    """

    def __init__(
        self,
        records: Iterable[Json],
        forms: Iterable[Form],
        live: Callable[[str], Any] = lambda name: None,
        types: Types | None = None,
        ops: Collection[str] = (),
    ) -> None:
        self._forms = {form.kind.__name__: form for form in forms}
        self._types = Types() if types is None else types
        self.ops = ops
        self._readers: dict[str, Callable[[Json], Any]] = {
            **_READERS,
            "record": self._record,
            "live": lambda name: live(text(name)),
            "dict": self._dict,
            "enum": self._enum,
            "type": self._types.of,
            "op": lambda name: op_of(name, ops),
            "tree": self._tree,
        }
        self._made: list[Any] = []
        self._parts: list[int] = []  # of each record: of how many parts it consists
        self._count = 0
        for record in records:  # a record refers to earlier ones only
            form = self._forms.get(record["is"])
            if form is None:
                raise LoadError(
                    f"holds a {record['is']!r:.80}, which is no kind of record: damaged"
                )
            before = self._count
            self._made.append(form.load(*[self.value(v) for v in record["with"]]))
            # An expression is shared by many, and whoever goes through it visits every part once.
            is_shared = form.before is not _nothing_before
            self._parts.append(1 if is_shared else self._count - before)

    def value(self, code: Json) -> Any:
        """The value that was written as `code`; raises `LoadError` if something it names does not exist."""
        self._count += 1
        if isinstance(code, list):
            return [self.value(v) for v in code]
        if not isinstance(code, dict):
            if type(code) is float or (type(code) is int and code.bit_length() > _LARGEST):
                raise LoadError("holds a number that no program has: damaged")
            return code
        if len(code) != 1:
            raise LoadError("holds a value of no kind: damaged")
        ((tag, inner),) = code.items()
        if tag in _SEQUENCES:
            return self._sequence(_SEQUENCES[tag], inner)
        read = self._readers.get(tag)
        if read is None:
            raise LoadError(f"holds a value of the kind {tag!r:.80}: damaged")
        return read(inner)

    def _record(self, at: Json) -> Any:
        index = position(at, len(self._made))
        self._count += self._parts[index]
        if self._count > _MOST_PARTS:
            raise LoadError("holds a value that contains itself too often: damaged")
        return self._made[index]

    def _dict(self, pairs: Json) -> dict[Any, Any]:
        return {self.value(k): self.value(v) for k, v in pairs}

    def _sequence(self, make: Callable[[list[Any]], Any], parts: Json) -> Any:
        if not isinstance(parts, list):
            raise LoadError("holds a sequence that is none: damaged")
        return make([self.value(v) for v in parts])

    def _enum(self, code: Json) -> Any:
        name, member = code
        kind: Any = self._types.of(name)
        if not isinstance(kind, enum.EnumMeta) or member not in kind.__members__:
            raise LoadError(f"needs {text(member):.80} of {name}, which is not there")
        return kind.__members__[member]

    def _tree(self, code: Json) -> pytree.TreeSpec:
        if code is None:
            return pytree.tree_structure(0)
        name, written, children = code
        context = self.value(written)
        kind = self._types.node(name, context, len(children))
        return pytree.TreeSpec(kind, context, [self._tree(child) for child in children])


_LARGEST = 64  # bits of an integer
_MOST_PARTS = 50_000_000  # far above any program


def position(at: Json, count: int) -> int:
    """`at`, if it is an index among `count`; raises `LoadError`."""
    if type(at) is not int or not 0 <= at < count:
        raise LoadError(f"refers to number {at!r:.80} of {count}: damaged")
    return at


def text(value: Json) -> str:
    """`value`, if it is text; raises `LoadError`."""
    if not isinstance(value, str):
        raise LoadError(f"holds {value!r:.80} where text is expected: damaged")
    return value


def _ends(make: Callable[..., Any], parts: list[Any]) -> Any:
    if len(parts) != 3 or not all(p is None or type(p) is int for p in parts):
        raise LoadError("holds a range that is none: damaged")
    return make(*parts)


def _size(parts: list[Any]) -> torch.Size:
    if not all(type(p) is int for p in parts):
        raise LoadError("holds a size that is none: damaged")
    return torch.Size(parts)


_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "Size": _size,
    "set": set,
    "frozenset": frozenset,
    "slice": functools.partial(_ends, slice),
    "range": functools.partial(_ends, range),
}


def _attribute(kind: type) -> Callable[[Json], Any]:
    known = {name: value for name, value in vars(torch).items() if isinstance(value, kind)}

    def read(name: Json) -> Any:
        if text(name) not in known:
            raise LoadError(f"needs torch.{name:.80}, which this torch does not have")
        return known[name]

    return read


_ARRAY = re.compile(r"[<>|=]([biufcmM]\d+(\[\w+\])?|[SU]\d+)")


def _numpy(code: Json) -> Any:
    import numpy

    dtype, shape, data, is_array = code
    if _ARRAY.fullmatch(text(dtype)) is None or not all(type(n) is int and n >= 0 for n in shape):
        raise LoadError("holds an array that is none: damaged")
    array = numpy.frombuffer(base64.b64decode(text(data), validate=True), dtype).reshape(shape)
    return array.copy() if is_array else array[()]


def _complex(parts: Json) -> complex:
    real, imaginary = parts
    return complex(float.fromhex(text(real)), float.fromhex(text(imaginary)))


def _function(name: Json) -> Any:
    found = _FUNCTIONS.get(text(name))
    if found is None:
        raise LoadError(f"names the function {name:.80}, which programs do not call: damaged")
    return bounded(found)


_READERS: Mapping[str, Callable[[Json], Any]] = {
    "float": lambda code: float.fromhex(text(code)),
    "complex": _complex,
    "bytes": lambda code: base64.b64decode(text(code), validate=True),
    "ellipsis": lambda nothing: Ellipsis,
    "device": lambda name: torch.device(text(name)),
    "function": _function,
    "numpy": _numpy,
    **{name: _attribute(kind) for name, kind in _ATTRIBUTES.items()},
}
