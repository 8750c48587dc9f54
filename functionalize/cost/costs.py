"""The cost of a node by a roofline model whose two roofs are as high as kernels of its kind and size reach.

    flops(node)                   floating-point operations, by the formulas of `torch.utils.flop_counter`
    moved(node)                   bytes read and written; for a collective, the bytes each rank of a ring sends
    cost_of(node)                 these and what else its time follows from on any machine
    seconds(node, machine)        the modelled time on a `Machine`
    kind_of_kernel("addmm")       "matmul": what the efficiency of an op is looked up by

    kind of node                              seconds
    views, waits, numbers, inputs             0
    collectives                               latency + bytes sent / link_bandwidth (`step_time.py` also models nodes)
    copies from one device to another         overhead + bytes / host_bandwidth
    ops on offloaded tensors                  overhead + bytes / host_memory_bandwidth
    everything else                           overhead + max(flops / FLOP/s, bytes moved / memory_bandwidth)

FLOP/s and bandwidths are the machine's peaks times its efficiency for this kind of kernel and this size
(`machines/efficiency.py`; without curves: the peaks). A causal attention computes half of its FLOPs. An op in place has
the kind of its functional form; one that is not listed is pointwise, or a matmul if it has FLOPs.
Offloaded tensors are what FSDP2's `CPUOffloadPolicy` keeps in host memory: the optimizer computes on them, and sums of
gradients. Their bandwidth is a rank's part of the host's memory channels at their peak, while all ranks of the host are
busy.
Bytes are the sizes of the tensors; a lookup (`embedding`, `index`) reads as many bytes of its table as it returns.
Sizes come from the fake values in `node.meta["val"]`, which must be static.
Not modelled: transfers that overlap with others, the contents of caches.
Refuses (`PlanError`), of offloaded tensors: a machine without `host_memory_bandwidth`; ops with FLOPs (a matmul on the
host, as of Muon); collectives of more than a few numbers, which NCCL does not have for host tensors.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from functionalize._compat.fakes import HOST
from functionalize.analysis.aliases import leaves_gradients, storage_key, written_nodes
from functionalize.cost.calls import arguments_of, nbytes_of
from functionalize.cost.categories import packet
from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COLLECTIVE,
    CONVOLUTION,
    COPY,
    COSTLY,
    CUDNN,
    CUDNN_BACKWARD,
    LOOKUP,
    MATMUL,
    MEMORY,
    NORM,
    OPTIMIZER,
    POINTWISE,
    RANDOM,
    REDUCTION,
    SUSTAINED,
)
from functionalize.cost.machines.machine import Machine
from functionalize.cost.messages import Message, message_of
from functionalize.errors import PlanError
from functionalize.ir.barrier import BARRIER
from functionalize.ir.waits import WAIT
from functionalize.program.metadata import read_provenance, tensors_of
from functionalize.util.text import human_bytes
from functionalize.util.user_stack import user_line

aten = torch.ops.aten


# -- flops -----------------------------------------------------------------------------------------

# CPU attention kernels, which torch counts as 0 before 2.15 -> the CUDA kernel with the same formula.
_SAME_FORMULA: Mapping[str, str] = types.MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    }
)

_ATTENTION = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
# Op -> the index of its `query` argument; `key` and `value` are the next two.
_QUERY: Mapping[str, int] = types.MappingProxyType(
    dict.fromkeys(_ATTENTION, 0) | {f"{name}_backward": 1 for name in _ATTENTION}
)


def _with_equal_heads(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """The arguments, key and value expanded to the heads of the query.

    Grouped-query attention costs as much, but torch 2.11 has no formula for it. args: [.., query, key, value, ..] with
    the query at index `at`; each has the shape [batch, heads, length, channels].
    """
    heads = args[at].shape[1]
    grouped = (t.shape for t in args[at + 1 : at + 3])
    repeated = (torch.empty((n, heads, *rest), device="meta") for n, _, *rest in grouped)
    return (*args[: at + 1], *repeated, *args[at + 3 :])


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node; 0 where torch has no formula (elementwise ops, reductions)."""
    formula = _formula(node.target)
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    at = _QUERY.get(packet(node))
    if at is not None and len(args) >= at + 3:
        args = _with_equal_heads(args, at)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", target)
    formula = flop_registry.get(packet)
    if formula is None and (same := _SAME_FORMULA.get(getattr(packet, "__name__", ""))):
        formula = flop_registry.get(getattr(aten, same))
    return formula


# -- bytes and seconds -----------------------------------------------------------------------------

# A ring all-reduce is a reduce-scatter followed by an all-gather: it sends the bytes twice.
_REDUCES_AND_GATHERS = ("all_reduce", "all_reduce_coalesced", "all_reduce_premul_sum")
_READS_ROWS = frozenset(("embedding", "gather", "index", "index_select"))
_NOTHING_WRITTEN = frozenset(("empty", "empty_like", "empty_strided", "new_empty"))
_NO_MESSAGE = frozenset(("wait_tensor", "_wrap_tensor_autograd"))


