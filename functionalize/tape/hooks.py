"""The kind of the hook in which an op of a backward ran, by the frame that autograd's engine has called.

    tensor pre-hook            hook(grad)                      Tensor.register_hook, register_multi_grad_hook
    node pre-hook              hook(grads)                     Node.register_prehook
    node post-hook             hook(grads of inputs, grads)    Node.register_hook, module backward hooks
    post-accumulate-grad hook  hook(leaf)
    saved-tensor unpack        unpack(packed); saved-tensor pack is found by the stack of an op of a forward
    queue_callback             callback()                      outside of every node, at the end of the backward

A frame is looked at while its op is recorded; no argument is kept. A hook that is no Python function has no frame: its
ops count as those of the node.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

TENSOR, NODE, AFTER_NODE = "tensor pre-hook", "node pre-hook", "node post-hook"
ACCUMULATED, CALLBACK = "post-accumulate-grad hook", "queue_callback"
PACK, UNPACK = "saved-tensor pack", "saved-tensor unpack"
UNKNOWN = "hook"

# The backward of an `autograd.Function` is no hook; a recomputation is, and has a phase of its own.
_NO_HOOKS = frozenset({torch.autograd.function.__file__, checkpoint.__file__})
_VARIADIC = 4  # of `CodeType.co_flags`


def kind_of_hook(
    frame: FrameType, in_node: bool, leaf: Tensor | None, unpacks: set[CodeType]
) -> str | None:
    """The kind of the hook whose frame this is; None if it is none. leaf: whose gradient the node accumulates."""
    code = frame.f_code
    if code.co_filename in _NO_HOOKS:
        return None
    if not in_node:
        return CALLBACK
    if code in unpacks:
        return UNPACK
    match _arguments(frame):
        case [FunctionCtx(), *_]:
            return None
        case [tuple(), tuple()]:
            return AFTER_NODE
        case [tuple()]:
            return NODE
        case [Tensor() as only]:
            return ACCUMULATED if only is leaf else TENSOR
    return UNKNOWN


def _arguments(frame: FrameType) -> list[Any]:
    """The positional arguments of a function or of a bound method, without its object."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    found = [values[name] for name in names if name in values]
    if code.co_flags & _VARIADIC:
        found += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    if len(found) > 1 and not isinstance(found[0], (Tensor, tuple, FunctionCtx)):
        del found[0]
    return found


def is_user_hook(hook: Any) -> bool:
    """Whether a hook on saved tensors is other than those of activation checkpointing."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename not in _NO_HOOKS
