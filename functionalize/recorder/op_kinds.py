"""Properties of an op that the recorder needs before it runs the op: does it access data, what does eager allow.

    is_data_free(aten.view)     reads and writes no data: allowed on an empty storage
    is_metadata(prim.device)    returns a property of a tensor to Python: not recorded
    is_composite(aten.matmul)   consists of other ops, which are recorded instead
    kind_of(func)               all of these for one op, computed once

Each answer depends on the op alone, not on its arguments, and is cached.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import entry_of, has_kernel
from functionalize.discharge.rules.collectives import refusal_of_collective
from functionalize.discharge.rules.factories import SHAPE_ONLY
from functionalize.discharge.rules.mutations import is_mutating, written_arguments
from functionalize.discharge.rules.op_quirks import CHECK_ERRORS, READS_GRAD_MODE
from functionalize.discharge.rules.resizes import RESIZE_STORAGE, is_inplace_view
from functionalize.errors import UnsupportedTensorError
from functionalize.recorder.eager_formulas import ASSERTIONS, FORMULA_OPS, under_autocast

aten = torch.ops.aten
QUANTISED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
# Ops whose result is more than a storage, a size and strides. A fake of the result does not show that.
_MAKES = types.MappingProxyType(
    {
        "aten::quantize_per_": "quantised",
        "aten::_make_per_": "quantised",
        "aten::_empty_affine_quantized": "quantised",
        "aten::_empty_per_channel_affine_quantized": "quantised",
        "aten::empty_quantized": "quantised",
        "aten::_nested_tensor_from_": "nested",
    }
)


_DENSE = "Compute with a dense tensor (`to_dense()`, `to_padded_tensor()`, `dequantize()`) made outside the step"


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor; raises `UnsupportedTensorError` for one that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedTensorError(
            f"meets a tensor of type {type(tensor).__name__}, layout {tensor.layout} and size "
            f"{list(tensor.shape)}, which has no storage of its own: only strided tensors can be functionalized. "
            f"{_DENSE}"
        ) from error


def check_plain(tensor: Tensor) -> None:
    """Raises `UnsupportedTensorError` for a tensor that is more than a storage, a size and strides."""
    if tensor.dtype in QUANTISED:
        raise more_than_strided(f"meets a quantised tensor of {tensor.dtype}")
    if tensor.is_nested:
        raise more_than_strided(f"meets a nested tensor of {tensor.dtype}")


def more_than_strided(what: str) -> UnsupportedTensorError:
    """The error for a quantised or nested tensor."""
    return UnsupportedTensorError(
        f"{what}, which is more than a storage, a size and strides: only plain strided tensors can be functionalized. "
        f"{_DENSE}"
    )


@cache
def is_data_free(func: Any) -> bool:
    """Whether an op reads and writes no data: views, in-place views, sizes."""
    if is_inplace_view(func) or func in SHAPE_ONLY or func in UNDECLARED_VIEWS:
        return True
    returns = func._schema.returns
    if is_mutating(func) or not returns:
        return False
    return all(r.alias_info is not None for r in returns)


# Views whose schema declares no alias, so that autograd does not track writes through them.
UNDECLARED_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)

# In-place views that grow the storage to fit the tensor.
MAY_GROW = frozenset(
    {
        aten.resize_.default,
        aten.resize_as_.default,
        aten.set_.source_Tensor,
        aten.set_.source_Tensor_storage_offset,
        aten.set_.source_Storage,
        aten.set_.source_Storage_storage_offset,
        aten.set_.default,
    }
)

# In-place views that eager refuses on a storage that is too small; so does the fake mode, but it logs an error first.
CHECKED_INPLACE_VIEWS = frozenset(
    {
        aten.t_.default,
        aten.transpose_.default,
        aten.squeeze_.default,
        aten.squeeze_.dim,
        aten.squeeze_.dims,
        aten.unsqueeze_.default,
    }
)

# Views that eager allows on a tensor whose storage is too small for it; it refuses all other views.
UNCHECKED_VIEWS = frozenset(
    {
        aten.view.default,
        aten.view.dtype,
        aten.detach.default,
        aten.detach_.default,
        aten.alias.default,
        aten._reshape_alias.default,
        aten.view_as_real.default,
        aten.view_as_complex.default,
        aten._conj.default,
        aten._neg_view.default,
    }
)


def tensors_in(arg: Any) -> Iterator[Tensor]:
    """Every tensor inside `arg`, in order."""
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for a in arg:
            yield from tensors_in(a)
    elif isinstance(arg, dict):
        for a in arg.values():
            yield from tensors_in(a)


# Ops that return a value to Python.
TO_PYTHON = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default})


@cache
def is_metadata(func: Any) -> bool:
    """Whether an op only returns a tensor's size, device, ... to Python, or enters a profiler: not recorded."""
    if func.namespace == "profiler":  # `record_function`, which FSDP2 enters in every hook
        return True
    if is_mutating(func) or func in TO_PYTHON or func is RESIZE_STORAGE or is_composite(func):
        return False
    if func in ASSERTIONS or func is CHECK_ERRORS:
        return False
    if func.namespace not in ("aten", "prim"):
        return False
    return not any("Tensor" in str(r.type) for r in func._schema.returns)


