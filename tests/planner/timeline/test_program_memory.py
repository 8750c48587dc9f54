"""The program's timeline: on small programs, against the allocator, and what FSDP2's storages are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from benchmarks.allocations import count_everything, counted
from benchmarks.capture import VOCABULARY, Transformer
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category
from functionalize.cost.liveness import Liveness
from functionalize.planner.timeline import program_memory
from functionalize.planner.timeline.program_memory import EPILOGUE, program_timeline, user_line
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Timeline
from functionalize.program.program import Program
from tests.fsdp.features import FEATURES
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step, make_step

ROW = 64 * 64 * 4  # bytes of the tensors below


def x() -> Tensor:
    return torch.arange(64 * 64, dtype=torch.float32).view(64, 64)


def timeline_of(fn: Callable[..., Any], *args: Tensor) -> Timeline:
    return program_timeline(fz.functions.trace(fn, *args))


def made(timeline: Timeline) -> list[Allocation]:
    """What the replay makes."""
    return [a for a in timeline.allocations if a.made != BEFORE]


def name_of(timeline: Timeline, op: int | None) -> str:
    return "" if op is None else timeline.ops[op].name


# -- small programs --------------------------------------------------------------------------------


def test_inputs_are_live_throughout_and_values_to_their_last_use():
    def f(a):
        b = a + 1
        c = b * 2
        d = c.sum()
        return d + b.sum()

    timeline = timeline_of(f, x())
    (given,) = [a for a in timeline.allocations if a.made == BEFORE]
    assert (given.name, given.nbytes, given.freed) == ("a", ROW, None)
    assert given.category is Category.INPUTS
    assert name_of(timeline, given.last_use) == "aten.add.Tensor"
    b, c, d = made(timeline)[:3]
    assert (b.name, b.shape, name_of(timeline, b.freed)) == (
        "add",
        "float32[64, 64]",
        "aten.sum.default",
    )
    assert name_of(timeline, c.freed) == name_of(timeline, c.last_use) == "aten.sum.default"
    assert name_of(timeline, d.freed) == "aten.add.Tensor"
    assert (timeline.peak, timeline.peak_op) == (3 * ROW + 4, timeline.ops[c.freed])


def test_results_live_on_and_views_make_nothing():
    timeline = timeline_of(lambda a: ((a + 1).t()[3], a.view(-1)), x())
    (result,) = made(timeline)
    assert (result.nbytes, result.freed) == (ROW, None)
    assert timeline.bytes[-1] == 2 * ROW


def test_inputs_that_share_a_storage_count_once():
    a = x()
    timeline = timeline_of(lambda a, b: a.sum() + b.sum(), a, a[3:])
    assert [(e.name, e.nbytes) for e in timeline.allocations if e.made == BEFORE] == [("a", ROW)]


def test_what_the_epilogue_copies_lives_until_then():
    def f(a):
        a.mul_(2)

    timeline = timeline_of(f, x())
    (new,) = made(timeline)
    assert new.name == "a (new)"
    assert name_of(timeline, new.last_use) == name_of(timeline, new.freed) == EPILOGUE
    assert timeline.bytes[-1] == ROW


@pytest.mark.parametrize(
    ("before", "after"), [(0, ROW), (ROW, 0), (ROW, ROW // 2), (ROW // 2, ROW)]
)
def test_the_epilogue_makes_and_frees_storages(before, after):
    def f(a, b):
        fz.functions.resize_storage_bytes_(a, after)
        if before == 0:
            a.copy_(b)
        return b.sum()

    a = x()
    a.untyped_storage().resize_(before)
    timeline = timeline_of(f, a, x())
    mine = [e for e in timeline.allocations if e.name == "a"]
    assert [(e.nbytes, e.made == BEFORE) for e in mine] == [
        (n, n == before) for n in (before, after) if n
    ]
    ends = [name_of(timeline, e.freed) for e in mine]
    assert ends == [EPILOGUE] * (before > 0) + [""] * (after > 0)
    assert timeline.bytes[-1] == after + ROW + 4
    if before and after:  # the old bytes are copied
        assert timeline.peak >= before + after + ROW


def test_an_input_that_moves_leaves_its_storage():
    def f(a, b):
        a.set_(b * 2)

    timeline = timeline_of(f, x(), x() + 1)
    old, new = (e for e in timeline.allocations if e.name in ("a", "mul"))
    assert name_of(timeline, old.freed) == EPILOGUE
    assert new.freed is None
    assert timeline.bytes[-1] == 2 * ROW


def test_what_the_caller_knows_better():
    program = fz.functions.trace(lambda a: a + 1, x())
    timeline = program_timeline(program, {"a": Category.BUFFERS})
    assert timeline.allocations[0].category is Category.BUFFERS


def test_constants_are_held_by_the_program():
    table = torch.ones(16)
    timeline = timeline_of(lambda a: a[0, :16] + table, x())
    assert Category.BUFFERS in [e.category for e in timeline.allocations if e.nbytes == 64]


def test_scratch_is_there_while_an_op_runs(monkeypatch):
    scratch = {"add": 100}
    monkeypatch.setattr(program_memory, "scratch_of", lambda node, _: scratch.get(node.name, 0))
    program = fz.functions.trace(lambda a: (a + 1).sum(), x())
    plain = program_timeline(program)
    timeline = program_timeline(program, target="cuda")
    (passing,) = [a for a in timeline.allocations if a.category is Category.SCRATCH]
    assert (passing.nbytes, passing.made, passing.freed) == (100, 1, 1)
    assert timeline.peak == plain.peak + 96  # the sum is not made yet
    assert timeline.bytes[-1] == plain.bytes[-1]


def test_ops_are_made_when_they_are_asked_for():
    program = fz.functions.trace(lambda a: (a + 1).sum(), x())
    ops = program_timeline(program).ops
    assert len(ops) == len(program.graph.nodes) + 1
    assert ops[-1].name == EPILOGUE
    assert [op.name for op in ops[:3]] == ["placeholder", "aten.add.Tensor", "aten.sum.default"]
    assert ops[1].line.startswith(f"{__file__}:")
    assert ops[1].line.endswith("program = fz.functions.trace(lambda a: (a + 1).sum(), x())")
    with pytest.raises(IndexError):
        ops[len(ops)]


def test_the_line_is_the_innermost():
    trace = '  File "a.py", line 1, in f\n    g(x)\n  File "b.py", line 22, in g\n    x.sin()\n'
    assert user_line(trace) == "b.py:22, in g: x.sin()"
    assert user_line("") == ""


# -- steps of one process --------------------------------------------------------------------------


def captured(step: Callable[..., Any], *args: Any, passes: str = "") -> Program:
    found = fz.capture(step, passes=passes)
    while not found.stats.replays:
        found(*args)
    return found.program


def totals(timeline: Timeline) -> Counter[Category]:
    """The bytes of everything that is made or given, by category."""
    found: Counter[Category] = Counter()
    for each in timeline.allocations:
        found[each.category] += each.nbytes
    return found


class Dropped(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(16, 64), nn.Linear(64, 16), again

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.dropout(torch.relu(self.up(x)), 0.5, True))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x))


def single(again: bool, passes: str = "") -> tuple[Program, Timeline]:
    torch.manual_seed(0)
    model = nn.Sequential(Dropped(again), nn.BatchNorm1d(16), Dropped(again))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    step = make_step(model, optimizer)

    program = captured(step, torch.randn(8, 16), passes=passes)
    return program, program_timeline(program)


def test_a_step_without_fsdp():
    _, timeline = single(again=False)
    found = totals(timeline)
    size = sum(
        p.nbytes
        for p in nn.Sequential(Dropped(False), nn.BatchNorm1d(16), Dropped(False)).parameters()
    )
    assert found[Category.UNKNOWN] == 0
    assert found[Category.SHARDED_PARAMETERS] == size  # written in place
    assert found[Category.SHARDED_GRADIENTS] == size
    assert found[Category.BUFFERS] == 2 * (2 * 16 * 4 + 8)
    assert found[Category.INPUTS] == 8 * 16 * 4
    assert found[Category.RNG_STATE] == 5056
    assert found[Category.SAVED_ACTIVATIONS] > 2 * 8 * 64 * 4
    assert found[Category.RECOMPUTED] == found[Category.UNSHARDED_PARAMETERS] == 0


def test_checkpointing_saves_less_and_computes_again():
    plain, again = totals(single(again=False)[1]), totals(single(again=True)[1])
    assert again[Category.RECOMPUTED] >= 2 * 8 * 64 * 4
    assert again[Category.SAVED_ACTIVATIONS] < plain[Category.SAVED_ACTIVATIONS] / 2
    assert again[Category.RNG_STATE] > plain[Category.RNG_STATE]


def test_what_is_written_in_place_makes_nothing():
    program, timeline = single(again=False, passes="default")
    assert program.stage == "INPLACE"
    state = (Category.SHARDED_PARAMETERS, Category.OPTIMIZER_STATE)
    assert not [a for a in made(timeline) if a.category in state]


@pytest.mark.parametrize("passes", ["", "default"])
def test_the_whole_timeline_is_that_of_liveness(passes):
    program, timeline = single(again=True, passes=passes)
    live = Liveness(program.graph)
    given = sum(a.nbytes for a in timeline.allocations if a.made == BEFORE)
    most = dict.fromkeys(range(len(live.nodes)), 0)
    for event, nbytes in zip(timeline.events, timeline.bytes, strict=True):
        if event.made and 0 <= event.op < len(live.nodes):
            most[event.op] = nbytes - given
    assert len([place for place, nbytes in most.items() if nbytes]) > 40
    assert {p: n for p, n in most.items() if n and n != live.timeline[p]} == {}


# -- against the allocator -------------------------------------------------------------------------


def beyond(passes: str, times: int = 1, sharded: bool = True) -> list[int]:
    """Bytes by which the allocator's peak is above that of the timeline, for some replays of a step."""
    torch.manual_seed(0)
    model = Transformer(2)
    for each in (*model.blocks, model) if sharded else ():
        fully_shard(each)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, VOCABULARY, (2, 16))

    step = fz.capture(make_loss_step(model, optimizer), passes=passes)

    count_everything()
    try:
        while step.stats.replays < 2:
            step(tokens)
        timeline = program_timeline(step.program)
        by_replay = ("generator", "optimizer_lr_0")  # a replay makes these itself
        given = [a for a in timeline.allocations if a.made == BEFORE and a.name not in by_replay]
        found = []
        for _ in range(times):
            with counted() as count:
                step(tokens)
            found.append(count.peak - (timeline.peak - sum(a.nbytes for a in given)))
    finally:
        count_everything(False)
    return found


