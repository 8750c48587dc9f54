"""What a step sends: as eager issues it, and as computed by hand from the sizes of parameters."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from expecttest import assert_expected_inline

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.planner.time.communication import (
    Groups,
    RankGroup,
    Traffic,
    communication,
    members_of,
)
from functionalize.planner.time.compute import summed
from functionalize.program.collective_order import sequences
from tests.planner.captured import Recorded, recorded
from tests.planner.nodes import node_of

STEPS = ["transformer", "hsdp", "checkpointed", "llama"]
OPS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}
functional = torch.ops._c10d_functional


def step_of(name: str) -> Recorded:
    if name == "llama":
        pytest.importorskip("transformers")
    return recorded(name)


@pytest.mark.parametrize("name", STEPS)
def test_it_is_what_eager_issues(name: str) -> None:
    step = step_of(name)
    issued: dict[tuple[str, str], tuple[int, int]] = {}
    for op, group, nbytes in step.issued:
        count, total = issued.get((OPS[op], group), (0, 0))
        issued[OPS[op], group] = count + 1, total + nbytes
    rows = summed(communication(step.program), "kind", "group")
    assert {(r.kind, r.group): (r.count, r.nbytes_in) for r in rows} == issued


@pytest.mark.parametrize("name", STEPS)
def test_every_collective_of_the_program_is_counted(name: str) -> None:
    program = step_of(name).program
    rows = summed(communication(program), "group")
    assert {r.group: r.count for r in rows} == {
        group: len(texts) for group, texts in sequences(program.graph).items()
    }


def padded(step: Recorded, unit: int) -> int:
    """Elements of one rank's part of the parameters of a wrapped module: rows are shared, rounded up."""
    shapes = step.units[unit]
    return sum(math.ceil(shape[0] / step.world) * math.prod(shape[1:]) for shape in shapes)


@pytest.mark.parametrize("name, param, reduce", [("transformer", 4, 4), ("llama", 2, 4)])
def test_bytes_by_hand(name: str, param: int, reduce: int) -> None:
    step = step_of(name)
    shards = [padded(step, unit) for unit in range(len(step.units))]
    whole, root = sum(shards), shards[0]
    summed_up = summed(communication(step.program, step.groups), "kind", "group", "ranks", "phase")
    rows = {(r.kind, r.phase): r for r in summed_up}
    assert len(rows) == 3

    def row(kind: str, phase: str, n: int, given: int, got: int, sent: int) -> Traffic:
        return Traffic(kind, "0", 4, "", phase, n, given, got, sent)

    found = {key: summed([r])[0] for key, r in rows.items()}
    n = len(shards)
    forward = row("all-gather", "forward", n, *(whole * param * k for k in (1, 4, 3)))
    again = (whole - root) * param  # the root keeps its parameters until its backward
    backward = row("all-gather", "backward", n - 1, *(again * k for k in (1, 4, 3)))
    reduced = row("reduce-scatter", "backward", n, *(whole * reduce * k for k in (4, 1, 3)))
    assert found == {
        ("all-gather", "forward"): forward,
        ("all-gather", "backward"): backward,
        ("reduce-scatter", "backward"): reduced,
    }
    if name == "llama":  # 65 rows on four ranks, 32 columns: 3 of 68 rows are padding
        exact = sum(math.prod(shape) for unit in step.units for shape in unit)
        assert whole * 4 - exact == len(step.units[1:]) * 2 * 3 * 32


def test_two_dimensions_of_a_mesh() -> None:
    step = recorded("hsdp")
    rows = summed(communication(step.program, step.groups), "kind", "group", "phase")
    groups = {name: ranks for name, ranks in step.groups.items() if len(ranks) < 8}
    (shard,) = (name for name, ranks in groups.items() if ranks == (0, 1, 2, 3))
    (replicate,) = (name for name, ranks in groups.items() if ranks == (0, 4))
    sizes = [padded(step, unit) for unit in range(len(step.units))]
    reduced = next(r for r in rows if r.kind == "all-reduce" and r.group == replicate)
    assert (reduced.phase, reduced.ranks, reduced.count) == ("backward", 2, len(sizes))
    assert (reduced.nbytes_in, reduced.sent) == (4 * sum(sizes), 4 * sum(sizes))  # 2 n / 2
    scattered = next(r for r in rows if r.kind == "reduce-scatter")
    assert (scattered.group, scattered.ranks) == (shard, 4)
    norms = [r for r in rows if r.phase == "optimizer"]  # of all parameters, in one message
    count = sum(map(len, step.units))
    assert [(r.kind, r.group, r.nbytes_in) for r in norms] == [("all-reduce", shard, 4 * count)]


def test_modules_have_rows() -> None:
    program = recorded("transformer").program.copy()
    for node in program.graph.nodes:
        node.meta["module"] = "blocks.0" if node.name.endswith("_1") else "blocks.1"
    found = summed(communication(program), "module")
    assert {row.module for row in found} == {"blocks.0", "blocks.1"}
    assert sum(row.count for row in found) == 11
    assert json.loads(json.dumps([asdict(row) for row in found]))[0]["kind"] in ("", "all-gather")


