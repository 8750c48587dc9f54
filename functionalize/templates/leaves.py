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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.graphs import pytree
from functionalize.ir.guards import AliasGuard, TensorGuard
from functionalize.ir.inputs import WholeStorage
from functionalize.program.executable import Executable
from functionalize.program.printer import node_text
from functionalize.program.program import Program

INTEGER = "an integer"
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


@dataclass(slots=True)
class Leaves:
    """The leaves of a program. owners: for each token, the node or the text of the part that holds it.

    at: the index in `tokens` of each integer. sizes: for each integer, whether it may be a size. guarded: whether every
    replay compares it with its argument before it runs, so that a wrong one refuses the program. fixed: the type of
    object that holds the integer of this number, if no copy with another one can be made.
    """

    tokens: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    sizes: list[bool] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    fixed: dict[int, str] = field(default_factory=dict)

    def place(self, token: int) -> str:
        """The part of the program that holds a token."""
        owner = self.owners[token]
        return f"`{node_text(owner)}`" if isinstance(owner, fx.Node) else str(owner)


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
        self._numbers: dict[fx.Node, int] = {}
        self._owner: Any = "the program"
        self._is_size, self._is_guarded = True, False

    def read_program(self, program: Executable) -> None:
        """Read every part; `_copied` replaces the integers in the same order."""
        nodes, self.order = self.order or program.graph.nodes, ()
        self._numbers |= {node: i for i, node in enumerate(nodes)}
        self._read_numbers([program.stage, list(program.writes), str(program.out_spec)])
        for node in nodes:
            self._owner = node
            self._token((node.op, node.target if node.op == "call_function" else None))
            if node.op == "get_attr":
                self._token(_contents(program.constants[str(node.target)]))
            read = self._read_numbers if node.target is operator.getitem else self._read
            read([node.args, node.kwargs])
        guards = [each for each in program.guards if type(each) is TensorGuard]
        compared = {id(each.spec) for each in guards if each.spec is program.inputs[each.input]}
        compared |= set(map(id, guards))
        for name, what in PARTS.items():
            for i, each in enumerate(getattr(program, name)):
                self._owner = f"the input `{each.name}`" if name == "inputs" else f"{what} {i}"
                self._is_guarded = id(each) in compared
                self._read(each)
                self._is_guarded = False

    def _token(self, token: Any) -> None:
        self.leaves.tokens.append(token)
        self.leaves.owners.append(self._owner)

    def _read_numbers(self, value: Any) -> None:
        """The same for a value whose integers are no sizes."""
        before, self._is_size = self._is_size, False
        self._read(value)
        self._is_size = before

    def _read(self, value: Any) -> None:
        if type(value) in _CONSTANTS:  # most values: before the other tests
            self._token(constant_token(value))
        elif type(value) is int:
            self.leaves.at.append(len(self.leaves.tokens))
            self.leaves.integers.append(value)
            self.leaves.sizes.append(self._is_size)
            self.leaves.guarded.append(self._is_guarded)
            self._token(INTEGER)
        elif isinstance(value, fx.Node):
            self._token(("node", self._numbers[value]))
        elif isinstance(value, (list, tuple)):  # `Geometry`, too
            self._token((type(value) is list, len(value)))
            self._read_parts(value, value)
        elif isinstance(value, dict):
            self._token(("keys", tuple(value)))
            self._read_parts(value, value.values())
        elif isinstance(value, slice):
            self._read([value.start, value.stop, value.step])
        elif isinstance(value, AliasGuard):  # the numbers of storages in a recording
            self._token(tuple(map(value.groups.index, value.groups)))
        elif isinstance(value, Executable):  # of a guard
            self.read_program(value)
        elif is_source(value):
            self._token(identity(value))
        elif _is_opened(value, self._owner):
            self._token(type(value))
            start = len(self.leaves.integers)
            for each in dataclasses.fields(value):
                read = self._read_numbers if each.name in _NUMBERS else self._read
                read(getattr(value, each.name))
            self._note_fixed(value, start)
        elif isinstance(value, Tensor):
            self._token(_contents(value))
        else:
            self._token(constant_token(value))

    def _read_parts(self, value: Any, parts: Iterable[Any]) -> None:
        start = len(self.leaves.integers)
        for each in parts:
            self._read(each)
        if type(value) not in (tuple, list) and not hasattr(value, "_fields"):
            self._note_fixed(value, start)

    def _note_fixed(self, value: Any, start: int) -> None:
        if not _is_copied(value):
            for number in range(start, len(self.leaves.integers)):
                self.leaves.fixed.setdefault(number, type(value).__name__)


def is_source(value: Any) -> bool:
    """Whether a value is a source of an input: compared by the object that it finds, and never changed."""
    return hasattr(type(value), "resolve") and not isinstance(value, (WholeStorage, Executable))


def _is_opened(value: Any, owner: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(owner, fx.Node)
    )


_CONSTANTS = frozenset({bool, float, str, type(None)})


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
    if isinstance(source, pytree.TreeSpec):
        return str(source)
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        parts = (getattr(source, each.name) for each in dataclasses.fields(source))
        return (type(source), *map(identity, parts))
    if isinstance(source, tuple):
        return tuple(map(identity, source))
    return (type(source), source) if isinstance(source, (int, str, type(None))) else id(source)


def _contents(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.numel() > _MOST_CONTENTS or value.is_meta:
        return id(value)
    data = value.detach().cpu().contiguous().reshape(-1)
    return value.dtype, tuple(value.shape), bytes(data.view(torch.uint8).tolist())


# -- the same program with other integers ----------------------------------------------------------


def with_integers(program: Program, values: Sequence[Any]) -> Program:
    """A copy with these integers, in the order of `leaves_of`. Its `meta` is that of `program`."""
    rest = iter(values)
    copied: Program = _copied(program, rest)
    assert next(rest, None) is None
    return copied


def _copied(program: Any, rest: Iterator[Any]) -> Any:
    writes = tuple(replaced(list(program.writes), rest))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        args, kwargs = replaced([copied.args, copied.kwargs], rest)
        copied.args, copied.kwargs = tuple(args), kwargs
    parts = {
        name: tuple([replaced(each, rest) for each in getattr(program, name)]) for name in PARTS
    }
    return dataclasses.replace(
        program,
        graph=graph,
        constants=dict(program.constants),
        writes=writes,
        _module=None,
        _run=None,
        **parts,
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
    if is_source(value) or isinstance(value, AliasGuard) or not _is_opened(value, None):
        return value
    names = [each.name for each in dataclasses.fields(value)]
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
