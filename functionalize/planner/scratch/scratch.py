"""Memory that a CUDA kernel allocates and frees inside itself, below the dispatcher: modelled from sources, unmeasured.

    scratch_bytes(record, "cuda"), scratch_of(node, "cuda")     bytes at the op's own peak beyond its inputs and outputs
    uncounted(targets, "cuda")      {"_scaled_dot_product_cudnn_attention_backward": 32}: kernels without a figure

            ┌──┐ scratch      The peak of an op: its inputs, its outputs and its scratch.
        ┌───┘  └─ output

    Op                                             bytes
    flash attention, forward                       0: its log-sum-exp and random state are outputs
    flash attention, backward                      float32 gradient of the queries, row sums of the gradient, and
                                                   keys' gradients per query head where heads are grouped
    memory-efficient attention, backward           float32 gradient of the queries, row sums of the gradient

    Op without a figure                            why
    cuDNN attention, backward                      cuDNN chooses a plan, and its workspace, at run time
    convolutions                                   cuDNN and MIOpen measure or guess an algorithm; oneDNN blocks its
                                                   operands
    recurrent layers                               cuDNN's workspace and reserve space; oneDNN's packed weights, and the
                                                   workspace of an LSTM, which is empty on fake tensors

A report counts 0 for those without a figure, and names them. Any other op has 0 bytes, and may still have scratch:
partial sums of norms, sorts and embeddings are missing. The ops of a CPU have 0 bytes: what its kernels allocate
depends on the build, on the threads and on the instructions of the CPU. The workspaces of cuBLAS and cuDNN are
constants of a process: see `planner/machines/constants.py`.
Source of the second table: `getMaxWorkspaceSize` of aten/src/ATen/native/cudnn/Conv_v7.cpp, `cudnnGetRNNTempSpaceSizes`
in RNN.cpp, `mha_graph->get_workspace_size()` in MHA.cpp. That of oneDNN: `docs/plan.md`, what is not counted.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.ir.ops import Geometry, OpRecord, TensorRef, geometry_of

Arguments = Mapping[str, Any]  # of a call, by the names of the op's schema; a geometry for a tensor


def scratch_bytes(record: OpRecord, device: str) -> int:
    """Bytes that a recorded op holds at its own peak beyond its inputs and outputs; 0 without an entry in the table.

    device: the device type or GPU model whose kernels run.
    """
    formula = _formula(record.target, device)
    return formula(_arguments(record.target, record.args, record.kwargs)) if formula else 0


def scratch_of(node: fx.Node, device: str) -> int:
    """`scratch_bytes` of a node of a graph, from its fake values (`meta["val"]`)."""
    formula = _formula(node.target, device) if node.op == "call_function" else None
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return formula(_arguments(node.target, args, kwargs))


def is_shaped(target: Any) -> bool:
    """Whether the scratch of an op depends on the geometries of its tensors."""
    return base_name(target) in MODELLED


def base_name(target: Any) -> str | None:
    """An op's name without overload and in-place underscore; None for a target that is not an op (`getitem`)."""
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return None
    name: str = packet.__name__
    return name.rstrip("_") if not name.endswith("__") else name


def _formula(target: Any, device: str) -> Callable[[Arguments], int] | None:
    return None if device == "cpu" else MODELLED.get(base_name(target) or "")


def _arguments(target: Any, args: Any, kwargs: Any) -> Arguments:
    """The arguments of a call by name, with geometries for tensors."""
    arguments: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        arguments[argument.name] = _geometries(value)
    return arguments


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


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to


def flash_attention_backward(call: Arguments) -> int:
    """`dq_accum` and `softmax_d` in float32; with grouped heads also `dk` and `dv` of every query head.

    Rows are rounded up to 128, channels to 32 (past 192 to 256).
    Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, `mha_bwd`, which torch builds in
    aten/src/ATen/native/transformers/cuda/flash_attn/. Deterministic mode, which keeps one `dq_accum` for
    every block of keys, is not modelled.
    """
    query, key = call["query"], call["key"]
    batch, heads, length, depth = query.size
    rows = _rounded(length, 128)
    wide = _rounded(depth, 32) if depth <= 192 else 256
    grouped = 0
    if key.size[1] != heads:
        grouped = 2 * batch * heads * key.size[2] * depth * key.dtype.itemsize
    return 4 * batch * heads * rows * (wide + 1) + grouped


def efficient_attention_backward(call: Arguments) -> int:
    """Row sums and, since keys are split over blocks, the queries' gradients, both in float32.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (`kNeedsAccumGradQ`, from
    compute capability 7.0). The accumulators of keys and values, of channels past a block, are not modelled.
    """
    query = call["query"]
    batch, heads, length, depth = query.size
    rows = _rounded(length, 128)
    return 4 * batch * heads * rows * (_rounded(depth, 32) + 1)


MODELLED: Mapping[str, Callable[[Arguments], int]] = types.MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
        "_flash_attention_backward": flash_attention_backward,
        "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    }
)


# -- kernels without a figure ----------------------------------------------------------------------

_ANYWHERE = frozenset(
    (
        *("convolution", "_convolution", "convolution_overrideable", "convolution_backward"),
        *("convolution_backward_overrideable", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    )
)
_ON_A_GPU = _ANYWHERE | frozenset(
    (
        *("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward"),
        *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"),
        *("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu"),
        *("miopen_convolution", "miopen_convolution_transpose", "miopen_depthwise_convolution"),
    )
)


def uncounted(targets: Iterable[Any], device: str) -> Mapping[str, int]:
    """The ops whose scratch no table has, with the number of their calls. device: whose kernels run."""
    unknown = _ANYWHERE if device == "cpu" else _ON_A_GPU
    calls = Counter(targets)
    found: Counter[str] = Counter()
    for target, count in calls.items():
        name = base_name(target)
        if name in unknown:
            found[name] += count
    return dict(found)
