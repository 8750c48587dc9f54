"""A table of the Python attributes of FSDP2's objects, and how a capture handles each.

    FSDPStateContext.is_last_backward         RESTORED   compared on entry, assigned by a replay
    FSDPParam._sharded_param_data             TENSOR     an input, read at every call
    FSDPParamGroup._partial_reduce_output     SLOT       a tensor or None; a replay may assign it
    FSDPParamGroup._module_fqn                FIXED      set by `fully_shard` or by the first forward, then constant
    FSDPParamGroup._post_reduce_event         IGNORED    no result of a step depends on it
    FSDPParam.unsharded_grad_data             DERIVED    a property, computed from attributes in this table

A new release of torch may add attributes, or turn some into properties: imports still succeed, but results differ.
`unknown_attributes` compares this table with the source code of the classes, `unknown_attributes_of` with live objects.
Valid for torch 2.11 to 2.15. Invariant: an attribute that is not in the table is reported by name, never ignored.
"""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from functionalize._compat.fsdp import fsdp_classes


class Handling(enum.Enum):
    """How a capture handles an attribute."""

    RESTORED = "guarded on entry, assigned again by a replay"
    TENSOR = "looked up at every call"
    SLOT = "a tensor or nothing, which a replay may assign"
    FIXED = "set once"
    IGNORED = "irrelevant to what a step computes"
    DERIVED = "a property, computed from other attributes"
    ORDER = "the order of the forwards, of which a replay repeats what the step appended or cleared"


class Entry(NamedTuple):
    """How one attribute is handled, and why that is right."""

    handling: Handling
    reason: str


_SET_UP = "set by `fully_shard`"
_FIRST = "set by the first forward, from dtypes that FSDP2 does not let change later"
_EVENT = "an event on a stream of FSDP2; a replay runs on the stream of its caller"
_BUFFER = "keeps a buffer alive until a stream has read it; a program holds what it reads"

_AFTER_FORWARD = "made anew by each forward; a step that ends while one is registered never settles"


def _table(*rows: tuple[Handling, str, str]) -> Mapping[str, Entry]:
    return {name: Entry(how, reason) for how, reason, names in rows for name in names.split()}


_R, _T, _S, _F = Handling.RESTORED, Handling.TENSOR, Handling.SLOT, Handling.FIXED
_I, _D, _O = Handling.IGNORED, Handling.DERIVED, Handling.ORDER

