"""Pattern matching for the chains of collectives that FSDP2 leaves in a graph. Not a pass: an analysis for passes.

A parameter group is unsharded by one all-gather, and its gradients are reduced by one reduce-scatter:

    shards      w: [4, 8]            b: [4]              grads     dw: [8, 8]          db: [8]
                   |                   |                              |                   |
    pieces      view [32]              |                 pack      _chunk_cat([dw, db], 0, 2)
                   \\                  /                              |  (_to_copy, view [72])
    pack            cat([.., b]): [36]                   start     reduce_scatter_tensor
                          |                                           |
    start       all_gather_into_tensor                   wait      wait_tensor: [36]
                          |                              all_reduce   |  (HSDP: all_reduce; wait_tensor)
    waits            wait_tensor: [72]                               / \\
                          |                              parts     slice  slice
    unpack           view [2, 36]                                    |      |
                          |                                        view     |
             split_with_sizes_copy [32, 4], 1
                   /              \\
    parts     getitem [2, 32]   getitem [2, 4]
                   |               |
              view [64]         view [8]      ...      from here on: what the model does with them

`parts[i]` belongs to `pieces[i]`: it holds the i-th piece of all ranks, one rank after the other, and is None if
it has no reader. Two parts with the same pieces hold the same elements in the same order; their sizes may differ
(`[2, 32]`, `[64]`, or `[64]` from a coalesced gather), and so may their strides.

Invariant: nothing is changed. What these functions return depends on the program alone, so it is the same on
every rank that runs the same program. Linear in nodes and edges.
Refusals: a chain that differs from the pattern is not returned: one without exactly one wait per result, of a tensor
that is not contiguous or of unknown size, or read in another way than by the split into its pieces.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.cost.calls import arguments_of
from functionalize.ir.barrier import BARRIER
from functionalize.ir.waits import WAIT
from functionalize.util.by_address import by_address

aten = torch.ops.aten
FUNCTIONAL = torch.ops._c10d_functional

GATHER = FUNCTIONAL.all_gather_into_tensor.default
GATHER_LIST = FUNCTIONAL.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = FUNCTIONAL.reduce_scatter_tensor.default
ALL_REDUCE = FUNCTIONAL.all_reduce.default

_SPLITS = (aten.split_with_sizes_copy.default, aten.split_with_sizes.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CASTS = (aten._to_copy.default,)


@dataclass(frozen=True)
class Collective:
    """One communicating node. kind: the name of its op. op: the reduction (None: it does not reduce).

    sizes, dtypes: of the tensors that this rank sends.
    """

    node: fx.Node
    kind: str
    group: str
    op: str | None
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Gather:
    """An all-gather of pieces, and the parts that are read of it.

    shards: for each piece, the value that it is made from by views and casts alone.
    feed: the nodes from the shards to the start, in graph order (views, casts, the cat).
    pack: the cat, if there is one. nbytes: of the gathered whole.
    unpack: the nodes from the waits to the parts, both included, in graph order.
    """

    shards: tuple[fx.Node, ...]
    pieces: tuple[fx.Node, ...]
    feed: tuple[fx.Node, ...]
    pack: fx.Node | None
    start: fx.Node
    waits: tuple[fx.Node, ...]
    unpack: tuple[fx.Node, ...]
    parts: tuple[fx.Node | None, ...]
    group: str
    world: int
    dtype: torch.dtype
    nbytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for gathers of the same shards, in the same pieces and dtype, over the same ranks."""
        return (self.group, self.world, self.dtype, self.shards, _sizes(self.pieces))


@dataclass(frozen=True)
class Reduce:
    """A reduce-scatter of gradients, and the readers of its result.

    grads: the packed gradients, before any cast. feed: the nodes from the gradients to the start, in graph order.
    pack: the `_chunk_cat` or cat, if there is one.
    all_reduce, all_reduce_wait: of the shard, over the other dimension of an HSDP mesh.
    result: the wait after which the shard is complete. parts: the readers of the result, usually slices.
    nbytes: of the whole operand.
    """

    grads: tuple[fx.Node, ...]
    feed: tuple[fx.Node, ...]
    pack: fx.Node | None
    start: fx.Node
    wait: fx.Node
    all_reduce: fx.Node | None
    all_reduce_wait: fx.Node | None
    parts: tuple[fx.Node, ...]
    op: str
    group: str
    world: int
    dtype: torch.dtype
    nbytes: int

    @property
    def result(self) -> fx.Node:
        """The complete shard."""
        return self.all_reduce_wait or self.wait


