"""The parts of an object, as `parts_of` returns them, and the places by which a replay finds parts again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from functionalize.ir.inputs import Call
from functionalize.planning.timeline.timeline import Category
from functionalize.util.text import with_article
from functionalize.util.unchanged import Unchanged
from functionalize.walk.fact_text import Path

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
        if isinstance(container, Held):
            container = container.resolve()
        if self.key is None:
            return container.cell_contents
        if isinstance(container, (dict, list, tuple)):
            return container[self.key]
        return getattr(container, self.key)

    def watched(self, call: Call, facts: Unchanged) -> bool:
        container = self.container
        if isinstance(container, Held):
            container.watched(call, facts)
            container = container.resolve()
        if self.key is None:
            facts.attribute(container, "cell_contents")
        elif isinstance(container, (dict, list, tuple)):
            facts.entry(container, self.key)
        else:
            facts.attribute(container, self.key)
        return True

    @property
    def home(self) -> int:
        """The id of the object that holds it, for an element of a tuple of the object that holds the tuple."""
        inner = self.container
        return inner.home if isinstance(inner, Held) else id(inner)

    @property
    def place(self) -> tuple[Any, Any]:
        """A key that is equal for equal places."""
        inner = self.container
        return (inner.place if isinstance(inner, Held) else id(inner)), self.key


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
    """

    fact: Any
    held: list[Part] = field(default_factory=list)
    is_loose: bool = False
    is_moved: bool = False
    is_opaque: bool = False
    attributes: dict[str, Any] | None = None


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
    return Part(key, table[key], key, Held(table, key), is_named)


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
