"""Plans of real `fully_shard` steps: figures that are those of the step itself, and what points share."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PlanError, WorldError
from functionalize.planner.lifetimes import step_memory
from functionalize.planner.sweep import summary
from functionalize.planner.timeline.timeline import EAGER
from functionalize.program import executable
from tests.planner.sweep.blocks import WIDTH, Block
from tests.ranks import run_on_ranks
from tests.steps import train


def build(layers: int = 2):
    model = nn.Sequential(*(Block() for _ in range(layers)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch: int = 4) -> Tensor:
    return torch.randn(batch, WIDTH)


def planned(**given):
    return fz.plan(build, train, inputs=inputs, target="cpu", **given)


def on_real_ranks(layers: int, batch: int) -> tuple[int, int]:
    """The peaks of the step on this rank: eager's and the program's."""
    built, batches = build(layers), inputs(batch)
    captured = fz.capture(train, memory=True)
    while captured.memory is None:
        captured(*built, batches)
    return captured.memory.eager.peak, captured.memory.program.peak


def test_the_peak_is_that_of_real_ranks():
    (real, *_) = run_on_ranks(on_real_ranks, 3, 4)
    (plan,) = planned(world=2, layers=3).plans
    assert (plan.figures.row["peak"], plan.figures.program_peak) == real


def test_a_grid_in_order():
    sweep = planned(grid={"world": [2, 8], "batch": [4, 1024]})
    points = [(p.point["world"], p.point["batch"]) for p in sweep.plans]
    assert points == [(2, 4), (2, 1024), (8, 4), (8, 1024)]
    rows = sweep.rows()
    assert rows[1]["peak"] > rows[0]["peak"] > rows[2]["peak"]
    assert all(row["device"] >= row["reserved"] >= row["allocated"] >= row["peak"] for row in rows)
    parameters = 2 * (8 * WIDTH**2 + 5 * WIDTH) * 4
    assert rows[2]["sent"] == pytest.approx(3 * parameters * 7 / 8, rel=0.4)  # gathered, reduced
    assert not dist.is_initialized()


def test_points_share_the_model_where_they_can():
    made = []

    def building(layers: int = 2):
        made.append(layers)
        return build(layers)

    fz.plan(
        building,
        train,
        inputs=inputs,
        target="cpu",
        world=2,
        grid={"batch": [1, 2, 3], "layers": [1, 2]},
    )
    assert sorted(made) == [1, 2]


def test_a_point_does_not_depend_on_those_before_it():
    grid = {"batch": [512, 4], "world": [8, 2], "checkpoint": [True, False]}
    together = planned(grid=grid)
    alone = planned(world=2, batch=4, checkpoint=False).rows()[0]
    again = together.rows()[-1]
    assert {k: v for k, v in again.items() if k != "planned in"} == {
        k: v for k, v in alone.items() if k != "planned in"
    }


def test_resharding_and_checkpointing_of_a_model_that_knows_neither():
    grid = {"reshard": [True, False], "checkpoint": [False, True]}
    rows = planned(world=2, batch=4096, layers=4, grid=grid).rows()
    resharded, checkpointed, kept, _ = rows
    assert kept["collectives"] < resharded["collectives"]
    assert checkpointed["peak"] < resharded["peak"]
    assert checkpointed["flops"] > resharded["flops"]


def test_every_block_of_a_root_that_is_not_wrapped_is_changed():
    def blocks(layers: int = 3):
        model = nn.Sequential(*(Block() for _ in range(layers)))
        for block in model:
            fully_shard(block)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    plain, again = fz.plan(
        blocks, train, inputs=inputs, target="cpu", world=2, grid={"checkpoint": [False, True]}
    ).plans
    modules = {
        n.meta.get("module")
        for n in again.figures.program.graph.nodes
        if n.meta.get("phase") == "recompute"
    }
    assert {f"model.{i}.a" for i in range(3)} <= modules
    assert again.figures.row["flops"] > plain.figures.row["flops"]


def test_passes_change_the_program_and_not_eager():
    plain, optimised = planned(world=2, batch=256, grid={"passes": ["", "default"]}).rows()
    assert optimised["peak"] == plain["peak"] and optimised["program"] < plain["program"]


def test_the_table_has_the_program_where_there_are_passes():
    heads, *rows = planned(world=2, grid={"passes": ["", "default"]}).cells()
    at = heads.index("program")
    assert rows[0][at] == "" and rows[1][at].endswith("KiB")
    plain = planned(world=2)
    assert "program" not in plain.cells()[0] and "program" in plain.rows()[0]


def test_machines():
    own = replace(MACHINES["a100"], memory_bandwidth=1e9)
    h100, a100, mine = planned(world=2, grid={"machine": ["h100", "a100", own]}).rows()
    assert mine["step"] > a100["step"] > h100["step"]
    assert mine["device"] == a100["device"] != h100["device"]  # its declared constants
    with pytest.raises(PlanError, match="no machine `h1000`; there are 4090, a100"):
        planned(world=2, machine="h1000")


def test_a_machine_decides_which_kernels_run():
    def attend(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        q = model(x).view(1, 1, -1, 64).bfloat16()
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        optimizer.step()

    sweep = fz.plan(build, attend, inputs=inputs, world=2, grid={"machine": ["a100", "h100"]})
    kernels = [[(c.kernel, c.reason) for c in each.choices] for each in sweep.plans]
    assert kernels == [
        [("flash", "the first in the order of sm_80")],
        [("cudnn", "the first in the order of sm_90")],
    ]


def test_one_definition_of_what_fits():
    """The allocator releases its cache at the limit: it may run where more was reserved without a limit."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for rows in (1, 3, 2):
            train(model, optimizer, x.repeat(rows, 1))

    sweep = fz.plan(build, steps, inputs=inputs, world=2, batch=4096)
    memory, row = sweep.plans[0].figures.memory, sweep.rows()[0]
    least = next(n for n in range(row["device"], 0, -(1 << 21)) if memory.fit(n, EAGER).refused)
    limit = least + (1 << 21)
    assert limit < row["device"], "the cache of this step is needed: choose another one"
    within = sweep.within(limit).rows()[0]
    assert within["fits"] and within["device"] <= limit and row["device"] > limit
    assert not sweep.within(least).rows()[0]["fits"]
    assert sweep.largest("batch", limit, low=4096, most=4097) >= 4096
    with pytest.raises(PlanError, match="a limit is a number of bytes, not '80GB'"):
        sweep.within("80GB")


