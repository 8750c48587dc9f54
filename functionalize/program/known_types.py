"""The types that a program file may name: a closed table, and those that the caller of `load` hands over.

    Types().of("builtins:dict")                     dict
    Types([Batch]).of("train:Batch")                Batch
    Types().of("subprocess:Popen")                  LoadError

Nothing is looked up in `sys.modules` by a name of a file. Types of the user come from the live step (see
`saving/live_types.py`), or from `load(path, types=[...])`.
Invariant: the table is made before a file is read.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from functionalize._compat.distributed import dtensor_type
from functionalize._compat.graphs import pytree
from functionalize.errors import LoadError
from functionalize.util import structure
from functionalize.util.packages import home_of

NODE = structure.Opened
_NAMED_TUPLE: Any = collections.namedtuple  # pytree's type of a node for every named tuple
_PLAIN: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(list, tuple, dict, set, frozenset, slice, range),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, _NAMED_TUPLE),
    *(types.SimpleNamespace, collections.UserDict),
    *(torch.Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool),
    NODE,
)
# Of torch's functions that return several tensors.
_RESULTS = tuple(kind for kind in vars(torch.return_types).values() if isinstance(kind, type))


def type_name(kind: Any) -> str:
    """The name of a type in a file: the same in every process that has its module."""
    return f"{home_of(kind.__module__)}:{kind.__qualname__}"


class Types:
    """The types that files may name here. more: of the user."""

    def __init__(self, more: Iterable[type] = ()) -> None:
        self._known: dict[str, Any] = {type_name(kind): kind for kind in more}
        self._known |= {type_name(kind): kind for kind in (*_PLAIN, *dtensor_type(), *_RESULTS)}

    def of(self, name: Any) -> Any:
        """The type of that name; raises `LoadError`."""
        if not isinstance(name, str) or name.count(":") != 1:
            raise LoadError("names a type by something that is no name: damaged")
        found = self._known.get(name)
        if found is None:
            module, _, path = name.partition(":")
            raise LoadError(
                f"needs the type {path} of the module {module}, which nothing here hands over: if you trust the "
                f"file with it, import it and pass `types=[{path.rpartition('.')[2]}]` to `load`"
            )
        return found

    def node(self, name: Any, context: Any, children: int) -> Any:
        """The type of a node of a tree with this context and so many children; raises `LoadError`."""
        kind = self.of(name)
        if kind is _NAMED_TUPLE or hasattr(kind, "_fields"):
            owner = context if isinstance(context, type) else kind
            if not isinstance(owner, type) or not issubclass(owner, tuple):
                raise LoadError(f"has {context!r:.80} where a named tuple is expected: damaged")
            fits = len(getattr(owner, "_fields", ())) == children
        elif kind in (list, tuple, torch.Size):
            fits = context is None
        elif kind in (dict, collections.OrderedDict):
            fits = _are_keys(context, children)
        elif kind is collections.defaultdict:
            fits = isinstance(context, list) and len(context) == 2
            fits = fits and (context[0] is None or isinstance(context[0], type))
            fits = fits and _are_keys(context[1], children)
        elif kind is collections.deque:
            fits = context is None or (type(context) is int and context >= children)
        elif kind is NODE:
            fits = structure.is_shape(context, children)
        elif kind in _RESULTS:
            fits = getattr(kind, "n_sequence_fields", -1) == children
        elif kind in (*_PLAIN, *dtensor_type()):
            fits = False
        else:
            fits = True  # the user's own, by the functions that the user has registered
        if kind not in pytree.SUPPORTED_NODES and not hasattr(kind, "_fields"):
            raise LoadError(f"needs pytree to know the type {name}, which is not registered here")
        if not fits:
            raise LoadError(f"has a {name} of another structure: damaged")
        return kind


def _are_keys(context: Any, children: int) -> bool:
    return isinstance(context, list) and len(context) == children