ATTRIBUTES: Mapping[str, Mapping[str, Entry]] = {
    "FSDPStateContext": _table(
        (_F, "filled by the first forward of the root", "all_states"),
        (_R, "state of the iteration", "iter_forward_root post_backward_final_callback_queued"),
        (_R, "a setting", "is_last_backward manual_backward_finalization post_optim_event"),
        (_R, "state of the iteration", "manual_backward_finalization_active"),
        (_R, "state of the iteration", "gradient_reduction_pending"),
    ),
    "FSDPCommContext": _table(
        (_F, _SET_UP, "device_handle"),
        (_I, "a stream of FSDP2", "all_gather_copy_in_stream all_gather_stream"),
        (_I, "a stream of FSDP2", "reduce_scatter_stream all_reduce_stream"),
        (_I, _BUFFER, "all_gather_state reduce_scatter_state reduce_scatter_states"),
        (_I, _EVENT, "_last_post_reduce_events"),
        (_I, "bounds how many buffers stay alive", "reduce_scatter_max_input_buffers"),
        (_O, "what the backward prefetches by", "post_forward_order"),
        (_R, "state of the iteration", "active_gradient_reduction"),
    ),
    "FSDPState": _table(
        (
            _F,
            _SET_UP,
            "_state_name _modules _device _device_handle _mp_policy _state_ctx _comm_ctx",
        ),
        (_F, _SET_UP, "_fsdp_param_group _fsdp_param_groups"),
        (_F, _SET_UP, "_pre_forward_hook_handle _post_forward_hook_handle"),
        (_I, "read by the first forward only", "_auto_reshard_after_forward"),
        (_F, "set by the first forward", "_is_root"),
        (_R, "state of the iteration", "_training_state _modules_to_run_forward"),
        (_R, "a setting", "_states_to_forward_prefetch _states_to_backward_prefetch"),
    ),
    "FSDPParamGroup": _table(
        (_F, _SET_UP, "modules fsdp_params device device_handle mp_policy offload_policy comm_ctx"),
        (_F, _SET_UP, "_param_group_index _num_param_groups"),
        (_F, "set by the first forward", "_module_fqn _reset_sharded_params"),
        (_F, _FIRST, "_orig_dtype _reduce_dtype _reduce_scatter_param_indices"),
        (_F, _FIRST, "_fsdp_params_with_wider_grad_dtype"),
        (_I, "hooks of `state_dict`", "_module_to_pre_save_state_dict_hook_handle"),
        (_I, "hooks of `state_dict`", "_module_to_pre_load_state_dict_hook_handle"),
        (_I, "an empty tensor, which nothing reads", "_all_gather_output"),
        (_R, "state of the iteration", "_training_state _sharded_state _all_gather_result"),
        (_R, "state of the iteration", "_post_backward_pending _partial_reduce_output_layout"),
        (_R, "a setting", "reduce_grads all_reduce_grads reshard_after_backward mesh_info"),
        (_R, "a setting", "gradient_divide_factor force_sum_reduction_for_comms"),
        (_R, "a setting", "reduce_scatter_unused_params unshard_async_op unshard_in_backward"),
        (_R, "a setting", "post_forward_mesh_info _all_gather_comm _reduce_scatter_comm"),
        (_R, "a setting", "_all_reduce_hook _all_reduce_hook_stream"),
        (_R, "a setting", "_all_gather_output_fn _prepare_reduce_scatter_inputs"),
        (_O, "where in the order of the forwards the group stands", "_post_forward_indices"),
        (_S, "reduced over one dimension of the mesh, not yet the other", "_partial_reduce_output"),
        (_I, _EVENT, "_post_reduce_event _reshard_after_forward_event"),
        (_I, _BUFFER, "_all_reduce_state"),
        (_I, "bounds how many buffers stay alive", "reduce_scatter_max_input_buffers"),
        (_D, "from `_sharded_state`", "is_sharded is_sharded_post_forward is_unsharded"),
        (_D, "from `post_forward_mesh_info`", "_reshard_after_forward _use_post_forward_mesh"),
        (_D, "from `mesh_info`", "_is_hsdp _all_gather_process_group"),
        (_D, "from `mesh_info`", "_reduce_scatter_process_group _all_reduce_process_group"),
    ),
    "FSDPParam": _table(
        (_F, _SET_UP, "_module_info mesh_info device mp_policy offload_to_cpu pin_memory"),
        (_F, _SET_UP, "fsdp_placement is_dtensor is_spmd_types _orig_size"),
        (_F, _SET_UP, "sharded_size contiguous_sharded_stride padded_sharded_param_size"),
        (_F, _SET_UP, "_contiguous_orig_stride _spmd_mesh _spmd_placements _shard_mesh"),
        (_F, _SET_UP, "_dp_dim_indices _tp_spec _unsharded_dtensor_spec _spmd_partition_spec"),
        (_F, _SET_UP, "_spmd_init_local_type _spmd_restore_mesh _spmd_restore_type"),
        (_F, _SET_UP, "_spmd_grad_placements _release_all_gather_outputs_after_post_all_gather"),
        (_F, "changes with the group's, which is guarded", "post_forward_mesh_info"),
        (_F, "follows from `post_forward_mesh_info`", "sharded_post_forward_size"),
        (_F, "follows from `post_forward_mesh_info`", "contiguous_sharded_post_forward_stride"),
        (_F, "changes with `sharded_param`, which is guarded", "_sharding_spec"),
        (_I, "tells parameters apart; another number in every model", "_orig_param_uid"),
        (_I, "a cache by dtype", "_sharding_spec_by_dtype"),
        (_F, "set by the first forward", "_param_fqn"),
        (_F, _FIRST, "orig_dtype param_dtype reduce_dtype"),
        (_I, "empty but while an all-gather is pending, which is refused", "_extensions_data"),
        (_I, "a hook of `load_state_dict`", "_post_load_hook_handle"),
        (_R, "state of the iteration", "sharded_state"),
        (_R, "a setting", "keep_unsharded_storage"),
        (_R, "a setting", "sharded_grad_dtype _has_sharded_grad_dtype_override"),
        (_T, "the shard", "sharded_param _sharded_param_data"),
        (_T, "what the parameter is unsharded into", "all_gather_outputs _unsharded_inner_tensors"),
        (_T, "the unsharded parameter; its `.grad` is a slot", "_unsharded_param"),
        (_I, _AFTER_FORWARD, "_sharded_post_forward_param_data _sharded_post_forward_param"),
        (_S, "from torch 2.15 on `_unsharded_param.grad`", "unsharded_accumulated_grad"),
        (_I, _EVENT, "grad_offload_event"),
        (_D, "from the shard", "all_gather_inputs _sharded_local_tensor"),
        (_D, "from `_unsharded_param`", "unsharded_param unsharded_grad_data"),
        (_D, "from `_unsharded_param`", "unsharded_zero_grad_data"),
        (_D, "from `unsharded_accumulated_grad`", "unsharded_accumulated_grad_data"),
        (_D, "from `mesh_info`", "shard_mesh shard_mesh_from_root may_reduce_grad_outside_dp"),
        (_D, "from dtypes in this table", "unsharded_grad_dtype"),
    ),
}

# Slots that a newer release has turned into a property that reads another slot.
MOVED = {("FSDPParam", "unsharded_accumulated_grad"): "_unsharded_param.grad"}

