"""Tests of the harness for real ranks: results, failures, hangs, deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import functionalize as fz
from tests import ranks
from tests.ranks import (
    HungCollectiveWarning,
    RankError,
    RankTimeout,
    other_processes,
    run_on_ranks,
)


@pytest.fixture(scope="module", autouse=True)
def forked_pools() -> Iterator[None]:
    """Most tests here cost a pool, and need nothing that a pool of forks does not have."""
    with other_processes():
        yield


class Unpicklable(Exception):
    """Cannot be made again from its ``args``."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def who() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def pid() -> int:
    return os.getpid()


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def summed(start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own = start + dist.get_rank()
    dist.all_reduce(own)
    return own, torch.rand(2)


def raise_on(rank: int, error: BaseException) -> None:
    if dist.get_rank() == rank:
        raise error
    dist.barrier()  # which the other rank never reaches


def raise_unpicklable() -> None:
    raise Unpicklable("first", "second")


def return_a_lambda() -> object:
    return lambda: None


def sleep_on(rank: int, file: str) -> None:
    with open(file, "a") as entered:
        entered.write("x")
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int, signum: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signum)
    dist.barrier()


def leave_patched() -> None:
    torch.UntypedStorage.resize_ = lambda self, size: None  # type: ignore[method-assign]


def run_out(patch: pytest.MonkeyPatch, file: Path, *entered: int) -> None:
    """Time for a call runs out as soon as `file` has one of these lengths: as soon as the ranks have begun to wait.

    Once for each length: when the call is repeated, the file has it until the ranks have come as far again.
    """
    left = {*entered}

    def waits(pipes: list[Any], seconds: float) -> list[Any]:
        while not (ready := connection.wait(pipes, 0.02)):
            if file.exists() and (size := file.stat().st_size) in left:
                left.remove(size)
                return connection.wait(pipes, 0.5)
        return ready

    patch.setattr(ranks, "wait", waits)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_answers(world: int) -> None:
    assert run_on_ranks(who, world=world) == [(rank, world, 1) for rank in range(world)]


def test_tensors_travel_and_reduce() -> None:
    start = torch.arange(3.0)
    for _ in range(2):  # the same random numbers on every call, on every rank
        (first, drawn), (second, drawn_too) = run_on_ranks(summed, start)
        assert torch.equal(first, 2 * start + 1)
        assert torch.equal(first, second)
        torch.manual_seed(0)
        assert torch.equal(drawn, torch.rand(2))
        assert torch.equal(drawn, drawn_too)


def test_processes_are_reused_and_stopped_in_between() -> None:
    first = run_on_ranks(pid)
    until = time.monotonic() + 60  # a signal need not arrive at once
    while ranks.STOPS and any(state_of(rank) != "T" for rank in first):
        assert time.monotonic() < until
    assert run_on_ranks(pid) == first
    assert os.getpid() not in first


def test_failure_is_raised_again_with_rank_and_traceback() -> None:
    before = run_on_ranks(pid)
    with pytest.raises(KeyError, match="weight") as caught:
        run_on_ranks(raise_on, 1, KeyError("weight"))
    assert "On rank 1 of 2:" in notes(caught.value)
    assert "in raise_on" in notes(caught.value)
    assert not set(before) & set(run_on_ranks(pid)), "a fresh pool: the old one was out of step"


def test_failure_of_all_ranks_that_cannot_travel() -> None:
    with pytest.raises(RankError, match="Unpicklable: firstsecond") as caught:
        run_on_ranks(raise_unpicklable)
    assert "in raise_unpicklable" in notes(caught.value)
    assert "failed too: tests.test_ranks.Unpicklable" in notes(caught.value)


def test_result_that_cannot_travel() -> None:
    with pytest.raises(Exception, match=r"return_a_lambda.<locals>.<lambda>"):
        run_on_ranks(return_a_lambda)


def test_hang_shows_where_it_stands_and_costs_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_on_ranks(pid)
    run_out(monkeypatch, tmp_path / "entered", 2)
    with pytest.raises(
        RankTimeout, match=r"tests.test_ranks.sleep_on: ranks \[0, 1\] of 2 did not return"
    ) as caught:
        run_on_ranks(sleep_on, 1, str(tmp_path / "entered"))
    assert "Rank 1 stood at:" in notes(caught.value)
    assert "in sleep_on" in notes(caught.value)
    assert "barrier" in notes(caught.value), "where rank 0 waits"
    assert not set(before) & set(run_on_ranks(pid))


def test_death_shows_the_signal_and_the_stack() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 of 2 died of signal SIGSEGV in tests.test_ranks.die_on"
    ) as caught:
        run_on_ranks(die_on, 0, int(signal.SIGSEGV))
    assert "in die_on" in notes(caught.value)


def test_patched_torch_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"left torch changed: UntypedStorage.resize_ is still"):
        run_on_ranks(leave_patched)


def test_function_must_be_importable() -> None:
    with pytest.raises(TypeError, match="put it at the top level"):
        run_on_ranks(lambda: None)


def mean_over_ranks(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "avg", dist.group.WORLD) + 1


def wait_for_each_other(file: str, times: int) -> int:
    """In its first `times` runs rank 0 waits in a replay, rank 1 for a message; the other one sends nothing."""
    step = fz.capture(mean_over_ranks)
    for _ in range(4):
        step(torch.ones(2))
    assert step.stats.replays
    with open(file, "a") as runs:
        runs.write("x")
    dist.barrier()
    with open(file) as runs:
        if len(runs.read()) <= 2 * times:
            step(torch.ones(2)) if dist.get_rank() == 0 else dist.recv(torch.ones(()), 0)
    return dist.get_rank()


def test_a_hang_inside_collectives_is_repeated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    run_out(monkeypatch, once, 2)
    with pytest.warns(HungCollectiveWarning, match="did not return within 120 s; repeated") as seen:
        assert run_on_ranks(wait_for_each_other, str(once), 1) == [0, 1]
    assert "in wait_for_each_other" in str(seen[0].message), "where the ranks stood"
    run_out(monkeypatch, twice, 2, 4)
    with pytest.raises(RankTimeout), pytest.warns(HungCollectiveWarning):
        run_on_ranks(wait_for_each_other, str(twice), 2)
