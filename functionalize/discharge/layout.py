"""Which size, strides and dtype the functional counterpart of a mutating op will produce.

In-place and `out=` ops keep the layout of the tensor they write; their counterparts derive one from all
their arguments. Where the two differ, and only there, the engine emits a copy. The layout of the result comes from the
op's meta kernel and is cached per signature, so identical layers run it once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from functionalize.discharge.rules.mutations import FunctionalForm
from functionalize.ir.ops import Geometry, TensorRef, map_refs, refs_in
from functionalize.ir.scalars import LiveNumber, with_hints

# The geometry of a result of an op without a usable meta kernel: it is always copied to the layout it needs.
UNKNOWN = Geometry((), (), -1, torch.float32)


def result_geometries(
    form: FunctionalForm, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]
) -> list[Any] | None:
    """The geometry of every output of `form.target(*args, **kwargs)`; None if each is that of the tensor written."""
    if torch.Tag.pointwise in form.target.tags and _all_alike(args, kwargs, written):
        return None
    if _keeps_layouts(form.target, args, written):
        return None
    return output_geometries(form.target, args, kwargs)


def output_geometry(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Geometry:
    """The geometry of the one tensor that `target(*args, **kwargs)` returns."""
    geometry: Geometry = output_geometries(target, args, kwargs)[0]
    return geometry


def output_geometries(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The geometry of every output of `target(*args, **kwargs)`."""
    key = _freeze((target, args, kwargs))
    try:
        return _by_meta_kernel(_Key(key, target, args, kwargs))
    except TypeError:  # an unhashable constant
        return _run(target, args, kwargs)


def _all_alike(args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Any]) -> bool:
    """Whether every argument has the layout of the one dense tensor written; element-wise ops keep it."""
    first = written[0] if type(written[0]) is TensorRef else None
    if first is None or len(written) != 1 or not first.geometry.is_dense:
        return False
    g = first.geometry
    for ref in refs_in([args, kwargs]):
        other = ref.geometry
        if other.size != g.size or other.stride != g.stride or other.dtype != g.dtype:
            return False
    return type(args[0]) is TensorRef if args else False


def _keeps_layouts(target: Any, args: tuple[Any, ...], written: list[Any]) -> bool:
    """Whether the results of a list op surely have the layouts of the tensors written: meta kernels of long lists cost.

    A fused optimizer clones what it writes, and a foreach op of floats and one real number keeps dtypes; both keep the
    strides of dense tensors.
    """
    name = target._schema.name
    numbers = len(args) == 2 and type(args[1]) in (int, float)
    if not name.startswith("aten::_fused_") and not (
        name.startswith("aten::_foreach_") and numbers
    ):
        return False
    refs = refs_in(written)
    whole = all(type(each) is list or type(each) is tuple or each is None for each in written)
    floats = all(r.geometry.is_dense and r.geometry.dtype.is_floating_point for r in refs)
    return whole and floats and bool(refs)


def _freeze(arg: Any) -> Any:
    if type(arg) is TensorRef:
        g = arg.geometry
        return (g.size, g.stride, g.dtype)
    if isinstance(arg, (list, tuple)):
        return tuple(_freeze(a) for a in arg)
    if isinstance(arg, dict):
        return tuple((k, _freeze(v)) for k, v in arg.items())
    if type(arg) is LiveNumber:  # no layout depends on its value
        return (LiveNumber, type(arg.hint))
    return (type(arg), arg)


class _Key:
    """A call of an op, equal to calls of the same signature.

    The cache keeps its keys, so `_by_meta_kernel` drops the arguments once the op has run: they must not stay alive.
    """

    __slots__ = ("args", "frozen", "kwargs", "target")

    def __init__(
        self, frozen: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.frozen, self.target, self.args, self.kwargs = frozen, target, args, kwargs

    def __hash__(self) -> int:
        return hash(self.frozen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.frozen == other.frozen


@lru_cache(maxsize=4096)
def _by_meta_kernel(key: _Key) -> list[Any]:
    found = _run(key.target, key.args, key.kwargs)
    key.args, key.kwargs = (), {}  # a live number refers to the optimizer, and so to the model
    return found


# Ops whose meta kernels return other strides than the kernels by LAPACK, the FFT libraries and others.
_UNTRUSTED = (
    *("_fft", "fft_", "_linalg", "linalg_", "_cholesky", "cholesky", "_lu_", "lu_", "geqrf"),
    *("orgqr", "ormqr", "triangular_solve", "rrelu_with_noise"),
)


def _run(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    def meta(ref: TensorRef) -> torch.Tensor:
        g = ref.geometry
        return torch.empty_strided(g.size, g.stride, dtype=g.dtype, device="meta")

    returns = len(target._schema.returns)
    kwargs = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items()}
    try:
        with torch.no_grad():
            out = target(*map_refs(meta, with_hints(args)), **map_refs(meta, with_hints(kwargs)))
    except Exception:  # no meta kernel, or one that reads data: assume nothing about the layout
        return [UNKNOWN] * returns
    trusted = not target._schema.name.removeprefix("aten::").startswith(_UNTRUSTED)
    found = _geometries(out, trusted)
    return found if returns > 1 else [found]  # a single output may itself be a list of tensors


def _geometries(out: Any, trusted: bool) -> Any:
    if isinstance(out, torch.Tensor):
        stride = out.stride() if trusted else (-1,) * out.dim()
        return Geometry(out.shape, stride, 0, out.dtype)
    if isinstance(out, (list, tuple)):
        return [_geometries(o, trusted) for o in out]
    return None
