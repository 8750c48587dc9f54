"""Arrays of numpy among a step's arguments that the step does nothing with but make tensors of them.

    def step(obs, batch):                          obs, and batch["act"]: inputs, as tensors on the arrays' memory
        x = torch.as_tensor(obs, dtype=torch.float32)
        y = torch.from_numpy(batch["act"])
        z = self.to_device(mask)                   mask as well, if that method does nothing else with it

What else code reads of an array cannot be seen, so any other array is a constant of the program, compared by its
bytes. Which arrays are converted is read from the bytecode of the step's own function, and of the functions to which
it hands them over: those that it finds by a name, and methods of objects that it finds so.
Invariant: the array is loaded nowhere but as the first argument of `torch.as_tensor`, `torch.tensor` or
`torch.from_numpy`, called by that name, or as an argument of a function of which the same holds; instructions that are
not known end the search without a find. A name that is assigned again counts until the assignment, if no jump and no
exception passes it by. The functions are found again at each call (`Conversions.hold`).
Refusals, as constants: two arrays on one memory, and an array on the memory of a tensor that something else holds
(`weight.numpy()`): a write to one tensor would be read through the other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functionalize._compat.dispatch import count_references
from functionalize.util.bytecode import Step, read
from functionalize.util.reading import is_a, table_of

CONVERTERS = frozenset({"as_tensor", "tensor", "from_numpy"})
_FRAMES = frozenset(
    {"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "breakpoint"}
)
_ARRAY = "_functionalize_array"  # of a tensor on the memory of an array: that array
_MOST_NESTED = 6  # functions
# Of functions whose code runs later, or in parts.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class ConvertedArray(NamedTuple):
    """A parameter that is an array, or a dict with an array at `key`."""

    parameter: str
    key: Any = None


class _Helper(NamedTuple):
    """A function to which an array is handed over. base: its first name. path: the attributes from there on."""

    base: _Base
    path: tuple[str, ...]
    function: Any
    code: CodeType

    def holds(self) -> bool:
        """Whether the names lead to the same code still."""
        found = _resolved(self.base, self.path)
        return found is not None and found[0] is self.function and found[0].__code__ is self.code


@dataclass(slots=True)
class Conversions:
    """The arrays with which a function does nothing else, and the functions that this follows from."""

    arrays: frozenset[ConvertedArray]
    helpers: tuple[_Helper, ...] = ()

    def hold(self) -> bool:
        """Whether the same functions are found by their names."""
        return all(helper.holds() for helper in self.helpers)


def converted_arrays(function: FunctionType, owner: Any = None) -> Conversions:
    """The arrays of calls of a function with which it does nothing else. owner: what it is bound to, if it is."""
    search = _Search()
    found: set[ConvertedArray] = set()
    for name, (good, bad) in search.parameters(function, owner).items():
        if None in bad or (None in good and len(good) > 1):
            continue  # the whole is used: so may be what is in it
        found |= {ConvertedArray(name, key) for key in good - bad}
    return Conversions(frozenset(found), tuple(search.helpers) if found else ())


class _Base(NamedTuple):
    """What the first name of a call leads to. kind: "global", "deref", or "local" for the bound object."""

    kind: str
    name: str
    function: Any
    owner: Any

    def value(self) -> Any:
        """What is there now; None: nothing."""
        if self.kind == "local":
            return self.owner
        if self.kind == "global":
            return self.function.__globals__.get(self.name)
        cells = dict(
            zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True)
        )
        try:
            return cells[self.name].cell_contents
        except (KeyError, ValueError):
            return None


# The keys of an array, or of arrays in a dict, that are converted, and those with another use; None: all of it.
_Uses = tuple[set[Any], set[Any]]


@dataclass(slots=True)
class _Search:
    """One search through a function and those that it calls. helpers: the latter."""

    helpers: list[_Helper] = field(default_factory=list)
    _running: list[CodeType] = field(default_factory=list)
    _known: dict[tuple[int, int, str], _Uses] = field(default_factory=dict)

    def parameters(self, function: FunctionType, owner: Any) -> dict[str, _Uses]:
        """How a function uses each of its parameters."""
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return {name: self.of_parameter(function, owner, name) for name in names}

    def of_parameter(self, function: FunctionType, owner: Any, name: str) -> _Uses:
        """How a function uses a parameter. owner: what the function is bound to, if it is."""
        code = function.__code__
        is_hidden = name in code.co_cellvars or not _FRAMES.isdisjoint(code.co_names)
        if is_hidden or code.co_flags & _SUSPENDED or "torch" in code.co_varnames:
            return set(), {None}
        key = id(function), id(owner), name
        if key not in self._known:
            self._known[key] = self._of_parameter(function, owner, name)
        return self._known[key]

    def _of_parameter(self, function: FunctionType, owner: Any, name: str) -> _Uses:
        code = function.__code__
        steps = read(code)
        uses = [s.at for s in steps if s.value == name and s.op in _OF_VARIABLES]
        stores = [at for at in uses if steps[at].op == "set_local"]
        if stores:
            first = stores[0]
            if code.co_exceptiontable or _may_pass(steps, first):
                return set(), {None}
            uses = [at for at in uses if at < first]
        good: set[Any] = set()
        bad: set[Any] = set()
        for at in uses:
            if steps[at].op != "local":
                return set(), {None}
            key, end = _key_after(steps, at)
            converted, others = self._of_use(function, owner, steps, at, end)
            if key is None:
                good |= converted
                bad |= others
            elif converted == {None} and not others:
                good.add(key)
            elif converted or others:
                bad.add(key)
        return (set(), {None}) if stores and good != {None} else (good, bad)

    def _of_use(
        self, function: FunctionType, owner: Any, steps: Sequence[Step], at: int, end: int
    ) -> _Uses:
        """How the call is using a value that takes what the steps from `at` to `end` push."""
        found = _call_of(steps, at, end)
        if found is None:
            return set(), {None}
        (kind, name), path, argument = found
        is_torch = kind == "global" and function.__globals__.get(name) is torch
        if is_torch and name == "torch" and len(path) == 1 and path[0] in CONVERTERS:
            return ({None}, set()) if argument == 0 else (set(), {None})
        if kind == "local" and not _is_owner(function, owner, steps, name):
            return set(), {None}
        base = _Base(kind, name, function, owner)
        target = _resolved(base, path)
        if target is None:
            return set(), {None}
        helper, bound = target
        return self._of_helper(_Helper(base, path, helper, helper.__code__), bound, argument)

    def _of_helper(self, helper: _Helper, bound: Any, argument: int | str) -> _Uses:
        code, of_torch = helper.code, (helper.function.__module__ or "").startswith("torch.")
        if of_torch or code in self._running or len(self._running) >= _MOST_NESTED:
            return set(), {None}
        parameter = _parameter(code, argument, bound is not None)
        if parameter is None:
            return set(), {None}
        self._running.append(code)
        uses = self.of_parameter(helper.function, bound, parameter)
        self._running.pop()
        self.helpers.append(helper)
        return uses


def _is_owner(function: FunctionType, owner: Any, steps: Sequence[Step], name: str) -> bool:
    """Whether a variable is the object to which a function is bound, wherever it is loaded."""
    code = function.__code__
    if owner is None or not code.co_argcount or code.co_varnames[0] != name:
        return False
    return all(s.op == "local" for s in steps if s.value == name and s.op in _OF_VARIABLES)


def _parameter(code: CodeType, argument: int | str, is_bound: bool) -> str | None:
    """The parameter that takes an argument, by its position or by its name; None: it is one of several, or unknown."""
    if isinstance(argument, int):
        at = argument + is_bound
        return code.co_varnames[at] if at < code.co_argcount else None
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return argument if argument in names else None


def _resolved(base: _Base, path: Sequence[str]) -> tuple[FunctionType, Any] | None:
    """The function that names lead to, and what it is bound to; found without code of the user. None: none."""
    value, bound = base.value(), None
    for name in path:
        if bound is not None:
            return None
        value, bound = _attribute(value, name)
    return (value, bound) if type(value) is FunctionType else None


def _attribute(value: Any, name: str) -> tuple[Any, Any]:
    """An attribute as it is stored, and the object if it is a method of it."""
    kind = type(value)
    if value is None or issubclass(kind, type):
        return None, None
    if issubclass(kind, ModuleType):
        return vars(value).get(name), None
    getter: Any = kind.__getattribute__
    if getter is not object.__getattribute__:
        return None, None
    of_class = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    table = table_of(value) or {}
    if name in table:  # a function there is bound to nothing
        return (None, None) if hasattr(type(of_class), "__set__") else (table[name], None)
    if type(of_class) is staticmethod:
        return of_class.__func__, None
    return (of_class, value) if type(of_class) is FunctionType else (None, None)


_OF_VARIABLES = frozenset(
    {
        "local",
        "set_local",
        "del_local",
        "save_local",
        "cell",
        "make_cell",
        "deref",
        "set_deref",
        "del_deref",
    }
)


def _may_pass(steps: Sequence[Step], at: int) -> bool:
    """Whether a jump leads past a step."""
    return any(s.target is not None and s.target > at for s in steps[:at])


def _key_after(steps: Sequence[Step], at: int) -> tuple[Any, int]:
    """The constant text by which a loaded value is looked up, and the last step of that; None: it is not."""
    key, look_up = (*steps[at + 1 : at + 3], None, None)[:2]
    if key is None or look_up is None or key.op != "constant" or look_up.op != "subscript":
        return None, at
    return (key.value, at + 2) if type(key.value) is str else (None, at)


_PUSHED = frozenset({"constant", "local", "global", "deref"})
_Call = tuple[tuple[str, str], tuple[str, ...], int | str]


def _call_of(steps: Sequence[Step], at: int, end: int) -> _Call | None:
    """The call that takes as an argument what the steps from `at` to `end` push, and that alone decides about it.

    The first name of what is called, with its kind, the attributes there, and the argument: its position or its name.
    None: something else takes it, or another value may be there, as after a jump.
    """
    call = _taking(steps, end)
    if call is None:
        return None
    step, above = call
    before = _values_before(steps, at, step.number - above)
    if before is None:
        return None
    start, path = before
    if any(each.is_target for each in steps[start + 1 : step.at + 1]):
        return None
    base = steps[start]
    position = step.number - above
    named = step.number - len(step.keywords)
    argument = position if position < named else step.keywords[position - named]
    return (base.op, str(base.value)), path, argument


def _taking(steps: Sequence[Step], end: int) -> tuple[Step, int] | None:
    """The call that takes the value on the stack as an argument, and how many values there are from it on."""
    height = 1
    for step in steps[end + 1 :]:
        if step.op == "call" and height <= step.number:
            return step, height
        taken = {"attribute": 1, "method": 1, "call": step.number + 2}.get(step.op, 0)
        if height <= taken or not (taken or step.op in _PUSHED or step.op == "null"):
            return None  # it takes this value, too
        height += step.effect
    return None


_ATTRIBUTES = frozenset({"attribute", "method"})


def _values_before(
    steps: Sequence[Step], at: int, count: int
) -> tuple[int, tuple[str, ...]] | None:
    """Where what is called is loaded below so many arguments: the step of its first name, and the attributes there."""
    for _ in range(count):
        below = _below(steps, at)
        if below is None:
            return None
        at = below[0]
    found = _below(steps, at)
    if found is None or found[1] is None or steps[found[0]].op == "constant":
        return None
    return found[0], found[1]


def _below(steps: Sequence[Step], at: int) -> tuple[int, tuple[str, ...] | None] | None:
    """The first step of those that push the value just below, and, if that is a name, the attributes looked up in it.

    None: it is not known.
    """
    path: list[str] = []
    while at > 0:
        step = steps[at - 1]
        if step.op in _PUSHED:
            return step.at, tuple(reversed(path))
        if step.op == "call":
            at = step.at
            for _ in range(step.number + 1):  # the arguments, and what is called
                below = _below(steps, at)
                if below is None:
                    return None
                at = below[0]
            return at, None
        if step.op in _ATTRIBUTES:
            path.append(str(step.value))
        elif step.op != "null":
            return None
        at -= 1
    return None


# -- the arrays of a call --------------------------------------------------------------------------


def with_tensors(
    found: Iterable[ConvertedArray],
    names: Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors on the memory of these arrays in their places.

    names: the position of each parameter among `args`.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return args, kwargs
    places: list[tuple[ConvertedArray, Any]] = []
    for each in found:
        at = names.get(each.parameter, len(args))
        value = args[at] if 0 <= at < len(args) else kwargs.get(each.parameter)
        if each.key is not None:
            value = value.get(each.key) if type(value) is dict else None
        if type(value) is numpy.ndarray:
            places.append((each, value))
    new, others = list(args), dict(kwargs)
    for each, array in _apart(places):
        tensor = _on_memory(array)
        if tensor is None:
            continue
        at = names.get(each.parameter, len(args))
        table: Any = new if 0 <= at < len(args) else others
        place: Any = at if table is new else each.parameter
        table[place] = tensor if each.key is None else {**table[place], each.key: tensor}
    return tuple(new), others


def _apart(places: Sequence[tuple[ConvertedArray, Any]]) -> list[tuple[ConvertedArray, Any]]:
    """Those of which no other one, and no tensor that anyone holds, has the memory."""
    overlap = sys.modules["numpy"].may_share_memory
    roots = [_root(array) for _, array in places]
    tensors = {id(root): root for root in roots if is_a(root, Tensor)}
    storages = [root.untyped_storage()._cdata for root in tensors.values()]
    found = []
    for at, (place, root) in enumerate(zip(places, roots, strict=True)):
        if type(root).__name__ == "PyCapsule":  # of DLPack: a tensor, perhaps
            continue
        if is_a(root, Tensor):
            storage = root.untyped_storage()
            if count_references(storage) > storages.count(storage._cdata) + 1:  # and `storage`
                continue
        rest = (array for i, (_, array) in enumerate(places) if i != at)
        if not any(overlap(place[1], array) for array in rest):
            found.append(place)
    return found


def _root(array: Any) -> Any:
    """What the memory of an array belongs to: the outermost array, a tensor, a map of a file."""
    while True:
        kind: Any = type(array)
        if is_a(array, sys.modules["numpy"].ndarray) or kind.__name__ == "DummyArray":
            below = array.base
        else:
            below = array.obj if kind is memoryview else None
        if below is None:
            return array
        array = below


def _on_memory(array: Any) -> Tensor | None:
    try:
        tensor = torch.from_numpy(array if array.flags.writeable else _writable(array))
    except (TypeError, ValueError):  # objects, texts; strides that are negative
        return None
    setattr(tensor, _ARRAY, array)
    return tensor


class _Memory:
    """Memory for numpy. array: keeps it alive."""

    def __init__(self, array: Any) -> None:
        at, _ = array.__array_interface__["data"]
        self.array, self.__array_interface__ = (
            array,
            {
                **array.__array_interface__,
                "data": (at, False),
            },
        )


def _writable(array: Any) -> Any:
    """The same memory: torch warns once of an array that may not be written, and makes the same tensor of it."""
    return sys.modules["numpy"].asarray(_Memory(array))


def array_of(leaf: Any) -> Any:
    """The array on whose memory a leaf of the arguments is a tensor; None: it is another leaf."""
    return getattr(leaf, _ARRAY, None) if type(leaf) is Tensor else None


def tensors_by_array(leaves: Iterable[Any]) -> dict[int, Tensor]:
    """The tensors on arrays among leaves, by the ids of the arrays, which they keep alive."""
    return {id(array): leaf for leaf in leaves if (array := array_of(leaf)) is not None}


class OtherArrays:
    """The arrays among the leaves of a call's arguments that are no inputs, for messages.

    names: returns how the user's code may name each leaf. known: by a number for each tensor that Python has made of
    numbers, where it comes from: the names of arrays, whether of one of them for sure, and the traceback of the line.
    """

    def __init__(self, arrays: Mapping[int, Any], names: Callable[[], Sequence[str]]) -> None:
        self.known: dict[int, tuple[tuple[str, ...], bool, Any]] = {}
        self._arrays, self._names = arrays, names
        self._converted: Any = None

    @staticmethod
    def of(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> OtherArrays | None:
        """None: there are none."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        arrays = {at: leaf for at, leaf in enumerate(leaves) if is_a(leaf, numpy.ndarray)}
        return OtherArrays(arrays, names) if arrays else None

    @contextmanager
    def converting(self, data: Any) -> Iterator[None]:
        """While this is open, code makes a tensor of `data`."""
        self._converted = data if is_a(data, sys.modules["numpy"].ndarray) else None
        try:
            yield
        finally:
            self._converted = None

    def note(self, number: int, contents: Tensor, traceback: Any) -> None:
        """Python has made a tensor with these contents."""
        found, names = self._sources(contents), self._names()
        which = tuple(names[at] for at in (self._arrays if found is None else [found]))
        self.known[number] = which, found is not None, traceback

    def _sources(self, contents: Tensor) -> int | None:
        """The array on whose memory it was, or with whose numbers."""
        numpy, data = sys.modules["numpy"], self._converted
        for at, array in self._arrays.items():
            if data is not None and numpy.may_share_memory(array, data):
                return at
        for at, array in self._arrays.items():
            if tuple(contents.shape) == array.shape and array.dtype.kind in "biufc":
                try:
                    same = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
                except (TypeError, ValueError):
                    continue
                if torch.equal(same.to(contents.dtype), contents.cpu()):
                    return at
        return None