def collectives(graph: fx.Graph) -> list[Collective]:
    """All communicating nodes, in the order of the graph; waits are not among them."""
    return [_collective(node) for node in graph.nodes if is_collective(node)]


def is_collective(node: fx.Node) -> bool:
    """Whether a node sends to other ranks or meets them."""
    return _is_collective_op(node.target)


@by_address
def _is_collective_op(target: Any) -> bool:
    if target is WAIT:
        return False
    return getattr(target, "namespace", "") in ("_c10d_functional", "_dtensor") or target is BARRIER


def gathers(graph: fx.Graph) -> list[Gather]:
    """The all-gathers that match the pattern above, in the order of their starts."""
    nodes = (n for n in graph.nodes if n.target in (GATHER, GATHER_LIST))
    return [found for node in nodes if (found := _gather(node)) is not None]


def reduces(graph: fx.Graph) -> list[Reduce]:
    """The reduce-scatters that match the pattern above, in the order of their starts."""
    nodes = graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    return [found for node in nodes if (found := _reduce(node)) is not None]


# -- any collective --------------------------------------------------------------------------------


def _collective(node: fx.Node) -> Collective:
    target: Any = node.target
    schema, arguments = getattr(target, "_schema", None), arguments_of(node)
    values = [n.meta.get("val") for n in node.all_input_nodes]
    tensors = [v for v in values if isinstance(v, Tensor)]
    kind = schema.name.split("::")[1] if schema is not None else str(target)
    op = arguments.get("reduce_op")
    return Collective(
        node,
        kind,
        str(arguments.get("group_name", node.args[0] if node.args else "")),
        None if op is None else str(op),
        tuple(t.dtype for t in tensors),
        tuple(tuple(t.shape) for t in tensors),
    )


# -- all-gathers -----------------------------------------------------------------------------------


def _gather(start: fx.Node) -> Gather | None:
    given: Any
    given, world, group = _three(start)
    many = start.target is GATHER_LIST
    sent = tuple(given) if many else (given,)
    if not all(_is_contiguous(n) for n in sent):
        return None
    waits = _waits_of(start, len(sent) if many else None)
    if waits is None:
        return None
    pack = None if many else _flat_cat(given)
    pieces = tuple(pack.args[0]) if pack is not None else sent  # type: ignore[arg-type]
    roots = [_root(piece) for piece in pieces]
    feed = [n for _, path in roots for n in reversed(path)]
    if pack is not None:
        feed.append(pack)
    found = _parts(waits, pieces, world, pack is not None)
    if found is None:
        return None
    parts, between = found
    return Gather(
        shards=tuple(root for root, _ in roots),
        pieces=pieces,
        feed=tuple(dict.fromkeys(feed)),
        pack=pack,
        start=start,
        waits=waits,
        unpack=(*waits, *between),
        parts=parts,
        group=str(group),
        world=world,
        dtype=sent[0].meta["val"].dtype,
        nbytes=world * sum(_nbytes(n) for n in sent),
    )


def _three(start: fx.Node) -> tuple[Any, int, str]:
    """(what is sent, ranks, group) of an all-gather."""
    given, world, group = start.args
    return given, int(world), str(group)  # type: ignore[arg-type]


def _waits_of(start: fx.Node, count: int | None) -> tuple[fx.Node, ...] | None:
    """The one wait of each result; count: of how many, None if the result is one tensor."""
    if count is None:
        wait = _only_wait(start)
        return None if wait is None else (wait,)
    found: dict[Any, fx.Node] = {}
    for part in start.users:
        wait = _only_wait(part)
        if part.target is not operator.getitem or wait is None or part.args[1] in found:
            return None
        found[part.args[1]] = wait
    if sorted(found) != list(range(count)):
        return None
    return tuple(found[i] for i in range(count))


