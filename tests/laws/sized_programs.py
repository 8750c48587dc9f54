"""Random programs over tensors whose lengths vary, with sizes that Python computes and that ops make of arguments.

    program = draw(sized_programs())     lines of Python on x (rows, 3), y (6, 3), m and n (masks of the rows)
    program.run(*arguments(7, 4, 0))     at 7 rows, of which `m` selects 4

A line is kept only if eager can run it at every size of `POOL`. The model of a register is its value at each of them,
so that no line depends on how the library sees sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

WIDTH = 3
POOL = ((5, 3), (8, 6), (13, 11), (34, 32), (20, 4), (20, 11), (20, 18))  # rows, selected ones
_MOST = 4096  # elements
_HELPERS = {"torch": torch, "F": torch.nn.functional}


@dataclass(frozen=True)
class SizedProgram:
    """One program; `returned`: the names of its results."""

    lines: tuple[str, ...]
    returned: tuple[str, ...]

    @property
    def source(self) -> str:
        """The function as Python."""
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"def program(x, y, m, n):\n{body}    return {', '.join(self.returned)},\n"

    @cached_property
    def run(self) -> Callable[..., Any]:
        """The function."""
        namespace: dict[str, Any] = dict(_HELPERS)
        exec(compile(self.source, "<sized program>", "exec"), namespace)
        found: Callable[..., Any] = namespace["program"]
        return found

    def __repr__(self) -> str:
        return self.source


def arguments(rows: int, selected: int, seed: int) -> list[Tensor]:
    """Two matrices, and two masks of the rows of the first: `m` selects so many of them, `n` one more."""
    generator = torch.Generator().manual_seed(seed * 10_007 + rows * 101 + selected)
    x, y = (torch.randn(count, WIDTH, generator=generator) for count in (rows, 6))
    order = torch.randperm(rows, generator=generator)
    return [x, y, order < selected, order.flip(0) <= selected]


@dataclass(eq=False)
class _Register:
    """values: at each size of the pool."""

    name: str
    values: list[Tensor]

    @property
    def dims(self) -> int:
        return self.values[0].dim()


class _World:
    """The program so far, run at every size of the pool."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        given = [arguments(*sizes, seed=0) for sizes in POOL]
        self.names = [dict(zip("xymn", each, strict=True)) for each in given]
        self.registers = [_Register(n, [each[n] for each in self.names]) for n in "xy"]
        self.lines: list[str] = []

    def below(self, n: int) -> int:
        return int(self.draw(st.integers(0, n - 1)))

    def one_of(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def pick(self, dims: int | None = None) -> str:
        found = [r.name for r in self.registers if dims is None or r.dims == dims]
        return str(self.one_of([*reversed(found)])) if found else ""

    def add(self, text: str) -> None:
        """Add a line, if eager can run it at every size."""
        results = []
        for names in self.names:
            values = {k: v.clone() for k, v in names.items()} if ".add_(" in text else names
            try:
                value = eval(text, dict(_HELPERS), values)
            except Exception:
                return
            if not isinstance(value, Tensor) or value.numel() > _MOST or not value.numel():
                return
            if not value.is_floating_point():
                return
            results.append(value)
        name = f"t{len(self.lines)}"
        for names, value in zip(self.names, results, strict=True):
            names[name] = value
        self.lines.append(f"{name} = {text}")
        self.registers.append(_Register(name, results))


def _view(w: _World) -> str:
    a, dim = w.pick(), w.below(2)
    size = f"{a}.shape[{dim}]"
    return str(
        w.one_of(
            (
                f"{a}[1:]",
                f"{a}[:-1]",
                f"{a}[::2]",
                f"{a}[: {size} // 2]",
                f"{a}[{size} // 3 :]",
                f"{a}[: {size} // 4 * 4]",
                f"{a}.t()",
                f"{a}.reshape(-1)",
                f"{a}.reshape({size}, -1)",
                f"{a}.view({a}.shape[-1], -1)",
                f"{a}.unsqueeze({dim})",
                f"{a}.transpose(0, -1).contiguous()",
                f"{a}.narrow({dim}, 1, {size} - 1)",
                f"{a}.chunk(2, {dim})[0]",
                f"{a}.split(3, {dim})[-1]",
                f"{a}.expand(2, *{a}.shape)",
                f"{a}.flatten()",
            )
        )
    )


def _pure(w: _World) -> str:
    a, b = w.pick(), w.pick()
    dim = w.below(2)
    return str(
        w.one_of(
            (
                f"{a} * {b}",
                f"{a} + {b}",
                f"{a} @ {a}.transpose(-1, -2)",
                f"{a} @ {b}",
                f"{a}.sin()",
                f"{a}.softmax({dim})",
                f"{a}.sum({dim})",
                f"{a}.mean({dim}, keepdim=True)",
                f"{a}.cumsum({dim})",
                f"torch.cat([{a}, {b}], {dim})",
                f"torch.stack([{a}, {a}.cos()])",
                f"F.pad({a}, (0, 0, 1, 2))",
                f"F.layer_norm({a}, {a}.shape[-1:])",
                f"{a} * torch.arange({a}.shape[-1])",
                f"{a}.masked_fill(torch.ones({a}.shape[-1], dtype=torch.bool).cumsum(0) > 3, 0.5)",
                f"{a}.tril()",
                f"({a} * 2).add_({a}.sum())",
                f"{a}.new_zeros({a}.shape).index_add(0, torch.arange({a}.shape[0]), {a})",
            )
        )
    )


def _number(w: _World) -> str:
    """Python decides, or computes, by a size."""
    a, limit = w.pick(), w.one_of((4, 6, 10, 12, 20, 25, 40))
    size = w.one_of((f"{a}.shape[0]", f"{a}.shape[0]", f"{a}.numel()", f"{a}.size(-1)"))
    some = [5 + w.below(30) for _ in range(2)]
    return str(
        w.one_of(
            (
                f"{a}.sin() if {size} > {limit} else {a}.cos()",
                f"{a} * ({size} % 3)",
                f"{a} * (2.0 if {size} == {some[0]} else 3.0)",
                f"{a}.cos() if {size} != {some[1]} else {a}.sin()",
                f"{a} * (2.0 if {some[0]} < {size} < {some[0] + 3} else 3.0)",
                f"{a} / {size}",
                f"{a} * ({size} // 2)",
                f"{a}[: max({size} - {limit}, 1)]",
                f"{a}[: min({size}, {limit})]",
                f"sum(row for row in {a}[::4])",
                f"{a} * float(str({size})[-1])",
            )
        )
    )


def _selected(w: _World) -> str:
    """An op makes a size of an argument."""
    rows = [
        r.name
        for r in w.registers
        if all(v.shape[:1] == n["m"].shape for v, n in zip(r.values, w.names, strict=True))
    ]
    a, mask = w.one_of(rows), w.one_of(("m", "n", "~m"))
    return str(
        w.one_of(
            (
                f"x[{mask}]",
                f"{a}[{mask}]",
                f"{a}[({mask}).nonzero().squeeze(1)]",
                f"{a}[torch.where({mask})[0]]",
                f"x.masked_select(({mask})[:, None])",
                f"{a}.repeat_interleave(({mask}).long() + 1, 0)",
                f"{a}.new_ones(2, {WIDTH}).repeat(int(({mask}).sum()), 1)",
                f"{a} + x[{mask}].sum()",
            )
        )
    )


_KINDS = (_view, _pure, _pure, _number, _number, _selected)


@st.composite
def sized_programs(draw: Any, most_lines: int = 8) -> SizedProgram:
    """A program with at least one line that computes."""
    w = _World(draw)
    deciding: list[str] = []
    for _ in range(2 + w.below(most_lines)):
        kind, before = w.one_of(_KINDS), len(w.registers)
        w.add(kind(w))
        if kind in (_number, _selected):
            deciding += [r.name for r in w.registers[before:]]
    w.add("x.sin() * 2")
    names = [r.name for r in w.registers if r.name not in ("x", "y")]
    shown = (names[-1], (deciding or names)[-1])
    return SizedProgram(tuple(w.lines), tuple(dict.fromkeys(shown)))
