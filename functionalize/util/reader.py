"""How guards and sources read Python: one way, which a fast test repeats.

    def failure(self, call):
        now = call.reader.attribute(self.parameter, "requires_grad")
        return None if now == self.was else "..."

A `Reader` reads, with no method of a class of the user's and without a change. A `ReadLog` is a reader that notes what
it reads as facts, by holder and key; they can be tested together much faster than the guard can be asked again, see
`util/unchanged.py`. So what the fast test compares is what the guard has read: nothing has to be kept alike by hand.

Invariant: as long as the facts hold, the same reads return the same objects, or values that are equal in the way that
the read promises: `result` by `==`, `is_there` whether there is one, `kinds` the types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from torch import Tensor

from functionalize.util.reading import elements_of, item_of, items_of, keys_of, size_of
from functionalize.util.unchanged import Unchanged


class _Resolved(Protocol):
    """A source, see `ir/inputs.py`."""

    def resolve(self, call: Any) -> Any: ...


class Reader:
    """Reads objects, and notes nothing."""

    __slots__ = ()

    def attribute(self, owner: Any, name: str) -> Any:
        """`owner.name`."""
        return getattr(owner, name)

    def is_there(self, owner: Any, name: str) -> bool:
        """Whether `owner.name` is not None."""
        return getattr(owner, name) is not None

    def item(self, holder: Any, key: Any) -> Any:
        """`holder[key]`; raises `LookupError` if there is none."""
        return item_of(holder, key)

    def element(self, items: Any, index: int) -> Any:
        """`items[index]` of a list of which all elements are read."""
        return item_of(items, index)

    def elements(self, items: Collection[Any]) -> Iterable[Any]:
        """The elements of a list or a set, in their order."""
        return elements_of(items)

    def table(self, table: Any) -> Any:
        """A dict of which all entries are read, in their order."""
        return table

    def keys(self, table: Any) -> list[Any]:
        """The keys of a dict, in their order."""
        return list(keys_of(table))

    def kinds(self, table: Any) -> dict[Any, type]:
        """The types of the values of a dict, by key."""
        return {key: type(each) for key, each in items_of(table)}

    def state(self, optimizer: Any, parameter: Any, key: str) -> Any:
        """An entry in the state of a parameter."""
        return item_of(item_of(optimizer.state, parameter), key)

    def result(self, read: Callable[[], Any]) -> Any:
        """What a function returns, which is compared by `==`."""
        return read()

    def constant(self, value: Any) -> Any:
        """An object that is always the same."""
        return value

    def references(self, tensor: Tensor) -> None:
        """The number of references that C++ has to a tensor matters: one more may be that of a node with hooks."""

    def window(self, tensor: Tensor, index: int) -> Tensor:
        """A tensor that must stay the same window on the storage of input `index`."""
        return tensor

    def place(self, place: Any, owner: Any, name: str) -> None:
        """`place` stands for `owner.name`, to which a replay may assign."""

    def find(self, source: _Resolved, call: Any) -> Any:
        """What a source finds."""
        return source.resolve(call)

    def walked(self, probes: Any, left: Any) -> None:
        """A walk has read what these probes hold. left: the guard on what of this must be asked at every call."""

    def moves(self) -> None:
        """What was read cannot be noted: it must be read again at every call."""


READER = Reader()


class ReadLog(Reader):
    """A reader that notes what it reads in `facts`.

        log.facts                 Unchanged
        log.left                  guards that must still be asked at every call
        log.settle()              True: what was read since the last `settle` is noted; False: it must be read again at
                                  every call, and nothing of it is noted

    A source is one that need not be asked again if the object that it finds is one that a noted read has returned.
    """

    __slots__ = ("_by_entry", "_fixed", "_moves", "_notes", "facts", "left")

    def __init__(self, by_entry: bool = False, beside: Unchanged | None = None) -> None:
        """by_entry: whether each entry of an optimizer's state is a fact, else all of it, which is tested faster.

        beside: see `Unchanged`.
        """
        self._by_entry = by_entry
        self.facts, self.left = Unchanged(beside), list[Any]()
        self._notes: list[tuple[Any, ...]] = []
        self._fixed: dict[
            int, Any
        ] = {}  # objects that noted reads have returned; kept, so that ids are theirs
        self._moves = False

    def settle(self) -> bool:
        """Note what was read since the last call, unless it moves; whether it is noted."""
        is_noted = not self._moves
        for note, *args in self._notes if is_noted else ():
            note(self.facts, *args)
        self._notes, self._fixed, self._moves = [], {}, False
        return is_noted

    def is_fixed(self, value: Any) -> bool:
        """Whether an object is one that a noted read has returned."""
        return id(value) in self._fixed

    def _note(self, value: Any, *note: Any) -> Any:
        self._notes.append(note)
        self._fixed[id(value)] = value
        return value

    def attribute(self, owner: Any, name: str) -> Any:
        return self._note(getattr(owner, name), Unchanged.attribute, owner, name)

    def is_there(self, owner: Any, name: str) -> bool:
        self._notes.append((Unchanged.presence, owner, name))
        return getattr(owner, name) is not None

    def item(self, holder: Any, key: Any) -> Any:
        return self._note(item_of(holder, key), Unchanged.entry, holder, key)

    def element(self, items: Any, index: int) -> Any:
        return self._note(item_of(items, index), Unchanged.elements, items)

    def elements(self, items: Collection[Any]) -> Iterable[Any]:
        note = Unchanged.elements if size_of(items) else Unchanged.emptiness
        self._notes.append((note, items))
        return elements_of(items)

    def table(self, table: Any) -> Any:
        return self._note(table, Unchanged.table, table)

    def keys(self, table: Any) -> list[Any]:
        self._notes.append((Unchanged.keys, table))
        return list(keys_of(table))

    def kinds(self, table: Any) -> dict[Any, type]:
        self._notes.append((Unchanged.kinds, table))
        return super().kinds(table)

    def state(self, optimizer: Any, parameter: Any, key: str) -> Any:
        if self._by_entry:
            return self.item(self.item(self.attribute(optimizer, "state"), parameter), key)
        return self._note(super().state(optimizer, parameter, key), Unchanged.states, optimizer)

    def result(self, read: Callable[[], Any]) -> Any:
        self._notes.append((Unchanged.read, read))
        return read()

    def constant(self, value: Any) -> Any:
        self._fixed[id(value)] = value
        return value

    def references(self, tensor: Tensor) -> None:
        self._notes.append((Unchanged.references, tensor))

    def window(self, tensor: Tensor, index: int) -> Tensor:
        self._notes.append((Unchanged.window, tensor, index))
        return tensor

    def place(self, place: Any, owner: Any, name: str) -> None:
        self._notes.append((Unchanged.place, place, owner, name))

    def find(self, source: _Resolved, call: Any) -> Any:
        value = source.resolve(call)
        self._moves |= not self.is_fixed(value)
        return value

    def walked(self, probes: Any, left: Any) -> None:
        self._notes.append((_note_walk, probes, self.left, left))

    def moves(self) -> None:
        self._moves = True


def _note_walk(facts: Unchanged, probes: Any, lefts: list[Any], left: Any) -> None:
    probes.note_in(facts)
    lefts.append(left)
