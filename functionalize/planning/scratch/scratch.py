"""Memory that an op allocates and frees inside its kernel, below the dispatcher: a table by op and geometry.

    scratch_bytes(record), scratch_of(node)      bytes at the op's own peak beyond its inputs and outputs
    scratch_bytes(record, threads=8)             some kernels have a buffer per thread; default: torch's number
    scratch_bytes(record, device="cuda")         a smaller table, modelled and not measured (see `scratch_cuda`)
    unseen_outputs(record or node)               bytes of outputs that are empty on fake tensors (LSTM workspace)

            ┌──┐ scratch      The peak of an op: its inputs, its outputs and its scratch. An output that is
        ┌───┘  └─ output      allocated only after that peak reduces the scratch, to 0 at least.

The table has the allocations of ATen's own kernels, the same on every CPU; `python -m benchmarks.scratch` compares it
with torch's CPU allocator. Not in it: scalars that kernels wrap (up to 64 bytes), and memory that oneDNN, MKL and
FBGEMM allocate inside an op (convolutions, LSTM layers, matrix products in bfloat16), which depends on their release
and on the CPU's instruction set. `docs/plan.md` has the size of that gap. Scratch that depends on data is computed from
the size of the result, so that the assignment of one value to the elements of a mask counts 0.
Refuses nothing: an op without an entry has 0 bytes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.ir.ops import Geometry, OpRecord, TensorRef, geometry_of
from functionalize.planning.scratch import cuda as scratch_cuda
from functionalize.planning.scratch import formulas


def scratch_bytes(record: OpRecord, *, threads: int | None = None, device: str = "cpu") -> int:
    """Bytes that an op holds at its own peak beyond its inputs and outputs; 0 without an entry in the table."""
    formula = _formula(record.target, device)
    if formula is None:
        return 0
    return _value(formula, record.target, record.args, record.kwargs, record.outputs, threads)


def scratch_of(node: fx.Node, *, threads: int | None = None, device: str = "cpu") -> int:
    """`scratch_bytes` of a node of a graph, from its fake values (`meta["val"]`)."""
    formula = _formula(node.target, device) if node.op == "call_function" else None
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return _value(formula, node.target, args, kwargs, node.meta.get("val"), threads)


def is_shaped(target: Any) -> bool:
    """Whether the scratch or the unseen outputs of an op depend on the geometries of its tensors."""
    if base_name(target) == _LSTM:
        return True
    return any(_formula(target, device) is not None for device in ("cpu", "cuda"))


def unseen_outputs(call: OpRecord | fx.Node) -> int:
    """Bytes of outputs that are empty on fake tensors but not on real ones: the workspace of an LSTM.

    The workspace is live until backward has read it. 0 if the output has its real size.
    """
    if base_name(call.target) != _LSTM:
        return 0
    if isinstance(call, fx.Node):
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: n.meta.get("val"))
        bound = _bind(call.target, args, kwargs, call.meta.get("val"), 1)
    else:
        bound = _bind(call.target, call.args, call.kwargs, call.outputs, 1)
    return 0 if bound.outputs[-1].numel else _lstm_workspace(bound)


_LSTM = "mkldnn_rnn_layer"


def _lstm_workspace(call: formulas.KernelCall) -> int:
    """The fourth output of `mkldnn_rnn_layer`, in which forward saves gates and states for backward.

    Leading dimensions are padded to 64 bytes, and by 64 more where they are a multiple of 256 elements; every
    buffer starts on a page. Source: oneDNN, src/cpu/rnn/rnn_utils.hpp (`set_workspace_sizes`).
    """
    x, hidden = call["input"], call["hidden_size"]
    time, batch, inputs = x.size
    size, wide, moments = x.dtype.itemsize, max(inputs, hidden), 2 * (time + 1) * batch
    gates = _paged(time * batch * _leading(4 * hidden, size) * size)
    hiddens = _paged(time * batch * _leading(hidden, size) * size)
    states = _paged(moments * _leading(wide, size) * size) + _paged(moments * hidden * size)
    # Gradients are float32 whatever the states are: of the layer, of the hidden state, of the cell.
    gradients = 2 * _paged(moments * _leading(wide, 4) * 4) + _paged(moments * hidden * 4)
    return gates + hiddens + states + gradients


def _paged(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _leading(n: int, itemsize: int) -> int:
    line = 64 // itemsize
    n = -(-n // line) * line
    return n + line if n % 256 == 0 else n


# -- from an op to its formula ---------------------------------------------------------------------

Formula = Callable[[formulas.KernelCall], int]


def base_name(target: Any) -> str | None:
    """An op's name without overload and in-place underscore; None for a target that is not an op (`getitem`)."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return None
    name: str = packet.__name__
    return name.rstrip("_") if not name.endswith("__") else name