# -- every kind ------------------------------------------------------------------------------------


def sent(target: object, *args: object, ranks: int | None = None) -> tuple[str, int, int, int]:
    """(kind, bytes in, bytes out, bytes that each of `ranks` sends)"""
    node = node_of(target, *args)
    program = fz.functions.trace(lambda x: x + 1, torch.ones(1))
    program.describe()
    program.graph = node.graph
    groups = {"0": range(ranks)} if ranks else None
    (row,) = communication(program, groups)
    return row.kind, row.nbytes_in, row.nbytes_out, row.sent


def test_what_a_ring_sends() -> None:
    x = torch.empty(12)  # 48 bytes
    gather, scatter = functional.all_gather_into_tensor, functional.reduce_scatter_tensor
    assert sent(gather.default, x, 4, "0") == ("all-gather", 48, 192, 144)
    assert sent(scatter.default, x, "sum", 4, "0") == ("reduce-scatter", 48, 12, 36)
    assert sent(functional.all_reduce.default, x, "sum", "0", ranks=4) == ("all-reduce", 48, 48, 72)
    assert sent(functional.all_reduce.default, x, "sum", "0") == ("all-reduce", 48, 48, 96)
    assert sent(functional.all_reduce.default, x, "sum", "0", ranks=1) == ("all-reduce", 48, 48, 0)
    splits = [3, 3, 3, 3]
    assert sent(functional.all_to_all_single.default, x, splits, splits, "0") == (
        *("all-to-all", 48, 48),
        36,
    )
    assert sent(functional.broadcast.default, x, 0, "0", ranks=4) == ("broadcast", 48, 48, 48)


def test_a_list_is_one_collective() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        found = functional.all_gather_into_tensor_coalesced([a, b], 2, "0")
        return [functional.wait_tensor(t) + 1 for t in found]

    (row,) = communication(fz.functions.trace(fn, torch.ones(3), torch.ones(5)))
    assert (row.kind, row.count, row.nbytes_in, row.nbytes_out, row.sent) == (
        *("all-gather", 1),
        *(32, 64, 32),
    )


# -- groups ----------------------------------------------------------------------------------------


def test_groups_are_found_where_they_are_known() -> None:
    graph = node_of(functional.all_gather_into_tensor.default, torch.empty(2), 4, "7").graph
    assert Groups(graph)["7"] == RankGroup("7", 4)
    assert Groups(graph, {"7": (0, 2, 4, 6)})["7"] == RankGroup("7", 4, (0, 2, 4, 6))
    assert Groups(graph, {"7": (0, 1)})["7"] == RankGroup("7", 4)  # another group of that name
    assert Groups(graph)["8"] == RankGroup("8", 0)


def test_a_group_lies_on_nodes() -> None:
    assert RankGroup("0", 16).on_a_node(None) == 16
    assert RankGroup("0", 16).on_a_node(8) == 8 and RankGroup("0", 4).on_a_node(8) == 4
    assert RankGroup("0", 4, (0, 8, 16, 24)).on_a_node(8) == 1
    assert RankGroup("0", 4, (0, 1, 2, 8)).on_a_node(8) == 1
    assert RankGroup("0", 4, (0, 4, 8, 12)).on_a_node(8) == 2


def test_process_groups_of_this_process_are_asked() -> None:
    graph = node_of(functional.all_reduce.default, torch.empty(2), "sum", "0").graph
    assert Groups(graph)["0"].size == 0
    with fake_process_group(1, 3):
        assert Groups(graph)["0"] == RankGroup("0", 3, (0, 1, 2))
        assert Groups(graph)["nobody's"].size == 0


def test_members_outlive_their_world() -> None:
    step = recorded("hsdp")
    names = {row.group for row in communication(step.program)}
    assert step.members == {name: step.groups[name] for name in names}
    assert sorted(step.members.values()) == [(0, 1, 2, 3), (0, 4)]
    assert members_of(step.program) == {}  # the world is gone
    assert {row.ranks for row in communication(step.program, step.members)} == {2, 4}


def test_rows_as_text() -> None:
    rows = summed(communication(recorded("transformer").program), "kind", "phase")
    text = "\n".join(f"{r.kind} {r.phase} {r.count} {r.sent}" for r in rows)
    assert_expected_inline(
        text,
        """\
all-gather forward 4 54864
all-gather backward 3 29520
reduce-scatter backward 4 54864""",
    )


def test_messages_between_two_ranks() -> None:
    """A send counts the bytes of its tensor, a receive none; either takes its bytes over the link."""

    def step(x: torch.Tensor) -> torch.Tensor:
        theirs = torch.empty_like(x)
        sent = torch.distributed.isend(x * 2, 1)
        torch.distributed.recv(theirs, 1)
        sent.wait()
        return theirs + 1

    with fake_process_group(0, 2):
        program = fz.functions.trace(step, torch.ones(64))
        found = communication(program)
    assert [(r.kind, r.count, r.nbytes_in, r.nbytes_out, r.sent) for r in found] == [
        ("send", 1, 256, 0, 256),
        ("receive", 1, 0, 256, 0),
    ]
