"""Every private torch import of the library, each with its reason and the versions it was seen in.

Seen in torch 2.11 and 2.13 unless a line says otherwise. Nothing else in `functionalize` or `passes`
imports a name with a leading underscore from torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree  # the public spelling has fewer functions
from torch import fx
from torch._C import (  # a replay has no use for autograd's kernels, and they cost time
    _AutoDispatchBelowAutograd as below_autograd,
)
from torch._C._profiler import gather_traceback as _gather  # what CapturedTraceback holds
from torch._higher_order_ops.auto_functionalize import (  # custom ops that only mutate
    auto_functionalized,
    can_auto_functionalize,
)
from torch._subclasses.fake_tensor import (  # fakes for `trace`; has no public home
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import (  # what AOTAutograd runs a function on
    FunctionalTensor,
)
from torch.fx.passes.shape_prop import TensorMetadata  # the type of node.meta["tensor_meta"]
from torch.utils._mode_utils import no_dispatch  # to change a wrapper, not what it wraps
from torch.utils._python_dispatch import (  # the only hook below autograd
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import (
    _disable_current_modes as disable_current_modes,  # to copy a constant for real inside a fake mode
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as current_modes,  # which recorder is active in this thread
)
from torch.utils._traceback import CapturedTraceback  # lazily symbolised stack

__all__ = [
    "BACKWARD",
    "RECOMPUTE",
    "CapturedTraceback",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "NodeWriter",
    "Stacks",
    "TensorMetadata",
    "TorchDispatchMode",
    "_without_mode",
    "all_op_names",
    "aot_autograd",
    "auto_functionalized",
    "autograd_position",
    "backend_of_group",
    "below_autograd",
    "below_functionalization",
    "can_auto_functionalize",
    "checkpoint_module",
    "current_modes",
    "current_node_leaf",
    "disable_current_modes",
    "dtensor_parts",
    "dynamo_frames",
    "fake_process_group",
    "fake_work_ids",
    "forget_shardings",
    "forward_mode_is_on",
    "fsdp_classes",
    "fsdp_lazy_init",
    "fsdp_state_of",
    "fully_sharded_chunks",
    "functional_inside",
    "functional_needs_storage",
    "functional_put_inside",
    "functional_remake",
    "functional_sync",
    "functional_was_written",
    "fused_optimizer_functions",
    "graph_is_kept",
    "group_of_name",
    "has_kernel",
    "hook_functions",
    "hook_tables",
    "hooks_of",
    "in_backward",
    "inductor",
    "inductor_region",
    "is_dtensor_type",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "last_traced",
    "leaf_of",
    "load_dynamo",
    "load_fsdp_ops",
    "load_resize_op",
    "mesh_methods",
    "next_node_number",
    "no_dispatch",
    "plain_kernels",
    "plain_resize",
    "process_groups",
    "proxy_mode",
    "pytree",
    "register_backend",
    "script_builtins",
    "sharding_propagation",
    "stack_here",
    "untraced",
    "values_unread",
    "will_execute",
    "work_class",
]


# What lies inside AOTAutograd's FunctionalTensor, whose own methods give no way to it.


def functional_sync(tensor: Any) -> None:
    """Apply pending writes."""
    torch._sync(tensor)


def functional_inside(tensor: Any) -> torch.Tensor:
    """The tensor inside the wrapper."""
    return torch._from_functional_tensor(tensor.elem)


def functional_was_written(tensor: Any) -> bool:
    """Whether AOTAutograd saw a write to the storage."""
    return bool(torch._functionalize_has_data_mutation(tensor.elem))  # type: ignore[attr-defined]


def functional_put_inside(tensor: Any, inside: torch.Tensor) -> None:
    """Replace the tensor inside, as if nothing had been written since."""
    torch._functionalize_replace(tensor.elem, inside)
    torch._functionalize_commit_update(tensor.elem)
    torch._functionalize_sync(tensor.elem)


_VIEWS_OF_NOTHING = {"view_ViewMeta", "detach_ViewMeta", "alias_ViewMeta"}


def functional_needs_storage(view: Any) -> bool:
    """Whether a view can be taken of a full storage only: most view ops check its bounds."""
    from torch._C import _functionalization

    steps = _functionalization.get_view_meta_sequence(view.elem)
    return any(type(step).__name__ not in _VIEWS_OF_NOTHING for step in steps)


def functional_remake(view: Any, base: torch.Tensor) -> None:
    """Put inside a view what its view ops, run now, make of `base`, the tensor inside its base."""
    from torch._C import _functionalization

    steps = _functionalization.get_view_meta_sequence(view.elem)
    torch._functionalize_replace(
        view.elem, _functionalization.apply_view_meta_sequence(base, steps)
    )


def plain_resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """`storage.resize_(nbytes)` by the base class's method, which no capture patches."""
    torch._C.StorageBase.resize_(storage, nbytes)  # type: ignore[attr-defined]


