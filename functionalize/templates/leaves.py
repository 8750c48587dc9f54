"""A program as a sequence of tokens and integers, so that two programs can be compared node by node.

    leaves_of(program).integers     (2, 8, 32, ...): of arguments of nodes, of inputs, outputs, the epilogue, guards
    leaves_of(program).tokens       everything else, in the same order; `INTEGER` where an integer stands
    with_integers(program, values)  a copy of the program with other integers

Two programs with equal leaves compute the same. Not among them: guards on Python state (`facts`), the names of nodes,
and `meta`.
"""

from __future__ import annotations

import dataclasses
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from functionalize._compat.graphs import NodeWriter, pytree
from functionalize.ir.guards import AliasGuard, TensorGuard
from functionalize.ir.inputs import WholeStorage
from functionalize.program.executable import Executable
from functionalize.program.metadata import size_by_data
from functionalize.program.printer import node_text

INTEGER = "an integer"
_AnyExecutable = TypeVar("_AnyExecutable", bound=Executable)
# Fields that number inputs, results, arguments and outputs: no size, and compared with none.
_NUMBERS = frozenset({"input", "slot", "other", "leaf", "output"})
_MOST_CONTENTS = 4096  # elements of a constant that are compared
# The fields of a program that are read after its nodes, and what one part of each is called.
PARTS = {
    "inputs": "input",
    "outputs": "output",
    "epilogue": "action",
    "value_guards": "guard on a number",
    "guards": "guard",
}


@dataclass
class Leaves:
    """The leaves of a program. owners: the node or the text of each part, with the number of tokens before it.

    fixed: the type of object that holds the integer of this number, if no copy with another one can be made.
    numbers: the integers, from one number to before another, that are no sizes. compared: those of guards on arguments.
    """

    tokens: list[Any] = field(default_factory=list)
    owners: list[tuple[int, Any]] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    fixed: dict[int, str] = field(default_factory=dict)
    numbers: list[tuple[int, int]] = field(default_factory=list)
    compared: list[tuple[int, int]] = field(default_factory=list)

    def place(self, token: int) -> str:
        """The part of the program that holds a token."""
        owner = self.owners[bisect_right(self.owners, token, key=itemgetter(0)) - 1][1]
        return f"`{node_text(owner)}`" if isinstance(owner, fx.Node) else str(owner)

    @cached_property
    def at(self) -> list[int]:
        """The index in `tokens` of each integer."""
        return [index for index, token in enumerate(self.tokens) if token is INTEGER]

    @cached_property
    def sizes(self) -> list[bool]:
        """For each integer, whether it may be a size."""
        return [not each for each in self._in(self.numbers)]

    @cached_property
    def guarded(self) -> list[bool]:
        """For each integer, whether every replay compares it with its argument before it runs.

        Then a wrong one refuses the program.
        """
        return self._in(self.compared)

    def _in(self, spans: Sequence[tuple[int, int]]) -> list[bool]:
        found = [False] * len(self.integers)
        for start, end in spans:
            found[start:end] = [True] * (end - start)
        return found


def leaves_of(program: Executable, order: Sequence[str] = ()) -> Leaves:
    """The leaves of a program. order: the names of its nodes, in the order in which they are read, if it has these."""
    reader = _Reader()
    nodes = {node.name: node for node in program.graph.nodes}
    if nodes.keys() == set(order):
        reader.order = [nodes[name] for name in order]
    reader.read_program(program)
    return reader.leaves


