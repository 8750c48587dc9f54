"""Eager's formulas where torch has another one while a dispatch mode is active.

    torch.linalg.svdvals(a)       eager computes no singular vectors; under a mode torch does, and the values round
                                  differently: the recorded op is `_linalg_svd(a, False, False)` as in eager
    x.max().backward()            eager fills zeros with the gradient where `x` has its maximum; under a mode torch
                                  multiplies by a mask, which makes -0.0 of zeros and NaN of an infinite gradient
    x.prod().backward()           eager divides the product by `x` if no element is 0: the recording reads how many are
    torch._assert_async(flag)     eager raises if `flag` is 0: the recording reads it, so that a guard checks it
    a @ b of [n, i, k], [1, k, j] eager takes `bmm` if `b` needs no gradient; under a mode torch takes `mm`
    an op of another library      runs under the caller's autocast, which is off below a mode: ops inside it are cast
    x.masked_fill(mask, value)    the gradient of `value`: eager adds the selected elements alone, whose number depends
                                  on data, so a recording refuses it
    x.cumprod(0).backward()       eager divides by `x`; under a mode torch 2.11 multiplies slices, which a recording
                                  refuses (torch 2.13 divides there, too)

But for assertions and autocast, torch asks `isTensorSubclassLike` in each of these places, which is true of every
tensor while a mode is active. The formulas of a backward are recognised by the running node and the last ops of torch's
other formula.
Invariant: the formula is that of a tensor on the CPU without a mode, for the recorded call, for every replay and for
an audited call.
Refusals: singular or eigenvalues, or such a product, by a function that was read before the recording (`from
torch.linalg import svdvals`), since its replacement is not called; such a product of a parameter under autocast.
Not covered: complex `cumprod`, `pinv` and `lstsq`; the gradient of `prod` on fakes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from functionalize._compat.autograd import forward_mode_is_on, in_transform, running_node_name
from functionalize._compat.bindings import without_function_modes
from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.stacks import CapturedTraceback
from functionalize.util.patching import Patch
from functionalize.util.user_stack import is_own, line_of

aten = torch.ops.aten
_SVD, _EIGH = aten._linalg_svd.default, aten._linalg_eigh.default
_MUL, _WHERE, _SLICE, _DETACH = (
    aten.mul.Tensor,
    aten.where.self,
    aten.slice.Tensor,
    aten.detach.default,
)
_MM, _SQUEEZE = aten.mm.default, aten.squeeze.dim
_RECENT = 5  # ops that torch makes of such a product, at most
_PRODUCTS = (
    (torch, "matmul"),
    (torch.linalg, "matmul"),
    (torch.Tensor, "matmul"),
    (torch.Tensor, "__matmul__"),
)
_BOUND_BEFORE = {id(function): function for function in (getattr(*each) for each in _PRODUCTS)}
ASSERTIONS = frozenset({aten._assert_async.default, aten._assert_async.msg})
FORMULA_OPS = ASSERTIONS | {_SVD, _EIGH, _MUL, _WHERE, _SLICE, _DETACH, _MM}
_SPREAD = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
_PRODUCT = frozenset({"ProdBackward0", "ProdBackward1"})
_FILLED = "MaskedFillBackward1"
_CUMPROD = "CumprodBackward0"
_ALL = _SPREAD | _PRODUCT | {_FILLED}

_VALUES_ONLY = threading.local()  # depth: how many functions below are running in this thread
_AUTOCAST = (
    threading.local()
)  # devices: those for which autocast is on in this thread, while a watcher is active


def note_autocast(is_watched: bool) -> None:
    """Note for which devices autocast is on: inside of a mode's handler torch does not say."""
    found = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    _AUTOCAST.devices = found if is_watched else []


@contextmanager
def unseen() -> Iterator[None]:
    """A context in which no mode sees ops; what a watcher notes about autocast survives recordings inside of it."""
    devices = autocast_devices()
    try:
        with disable_current_modes():
            yield
    finally:
        _AUTOCAST.devices = devices


