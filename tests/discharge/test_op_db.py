"""The in-place and `out=` variants of every op in torch's op database, against eager, bit for bit.

Each runs on the first samples of each dtype: the tensor it writes is dense, transposed, with gaps, of another
dtype, or empty and resized by eager. What eager itself refuses is not asked of us. `SKIPPED` and `LOOSE` say
what differs, and why; a test keeps them from outliving their reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import settings
from torch import Tensor

from functionalize.util.torch_release import minor_of
from tests.discharge.eager import clones, same_as_eager
from tests.op_database import OPS, full_name, function_of, plain_runs

pytestmark = pytest.mark.long

HERE = minor_of(torch.__version__)
DTYPES = (torch.float32, torch.int64, torch.bfloat16)
SAMPLES = 3  # of a dtype, under --fuzz-long; else one

DATA = "the size of the result, or a number on the way, depends on data, and `trace` has none"
UNDEFINED = "what eager resizes and does not write is undefined"
NOT_RESIZED = "torch's fake kernel does not resize `out`: refused"
GAPS = "no functional op draws normal numbers into a tensor with gaps: refused"
ALL = "eager sums all elements in float64 if `out` is not float32: refused"
BATCH_NORM = "eager takes another formula for an `out` with gaps: refused"
IGNORES_STRIDES = "eager ignores the strides of `out` and writes past it, a bug of torch"
RESTRIDES = "eager gives an `out` of the right size new strides, a bug of torch"
STRIDES = "the strides that eager gives an `out` it resized; torch's fake kernel makes others"

SKIPPED: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        itertools.product(("masked_select", "nonzero"), ("out", "resized", "gaps")), DATA
    ),
    **{("linalg.lstsq", kind): DATA for kind in ("out", "resized", "gaps", "float64")},
    **{("linalg.lstsq", kind): DATA for kind in ("float32", "bfloat16")},
    ("empty", "resized"): UNDEFINED,
    # torch has no meta kernel for it, and so cannot tell us that 0 elements were meant
    **{("geqrf", kind): NOT_RESIZED for kind in ("out", "resized", "gaps", "float64", "bfloat16")},
    ("histogram", "resized"): NOT_RESIZED,
    ("_native_batch_norm_legit", "resized"): NOT_RESIZED,
    ("normal", "gaps"): GAPS,
    ("normal.in_place", "in-place, gaps"): GAPS,
    ("randn", "gaps"): GAPS,
    **{(op, dtype): ALL for op in ("std", "var") for dtype in ("float64", "bfloat16")},
    ("native_batch_norm", "gaps"): BATCH_NORM,
    ("_native_batch_norm_legit", "gaps"): BATCH_NORM,
    ("nn.functional.avg_pool3d", "gaps"): IGNORES_STRIDES,
    ("nn.functional.gelu", "gaps"): IGNORES_STRIDES,
    ("narrow_copy", "gaps"): IGNORES_STRIDES,
    ("nn.functional.linear", "gaps"): RESTRIDES,
    # `out=` asks `aten.equal` whether `q` lies between 0 and 1; a `q` of Python is not asked since
    **(
        {
            (op, kind): DATA
            for op in ("quantile", "nanquantile")
            for kind in ("out", "resized", "gaps")
        }
        if HERE < (2, 12)
        else {}
    ),
}
LOOSE: dict[tuple[str, str], str] = {  # compared, but for strides
    (op, "resized"): STRIDES
    for op in (
        *("lu_solve", "ormqr", "triangular_solve", "fft.ifft", "fft.ihfft", "linalg.eig"),
        *("linalg.eigh", "linalg.householder_product", "linalg.ldl_factor", "linalg.ldl_factor_ex"),
        *("linalg.ldl_solve", "linalg.qr", "linalg.lu_factor", "linalg.lu_factor_ex"),
        "linalg.lu_solve",
        *(("qr",) if HERE < (2, 14) else ()),  # removed since
    )
}


class Case(NamedTuple):
    """One call: `fn(*args)` writes to one of `args`."""

    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def with_gaps(t: Tensor) -> Tensor:
    """A tensor of the same size and dtype, every second element of a wider one."""
    if t.dim() == 0:
        return torch.zeros(3, dtype=t.dtype)[1]
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] * 2 + 1, dtype=t.dtype)
    return wide[..., 1::2]


def samples(op: Any, every: bool) -> Iterator[Any]:
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            torch.default_generator.manual_seed(0)
            inputs = op.sample_inputs("cpu", dtype, requires_grad=False)
            yield from itertools.islice(inputs, SAMPLES if every else 1)


def in_place_cases(op: Any, every: bool) -> Iterator[Case]:
    variant = op.get_inplace()
    if variant is None:
        return

    def fn(x: Any, args: Any, kwargs: Any) -> Any:
        return variant(x, *args, **kwargs)

    for s in samples(op, every):
        if s.broadcasts_input:
            continue
        yield Case("in-place", fn, (s.input, s.args, s.kwargs))
        if isinstance(s.input, Tensor):
            gaps = with_gaps(s.input).copy_(s.input)
            yield Case("in-place, gaps", fn, (gaps, s.args, s.kwargs))
            if s.input.dim() > 1:
                columns = s.input.transpose(0, 1).contiguous().transpose(0, 1)
                yield Case("in-place, columns", fn, (columns, s.args, s.kwargs))


def out_cases(op: Any, every: bool) -> Iterator[Case]:
    if not op.supports_out:
        return

    def fn(x: Any, args: Any, kwargs: Any, out: Any) -> Any:
        return function_of(op)(x, *args, **kwargs, out=out)

    def case(kind: str, s: Any, want: Any, make: Callable[[Tensor], Tensor]) -> Case:
        out = pytree.tree_map(lambda t: make(t) if isinstance(t, Tensor) else t, want)
        out = tuple(out) if isinstance(out, tuple) else out  # torch.return_types are refused
        return Case(kind, fn, (s.input, s.args, s.kwargs, out))

    for s in samples(op, every):
        want = op.op(s.input, *s.args, **s.kwargs)
        yield case("out", s, want, lambda t: torch.zeros(t.shape, dtype=t.dtype))
        yield case("resized", s, want, lambda t: torch.zeros(0, dtype=t.dtype))
        yield case("gaps", s, want, with_gaps)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            if any(t.dtype != dtype for t in pytree.tree_leaves(want) if isinstance(t, Tensor)):
                kind = str(dtype).removeprefix("torch.")
                yield case(kind, s, want, lambda t, dtype=dtype: torch.zeros(t.shape, dtype=dtype))


def cases(op: Any, every: bool) -> Iterator[Case]:
    return itertools.chain(in_place_cases(op, every), out_cases(op, every))


def eager_runs(case: Case) -> bool:
    try:
        with torch.no_grad():
            case.fn(*clones(case.args))
    except Exception:
        return False
    return True


def check(case: Case, strides: bool = True) -> None:
    same_as_eager(case.fn, *case.args, strides=strides, whole=strides)


@pytest.fixture(autouse=True)
def cheap_database() -> Iterator[None]:
    with plain_runs():
        yield


WRITING = [op for op in OPS if op.supports_out or op.get_inplace() is not None]
BY_NAME = {full_name(op): op for op in WRITING}


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_variants(name: str) -> None:
    op = BY_NAME[name]
    for case in cases(op, every=settings.default.max_examples > 100):
        key = (name, case.kind)
        if key not in SKIPPED and eager_runs(case):
            try:
                check(case, strides=key not in LOOSE)
            except Exception as error:
                raise AssertionError(f"{case.kind}: {error}") from error


STABLE = {
    key: why for key, why in SKIPPED.items() if why != UNDEFINED
}  # others are equal by chance


@pytest.mark.parametrize(("name", "kind"), sorted({**STABLE, **LOOSE}))
def test_what_is_skipped_still_differs(name: str, kind: str) -> None:
    op = BY_NAME[name]
    for case in cases(op, every=True):
        if case.kind == kind and eager_runs(case):
            try:
                check(case)
            except Exception:
                return
    pytest.fail(f"{name} ({kind}) is as in eager now: take it off the list")
