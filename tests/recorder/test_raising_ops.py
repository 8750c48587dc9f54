"""Ops that raise by data raise in replays: the call runs eagerly then, and has eager's error at eager's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.errors import UnsupportedOpError


def without_result(a: Tensor) -> Tensor:
    torch.linalg.cholesky(a)
    return a * 2


def over_rows(a: Tensor) -> Tensor:
    return torch.func.vmap(torch.linalg.inv)(torch.stack([a, a]))


def asserted(a: Tensor) -> Tensor:
    torch._assert_async(a.sum() > 0, "no sum")
    return a * 2


RAISE: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "cholesky": torch.linalg.cholesky,
    "solve": lambda a: torch.linalg.solve(a, torch.ones(3, 1)),
    "lu_factor": lambda a: torch.linalg.lu_factor(a).LU,
    "ldl_factor": lambda a: torch.linalg.ldl_factor(a).LD,
    "matrix_power": lambda a: torch.linalg.matrix_power(a, -1),
    "tensorinv": lambda a: torch.linalg.tensorinv(a, 1),
    "without_result": without_result,
    "vmap": over_rows,
    "assert_async": asserted,
}


@pytest.mark.parametrize("name", RAISE)
@pytest.mark.parametrize("passes", ["", "default"])
def test_a_replay_raises_what_eager_raises(name: str, passes: str) -> None:
    fn, good, bad = RAISE[name], torch.eye(3) * 2, torch.zeros(3, 3)
    with pytest.raises(RuntimeError) as expected:
        fn(bad)
    step = fz.capture(lambda a: fn(a), passes=passes)
    for scale in (1.0, 2.0, 3.0, 4.0):
        assert torch.equal(step(good * scale), fn(good * scale))
    assert step.stats.replays >= 2
    with pytest.raises(RuntimeError) as found:
        step(bad)
    assert type(found.value) is type(expected.value) and str(found.value) == str(expected.value)
    assert torch.equal(step(good), fn(good))


def test_a_step_that_catches_the_error_goes_its_way() -> None:
    def step(a: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(a)
        except torch.linalg.LinAlgError:
            return torch.linalg.cholesky(a + torch.eye(3))

    captured = fz.capture(step, on_uncapturable="eager")
    for i in range(12):
        a = torch.eye(3) * (i % 3)
        assert torch.equal(captured(a), step(a))
    assert captured.stats.replays


def test_a_check_of_something_else_is_refused_by_name() -> None:
    def step(a: Tensor) -> Tensor:
        torch.ops.aten._linalg_check_errors(a.to(torch.int32), "mine", is_matrix=False)
        return a * 2

    captured = fz.capture(step, on_uncapturable="eager")
    for _ in range(3):
        assert torch.equal(captured(torch.zeros(2)), torch.zeros(2))
    assert captured.stats.replays == 0
    assert "has computed, and a program has no such check" in captured.explain()


def test_a_trace_refuses_assertions() -> None:
    with pytest.raises(UnsupportedOpError, match="asserts by data"):
        fz.functions.trace(asserted, torch.ones(3, 3))


def test_a_trace_keeps_the_check() -> None:
    program = fz.functions.trace(torch.linalg.inv, torch.eye(3))
    assert "check_errors=True" in program.print_readable(print_output=False)
    with pytest.raises(torch.linalg.LinAlgError):
        program(torch.zeros(3, 3))