def moved(node: fx.Node) -> int:
    """Bytes that a node reads and writes; for a collective, the bytes that each rank of a ring sends.

    0 for a view; an expanded tensor counts the bytes that it occupies in memory.
    """
    if node.op != "call_function" or is_free(node):
        return 0
    out = sum(map(nbytes_of, tensors_of(node.meta.get("val"))))
    read = [sum(map(nbytes_of, tensors_of(n.meta.get("val")))) for n in node.all_input_nodes]
    into = sum(read)
    if is_collective(node):
        if packet(node) in _REDUCES_AND_GATHERS:
            return 2 * into
        return abs(out - into) or into
    if packet(node) in _NOTHING_WRITTEN:
        return 0
    if packet(node) in _READS_ROWS and read:
        return into - read[0] + min(read[0], out) + out
    if _is_mutable(node):  # its results are the arguments that it wrote
        out = sum(nbytes_of(t) for _, n in written_nodes(node) for t in tensors_of(n.meta["val"]))
    elif leaves_gradients(node):  # the functional form returns the gradients, too
        out -= sum(nbytes_of(t) for n in _nodes(node.args[1]) for t in tensors_of(n.meta["val"]))
    return into + out


class Cost(NamedTuple):
    """What a call costs on any machine.

    free: see `is_free`. flops, moved: 0 of a free call. dtype: that an op computes in. message: of a collective.
    on_host: see `on_host`. between_devices: whether it copies from one device to another.
    length: of the keys of an attention.
    """

    free: bool
    flops: int = 0
    moved: int = 0
    dtype: torch.dtype | None = None
    message: Message | None = None
    on_host: bool = False
    between_devices: bool = False
    length: int | None = None


_FREE = Cost(True)


def cost_of(node: fx.Node) -> Cost:
    """The cost of a call, from the values of its arguments and of its result."""
    message = message_of(node) if is_collective(node) else None
    if is_free(node):
        return _FREE if message is None else Cost(True, message=message)
    made = _first(node.meta.get("val"))
    read = next((t for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))), None)
    return Cost(
        False,
        flops(node),
        moved(node),
        dtype_of(node),
        message,
        on_host(node),
        made is not None and read is not None and made.device.type != read.device.type,
        _key_length(node),
    )


def _key_length(node: fx.Node) -> int | None:
    """The length of the keys of an attention; None of other nodes."""
    at = _QUERY.get(packet(node))
    if at is None or len(node.args) <= at + 1:
        return None
    return int(node.args[at + 1].meta["val"].shape[-2])  # type: ignore[union-attr]


def seconds(node: fx.Node, machine: Machine) -> float:
    """The modelled time of a node on a machine, by the table above."""
    if node.op != "call_function" or is_free(node):
        return 0.0
    if is_collective(node):
        nbytes = moved(node)
        share = machine.efficiency.share(COLLECTIVE, nbytes)
        return machine.latency + nbytes / (machine.link_bandwidth * share)
    return op_seconds(node, machine, cost_of(node))


def op_seconds(node: fx.Node, machine: Machine, cost: Cost) -> float:
    """The modelled time of an op that is neither free nor a collective; reads no values. cost: of that op."""
    flops, nbytes = cost.flops, cost.moved
    if cost.on_host:
        return _host_seconds(node, machine, flops, nbytes)
    if cost.between_devices:
        return machine.overhead + nbytes / 2 / machine.host_bandwidth  # nbytes: read + written
    kind = kind_of_kernel(packet(node), flops)
    share = machine.efficiency.share
    computing, family = 0.0, kind
    if flops:
        size, executed, family = float(cost.length or flops), float(flops), MEMORY
        if cost.length is not None and _is_causal(node):
            executed = flops / 2
        computing = executed / (machine.rate(cost.dtype) * share(kind, size))
    moving = nbytes / (machine.memory_bandwidth * share(family, nbytes))
    alone = max(computing, moving)
    return machine.overhead + alone / share(SUSTAINED, alone)


def _is_causal(node: fx.Node) -> bool:
    """Whether an attention kernel skips what its causal mask hides."""
    return bool(arguments_of(node).get("is_causal", False))


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype that an op computes in: of its first input, since an 8-bit matmul has a wider result."""
    for each in node.all_input_nodes:
        if (found := _first(each.meta.get("val"))) is not None:
            return found.dtype
    made = _first(node.meta.get("val"))
    return None if made is None else made.dtype


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective; a wait does not."""
    if node.target is BARRIER:
        return True
    namespace = getattr(node.target, "namespace", "")
    return namespace in ("_c10d_functional", "_dtensor") and packet(node) not in _NO_MESSAGE