def autocast_devices() -> list[str]:
    """The devices for which the step that is watched has autocast on."""
    return getattr(_AUTOCAST, "devices", [])


def under_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, under the autocast of the step that is watched."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        devices = [d for d in autocast_devices() if not torch.is_autocast_enabled(d)]
        try:
            for device in devices:
                torch.set_autocast_enabled(device, True)
            return run(*args, **kwargs)
        finally:
            for device in devices:
                torch.set_autocast_enabled(device, False)

    return cast


class EagerFormulas:
    """The formulas of one recording."""

    def __init__(self) -> None:
        self._busy = False
        self._factors: Tensor | None = None  # of the product whose backward runs
        self._product: Tensor | None = None

    def by_other_ops(self, mode: Any, op: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The result by the ops of which `func` consists, or by eager's formula; NotImplemented: `func` itself runs.

        mode: see `applied`. op: the `OpKind` of `func`.
        """
        out = NotImplemented
        if op.composite:
            with mode:
                out = func.decompose(*args, **kwargs)
        if op.has_formula and out is NotImplemented:
            out = self.applied(mode, func, args, kwargs)
        return out

    def applied(self, mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of one of `FORMULA_OPS` by eager's formula; NotImplemented if torch computes what eager does.

        mode: the watcher that handles the op; it sees the ops of the formula instead.
        """
        if self._busy:
            return NotImplemented
        if func is _SVD or func is _EIGH:
            return self._run(mode, _decomposed, mode, func, args, kwargs)
        if func in ASSERTIONS:
            return self._run(mode, _asserted, mode, func, *args)
        if func is _MM:
            if mode.checks is not None and any(
                each.target is _SQUEEZE for each in mode.records[-_RECENT:]
            ):
                _check_caller(mode.checks)
            return NotImplemented
        node = running_node_name()
        if func is _DETACH or func is _SLICE:
            self.note(func, args[0], node)
            if func is _SLICE and node == _CUMPROD and mode.checks is not None:
                mode.checks.refuse_here(
                    "computes the gradient of `cumprod`, which rounds differently",
                    "multiply by `*`, or use a newer torch",
                )
            return NotImplemented
        if node not in _ALL:
            return NotImplemented
        if func is _WHERE and node == _FILLED:
            return self._run(mode, _selected, mode, *args)
        if func is _MUL and node in _SPREAD and args[0].dtype is torch.bool:
            return self._run(mode, _spread, *args)
        if func is _MUL and node in _PRODUCT and args[0].shape != args[1].shape:
            return self._run(mode, self._divided, mode, *args)
        return NotImplemented

    def watched(self, func: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, with a note of the arguments that a later formula needs; for ops that `applied` does not see."""
        if func is not _DETACH and func is not _SLICE:
            return run

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note(func, args[0], running_node_name())
            return run(*args, **kwargs)

        return noted

    def note(self, func: Any, tensor: Tensor, node: str | None) -> None:
        """Note the operands of a running `ProdBackward`: it detaches the product, and then slices the factors."""
        if self._busy:
            return
        if node not in _PRODUCT:
            self._product = self._factors = None  # of a product of one factor, which has no formula
        elif func is _DETACH:
            self._product, self._factors = tensor, None
        elif self._factors is None:
            self._factors = tensor

    def _run(self, mode: Any, formula: Callable[..., Any], *args: Any) -> Any:
        self._busy = True
        try:
            with mode:
                return formula(*args)
        finally:
            self._busy = False

    def _divided(self, mode: Any, gradient: Tensor, others: Tensor) -> Any:
        """The gradient of a product; `others`: for each factor the product of all others."""
        factors, product = self._factors, self._product
        self._factors = self._product = None
        if isinstance(others, FakeTensor):
            return NotImplemented
        if factors is None or product is None:  # torch has unpacked them by other ops
            if mode.checks is not None:
                mode.checks.refuse_here(
                    "computes the gradient of a product by unknown ops", "multiply by `*`"
                )
            return NotImplemented
        zeros = (factors == 0).sum().item()
        if zeros == 0:
            if product.dim() < gradient.dim():
                (dim,) = (d for d in range(factors.dim()) if others.shape[d] != gradient.shape[d])
                product = product.unsqueeze(dim)
            return gradient * (product / factors).conj()
        if zeros > 1 and product.dim() == 0 and not torch.is_grad_enabled():
            return torch.zeros_like(factors)
        return NotImplemented


def _asserted(mode: Any, func: Any, flag: Tensor, *message: str) -> Any:
    """None if the assertion holds; NotImplemented if the op raises."""
    if isinstance(flag, FakeTensor):
        if mode.checks is not None and not mode.checks.for_real:
            mode.checks.refuse_here(
                "asserts by data, which tensors without data cannot", "remove the assertion"
            )
        with disable_current_modes():
            return func(flag, *message)
    return None if flag.item() else NotImplemented


def _spread(mask: Tensor, share: Tensor) -> Any:
    if mask.device.type != "cpu":
        return NotImplemented  # eager multiplies there
    return torch.zeros(mask.shape, dtype=share.dtype, device=mask.device).masked_fill_(mask, share)


def _selected(mode: Any, mask: Tensor, gradient: Tensor, zero: Tensor) -> Any:
    """The elements of the gradient that the mask selects; their number depends on data, see `Checks.read_sizes`."""
    if isinstance(gradient, FakeTensor) or torch.is_grad_enabled():
        if mode.checks is not None:
            mode.checks.refuse_here(
                "computes the gradient of a tensor that `masked_fill` filled in",
                "use `torch.where(mask, value, x)`",
            )
        return NotImplemented
    return gradient.masked_select(mask)


def _decomposed(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A decomposition: without vectors if eager computes none. See the refusals above."""
    values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    flag = "compute_uv" if func is _SVD else "compute_v"
    differentiable = torch.is_grad_enabled() and values["A"].requires_grad
    if differentiable or forward_mode_is_on() or not values.get(flag, True):
        return NotImplemented
    if getattr(_VALUES_ONLY, "depth", 0):
        return func(**{**values, flag: False})
    out = func(*args, **kwargs)
    if mode.checks is not None:
        _check_vectors(mode, out[::2] if func is _SVD else out[1:])
    return out


def _check_vectors(mode: Any, vectors: Sequence[Tensor]) -> None:
    """Refuse the decomposition if its vectors are freed before another op runs: eager may not have computed them."""
    recorder, at, left = weakref.ref(mode), len(mode.records), len(vectors)
    where = line_of(CapturedTraceback.extract())

    def freed() -> None:
        nonlocal left
        left -= 1
        found = recorder()
        if left == 0 and found is not None and len(found.records) == at:
            found.checks.note(
                f"decomposes a matrix, and frees its singular or eigenvectors unread {where}: whether eager computes "
                "them cannot be seen, and the values would round differently: call torch.linalg.svdvals, eigvalsh, "
                "norm, cond or matrix_rank as attributes of torch.linalg, or keep the vectors in a variable"
            )

    for each in vectors:
        weakref.finalize(each, freed).atexit = False


def _check_caller(checks: Any) -> None:
    """Refuse a product of a squeezed operand if the calling function names one that was bound before the recording."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    known = frame.f_globals | frame.f_locals
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    if any(id(known.get(name)) in _BOUND_BEFORE for name in names):
        checks.refuse_here(
            "multiplies a batch of matrices by a function that was read before the recording, which rounds otherwise",
            "call it as torch.matmul, or write `a @ b`",
        )


def _needs_gradient(x: Tensor, cast: torch.dtype | None) -> bool:
    """Whether what autocast makes of an operand does."""
    return x.requires_grad and (cast in (None, x.dtype) or torch.is_grad_enabled())


def _cast_of(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives an operand of a product; None: it is off."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.is_floating_point()
    return torch.get_autocast_dtype(device) if is_cast and x.dtype != torch.float64 else None


def _is_plain(x: Any) -> bool:
    is_tensor = isinstance(x, FakeTensor) or (
        isinstance(x, Tensor) and type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
    return is_tensor and x.dim() == 3


def _takes_bmm(a: Any, b: Any) -> bool:
    """Whether eager multiplies these by `bmm`, where torch takes `mm` under a mode."""
    if not (_is_plain(a) and _is_plain(b)) or in_transform():
        return False
    one, many = (a, b) if a.shape[0] == 1 else (b, a)
    return one.shape[0] == 1 != many.shape[0] and not _needs_gradient(one, _cast_of(one))


def _by_bmm(a: Tensor, b: Tensor) -> Tensor:
    count = max(a.shape[0], b.shape[0])
    pair = [x if cast is None else x.to(cast) for x, cast in ((x, _cast_of(x)) for x in (a, b))]
    left, right = (x.expand(count, *x.shape[1:]).reshape(count, *x.shape[1:]) for x in pair)
    return aten._unsafe_view(torch.bmm(left, right), [count, a.shape[1], b.shape[2]])


def _product(
    original: Callable[..., Any],
    watched: Callable[[], bool],
    recorded_checks: Callable[[], Iterable[Any]],
) -> Callable[..., Any]:
    """A product of matrices with eager's ops."""

    def function(*args: Any, **kwargs: Any) -> Any:
        if not watched() or len(args) != 2 or kwargs:
            return original(*args, **kwargs)
        with without_function_modes():
            is_other = _takes_bmm(*args)
        if not is_other:
            return original(*args)
        if has_torch_function(args):
            return handle_torch_function(function, args, *args)
        if any(x.is_leaf and x.requires_grad and _cast_of(x) is not None for x in args):
            for checks in recorded_checks():
                checks.refuse_here(
                    "multiplies a parameter by one matrix or several under autocast, which may have cast it before",
                    "cast it, or expand the one matrix",
                )
        return _by_bmm(*args)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function


def patches(
    watched: Callable[[], bool], recorded_checks: Callable[[], Iterable[Any]]
) -> Iterator[Patch]:
    """(owner, name, replacement) of functions that compute singular or eigenvalues alone, multiply, or switch autocast.

    watched: whether a recorder is active in this thread. recorded_checks: those of recorders.
    """
    for owner, name in _PRODUCTS:
        yield owner, name, _product(getattr(owner, name), watched, recorded_checks)
    for name in ("svdvals", "eigvalsh", "cond", "matrix_norm", "norm", "matrix_rank"):
        yield torch.linalg, name, _values_only(getattr(torch.linalg, name), watched)
    yield torch, "nuclear_norm", _values_only(torch.nuclear_norm, watched)
    set_autocast_enabled: Callable[..., Any] = torch.set_autocast_enabled

    def noted(*args: Any) -> None:
        set_autocast_enabled(*args)
        if watched():
            note_autocast(True)

    yield torch, "set_autocast_enabled", noted


def _values_only(original: Callable[..., Any], watched: Callable[[], bool]) -> Callable[..., Any]:
    is_rank = original is torch.linalg.matrix_rank

    def function(*args: Any, **kwargs: Any) -> Any:
        if not watched():
            return original(*args, **kwargs)
        # Under a mode torch returns the rank and does not write it to `out`.
        out = kwargs.pop("out", None) if is_rank else None
        _VALUES_ONLY.depth = getattr(_VALUES_ONLY, "depth", 0) + 1
        try:
            result = original(*args, **kwargs)
        finally:
            _VALUES_ONLY.depth -= 1
        return result if out is None else out.resize_(result.shape).copy_(result)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function
