"""What a user is told: the whole text of every error of `trace` and of a replay.

Each names what happened, to which tensor, its sizes, the user's line, and what to do. Nothing of the caller's
is changed by then, nothing of torch stays patched, and the process lives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from examples.compare import assert_inputs_equal, snapshot_args
from examples.resize_program import values, z
from functionalize import errors
from tests.leftovers import leftovers

R = torch.ops.inductor.resize_storage_bytes_
OUTSIDE = torch.zeros(4)
LOOSE = torch.UntypedStorage(16)


def message(error: type[Exception], fn: Callable[..., Any], *args: Any) -> str:
    """The text that `trace` fails with; path and line number taken out."""
    tensors = [a for a in args if isinstance(a, Tensor) and a.layout is torch.strided]
    before = snapshot_args(tensors)
    with pytest.raises(error) as caught:
        fz.functions.trace(fn, *args)
    assert type(caught.value) is error
    assert not leftovers()
    assert_inputs_equal(snapshot_args(tensors), before)
    return re.sub(r"at \S+test_errors\.py:\d+", "at FILE:LINE", str(caught.value))


# -- storages that do not hold what is asked for ---------------------------------------------------


def read_empty(a: Tensor) -> Tensor:
    return a.sin()


def read_grown(a: Tensor) -> Tensor:
    R(a, 32)
    return a.sin()


def read_half_written(a: Tensor) -> Tensor:
    R(a, 32)
    a[:4].fill_(1)
    return a.sin()


def read_past_end(a: Tensor) -> Tensor:
    R(a, 16)
    return a.sin()


def write_too_small(a: Tensor) -> None:
    R(a, 16)
    a.copy_(torch.ones(8))


def view_empty(a: Tensor) -> Tensor:
    return a[2:4]


def turn_empty(a: Tensor) -> None:
    a.unsqueeze_(0)


def add_into_empty(a: Tensor, b: Tensor) -> None:
    torch.add(b, 1, out=a)


def foreach_on_empty(a: Tensor, b: Tensor) -> None:
    torch._foreach_add_([b, a], 1)


def return_freed(a: Tensor) -> Tensor:
    b = a + 1
    R(b, 0)
    return b


STORAGES: list[tuple[Callable[..., Any], tuple[Tensor, ...], type[Exception], str]] = [
    (
        read_empty,
        (z(8),),
        errors.EmptyStorageError,
        "aten.sin.default uses `a` (float32[8]), whose storage holds 0 bytes here and would need 32: grow it "
        "and write to it first\n  at FILE:LINE, in read_empty: return a.sin()",
    ),
    (
        read_grown,
        (z(8),),
        errors.UndefinedContentsError,
        "aten.sin.default reads `a` (float32[8]), whose storage was grown to 32 bytes and some of these "
        "bytes were not written since: write to all of them first\n  at FILE:LINE, in read_grown: return "
        "a.sin()",
    ),
    (
        read_half_written,
        (z(8),),
        errors.UndefinedContentsError,
        "aten.sin.default reads `a` (float32[8]), whose storage was grown to 32 bytes and some of these "
        "bytes were not written since: write to all of them first\n  at FILE:LINE, in read_half_written: "
        "return a.sin()",
    ),
    (
        read_past_end,
        (values(8),),
        errors.OutOfBoundsError,
        "aten.sin.default uses `a` (float32[8]), which reaches to byte 32 of a storage that holds 16 bytes "
        "here (it held 32 on entry): grow it first, or look at what is left\n"
        "  at FILE:LINE, in read_past_end: return a.sin()",
    ),
    (
        write_too_small,
        (z(8),),
        errors.OutOfBoundsError,
        "aten.copy_.default uses `a` (float32[8]), which reaches to byte 32 of a storage that holds 16 bytes "
        "here (it held 0 on entry): grow it first, or look at what is left\n"
        "  at FILE:LINE, in write_too_small: a.copy_(torch.ones(8))",
    ),
    (
        view_empty,
        (z(8),),
        errors.EmptyStorageError,
        "aten.slice.Tensor takes a view of `a` (float32[2] offset 2), whose storage holds 0 bytes here and "
        "would need 16: grow it and write to it first\n  at FILE:LINE, in view_empty: return a[2:4]",
    ),
    (
        turn_empty,
        (z(8),),
        errors.EmptyStorageError,
        "aten.unsqueeze_.default takes a view of `a` (float32[8]), whose storage holds 0 bytes here and "
        "would need 32: grow it and write to it first\n  at FILE:LINE, in turn_empty: a.unsqueeze_(0)",
    ),
    (
        add_into_empty,
        (z(8), values(8)),
        errors.EmptyStorageError,
        "aten.add.out uses `a` (float32[8]), whose storage holds 0 bytes here and would need 32: grow it and "
        "write to it first\n  at FILE:LINE, in add_into_empty: torch.add(b, 1, out=a)",
    ),
    (
        foreach_on_empty,
        (z(8), values(8)),
        errors.EmptyStorageError,
        "aten._foreach_add_.Scalar uses `a` (float32[8]), whose storage holds 0 bytes here and would need "
        "32: grow it and write to it first\n  at FILE:LINE, in foreach_on_empty: torch._foreach_add_([b, a], "
        "1)",
    ),
    (
        return_freed,
        (values(8),),
        errors.EmptyStorageError,
        "to return leaf 0 of its result, the program reads `output of aten.add.Tensor` (float32[8]), whose "
        "storage holds 0 bytes here and would need 32: grow it and write to it first",
    ),
]


# -- resizes ---------------------------------------------------------------------------------------


def shrink_below_zero(a: Tensor) -> None:
    R(a, -4)


def plain_below_zero(a: Tensor) -> None:
    a.untyped_storage().resize_(-4)


def to_a_float(a: Tensor) -> None:
    R(a, 4.5)


def plain_to_a_float(a: Tensor) -> None:
    a.untyped_storage().resize_(4.5)  # type: ignore[arg-type]


def to_a_bool(a: Tensor) -> None:
    a.untyped_storage().resize_(True)


def to_a_tensor(a: Tensor, n: Tensor) -> None:
    a.untyped_storage().resize_(n)  # type: ignore[arg-type]


def of_no_tensor(a: Tensor) -> None:
    LOOSE.resize_(8)


def of_no_argument(a: Tensor) -> None:
    OUTSIDE.untyped_storage().resize_(0)


RESIZES = [
    (
        shrink_below_zero,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default resizes the storage of `a` to -4 bytes, a negative size\n"
        "  at FILE:LINE, in shrink_below_zero: R(a, -4)",
    ),
    (
        plain_below_zero,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default resizes the storage of `a` to -4 bytes, a negative size\n"
        "  at FILE:LINE, in plain_below_zero: a.untyped_storage().resize_(-4)",
    ),
    (
        to_a_float,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default received a size that is no integer: sizes are whole bytes\n"
        "  at FILE:LINE, in to_a_float: R(a, 4.5)",
    ),
    (
        plain_to_a_float,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default resizes the storage of `a` to 4.5, which is no integer: "
        "sizes are whole bytes\n"
        "  at FILE:LINE, in plain_to_a_float: a.untyped_storage().resize_(4.5)  # type: ignore[arg-type]",
    ),
    (
        to_a_bool,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default resizes the storage of `a` to True, which is no integer: "
        "sizes are whole bytes\n  at FILE:LINE, in to_a_bool: a.untyped_storage().resize_(True)",
    ),
    (
        to_a_tensor,
        errors.ResizeError,
        "inductor.resize_storage_bytes_.default resizes the storage of `a` to a tensor, which is no integer: "
        "sizes are whole bytes\n"
        "  at FILE:LINE, in to_a_tensor: a.untyped_storage().resize_(n)  # type: ignore[arg-type]",
    ),
    (
        of_no_tensor,
        errors.ForeignStorageError,
        "inductor.resize_storage_bytes_.default resizes a storage of 16 bytes to 8, which belongs to no "
        "argument and no result of the program: pass its tensor as an argument\n"
        "  at FILE:LINE, in of_no_tensor: LOOSE.resize_(8)",
    ),
    (
        of_no_argument,
        errors.ForeignStorageError,
        "inductor.resize_storage_bytes_.default resizes a storage of 16 bytes to 0, which belongs to no "
        "argument and no result of the program: pass its tensor as an argument\n"
        "  at FILE:LINE, in of_no_argument: OUTSIDE.untyped_storage().resize_(0)",
    ),
]


# -- everything else -------------------------------------------------------------------------------


def write_expanded(a: Tensor) -> None:
    a.expand(3, 8).add_(1)


def poke(a: Tensor) -> None:
    torch.ops.functionalize_tests.poke_(a)


def number(a: Tensor) -> Tensor:
    return a * a.sum().item()


def branch(a: Tensor) -> Tensor:
    if a.sum() > 0:
        return a + 1
    return a


def positions(a: Tensor) -> Tensor:
    return a.nonzero()


def mismatch(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def own_error(a: Tensor) -> None:
    a.add_(1)
    raise KeyError("mine")


def backward(a: Tensor) -> None:
    (a * 2).sum().backward()


def turn_outsider(a: Tensor) -> Tensor:
    outsider = OUTSIDE.unsqueeze_(0)
    return outsider + a


@pytest.fixture(scope="module")
def library() -> Any:
    with torch.library._scoped_library("functionalize_tests", "FRAGMENT") as lib:
        lib.define("poke_(Tensor(a!) x) -> Tensor(a!)")
        lib.impl("poke_", lambda x: x, "CompositeExplicitAutograd")
        yield lib


@pytest.mark.parametrize(
    "fn, args, error, text", STORAGES, ids=lambda x: getattr(x, "__name__", "")
)
def test_storages(fn: Callable[..., Any], args: Any, error: type[Exception], text: str) -> None:
    assert message(error, fn, *args) == text


@pytest.mark.parametrize("fn, error, text", RESIZES, ids=lambda x: getattr(x, "__name__", ""))
def test_resizes(fn: Callable[..., Any], error: type[Exception], text: str) -> None:
    args = (values(8), torch.tensor(4)) if fn is to_a_tensor else (values(8),)
    assert message(error, fn, *args) == text
    assert OUTSIDE.untyped_storage().nbytes() == LOOSE.nbytes() == 16


def test_expanded() -> None:
    assert message(errors.OverlappingMutationError, write_expanded, values(8)) == (
        "aten.add_.Tensor writes `a` (float32[3, 8] stride [0, 1]), in which several elements share one "
        "memory location: clone() it before writing\n  at FILE:LINE, in write_expanded: a.expand(3, "
        "8).add_(1)"
    )


def test_no_functional_form(library: Any) -> None:
    assert message(errors.UnsupportedOpError, poke, values(8)) == (
        "functionalize_tests.poke_.default writes `x` and has no functional form: use an op that returns its "
        "result, or give it one with torch.library\n"
        "  at FILE:LINE, in poke: torch.ops.functionalize_tests.poke_(a)"
    )


DEPENDS = (
    " gives Python a number, or a size, that depends on data, and `trace` runs on fakes, which have none: "
    "pass it as an argument, or use `capture`\n  at FILE:LINE, in "
)


@pytest.mark.parametrize(
    "fn, op, line",
    [
        (number, "aten._local_scalar_dense.default", "number: return a * a.sum().item()"),
        (branch, "aten._local_scalar_dense.default", "branch: if a.sum() > 0:"),
        (positions, "aten.nonzero.default", "positions: return a.nonzero()"),
    ],
)
def test_depends_on_data(fn: Callable[..., Any], op: str, line: str) -> None:
    assert message(errors.UncapturableError, fn, values(8)) == op + DEPENDS + line


def test_eager_failure() -> None:
    assert message(errors.EagerError, mismatch, values(4, 3), values(4, 3)) == (
        "aten.mm.default failed on `a` (float32[4, 3]), `b` (float32[4, 3]): a and b must have same "
        "reduction dim, but got [4, 3] X [4, 3].\n  at FILE:LINE, in mismatch: return a @ b"
    )


def test_sparse() -> None:
    assert message(errors.UnsupportedTensorError, read_empty, torch.eye(3).to_sparse()) == (
        "meets a tensor of type Tensor, layout torch.sparse_coo and size [3, 3], which has no storage of its "
        "own: only strided tensors can be functionalized. Compute with a dense tensor (`to_dense()`, "
        "`to_padded_tensor()`, `dequantize()`) made outside the step"
    )


def test_own_error_passes_through() -> None:
    assert message(KeyError, own_error, values(8)) == "'mine'"


def test_backward() -> None:
    a = values(8).requires_grad_()
    assert message(errors.UncapturableError, backward, a) == (
        "sets the `.grad` of `a`, which a program of `trace` cannot repeat: use `capture` for a training "
        "step, or return torch.autograd.grad(...)"
    )
    assert a.grad is None


def test_outsider_turned() -> None:
    assert message(errors.UncapturableError, turn_outsider, values(4)) == (
        "turns `OUTSIDE` from float32[4] into float32[1, 4], or moves it to another storage, though it "
        "is not an argument: pass it as an argument"
    )
    assert OUTSIDE.shape == (4,)


# -- guards ----------------------------------------------------------------------------------------


def guarded(a: Tensor, b: list[Tensor], scale: int = 2) -> Tensor:
    a.add_(b[0])
    return a * scale


ONE, SAME = torch.ones(3), torch.ones(3)
GUARDS: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "shape": (lambda: (torch.ones(4), [ONE], 2), "`a` is float32[4], was float32[3]"),
    "dtype": (lambda: (ONE.double(), [ONE], 2), "`a` is float64[3], was float32[3]"),
    "device": (lambda: (ONE.to("meta"), [ONE], 2), "`a` is on meta, was on cpu"),
    "strides": (
        lambda: (torch.ones(6)[::2], [ONE], 2),
        "`a` is float32[3] stride [2], was float32[3]",
    ),
    "offset": (lambda: (torch.ones(6)[3:], [ONE], 2), "`a` is float32[3] offset 3, was float32[3]"),
    "aliasing": (
        lambda: (SAME, [SAME], 2),
        "`b_0` shares a storage with another input, it did not",
    ),
    "size": (
        lambda: (torch.ones(3), [torch.ones(6)[:3]], 2),
        "the storage of `b_0` holds 24 bytes, held 12",
    ),
    "emptied": (lambda: (z(3), [ONE], 2), "the storage of `a` holds 0 bytes, held 12"),
    "tree": (
        lambda: (torch.ones(3), [ONE, ONE], 2),
        "the arguments are (*, [*, *], *), were (*, [*], *)",
    ),
    "constant": (
        lambda: (torch.ones(3), [ONE], 3),
        "`scale` is 3, was 2, which is part of the program",
    ),
    "type": (
        lambda: (torch.ones(3), [ONE], 2.0),
        "`scale` is 2.0, was 2, which is part of the program",
    ),
    "no tensor": (lambda: (5, [ONE], 2), "`a` is int, was a tensor"),
    "tensor": (
        lambda: (torch.ones(3), [ONE], torch.tensor(2)),
        "`scale` is a Tensor, was 2, which is part of the program",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards(name: str) -> None:
    make, text = GUARDS[name]
    program = fz.functions.trace(guarded, torch.ones(3), [torch.ones(3)], 2)
    args = make()
    tensors = [a for a in (args[0], *args[1]) if isinstance(a, Tensor) and a.device.type == "cpu"]
    before = snapshot_args(tensors)
    with pytest.raises(errors.GuardError) as caught:
        program(*args)
    advice = ". Nothing was changed: trace again for arguments like these"
    assert str(caught.value) == text + advice
    assert_inputs_equal(snapshot_args(tensors), before)


def test_guard_of_inputs_that_shared() -> None:
    program = fz.functions.trace(guarded, SAME, [SAME], 2)
    with pytest.raises(errors.GuardError, match="inputs that shared a storage no longer do"):
        program(torch.ones(3), [torch.ones(3)], 2)


def test_guard_of_keyword() -> None:
    program = fz.functions.trace(guarded, torch.ones(3), [torch.ones(3)])
    with pytest.raises(errors.GuardError, match=re.escape("are (*, [*], scale=*), were (*, [*])")):
        program(torch.ones(3), [torch.ones(3)], scale=2)