def all_op_names() -> list[str]:
    """`namespace::op.overload` of every op of the dispatcher."""
    return list(torch._C._dispatch_get_all_op_names())


def ops_with_kernel(key: str) -> list[str]:
    """`namespace::op.overload` of every op that has a kernel of its own for a dispatch key."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def has_kernel(name: str, key: str) -> bool:
    """Whether an op has a kernel of its own for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def load_dynamo() -> None:
    """Import Dynamo, which every optimizer and checkpoint does sooner or later."""
    importlib.import_module("torch._dynamo")


def load_resize_op() -> None:
    """Register `inductor::resize_storage_bytes_`."""
    importlib.import_module("torch._inductor.inductor_prims")


BACKWARD, RECOMPUTE = "backward", "recompute"
_current_node, _current_task = torch._C._current_autograd_node, torch._C._current_graph_task_id
_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__  # all that calls the engine


def autograd_position() -> tuple[int, str | None, str | None]:
    """The sequence number of autograd's node for the op at hand; its name, and the phase, if it runs in a backward.

    In a forward the node was made just before the op is dispatched, and the counter stands one further. The
    callbacks at the end of a backward run in no node. A backward that is not kept records gradients only where it
    runs a forward again, as activation checkpointing does.
    """
    node = _current_node()
    if node is None:
        inside = _current_task() != -1
        return torch.autograd._get_sequence_nr() - 1, None, BACKWARD if inside else None
    again = torch.is_grad_enabled() and not graph_is_kept()
    return node._sequence_nr(), node.name(), RECOMPUTE if again else BACKWARD


Position = tuple[int | None, str]


def backward_position() -> Position | None:
    """The number of autograd's node that the op at hand runs in, and the phase; None outside of a backward."""
    if _graph_task() == -1:
        return None
    node = _node_at_hand()
    if node is None:
        return None, BACKWARD
    again = torch.is_grad_enabled() and not graph_is_kept()
    return node._sequence_nr(), RECOMPUTE if again else BACKWARD


_graph_task, _node_at_hand = torch._C._current_graph_task_id, torch._C._current_autograd_node


# The function that calls autograd's engine: the innermost Python below nodes that are not Python's.
ENGINE = torch.autograd.graph._engine_run_backward.__code__


FIRST_OF_LEAVES = (
    2**62
)  # nodes that accumulate a leaf's gradient have a number above every other one's


def graph_task() -> int:
    """The number of the backward that is running; none has the number of another."""
    return int(torch._C._current_graph_task_id())


