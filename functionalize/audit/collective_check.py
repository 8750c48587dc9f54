"""Whether the ranks recorded the same collectives: compared when a recording ends, without waiting for a rank.

    rank 0  recorded  all_gather, reduce_scatter, ...     writes it with its sequence number, reads its neighbours'
    rank 1  recorded  all_gather, all_reduce, ...         "collective 2 of 9 in process group '0' is ..., on rank 0 ..."

Every rank writes the collectives that it recorded into the store of each process group, with the group's sequence
number, and reads those of the rank before and the rank after it. The later of two neighbours sees the difference.
Only recordings that end at the same sequence number are compared: a rank that replays writes nothing.
Not compared: point-to-point messages, groups of one rank, fake groups.
"""

from __future__ import annotations

import json
import zlib
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from functionalize._compat.distributed import group_of_name, sequence_number, store_of_group
from functionalize.program.collective_order import Texts, recorded_sequences
from functionalize.recorder.recorder import Recorder


def collective_mismatch(recorder: Recorder) -> str | None:
    """The first collective in which a neighbour's recording differs, as a message; None if none differs so far."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    found = None
    for name, texts in recorded_sequences(recorder.records).items():
        group = group_of_name(name)
        store = store_of_group(group)
        if store is None or group.size() == 1:
            continue
        number, rank, world = sequence_number(group), group.rank(), group.size()
        store.set(_key(rank), zlib.compress(json.dumps([number, texts]).encode()))
        for other in {(rank - 1) % world, (rank + 1) % world}:
            theirs = _written(store, other)
            if theirs is not None and theirs[0] == number and found is None:
                found = _first_difference(name, texts, tuple(theirs[1]), _global(group, other))
    return found


def _key(rank: int) -> str:
    return f"functionalize/recorded/{rank}"


def _written(store: Any, rank: int) -> Any:
    if not store.check([_key(rank)]):
        return None
    return json.loads(zlib.decompress(store.get(_key(rank))))


def _global(group: Any, rank: int) -> int:
    return int(dist.get_global_rank(group, rank))


def _first_difference(name: str, mine: Texts, theirs: Texts, rank: int) -> str | None:
    """The first different collective. Both sequences end at the same sequence number, but may differ in length."""
    pairs = list(zip_longest(reversed(mine), reversed(theirs)))[::-1]
    for back, (here, there) in enumerate(pairs):
        if here is not None and there is not None and here != there:
            at = back + len(mine) - len(pairs) + 1
            return (
                f"the ranks do not record the same collectives: number {at} of {len(mine)} in process group "
                f"{name!r} is {here} here and {there} on rank {rank}"
            )
    return None
