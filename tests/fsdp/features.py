"""The features of FSDP2 that `fz.capture` claims, one row each: the model, the step, how many ranks.

`test_features.py` runs every row: captured once, replayed at least five times with other data, bitwise equal
to an eager twin after every step and in both `state_dict()`s at the end. A row with `eager` is one that eager
itself cannot run on gloo, and how it says so; one with `since` is skipped on older releases of torch. `table()` is
the list for people.
"""

from __future__ import annotations

import functools

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy

from tests.fsdp import newer, steps, upstream
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
from tests.fsdp.feature import Feature
from tests.fsdp.meshes import (
    experts_on_another_mesh,
    on_a_mesh_of_one,
    replicated,
    spmd,
    tensor_parallel,
)
from tests.fsdp.models import (
    Normed,
    Output,
    both,
    compiled,
    even,
    every,
    from_meta,
    frozen_block,
    frozen_weights,
    grouped,
    ignoring,
    in_backward,
    largest_dim,
    momentum,
    nested,
    prefetched,
    registered,
    root_only,
    roots_that_share,
    separate_roots,
    sometimes_used,
    structured,
    tied,
    uneven,
    wrapped,
)

BF16 = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = Policy(param_dtype=torch.float16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
SYNC, REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"
LAST, RESHARD = "set_is_last_backward", "set_reshard_after_backward"

wide = functools.partial(steps.pairs, classes=4)

GROUPS: dict[str, dict[str, Feature]] = {
    "wrapping": {
        "blocks_and_root": Feature("every block and the root", wrapped()),
        "nested": Feature("nested modules", nested),
        "root_only": Feature("the root alone", root_only),
        "grouped": Feature("`fully_shard([a, b])`", grouped),
        "separate_roots": Feature("several roots", separate_roots),
        "shared_comm_ctx": Feature("several roots, `share_comm_ctx`", roots_that_share),
        "meta_device": Feature("built on the meta device", from_meta),
        "ignored_params": Feature("`ignored_params`", ignoring),
    },
    "sharding": {
        "uneven_shards": Feature("uneven and empty shards", wrapped(make=uneven), world=4),
        "shard_1": Feature(
            "`Shard(1)` by `shard_placement_fn`",
            wrapped(make=even, shard_placement_fn=largest_dim),
            batches=wide,
        ),
        "keep_unsharded": Feature(
            "`reshard_after_forward=False`", wrapped(reshard_after_forward=False)
        ),
        "always_reshard": Feature(
            "`reshard_after_forward=True`", wrapped(reshard_after_forward=True)
        ),
        "reshard_to_some": Feature(
            "`reshard_after_forward=2` of 4 ranks",
            wrapped(reshard_after_forward=2),
            world=4,
        ),
        "reshard_by_hand": Feature("`reshard()` in the step", wrapped(), steps.resharding),
    },
    "meshes": {
        "mesh_of_one": Feature("a mesh of one rank", on_a_mesh_of_one),
        "hsdp": Feature("HSDP on a 2×2 mesh", wrapped(2, 2), world=4),
        "hsdp_bf16": Feature("HSDP with mixed precision", wrapped(2, 2, mp_policy=BF16), world=4),
        "hsdp_replicas": Feature("HSDP on a 2×1 mesh", wrapped(2, 1)),
        "tensor_parallel": Feature(
            "tensor parallelism and FSDP on a 2×2 mesh", tensor_parallel(), world=4
        ),
        "tensor_parallel_clipped": Feature(
            "the same 2×2 mesh, with `clip_grad_norm_`",
            tensor_parallel(),
            steps.clipped,
            world=4,
        ),
        "spmd_mesh": Feature("`dp_mesh_dims` on a full mesh", spmd, world=4, since="2.12"),
        "replicate": Feature("`replicate` (data parallelism without shards)", replicated),
        "hsdp_offload": Feature(
            "HSDP with CPU offload", wrapped(2, 2, offload_policy=OFFLOAD), world=4
        ),
        "tensor_parallel_bf16": Feature(
            "tensor parallelism, FSDP and mixed precision",
            tensor_parallel(mp_policy=BF16),
            world=4,
        ),
        "sequence_parallel": Feature(
            "sequence parallelism and FSDP (torch's `MLPStack`)",
            upstream.mlp_stack_in_parallel,
            upstream.squared,
            world=4,
            batches=upstream.sequences,
        ),
        "experts": Feature(
            "experts on another mesh than the rest",
            experts_on_another_mesh,
            world=4,
            since="2.12",
        ),
    },
    "mixed precision": {
        "bf16": Feature("bfloat16, reduced in float32", wrapped(mp_policy=BF16)),
        "bf16_reduced": Feature(
            "bfloat16, reduced in bfloat16",
            wrapped(mp_policy=Policy(param_dtype=torch.bfloat16)),
        ),
        "fp16": Feature("float16, reduced in float32", wrapped(mp_policy=FP16)),
        "fp16_reduced": Feature(
            "float16, reduced in float16",
            wrapped(mp_policy=Policy(param_dtype=torch.float16)),
        ),
        "reduce_dtype_only": Feature(
            "`reduce_dtype` alone",
            wrapped(mp_policy=Policy(reduce_dtype=torch.bfloat16)),
        ),
        "output_dtype": Feature(
            "`output_dtype`",
            wrapped(
                mp_policy=Policy(param_dtype=torch.bfloat16),
                root={"mp_policy": Policy(param_dtype=torch.bfloat16, output_dtype=torch.float32)},
            ),
        ),
        "uncast_inputs": Feature(
            "`cast_forward_inputs=False`",
            wrapped(mp_policy=Policy(param_dtype=torch.bfloat16, cast_forward_inputs=False)),
            batches=steps.in_bfloat16,
        ),
    },
    "offload": {
        "cpu_offload": Feature("CPU offload", wrapped(offload_policy=OFFLOAD)),
        "cpu_offload_bf16": Feature(
            "CPU offload, mixed precision", wrapped(offload_policy=OFFLOAD, mp_policy=BF16)
        ),
    },
    "prefetch": {
        "prefetch": Feature("forward and backward, by hand", wrapped(then=prefetched)),
        "unshard_async": Feature("`unshard(async_op=True)`", wrapped(), steps.unsharding(True)),
        "unshard": Feature("`unshard()`", wrapped(), steps.unsharding(False)),
        "no_unshard_in_backward": Feature(
            "`set_unshard_in_backward(False)` without a use in backward",
            wrapped(make=frozen_block, then=lambda m: m.blocks[0].set_unshard_in_backward(False)),
        ),
    },
    "reduction": {
        "divide_factor": Feature(
            "`set_gradient_divide_factor`, by sums",
            wrapped(
                then=both(
                    every("set_gradient_divide_factor", 3.0),
                    every("set_force_sum_reduction_for_comms", True),
                )
            ),
        ),
        "premul_sum": Feature(
            "`set_gradient_divide_factor`",
            wrapped(then=every("set_gradient_divide_factor", 3.0)),
            eager="Cannot use ReduceOp.PREMUL_SUM with Gloo",
        ),
        "force_sum": Feature(
            "`set_force_sum_reduction_for_comms`",
            wrapped(then=every("set_force_sum_reduction_for_comms", True)),
        ),
        "force_sum_hsdp": Feature(
            "`set_force_sum_reduction_for_comms` under HSDP",
            wrapped(2, 2, then=every("set_force_sum_reduction_for_comms", True)),
            world=4,
        ),
        "separate_group": Feature(
            "`set_separate_reduce_scatter_group`",
            wrapped(then=lambda m: m.set_separate_reduce_scatter_group()),
            since="2.13",
        ),
        "group_memory": Feature(
            "`set_allocate_memory_from_process_group_for_comm`",
            wrapped(then=every("set_allocate_memory_from_process_group_for_comm", True)),
        ),
        "unused_params": Feature(
            "`set_reduce_scatter_unused_params`",
            wrapped(
                make=sometimes_used,
                then=lambda m: m.set_reduce_scatter_unused_params(True),
                optimizer=momentum,
            ),
            since="2.13",
        ),
        "all_reduce_hook": Feature(
            "`set_all_reduce_hook`", wrapped(then=every("set_all_reduce_hook", halving))
        ),
        "hsdp_by_hook": Feature(
            "HSDP by a hook that reduces over the other dimension",
            hsdp_by_hook,
            world=4,
        ),
        "input_buffers": Feature(
            "`set_reduce_scatter_max_input_buffers`",
            wrapped(then=lambda m: m.set_reduce_scatter_max_input_buffers(2)),
            since="2.13",
        ),
        "all_gather_by_lists": Feature(
            "a custom all-gather (`dist.all_gather`)",
            wrapped(then=with_comms(AllGatherByLists)),
        ),
        "persistent_all_gather": Feature(
            "a custom all-gather into one buffer for all groups",
            wrapped(then=with_comms(PersistentAllGather)),
        ),
        "reduce_by_all_to_all": Feature(
            "a custom reduce-scatter (`all_to_all_single`)",
            wrapped(then=with_comms(None, ReduceScatterByAllToAll)),
        ),
        "reduce_by_all_reduce": Feature(
            "a custom reduce-scatter (`all_reduce`)",
            wrapped(then=with_comms(None, ReduceScatterByAllReduce)),
        ),
    },
    "accumulation": {
        "accumulation": Feature("microbatches", wrapped(), steps.accumulating()),
        "no_sync": Feature("without reduction", wrapped(), steps.accumulating(SYNC)),
        "no_sync_four": Feature(
            "without reduction, four microbatches",
            wrapped(),
            steps.accumulating(SYNC, LAST, parts=4),
        ),
        "no_reshard": Feature(
            "without reduction and resharding",
            wrapped(),
            steps.accumulating(SYNC, RESHARD),
        ),
        "last_backward": Feature("`set_is_last_backward`", wrapped(), steps.accumulating(LAST)),
        "no_sync_bf16": Feature(
            "without reduction, mixed precision",
            wrapped(mp_policy=BF16),
            steps.accumulating(SYNC, LAST),
        ),
        "no_sync_hsdp": Feature(
            "without reduction, HSDP",
            wrapped(2, 2),
            steps.accumulating(SYNC),
            world=4,
        ),
        "no_all_reduce": Feature(
            "HSDP without the all-reduce",
            wrapped(2, 2),
            steps.accumulating(REDUCE),
            world=4,
        ),
        "no_all_reduce_bf16": Feature(
            "HSDP without the all-reduce, mixed precision",
            wrapped(2, 2, mp_policy=BF16),
            steps.accumulating(REDUCE),
            world=4,
        ),
        "no_sync_offload": Feature(
            "without reduction, CPU offload",
            wrapped(offload_policy=OFFLOAD),
            steps.accumulating(SYNC),
        ),
    },
    "parameters": {
        "tied_in_the_root": Feature("tied in the root's group", tied(group=False)),
        "tied_in_a_group": Feature("tied in a group of their own", tied(group=True)),
        "frozen_block": Feature("a frozen block", wrapped(make=frozen_block)),
        "frozen_weights": Feature("frozen weights", wrapped(make=frozen_weights)),
        "batch_norm": Feature("buffers that change", wrapped(make=Normed)),
        "kept_gradients": Feature("gradients kept", wrapped(), steps.keeping_gradients),
        "tensor_on_parameter": Feature(
            "a tensor that the step leaves on a parameter", wrapped(), steps.scaled_by_the_last
        ),
        "momentum": Feature("SGD with momentum", wrapped(optimizer=momentum)),
        "clip_grad_norm": Feature("`clip_grad_norm_`", wrapped(), steps.clipped),
        "gathered_in_bf16": Feature(
            "an all-gather extension (bfloat16)",
            gathered_as(GatheredInBFloat16, torch.bfloat16),
        ),
        "gathered_in_int8": Feature(
            "an all-gather extension (int8 and scales)", gathered_as(GatheredInInt8, None)
        ),
        "read_as_dtensors": Feature(
            "parameters and gradients read as DTensors", wrapped(), steps.reading_parameters
        ),
        "optimizer_in_backward": Feature("optimizer in backward", in_backward),
    },
    "autograd": {
        "two_forwards": Feature("two forwards, one backward", wrapped(), steps.two_forwards),
        "two_backwards": Feature("`retain_graph`", wrapped(), steps.two_backwards),
        "grad_of_input": Feature(
            "`autograd.grad(inputs=...)`", wrapped(), steps.gradient_of_the_input
        ),
        "grad_then_step": Feature(
            "`autograd.grad`, then a training step",
            wrapped(),
            steps.adversarial,
        ),
        "non_root_forward": Feature("a wrapped module called alone", wrapped(), steps.only_a_block),
        "registered_method": Feature(
            "`register_fsdp_forward_method`",
            wrapped(then=registered),
            steps.through_features,
        ),
    },
    "evaluation": {
        "no_grad": Feature("`no_grad`", wrapped(), steps.evaluating(torch.no_grad)),
        "inference_mode": Feature(
            "`inference_mode`", wrapped(), steps.evaluating(torch.inference_mode)
        ),
    },
    "arguments": {
        "dict_output": Feature(
            "keyword arguments, a dict out",
            structured(dict),
            steps.structured,
            batches=steps.named,
        ),
        "dataclass_output": Feature(
            "keyword arguments, a dataclass out",
            structured(Output),
            steps.structured,
            batches=steps.named,
        ),
    },
    "torch's own models": {
        "mlp": Feature("`MLP`", upstream.mlp, upstream.squared, batches=upstream.sequences),
        "mlp_stack": Feature(
            "`MLPStack`",
            upstream.mlp_stack,
            upstream.squared,
            batches=upstream.sequences,
        ),
        "transformer": Feature(
            "`Transformer` (tied embeddings, dropout)",
            upstream.transformer,
            upstream.next_token,
            batches=upstream.tokens,
        ),
    },
    "gradients, finalisation": newer.ROWS,
    "compilers": {
        "compiled_blocks": Feature("blocks under `torch.compile`", compiled),
    },
}
FEATURES = {name: row for rows in GROUPS.values() for name, row in rows.items()}


def table() -> str:
    """The rows as a Markdown table: what is claimed, group by group, and what eager cannot do here."""
    lines = ["| | |", "| --- | --- |"]
    for group, rows in GROUPS.items():
        titles = [f"{r.title} (not on gloo)" if r.eager else r.title for r in rows.values()]
        lines.append(f"| {group} | {'; '.join(titles)} |")
    return "\n".join(lines)