def next_node_number() -> int:
    """The number that autograd gives the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_node_leaf() -> torch.Tensor | None:
    """The leaf that the node at hand accumulates a gradient into, if it does."""
    node = torch._C._current_autograd_node()
    return None if node is None else leaf_of(node)


class NodeWriter:
    """Appends nodes to a graph in half of the time of `graph.create_node`: a third of a discharge is making nodes.

    Leaves out the walk over the arguments for symbolic leaves; matches a name only the first time, and looks up once
    where the graph keeps the nodes of an op.
    """

    def __init__(self, graph: fx.Graph) -> None:
        names = graph._graph_namespace
        self._graph, self._create_name = graph, names.create_name
        self._used, self._counts, self._names = (
            names._used_names,
            names._base_count,
            names._obj_to_name,
        )
        self._prepend = graph._root._prepend
        self._tables = graph._find_nodes_lookup_table.table

    def nodes_of(self, target: Any) -> dict[fx.Node, None]:
        """Where the graph keeps the calls of `target`."""
        return self._tables["call_function", target]

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        base: str,
        nodes: dict[fx.Node, None],
    ) -> fx.Node:
        """A call at the end of the graph, named `base` with a number. nodes: those of `target`."""
        count = self._counts.get(base)
        name = base if count is None else f"{base}_{count + 1}"
        if count is None or name in self._used:
            name = self._create_name(base, None)
        else:
            self._used.add(name)
            self._counts[base] = count + 1
        return self._append(name, "call_function", target, args, kwargs, nodes)

    def placeholder(self, name: str) -> fx.Node:
        """A placeholder at the end of the graph."""
        unique = self._create_name(name, None)
        return self._append(unique, "placeholder", name, (), {}, self._tables["placeholder", None])

    def _append(
        self,
        name: str,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        nodes: dict[fx.Node, None],
    ) -> fx.Node:
        node = fx.Node(self._graph, name, op, target, args, kwargs)
        self._names[node] = name
        self._prepend(node)
        nodes[node] = None
        self._graph._len += 1
        return node


def stack_here() -> CapturedTraceback:
    """`CapturedTraceback.extract()` in half of the time: it imports the module at every call."""
    return CapturedTraceback(_gather(python=True, script=False, cpp=False), 1)


class Stacks:
    """`stack_here()` for the ops of a recording; those that one backward runs without a hook share one: half of a step.

    While a backward runs, what called autograd's engine waits where it is, so nothing below the op has changed.
    """

    def __init__(self) -> None:
        self._task = -1
        self._stack: CapturedTraceback | None = None

    def here(self) -> CapturedTraceback:
        """The stack, for the handler that asks."""
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is not _ENGINE_CODE:
            return stack_here()
        task = _current_task()
        if self._stack is None or task != self._task:
            self._task, self._stack = task, stack_here()
        return self._stack


def load_fsdp_ops() -> None:
    """Register the `fsdp::*` and `c10d::*` ops; a build without distributed has neither."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")


def hooks_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hooks autograd runs for a tensor: on its gradient, and after it was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return len(tensor._backward_hooks or ()), len(after or ())


def hook_tables(tensor: torch.Tensor) -> list[dict[Any, Any]]:
    """Where those hooks are kept."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [table for table in (tensor._backward_hooks, after) if table is not None]


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf that a node of autograd accumulates into, if it does."""
    return getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None


def will_execute(node: Any) -> bool:
    """Whether the backward that is running will come to a node; no public function tells."""
    return torch._C._will_engine_execute_node(node)


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hook_functions(tensor: torch.Tensor) -> list[Any]:
    """Those hooks."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(tensor._backward_hooks or {}).values(), *(after or {}).values()]


def group_of_name(name: str) -> Any:
    """The process group that a functional collective names."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def backend_of_group(name: str, device: str) -> str | None:
    """The backend by which a process group communicates tensors of a type of device; None where it has none."""
    try:
        return str(group_of_name(name)._get_backend(torch.device(device)).name())
    except (RuntimeError, ValueError, LookupError):
        return None


def fused_optimizer_functions() -> list[tuple[Any, str]]:
    """(module, name) of the functions by which `torch.optim` calls its fused kernels."""
    names = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    return [(torch, name) for name in names if hasattr(torch, name)]


@functools.cache
def is_dtensor_type(kind: type) -> bool:
    """Whether a class is DTensor; a build without distributed has none."""
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        return False
    return issubclass(kind, DTensor)


def work_class() -> type | None:
    """The class whose `wait` completes a collective; None in a build without distributed."""
    try:
        from torch._C._distributed_c10d import Work
    except ImportError:
        return None
    return Work


