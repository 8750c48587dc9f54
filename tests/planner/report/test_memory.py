"""The report on a step's memory: on timelines made by hand, whose numbers are known, and on a real step's."""

from __future__ import annotations

import functools
import json
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.capture import Transformer
from functionalize import passes
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category
from functionalize.cost.machines.machine import MIB
from functionalize.errors import MemoryReportError, PlannedOutOfMemoryError
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.machines.constants import DeviceConstant, declared
from functionalize.planner.report.figures import (
    AFTER_THE_STEP,
    BEFORE_THE_STEP,
    Levels,
    allocated,
    place,
)
from functionalize.planner.report.text import Memory, short_line, signed
from functionalize.planner.timeline.program_memory import program_timeline
from tests.planner.timelines import Maker, step_of
from tests.steps import make_loss_step, make_step


def small(*, early: bool) -> Maker:
    """A weight, an activation that is saved, a temporary; early: whether that is freed before the backward."""
    found = Maker()
    found.make(1000, Category.SHARDED_PARAMETERS, "w", padding=200)
    found.op("aten.mm.default", "forward", "blocks.0")
    saved = found.make(3000, Category.SAVED_ACTIVATIONS, "mm")
    found.op("aten.relu.default", "forward", "blocks.0")
    passing = found.make(513, Category.TEMPORARIES, "relu")
    if early:
        found.free(passing)
    found.op("aten.mm.default", "backward", "blocks.1")
    grad = found.make(2000, Category.UNSHARDED_GRADIENTS, "mm_1")
    if not early:
        found.free(passing)
    found.free(saved)
    found.op("_fused_adamw_", "optimizer")
    found.free(grad)
    return found


def memory(**options: object) -> Memory:
    eager, program = (small(early=e).timeline(n) for e, n in ((False, "eager"), (True, "program")))
    return Memory(eager, program, **options)  # type: ignore[arg-type]


def test_the_peak_is_the_programs():
    both = memory()
    assert (both.peak, both.peak_of("eager").nbytes) == (6000, 6513)
    assert Memory(both.eager).peak == 6513
    assert both.timeline() is both.program
    assert both.timeline("eager") is both.eager


def test_levels_are_kept_apart():
    both = memory(constants=(DeviceConstant("context", 500 * MIB),))
    levels = both.levels("eager")
    assert levels == Levels(6513, 1024 + 3072 + 1024 + 2048, 2 * MIB, 500 * MIB)
    assert levels.device == 502 * MIB
    assert both.levels("program").allocated == 1024 + 3072 + 2048
    assert list(allocated(both.timeline("program")))[-1] == 1024


def test_a_limit_that_is_too_small():
    limited = Memory(step_of(2)[0], settings=Settings(limit=100 * MIB))
    with pytest.raises(PlannedOutOfMemoryError):
        limited.levels()


def test_breakdowns_add_up_to_the_peak():
    both = memory()
    assert both.by_module("eager") == {"blocks.0": 3513, "blocks.1": 2000, BEFORE_THE_STEP: 1000}
    assert both.by_op() == {"aten.mm.default": 5000, BEFORE_THE_STEP: 1000}
    assert both.by_phase() == {"forward": 3000, "backward": 2000, BEFORE_THE_STEP: 1000}
    assert both.by_line() == {"model.py:48": 5000, BEFORE_THE_STEP: 1000}
    assert both.by_category() == {
        Category.SHARDED_PARAMETERS: 800,
        Category.PADDING: 200,
        Category.SAVED_ACTIVATIONS: 3000,
        Category.UNSHARDED_GRADIENTS: 2000,
    }
    for timeline in step_of(3):
        found = Memory(timeline)
        for breakdown in (
            found.by_module,
            found.by_op,
            found.by_line,
            found.by_phase,
            found.by_category,
        ):
            assert sum(breakdown().values()) == timeline.peak
            if breakdown != found.by_category:
                assert list(breakdown().values()) == sorted(breakdown().values(), reverse=True)


def test_the_largest_of_the_peak():
    first, second, *rest = memory().top(3)
    assert (first.nbytes, first.name, first.op, first.module) == (
        3000,
        "mm",
        "aten.mm.default",
        "blocks.0",
    )
    assert (first.made, first.last_use) == ("0: aten.mm.default", "2: aten.mm.default")
    assert second.freed == "3: _fused_adamw_"
    assert (rest[0].made, rest[0].freed, rest[0].op) == (BEFORE_THE_STEP, AFTER_THE_STEP, "")
    assert memory().top(100, "eager")[-1].name == "relu"


def test_the_difference_is_explained():
    found = memory().difference()
    assert (found.eager, found.program) == (6513, 6000)
    first, *others = found.categories
    assert (first.category, first.nbytes) == (Category.TEMPORARIES, -513)
    assert {change.nbytes for change in others} == {0}
    assert [(g.name, g.nbytes) for g in found.only_eager] == [("relu", 513)]
    assert found.only_program == ()


def test_storages_of_a_kind_are_explained_together():
    eager, program = step_of(3)
    found = Memory(eager, program).difference()
    changes = sum(change.nbytes for change in found.categories)
    assert changes == program.peak - eager.peak
    (group,) = [g for g in found.only_eager if g.category is Category.TEMPORARIES]
    assert (group.members, group.name) == (2, "layers.*.mlp: tmp *")


def test_ops_that_there_are_not():
    timeline = memory().timeline()
    assert place(timeline, None) == place(timeline, 99) == AFTER_THE_STEP


