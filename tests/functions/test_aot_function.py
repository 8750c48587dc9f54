"""`fz.functions.aot_function`: every program like eager, gradients included; the graphs; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import (  # type: ignore[import-untyped]
    default_partition,
    min_cut_rematerialization_partition,
    nop,
)
from torch import Tensor

import functionalize as fz
from examples import compare
from examples.programs import PROGRAMS, by_name
from examples.resize_program import R, ResizeProgram, leaf, preserve_version, values, z
from functionalize import errors
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from tests.graphs import Kept, kept_by_aot_function

GRAPHS = (
    *("down", "up_saved", "up_down", "fsdp_matmul", "fsdp_linear"),  # sections 1 to 4
    *("up_returning_slice", "up_returning_slice_grad", "up_returning_views"),
    *("copy_to_flat_view", "out_op", "cat_out", "cat_split", "split_copy_out"),  # 5
    *("two_cycles_saved", "break_between", "break_in_four", "break_down_up"),  # 6 and 7
    *("shrink_then_grow", "up_to_third_size", "down_then_set"),  # 8
    *("plain_down", "plain_up", "plain_up_down", "plain_matmul", "two_dtypes"),  # 9 and 10
)


def _kept(program: ResizeProgram) -> Kept:
    return kept_by_aot_function(program)[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_like_eager(program: ResizeProgram) -> None:
    compare.assert_bitwise_equal(compare.run_aot_function(program), compare.run_eager(program))


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.section in (3, 4)], ids=lambda p: p.name
)
def test_every_call_like_the_first(program: ResizeProgram) -> None:
    compiled = [fz.functions.aot_function(fn, nop) for fn in program.fns]
    for _ in range(2):
        actual = compare.execute(program, compiled)
        compare.assert_bitwise_equal(actual, compare.run_eager(program))


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, expect: Callable[[str, str], None]) -> None:
    expect(name, "\n".join(map(str, kept_by_aot_function(by_name(name)))))


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.section == 4], ids=lambda p: p.name)
def test_forward_saves_the_parameter_and_no_copy_of_it(program: ResizeProgram) -> None:
    kept = _kept(program)
    inputs = kept.graphs["forward"].find_nodes(op="placeholder")
    emptied = {
        node.name
        for node, arg in zip(inputs, program.make_args(), strict=True)
        if not arg.untyped_storage().nbytes()
    }
    saved = kept.saved(outputs=1)
    assert emptied & {n.name for n in saved}
    full = {n.meta["val"].shape for n in inputs if n.name in emptied}
    activations = [n for n in saved if n.op != "placeholder"]
    if program.name != "fsdp_two_layers":  # whose activations have another shape than its weights
        assert not activations
    assert not {n.meta["val"].shape for n in activations} & full


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.section in (3, 4)], ids=lambda p: p.name
)
def test_no_trace_of_what_went_up_and_down(program: ResizeProgram) -> None:
    for graph in _kept(program).graphs.values():
        assert not any(
            n.target in (RESIZE_STORAGE, torch.ops.aten.copy_.default) for n in graph.nodes
        )


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_a_resize_stays_in_forward_whatever_the_partitioner(
    partition: Callable[..., object],
) -> None:
    program, kept = by_name("down"), Kept()
    compiled = fz.functions.aot_function(program.fns[0], partition_fn=partition, **kept.options())
    compare.assert_bitwise_equal(compare.execute(program, [compiled]), compare.run_eager(program))
    assert kept.graphs["forward"].find_nodes(op="call_function", target=RESIZE_STORAGE)
    assert not kept.graphs["backward"].find_nodes(op="call_function", target=RESIZE_STORAGE)


def test_a_write_before_the_resize_is_lost_with_the_data_or_kept() -> None:
    def lost(a: Tensor) -> Tensor:
        out = a.mul_(2).sum()
        R(a, 0)
        return out

    def rewritten(a: Tensor) -> Tensor:
        out = a.mul_(2).sum()
        R(a, 0)
        R(a, 32)
        a.fill_(5.0)
        return out

    def kept(a: Tensor) -> Tensor:
        a.mul_(2)
        R(a, 64)
        a[:2].add_(1)
        return a.sum()

    for fn in (lost, rewritten, kept):
        given, expected = values(8), values(8)
        assert torch.equal(fz.functions.aot_function(fn, nop)(given), fn(expected))
        assert given.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        if given.untyped_storage().nbytes():
            assert torch.equal(given, expected)


def test_filled_again_by_a_second_graph_between_forward_and_backward() -> None:
    """A `copy_` that autograd counts would make the backward of the first graph refuse."""

    def use(p: Tensor) -> Tensor:
        out = p.sin()
        R(p, 0)
        return out

    def fill(p: Tensor, src: Tensor) -> None:
        R(p, 32)
        with torch.no_grad(), preserve_version(p):
            p.copy_(src)

    p = leaf(8)
    out = fz.functions.aot_function(use, nop)(p)
    fz.functions.aot_function(fill, nop)(p, values(8))
    out.sum().backward()
    assert p.grad is not None and torch.equal(p.grad, values(8).cos())


def test_works_without_in_graph_mutations() -> None:
    """torch itself refuses a resize then."""
    program = by_name("up_saved")
    compiled = fz.functions.aot_function(program.fns[0], nop, keep_inference_input_mutations=False)
    compare.assert_bitwise_equal(compare.execute(program, [compiled]), compare.run_eager(program))


# -- refusals ----------------------------------------------------------------------------------------


def _read_empty(p: Tensor, x: Tensor) -> Tensor:
    return x @ p.t()


def _read_freed(p: Tensor, x: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        p.copy_(x)
    R(p, 0)
    return p * x


def _read_undefined(p: Tensor, x: Tensor) -> Tensor:
    R(p, 64)
    return p * x


def _hidden_bytes(p: Tensor, x: Tensor) -> Tensor:
    R(p, 128)
    with torch.no_grad():
        p.as_strided((32,), (1,)).fill_(1.0)
    return x + 1


def _freed_view(p: Tensor, x: Tensor) -> Tensor:
    R(p, 64)
    with torch.no_grad():
        p.copy_(x)
        view = p[1:]
    R(p, 0)
    return view


BAD = {
    _read_empty: (
        errors.EmptyStorageError,
        r"aten\.mm\.default reads `p` \(float32\[4, 4\] stride",
    ),
    _read_freed: (errors.EmptyStorageError, r"aten\.mul\.Tensor reads `p`"),
    _read_undefined: (errors.UndefinedContentsError, r"reads `p` .* grown to 64 bytes"),
    _hidden_bytes: (
        errors.UnsupportedOpError,
        r"bytes 0 to 128 of the storage of `p`, some of which",
    ),
    _freed_view: (
        errors.UnsupportedOpError,
        r"returns a view .* of `p`, whose storage is left with 0 bytes",
    ),
}


@pytest.mark.parametrize("fn", BAD, ids=lambda f: f.__name__)
def test_refused_with_our_errors(fn: Callable[..., object]) -> None:
    kind, message = BAD[fn]
    p, x = z(4, 4, grad=True), leaf(4, 4)
    with pytest.raises(kind, match=message):
        fz.functions.aot_function(fn, nop)(p, x)
    assert p.untyped_storage().nbytes() == 0


def test_parameters_and_buffers_are_returned_themselves() -> None:
    def fn(w: Tensor, b: Tensor, x: Tensor) -> Any:
        b.add_(1)
        return (x * w).sum(), {"weight": w, "buffers": [b]}

    weight, buffer, x = torch.nn.Parameter(torch.ones(3)), torch.zeros(3), torch.ones(3)
    compiled = fz.functions.aot_function(fn, nop)
    for _ in range(2):
        loss, kept = compiled(weight, buffer, x)
        assert kept["weight"] is weight and kept["buffers"][0] is buffer
        loss.backward()
    assert torch.equal(buffer, torch.full((3,), 2.0))
