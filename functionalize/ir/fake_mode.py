"""The fake mode of `trace` and of `node.meta`: torch's, without values in fakes, and with corrected kernels.

    mode = fake_mode(allow_non_fake_inputs=True)
    fake = fake_like(mode, tensor)        a fake of a tensor, without its value

Note [Values of fakes]
~~~~~~~~~~~~~~~~~~~~~~
From torch 2.14 on, a fake of a 0-dimensional integer or float64 tensor remembers its number, and `item()` returns that:
a program would depend on a value without a guard, and a tensor with an empty storage, which has no value, could have no
fake. The number is also missing for other dtypes, and after a write. `fake_like` leaves it out: on every release
`item()` of a fake is refused.

Note [Wrong fake kernels]
~~~~~~~~~~~~~~~~~~~~~~~~~
A program that eager runs must not fail, or get another layout, because of a wrong fake kernel of an older release.
`_CORRECTED` has replacements for such kernels, on the releases that need them. The kernel of
`mkldnn_rnn_layer_backward` gives one tensor as two results, which are two tensors in eager. Torch's cache of fake
results, one for the process, gives two from the second call on. `distinct_results` makes two of them at every call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.fakes import FakeTensorMode, values_unread
from functionalize.util.torch_release import minor_of

aten = torch.ops.aten


def fake_mode(**options: Any) -> FakeTensorMode:
    """A `FakeTensorMode` with these options and without wrong kernels."""
    mode = FakeTensorMode(**options)
    mode.dispatch = _corrected_dispatch(weakref.ref(mode))  # type: ignore[method-assign]
    return mode


def fake_like(mode: FakeTensorMode, tensor: Tensor) -> Any:
    """A fake of a tensor, with a storage of the same size, and without its value."""
    with values_unread(mode):
        return mode.from_tensor(tensor, static_shapes=True)


def _corrected_dispatch(mode: weakref.ref[FakeTensorMode]) -> Callable[..., Any]:
    """A `dispatch` method for one mode. No subclass of `FakeTensorMode`: torch looks modes up by their exact type."""

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        this, corrected, kwargs = mode(), _CORRECTED.get(func), kwargs or {}
        assert this is not None  # the mode is what calls this function
        if corrected is not None:
            with this:
                out = corrected(*args, **kwargs)
            if out is not None:
                return out
        return distinct_results(func, FakeTensorMode.dispatch(this, func, types, args, kwargs))

    return dispatch


def distinct_results(func: Any, out: Any) -> Any:
    """The result of an op's fake kernel, with two tensors where eager returns two, see Note [Wrong fake kernels]."""
    if func is not aten.mkldnn_rnn_layer_backward.default:
        return out
    first = {id(each): i for i, each in reversed(list(enumerate(out)))}
    return tuple(
        each if first[id(each)] == i else each.new_empty(each.shape) for i, each in enumerate(out)
    )


def _split(self: Tensor, split_size: int, dim: int = 0) -> list[Tensor] | None:
    """`split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0)`: an empty dimension has one, empty, part."""
    if split_size == 0 or self.dim() == 0 or self.size(dim):
        return None
    return [aten.slice.Tensor(self, dim, 0, 0)]


def _fft_r2c(self: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor | None:
    """`_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided)`."""
    if not self.dtype.is_floating_point:
        return None
    size = list(self.size())
    if onesided:
        size[dim[-1]] = size[dim[-1]] // 2 + 1
    return _transformed(self, [*_outer_first(self, dim[:-1]), dim[-1]], size)


def _fft_c2c(self: Tensor, dim: list[int], normalization: int, forward: bool) -> Tensor | None:
    """`_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward)`."""
    if not self.dtype.is_complex or not dim:
        return None
    return _transformed(self, _outer_first(self, dim), list(self.size()))


def _fft_c2r(self: Tensor, dim: list[int], normalization: int, last_dim: int) -> Tensor | None:
    """`_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim)`: `_fft_c2c` of all dims but one first."""
    if not self.dtype.is_complex:
        return None
    if len(dim) > 1:
        self = aten._fft_c2c.default(self, dim[:-1], normalization, False)
    size = list(self.size())
    size[dim[-1]] = last_dim
    return _transformed(self, dim[-1:], size, self.dtype.to_real())


def _outer_first(tensor: Tensor, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=tensor.stride, reverse=True)


def _transformed(
    tensor: Tensor, dims: list[int], size: list[int], dtype: torch.dtype | None = None
) -> Tensor | None:
    """A result in the layout that MKL returns: batch dimensions outermost, by stride; transformed ones innermost.

    None where MKL is not used: torch's own fake kernel is then right.
    """
    if tensor.device.type != "cpu" or not torch.backends.mkl.is_available():
        return None
    order = [*_outer_first(tensor, [d for d in range(tensor.dim()) if d not in dims]), *dims]
    strides, step = [0] * tensor.dim(), 1
    for d in reversed(order):
        strides[d] = step
        step *= size[d]
    return tensor.new_empty_strided(size, strides, dtype=dtype or tensor.dtype.to_complex())


def _corrected() -> dict[Any, Callable[..., Any]]:
    """The replacements that the installed torch needs."""
    found: dict[Any, Callable[..., Any]] = {}
    release = minor_of(torch.__version__)
    if release < (2, 13):
        # torch's kernel indexes the last part, and fails where there is none
        found[aten.split.Tensor] = _split
    if release < (2, 12):
        # torch's kernels order the dimensions differently from MKL, and fail for some
        found[aten._fft_r2c.default] = _fft_r2c
        found[aten._fft_c2c.default] = _fft_c2c
        found[aten._fft_c2r.default] = _fft_c2r
    return found


_CORRECTED: Mapping[Any, Callable[..., Any]] = MappingProxyType(_corrected())
