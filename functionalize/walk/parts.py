"""The parts of an object, as `parts_of` returns them, the places by which a replay finds parts again, and attributes.

    users(config, names)          the attributes that code of the step names
    library(collection, names)    every attribute; of an object of C code what pickling would write
    of_torch(policy, names)       as above for what scripts use as state, else the numbers that code names

Of torch's own objects, those of `_STATE_OF_TORCH` are state of a script. Of all others, streams, meshes and the like,
count the type, the numbers that code names, which process group it is, and which member of an enumeration.
Invariant: no method of the user is called, and nothing is changed.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import logging
import types
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from functionalize._compat.dispatch import is_traceable_wrapper_subclass
from functionalize._compat.distributed import is_dtensor_class
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.util.by_class import by_class
from functionalize.util.own_values import OWN_VALUES
from functionalize.util.packages import is_standard, is_users
from functionalize.util.process_groups import group_name, is_group
from functionalize.util.reading import is_a, item_of, table_of
from functionalize.util.tensor_wrappers import is_no_wrapper
from functionalize.util.text import with_article
from functionalize.util.unchanged import Unchanged
from functionalize.walk.code_names import OBJECTS, TEXT, NameFilter, names_of_methods
from functionalize.walk.fact_text import PLAIN, Path

SAME = object()  # the key of a part that has the path of its holder


@dataclass(frozen=True, slots=True)
class Held:
    """A place in Python: `container[key]`, attribute `key` of `container`, or the contents of a cell (`key` None).

    For an element of a tuple, `container` is the place of the tuple, because Python replaces a tuple as a whole.
    """

    container: Any
    key: Any
    category: ClassVar[Category] = Category.BUFFERS

    def resolve(self, call: Call | None = None) -> Any:
        container = self.container
        if is_a(container, Held):
            container = container.resolve()
        if self.key is None:
            return container.cell_contents
        if is_a(container, (dict, list, tuple)):
            return item_of(container, self.key)
        return getattr(container, self.key)

    def watched(self, call: Call, facts: Unchanged) -> bool:
        container = self.container
        if is_a(container, Held):
            container.watched(call, facts)
            container = container.resolve()
        if self.key is None:
            facts.attribute(container, "cell_contents")
        elif is_a(container, (dict, list, tuple)):
            facts.entry(container, self.key)
        else:
            facts.attribute(container, self.key)
        return True

    @property
    def home(self) -> int:
        """The id of the object that holds it, for an element of a tuple of the object that holds the tuple."""
        inner = self.container
        return inner.home if is_a(inner, Held) else id(inner)

    @property
    def place(self) -> tuple[Any, Any]:
        """A key that is equal for equal places."""
        inner = self.container
        return (inner.place if is_a(inner, Held) else id(inner)), self.key


@dataclass(frozen=True, slots=True)
class MovedPlace(Held):
    """A place where the step puts another tensor at every call: it is looked up at each replay."""

    def watched(self, call: Call, facts: Unchanged) -> bool:
        return False


class Part(NamedTuple):
    """An object that another one holds.

    key: its place in the holder, `SAME` for an object that stands for its holder.
    name: for messages and inputs; None: the holder's; "+x": the holder's, followed by x.
    place: where a replay finds it again; None: nowhere.
    is_named: whether code of the step may read it.
    """

    key: Any
    value: Any
    name: str | None = None
    place: Held | None = None
    is_named: bool = True


@dataclass(slots=True)
class Parts:
    """What an object consists of.

    fact: about the object itself, compared by `==`.
    held: the objects that it holds.
    is_loose: no source finds these objects again, so tensors among them count by identity.
    is_moved: code reads the state only by changing it.
    is_opaque: there may be state that is not among the parts.
    attributes: its `__dict__`.
    still: of a part that is moved: objects that determine what is read, and that reading does not change.
    own: attributes and slots that a script has given an object that is read by its content. own_names: which of them
    code may read.
    """

    fact: Any
    held: list[Part] = field(default_factory=list)
    is_loose: bool = False
    is_moved: bool = False
    is_opaque: bool = False
    attributes: dict[str, Any] | None = None
    still: list[Part] = field(default_factory=list)
    own: list[Part] = field(default_factory=list)
    own_names: OwnNames | None = None


@dataclass(slots=True)
class Visit:
    """An object to visit. is_fact: whether it determines ops. is_loose: no source finds it.

    moving: the path of the state around it that is read only by changing it.
    """

    path: Path
    name: str
    value: Any
    place: Held | None = None
    is_fact: bool = True
    is_loose: bool = False
    moving: Path | None = None


class GroupToken(str):
    """The name of a process group, which may differ between processes: a saved program finds its groups by ranks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a process group"