@cache
def is_composite(func: Any) -> bool:
    """Whether an op must be decomposed: it reaches the mode because autograd's keys are off (inference mode).

    An op with a kernel of its own is not decomposed: `silu_backward` has a kernel and a decomposition, which round
    differently. Nor is an op for which the target of a fake world has a kernel.
    """
    if func.namespace != "aten" or not func._can_decompose():
        return False
    name = func.name()
    if name == "aten::_fused_rms_norm":
        return False
    return not any(has_kernel(name, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd"))


def _changes_geometry(func: Any) -> bool:
    """Whether an op may change the size of a storage that it writes, or the geometry of a tensor on it."""
    if is_inplace_view(func) or func in MAY_GROW or func.namespace != "aten":
        return is_mutating(func)
    return any(at is None for at, _ in written_arguments(func))  # `out=`


# Ops that make a tensor with contents that are not defined.
BLANK = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
_OF_TORCH = frozenset(
    {"aten", "prim", "prims", "profiler", "inductor", "higher_order", "functionalize"}
)
_OF_TORCH |= {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "fsdp",
    "_dtensor",
    "symm_mem",
}
_OF_TORCH |= {"quantized", "mkldnn", "mkl"}
# Ops whose one kernel, for all devices, calls ops that autocast casts.
_CALLS_OTHERS = frozenset({aten._trilinear.default, aten.linalg_pinv.atol_rtol_tensor})


@dataclass(frozen=True, slots=True)
class OpKind:
    """All of the above for one op, so that the recorder looks it up once.

    reads_no_data: `is_data_free`: reads and writes no data.
    metadata, composite, mutating: `is_metadata`, `is_composite`, `is_mutating`.
    changes_geometry: `_changes_geometry`: may change the size of a storage or the geometry of a tensor that it writes.
    to_python: returns a value to Python.
    communicates: an op of `c10d` or `fsdp`. refused_collective: a collective that no rule supports.
    checked_inplace_view: in `CHECKED_INPLACE_VIEWS`.
    restrides: its arguments set the strides of its result (`as_strided`).
    random: draws from a random generator.
    sized_by_data: the size of its result depends on data.
    foreign: of a library that is not torch's, or treated so since its kernel calls ops that autocast casts.
    returns_numbers: returns something else than tensors.
    reads_grad_mode: computes a different result under `no_grad`.
    makes: "quantised" or "nested" if the result is more than a strided tensor, else "".
    may_be_refused: `Checks.refuse` must be called before it runs.
    has_formula: eager may compute something else in its place, see eager_formulas.py.
    run: calls the op with one Python frame less. op: the op.
    """

    reads_no_data: bool
    metadata: bool
    composite: bool
    mutating: bool
    changes_geometry: bool
    to_python: bool
    communicates: bool
    refused_collective: bool
    checked_inplace_view: bool
    restrides: bool
    random: bool
    sized_by_data: bool
    foreign: bool
    returns_numbers: bool
    reads_grad_mode: bool
    makes: str
    may_be_refused: bool
    has_formula: bool
    run: Callable[..., Any]
    op: Any

    @property
    def is_read(self) -> bool:
        """Whether Python learns contents of a tensor from it."""
        return self.to_python or self.sized_by_data


@cache
def kind_of(func: Any) -> OpKind:
    """The properties of the op `func`."""
    reads_no_data, communicates = is_data_free(func), func.namespace in ("c10d", "fsdp")
    refused_collective = refusal_of_collective(func) is not None
    writes = is_mutating(func) and not reads_no_data
    foreign = func.namespace not in _OF_TORCH or func in _CALLS_OTHERS
    makes = next((kind for start, kind in _MAKES.items() if func.name().startswith(start)), "")
    return OpKind(
        reads_no_data=reads_no_data,
        metadata=is_metadata(func),
        composite=is_composite(func),
        mutating=is_mutating(func),
        changes_geometry=_changes_geometry(func),
        to_python=func in TO_PYTHON,
        communicates=communicates,
        refused_collective=refused_collective,
        checked_inplace_view=func in CHECKED_INPLACE_VIEWS,
        restrides=func in (aten.as_strided.default, aten.as_strided_.default),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        sized_by_data=torch.Tag.dynamic_output_shape in func.tags,
        foreign=foreign,
        returns_numbers=any("Tensor" not in str(r.type) for r in func._schema.returns),
        reads_grad_mode=func in READS_GRAD_MODE,
        makes=makes,
        may_be_refused=communicates
        or refused_collective
        or writes
        or makes != ""
        or func in CHECKED_INPLACE_VIEWS
        or func is RESIZE_STORAGE,
        has_formula=func in FORMULA_OPS,
        run=under_autocast(entry_of(func)) if foreign else entry_of(func),
        op=func,
    )
