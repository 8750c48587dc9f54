"""Random Python state around a step: a number behind a chain of holders, read at some site, and changed between calls.

    example = Example(["list", "property"], "forward", [Change(1, 2.0), Change(0, 2.0)])
    world = World(example)        holders and a step that reads the number through them
    world.step(x)                 x * 1.0
    world.change(...)             the number is 2.0, replaced in the holder at that depth

Each holder says how it is made, how code reads it, and how its content is replaced in place; a holder that is immutable
is made anew, and replaced in the one above it.
"""

from __future__ import annotations

import array
import collections
import contextvars
import enum
import functools
import io
import logging
import operator
import queue
import random
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Make = Callable[[Any], Any]
Put = Callable[[Any, Any], None]


class Holder(NamedTuple):
    """make(content), read(holder), put(holder, content).

    put None: the holder is immutable. plain: it holds numbers only.
    """

    make: Make
    read: Callable[[Any], Any]
    put: Put | None = None
    plain: bool = False


class Color(enum.Enum):
    RED = 1


class Base:
    content: Any = None

    def __init__(self, content: Any) -> None:
        self.content, self.unread = content, 0

    def helper(self) -> Any:
        return self.content

    @property
    def value(self) -> Any:
        return self.helper()

    def __getitem__(self, key: Any) -> Any:
        return self.content

    def __call__(self) -> Any:
        return self.content


class Derived(Base):
    def helper(self) -> Any:
        return super().helper()


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class Listed(list[Any]):
    """A list with an attribute."""


class Pair(NamedTuple):
    first: Any
    second: int = 0


@dataclass
class Record:
    content: Any
    other: float = 1.0


class Partial(functools.partial[Any]):
    """A partial of the user's."""


class Journal(logging.Logger):
    """A logger of the user's."""


class Batches(queue.Queue[Any]):
    """A queue of the user's."""


class Draws(random.Random):
    """A generator of the user's."""


class Text(io.StringIO):
    """A file of the user's."""


# What the walk reads by its content, so that attributes come on top.
SPECIAL: dict[str, Callable[[], Any]] = {
    "partial's attribute": lambda: functools.partial(int),
    "logger's attribute": lambda: logging.Logger("made"),
    "queue's attribute": queue.Queue,
    "generator's attribute": lambda: random.Random(1),
    "file's attribute": io.StringIO,
    "partial of the user's": lambda: Partial(int),
    "logger of the user's": lambda: Journal("made"),
    "queue of the user's": Batches,
    "generator of the user's": lambda: Draws(1),
    "file of the user's": Text,
}


def special(make: Callable[[], Any], content: Any) -> Any:
    made = make()
    made.content = content
    return made


def with_default(content: Any) -> Any:
    def fn(value: Any = content) -> Any:
        return value

    return fn


def closure(content: Any) -> Any:
    return lambda: content


def variable(content: Any) -> contextvars.ContextVar[Any]:
    made: contextvars.ContextVar[Any] = contextvars.ContextVar("made")
    made.set(content)
    return made


def unbound(content: Any) -> Any:
    """What a class must hold so that its instances read `content`: a function would become their method."""
    return staticmethod(content) if isinstance(content, types.FunctionType) else content


def on_class(content: Any) -> Any:
    return type("Local", (Base,), {"__init__": lambda self: None, "content": unbound(content)})()


def referring(content: Any) -> Any:
    return Base(weakref.ref(content)), content


def attribute(name: str) -> Callable[[Any, Any], None]:
    return lambda holder, content: setattr(holder, name, content)


def first(holder: Any, content: Any) -> None:
    holder[0] = content


def set_default(holder: Any, content: Any) -> None:
    holder.__defaults__ = (content,)


def set_cell(holder: Any, content: Any) -> None:
    holder.__closure__[0].cell_contents = content


def set_on_class(holder: Any, content: Any) -> None:
    type(holder).content = unbound(content)


def listed(content: Any) -> Any:
    made = Listed()
    made.content = content
    return made


class Config(collections.UserDict[str, Any]):
    """Code of a library alone names the attribute that holds its entries."""


