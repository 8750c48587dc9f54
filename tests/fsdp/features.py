"""The features of FSDP2 that `fz.capture` claims, one row each: how the model is built, the step, how many ranks.

`test_features.py` runs every row: captured once, replayed at least five times with other data, bitwise equal to
an eager twin after every step and in both `state_dict()`s at the end. A row with `eager` is one that eager itself
cannot run on gloo, and how it says so. `table()` is the list for people.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from tests.fsdp import steps, upstream
from tests.fsdp.extensions import (
    AllGatherByLists,
    GatheredInBFloat16,
    GatheredInInt8,
    PersistentAllGather,
    ReduceScatterByAllReduce,
    ReduceScatterByAllToAll,
    gathered_as,
    halving,
    hsdp_by_hook,
    with_comms,
)
from tests.fsdp.models import (
    Build,
    Built,
    Net,
    Normed,
    adamw,
    both,
    even,
    every,
    experts_on_another_mesh,
    from_meta,
    frozen_block,
    frozen_weights,
    grouped,
    ignoring,
    largest_dim,
    momentum,
    nested,
    prefetched,
    replicated,
    root_only,
    roots_that_share,
    separate_roots,
    sometimes_used,
    spmd,
    tensor_parallel,
    tied,
    uneven,
    wrapped,
)
from tests.fsdp.twins import MakeStep


@dataclass(frozen=True)
class Feature:
    """A row. group, title: for people; eager: the error of eager, where that cannot run it."""

    group: str
    title: str
    build: Build
    make_step: MakeStep = steps.plain
    world: int = 2
    batches: Callable[[], Sequence[Any]] = steps.pairs
    eager: str = ""


def _policy(**options: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(**options)


BF16 = _policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = _policy(param_dtype=torch.float16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
SYNC, REDUCE, LAST = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_is_last_backward",
)
RESHARD = "set_reshard_after_backward"


def _structured(kind: type) -> Callable[[], Built]:
    def build() -> Built:
        torch.manual_seed(0)
        model = steps.Structured(Net(), kind)
        fully_shard(model.inner)
        fully_shard(model)
        return model, adamw(model.parameters())

    return build


def _named() -> list[dict[str, Any]]:
    return [{"batch": {"x": x, "y": y}, "scale": 0.5, "name": "n"} for x, y in steps.pairs()]


def _compiled() -> Built:
    torch.manual_seed(0)
    model = Net()
    for i, block in enumerate(model.blocks):
        block.compile(backend="eager")
        fully_shard(model.blocks[i])
    fully_shard(model)
    return model, adamw(model.parameters())


def _in_backward() -> Built:
    """An SGD step for each parameter as soon as its gradient is reduced."""
    model, _ = wrapped()()
    for p in model.parameters():

        def update(p: Any) -> None:
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
    return model, torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0)


def _registered(model: Any) -> None:
    register_fsdp_forward_method(model, "features")


def table() -> str:
    """The rows as a Markdown table: what is claimed, group by group, and what eager cannot do here."""
    groups: dict[str, list[str]] = {}
    for row in FEATURES.values():
        title = f"{row.title} (not on gloo)" if row.eager else row.title
        groups.setdefault(row.group, []).append(title)
    lines = [f"| {group} | {', '.join(titles)} |" for group, titles in groups.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


wide = functools.partial(steps.pairs, classes=4)

FEATURES: dict[str, Feature] = {
    # -- wrapping
    "blocks_and_root": Feature("wrapping", "every block and the root", wrapped()),
    "nested": Feature("wrapping", "nested modules", nested),
    "root_only": Feature("wrapping", "the root alone", root_only),
    "grouped": Feature("wrapping", "`fully_shard([a, b])`", grouped),
    "separate_roots": Feature("wrapping", "several roots", separate_roots),
    "shared_comm_ctx": Feature("wrapping", "several roots, `share_comm_ctx`", roots_that_share),
    "meta_device": Feature("wrapping", "built on the meta device", from_meta),
    "ignored_params": Feature("wrapping", "`ignored_params`", ignoring),
    # -- sharding
    "uneven_shards": Feature("sharding", "uneven and empty shards", wrapped(make=uneven), world=4),
    "shard_1": Feature(
        "sharding",
        "`Shard(1)` by `shard_placement_fn`",
        wrapped(make=even, shard_placement_fn=largest_dim),
        batches=wide,
    ),
    "keep_unsharded": Feature(
        "sharding", "`reshard_after_forward=False`", wrapped(reshard_after_forward=False)
    ),
    "always_reshard": Feature(
        "sharding", "`reshard_after_forward=True`", wrapped(reshard_after_forward=True)
    ),
    "reshard_to_some": Feature(
        "sharding",
        "`reshard_after_forward=2` of 4 ranks",
        wrapped(reshard_after_forward=2),
        world=4,
    ),
    "reshard_by_hand": Feature("sharding", "`reshard()` in the step", wrapped(), steps.resharding),
    # -- meshes
    "mesh_of_one": Feature("meshes", "a mesh of one rank", wrapped(2, 1)),
    "hsdp": Feature("meshes", "HSDP on a 2×2 mesh", wrapped(2, 2), world=4),
    "hsdp_bf16": Feature(
        "meshes", "HSDP with mixed precision", wrapped(2, 2, mp_policy=BF16), world=4
    ),
    "hsdp_replicas": Feature("meshes", "HSDP on a 2×1 mesh", wrapped(2, 1)),
    "tensor_parallel": Feature(
        "meshes", "tensor parallelism and FSDP on a 2×2 mesh", tensor_parallel(), world=4
    ),
    "tensor_parallel_clipped": Feature(
        "meshes",
        "the same, with `clip_grad_norm_`",
        tensor_parallel(),
        steps.clipped,
        world=4,
    ),
    "spmd_mesh": Feature("meshes", "`dp_mesh_dims` on a full mesh", spmd, world=4),
    "replicate": Feature("meshes", "`replicate` (data parallelism without shards)", replicated),
    "hsdp_offload": Feature(
        "meshes", "HSDP with CPU offload", wrapped(2, 2, offload_policy=OFFLOAD), world=4
    ),
    "tensor_parallel_bf16": Feature(
        "meshes",
        "tensor parallelism, FSDP and mixed precision",
        tensor_parallel(mp_policy=BF16),
        world=4,
    ),
    "sequence_parallel": Feature(
        "meshes",
        "sequence parallelism and FSDP (torch's `MLPStack`)",
        upstream.mlp_stack_in_parallel,
        upstream.squared,
        world=4,
        batches=upstream.sequences,
    ),
    "experts": Feature(
        "meshes", "experts on another mesh than the rest", experts_on_another_mesh, world=4
    ),
    # -- mixed precision
    "bf16": Feature("mixed precision", "bfloat16, reduced in float32", wrapped(mp_policy=BF16)),
    "bf16_reduced": Feature(
        "mixed precision",
        "bfloat16, reduced in bfloat16",
        wrapped(mp_policy=_policy(param_dtype=torch.bfloat16)),
    ),
    "fp16": Feature("mixed precision", "float16, reduced in float32", wrapped(mp_policy=FP16)),
    "fp16_reduced": Feature(
        "mixed precision",
        "float16, reduced in float16",
        wrapped(mp_policy=_policy(param_dtype=torch.float16)),
    ),
    "reduce_dtype_only": Feature(
        "mixed precision",
        "`reduce_dtype` alone",
        wrapped(mp_policy=_policy(reduce_dtype=torch.bfloat16)),
    ),
    "output_dtype": Feature(
        "mixed precision",
        "`output_dtype`",
        wrapped(
            mp_policy=_policy(param_dtype=torch.bfloat16),
            root={"mp_policy": _policy(param_dtype=torch.bfloat16, output_dtype=torch.float32)},
        ),
    ),
    "uncast_inputs": Feature(
        "mixed precision",
        "`cast_forward_inputs=False`",
        wrapped(mp_policy=_policy(param_dtype=torch.float32, cast_forward_inputs=False)),
    ),
    # -- offload
    "cpu_offload": Feature("offload", "CPU offload", wrapped(offload_policy=OFFLOAD)),
    "cpu_offload_bf16": Feature(
        "offload", "CPU offload, mixed precision", wrapped(offload_policy=OFFLOAD, mp_policy=BF16)
    ),
    # -- prefetch
    "prefetch": Feature("prefetch", "forward and backward, by hand", wrapped(then=prefetched)),
    "unshard_async": Feature(
        "prefetch", "`unshard(async_op=True)`", wrapped(), steps.unsharding(True)
    ),
    "unshard": Feature("prefetch", "`unshard()`", wrapped(), steps.unsharding(False)),
    "no_unshard_in_backward": Feature(
        "prefetch",
        "`set_unshard_in_backward(False)` without a use in backward",
        wrapped(make=frozen_block, then=lambda m: m.blocks[0].set_unshard_in_backward(False)),
    ),
    # -- reduction
    "divide_factor": Feature(
        "reduction",
        "`set_gradient_divide_factor`, by sums",
        wrapped(
            then=both(
                every("set_gradient_divide_factor", 3.0),
                every("set_force_sum_reduction_for_comms", True),
            )
        ),
    ),
    "premul_sum": Feature(
        "reduction",
        "`set_gradient_divide_factor`",
        wrapped(then=every("set_gradient_divide_factor", 3.0)),
        eager="Cannot use ReduceOp.PREMUL_SUM with Gloo",
    ),
    "force_sum": Feature(
        "reduction",
        "`set_force_sum_reduction_for_comms`",
        wrapped(then=every("set_force_sum_reduction_for_comms", True)),
    ),
    "force_sum_hsdp": Feature(
        "reduction",
        "the same under HSDP",
        wrapped(2, 2, then=every("set_force_sum_reduction_for_comms", True)),
        world=4,
    ),
    "separate_group": Feature(
        "reduction",
        "`set_separate_reduce_scatter_group`",
        wrapped(then=lambda m: m.set_separate_reduce_scatter_group()),
    ),
    "group_memory": Feature(
        "reduction",
        "`set_allocate_memory_from_process_group_for_comm`",
        wrapped(then=every("set_allocate_memory_from_process_group_for_comm", True)),
    ),
    "unused_params": Feature(
        "reduction",
        "`set_reduce_scatter_unused_params`",
        wrapped(
            make=sometimes_used,
            then=lambda m: m.set_reduce_scatter_unused_params(True),
            optimizer=momentum,
        ),
    ),
    "all_reduce_hook": Feature(
        "reduction", "`set_all_reduce_hook`", wrapped(then=every("set_all_reduce_hook", halving))
    ),
    "hsdp_by_hook": Feature(
        "reduction",
        "HSDP by a hook that reduces over the other dimension",
        hsdp_by_hook,
        world=4,
    ),
    "input_buffers": Feature(
        "reduction",
        "`set_reduce_scatter_max_input_buffers`",
        wrapped(then=lambda m: m.set_reduce_scatter_max_input_buffers(2)),
    ),
    "all_gather_by_lists": Feature(
        "reduction",
        "a custom all-gather (`dist.all_gather`)",
        wrapped(then=with_comms(AllGatherByLists)),
    ),
    "persistent_all_gather": Feature(
        "reduction",
        "a custom all-gather into one buffer for all groups",
        wrapped(then=with_comms(PersistentAllGather)),
    ),
    "reduce_by_all_to_all": Feature(
        "reduction",
        "a custom reduce-scatter (`all_to_all_single`)",
        wrapped(then=with_comms(None, ReduceScatterByAllToAll)),
    ),
    "reduce_by_all_reduce": Feature(
        "reduction",
        "a custom reduce-scatter (`all_reduce`)",
        wrapped(then=with_comms(None, ReduceScatterByAllReduce)),
    ),
    # -- accumulation
    "accumulation": Feature("accumulation", "microbatches", wrapped(), steps.accumulating()),
    "no_sync": Feature(
        "accumulation", "without reduction", wrapped(), steps.accumulating(SYNC)
    ),
    "no_sync_four": Feature(
        "accumulation",
        "without reduction, four microbatches",
        wrapped(),
        steps.accumulating(SYNC, LAST, parts=4),
    ),
    "no_reshard": Feature(
        "accumulation",
        "without reduction and resharding",
        wrapped(),
        steps.accumulating(SYNC, RESHARD),
    ),
    "last_backward": Feature(
        "accumulation", "`set_is_last_backward`", wrapped(), steps.accumulating(LAST)
    ),
    "no_sync_bf16": Feature(
        "accumulation",
        "without reduction, mixed precision",
        wrapped(mp_policy=BF16),
        steps.accumulating(SYNC, LAST),
    ),
    "no_sync_hsdp": Feature(
        "accumulation",
        "without reduction, HSDP",
        wrapped(2, 2),
        steps.accumulating(SYNC),
        world=4,
    ),
    "no_all_reduce": Feature(
        "accumulation",
        "HSDP without the all-reduce",
        wrapped(2, 2),
        steps.accumulating(REDUCE),
        world=4,
    ),
    "no_all_reduce_bf16": Feature(
        "accumulation",
        "HSDP without the all-reduce, mixed precision",
        wrapped(2, 2, mp_policy=BF16),
        steps.accumulating(REDUCE),
        world=4,
    ),
    "no_sync_offload": Feature(
        "accumulation",
        "without reduction, CPU offload",
        wrapped(offload_policy=OFFLOAD),
        steps.accumulating(SYNC),
    ),
    # -- parameters and buffers
    "tied_in_the_root": Feature("parameters", "tied in the root's group", tied(group=False)),
    "tied_in_a_group": Feature("parameters", "tied in a group of their own", tied(group=True)),
    "frozen_block": Feature("parameters", "a frozen block", wrapped(make=frozen_block)),
    "frozen_weights": Feature("parameters", "frozen weights", wrapped(make=frozen_weights)),
    "batch_norm": Feature("parameters", "buffers that change", wrapped(make=Normed)),
    "kept_gradients": Feature("parameters", "gradients kept", wrapped(), steps.keeping_gradients),
    "momentum": Feature("parameters", "SGD with momentum", wrapped(optimizer=momentum)),
    "clip_grad_norm": Feature("parameters", "`clip_grad_norm_`", wrapped(), steps.clipped),
    "gathered_in_bf16": Feature(
        "parameters", "an all-gather extension (bfloat16)", gathered_as(GatheredInBFloat16, torch.bfloat16)
    ),
    "gathered_in_int8": Feature(
        "parameters", "an all-gather extension (int8 and scales)", gathered_as(GatheredInInt8, None)
    ),
    "optimizer_in_backward": Feature("parameters", "optimizer in backward", _in_backward),
    # -- autograd
    "two_forwards": Feature("autograd", "two forwards, one backward", wrapped(), steps.two_forwards),
    "two_backwards": Feature("autograd", "`retain_graph`", wrapped(), steps.two_backwards),
    "grad_of_input": Feature(
        "autograd", "`autograd.grad(inputs=...)`", wrapped(), steps.gradient_of_the_input
    ),
    "grad_then_step": Feature(
        "autograd",
        "`autograd.grad`, then a training step",
        wrapped(),
        steps.adversarial,
    ),
    "non_root_forward": Feature(
        "autograd", "a wrapped module called alone", wrapped(), steps.only_a_block
    ),
    "registered_method": Feature(
        "autograd",
        "`register_fsdp_forward_method`",
        wrapped(then=_registered),
        steps.through_features,
    ),
    # -- evaluation
    "no_grad": Feature("evaluation", "`no_grad`", wrapped(), steps.evaluating(torch.no_grad)),
    "inference_mode": Feature(
        "evaluation", "`inference_mode`", wrapped(), steps.evaluating(torch.inference_mode)
    ),
    # -- arguments
    "dict_output": Feature(
        "arguments",
        "keyword arguments, a dict out",
        _structured(dict),
        steps.structured,
        batches=_named,
    ),
    "dataclass_output": Feature(
        "arguments",
        "keyword arguments, a dataclass out",
        _structured(steps.Output),
        steps.structured,
        batches=_named,
    ),
    # -- torch's own test models
    "mlp": Feature(
        "torch's own models", "`MLP`", upstream.mlp, upstream.squared, batches=upstream.sequences
    ),
    "mlp_stack": Feature(
        "torch's own models",
        "`MLPStack`",
        upstream.mlp_stack,
        upstream.squared,
        batches=upstream.sequences,
    ),
    "transformer": Feature(
        "torch's own models",
        "`Transformer` (tied embeddings, dropout)",
        upstream.transformer,
        upstream.next_token,
        batches=upstream.tokens,
    ),
    # -- compilers
    "compiled_blocks": Feature("compilers", "blocks under `torch.compile`", _compiled),
}