@lru_cache(maxsize=4096)
def _formula(target: Any, device: str) -> Formula | None:
    name = base_name(target)
    if name is None:
        return None
    if device != "cpu":
        modelled = scratch_cuda.MODELLED.get(name)
        return None if modelled is None else (lambda call: modelled(call))
    if target.namespace != "aten":
        return None
    found = TABLE.get(name)
    return found if found is not None else formulas.promoted if _is_pointwise(target) else None


def _is_pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in getattr(target, "tags", ())


def _value(
    formula: Formula, target: Any, args: Any, kwargs: Any, outputs: Any, threads: int | None
) -> int:
    threads = torch.get_num_threads() if threads is None else threads
    return max(formula(_bind(target, args, kwargs, outputs, threads)), 0)


def _bind(target: Any, args: Any, kwargs: Any, outputs: Any, threads: int) -> formulas.KernelCall:
    """A call with its arguments by name and geometries for tensors."""
    arguments: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        arguments[argument.name] = _geometries(value)
    return formulas.KernelCall(
        base_name(target) or "",
        arguments,
        tuple(formulas.geometries(_geometries(outputs))),
        threads,
    )


def _geometries(value: Any) -> Any:
    """`value` with tensors replaced by their geometries."""
    if isinstance(value, Tensor):
        return geometry_of(value) if value.layout == torch.strided else None
    if type(value) is TensorRef:
        return value.geometry
    if isinstance(value, list | tuple) and type(value) is not Geometry:
        return [_geometries(each) for each in value]
    return value


# -- the table ---------------------------------------------------------------------------------------

TABLE: Mapping[str, Formula] = types.MappingProxyType(
    {
        **dict.fromkeys(
            ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm"), formulas.product
        ),
        "_scaled_dot_product_flash_attention_for_cpu": formulas.attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": formulas.attention_backward,
        "native_layer_norm_backward": formulas.layer_norm_backward,
        "native_group_norm": formulas.group_norm,
        "native_group_norm_backward": formulas.group_norm_backward,
        "native_batch_norm": formulas.batch_norm,
        "_native_batch_norm_legit": formulas.batch_norm,
        "_native_batch_norm_legit_functional": formulas.batch_norm,
        "_batch_norm_with_update": formulas.batch_norm,
        "_batch_norm_with_update_functional": formulas.batch_norm,
        "native_batch_norm_backward": formulas.batch_norm_backward,
        "batch_norm_backward": formulas.batch_norm_backward,
        "mean": formulas.mean,
        **dict.fromkeys(
            ("sum", "prod", "cumsum", "linalg_vector_norm", "_foreach_norm"), formulas.summed
        ),
        **dict.fromkeys(("any", "all"), formulas.tested),
        "logsumexp": formulas.log_sum_exp,
        **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), formulas.loss),
        **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), formulas.scattered),
        **dict.fromkeys(("sort", "argsort"), formulas.sort),
        "gather": formulas.gathered,
        "native_dropout": formulas.native_dropout,
        **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), formulas.distances),
        **dict.fromkeys(("copy", "clone", "_to_copy"), formulas.copied),
        **dict.fromkeys(("cat", "stack"), formulas.concatenated),
        "im2col": formulas.one_copy,
        "roll": formulas.rolled,
        "index": formulas.indexed,
        "index_put": formulas.put,
        "index_add": formulas.index_added,
        "masked_select": formulas.masked_select,
        **dict.fromkeys(("_softmax", "_log_softmax"), formulas.softmax),
        "_safe_softmax": formulas.safe_softmax,
        "binary_cross_entropy": formulas.cross_entropy,
        "binary_cross_entropy_with_logits": formulas.logits,
        **formulas.RESIZED,
    }
)
