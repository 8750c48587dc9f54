"""Schedules of ranks that wait for each other: any order of running them, a slow model of them, a rank alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functionalize.errors import PlanError
from functionalize.planner.time.meetings import Alone, Meetings, Posted, run_together

# What a rank does: it works for some seconds, posts its half of a message, or waits for the one that it posted first.
Action = tuple[str, float, int]


def played(ranks: list[list[Action]], order: list[int]) -> list[float]:
    """When each rank is done. order: in which the schedules are run."""
    meetings, done = Meetings(), [0.0] * len(ranks)

    def schedule(rank: int) -> Iterator[Posted]:
        now, halves = 0.0, []
        for kind, number, other in ranks[rank]:
            if kind == "work":
                now += number
            elif kind == "wait":
                half = halves.pop(0)
                if not half.is_known:
                    yield half
                now = max(now, half.end)
            else:
                ends = (rank, other) if kind == "send" else (other, rank)
                half = Posted(now, number, f"{kind} {other}")
                halves.append(meetings.post(ends, 0, kind == "send", half))
        done[rank] = now

    run_together([schedule(rank) for rank in order])
    return done


def slowly(ranks: list[list[Action]]) -> list[float]:
    """The same by repetition: every message is at 0 at first, and later whenever a half or the one before it was."""
    ends: dict[tuple[int, int, int], float] = {}
    while True:
        ready: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        done = []
        for rank, actions in enumerate(ranks):
            now, posted, counts = 0.0, [], dict[tuple[int, int], int]()
            for kind, number, other in actions:
                if kind == "work":
                    now += number
                elif kind == "wait":
                    now = max(now, ends.get(posted.pop(0), 0.0))
                else:
                    pair = (rank, other) if kind == "send" else (other, rank)
                    counts[pair] = counts.get(pair, -1) + 1
                    posted.append((*pair, counts[pair]))
                    ready.setdefault(posted[-1], []).append((now, number))
            done.append(now)
        new: dict[tuple[int, int, int], float] = {}
        for key in sorted(ready, key=lambda key: key[2]):
            halves = ready[key]
            before = new.get((*key[:2], key[2] - 1), 0.0)
            new[key] = max(before, *(at for at, _ in halves)) + max(s for _, s in halves)
        if new == ends:
            return done
        ends = new


@st.composite
def pipelines(draw: st.DrawFn) -> list[list[Action]]:
    """Ranks that send each other messages, in one order for all, so that they meet."""
    count = draw(st.integers(2, 4))
    ranks: list[list[Action]] = [[] for _ in range(count)]
    times = st.floats(0.0, 8.0).map(lambda x: round(x, 3))
    for _ in range(draw(st.integers(1, 12))):
        source, target = draw(st.permutations(range(count)))[:2]
        for rank, kind, other in ((source, "send", target), (target, "receive", source)):
            ranks[rank] += [("work", draw(times), 0), (kind, draw(times), other)]
            if draw(st.booleans()):
                ranks[rank].append(("wait", 0.0, 0))
    return ranks


@given(pipelines(), st.randoms(use_true_random=False))
def test_what_comes_out_is_that_of_a_slow_model_in_any_order(
    ranks: list[list[Action]], rng: random.Random
) -> None:
    order = [*range(len(ranks))]
    rng.shuffle(order)
    assert played(ranks, order) == played(ranks, [*range(len(ranks))]) == slowly(ranks)


def test_a_message_without_another_half_is_named() -> None:
    ranks: list[list[Action]] = [[("send", 1.0, 1), ("wait", 0.0, 0)], [("work", 1.0, 0)]]
    with pytest.raises(PlanError, match="one message, `send 1`, has no other half"):
        played(ranks, [0, 1])


def test_a_rank_alone_finds_the_other_where_it_waits() -> None:
    meetings = Alone()
    first = meetings.post((0, 1), 0, True, Posted(2.0, 1.0, "send"))
    second = meetings.post((0, 1), 0, True, Posted(2.5, 1.0, "send"))
    back = meetings.post((1, 0), 0, False, Posted(2.5, 1.0, "receive"))
    assert [(m.start, m.end) for m in (first, second, back)] == [(2.0, 3.0), (3.0, 4.0), (2.5, 3.5)]
