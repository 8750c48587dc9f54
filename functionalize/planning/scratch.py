"""What an op allocates and frees inside its kernel, which no dispatcher sees: a table by op and geometry.

    scratch_bytes(record), scratch_of(node)      bytes at the op's own peak beyond its inputs and outputs
    scratch_bytes(record, threads=8)             some kernels give every thread a buffer; default: torch's number
    scratch_bytes(record, device="cuda")         a smaller table, modelled and not measured (see `scratch_cuda`)
    is_tabulated(target)                         whether the table knows: a formula, or known to need nothing
    unseen_outputs(record or node)               bytes of outputs that fake tensors leave out (an LSTM's workspace)

            ┌──┐ scratch      An op's peak is what it reads, what it makes, and its scratch. An output of a
        ┌───┘  └─ output      size that is not there yet at that peak makes the scratch smaller, never negative.

Truth is torch's CPU allocator in torch 2.13 on a CPU with AVX-512, by `torch.profiler`: `python -m benchmarks.scratch`
compares. Scalars that kernels wrap (up to 64 bytes) are left out. Memory that oneDNN, MKL or FBGEMM take from
malloc, not from torch's allocator (code, caches, packed float32 matrices), is neither in the truth nor here.
Sizes follow the CPU's instructions (AVX-512 with bfloat16, no AMX) and oneDNN's choice of kernels. What depends on
data is taken from the result's size, so that an assignment of one value to what a mask selects counts none.
Refuses nothing: an op that is not tabulated has 0 bytes, and `is_tabulated` says no.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.core.ops import Geometry, OpRecord, TensorRef, geometry_of
from functionalize.planning import scratch_cuda, scratch_onednn
from functionalize.planning import scratch_formulas as formulas
from functionalize.planning import scratch_more as more
from functionalize.planning.scratch_zero import ZERO


def scratch_bytes(record: OpRecord, *, threads: int | None = None, device: str = "cpu") -> int:
    """Bytes that an op holds at its own peak beyond its inputs and outputs; 0 where the table knows none."""
    formula = _formula(record.target, device)
    if formula is None:
        return 0
    return _value(formula, record.target, record.args, record.kwargs, record.outputs, threads)


def scratch_of(node: fx.Node, *, threads: int | None = None, device: str = "cpu") -> int:
    """The same of a node of a graph, by its fake values (`meta["val"]`)."""
    formula = _formula(node.target, device) if node.op == "call_function" else None
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return _value(formula, node.target, args, kwargs, node.meta.get("val"), threads)


def is_shaped(target: Any) -> bool:
    """Whether the scratch of an op, or what fakes leave out of it, follows from how its tensors look."""
    if base_name(target) == "mkldnn_rnn_layer":
        return True
    return any(_formula(target, device) is not None for device in ("cpu", "cuda"))


def is_tabulated(target: Any, device: str = "cpu") -> bool:
    """Whether the table knows an op: that it needs scratch, and how much, or that it needs none.

    Views, collectives (whose buffers are the backend's) and marks of profilers need none by what they are. Elsewhere 0
    is a guess.
    """
    name = base_name(target)
    if name is None or _formula(target, device) is not None or name in ZERO:
        return True
    listed = name.startswith("_foreach_")  # elementwise, tensor by tensor
    return listed or _is_pointwise(target) or _is_view(target) or target.namespace in _ELSEWHERE


def unseen_outputs(call: OpRecord | fx.Node) -> int:
    """Bytes of outputs that are empty on fake tensors and not for real: the workspace of an LSTM.

    It is live until backward has read it. 0 if the output has its real size.
    """
    if base_name(call.target) != "mkldnn_rnn_layer":
        return 0
    if isinstance(call, fx.Node):
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: n.meta.get("val"))
        bound = _bind(call.target, args, kwargs, call.meta.get("val"), 1)
    else:
        bound = _bind(call.target, call.args, call.kwargs, call.outputs, 1)
    workspace = scratch_onednn.lstm_workspace(*formulas.recurrent_sizes(bound))
    return workspace - bound.outputs[-1].nbytes if bound.outputs[-1].numel == 0 else 0


# -- from an op to its formula ---------------------------------------------------------------------

Formula = Callable[[formulas.Call], int]
_ELSEWHERE = frozenset({"c10d", "c10d_functional", "_c10d_functional", "fsdp", "profiler"})


def base_name(target: Any) -> str | None:
    """An op's name without overload and in-place underscore; None for what is no op (`getitem`)."""
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


def _is_view(target: Any) -> bool:
    schema = target._schema
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    made = [r.alias_info for r in schema.returns]
    return bool(made) and bool(aliases) and all(m is not None and not m.is_write for m in made)


def _value(
    formula: Formula, target: Any, args: Any, kwargs: Any, outputs: Any, threads: int | None
) -> int:
    threads = torch.get_num_threads() if threads is None else threads
    return max(formula(_bind(target, args, kwargs, outputs, threads)), 0)


def _bind(target: Any, args: Any, kwargs: Any, outputs: Any, threads: int) -> formulas.Call:
    """A call with its arguments by name and geometries for tensors."""
    given: dict[str, Any] = {}
    for i, argument in enumerate(target._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        given[argument.name] = _seen(value)
    return formulas.Call(
        base_name(target) or "", given, tuple(formulas.geometries(_seen(outputs))), threads
    )


def _seen(value: Any) -> Any:
    """`value` with geometries for tensors."""
    if isinstance(value, Tensor):
        return geometry_of(value) if value.layout == torch.strided else None
    if type(value) is TensorRef:
        return value.geometry
    if isinstance(value, list | tuple) and type(value) is not Geometry:
        return [_seen(each) for each in value]
    return value


# -- the table ---------------------------------------------------------------------------------------

TABLE: Mapping[str, Formula] = types.MappingProxyType(
    {
        **dict.fromkeys(
            ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm"), formulas.product
        ),
        "convolution": formulas.convolution,
        "convolution_backward": formulas.convolution_backward,
        "mkldnn_rnn_layer": formulas.recurrent,
        "mkldnn_rnn_layer_backward": formulas.recurrent_backward,
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
        **dict.fromkeys(("sum", "prod", "linalg_vector_norm", "_foreach_norm"), formulas.summed),
        **dict.fromkeys(("any", "all"), formulas.tested),
        "logsumexp": formulas.log_sum_exp,
        **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), formulas.loss),
        **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), formulas.scattered),
        **dict.fromkeys(("sort", "argsort"), formulas.sort),
        "gather": formulas.gathered,
        "kthvalue": formulas.kth,
        "native_dropout": formulas.native_dropout,
        **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), formulas.distances),
        **dict.fromkeys(("copy", "clone", "_to_copy"), formulas.copied),
        **dict.fromkeys(("cat", "stack"), formulas.concatenated),
        "im2col": formulas.one_copy,
        "median": more.median,
        "normal": more.normal,
        "roll": more.rolled,
        "cumsum": more.cast_first,
        "abs": more.absolute,
        "index": more.indexed,
        "index_put": more.put,
        "index_add": more.index_added,
        "masked_select": more.masked_select,
        "repeat_interleave": more.repeats,
        "unfold_backward": more.unfolded,
        "addbmm": more.summed_products,
        "_fft_c2r": more.to_real,
        **dict.fromkeys(("_softmax", "_log_softmax"), more.softmax),
        "_safe_softmax": more.safe_softmax,
        "binary_cross_entropy": more.cross_entropy,
        "binary_cross_entropy_with_logits": more.logits,
        "_ctc_loss_backward": more.ctc_backward,
        "_embedding_bag_backward": more.bag_backward,
        "_embedding_bag_per_sample_weights_backward": more.bag_weights_backward,
        "_pack_padded_sequence": more.packed,
        **more.RESIZED,
    }
)
