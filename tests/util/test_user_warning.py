"""`UncapturableWarning`: at the user's line, once per reason, and never an exception."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz

X = torch.ones(3)


def reads_past_ops(x: Tensor) -> Tensor:
    return x * float(str(x.sum())[7:9])


def test_a_refusal_warns_once_at_the_line_that_calls_the_step() -> None:
    step = fz.capture(reads_past_ops)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            assert step(X)[0] == 3.0
    (warning,) = caught
    assert warning.category is fz.errors.UncapturableWarning
    assert Path(warning.filename) == Path(__file__)
    assert "reads_past_ops cannot be captured, it runs eagerly: " in str(warning.message)


def test_a_running_number_warns_once_at_the_line_that_calls_the_step() -> None:
    state, table = {"n": 0}, {3: 2.0}

    def by_running_number(x: Tensor) -> Tensor:
        state["n"] += 1
        return x * table.get(state["n"], 1.0)

    step = fz.capture(by_running_number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            step(X)
    (warning,) = caught
    assert warning.category is fz.errors.UncapturableWarning
    assert Path(warning.filename) == Path(__file__)
    assert "by_running_number runs eagerly where " in str(warning.message)


def test_where_warnings_are_errors_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    step = fz.capture(reads_past_ops)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert step(X)[0] == 3.0
    assert "reads_past_ops cannot be captured" in caplog.text


def test_on_uncapturable_raise_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    step: Any = fz.capture(reads_past_ops, on_uncapturable="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X)
        with pytest.raises(fz.errors.FunctionalizeError):
            step(X)
    assert "its next call will raise" in caplog.text
