"""`fz.functions.functionalize_storage`: called as it is, traced by `make_fx`, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import aot_function, nop  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples import compare
from examples.programs import PROGRAMS, by_name
from examples.resize_program import R, ResizeProgram, leaf, values, z
from functionalize import errors
from tests.graphs import graph_text

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)

# `make_fx` does not look inside a DTensor: its graph holds the one that it was traced with.
NOT_TRACED_BY_MAKE_FX = {"dtensor_up_down", "dtensor_down"}


@each_program
def test_called_like_eager(program: ResizeProgram) -> None:
    fns = [fz.functions.functionalize_storage(fn) for fn in program.fns]
    compare.assert_bitwise_equal(compare.execute(program, fns), compare.run_eager(program))


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name not in NOT_TRACED_BY_MAKE_FX], ids=lambda p: p.name
)
@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_traced_by_make_fx(program: ResizeProgram, tracing_mode: str) -> None:
    graphs = []
    with torch.no_grad():
        for i, fn in enumerate(program.fns):
            args = program.make_args()
            for before in program.fns[:i]:
                before(*args)
            functional = fz.functions.functionalize_storage(fn)
            graphs.append(make_fx(functional, tracing_mode=tracing_mode)(*args))
        actual = compare.execute(program, graphs, backward=False)
    compare.assert_bitwise_equal(actual, compare.run_eager(program), grads=False)


@pytest.mark.parametrize("name", ["up", "up_down", "up_in_halves", "mutate_read_down"])
def test_graph(name: str, expect: Callable[[str, str], None]) -> None:
    program = by_name(name)
    with torch.no_grad():
        gm = make_fx(fz.functions.functionalize_storage(program.fns[0]))(*program.make_args())
    expect(name, graph_text(name, gm.graph))


def test_composes_with_the_stock_aot_function() -> None:
    program = by_name("up_down_mutated")
    with_prepass = aot_function(fz.functions.functionalize_storage(program.fns[0]), nop)
    actual = compare.execute(program, [with_prepass])
    compare.assert_bitwise_equal(actual, compare.run_eager(program))


def test_export_takes_the_lowered_program_instead() -> None:
    args = z(8), values(8)

    class Module(nn.Module):
        def forward(self, a: Tensor, src: Tensor) -> Tensor:
            out: Tensor = fz.functions.functionalize_storage(by_name("plain_if_needed").fns[0])(
                a, src
            )
            return out

    with pytest.raises(
        fz.errors.FunctionalizeError, match=r"fz\.functions\.trace\(fn, \*args\)\.lower\(\)"
    ):
        torch.export.export(Module(), args, strict=False)
    lowered = fz.functions.trace(by_name("plain_if_needed").fns[0], *args).lower()
    exported = torch.export.export(lowered, args, strict=False)
    (out,) = exported.module()(*args)
    assert torch.equal(out, values(8).exp())


# -- what a function sees ----------------------------------------------------------------------------


def test_sizes_are_those_that_the_function_set() -> None:
    p = z(8)
    seen = []

    def fn(a: Tensor) -> Tensor:
        R(a, 32)
        a.fill_(1.0)
        seen.append((a.untyped_storage().nbytes(), a.untyped_storage().size()))
        out = a + 1
        R(a, 0)
        seen.append((a.untyped_storage().nbytes(), a.untyped_storage().size()))
        return out

    assert torch.equal(fz.functions.functionalize_storage(fn)(p), torch.full((8,), 2.0))
    assert seen == [(32, 32), (0, 0)]
    assert p.untyped_storage().nbytes() == 0


def test_one_op_writes_a_storage_that_comes_and_one_that_stays() -> None:
    def fn(p: Tensor, q: Tensor, src: Tensor) -> Tensor:
        R(p, 32)
        torch._foreach_copy_([p, q], [src, src * 2])
        out = p + q
        R(p, 0)
        return out

    q, src = torch.zeros(8), values(8)
    for run in (fz.functions.functionalize_storage(fn), fz.functions.aot_function(fn, nop)):
        q.zero_()
        assert torch.equal(run(z(8), q, src), src + src * 2)
        assert torch.equal(q, src * 2)


def test_parameters_of_a_module_need_not_be_arguments() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(z(4, 4))

        def forward(self, x: Tensor, full: Tensor) -> Tensor:
            self.weight.untyped_storage().resize_(64)
            with torch.no_grad():
                self.weight.view(-1).copy_(full.view(-1))
            out = x @ self.weight.t()
            self.weight.untyped_storage().resize_(0)
            return out

    layer, x, full = Layer(), leaf(3, 4), values(4, 4, seed=1)
    out = fz.functions.functionalize_storage(layer)(x, full)
    assert torch.equal(out, x @ full.t())
    assert layer.weight.untyped_storage().nbytes() == 0
    layer.weight.untyped_storage().resize_(64)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layer.weight):
        layer.weight.copy_(full)
    out.sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(3, 4).t() @ x)


def test_an_input_is_returned_as_itself() -> None:
    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        R(a, 32)
        a.fill_(1.0)
        return a, a.view(2, 4)

    p = z(8)
    whole, view = fz.functions.functionalize_storage(fn)(p)
    assert whole is p and view._base is p
    assert torch.equal(view, torch.ones(2, 4))


# -- refusals ----------------------------------------------------------------------------------------


def _read_empty(a: Tensor) -> Tensor:
    return a + 1


def _read_undefined(a: Tensor) -> Tensor:
    R(a, 32)
    return a + 1


def _write_empty(a: Tensor) -> None:
    a.fill_(1.0)


def _read_freed(a: Tensor) -> Tensor:
    R(a, 32)
    a.fill_(1.0)
    R(a, 0)
    return a.view(2, 4).t().sin()


def _read_past_the_end(a: Tensor) -> Tensor:
    R(a, 32)
    a.fill_(1.0)
    R(a, 16)
    return a * 2


def _negative(a: Tensor) -> None:
    a.untyped_storage().resize_(-1)


def _foreign(a: Tensor) -> None:
    (a.new_ones(4) + 1).untyped_storage().resize_(0)


BAD = {
    _read_empty: (errors.EmptyStorageError, r"reads `a` \(float32\[8\]\), whose storage holds 0"),
    _read_undefined: (
        errors.UndefinedContentsError,
        r"grown to 32 bytes .* were not written since",
    ),
    _write_empty: (errors.EmptyStorageError, r"aten\.fill_\.Scalar writes `a`"),
    _read_freed: (
        errors.EmptyStorageError,
        r"aten\.sin\.default reads `a` \(float32\[4, 2\] stride",
    ),
    _read_past_the_end: (errors.OutOfBoundsError, r"reaches to byte 32 of a storage that holds 16"),
    _negative: (errors.ResizeError, r"resizes the storage of `a` to -1 bytes, a negative size"),
    _foreign: (errors.ForeignStorageError, r"belongs to no tensor that was passed to the function"),
}


@pytest.mark.parametrize("fn", BAD, ids=lambda f: f.__name__)
def test_refused_before_anything_changes(fn: Callable[..., object]) -> None:
    kind, message = BAD[fn]
    p = z(8)
    with pytest.raises(kind, match=message) as error:
        fz.functions.functionalize_storage(fn)(p)
    assert f"test_functionalize_storage.py:{fn.__code__.co_firstlineno}"[:-2] in str(error.value)
    assert p.untyped_storage().nbytes() == 0


def test_resizing_a_tensor_and_its_storage_is_refused() -> None:
    def fn(a: Tensor) -> None:
        R(a, 64)
        a.resize_(16)

    with pytest.raises(
        errors.UnsupportedOpError, match=r"resizes a tensor whose storage is resized"
    ):
        fz.functions.functionalize_storage(fn)(z(8))


def test_a_collective_into_what_is_resized_is_refused() -> None:
    def fn(buffer: Tensor, shard: Tensor) -> None:
        R(buffer, 32)
        torch.ops.fsdp.all_gather_copy_in([shard], buffer, [4], 4, 0)

    with pytest.raises(
        errors.UnsupportedOpError, match=r"use a functional collective, or fz\.capture"
    ):
        fz.functions.functionalize_storage(fn)(z(8), values(4))


def test_wait_returns_what_it_waited_for() -> None:
    def fn(p: Tensor) -> Tensor:
        R(p, 32)
        p.fill_(2.0)
        waited = torch.ops._c10d_functional.wait_tensor(p)
        assert waited is p
        out = waited + 1
        R(p, 0)
        return out

    assert torch.equal(fz.functions.functionalize_storage(fn)(z(8)), torch.full((8,), 3.0))


def test_an_error_of_the_function_passes_through() -> None:
    def fn(a: Tensor) -> None:
        R(a, 32)
        raise KeyError("mine")

    p = z(8)
    with pytest.raises(KeyError, match="mine"):
        fz.functions.functionalize_storage(fn)(p)
    assert p.untyped_storage().nbytes() == 0
    assert not {"nbytes", "size", "resize_"} & set(vars(torch.UntypedStorage))


UNDECLARED_VIEWS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "unsafe_split": lambda p: list(torch.ops.aten.unsafe_split.Tensor(p, 1)),
    "unsafe_split_with_sizes": lambda p: list(
        torch.ops.aten.unsafe_split_with_sizes.default(p, [1, 2])
    ),
    "unsafe_chunk": lambda p: list(torch.ops.aten.unsafe_chunk.default(p, 3)),
    "_unsafe_view": lambda p: [torch.ops.aten._unsafe_view.default(p, [6])],
}


@pytest.mark.parametrize("name", UNDECLARED_VIEWS)
def test_a_view_that_its_schema_denies_sees_a_later_write(name: str) -> None:
    def fn(p: Tensor, x: Tensor) -> list[Tensor]:
        R(p, x.untyped_storage().nbytes())
        p.copy_(x)
        parts = UNDECLARED_VIEWS[name](p)
        p.add_(1)
        out = [part * 2 for part in parts]
        R(p, 0)
        return out

    x = torch.randn(3, 2)
    with torch.no_grad():
        want, actual = fn(z(3, 2), x), fz.functions.functionalize_storage(fn)(z(3, 2), x)
    assert all(torch.equal(a, w) for a, w in zip(actual, want, strict=True))