@pytest.mark.parametrize("passes", ["", "default"])
def test_the_peak_of_a_step_is_what_the_allocator_sees(passes):
    assert beyond(passes, sharded=False) == [0]


def test_the_peak_of_an_fsdp2_step_is_what_the_allocator_sees():
    """Of the pipeline that waits where a collective starts: a fake group holds nothing until the wait."""
    with fake_process_group(0, 2):
        assert beyond("default") == [0]


def test_the_peak_on_gloo_is_what_the_allocator_sees():
    """And what gloo allocates for the gradients of a layer; its threads free that when they come to it."""
    gradients = sum(p.nbytes for p in Transformer(2).blocks[0].parameters())
    for found in run_on_ranks(beyond, "", 5):
        assert all(0 <= nbytes <= 2 * gradients for nbytes in found)


# -- what FSDP2's storages are called --------------------------------------------------------------


def of_feature(name: str) -> tuple[dict[str, int], dict[str, int], list[tuple[str, str]]]:
    """(bytes by category, padding by category, (name, category) of every allocation)."""
    row = FEATURES[name]
    step = fz.capture(row.make_step(*row.build()))
    for batch in row.batches():
        step(*batch)
    assert step.stats.replays
    timeline = program_timeline(step.program)
    padding: Counter[str] = Counter()
    for each in timeline.allocations:
        padding[each.category.value] += each.padding
    names = [(a.name, a.category.value) for a in timeline.allocations]
    return {c.value: n for c, n in totals(timeline).items()}, dict(padding), names


