"""The sizes that ranks have compared, in a store; ranks that use them: `tests/lengths/test_ranks.py`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from functionalize.audit.shared_sizes import SharedSizes
from functionalize.lengths.coverage import Coverage


def coverage(*compared: int) -> Coverage:
    return Coverage(8, frozenset(), frozenset(), 2, [(each,) for each in compared], 8)


def test_each_rank_learns_once_what_another_one_has_compared() -> None:
    store = dist.HashStore()
    one, other = SharedSizes(store, "step"), SharedSizes(store, "step")
    own = coverage(3)
    one.publish((3,))
    one.publish((5,))
    assert other.teach(own) and own.elsewhere == [(5,)]
    assert not other.teach(own)
    one.publish((7,))
    assert other.teach(own) and own.elsewhere == [(5,), (7,)]
    assert own.compared == [(3,)] and own.lost is None


def test_steps_with_other_ops_share_nothing() -> None:
    store, own = dist.HashStore(), coverage()
    SharedSizes(store, "step").publish((5,))
    assert not SharedSizes(store, "another step").teach(own)
    assert own.elsewhere == []


def test_a_call_that_was_not_as_predicted_ends_the_coverage_of_all() -> None:
    store, own = dist.HashStore(), coverage(3)
    SharedSizes(store, "step").publish(None)
    assert SharedSizes(store, "step").teach(own)
    assert own.lost == "a call was not as predicted on another rank" and own.is_hopeless


def test_of_very_many_sizes_the_last_ones_are_read() -> None:
    store, own = dist.HashStore(), coverage()
    one = SharedSizes(store, "step")
    for size in range(300):
        one.publish((size,))
    assert SharedSizes(store, "step").teach(own)
    assert own.elsewhere == [(size,) for size in range(44, 300)]


class Gone:
    """A store whose server has ended."""

    def set(self, *args: Any) -> None:
        raise AssertionError("nothing is written without a number")

    def add(self, *args: Any) -> int:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_fails_shares_nothing() -> None:
    shared, own = SharedSizes(Gone(), "step"), coverage(3)
    shared.publish((5,))
    assert not shared.teach(own) and own.elsewhere == []