class _Reader:
    def __init__(self) -> None:
        self.leaves = Leaves()
        self.order: Sequence[fx.Node] = ()
        self._token = self.leaves.tokens.append
        self._numbers: dict[fx.Node, int] = {}
        self._in_node = False

    def read_program(self, program: Executable) -> None:
        """Read every part; `_copied` replaces the integers in the same order."""
        leaves, was_in_node = self.leaves, self._in_node
        nodes, self.order = self.order or program.graph.nodes, ()
        self._numbers |= {node: i for i, node in enumerate(nodes)}
        self._begin("the program")
        self._read_numbers([program.stage, list(program.writes), str(program.out_spec)])
        self._in_node = True
        for node in nodes:
            self._begin(node)
            op, target = node.op, node.target
            # Ops are told apart by id: hashing one calls Python.
            self._token((op, id(target) if op == "call_function" else None))
            if op == "get_attr":
                self._token(_contents(program.constants[str(target)]))
            read = self._read_numbers if target is operator.getitem else self._read
            read([node.args, node.kwargs])
            made = size_by_data(node)
            if made is not None:
                self._read(made)
        self._in_node = False
        guards = [each for each in program.guards if type(each) is TensorGuard]
        compared = {id(each.spec) for each in guards if each.spec is program.inputs[each.input]}
        compared |= set(map(id, guards))
        for name, what in PARTS.items():
            for i, each in enumerate(getattr(program, name)):
                self._begin(f"the input `{each.name}`" if name == "inputs" else f"{what} {i}")
                start = len(leaves.integers)
                self._read(each)
                if id(each) in compared:
                    leaves.compared.append((start, len(leaves.integers)))
        self._in_node = was_in_node

    def _begin(self, owner: Any) -> None:
        self.leaves.owners.append((len(self.leaves.tokens), owner))

    def _read_numbers(self, value: Any) -> None:
        """The same for a value whose integers are no sizes."""
        start = len(self.leaves.integers)
        self._read(value)
        if start < len(self.leaves.integers):
            self.leaves.numbers.append((start, len(self.leaves.integers)))

    def _read(self, value: Any) -> None:
        kind: Any = type(value)  # hashable, for mypy
        if kind in _CONSTANTS:  # most values: before the other tests
            self._token((kind, value) if kind is not float else constant_token(value))
        elif kind is int:
            self.leaves.integers.append(value)
            self._token(INTEGER)
        elif kind is fx.Node:
            self._token(("node", self._numbers[value]))
        elif isinstance(value, (list, tuple)):  # `Geometry`, too
            self._token((kind is list, len(value)))
            self._read_parts(value, value)
        elif isinstance(value, dict):
            self._token(("keys", tuple(value)))
            self._read_parts(value, value.values())
        elif kind is slice:
            self._read([value.start, value.stop, value.step])
        elif isinstance(value, AliasGuard):  # the numbers of storages in a recording
            self._token(tuple(map(value.groups.index, value.groups)))
        elif isinstance(value, Executable):  # of a guard
            self.read_program(value)
        elif is_source(value):
            self._token(identity(value))
        elif not self._in_node and (names := _fields_of(kind)) is not None:
            self._token(kind)
            start = len(self.leaves.integers)
            for name in names:
                read = self._read_numbers if name in _NUMBERS else self._read
                read(getattr(value, name))
            self._note_fixed(value, start)
        elif isinstance(value, Tensor):
            self._token(_contents(value))
        else:
            self._token(constant_token(value))

    def _read_parts(self, value: Any, parts: Iterable[Any]) -> None:
        start, read = len(self.leaves.integers), self._read
        for each in parts:
            read(each)
        if type(value) not in (tuple, list) and not hasattr(value, "_fields"):
            self._note_fixed(value, start)

    def _note_fixed(self, value: Any, start: int) -> None:
        end = len(self.leaves.integers)
        if start < end and not _is_copied(value):
            for number in range(start, end):
                self.leaves.fixed.setdefault(number, type(value).__name__)


def is_source(value: Any) -> bool:
    """Whether a value is a source of an input: compared by the object that it finds, and never changed."""
    return hasattr(type(value), "resolve") and not isinstance(value, (WholeStorage, Executable))