# The methods of `FSDPModule`, each with the attributes that it sets or why it needs no handling.
METHODS: Mapping[str, str] = {
    "reshard": "runs in a step: resizes, and `sharded_state`; between steps: `sharded_state`",
    "unshard": "runs in a step: collectives and resizes; one that is pending at the end is refused",
    "reset_iter_state": "between steps: sets RESTORED attributes and slots, which are guarded",
    "finalize_backward": "runs in a step; an asynchronous one that is pending at the end is refused",
    "set_is_last_backward": "is_last_backward",
    "set_manual_backward_finalization": "manual_backward_finalization",
    "set_requires_gradient_sync": "reduce_grads, all_reduce_grads",
    "set_requires_all_reduce": "all_reduce_grads",
    "set_reshard_after_forward": "post_forward_mesh_info",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_modules_to_forward_prefetch": "_states_to_forward_prefetch",
    "set_modules_to_backward_prefetch": "_states_to_backward_prefetch",
    "set_custom_all_gather": "_all_gather_comm",
    "set_custom_reduce_scatter": "_reduce_scatter_comm",
    "set_all_reduce_hook": "_all_reduce_hook, _all_reduce_hook_stream",
    "set_post_optim_event": "post_optim_event",
    "set_reduce_scatter_divide_factor": "gradient_divide_factor",
    "set_gradient_divide_factor": "gradient_divide_factor",
    "set_force_sum_reduction_for_comms": "force_sum_reduction_for_comms",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm": "_all_gather_comm, _reduce_scatter_comm",
    "set_symm_mem_for_comm": "_all_gather_comm, _reduce_scatter_comm",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers": "memory of eager alone: reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group": "nothing that a step computes: the same ranks, another group",
    "set_keep_unsharded_storage": "keep_unsharded_storage",
    "_set_unshard_async_op": "unshard_async_op",
    "_get_fsdp_state": "reads",
    "_apply": "between steps: replaces parameters, which are guarded by identity",
}


@cache
def names(kind: str, handling: Handling) -> tuple[str, ...]:
    """The attributes of a class with this handling."""
    return tuple(name for name, entry in ATTRIBUTES[kind].items() if entry.handling is handling)


def handling_of(owner: Any, attribute: str) -> Handling:
    """The handling of an attribute of a live object of FSDP2."""
    return _table_of(type(owner))[attribute].handling


def is_writable(cls: type, attribute: str) -> bool:
    """Whether the attribute can be assigned: it is not a property without a setter."""
    found = inspect.getattr_static(cls, attribute, None)
    return not (isinstance(found, property) and found.fset is None)


# -- the check -------------------------------------------------------------------------------------


def unknown_attributes() -> Iterator[str]:
    """One sentence for each attribute in the source code of torch's classes that the table does not describe."""
    for cls in fsdp_classes():
        if cls.__name__ == "FSDPModule":
            yield from _unknown_methods(cls)
            continue
        table = ATTRIBUTES[cls.__name__]
        try:
            declared = _declared(cls)
        except (OSError, TypeError) as error:
            yield f"{cls.__name__} cannot be looked at: its source is not there ({error})"
            continue
        for name, is_property in declared.items():
            entry = table.get(name)
            if entry is None:
                yield f"{cls.__name__}.{name} is unknown: whether a step changes or reads it is not known"
            elif is_property and (problem := _no_longer_plain(cls, name, entry)):
                yield problem


def _unknown_methods(cls: type) -> Iterator[str]:
    for name, value in vars(cls).items():
        if inspect.isfunction(value) and not name.startswith("__") and name not in METHODS:
            yield f"FSDPModule.{name} is unknown: whether it changes what a step does is not known"


def _no_longer_plain(cls: type, name: str, entry: Entry) -> str | None:
    where = f"{cls.__name__}.{name}"
    if entry.handling is Handling.RESTORED:
        return f"{where} is a property, and was state: a guard would not see it"
    moved = (cls.__name__, name) in MOVED
    if entry.handling is Handling.SLOT and not moved and not is_writable(cls, name):
        return f"{where} is a property without a setter: a replay could not assign it"
    return None


def unknown_attributes_of(objects: Iterable[Any]) -> Iterator[str]:
    """One sentence for each attribute of live objects of FSDP2 that is not in the table."""
    found: dict[str, None] = {}
    for each in objects:
        table = _table_of(type(each))
        for name in vars(each):
            if name not in table:
                found[f"{type(each).__name__}.{name} is unknown: a live object has it"] = None
    yield from found


def _table_of(cls: type) -> Mapping[str, Entry]:
    for base in cls.__mro__:  # `replicate` has a subclass of FSDPState
        if base.__name__ in ATTRIBUTES:
            return ATTRIBUTES[base.__name__]
    return {}


def _declared(cls: type) -> Mapping[str, bool]:
    """Every attribute that a class annotates or that its methods assign to `self`; True for a property."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, bool] = {}
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.setdefault(statement.target.id, False)
        elif isinstance(statement, ast.Assign):
            found |= {t.id: False for t in statement.targets if isinstance(t, ast.Name)}
        elif isinstance(statement, ast.FunctionDef):
            found |= {name: False for name in _assigned(statement) if name not in found}
    properties = (name for name, value in vars(cls).items() if isinstance(value, property))
    return {**found, **dict.fromkeys(properties, True)}


def _assigned(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
