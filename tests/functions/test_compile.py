"""`torch.compile(fn, backend="functionalize")`: Dynamo's graphs go through the same pre-pass."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functionalize as fz
from examples import compare
from examples.programs import PROGRAMS, by_name
from examples.resize_program import R, ResizeProgram, leaf, values, z
from functionalize.functions.aot import compile_with
from tests.graphs import Kept, kept_by_aot_function

# What Dynamo does before the backend sees anything.
FOLDED = "reads a storage's size once, on entry, and takes the branch of `if size != 0` that is then right"
SET = "has no set_ for a tensor that is an input"
OUT = "has no out= that resizes its tensor"
NOT_WHOLE = {"down_then_set": SET, "up_then_set": SET, "set_then_down": SET, "out_resizes": OUT}
WRONG = {"plain_if_needed": FOLDED}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_like_eager(program: ResizeProgram) -> None:
    expected = compare.run_eager(program)
    if program.name in NOT_WHOLE:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compare.run_compile(program, "functionalize")
        actual = compare.run_compile(program, "functionalize", fullgraph=False)
    else:
        actual = compare.run_compile(program, "functionalize")
    if program.name in WRONG:
        with pytest.raises(compare.Mismatch):
            compare.assert_bitwise_equal(actual, expected)
    else:
        compare.assert_bitwise_equal(actual, expected)


GRAPHS = (
    *("down", "up_saved", "up_down", "fsdp_matmul"),  # sections 1 to 4
    *("up_returning_slice", "up_returning_slice_grad", "up_returning_views"),
    *("out_op", "cat_out", "cat_split", "split_copy_out"),  # 5
    *("break_between", "break_in_four", "break_down_up"),  # 7
    *("up_to_third_size", "plain_down", "plain_up", "plain_up_down", "plain_matmul"),  # 8 and 9
)
# Where Dynamo gives AOTAutograd fewer inputs and outputs than the function has: those that it needs, and those that it
# cannot look up itself. The graphs of the others are those of `aot_function`, whose snapshots show them.
OTHER_GRAPHS = {"up_returning_views", "break_between", "break_in_four", "break_down_up"}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, expect: Callable[[str, str], None]) -> None:
    program = by_name(name)
    kept: list[Kept] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        kept.append(Kept())
        return compile_with(gm, inputs, **kept[-1].options())

    torch.compiler.reset()
    compiled = [torch.compile(fn, backend=backend, fullgraph=True) for fn in program.fns]
    compare.assert_bitwise_equal(compare.execute(program, compiled), compare.run_eager(program))
    assert len(kept) == len(program.fns)
    text = "\n".join(map(str, kept))
    if name in OTHER_GRAPHS:
        expect(name, text)
    else:
        assert text == "\n".join(map(str, kept_by_aot_function(program)))


def test_the_backends_are_known_by_name() -> None:
    assert {"functionalize", "functionalize_inductor"} <= set(torch._dynamo.list_backends())


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["down", "up_saved", "fsdp_linear"])
def test_inductor_is_close(name: str) -> None:
    """Inductor computes `sin` and sums in its own way, so the last bit may differ."""
    program = by_name(name)
    expected = compare.run_eager(program)
    actual = compare.run_compile(program, "functionalize_inductor")
    compare.assert_inputs_equal(actual.inputs, expected.inputs)
    for a, e in zip(
        (*actual.outputs, *actual.grads), (*expected.outputs, *expected.grads), strict=True
    ):
        assert (a is None) == (e is None)
        if isinstance(a, compare.TensorRecord) and isinstance(e, compare.TensorRecord):
            torch.testing.assert_close(a.data, e.data)


def test_composes_with_functionalize_storage() -> None:
    program = by_name("fsdp_linear")
    torch.compiler.reset()
    compiled = torch.compile(
        fz.functions.functionalize_storage(program.fns[0]), backend="functionalize", fullgraph=True
    )
    compare.assert_bitwise_equal(compare.execute(program, [compiled]), compare.run_eager(program))


def test_a_resize_by_hand_is_no_graph_break() -> None:
    def fn(p: Tensor, src: Tensor) -> Tensor:
        fz.functions.resize_storage_bytes_(p, 32)
        p.copy_(src)
        out = p + 1
        fz.functions.resize_storage_bytes_(p, 0)
        return out

    torch.compiler.reset()
    compiled = torch.compile(fn, backend="functionalize", fullgraph=True)
    assert torch.equal(compiled(z(8), values(8)), values(8) + 1)


def test_symbolic_sizes_are_specialised() -> None:
    def fn(x: Tensor, w: Tensor, full: Tensor) -> Tensor:
        w.untyped_storage().resize_(w.numel() * w.element_size())
        with torch.no_grad():
            w.copy_(full)
        out = x @ w.t()
        w.untyped_storage().resize_(0)
        return out

    torch.compiler.reset()
    compiled = torch.compile(fn, backend="functionalize", fullgraph=True, dynamic=True)
    for rows, columns in ((3, 4), (5, 4), (5, 6)):
        x, full = leaf(rows, columns), values(7, columns)
        assert torch.equal(compiled(x, z(7, columns), full), x @ full.t())


def test_errors_are_ours_inside_dynamos() -> None:
    def fn(p: Tensor) -> Tensor:
        out = p + 1
        R(p, 0)
        return out * p

    torch.compiler.reset()
    p = values(8)
    with pytest.raises(Exception, match=r"EmptyStorageError: aten\.mul\.Tensor reads `p`") as error:
        torch.compile(fn, backend="functionalize", fullgraph=True)(p)
    assert "return out * p" in str(error.value)
    assert p.untyped_storage().nbytes() == 32