@lru_cache(maxsize=1024)
def _fields_of(kind: Any) -> tuple[str, ...] | None:
    """The names of the fields of a dataclass; None for another type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple([each.name for each in dataclasses.fields(kind)])


_CONSTANTS = frozenset({bool, float, str, type(None)})
_NAMES = frozenset({int, str, type(None)})


def constant_token(value: Any) -> Any:
    """A token that equals that of an equal constant: -0.0 is not 0.0, and 1 is not 1.0."""
    plain = (int, float, complex, str, bytes, type(None))
    return (
        (type(value), repr(value))
        if isinstance(value, plain)
        else value
        if _is_constant(value)
        else id(value)
    )


def _is_constant(value: Any) -> bool:
    return callable(value) or isinstance(
        value, (torch.dtype, torch.device, torch.layout, torch.memory_format)
    )


def identity(source: Any) -> Any:
    """A token of a source, or of an effect: equal for two that look at, or change, the same place alike."""
    kind: Any = type(source)
    if kind in _NAMES:
        return kind, source
    if isinstance(source, pytree.TreeSpec):
        return str(source)
    names = _fields_of(kind)
    if names is not None:
        return (kind, *[identity(getattr(source, name)) for name in names])
    if isinstance(source, tuple):
        return tuple(map(identity, source))
    return (kind, source) if isinstance(source, (int, str)) else id(source)


def _contents(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.numel() > _MOST_CONTENTS or value.is_meta:
        return id(value)
    data = value.detach().cpu().contiguous().reshape(-1)
    return value.dtype, tuple(value.shape), bytes(data.view(torch.uint8).tolist())


# -- the same program with other integers ----------------------------------------------------------


def with_integers(program: _AnyExecutable, values: Sequence[Any]) -> _AnyExecutable:
    """A copy with these integers, in the order of `leaves_of`. Its `meta` is that of `program`."""
    rest = iter(values)
    copied: _AnyExecutable = _copied(program, rest)
    assert next(rest, None) is None
    return copied


@dataclass(frozen=True, slots=True)
class ReplacedParts:
    """What a program consists of, with other integers.

    arguments: of each node, positional ones and those by keyword, with nodes of the program itself. sized: what is
    made by each node whose result has a size that depends on data.
    """

    writes: tuple[int, ...]
    arguments: dict[fx.Node, tuple[Any, Any]]
    sized: dict[fx.Node, Any]
    parts: dict[str, tuple[Any, ...]]

    @staticmethod
    def of(program: Any, rest: Iterator[Any]) -> ReplacedParts:
        """rest: the integers, in the order of `leaves_of`."""
        writes = tuple(replaced(list(program.writes), rest))
        arguments, sized = {}, {}
        for node in program.graph.nodes:
            arguments[node] = replaced(node.args, rest), replaced(node.kwargs, rest)
            made = size_by_data(node)
            if made is not None:
                sized[node] = replaced(made, rest)
        parts = {
            name: tuple([replaced(each, rest) for each in getattr(program, name)]) for name in PARTS
        }
        return ReplacedParts(writes, arguments, sized, parts)


def _copied(program: Any, rest: Iterator[Any]) -> Any:
    found = ReplacedParts.of(program, rest)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy = NodeWriter(graph).copy
    for node, arguments in found.arguments.items():
        args, kwargs = fx.node.map_arg(arguments, copies.__getitem__)
        made = copies[node] = copy(node, args, kwargs)
        made.meta.update(node.meta)
    for node, size in found.sized.items():
        copies[node].meta["sized"] = size
    return dataclasses.replace(
        program,
        graph=graph,
        constants=dict(program.constants),
        writes=found.writes,
        _module=None,
        _run=None,
        **found.parts,
    )


def replaced(value: Any, rest: Iterator[Any]) -> Any:
    """A value with its integers replaced by the next ones; the same object if none of them differs.

    Raises `TypeError` where an integer differs in an object of another type than those of programs.
    """
    if type(value) is int:
        return next(rest)
    if type(value) in _CONSTANTS or isinstance(value, fx.Node):  # most values
        return value
    if isinstance(value, slice):
        return slice(*replaced([value.start, value.stop, value.step], rest))
    if isinstance(value, dict):
        new = {key: replaced(each, rest) for key, each in value.items()}
        if all(map(_is_same, new.values(), value.values())):
            return value
        _check_plain(value)
        return new
    if isinstance(value, (list, tuple)):
        items = [replaced(each, rest) for each in value]
        if all(map(_is_same, items, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if type(value) is torch.Size and all(type(each) is int for each in items):
            return torch.Size(items)
        _check_plain(value)
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Executable):
        return _copied(value, rest)
    kind: Any = type(value)
    names = _fields_of(kind)
    if is_source(value) or isinstance(value, AliasGuard) or names is None:
        return value
    was = [getattr(value, name) for name in names]
    items = [replaced(each, rest) for each in was]
    if all(map(_is_same, items, was)):
        return value
    _check_plain(value)
    return dataclasses.replace(value, **dict(zip(names, items, strict=True)))


def _check_plain(value: Any) -> None:
    if not _is_copied(value):
        raise TypeError(no_copy(type(value).__name__))


def no_copy(kind: str) -> str:
    """Why a program with other integers cannot be made. kind: the type of what holds one."""
    return f"a {kind} holds sizes, of which no copy can be made"


def _is_copied(value: Any) -> bool:
    """Whether a copy of a value is of its type, and runs no code of the user's."""
    is_ours = dataclasses.is_dataclass(value) and type(value).__module__.startswith(
        "functionalize."
    )
    return type(value).__name__ in _PLAIN or is_ours


_PLAIN = frozenset({"list", "tuple", "dict", "Size", "immutable_list", "immutable_dict"})


def _is_same(new: Any, was: Any) -> bool:
    return new is was or (type(new) is type(was) is int and new == was)
