"""The ops that a program file may name, and those that it may call.

    op_of("aten.add.Tensor")                        the op
    op_of("mylib.fused.default")                    LoadError, unless `load(path, ops=["mylib"])` allows the namespace
    check_call(torch.ops.aten.from_file.default)    LoadError: it has the argument `filename`

An op is named as data where a file describes what a step ran. It may be called from a graph if a rule allows it:

- its namespace is one of torch's that programs consist of, or one that the caller of `load` allows;
- the text among its arguments is from a closed list of options (`reduce`, `rounding_mode`): no name of a file, of a
  library or of a function; it takes and returns no storages, streams or objects of C++ classes;
- it does not give a tensor another storage, or a storage another size, and it checks the bounds of its views.

Invariant: what cannot be decided is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

import torch

from functionalize.errors import LoadError

_NAMESPACES = (
    "aten prims rngprims inductor fsdp c10d _c10d_functional _c10d_functional_autograd c10d_functional "
    "_dtensor functionalize flex_lib"
)
NAMESPACES = frozenset(_NAMESPACES.split())
# Arguments of text that choose one of a few ways to compute.
_TEXT = (
    "reduce rounding_mode norm mode padding pad_mode indexing approximate interpolation side equation ord driver "
    "reduce_op group_name tag activation algorithm UPLO padding_side assert_msg compute_mode p"
)
_OPTIONS = frozenset(_TEXT.split())
# Torch 2.15 declares no type for these: it takes a name as before, or an object, which no file holds.
_ANY_SINCE_2_15 = frozenset({"group_name", "reduce_op"})
_TYPES = re.compile(
    r"(Optional|List|Union|Tuple|\[|\]|\(|\)|,|\s|\?|Tensor|SymInt|SymFloat|SymBool|int|float|bool|complex|number|"
    r"Scalar|ScalarType|Layout|MemoryFormat|Device|str|NoneType|Generator|Dimname|QScheme|t\d*)+"
)
# Of torch's ops: what changes a tensor's storage or its size, trusts addresses and sizes of memory that it is
# passed, reads or writes outside of the process, or hides what it calls.
_REFUSED = frozenset(
    {
        "from_file",
        "set_",
        "set",
        "set_data",
        "_set_data",
        "_resize_output",
        "_resize_output_",
        "resize_as_sparse_",
        "resize_storage_bytes_",
        "_reshape_alias",
        "_reshape_alias_copy",
        "_reinterpret_tensor",
        "_alloc_from_pool",
        "_print",
        "warn",
        "save",
        "load",
        "load_library",
        "_sparse_coo_tensor_unsafe",
        "_sparse_compressed_tensor_unsafe",
        "_sparse_csr_tensor_unsafe",
        "_sparse_csc_tensor_unsafe",
        "_sparse_bsr_tensor_unsafe",
        "_sparse_bsc_tensor_unsafe",
        "_segment_reduce_backward",
        "segment_reduce",
        "_spsolve",
        "_foobar",
        "accumulate_grad_",
        "irecv",
        "isend",
        "get_gradients",
    }
)
_REFUSED_STARTS = (
    "_test_",
    "_cufft_",
    "_cudnn_init",
    "_nested_",
    "_unsafe_index",
    "_unsafe_masked",
)
_OVERLOAD: type = type(torch.ops.aten.add.Tensor)
_WORD = re.compile(r"\w+")


def op_of(name: Any, namespaces: Collection[str] = ()) -> Any:
    """The op of a name; raises `LoadError`. namespaces: those beside torch's that the caller allows."""
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) != 3 or not all(map(_WORD.fullmatch, parts)):
        raise LoadError("names an op by something that is no name: damaged")
    namespace, packet, overload = parts
    if namespace not in NAMESPACES and namespace not in namespaces:
        raise LoadError(
            f"names the op {name:.200}, which is none of those of torch that programs consist of: if you trust the "
            f"file with this library, import it and pass `ops=[{namespace!r:.80}]` to `load`"
        )
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, _OVERLOAD):
        raise LoadError(f"needs the op {name:.200}, which is not registered here")
    return found


def check_call(op: Any, namespaces: Collection[str] = ()) -> None:
    """Raises `LoadError` if a file may not call an op. namespaces: those beside torch's that the caller allows."""
    if op.namespace in namespaces:
        return
    why = why_not(op)
    if why is not None:
        raise LoadError(f"calls {op}, which {why}: a file may not")


@cache
def why_not(op: Any) -> str | None:
    """Why a file may not call an op of torch; None if it may."""
    name = op._schema.name.partition("::")[2]
    if op.namespace not in NAMESPACES:
        return "is none of the ops of torch that programs consist of"
    if (
        name in _REFUSED
        or name.startswith(_REFUSED_STARTS)
        or name.lstrip("_").startswith("resize")
    ):
        return "changes storages, or reads what is not checked"
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.name == "unsafe":
            return "may leave out checks"
        if argument.name in _ANY_SINCE_2_15 and kind == "Any":
            continue
        if "str" in kind and argument.name not in _OPTIONS:
            return f"has the argument `{argument.name}`, text that may be a name"
        if not _TYPES.fullmatch(kind):
            return f"has the argument `{argument.name}` of type {kind}"
    for each in op._schema.returns:
        if not _TYPES.fullmatch(str(each.type)):
            return f"returns a {each.type}"
    return None