def cached(content: Any) -> Any:
    """A function that returns what it has cached, also after `source` has changed."""
    source = [content]

    @functools.lru_cache
    def read() -> Any:
        return source[0]

    return types.SimpleNamespace(read=read, source=source)


def fill(holder: Any, content: Any) -> None:
    holder.source[0] = content
    holder.read.cache_clear()


def endless(content: Any) -> Any:
    """A generator that stays where it is, and reads a list."""
    source = [content]

    def running() -> Iterator[Any]:
        while True:
            yield source[0]

    return types.SimpleNamespace(running=running(), source=source)


def member(content: Any) -> Any:
    return enum.Enum("Member", {"ONE": Base(content)})


def with_property(content: Any) -> Any:
    return type("Local", (), {"content": property(lambda self: content)})()


def set_property(holder: Any, content: Any) -> None:
    type(holder).content = property(lambda self: content)


read_content = operator.attrgetter("content")
HOLDERS: dict[str, Holder] = {
    "list": Holder(lambda c: [c], lambda h: h[0], first),
    "iterated": Holder(lambda c: [c], lambda h: [*h][-1], first),
    "tuple": Holder(lambda c: (0, c), lambda h: h[1]),
    "dict": Holder(lambda c: {"a": c}, lambda h: h["a"], lambda h, c: h.update(a=c)),
    "dict by enum": Holder(
        lambda c: {Color.RED: c},
        lambda h: h[Color.RED],
        lambda h, c: operator.setitem(h, Color.RED, c),
    ),
    "dict's values": Holder(
        lambda c: {("a", 1): c},
        lambda h: next(iter(h.values())),
        lambda h, c: operator.setitem(h, ("a", 1), c),
    ),
    "named tuple": Holder(Pair, lambda h: h.first),
    "deque": Holder(lambda c: collections.deque([c]), lambda h: h[0], first),
    "UserDict": Holder(
        lambda c: collections.UserDict(a=c),
        lambda h: h["a"],
        lambda h, c: operator.setitem(h, "a", c),
    ),
    "object": Holder(Base, lambda h: h.content, attribute("content")),
    "property": Holder(Base, lambda h: h.value, attribute("content")),
    "inherited": Holder(Derived, lambda h: h.helper(), attribute("content")),
    "__getitem__": Holder(Base, lambda h: h["any"], attribute("content")),
    "__call__": Holder(Derived, lambda h: h(), attribute("content")),
    "getattr": Holder(Base, lambda h: getattr(h, "con" + "tent"), attribute("content")),
    "vars": Holder(Base, lambda h: vars(h)["content"], attribute("content")),
    "asdict": Holder(Record, lambda h: asdict(h)["content"], attribute("content"), plain=True),
    "dataclass": Holder(Record, lambda h: h.content, attribute("content")),
    "slots": Holder(Slotted, lambda h: h.content, attribute("content")),
    "namespace": Holder(
        lambda c: types.SimpleNamespace(content=c), lambda h: h.content, attribute("content")
    ),
    "subclass of list": Holder(listed, lambda h: h.content, attribute("content")),
    "class attribute": Holder(on_class, lambda h: h.content, set_on_class),
    "default": Holder(with_default, lambda h: h(), set_default),
    "closure": Holder(closure, lambda h: h(), set_cell),
    "partial": Holder(
        lambda c: functools.partial(operator.getitem, [c]),
        lambda h: h(0),
        lambda h, c: first(h.args[0], c),
    ),
    "function attribute": Holder(
        lambda c: types.SimpleNamespace(fn=functools.wraps(closure)(lambda: c)),
        lambda h: h.fn(),
        lambda h, c: set_cell(h.fn, c),
    ),
    "ContextVar": Holder(variable, lambda h: h.get(), lambda h, c: h.set(c) and None),
    "UserDict of the user's": Holder(
        lambda c: Config(a=c), lambda h: h["a"], lambda h, c: operator.setitem(h, "a", c)
    ),
    "cache": Holder(cached, lambda h: h.read(), fill),
    "endless": Holder(
        endless, lambda h: next(h.running), lambda h, c: operator.setitem(h.source, 0, c)
    ),
    "calls": Holder(
        lambda c: types.SimpleNamespace(it=iter(closure(c), Base)),
        lambda h: next(h.it),
        lambda h, c: setattr(h, "it", iter(closure(c), Base)),
    ),
    "enumeration": Holder(
        member, lambda h: h.ONE.value.content, lambda h, c: setattr(h.ONE.value, "content", c)
    ),
    "mapping proxy": Holder(
        lambda c: types.SimpleNamespace(table=(t := {"a": c}), view=types.MappingProxyType(t)),
        lambda h: h.view["a"],
        lambda h, c: h.table.update(a=c),
    ),
    "property of a class": Holder(with_property, lambda h: h.content, set_property),
    "array": Holder(lambda c: np.array([c]), lambda h: float(h[0]), first, plain=True),
    "array.array": Holder(lambda c: array.array("d", [c]), lambda h: h[0], first, plain=True),
    **{
        name: Holder(functools.partial(special, make), lambda h: h.content, attribute("content"))
        for name, make in SPECIAL.items()
    },
}
SITES = ("closure", "method", "forward", "forward hook", "gradient hook")