class Is:
    """The fact that an object is this very one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        name = getattr(self.value, "__qualname__", None) or getattr(self.value, "__name__", None)
        return name if isinstance(name, str) else with_article(type(self.value).__name__)


def attribute(table: Mapping[str, Any], key: str, is_named: bool = True) -> Part:
    """The entry of a table of attributes."""
    return Part(key, item_of(table, key), key, Held(table, key), is_named)


def pickled(value: Any) -> Parts:
    """An object of C code, by what `__reduce_ex__` returns."""
    kind = type(value)
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:
        return Parts(kind, is_opaque=True)
    if not isinstance(reduced, tuple):
        return Parts((kind, reduced))
    held = [Part(f"state {i}", each) for i, each in enumerate(reduced[1:3])]
    held += [Part("items", list(each)) for each in reduced[3:5] if each is not None]
    return Parts(kind, held, is_loose=True)


# -- objects with attributes -----------------------------------------------------------------------

# Of torch, the objects of these modules are state of a script.
_STATE_OF_TORCH = (
    *("torch.utils.data", "torch.optim.", "torch.amp.", "torch.autograd.grad_mode"),
    *("torch.autograd.graph", "torch.distributions", "torch.nn.attention"),
    "torch.distributed.fsdp._fully_shard._fsdp_api",
)
_OPAQUE = frozenset({"Store", "Future"})  # other threads and processes change what they hold
_BY_TEXT = frozenset({"finfo", "iinfo", "Tag", "qscheme", "ReduceOp", "Placement"})


def own_attributes(value: Any, names: NameFilter) -> list[Part]:
    """The attributes of an object, with those in slots: of an object of the user, those that code names."""
    kind, table = type(value), table_of(value) or {}
    every, observed = not is_users(kind.__module__), names.observed_of(table)
    if not every and (base := _of_bases(kind, names)) is not None:
        names, every = base, base.is_dynamic
    read, all_read = (names, every) if observed is None else (observed, False)
    keys = [key for key in table if key != OWN_VALUES]
    held = [attribute(table, key, all_read or key in read) for key in keys]
    return [*held, *_slots(value, names, every)]


class OwnNames:
    """The attributes that count of an object that is read by its content: without those that hold content."""

    __slots__ = ("_content", "_names")

    def __init__(self, kind: type, names: NameFilter) -> None:
        self._content, self._names = _of_content(kind), names

    def __contains__(self, key: object) -> bool:
        return key in self._names and key not in self._content and key != OWN_VALUES


def add_own(value: Any, names: NameFilter, found: Parts) -> Parts:
    """Add to the content of an object what a script has given it: attributes, and slots of its subclass."""
    found.own_names = OwnNames(type(value), names)
    table = table_of(value) or {}
    found.own = [attribute(table, key) for key in list(table) if key in found.own_names]
    found.own += slots_of(value, found.own_names)
    return found


def slots_of(value: Any, names: Container[Any]) -> list[Part]:
    """What is in the slots of an object."""
    return list(_slots(value, names, False))


def _slots_in(kind: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """The names and descriptors of the slots of a class, those of its first base first."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, slot in list(vars(base).items()):
                if isinstance(slot, types.MemberDescriptorType):
                    yield name, slot


@by_class
def slot_names(kind: type) -> frozenset[str]:
    """The names of the slots of a class, which have a descriptor each."""
    return frozenset(name for name, _ in _slots_in(kind))