def _only_wait(node: fx.Node) -> fx.Node | None:
    user = _only_user(node)
    return user if user is not None and user.target is WAIT else None


def _flat_cat(node: fx.Node) -> fx.Node | None:
    """A node itself if it is a cat of flat tensors of one dtype."""
    if node.target is not aten.cat.default or len(node.meta["val"].shape) != 1:
        return None
    tensors: Any = node.args[0]
    if any(n.meta["val"].dtype != node.meta["val"].dtype for n in tensors):
        return None
    return node


def _root(piece: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """(the value that a piece is made from by views and casts, the nodes between, the last one first)."""
    path: list[fx.Node] = []
    while piece.target in _VIEWS or piece.target in _CASTS:
        path.append(piece)
        piece = piece.all_input_nodes[0]
    return piece, path


Parts = tuple[tuple[fx.Node | None, ...], list[fx.Node]]


def _parts(
    waits: tuple[fx.Node, ...], pieces: tuple[fx.Node, ...], world: int, packed: bool
) -> Parts | None:
    """(the part of each piece, the nodes after the waits up to the parts); of one piece, the wait itself."""
    if not packed:
        return waits, []
    (wait,) = waits
    if not wait.users:
        return (None,) * len(pieces), []
    numels = [n.meta["val"].numel() for n in pieces]
    found = _split_of(wait, numels, world)
    if found is None:
        return (waits, []) if len(pieces) == 1 else None
    parts: list[fx.Node | None] = [None] * len(pieces)
    for part in found[1].users:
        at: Any = part.args[1]
        if parts[at] is not None:
            return None
        parts[at] = part
    return tuple(parts), [*found, *found[1].users]


def _split_of(wait: fx.Node, numels: list[int], world: int) -> tuple[fx.Node, fx.Node] | None:
    """(rows, split): `rows = view(wait, [world, -1])`, the only reader of the wait, split into the pieces."""
    rows = _only_user(wait)
    if rows is None or rows.target not in _VIEWS:
        return None
    split = _only_user(rows)
    if tuple(rows.meta["val"].shape) != (world, sum(numels)) or split is None:
        return None
    if split.target not in _SPLITS or list(split.args[1]) != numels:  # type: ignore[arg-type]
        return None
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    if dim not in (1, -1) or any(n.target is not operator.getitem for n in split.users):
        return None
    return rows, split


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


# -- reduce-scatters -------------------------------------------------------------------------------


def _reduce(start: fx.Node) -> Reduce | None:
    given, op, world, group = start.args
    wait = _only_wait(start)
    if wait is None or not isinstance(given, fx.Node) or not _is_contiguous(given):
        return None
    pack, path = _root(given)
    if pack.target in (aten._chunk_cat.default, aten.cat.default):
        grads: tuple[fx.Node, ...] = tuple(pack.args[0])  # type: ignore[arg-type]
        feed = (pack, *reversed(path))
        packed: fx.Node | None = pack
    else:
        grads, feed, packed = (pack,), tuple(reversed(path)), None
    again = _only_all_reduce(wait)
    again_wait = _only_wait(again) if again is not None else None
    result = again_wait or wait
    return Reduce(
        grads=grads,
        feed=feed,
        pack=packed,
        start=start,
        wait=wait,
        all_reduce=again if again_wait is not None else None,
        all_reduce_wait=again_wait,
        parts=tuple(result.users),
        op=str(op),
        group=str(group),
        world=int(world),  # type: ignore[arg-type]
        dtype=given.meta["val"].dtype,
        nbytes=_nbytes(given),
    )


def _only_all_reduce(wait: fx.Node) -> fx.Node | None:
    user = _only_user(wait)
    return user if user is not None and user.target is ALL_REDUCE else None


# -- sizes -----------------------------------------------------------------------------------------


def _sizes(nodes: tuple[fx.Node, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(n.meta["val"].shape) for n in nodes)


def _nbytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())


def _is_contiguous(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or any(type(n) is not int for n in value.shape):
        return False
    return value.is_contiguous()
