"""torch's own autograd tests, each backward by `fz.functions.trace_backward`.

    TORCH_TEST_AUTOGRAD=pytorch/test/test_autograd.py python -m tests.step_backward.torch_autograd

runs every test of `TestAutograd` and prints those that fail, and how many of them go backward. The file is torch's: it
comes with torch's repository, of a release near the installed one, and not with the package.

`torch.autograd.backward` and `torch.autograd.grad` are replaced, and nothing falls back to them: what `trace_backward`
has no argument for raises `NotTraceable`. So a test passes only if each backward that it calls was traced. Backwards
inside of a backward, which the traced one runs, are torch's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import functionalize as fz
from functionalize._compat.autograd import in_backward
from tests.step_backward.torch_autograd_skips import SKIPS

VARIABLE = "TORCH_TEST_AUTOGRAD"
MISSING = f"set {VARIABLE} to the path of test/test_autograd.py in torch's repository"


class NotTraceable(Exception):
    """A backward that `trace_backward` has no counterpart for."""


@dataclass
class Outcome:
    """traced: how many backwards were traced. error: None if the test has passed. skipped: torch's reason."""

    traced: int = 0
    error: str | None = None
    skipped: str | None = None


def path() -> Path | None:
    """torch's file: of the variable, or beside a torch that runs from its repository."""
    found = Path(
        os.environ.get(VARIABLE) or Path(torch.__file__).parents[1] / "test/test_autograd.py"
    )
    return found if found.is_file() else None


@cache
def suite() -> type[unittest.TestCase]:
    """torch's `TestAutograd`."""
    file = path()
    assert file is not None, MISSING
    spec = importlib.util.spec_from_file_location("torch_test_autograd", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # it imports modules beside it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module.TestAutograd  # type: ignore[no-any-return]


def names() -> Sequence[str]:
    return unittest.TestLoader().getTestCaseNames(suite())


def run(name: str) -> Outcome:
    """One of torch's tests, with every backward traced. A test that eager fails too counts as skipped."""
    outcome = Outcome()
    with every_backward_traced(outcome):
        result = ran(name)
    if result.skipped:
        outcome.skipped = result.skipped[0][1]
    elif not result.wasSuccessful():
        if not ran(name).wasSuccessful():
            outcome.skipped = "eager fails too"
        else:
            errors = [text for _, text in [*result.errors, *result.failures]]
            outcome.error = errors[0] if errors else "unexpected success"
    return outcome


def ran(name: str) -> unittest.TestResult:
    result, printed = unittest.TestResult(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("default")
        with contextlib.redirect_stderr(printed):
            suite()(name).run(result)
    return result


@contextlib.contextmanager
def every_backward_traced(outcome: Outcome) -> Iterator[None]:
    torch_backward, torch_grad = torch.autograd.backward, torch.autograd.grad
    tracing = False

    def traced(*args: Any, **kwargs: Any) -> Any:
        nonlocal tracing
        tracing = True
        try:
            program = fz.functions.trace_backward(*args, **kwargs)
        finally:
            tracing = False
        outcome.traced += 1
        return program()

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        if tracing or in_backward():
            return torch_backward(
                tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
        if create_graph:
            raise NotTraceable("create_graph=True")
        traced(tensors, inputs, grad_tensors, accumulate=True, retain_graph=bool(retain_graph))

    def grad(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> Any:
        if tracing or in_backward():
            return torch_grad(
                outputs,
                inputs,
                grad_outputs,
                retain_graph,
                create_graph,
                only_inputs,
                allow_unused,
                is_grads_batched,
                materialize_grads,
            )
        for wanted, what in (
            (create_graph, "create_graph=True"),
            (is_grads_batched, "is_grads_batched=True"),
            (materialize_grads, "materialize_grads=True"),
        ):
            if wanted:
                raise NotTraceable(what)
        return traced(
            outputs,
            inputs,
            grad_outputs,
            allow_unused=bool(allow_unused),
            retain_graph=bool(retain_graph),
        )

    torch.autograd.backward, torch.autograd.grad = backward, grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = torch_backward, torch_grad


def main() -> None:
    if path() is None:
        sys.exit(MISSING)
    reasons = {name: reason for reason, names in SKIPS.items() for name in names}
    count: Counter[str] = Counter()
    for name in sys.argv[1:] or names():
        outcome = run(name)
        if outcome.error is not None:
            kind = "fail as listed" if name in reasons else "FAIL, not listed"
            print(f"{name}: {reasons.get(name) or outcome.error}", flush=True)
        elif outcome.skipped is not None:
            kind = "skipped by torch, or by eager"
        elif name in reasons:
            kind = "PASS, but listed"
            print(f"{name} passes, but is listed", flush=True)
        else:
            kind = "pass, each backward traced" if outcome.traced else "pass, without a backward"
        count[kind] += 1
    print(*(f"{number} {kind}" for kind, number in count.most_common()), sep="\n")


if __name__ == "__main__":
    main()