def is_free(node: fx.Node) -> bool:
    """Whether a node neither allocates nor writes a tensor: a view, a wait, a `getitem`, an op on numbers."""
    if node.target is operator.getitem or (node.target is WAIT and WAIT is not None):
        return True
    if node.target is BARRIER or _is_mutable(node):
        return False
    made = [storage_key(t) for t in tensors_of(node.meta.get("val"))]
    if not made:
        return True
    read = {storage_key(t) for n in node.all_input_nodes for t in tensors_of(n.meta.get("val"))}
    return all(key in read for key in made)


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _nodes(arg: Any) -> list[fx.Node]:
    return [each for each in arg if isinstance(each, fx.Node)]


def _first(value: Any) -> Tensor | None:
    return next(tensors_of(value), None)


# -- the kinds of kernels --------------------------------------------------------------------------

# Ops of several instructions per element: exponentials, roots, divisions by polynomials.
_COSTLY = (
    "cos cosh elu erf exp exp2 expm1 gelu gelu_backward log log1p log2 log_sigmoid mish pow reciprocal rsqrt sigmoid "
    "sigmoid_backward silu silu_backward sin softplus sqrt tan tanh tanh_backward"
)
_RANDOM = (
    "bernoulli exponential native_dropout normal normal_functional rand rand_like randint randn "
    "randn_like uniform"
)
_REDUCTIONS = (
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax amin any argmax cumsum "
    "linalg_vector_norm logsumexp max mean min nll_loss_backward nll_loss_forward prod std sum var"
)
_COPIES = (
    "_chunk_cat _to_copy cat clone copy constant_pad_nd contiguous fill flip repeat roll slice_backward slice_scatter "
    "split_with_sizes_copy stack zero zeros zeros_like full full_like ones ones_like select_backward"
)
_LOOKUPS = "embedding embedding_dense_backward gather index index_add index_put index_select scatter scatter_add"
_BY_NAME: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(_COSTLY.split(), COSTLY),
        **dict.fromkeys(_RANDOM.split(), RANDOM),
        **dict.fromkeys(_REDUCTIONS.split(), REDUCTION),
        **dict.fromkeys(_COPIES.split(), COPY),
        **dict.fromkeys(_LOOKUPS.split(), LOOKUP),
        "convolution": CONVOLUTION,
        "convolution_backward": CONVOLUTION,
    }
)
_CUDNN = (CUDNN, CUDNN_BACKWARD)
# The parts of names that tell a kind, in this order.
_PARTS = (("_norm", NORM), ("_fused_", OPTIMIZER), ("_foreach_", OPTIMIZER))


def kind_of_kernel(name: str, flops: int = 0) -> str:
    """The kind of an op, by its name without namespace and overload. flops: of the op."""
    if "scaled_dot_product" in name:
        forward, backward = _CUDNN if "cudnn" in name else (ATTENTION, ATTENTION_BACKWARD)
        return backward if "_backward" in name else forward
    plain = name if name.startswith("__") else name.removesuffix("_")
    found = _BY_NAME.get(plain)
    if found is None:
        found = next((kind for part, kind in _PARTS if part in plain), None)
    if found is None or (flops and found not in (CONVOLUTION, NORM)):
        return MATMUL if flops else found or POINTWISE
    return found


# -- ops on the host -------------------------------------------------------------------------------

# Bytes of a collective that costs its latency alone, as that of a gradient's norm.
_FEW_BYTES = 1024


def on_host(node: fx.Node) -> bool:
    """Whether a node computes in host memory: neither an argument nor a result is on the device.

    Numbers in tensors of no dimension may be on either; an in-place op may have no result.
    """
    values = (t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val")))
    return {t.device.type for t in values if t.dim()} == {HOST.type}


def _host_seconds(node: fx.Node, machine: Machine, flops: int, nbytes: int) -> float:
    """The modelled time of an op on the host; flops, nbytes: of that op."""
    if flops:
        raise _host_error(
            node,
            "computes on offloaded tensors, and the FLOP/s of the host are not modelled: move its arguments to the "
            "device, or plan without CPUOffloadPolicy",
        )
    if machine.host_memory_bandwidth is None:
        raise _host_error(
            node,
            "computes on offloaded tensors, and the machine has no `host_memory_bandwidth`: set it, in bytes/s for "
            "each rank",
        )
    return machine.overhead + nbytes / machine.host_memory_bandwidth


def check_collective(node: fx.Node, nbytes: int) -> None:
    """Raises `PlanError` if a collective of offloaded tensors takes more than its latency. nbytes: sent."""
    if nbytes > _FEW_BYTES:
        raise _host_error(
            node,
            f"sends {human_bytes(nbytes)} of offloaded tensors, and collectives of host memory (gloo's) are not "
            "modelled: move them to the device first, or plan without CPUOffloadPolicy",
        )


def _host_error(node: fx.Node, why: str) -> PlanError:
    """The error that names the op and the user's line. The program is of no further use to the plan."""
    read_provenance(node.graph)  # figures do without stacks
    line = user_line(node.meta.get("stack_trace") or "")
    return PlanError(f"{node.target} ({line}) {why}" if line else f"{node.target} {why}")
