"""A program as a sequence of tokens and integers, so that two programs can be compared node by node.

    leaves_of(program).integers     (2, 8, 32, ...): of arguments of nodes, of inputs, of outputs, of the epilogue
    leaves_of(program).tokens       everything else, in the same order; `INTEGER` where an integer stands
    with_integers(program, values)  a copy of the program with other integers in its graph

Two programs with equal leaves compute the same. Not among them: guards on Python state (`facts`), guards on inputs,
which follow from the inputs, the names of nodes, and `meta`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.program.printer import node_text
from functionalize.program.program import Program

INTEGER = "an integer"
_MOST_CONTENTS = 4096  # elements of a constant that are compared


@dataclass(slots=True)
class Leaves:
    """The leaves of a program. owners: for each token, the node or the text of the part that holds it.

    at: the index in `tokens` of each integer.
    """

    tokens: list[Any] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)

    def place(self, token: int) -> str:
        """The part of the program that holds a token."""
        owner = self.owners[token]
        return f"`{node_text(owner)}`" if isinstance(owner, fx.Node) else str(owner)


def leaves_of(program: Program) -> Leaves:
    """The leaves of a program."""
    return _Reader(program).leaves


class _Reader:
    def __init__(self, program: Program) -> None:
        self.leaves = Leaves()
        self._numbers = {node: i for i, node in enumerate(program.graph.nodes)}
        self._owner: Any = "the program"
        self._read([program.stage, list(program.writes), str(program.out_spec)])
        for node in program.graph.nodes:
            self._owner = node
            self._token((node.op, node.target if node.op == "call_function" else None))
            if node.op == "get_attr":
                self._token(_contents(program.constants[str(node.target)]))
            self._read([node.args, node.kwargs])
        for spec in program.inputs:
            self._owner = f"the input `{spec.name}`"
            self._read([spec.geometry, spec.nbytes, spec.device])
            self._token(_identity(spec.source))
        for part, name in (
            (program.outputs, "output"),
            (program.epilogue, "action"),
            (program.value_guards, "guard"),
        ):
            for i, each in enumerate(part):
                self._owner = f"{name} {i}"
                self._read(each)

    def _token(self, token: Any) -> None:
        self.leaves.tokens.append(token)
        self.leaves.owners.append(self._owner)

    def _read(self, value: Any) -> None:
        if type(value) is int:
            self.leaves.at.append(len(self.leaves.tokens))
            self.leaves.integers.append(value)
            self._token(INTEGER)
        elif isinstance(value, fx.Node):
            self._token(("node", self._numbers[value]))
        elif isinstance(value, (list, tuple)):  # `Geometry`, too
            self._token((type(value) is list, len(value)))
            for each in value:
                self._read(each)
        elif isinstance(value, dict):
            self._token(("keys", tuple(value)))
            for each in value.values():
                self._read(each)
        elif isinstance(value, slice):
            self._read([value.start, value.stop, value.step])
        elif dataclasses.is_dataclass(value) and not isinstance(self._owner, fx.Node):
            self._token(type(value))
            for each in dataclasses.fields(value):
                if each.name in ("source", "others"):
                    self._token(_identity(getattr(value, each.name)))
                else:
                    self._read(getattr(value, each.name))
        elif isinstance(value, Tensor):
            self._token(_contents(value))
        else:
            self._token(_plain(value))


def _plain(value: Any) -> Any:
    """A token that equals that of an equal constant: -0.0 is not 0.0, and 1 is not 1.0."""
    plain = (bool, float, complex, str, bytes, type(None))
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


def _identity(source: Any) -> Any:
    """A token of a source: equal for two that look at the same place."""
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        parts = (getattr(source, each.name) for each in dataclasses.fields(source))
        return (type(source), *map(_identity, parts))
    if isinstance(source, tuple):
        return tuple(map(_identity, source))
    return (type(source), source) if isinstance(source, (int, str, type(None))) else id(source)


def _contents(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.numel() > _MOST_CONTENTS or value.is_meta:
        return id(value)
    data = value.detach().cpu().contiguous().reshape(-1)
    return value.dtype, tuple(value.shape), bytes(data.view(torch.uint8).tolist())


def with_integers(program: Program, values: Sequence[Any]) -> Program:
    """A copy with these integers in its graph, in the order of `leaves_of`; the other parts are those of `program`."""
    copied, rest = program.copy(), iter(values[len(program.writes) :])
    for node in copied.graph.nodes:
        args, kwargs = _replaced([node.args, node.kwargs], rest)
        node.args, node.kwargs = tuple(args), kwargs
    return copied


def _replaced(value: Any, rest: Iterator[Any]) -> Any:
    if type(value) is int:
        return next(rest)
    if isinstance(value, dict):
        return {key: _replaced(each, rest) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*_replaced([value.start, value.stop, value.step], rest))
    if isinstance(value, list):
        return [_replaced(each, rest) for each in value]
    if type(value) in (tuple, torch.Size) or type(value).__name__ == "immutable_list":
        return tuple(_replaced(each, rest) for each in value)
    if isinstance(value, tuple):
        return type(value)(*(_replaced(each, rest) for each in value))
    return value