@by_class
def _of_content(kind: type) -> frozenset[str]:
    """The attributes that the methods of libraries' classes assign, and those that Python and loggers' managers do."""
    assigned = frozenset(
        step.argval
        for base in kind.__mro__
        if not is_users(base.__module__)
        for method in vars(base).values()
        if isinstance(method, types.FunctionType)
        if isinstance(wrapped := inspect.unwrap(method), types.FunctionType)
        for step in dis.get_instructions(wrapped.__code__)
        if step.opname == "STORE_ATTR"
    )
    return assigned | _OF_FUNCTIONS | ({"parent"} if issubclass(kind, logging.Logger) else set())


_OF_FUNCTIONS = {
    *("__wrapped__", "__doc__", "__module__", "__name__", "__qualname__", "__annotations__"),
}


_PLAIN_BASES = ("builtins", "abc", "typing", "enum")


def _of_bases(kind: type, names: NameFilter) -> NameFilter | None:
    """The names with those in methods that a class of the user inherits from libraries (`UserDict`); None: no more."""
    size, found = names.inherited.get(kind, (None, None))
    if size == names.size:
        return cast(NameFilter | None, found)
    bases = [
        base
        for base in kind.__mro__
        if not is_users(base.__module__) and base.__module__ not in _PLAIN_BASES
    ]
    is_kept = issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
    found = names_of_methods(bases, names) if bases and not is_kept else None
    names.inherited[kind] = names.size, found
    return found


def _slots(value: Any, names: Container[Any], every: bool) -> Iterator[Part]:
    # A place in a container is an element, so that what is in its slots has none.
    has_places = not issubclass(type(value), (dict, list, tuple))
    for name, slot in _slots_in(type(value)):
        try:
            content = slot.__get__(value)
        except AttributeError:
            continue
        place = Held(value, name) if has_places else None
        yield Part(name, content, name, place, every or name in names)


def users(value: Any, names: NameFilter) -> Parts:
    """An object of a class of the user."""
    kind, held = type(value), own_attributes(value, names)
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(
        ("object", kind, known), held, is_opaque=is_native(kind), attributes=table_of(value)
    )


def library(value: Any, names: NameFilter) -> Parts:
    """An object of a library: every attribute; without attributes, what pickling would write."""
    kind, table = type(value), table_of(value)
    held = own_attributes(value, names)
    wrapped = _wrapped(value)
    if wrapped is not None and "__wrapped__" not in (table or {}):
        held.append(Part("__wrapped__", wrapped))
    if held or not is_native(kind):
        known = frozenset(part.key for part in held if part.is_named)
        return Parts(("object", kind, known), held, attributes=table)
    if is_standard(kind.__module__.partition(".")[0]):
        return pickled(value)
    return Parts(Is(value), is_opaque=True)


def iterator(value: Any, names: NameFilter) -> Parts:
    """An iterator: code reads it by changing it."""
    parts = library(value, names) if table_of(value) is not None else pickled(value)
    parts.is_moved = True
    # `map(scaled, numbers)`: the function is not moved. An `iter(function, end)` may not be, either.
    inner = [part.value for part in parts.held if type(part.value) is tuple]
    is_kept = is_a(value, itertools.repeat)  # reading it does not change what it repeats
    parts.still = [
        Part(f"function {i}", v) for i, v in enumerate(sum(inner, ())) if is_kept or _is_code(v)
    ]
    return parts


def _is_code(value: Any) -> bool:
    return callable(value) and not is_a(value, (type, types.BuiltinFunctionType))


def callable_or_kind(value: Any, names: NameFilter) -> Parts:
    """An object without state that ops depend on, other than which function it is."""
    return Parts(Is(value) if callable(value) else ("kind", type(value)))


def _wrapped(value: Any) -> Any:
    """The function that a decorator wrapped (`__wrapped__`), or None. Some attributes raise (`torch.classes`)."""
    try:
        return getattr(value, "__wrapped__", None)
    except Exception:
        return None


def is_native(kind: type) -> bool:
    """Whether C code keeps state in the instances: they are larger than slots, `__dict__` and weak references need."""
    slots = len(list(_slots_in(kind)))
    words = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + 8 * words or kind.__itemsize__ > 0


def namespace(value: Any, names: NameFilter) -> Parts:
    """A namespace of a script. A comparison of two of them, and their text, read all attributes."""
    table, every = vars(value), not names.names.isdisjoint((OBJECTS, TEXT))
    held = [attribute(table, key, every or key in names) for key in list(table)]
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(("object", type(value), known), held, attributes=table)