def dynamo_frames() -> Any:
    """The module that decides whether a compiled function runs compiled; None while nothing was compiled.

    `torch.compiler.set_stance("force_eager")` is the public way, but it holds in every thread.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if hasattr(module, "_callback_from_stance") else None


def fsdp_state_of(module: object) -> Any:
    """The FSDP2 state of a module that `fully_shard` was applied to, else None."""
    find = _fsdp_state_finder()
    return None if find is None else find(module)


@functools.cache
def _fsdp_state_finder() -> Any:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
    except ImportError:
        return None
    return _get_module_fsdp_state


def fsdp_classes() -> list[type]:
    """The classes in which FSDP2 keeps state, and the one whose methods its users call (2.11 to 2.15)."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
    except ImportError:
        return []
    from torch.distributed.fsdp import FSDPModule

    state, group = _fsdp_state, _fsdp_param_group
    kinds = (state.FSDPStateContext, state.FSDPState, group.FSDPCommContext, group.FSDPParamGroup)
    return [*kinds, _fsdp_param.FSDPParam, FSDPModule]


def fsdp_lazy_init(state: Any) -> None:
    """What the first forward of a root does before all else: has no public name but the forward itself."""
    state._lazy_init()


def sequence_number(group: Any) -> int:
    """How many collectives a process group has issued; the same on all of its ranks between two of them."""
    return int(group._get_sequence_number_for_group())  # no public name in 2.11 to 2.13


def store_of_group(group: Any) -> Any:
    """The store through which the ranks of a group met, None for a fake group; it has no public name."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_process_group_store

    return None if dist.get_backend(group) == "fake" else _get_process_group_store(group)


def process_groups() -> list[Any]:
    """Every process group that this rank is in, in the order in which they were made."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_names)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """A default process group whose collectives return at once (torch.testing has the only one)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # every group puts one more `[rank0]:` before a traceback's lines
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def fake_work_ids() -> tuple[Any, str]:
    """The function that numbers the works of fake collectives, where it is called (2.11 to 2.13)."""
    return importlib.import_module("torch.distributed._meta_registrations"), "generate_unique_id"


