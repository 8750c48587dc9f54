"""What a collective sends: its kind, its process group, its bytes.

    message_of(node)          Message(kind="all-gather", group="3", nbytes_in=..., nbytes_out=...)
    sent(message, 8)          the bytes that each of 8 ranks sends, by the table in `communication.py`

Bytes are the sizes of the tensors, including the padding of uneven shards, which FSDP2 sends too.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from functionalize.cost.calls import arguments_of, nbytes_of
from functionalize.program.metadata import tensors_of

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, BROADCAST, BARRIER = "all-to-all", "broadcast", "barrier"
SEND, RECEIVE = "send", "receive"  # between two ranks
_KINDS = (
    ("all_gather", ALL_GATHER),
    ("reduce_scatter", REDUCE_SCATTER),
    ("all_reduce", ALL_REDUCE),
    ("all_to_all", ALL_TO_ALL),
    ("shard_dim_alltoall", ALL_TO_ALL),
    ("broadcast", BROADCAST),
    ("barrier", BARRIER),
    ("send_message", SEND),
    ("receive_message", RECEIVE),
)


class Message(NamedTuple):
    """What one collective communicates. nbytes_in, nbytes_out: of the inputs and of the outputs of each rank."""

    kind: str
    group: str
    nbytes_in: int
    nbytes_out: int


def message_of(node: fx.Node) -> Message:
    """The message of a collective whose arguments have their `val`."""
    read = (t for n in node.all_input_nodes for t in tensors_of(n.meta["val"]))
    made = tensors_of(node.meta.get("val"))
    return Message(
        kind_of(node), group_name_of(node), sum(map(nbytes_of, read)), sum(map(nbytes_of, made))
    )


def sent(message: Message, ranks: int) -> int:
    """Bytes that each rank of a ring sends; of a receive, those that arrive. ranks: of the group, 0 if unknown."""
    kind, _, nbytes_in, nbytes_out = message
    if ranks == 1:
        return 0
    others = nbytes_in - nbytes_in // ranks if ranks else nbytes_in
    if kind == ALL_REDUCE:
        return 2 * others
    if kind == ALL_TO_ALL:
        return others
    if kind == BROADCAST:
        return nbytes_in
    return abs(nbytes_out - nbytes_in)


def kind_of(node: fx.Node) -> str:
    """The usual name of a collective; for one that is not in the table, the name of its op."""
    name = str(node.target).split(".")[1]
    return next((kind for start, kind in _KINDS if name.startswith(start)), name)


def group_name_of(node: fx.Node) -> str:
    """The name of the process group of a collective."""
    return str(arguments_of(node).get("group_name", ""))
