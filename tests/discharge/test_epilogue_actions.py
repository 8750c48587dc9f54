"""What the caller still sees at exit, cell by cell, through `trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize.ir.epilogue import Copy, Resize, Set
from tests.discharge.eager import same_as_eager

FULL = 32


def resize(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)


def actions(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """The program's epilogue, without geometries and slots."""
    found = []
    for action in same_as_eager(fn, *args, **options).epilogue:
        if isinstance(action, Resize):
            found.append(("resize", action.input, action.nbytes))
        elif isinstance(action, Copy):
            found.append(("copy", action.input))
        else:
            assert isinstance(action, Set)
            found.append(("set", action.input, action.other))
    return found


def full() -> Tensor:
    return torch.arange(8.0)


def empty() -> Tensor:
    x = torch.arange(8.0)
    resize(x, 0)
    return x


def test_freed() -> None:
    """> 0 to 0."""
    assert actions(lambda x: resize(x, 0), full()) == [("resize", 0, 0)]


def test_freed_after_a_write() -> None:
    """> 0 to 0: what was written before is dropped."""

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        y = x * 2
        resize(x, 0)
        return y

    assert actions(fn, full()) == [("resize", 0, 0)]


def test_left_grown() -> None:
    """0 to > 0."""

    def fn(x: Tensor) -> None:
        resize(x, FULL)
        x.fill_(2)

    assert actions(fn, empty()) == [("resize", 0, FULL), ("copy", 0)]


def test_left_grown_and_undefined() -> None:
    """0 to > 0, nothing written: there is nothing to copy."""
    assert actions(lambda x: resize(x, FULL), empty(), whole=False, contents=False) == [
        ("resize", 0, FULL)
    ]


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_grown_used_and_freed(rounds: int) -> None:
    """0 to 0: nothing, whatever happened in between."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = w * 1
        for i in range(rounds):
            resize(x, FULL)
            x.copy_(w + i)
            x.mul_(2)
            out = out + x
            resize(x, 0)
        return out

    assert actions(fn, empty(), full()) == []


def test_read_only() -> None:
    """> 0 to the same."""
    assert actions(lambda x: x + 1, full()) == []


def test_written() -> None:
    """> 0 to the same, written."""
    assert actions(lambda x: x.add_(1), full()) == [("copy", 0)]


def test_freed_and_written_again() -> None:
    """> 0 to 0 to the same: the contents are others."""

    def fn(x: Tensor) -> None:
        resize(x, 0)
        resize(x, FULL)
        x.fill_(3)

    assert actions(fn, full()) == [("copy", 0)]


@pytest.mark.parametrize("nbytes", [16, 64])
def test_another_size(nbytes: int) -> None:
    """> 0 to another > 0: the prefix survives."""
    found = actions(lambda x: resize(x, nbytes), full(), whole=nbytes < FULL)
    assert found == [("resize", 0, nbytes)]


@pytest.mark.parametrize("nbytes", [16, 64])
def test_another_size_and_written(nbytes: int) -> None:
    def fn(x: Tensor) -> None:
        x.mul_(3)
        resize(x, nbytes)

    found = actions(fn, full(), whole=nbytes < FULL)
    assert found == [("resize", 0, nbytes), ("copy", 0)]


def test_one_resize_per_storage() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> None:
        resize(y, FULL)
        z.fill_(1)
        x[4:].fill_(2)

    x = empty()
    found = actions(fn, x, x.view(2, 4), x.view(4, 2))
    assert len(found) == 2
    assert found[0][0] == "resize" and found[1][0] == "copy"


def test_aliases_are_written_once() -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        x.add_(1)
        y.mul_(2)

    x = full()
    assert actions(fn, x, x[2:4]) == [("copy", 0)]


def test_two_inputs_change_places() -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        kept = x.view(8)
        x.add_(1)
        x.set_(y)
        y.set_(kept)

    assert actions(fn, full(), full()) == [("copy", 0), ("set", 0, 1), ("set", 1, 0)]


def test_moved_to_what_the_program_made() -> None:
    def fn(x: Tensor) -> None:
        x.set_(x * 2)

    assert actions(fn, full()) == [("set", 0, None)]


def test_nothing_changes_when_a_guard_fails() -> None:
    program = same_as_eager(lambda x: x.add_(1), full())
    x = torch.zeros(9)
    with pytest.raises(RuntimeError, match="was float32"):
        program(x)
    assert torch.equal(x, torch.zeros(9))
