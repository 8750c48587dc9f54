"""FX graphs, the tracer that builds them, and pytrees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree  # the public spelling has fewer functions
from torch import fx
from torch._C import (  # makes a node in two thirds of the time of `fx.Node(...)` (2.11 to 2.15)
    _NodeBase,
)
from torch.fx.graph import (  # keywords and builtins, which are no names of nodes
    _illegal_names as _ILLEGAL_NAMES,
)
from torch.fx.passes.shape_prop import (  # the type of node.meta["tensor_meta"]
    TensorMetadata,
)

__all__ = [
    "TensorMetadata",
    "pytree",
]  # names of torch that are used elsewhere


# The nodes that a node reads, each once, in the order of their first uses: what `node.all_input_nodes` makes a list of,
# by a property in Python, which takes eight times as long (2.11 to 2.15).
input_nodes: Callable[[fx.Node], Collection[fx.Node]] = operator.attrgetter("_input_nodes")


def first_input(node: fx.Node) -> fx.Node:
    """The first node that a node reads; raises `StopIteration` if there is none."""
    return next(iter(input_nodes(node)))


_new_node, _begin_node = fx.Node.__new__, _NodeBase.__init__
_link_node = fx.Node._update_args_kwargs


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`node.args = args; node.kwargs = kwargs` in a fourth of the time.

    `Node.__setattr__` takes a node out of its graph's table and puts it back, whatever is set.
    """
    _link_node(node, args, kwargs)


class NodeWriter:
    """Appends nodes to a graph in a third of the time of `graph.create_node`; a third of a discharge is creating nodes.

    It does not walk the arguments for symbolic leaves, matches a name against the naming pattern only the first time,
    and looks up the graph's table of an op's nodes once per op.
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

    def caller(self, target: Any, base: str) -> Callable[[Any, Any], fx.Node]:
        """A function of arguments and keyword arguments: it appends a call of `target`, named `base` with a number."""
        graph, create_name, prepend = self._graph, self._create_name, self._prepend
        used, counts, names = self._used, self._counts, self._names
        nodes = self._tables["call_function", target]  # the graph's own table of these nodes

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
            count = counts.get(base)
            name = base if count is None else f"{base}_{count + 1}"
            if count is None or name in used:
                name = create_name(base, None)
            else:
                used.add(name)
                counts[base] = count + 1
            node = _new_node(fx.Node)
            _begin_node(node, graph, name, "call_function", target, None)
            _link_node(node, args, kwargs)
            names[node] = name
            prepend(node)
            nodes[node] = None
            graph._len += 1
            return node

        return call

    def placeholder(self, name: str) -> fx.Node:
        """Append a placeholder."""
        return self._append("placeholder", name, name, (), {}, None)

    def copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Append a node like one of another graph, with its name if that is free, other arguments and no `meta`."""
        return self._append(node.op, node.target, node.name, args, kwargs, node.type)

    def _append(
        self, op: str, target: Any, name: str, args: Any, kwargs: Any, kind: Any
    ) -> fx.Node:
        unique = self._unique(name)
        node = _new_node(fx.Node)
        _begin_node(node, self._graph, unique, op, target, kind)
        _link_node(node, args, kwargs)
        self._names[node] = unique
        self._prepend(node)
        self._tables[op, target if op == "call_function" else None][node] = None
        self._graph._len += 1
        return node

    def _unique(self, name: str) -> str:
        """`create_name`, without its regular expression for an identifier that is still free.

        The expression takes longer than making the node, and a step has hundreds of placeholders.
        """
        base, _, number = name.rpartition("_")
        numbered = number.isdecimal() and base != ""
        is_free = name not in self._used and (numbered or name not in _ILLEGAL_NAMES)
        if not (is_free and name.isascii() and name.isidentifier()):
            made: str = self._create_name(name, None)
            return made
        self._used.add(name)
        if numbered:
            self._counts[base] = int(number)
        else:
            self._counts.setdefault(name, 0)
        return name


def proxy_mode() -> object | None:
    """The `make_fx` mode that is active in this thread, or None."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode()


def last_traced() -> torch.fx.Node:
    """The last node of the graph that `make_fx` is tracing in this thread."""
    graph: torch.fx.Graph = proxy_mode().tracer.graph  # type: ignore[attr-defined]
    return next(iter(reversed(graph.nodes)))


@contextmanager
def _without_mode(key: Any) -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_infra_mode

    with contextmanager(_disable_infra_mode)(key):
        yield


def untraced() -> AbstractContextManager[None]:
    """A context: ops inside are not recorded by `make_fx`."""
    return _without_mode(torch._C._TorchDispatchModeKey.PROXY)


@contextmanager
def below_functionalization() -> Iterator[None]:
    """A context: mutating ops inside are recorded as they are, and do not become the values of the tensors they write.

    AOTAutograd does the same for the input mutations that it keeps in the graph.
    """
    from torch.fx.experimental.proxy_tensor import _proxy_tensor_disable_update_tensor_tracker

    functional = torch._C._TorchDispatchModeKey.FUNCTIONAL
    with _without_mode(functional), _proxy_tensor_disable_update_tensor_tracker():
        yield