OF_FSDP2 = {
    "all-gather buffers",
    "unsharded parameters",
    "unsharded gradients",
    "reduce-scatter buffers",
    "sharded gradients",
    "sharded parameters",
    "optimizer state",
    "saved activations",
    "temporaries",
    "inputs",
}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("blocks_and_root", set()),
        ("bf16", set()),
        ("no_sync", set()),
        ("clip_grad_norm", set()),
        ("batch_norm", {"buffers"}),
        ("reduce_by_all_to_all", set()),
        ("gathered_in_int8", set()),
        ("uneven_shards", set()),
        ("tensor_parallel", set()),
        ("sequence_parallel", set()),
    ],
)
def test_every_storage_of_a_feature_has_a_category(name, others):
    for sizes, _, _ in run_on_ranks(of_feature, name, world=FEATURES[name].world):
        assert set(sizes) == OF_FSDP2 | others


def test_gradients_and_parameters_are_in_the_buffers_of_their_collectives():
    """On both ranks: what is packed, less its padding, are the gradients; the second has a padded shard."""
    for rank, (sizes, padding, names) in enumerate(run_on_ranks(of_feature, "blocks_and_root")):
        packs = sizes["reduce-scatter buffers"] - padding["reduce-scatter buffers"]
        assert packs == sizes["unsharded gradients"]
        gathered = sizes["all-gather buffers"] * 2 // 3  # as many again, and a half, are sent
        assert gathered - padding["unsharded parameters"] == (
            sizes["unsharded parameters"] - padding["unsharded parameters"]
        )
        assert padding["unsharded parameters"] == padding["reduce-scatter buffers"] == 36
        # Of the weight and the bias of the head, old and new: a part of a padded shard is not written in place.
        assert padding["sharded parameters"] == 72 * rank
        assert ("model_blocks_0_a_weight", "unsharded parameters") in names
        assert ("optimizer_0_0_exp_avg", "optimizer state") in names
        assert (("optimizer_0_0_exp_avg (new)", "optimizer state") in names) == (rank == 1)


def test_a_replicated_parameter_is_a_copy():
    for sizes, _, _ in run_on_ranks(of_feature, "replicate"):
        assert sizes["unsharded parameters"] == sizes["unsharded gradients"]
        assert "unknown" not in sizes
