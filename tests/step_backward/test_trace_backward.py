"""`trace_backward`: every kind of hook and of graph, equal to eager's backward bit for bit; what a trace leaves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.step_backward.cases import CASES
from tests.step_backward.runs import EAGER, TRACED, Run, model, same


def results(case: Any, run: Run) -> list[Any]:
    """What a case returns, all gradients and the generator, after each of three calls."""
    m, found = model(), []
    torch.manual_seed(1)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of anomaly mode
            found.append(case(m, torch.randn(5, 3), run))
        found.append([None if p.grad is None else p.grad.clone() for p in m.parameters()])
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str) -> None:
    case = CASES[name]
    for ours, eager in zip(results(case, TRACED), results(case, EAGER), strict=True):
        assert same(ours, eager)