def test_throughput_and_ranks_that_share_a_batch():
    def tokens(batch: int = 4) -> Tensor:
        return torch.zeros(batch, 16, dtype=torch.int64)

    def embedded(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        train(model, optimizer, torch.zeros(x.shape[0], WIDTH))

    def over_dp():
        model = nn.Sequential(Block(), Block())
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return fully_shard(model, mesh=mesh["dp"]), torch.optim.AdamW(model.parameters())

    (samples,) = planned(world=2, batch=4).rows()
    assert samples["throughput"] == pytest.approx(4 / samples["step"])
    assert "samples/s/rank" in planned(world=2, batch=4).text()
    shared = fz.plan(over_dp, embedded, inputs=tokens, target="cpu", mesh={"dp": 2, "tp": 4})
    (row,) = shared.rows()
    assert row["throughput"] == pytest.approx(4 * 16 / 4 / row["step"])
    assert "tokens/s/rank" in shared.text()
    assert "over the dimension `tp` of the mesh: its 4 ranks do the same" in shared.text()
    assert "do the same" not in planned(world=2).text()
    assert "the mesh is not used" not in shared.text() + planned(world=8).text()
    unused = planned(mesh={"dp": 2, "tp": 4})  # sharded over all 8 ranks
    assert unused.text().count("the mesh is not used: all that is communicated is over all") == 1
    assert unused.rows()[0]["sent"] == planned(world=8).rows()[0]["sent"] > 0


def test_resharding_to_some_ranks():
    def resharded(reshard: int):
        model = nn.Sequential(*(Block() for _ in range(3)))
        for block in model:
            fully_shard(block, reshard_after_forward=reshard)
        return fully_shard(model), torch.optim.AdamW(model.parameters(), fused=True)

    asked = fz.plan(resharded, train, inputs=inputs, target="cpu", world=8, reshard=2).rows()
    some, whole = planned(world=8, layers=3, grid={"reshard": [2, True]}).rows()
    figures = ("peak", "program", "sent", "collectives", "step")
    assert [some[key] for key in figures] == [asked[0][key] for key in figures]
    assert some["sent"] < whole["sent"] and some["peak"] > whole["peak"]


def test_settings_of_the_allocator():
    rows = fz.plan(
        build,
        train,
        inputs=inputs,
        world=2,
        batch=300_000,
        grid={"alloc_conf": ["", "expandable_segments:True"]},
    ).rows()
    assert rows[0]["reserved"] != rows[1]["reserved"]


def test_the_search_for_the_largest_models_no_times(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("not asked for")

    sweep = planned(world=2, batch=1)
    for name in ("program_timeline", "evaluate", "step_time"):
        for module in (step_memory, executable, summary):
            monkeypatch.setattr(module, name, refuse, raising=False)
    assert sweep.largest("batch", 1e9, most=8) == 8
    with pytest.raises(AssertionError, match="not asked for"):
        planned(world=2, batch=1)


def test_the_largest_that_fits():
    sweep = planned(world=2, batch=1)
    at_37, at_38 = (row["device"] for row in planned(world=2, grid={"batch": [370, 380]}).rows())
    assert sweep.largest("batch", at_37, most=1024) == 370 and at_38 > at_37
    assert sweep.largest("batch", at_38, most=375) == 375
    with pytest.raises(PlanError, match="`rows` is no key of this sweep"):
        sweep.largest("rows", at_37)
    with pytest.raises(PlanError, match=r"batch 1 does not fit in 1\.00 KiB"):
        sweep.largest("batch", 1024)
    assert not dist.is_initialized()


def test_a_point_that_cannot_be_run_says_why():
    def fails(batch: int = 4) -> Tensor:
        if batch > 8:
            raise ValueError("too many")
        return inputs(batch)

    sweep = fz.plan(build, train, inputs=fails, target="cpu", world=2, grid={"batch": [4, 16, 8]})
    assert [row.get("error") for row in sweep.rows()] == [None, "ValueError: too many", None]
    assert "error: ValueError: too many" in sweep.text()
    with pytest.raises(PlanError, match="batch 9 cannot be planned: ValueError: too many"):
        sweep.largest("batch", 1e9, low=9)
    with pytest.raises(ValueError, match="too many"):
        fz.plan(build, train, inputs=fails, target="cpu", batch=16)
    with pytest.raises(WorldError, match="rank 2 is not in a world of 2"):
        planned(world=2, rank=2)


def test_ctrl_c_leaves_no_world():
    def interrupted(batch: int = 4) -> Tensor:
        if batch == 2:
            raise KeyboardInterrupt
        return inputs(batch)

    with pytest.raises(KeyboardInterrupt):
        fz.plan(build, train, inputs=interrupted, target="cpu", world=2, grid={"batch": [1, 2]})
    assert not dist.is_initialized() and type(torch.ones(1)) is Tensor


def test_a_model_that_is_not_returned_cannot_be_changed():
    with pytest.raises(PlanError, match="`reshard` and `checkpoint` change the modules"):
        fz.plan(lambda: (), lambda: torch.ones(2).sum(), target="cpu", reshard=False)


def plain():
    """A model that nobody has sharded."""
    model = Block()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_false_asks_nothing_of_a_model_that_is_not_sharded():
    grid = {"checkpoint": [False, None], "reshard": [False, None]}
    rows = fz.plan(plain, train, inputs=inputs, target="cpu", grid=grid).rows()
    assert len({row["peak"] for row in rows}) == 1
    for asked in ({"checkpoint": True}, {"reshard": True}):
        with pytest.raises(PlanError, match="`reshard` and `checkpoint` change the modules"):
            fz.plan(plain, train, inputs=inputs, target="cpu", **asked)


def over_two():
    """A model that is sharded over two of eight ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))["dp"]
    model = nn.Sequential(fully_shard(Block(), mesh=mesh))
    return fully_shard(model, mesh=mesh), torch.optim.SGD(model.parameters(), lr=0.1)


def test_values_that_would_be_taken_for_true():
    with pytest.raises(
        PlanError, match=r"`reshard` is True, False or a number of ranks, .*not 'yes'"
    ):
        planned(world=8, reshard="yes")
    with pytest.raises(PlanError, match="`reshard` 3: a number of ranks is a factor of 8"):
        planned(world=8, reshard=3)
    with pytest.raises(PlanError, match=r"`reshard` 4: .*factor of 2, not 4"):
        fz.plan(over_two, train, inputs=inputs, target="cpu", mesh={"dp": 2, "tp": 4}, reshard=4)
    with pytest.raises(PlanError, match="`checkpoint` is True or False, not 'yes'"):
        planned(world=8, checkpoint="yes")


def test_functions_that_do_not_fit_each_other():
    with pytest.raises(PlanError, match=r"`step\(model.*\)` cannot be called: missing .* 'x'"):
        fz.plan(build, train, target="cpu")
    with pytest.raises(PlanError, match=r"`build\(layers\)` cannot be called: missing .* 'layers'"):
        fz.plan(lambda layers: build(layers), train, inputs=inputs, target="cpu")
    with pytest.raises(PlanError, match="`inputs` is a function, not tuple"):
        fz.plan(build, train, inputs=(torch.ones(2),))
    with pytest.raises(PlanError, match="`build` is a function, not NoneType"):
        fz.plan(None, train)


def test_grids_that_are_none():
    with pytest.raises(PlanError, match="`world` has one value and is in the grid, too"):
        planned(world=2, grid={"world": [2, 4]})
    with pytest.raises(PlanError, match="a grid maps keys to their values, and this is a list"):
        planned(grid=[("batch", [1])])
    with pytest.raises(PlanError, match="a machine is a name or a `Machine`, not 3"):
        planned(machine=3)


@pytest.mark.parametrize("values", [(n for n in (1, 2)), {1, 2}, torch.arange(1, 3)])
def test_axes_of_any_kind(values):
    rows = planned(world=2, grid={"batch": values}).rows()
    assert [row["batch"] for row in rows] == [1, 2]


def test_searches_that_would_not_end():
    sweep = planned(world=2, batch=4)
    for low, most in ((0, 8), (-1, 8), (9, 8)):
        with pytest.raises(PlanError, match="give 1 <= low <= most"):
            sweep.largest("batch", 1e9, low=low, most=most)
    with pytest.raises(PlanError, match="a limit is a number of bytes, not '80GB'"):
        sweep.largest("batch", "80GB")
    with pytest.raises(PlanError, match="`layer` is no key of this sweep"):
        sweep.largest("batch", 1e9, layer=3)


def test_numbers_that_json_has_no_words_for():
    def scaled(model, optimizer, x, scale: float = 1.0):
        return train(model, optimizer, x * min(scale, 2.0))

    sweep = fz.plan(build, scaled, inputs=inputs, target="cpu", world=2, scale=float("inf"))
    assert "Infinity" not in sweep.to_json() and json.loads(sweep.to_json())[0]["scale"] == "inf"


def test_an_error_does_not_widen_the_table():
    def fails(batch: int = 4) -> Tensor:
        if batch > 8:
            raise ValueError("much" * 40)
        return inputs(batch)

    sweep = fz.plan(build, train, inputs=fails, target="cpu", world=2, grid={"batch": [4, 16]})
    heads, good, bad = sweep.text().splitlines()[1:4]
    assert len(good) == len(heads) < 140 < len(bad)


def test_what_comes_out():
    seen = []
    sweep = planned(
        world=2,
        grid={"batch": [1, 2]},
        progress=lambda done, of, point: seen.append((done, of, point["batch"])),
    )
    assert seen == [(0, 2, 1), (1, 2, 2)]
    loaded = json.loads(sweep.to_json())
    assert [row["batch"] for row in loaded] == [1, 2] and loaded[0]["assumed"] == {}
    rows = list(csv.DictReader(io.StringIO(sweep.to_csv())))
    assert int(rows[1]["peak"]) == sweep.rows()[1]["peak"] == loaded[1]["peak"]
    text = sweep.text().splitlines()
    assert text[0] == "target cpu, world 2" and text[1].split()[:2] == ["batch", "peak"]
    assert sweep.table().row_count == 2
    figures = sweep.plans[0].figures
    assert figures.memory.peak_of(EAGER).nbytes == sweep.rows()[0]["peak"]
