"""torch's functions that hand numbers to Python or take them from it, as a capture replaces them.

    tensor.item()                       torch gives back a bare `torch.SymFloat`: made a `LiveFloat`
    torch._fused_adamw_(..., lr=lr)     takes `lr` as a C++ double: see Note [Handed over] in handed.py
    clip_grad_norm_(..., max_norm)      converts to `float`, which is plain: its module gets its own `float`
    torch.tensor(number)                asks for a plain number: made by `torch.full`, which takes a live one
    json.dumps({"loss": number})        C code that knows the types of Python alone: given the plain number
    tensor._wrapped_number              see Note [Wrapped numbers]

All are the originals where no recording with live numbers is under way.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad

from functionalize._compat import fused_optimizer_functions
from functionalize.frontend.handed import handing_over, run_with
from functionalize.frontend.live import is_live, plain, shown


def patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement); `recorders`: those active in this thread, the innermost first."""
    yield torch.Tensor, "item", _item(torch.Tensor.item)
    yield torch.Tensor, "_wrapped_number", property(_wrapped, _wrap)
    for name in ("tensor", "as_tensor"):
        yield torch, name, _made_from(getattr(torch, name))
    yield clip_grad, "float", _as_float
    yield json.JSONEncoder, "default", _as_json(json.JSONEncoder.default)
    for owner, name in fused_optimizer_functions():
        yield owner, name, _handing_over(recorders, name, getattr(owner, name))


def _item(original: Any) -> Any:
    def item(self: torch.Tensor) -> Any:
        return shown(original(self))

    item.__doc__ = original.__doc__
    return item


def _made_from(original: Any) -> Any:
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        known = kwargs.keys() <= {"dtype", "device"} and not args
        if not (is_live(data) and known):
            return original(data, *args, **kwargs)
        dtype = kwargs.get("dtype") or (
            torch.get_default_dtype() if isinstance(data, float) else torch.int64
        )
        return torch.full((), data, dtype=dtype, device=kwargs.get("device"))

    make.__doc__ = original.__doc__
    return make


def _as_float(value: Any) -> Any:
    return value if is_live(value) and isinstance(value, float) else float(value)


def _as_json(original: Any) -> Any:
    def default(self: json.JSONEncoder, value: Any) -> Any:
        return plain(value) if is_live(value) else original(self, value)

    default.__doc__ = original.__doc__
    return default


def _wrap(tensor: torch.Tensor, number: Any) -> None:
    """Note [Wrapped numbers]

    In `tensor * number` torch makes a tensor of the number, and of a symbolic one a NaN that has the number
    as an attribute, `_wrapped_number`: who runs ops on real tensors is to look there. Autograd keeps that
    tensor for the backward, which may run when nobody looks any more. So the attribute is a property while
    a capture runs, which writes the number that it stands for into the tensor.
    """
    tensor.__dict__["_wrapped_number"] = number
    if is_live(number):
        hint = number.node.hint
        kind = ctypes.c_double if type(hint) is float else ctypes.c_int64
        kind.from_address(tensor.data_ptr()).value = hint


def _wrapped(tensor: torch.Tensor) -> Any:
    try:
        return tensor.__dict__["_wrapped_number"]
    except KeyError:
        raise AttributeError("_wrapped_number") from None


def _handing_over(recorders: Callable[[], list[Any]], name: str, original: Any) -> Any:
    def fused(*args: Any, **kwargs: Any) -> Any:
        ledgers = [recorder.ledger for recorder in recorders() if recorder.ledger is not None]
        if not ledgers or not any(map(is_live, kwargs.values())):
            return original(*args, **kwargs)
        with handing_over(ledgers[0], f"aten::{name}", kwargs):
            return original(*args, **run_with(ledgers[0], kwargs))

    fused.__doc__ = original.__doc__
    return fused
