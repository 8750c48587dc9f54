"""A replay on gloo has one collective of a process group in flight at a time; see `program/gloo_waits.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize.program.gloo_waits import added_waits
from functionalize.run.boxed import boxed
from tests.ranks import run_on_ranks

OPS = torch.ops._c10d_functional
WAIT = OPS.wait_tensor.default


class Calls(TorchDispatchMode):
    """The functional collectives and waits that run, in order; how many were in flight at most."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.in_flight: set[int] = set()
        self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op._schema.name.split("::")[1]
        if op.namespace == "_c10d_functional" and not name.startswith("_"):
            self.seen.append(name)
            tensors = result if isinstance(result, list) else [result]
            addresses = {t.data_ptr() for t in tensors}
            if op is WAIT:
                self.in_flight -= addresses
            else:
                self.in_flight |= {min(addresses)}
            self.most = max(self.most, len(self.in_flight))
        return result


def overlapped(x: Tensor, group: str, other: str) -> tuple[Tensor, ...]:
    """Three collectives that are all waited for at the end."""
    gathered = OPS.all_gather_into_tensor.default(x, 2, group)
    summed = OPS.all_reduce.default(x, "sum", group)
    scattered = OPS.reduce_scatter_tensor.default(x, "sum", 2, other)
    return WAIT(scattered), WAIT(gathered), WAIT(summed)


def coalesced(x: Tensor, group: str, other: str) -> tuple[Tensor, ...]:
    parts = OPS.all_gather_into_tensor_coalesced.default([x, x + 1], 2, group)
    summed = OPS.all_reduce.default(x, "sum", other)
    return WAIT(summed), WAIT(parts[0]), WAIT(parts[1])


def names(separate: bool) -> tuple[str, str]:
    own = dist.new_group([0, 1])
    world = dist.group.WORLD
    assert world is not None
    return world.group_name, own.group_name if separate else world.group_name


def replays(which: str, separate: bool, how: str) -> tuple[list[str], int, bool]:
    fn = {"overlapped": overlapped, "coalesced": coalesced}[which]
    group, other = names(separate)
    x = torch.arange(8.0) + dist.get_rank()
    program = fz.functions.trace(fn, x, group, other)
    program.describe()
    # The waits of the graph stand at its end, as passes that look for overlap put them.
    end = program.graph.output_node()
    for wait in program.graph.find_nodes(op="call_function", target=WAIT):
        end.prepend(wait)
    program.runner = {"boxed": boxed, "interpreter": None}[how]
    program._run = program._module = None
    expected = fn(x, group, other)
    with Calls() as calls:
        actual = program(x, group, other)
    equal = all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    return calls.seen, calls.most, equal


@pytest.mark.parametrize("how", ["boxed", "interpreter"])
def test_the_next_collective_of_a_group_starts_when_the_one_before_has_ended(how: str) -> None:
    wait = "wait_tensor"
    for seen, most, equal in run_on_ranks(replays, "overlapped", False, how):
        assert equal and most == 1
        starts = ["all_gather_into_tensor", wait, "all_reduce", wait, "reduce_scatter_tensor"]
        assert seen[:5] == starts


@pytest.mark.parametrize("how", ["boxed", "interpreter"])
def test_other_groups_still_overlap(how: str) -> None:
    for seen, most, equal in run_on_ranks(replays, "overlapped", True, how):
        assert equal and most == 2
        assert seen[:4] == [
            *("all_gather_into_tensor", "wait_tensor"),
            *("all_reduce", "reduce_scatter_tensor"),
        ]


@pytest.mark.parametrize("how", ["boxed", "interpreter"])
def test_every_part_of_a_coalesced_collective_is_waited_for(how: str) -> None:
    for seen, most, equal in run_on_ranks(replays, "coalesced", False, how):
        assert equal and most == 1
        parts = ["wait_tensor", "wait_tensor"]
        assert seen[:4] == ["all_gather_into_tensor_coalesced", *parts, "all_reduce"]


def test_a_backend_that_queues_its_collectives_gets_no_wait() -> None:
    with fz.world(size=2):
        world = dist.group.WORLD
        assert world is not None
        graph = fx.Graph()
        x = graph.placeholder("x")
        gathered = graph.call_function(OPS.all_gather_into_tensor.default, (x, 2, world.group_name))
        summed = graph.call_function(OPS.all_reduce.default, (x, "sum", world.group_name))
        graph.output((gathered, summed))
        assert added_waits(graph.nodes) == {}


def step_in_flight() -> int:
    """The most collectives of a captured FSDP2 step that are in flight at once, in a replay."""
    from tests.fsdp.sharded import build_mlp
    from tests.fsdp.steps import pairs, plain

    step = fz.capture(plain(*build_mlp()))
    *first, last = pairs(4)
    for each in first:
        step(*each)
    before = step.stats.replays
    with Calls() as calls:
        step(*last)
    assert step.stats.replays == before + 1
    return calls.most


def test_a_replayed_fsdp_step_does_not_overlap_collectives_of_its_group() -> None:
    assert run_on_ranks(step_in_flight) == [1, 1]


def left_running(how: str) -> tuple[list[str], int]:
    """The calls of a replay whose last collective the function never waits for."""
    group, _ = names(False)

    def fn(x: Tensor) -> Tensor:
        OPS.all_reduce.default(x, "sum", group)
        return x + 1

    program = fz.functions.trace(fn, torch.ones(4))
    program.runner = {"boxed": boxed, "interpreter": None}[how]
    for wait in program.graph.find_nodes(op="call_function", target=WAIT):
        program.graph.erase_node(wait)
    program._run = program._module = None
    with Calls() as calls:
        program(torch.ones(4))
    return calls.seen, len(calls.in_flight)


@pytest.mark.parametrize("how", ["boxed", "interpreter"])
def test_no_collective_runs_on_when_the_program_has_ended(how: str) -> None:
    assert run_on_ranks(left_running, how) == [(["all_reduce", "wait_tensor"], 0)] * 2