@dataclass(frozen=True)
class Change:
    """A change between two calls: `number` replaced at `depth`; the same number: equal objects in place of others."""

    depth: int
    number: float


@dataclass(frozen=True)
class Example:
    """holders: from the outermost to the one that holds the number. site: where the step reads it."""

    holders: tuple[str, ...]
    site: str
    changes: tuple[Change | None, ...]


class World:
    """One copy of an example's state, and its step."""

    def __init__(self, example: Example) -> None:
        self.example, self.number = example, 1.0
        self.root = Base(self._made(0))
        self.layer = nn.Linear(2, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.5)
            self.layer.bias.fill_(0.25)
        self.step = self._step(example.site)

    def _made(self, depth: int) -> Any:
        content: Any = self.number
        for name in reversed(self.example.holders[depth:]):
            content = HOLDERS[name].make(content)
        return content

    def change(self, change: Change | None) -> None:
        """Replace the content of the holder at the depth, or of the next one above it that can be changed."""
        if change is None:
            self.root.unread += 1
            return
        self.number = change.number
        depth = min(change.depth, len(self.example.holders) - 1)
        path = [self.root.content]
        for name in self.example.holders[:-1]:
            path.append(HOLDERS[name].read(path[-1]))
        while depth >= 0:
            put = HOLDERS[self.example.holders[depth]].put
            if put is not None:
                return put(path[depth], self._made(depth + 1))
            depth -= 1
        self.root.content = self._made(0)

    def _step(self, site: str) -> Callable[[Tensor], Any]:
        root, layer, readers = (
            self.root,
            self.layer,
            [HOLDERS[n].read for n in self.example.holders],
        )

        def number() -> Any:
            value = root.content
            for read in readers:
                value = read(value)
            return value

        def trained(x: Tensor) -> tuple[Tensor, Tensor]:
            loss = layer(x).sum()
            loss.backward()
            assert layer.weight.grad is not None
            grad, layer.weight.grad, layer.bias.grad = layer.weight.grad, None, None
            return loss.detach(), grad

        if site == "closure":
            return lambda x: x * number()
        if site == "method":

            class Trainer(Base):
                def step(self, x: Tensor) -> Tensor:
                    return x * self.helper()()

            return Trainer(number).step
        if site == "forward":

            class Model(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.read, self.layer = number, layer

                def scaled(self, x: Tensor) -> Tensor:
                    return x * self.read()

                def forward(self, x: Tensor) -> Tensor:
                    return self.layer(self.scaled(x))

            model = Model()
            return lambda x: model(x).detach()
        if site == "forward hook":
            layer.register_forward_hook(lambda module, args, out: out * number())
        else:
            layer.weight.register_hook(lambda grad: grad * number())
        return trained


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Any example."""
    nested = [name for name, holder in HOLDERS.items() if not holder.plain]
    holders = draw(st.lists(st.sampled_from(nested), max_size=3))
    holders.append(draw(st.sampled_from([*HOLDERS])))
    change = st.builds(Change, st.integers(0, 3), st.sampled_from([1.0, 2.0, -0.0, 0.0]))
    changes = draw(st.lists(st.none() | change, min_size=1, max_size=4))
    return Example(tuple(holders), draw(st.sampled_from(SITES)), tuple(changes))