def sharding_propagation() -> tuple[type, str]:
    """The method by which DTensor finds the global shape of an op's result, on fake tensors (2.11 to 2.13)."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def checkpoint_module(module: torch.nn.Module) -> None:
    """Checkpoint the activations of a module in place, composable with `fully_shard` (2.11 to 2.13)."""
    from torch.distributed._composable import checkpoint

    checkpoint(module)


def plain_kernels(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Inside, ops on fake tensors run on the meta tensors that they are (2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    return in_kernel_invocation_manager(mode)


def forget_shardings() -> None:
    """Empty DTensor's caches of propagated shardings: they hold meshes, equal ones of other process groups too."""
    import torch.distributed.tensor.debug as debug
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),  # 2.11 to 2.13
        getattr(_gen_transform_infos, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def fully_sharded_chunks() -> list[tuple[Any, str]]:
    """The function by which FSDP2 cuts a parameter into a chunk per rank, where it is called (2.11 to 2.13)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return [(_fsdp_param, "_chunk_with_empty")]


def mesh_methods() -> list[tuple[Any, str]]:
    """Methods of a mesh that compute on its tensor of ranks (2.11 to 2.13)."""
    from torch.distributed.device_mesh import DeviceMesh

    names = ("__init__", "__getitem__", "mesh", "get_coordinate", "_flatten", "_unflatten")
    more = ("_concatenate", "from_group", "_get_all_submeshes", "__getstate__")
    return [(DeviceMesh, name) for name in (*names, *more) if name in vars(DeviceMesh)]


def dtensor_parts() -> tuple[list[Any], dict[Any, tuple[str, ...]]]:
    """The records in a DTensor's spec; the kinds of placements, each with what it is made from."""
    try:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor import _dtensor_spec as spec
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError:
        return [], {}
    names = ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    records = [getattr(spec, name) for name in names if hasattr(spec, name)]
    placements: dict[Any, tuple[str, ...]] = {
        Shard: ("dim",),
        Replicate: (),
        Partial: ("reduce_op",),
        _StridedShard: ("dim", "split_factor"),
    }
    return records, placements


def op_overrides(namespace: str) -> AbstractContextManager[Any]:
    """A library whose `impl` replaces kernels of existing ops until the context ends.

    A public `Library` gives its kernels back only when it is collected.
    """
    return torch.library._scoped_library(namespace, "IMPL")


@contextmanager
def composite_override(op: Any, kernel: Any) -> Iterator[None]:
    """`kernel` in place of what a composite op is made of, where a mode or the fake mode takes it apart."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = op.py_kernels.get(key)
    op.py_kernels[key] = kernel
    try:
        yield
    finally:
        op.py_kernels.pop(key, None)
        if before is not None:
            op.py_kernels[key] = before


def composite_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run what a composite op is made of: torch's own, whatever overrides it."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def kernel_of(op: Any, key: str) -> Any:
    """The kernel that an op has for a dispatch key now; `call_boxed(keys, *args)` runs it."""
    return torch.library.get_kernel(op, key)  # public, but the type that it gives is not


def redispatch_below(op: Any, keys: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Go on with an op as if it had no kernel for `key`. keys: what the kernel was called with."""
    return op.redispatch(keys - torch._C.DispatchKeySet(_key(key)), *args, **kwargs)


def excluded(key: str) -> AbstractContextManager[Any]:
    """No kernel of this dispatch key runs in this thread."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key(key)))


def _key(name: str) -> Any:
    return getattr(torch._C.DispatchKey, name)


def sdpa_order() -> list[int]:
    """The order in which `sdpa_kernel(..., set_priority=True)` has attention kernels tried."""
    return list(torch._C._get_sdp_priority_order())


def fakes_module() -> Any:
    """The module whose `FakeTensor` a library asks for, to find out whether it is traced (torch 2.11 to 2.13)."""
    return importlib.import_module("torch._subclasses")


def is_fake(value: Any) -> bool:
    """Whether a tensor is fake, or wraps one."""
    from torch._subclasses.fake_tensor import is_fake

    return bool(is_fake(value))


def flex_devices() -> tuple[Any, str]:
    """Where flex attention refuses devices: its module and the name (torch 2.11 to 2.13)."""
    return importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device"


def foreach_owners() -> list[Any]:
    """The modules that keep where and for which tensors optimizers and clipping take foreach by default."""
    names = ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.optim.swa_utils")
    return [importlib.import_module(name) for name in names]


def swap_fakes(a: torch.Tensor, b: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` for fakes, which does not mind who else looks at them."""
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def aot_autograd(**options: Any) -> Any:
    """A Dynamo backend out of compilers; `torch.compile` has no public way to put one together."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**options)


def inductor(gm: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Any:
    """Inductor as a backend that takes a graph; publicly it is a name only. Slow to import."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, **options)


def inductor_region(
    graph: fx.Graph, like: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Any:
    """A pure graph of tensors through Inductor: `f(inputs)` empties the list and returns the results.

    like, results: what is given and what must come out, by size, stride, dtype and device. Publicly Inductor takes
    what Dynamo or AOTAutograd made, and wraps it in code of theirs, which costs time at every call.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    module, context = fx.GraphModule({}, graph), torch._guards.TracingContext

    def laid_out(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [_with_strides(t, r) for t, r in zip(module(*inputs), results, strict=True)]

    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode, torch.no_grad():
        given = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in like
        ]
        traced = make_fx(laid_out, decomposition_table=select_decomp_table())(*given)
    (end,) = traced.graph.find_nodes(op="output")
    end.meta["user_visible_output_idxs"] = list(range(len(results)))
    options = {"size_asserts": False, "alignment_asserts": False, "triton.cudagraphs": False}
    with torch._guards.tracing(context(mode)), config.patch(options):
        compiled = compile_fx_inner(traced, given, is_inference=True)
    return getattr(compiled, "current_callable")  # noqa: B009 - without the frame that records runs for debugging


def _with_strides(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`t` with the strides of `like`: some decompositions lay out their results in their own way."""
    if _same_strides(t, like):
        return t
    order = sorted(range(t.dim()), key=like.stride, reverse=True)
    back = [order.index(dim) for dim in range(t.dim())]
    made = t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    if not _same_strides(made, like):
        raise RuntimeError(f"a result has strides {t.stride()}, and cannot have {like.stride()}")
    return made


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(
        x == y or size == 1 for x, y, size in zip(a.stride(), b.stride(), a.size(), strict=True)
    )


def register_backend(name: str, backend: Any) -> None:
    """Make `torch.compile(backend=name)` known, unless an entry point has: that registers on first use."""
    from torch._dynamo.backends.registry import _BACKENDS, register_backend

    if name not in _BACKENDS:
        register_backend(backend, name=name)


def proxy_mode() -> object | None:
    """The tracer that is recording in this thread, if any."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def last_traced() -> torch.fx.Node:
    """The node that the tracer of this thread made last."""
    graph: torch.fx.Graph = proxy_mode().tracer.graph  # type: ignore[attr-defined]
    return next(iter(reversed(graph.nodes)))


@contextmanager
def _without_mode(key: Any) -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_infra_mode

    with contextmanager(_disable_infra_mode)(key):
        yield


def untraced() -> AbstractContextManager[None]:
    """Ops inside are not recorded by `make_fx`."""
    return _without_mode(torch._C._TorchDispatchModeKey.PROXY)


@contextmanager
def below_functionalization() -> Iterator[None]:
    """Ops inside reach the tracer as they are, and do not stand for the tensors that they write.

    As AOTAutograd itself does for the input mutations that it keeps in the graph.
    """
    from torch.fx.experimental.proxy_tensor import _proxy_tensor_disable_update_tensor_tracker

    functional = torch._C._TorchDispatchModeKey.FUNCTIONAL
    with _without_mode(functional), _proxy_tensor_disable_update_tensor_tracker():
        yield


def entry_of(op: Any) -> Any:
    """What an `OpOverload` calls, without its own frame; other ops as they are (torch 2.0 to 2.13)."""
    return getattr(op, "_op", op)


def no_python_dispatch() -> AbstractContextManager[None]:
    """Inside, ops are dispatched as if no mode were on the stack (torch 2.0 to 2.13)."""
    guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard


def own_call(module: torch.nn.Module) -> Any:
    """What runs instead of a call of this module, if `Module.compile` has set something (torch 2.1 to 2.13)."""
    return vars(module).get("_compiled_call_impl")


def set_own_call(module: torch.nn.Module, run: Any) -> None:
    """Set that, or (None) leave it to the class again."""
    if run is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = run


def hooks_of_everything() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Hooks on all modules and all optimizers, by their numbers, which are never given twice (torch 2.11 to 2.13)."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = (
        ("forward pre-hooks", module._global_forward_pre_hooks),
        ("forward hooks", module._global_forward_hooks),
        ("backward pre-hooks", module._global_backward_pre_hooks),
        ("backward hooks", module._global_backward_hooks),
        ("step pre-hooks", optimizer._global_optimizer_pre_hooks),
        ("step post-hooks", optimizer._global_optimizer_post_hooks),
    )
    return tuple((f"the global {name}", tuple(_not_ours(table))) for name, table in tables)


def _not_ours(table: dict[int, Any]) -> Iterator[int]:
    """Leaves out what a recording hangs there for its own time."""
    for number, hook in table.items():
        if not str(getattr(hook, "__module__", "")).startswith("functionalize."):
            yield number


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The functions that autograd packs and unpacks what it saves with, if any (torch 2.11 to 2.13)."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return tuple(found) if found is not None else ()


def function_modes() -> list[Any]:
    """The `TorchFunctionMode`s that are on, the innermost last (torch 2.11 to 2.13)."""
    from torch.overrides import _get_current_function_mode_stack

    return list(_get_current_function_mode_stack())


def values_unread(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Inside, a fake made by a mode without a ShapeEnv does not remember the number in a 0-dimensional tensor.

    Torch 2.14 and 2.15 read it, unless a compiler is tracing; 2.11 to 2.13 do not.
    """
    context: AbstractContextManager[Any] = torch._guards.tracing(torch._guards.TracingContext(mode))
    return context


def forward_mode_is_on() -> bool:
    """Whether a tensor may have a tangent of forward-mode AD now: torch has no public name for it (2.11 to 2.15)."""
    from torch.autograd import forward_ad

    return bool(forward_ad._current_level >= 0)


def script_builtins() -> Any:
    """The module where `torch.jit.script` looks up which function of torch's is which op (2.11 to 2.15)."""
    from torch.jit import _builtins

    return _builtins
