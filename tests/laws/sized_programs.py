"""Random programs over tensors whose lengths vary, with sizes that Python computes and that ops make of arguments.

    program = draw(sized_programs())     lines of Python on x (rows, 3), y (6, 3), m and n (masks of the rows)
    program.run(*arguments(7, 4, 0))     at 7 rows, of which `m` selects 4
    program.sizes.probes                 sizes between the known ones, at which its lines decide otherwise

A line is kept only if eager can run it at every known size and every probe. The model of a register is its value at
each of them, so that no line depends on how the library sees sizes. Lines that decide compare with the value that a
size has at a probe: what was learned at known sizes says nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

WIDTH = 3
_ROWS = ((5, 8, 13, 20, 34), (8, 12, 20, 32, 36), (7, 9, 15, 21, 33), (4, 12, 16, 28, 36))
_SELECTED = ((4, 7, 9, 12, 18), (4, 8, 12, 16, 18))  # of 20 rows
_MOST = 4096  # elements

Size = tuple[int, int]  # rows, selected ones


@dataclass(frozen=True)
class SizesOfCalls:
    """known: sizes that come first, several times. probes: where lines decide. others: between them. small: 0 and 1.

    follows: whether `y` has as many rows as `x` in all these calls.
    """

    known: tuple[Size, ...]
    probes: tuple[Size, ...]
    others: tuple[Size, ...]
    small: tuple[Size, ...]
    follows: bool

    def arguments(self, size: Size, seed: int, more: int = 0) -> list[Tensor]:
        """Those of a call. more: rows of `y`, beyond what these calls have in common."""
        return arguments(*size, seed, (size[0] if self.follows else 6) + more)


@st.composite
def sizes_of_calls(draw: Any) -> SizesOfCalls:
    """The length varies, or how many rows are selected."""
    by_rows = draw(st.integers(0, 3)) < 3
    known = draw(st.sampled_from(_ROWS if by_rows else _SELECTED))
    between = [n for n in range(known[0] + 1, known[-1]) if n not in known]
    chosen = draw(st.permutations(between))[:9]
    if not by_rows:
        found = [tuple((20, n) for n in each) for each in (known, chosen[:2], chosen[2:])]
        return SizesOfCalls(*found, ((20, 0), (20, 1)), False)
    found = [tuple((n, n - 2) for n in each) for each in (known, chosen[:2], chosen[2:])]
    return SizesOfCalls(*found, ((1, 0), (2, 0), (3, 1)), draw(st.integers(0, 3)) == 3)


def written(t: Tensor, start: int, number: float) -> Tensor:
    """A copy that is written through a view."""
    copy = t * 1
    copy[start:].mul_(number)
    return copy


_HELPERS = {"torch": torch, "F": torch.nn.functional, "math": math, "written": written}


@dataclass(frozen=True)
class SizedProgram:
    """One program; `returned`: the names of its results."""

    lines: tuple[str, ...]
    returned: tuple[str, ...]
    sizes: SizesOfCalls

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


def arguments(rows: int, selected: int, seed: int, others: int = 6) -> list[Tensor]:
    """Two matrices, and two masks of the rows of the first: `m` selects so many of them, `n` one more."""
    generator = torch.Generator().manual_seed(seed * 10_007 + rows * 101 + selected)
    x, y = (torch.randn(count, WIDTH, generator=generator) for count in (rows, others))
    order = torch.randperm(rows, generator=generator)
    return [x, y, order < selected, order.flip(0) <= selected]


@dataclass(eq=False)
class _Register:
    """values: at each probe and each known size."""

    name: str
    values: list[Tensor]

    @property
    def dims(self) -> int:
        return self.values[0].dim()


class _World:
    """The program so far, run at every known size and at every probe, which come first."""

    def __init__(self, draw: Callable[[Any], Any], sizes: SizesOfCalls) -> None:
        self.draw = draw
        given = [sizes.arguments(size, 0) for size in (*sizes.probes, *sizes.known)]
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

    def at_probe(self, size: str) -> int:
        """The value of a size at one of the probes."""
        return int(eval(size, dict(_HELPERS), self.names[self.below(2)]))

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
                f"{a}.squeeze()",
                f"{a}[{size} - 4 :]",
                f"{a}.t().contiguous()[:, : {w.at_probe(f'{a}.shape[0]')}].reshape(-1)",
                f"{a}.as_strided(({size} - 2, 2), (3, 1), 1)",
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
                f"F.dropout({a}, 0.5)",
                f"F.dropout({a}, 0.5)",
                f"torch.cdist({a}, {a} + 1)",
                f"{a}.new_zeros({a}.shape).index_add(0, torch.arange({a}.shape[0]), {a})",
            )
        )
    )


def _number(w: _World) -> str:
    """Python decides, or computes, by a size."""
    a, limit = w.pick(), w.one_of((4, 6, 10, 12, 20, 25, 40))
    b = w.one_of([r.name for r in w.registers if r.name != "y"])
    size = w.one_of(
        (f"{b}.shape[0]", f"{b}.shape[0]", "x.shape[0]", f"{b}.numel()", f"{b}.size(-1)")
    )
    probe = w.at_probe(size)
    return str(
        w.one_of(
            (
                f"{a}.sin() if {size} > {limit} else {a}.cos()",
                f"{a}.cos() if {size} != {probe} else {a}.sin()",
                f"{a} * (2.0 if {size} == {probe} else 3.0)",
                f"{a} * (2.0 if {probe - 1} < {size} < {probe + 1} else 3.0)",
                f"{a} * (2.0 if {size} * {size} - {probe * probe} else 3.0)",
                f"{a} * (2.0 if {size} % 7 == {probe % 7} else 3.0)",
                f"{a} * (2.0 if max({size} * 3 - {probe}, {probe * 2}) == {size} else 3.0)",
                f"{a}[: {size} - {size} // {probe}]",
                f"{a}[: max({size} - {limit}, 1)]",
                f"{a}[: min({size}, {limit})]",
                f"written({a}, {size} // 2, 2.0)",
                f"{a} * ({size} // 2)",
                f"{a} * ({size} % 3)",
                f"{a} / {size}",
            )
        )
    )


def _computed(w: _World) -> str:
    """An integer that Python computes, which is a size, or one number, at all known sizes, goes to torch."""
    a = w.one_of([r.name for r in w.registers if r.name != "y"])
    size = w.one_of((f"{a}.shape[0]", "x.shape[0]"))
    probe = w.at_probe(size)
    rest = w.one_of((4, 4, 4, 3))
    return str(
        w.one_of(
            (
                f"{a}[: {size} // {rest} * {rest}]",
                f"{a}[: {size} // {rest} * {rest}]",
                f"written({a}, {size} // {rest} * {rest} - 2, 3.0)",
                f"{a} * ({size} // {rest} * {rest})",
                f"{a} * math.isqrt({size} // 16)",
                f"{a}[math.isqrt({size} * 2) // {probe} :]",
            )
        )
    )


def _exact(w: _World) -> str:
    """Python needs a size as it is: no other size is replayed without a comparison."""
    a = w.pick()
    size = w.one_of((f"{a}.shape[0]", "x.shape[0]"))
    return str(
        w.one_of(
            (
                f"{a} * {{{w.at_probe(size)}: 2.0}}.get({size}, 3.0)",
                f"{a} * float(str({size})[-1])",
                f"sum(row for row in {a}[::4])",
                f"{a} * (2.0 if len({a}) != {w.at_probe(f'{a}.shape[0]')} else 3.0)",
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


_KINDS = (_view, _view, _pure, _pure, _number, _number, _number, _selected, _exact)


@st.composite
def sized_programs(draw: Any) -> SizedProgram:
    """A program whose first line decides, or computes an integer; most are short: one unknown hides all others."""
    sizes = draw(sizes_of_calls())
    w = _World(draw, sizes)
    deciding: list[str] = []
    first = w.one_of((_number, _number, _computed, _computed))
    for i in range(w.one_of((1, 1, 2, 2, 3, 4, 7))):
        kind, before = first if i == 0 else w.one_of(_KINDS), len(w.registers)
        w.add(kind(w))
        if kind in (_number, _computed, _selected, _exact):
            deciding += [r.name for r in w.registers[before:]]
    w.add("x.sin() * 2")
    names = [r.name for r in w.registers if r.name not in ("x", "y")]
    return SizedProgram(tuple(w.lines), tuple(dict.fromkeys([names[-1], *deciding[-3:]])), sizes)
