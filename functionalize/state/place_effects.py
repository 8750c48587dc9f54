"""Places in Python that a step moves, as a program has them: a number there is an input, a replay assigns or appends.

PlaceNumber(held, "self.n", int)      the source of an input: the number that `self.n` holds at each call
Assigned("self.n", held)              the effect of `self.n += 1`
AssignedLeaf("self.x", held)          the effect of `self.x = y.detach().requires_grad_()`
Appended("losses", held)              the effect of `losses.append(...)`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.state.hyperparameters import number_tensor
from functionalize.walk.live_places import content, is_absent, put
from functionalize.walk.parts import Held


@dataclass(frozen=True, slots=True, eq=False)
class PlaceNumber:
    """The source of a number that Python holds at a place. kind: its type, int or float."""

    place: Held
    name: str
    kind: type
    category: ClassVar[Category] = Category.BUFFERS

    def resolve(self, call: Call) -> Any:
        return number_tensor(self.place.resolve(), self.kind, f"`{self.name}`")


@dataclass(frozen=True, slots=True, eq=False)
class _PlaceEffect:
    """What a step does to a place. verb: for messages."""

    name: str
    place: Held
    verb: ClassVar[str]

    @property
    def what(self) -> str:
        """For messages."""
        return f"{self.verb} `{self.name}`"


@dataclass(frozen=True, slots=True, eq=False)
class Assigned(_PlaceEffect):
    """The effect of a step that assigns a number or a tensor to a place."""

    verb: ClassVar[str] = "assigns"

    def repeat(self, call: Call, value: Any) -> None:
        """Assign the value of this replay."""
        put(self.place, value)


@dataclass(frozen=True, slots=True, eq=False)
class AssignedLeaf(Assigned):
    """The same of a new leaf that requires a gradient. Its value: the tensor, and its gradient or None."""

    def repeat(self, call: Call, value: Any) -> None:
        """Assign the leaf of this replay, with its gradient."""
        leaf, leaf.grad = value[0].requires_grad_(), value[1]
        put(self.place, leaf)


@dataclass(frozen=True, slots=True, eq=False)
class Appended(_PlaceEffect):
    """The effect of a step that appends to a list or a deque."""

    verb: ClassVar[str] = "appends to"

    def repeat(self, call: Call, value: Any) -> None:
        """Append the value of this replay."""
        found = self.place.resolve()
        type(found).append(found, value)  # a list or a deque, which a guard has compared


@dataclass(frozen=True, slots=True, eq=False)
class FlagGuard:
    """A flag or a text that the step moves is what it was on entry."""

    name: str
    place: Held
    was: bool | str
    is_read_by_reader: ClassVar[bool] = True

    def failure(self, call: Call) -> str | None:
        """Why the program does not hold, or None."""
        now = content(self.place, call.reader)
        if type(now) is type(self.was) and now == self.was:
            return None
        return f"`{self.name}` is {'gone' if is_absent(now) else repr(now)}, was {self.was!r}"
