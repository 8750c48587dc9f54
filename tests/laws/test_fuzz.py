"""Differential fuzz: random programs of views, writes, resizes and reads, eager against trace and replay.

Every example is one program of `tests.laws.programs`. Those that eager may run are compared bit for bit;
those that eager must not run (they read freed or undefined memory) must be refused by `trace`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from torch import Tensor

import functionalize as fz
from functionalize.errors import EagerError, OverlappingMutationError, StorageError
from functionalize.program.program import Program
from tests.laws.outcomes import outcome, seen_by_caller, times
from tests.laws.programs import Example, Window, examples

pytestmark = pytest.mark.long

REFUSALS: dict[str, tuple[type[Exception], ...]] = {
    "storage": (StorageError,),
    "exit": (
        StorageError,
    ),  # what is returned or left in an input is undefined: no line is to blame
    "overlap": (OverlappingMutationError,),
    "overlap or storage": (OverlappingMutationError, StorageError),
    "view": (StorageError, EagerError),
}


def check(example: Example) -> None:
    """Assert what must hold for one program."""
    args = example.make_args()
    storages = example.storages_of(args)
    before = seen_by_caller(args, storages)
    program = trace_or_refusal(example, args)
    assert seen_by_caller(args, storages) == before, "the arguments were touched by trace"
    if program is None:
        return
    check_invariants(program)
    for seed in (0, 1):
        expected = outcome(example, example.run, seed)
        actual = outcome(example, program, seed)
        for e, a in zip(expected, actual, strict=True):
            assert a == e, f"replay on inputs {seed} differs: {a}, expected {e}"


def trace_or_refusal(example: Example, args: list[Tensor]) -> Program | None:
    """The program of an example that may run, None for one that was refused as it must be."""
    if example.error is None:
        return fz.functions.trace(example.run, *args)
    if example.error == "view":  # eager refuses it too, and cleanly
        with pytest.raises(RuntimeError):
            example.run(*example.make_args())
    with pytest.raises(REFUSALS[example.error]) as refused:
        fz.functions.trace(example.run, *args)
    if example.error != "exit":
        assert "<example>" in str(refused.value), f"no line in: {refused.value}"
    return None


def check_invariants(program: Program) -> None:
    """Invariants 1 and 2: no node mutates or resizes, none reads an input that is empty on entry."""
    inputs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = next(inputs)
            if spec.nbytes == 0 and spec.geometry.numel:
                assert all(u.op == "output" for u in node.users) or not node.users, (
                    f"{node} is read"
                )
        elif node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, f"{node.target} mutates"


def check_lowered(example: Example) -> None:
    """Assert that a lowered program leaves the same behind."""
    if example.error is not None or any(nbytes % 8 for nbytes, _ in example.storages):
        return
    module = fz.functions.trace(example.run, *example.make_args()).lower()
    expected = outcome(example, example.run, 0)
    with torch.no_grad():
        actual = outcome(example, module, 0)
    for e, a in zip(expected, actual, strict=True):
        assert a == e, f"lowered, it differs: {a}, expected {e}"


@given(examples())
@times(300)
def test_programs(example: Example) -> None:
    check(example)


FREED_INTO_OVERLAPPING = Example(
    storages=((32, True), (32, False)),
    inputs=(
        Window(storage=0, dtype=torch.float32, size=(), stride=(), offset=0),
        Window(storage=1, dtype=torch.float32, size=(8,), stride=(1,), offset=0),
    ),
    lines=("t1 = r1.unfold(0, 2, 1)", "t1.copy_(r0)"),
    returned="None",
    error="overlap or storage",
    final=(0, -1),
)


@given(examples(max_lines=30))
@example(FREED_INTO_OVERLAPPING)
@times(60)
def test_long_programs(example: Example) -> None:
    check(example)


@given(examples(max_lines=5))
@times(120)
def test_short_programs(example: Example) -> None:
    """Among few lines, a larger part is of the kind that must be refused."""
    check(example)


@given(examples())
@times(60)
def test_lowered(example: Example) -> None:
    check_lowered(example)
