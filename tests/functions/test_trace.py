"""`trace` and replay of every program of the catalogue, bit for bit as eager; what the graphs look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from examples.compare import assert_bitwise_equal, execute, run_eager, run_trace
from examples.programs import PROGRAMS, by_name
from examples.resize_program import ResizeProgram
from functionalize.program.program import Program
from tests.graphs import lowered

# Programs that `trace` does not reproduce, and why. Empty, and meant to stay so.
EXCEPTIONS: dict[str, str] = {}

SNAPSHOTS = (
    "down",
    "down_through_alias",
    "up",
    "up_in_halves",
    "up_returning_slice",
    "up_returning_views",
    "up_down",
    "up_down_mutated",
    "fsdp_matmul",
    "fsdp_two_layers",
    "copy_to_flat_view",
    "out_op",
    "cat_out",
    "cat_split",
    "split_copy_out",
    "interleaved_ranks",
    "one_flat_storage",
    "two_cycles",
    "cycle_then_up",
    "break_between",
    "break_in_four",
    "break_down_up",
    "mutate_then_down",
    "up_to_third_size",
    "shrink_then_grow",
    "down_then_set",
    "up_then_set",
    "set_then_down",
    "dtensor_up_down",
    "plain_down",
    "plain_up",
    "plain_up_down",
    "plain_if_needed",
    "interleaved",
    "two_dtypes",
    "complex_and_real",
    "outputs_share",
    "in_place_views",
)


def programs(want: Callable[[ResizeProgram], bool] = lambda p: True) -> Any:
    """The catalogue as parameters of a test."""
    chosen = [p for p in PROGRAMS if want(p) and p.name not in EXCEPTIONS]
    return pytest.mark.parametrize("program", chosen, ids=lambda p: p.name)


def traced(program: ResizeProgram) -> list[Program]:
    """Each function of a program, traced on arguments in the state that those before it leave."""
    found = []
    for i, fn in enumerate(program.fns):
        args = program.make_args()
        for before in program.fns[:i]:
            before(*args)
        found.append(fz.functions.trace(fn, *args))
    return found


def assert_invariants(program: Program) -> None:
    """Invariants 1 to 3 of the design: nothing mutates, nothing reads what is empty, guards come first."""
    empty = {spec.name for spec in program.inputs if spec.nbytes == 0 and spec.geometry.numel}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            readers = [user for user in node.users if user.op != "output"]
            assert node.name not in empty or not readers, f"{readers} read {node}, which is empty"
        elif node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, f"{node.target} mutates"
            assert "resize" not in str(node.target)
    module = program.graph_module
    module.graph.lint()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            assert "val" in node.meta, f"{node} has no meta"


@programs()
def test_replay_is_eager(program: ResizeProgram) -> None:
    assert_bitwise_equal(run_trace(program), run_eager(program), grads=False)


@programs()
def test_invariants(program: ResizeProgram) -> None:
    for each in traced(program):
        assert_invariants(each)


def scaled(args: tuple[Tensor, ...], by: int) -> tuple[Tensor, ...]:
    """Arguments whose storages hold other values."""
    seen: set[int] = set()
    with torch.no_grad():
        for t in args:
            local = t.to_local() if hasattr(t, "to_local") else t
            storage = local.untyped_storage()
            if local.is_floating_point() and storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                torch.empty(0, dtype=local.dtype).set_(storage).mul_(by)
    return args


@programs()
def test_replay_on_other_values_and_twice(program: ResizeProgram) -> None:
    """One trace serves any contents, any number of times, and keeps nothing of the run before."""
    replays = traced(program)
    for by in (2, 3, 2):
        expected = execute(program, program.fns, scaled(program.make_args(), by), backward=False)
        actual = execute(program, replays, scaled(program.make_args(), by), backward=False)
        assert_bitwise_equal(actual, expected, grads=False)


@programs()
def test_lowered_is_eager(program: ResizeProgram) -> None:
    """The epilogue as ops does what the epilogue does, and gives outputs the same storages."""
    assert_bitwise_equal(run_trace(program, lowered), run_eager(program), grads=False)


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_snapshot(name: str, expect: Callable[[str, str], None]) -> None:
    run_eager(by_name(name))  # the first time, DTensor tries its ops on fakes: a name is taken up
    texts = [each.print_readable(print_output=False) for each in traced(by_name(name))]
    expect(name, "\n".join(texts))


def test_sections_have_snapshots() -> None:
    assert {by_name(name).section for name in SNAPSHOTS} == {p.section for p in PROGRAMS}


def test_lowered_snapshot(expect: Callable[[str, str], None]) -> None:
    program = fz.functions.trace(by_name("up_then_set").fn, *by_name("up_then_set").make_args())
    expect("lowered_up_then_set", program.lower().code)


def test_metas() -> None:
    """Of a node: its fake value and layout, and the user's lines only."""
    (program,) = traced(by_name("up_down_mutated"))
    nodes = program.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cos.default
    )
    meta = nodes[0].meta
    assert meta["val"].shape == (8,)
    assert meta["tensor_meta"].dtype is torch.float32
    assert "in up_down_mutated" in meta["stack_trace"]
    assert "functionalize" not in meta["stack_trace"].replace("test_trace", "")
    assert "torch/" not in meta["stack_trace"]
    assert "seq_nr" not in meta  # nothing needs a gradient
    assert meta["original_aten"] is torch.ops.aten.cos.default


def test_parameters_and_buffers_are_returned_themselves() -> None:
    model = torch.nn.BatchNorm1d(3)

    def fn(x: Tensor) -> Any:
        y = model(x).detach()
        return y, model.weight, {"buffers": [model.running_mean, (model.num_batches_tracked,)]}

    program = fz.functions.trace(fn, torch.ones(2, 3))
    for _ in range(2):
        _, weight, kept = program(torch.ones(2, 3))
        mean, (count,) = kept["buffers"]
        assert weight is model.weight and mean is model.running_mean
        assert count is model.num_batches_tracked
    assert int(model.num_batches_tracked) == 2