def test_a_timeline_that_is_not_there():
    with pytest.raises(MemoryReportError) as error:
        Memory(memory().eager).difference()
    assert str(error.value) == (
        "no timeline `program` in this report, there is eager: capture the step with "
        "`fz.capture(step, memory=True)`, or give `program_timeline(program)`"
    )
    for ask in (lambda: Memory().peak, Memory().text, Memory().to_json):
        with pytest.raises(
            MemoryReportError, match="no timeline `program` in this report, there is none"
        ):
            ask()


def test_constants_are_declared():
    assert declared("cpu") == ()
    context, nccl, workspace = declared("h100", communicators=2)
    assert (context.nbytes, nccl.nbytes, workspace.nbytes) == (500 * MIB, 640 * MIB, 32 * MIB)
    assert "2" in nccl.name
    assert declared("a100")[2].nbytes == (4096 * 2 + 16 * 8) << 10
    with pytest.raises(MemoryReportError) as error:
        declared("abacus")
    assert_expected_inline(
        str(error.value),
        """no constants are known for the device `abacus`; there are 4090, a100, b200, cpu, h100, h200, l40s, mi300x""",
    )


# -- as text and as JSON ---------------------------------------------------------------------------


def test_the_report(expect):
    expect("report", memory(constants=declared("h100")).text())
    expect("one", Memory(memory().program).text())


def test_short_texts():
    assert (
        short_line("/home/me/fsdp/train.py:12, in step: f(x)") == "fsdp/train.py:12, in step: f(x)"
    )
    long = short_line(f"a.py:1, in f: {'x' * 200}")
    assert len(long) == 120
    assert long.endswith("...")
    assert [signed(n) for n in (1536, -1, 0)] == ["+1.50 KiB", "-1 B", "0 B"]


def test_json_has_it_all():
    both = memory(constants=declared("a100"))
    found = json.loads(json.dumps(both.to_json(k=2, timelines=True)))
    program = found["timelines"]["program"]
    assert program["levels"]["requested"] == 6000
    assert program["levels"]["device"] == both.levels().device
    assert program["peak"]["op"]["module"] == "blocks.1"
    assert [row["name"] for row in program["top"]] == ["mm", "mm_1"]
    assert sum(program["by_category"].values()) == 6000
    assert max(map(sum, zip(*program["stacked"].values(), strict=True))) == 6000
    assert found["difference"]["categories"]["temporaries"] == [513, 0]
    assert found["difference"]["only_eager"][0]["category"] == "temporaries"
    assert found["constants"][0]["name"] == "CUDA context"
    assert "stacked" not in both.to_json()["timelines"]["eager"]
    assert "difference" not in Memory(both.program).to_json()


# -- real steps -----------------------------------------------------------------------------------


@functools.cache
def trained() -> Memory:
    """A step as it is captured, in the place of eager's, and through the default pipeline.

    Where no pass has run, one group of parameters is written in place, and new ones are made of the other.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    groups = [{"params": part.parameters()} for part in (model[0], model[2])]
    optimizer = torch.optim.AdamW(groups, fused=True)

    step = fz.capture(make_step(model, optimizer))

    while not step.stats.replays:
        step(torch.randn(4, 32))
    after = passes.run(step.program, "default")
    return Memory(program_timeline(step.program), program_timeline(after))


def test_a_real_step():
    found = trained()
    difference = found.difference()
    size = sum(p.nbytes for p in nn.Linear(64, 32).parameters())
    by_category = {c.category: c.nbytes for c in difference.categories}
    assert by_category[Category.SHARDED_PARAMETERS] == -size  # no new ones are made beside them
    assert by_category[Category.OPTIMIZER_STATE] <= -2 * size
    assert difference.program < difference.eager
    (line,) = (line for line in found.by_line("eager") if line.endswith("optimizer.step()"))
    assert "steps.py" in line
    assert "optimizer.step()" in found.text()
    assert Category.UNKNOWN not in found.by_category("eager")


def both_lifetimes(pipeline: str) -> Memory:
    """What is recorded of an FSDP2 step on one of three ranks, whose shards are padded."""
    with fake_process_group(1, 3):
        torch.manual_seed(0)
        model = Transformer(2, width=16)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        step = fz.capture(make_loss_step(model, optimizer), memory=True, passes=pipeline)

        while not step.stats.replays:
            step(torch.randint(0, 256, (2, 8)))
        return step.memory


def test_eager_and_program_make_the_same_of_an_fsdp2_step():
    """Each category is told in two ways that know nothing of one another, and comes out the same."""
    found = both_lifetimes("default")
    sizes: dict[str, Counter[Category]] = {}
    for name, timeline in found.timelines.items():
        sizes[name] = Counter()
        for each in timeline.allocations:
            sizes[name][each.category] += each.nbytes - each.padding
            sizes[name][Category.PADDING] += each.padding
    eager, program = sizes["eager"], sizes["program"]
    same = (
        Category.SHARDED_PARAMETERS,
        Category.UNSHARDED_PARAMETERS,
        Category.UNSHARDED_GRADIENTS,
        Category.SHARDED_GRADIENTS,
        Category.REDUCE_SCATTER_BUFFERS,
        Category.SAVED_ACTIVATIONS,
        Category.TEMPORARIES,
        Category.INPUTS,
        Category.PADDING,
    )
    assert {c: (eager[c], program[c]) for c in same if eager[c] != program[c]} == {}
    assert all(eager[c] for c in same)
    assert eager[Category.UNKNOWN] == program[Category.UNKNOWN] == 0
    # eager gathers in place: what one rank of three sends is a part of what it receives
    gathered = {
        name: sum(a.nbytes for a in t.allocations if a.category is Category.ALL_GATHER_BUFFERS)
        for name, t in found.timelines.items()
    }
    assert gathered["program"] * 3 == gathered["eager"] * 4
    assert found.peak < found.timeline("eager").peak
    assert any("blocks.0" in module for module in found.by_module())
    assert "blocks.0" in found.text()