# -- torch's own -----------------------------------------------------------------------------------


def of_torch(value: Any, names: NameFilter) -> Parts:
    """An object of torch, or of this package."""
    kind = type(value)
    if kind.__module__.startswith(_STATE_OF_TORCH) and not hasattr(kind, "__members__"):
        return library(value, names)
    wrapped = _wrapped(value)
    if wrapped is not None:
        return Parts(("kind", kind), [Part("__wrapped__", wrapped)])
    if is_group(value):
        return Parts((kind, GroupToken(group_name(value))))
    if not _OPAQUE.isdisjoint(base.__name__ for base in kind.__mro__):
        return Parts(Is(value), is_opaque=True)
    if not _BY_TEXT.isdisjoint(base.__name__ for base in kind.__mro__):
        return Parts((kind, str(getattr(value, "op", value))))
    if hasattr(kind, "__members__"):  # an enumeration of C++
        return Parts((kind, repr(value)))
    if callable(value):
        return Parts(Is(value))
    table = table_of(value) or {}
    numbers = [key for key in table if key in names.names and type(table[key]) in PLAIN]
    return Parts(("kind", kind), [attribute(table, key) for key in numbers])


def has_only_attributes(value: Any) -> bool:
    """Whether `of_torch` finds in an object nothing but attributes in its `__dict__`."""
    kind: Any = type(value)
    is_plain = kind.__getattribute__ is object.__getattribute__ and not hasattr(kind, "__getattr__")
    if not is_plain or type(table_of(value)) is not dict:
        return False
    return kind.__module__.startswith("torch.") and of_torch(value, NameFilter()) == Parts(
        ("kind", kind)
    )


def attributes_of_tensor(tensor: Any, table: dict[str, Any], names: NameFilter) -> list[Part]:
    """What a script has assigned to a tensor; of a wrapper, the numbers, since its other attributes are its own.

    A `DTensor` has its own ones in slots. Of a class of the user, all but tensors.
    """
    kind: Any = type(tensor)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) or is_dtensor_class(kind)
    own = is_users(kind.__module__)
    return [
        attribute(table, key)
        for key in (names.of(table) if table else ())
        if key != "_is_param"  # torch's mark of wrappers, which a gathered parameter lacks
        and (is_plain or type(table[key]) in PLAIN or (own and not is_a(table[key], torch.Tensor)))
    ]


def inner_places(tensor: Any) -> Iterator[tuple[tuple[str, ...], Held, torch.Tensor]]:
    """The tensors inside a wrapper subclass, with the attributes that lead to each, and its place."""
    if is_no_wrapper(tensor) or not is_traceable_wrapper_subclass(tensor):
        return
    table = table_of(tensor) or {}
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if not is_a(inner, torch.Tensor):  # a DTensor of torch 2.15 names its mesh, too
            continue
        yield (name,), Held(table if name in table else tensor, name), inner
        for names, place, each in inner_places(inner):
            yield (name, *names), place, each


def generator(value: torch.Generator, names: NameFilter) -> Parts:
    """A generator of torch's random numbers. A recording sees what a step does with the default ones itself."""
    if value is torch.default_generator or value in torch.cuda.default_generators:
        return Parts(("kind", type(value)))
    state = value.get_state().numpy().tobytes()
    return Parts(type(value), [Part("state", state)], is_moved=True)


def scaler(value: GradScaler, names: NameFilter) -> Parts:
    """A gradient scaler. Its dict by optimizer is rebuilt in every step."""
    table = vars(value)
    kept = [k for k, v in table.items() if is_a(v, torch.Tensor) or type(v) in PLAIN]
    return Parts(("kind", type(value)), [Part(k, table[k], f"+{k}", Held(table, k)) for k in kept])


def scheduler(value: LRScheduler, names: NameFilter) -> Parts:
    """A scheduler: this very one. What a step reads of it is noted while it is recorded: see calls/schedulers.py."""
    table = table_of(value) or {}
    held = [attribute(table, key, False) for key, each in table.items() if not _is_plain(each)]
    return Parts(Is(value), held)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (
        type(value) is list and all(type(each) in PLAIN for each in value)
    )
