"""Plans of `CPUOffloadPolicy`: what leaves the device and what stays, copies, the host's time, every refusal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

import functionalize as fz
from functionalize._compat.fakes import HOST
from functionalize._compat.graphs import pytree
from functionalize.cost.categories import Category
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import FunctionalizeError, PlanError, TargetError
from functionalize.planner.timeline.timeline import EAGER
from tests.planner.sweep.blocks import WIDTH, Block
from tests.steps import train

RANKS = 4
H100 = MACHINES["h100"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GONE = {Category.SHARDED_PARAMETERS, Category.SHARDED_GRADIENTS, Category.OPTIMIZER_STATE}


def build(offload=True, fused=True, pin=True, optimizer=torch.optim.AdamW, low=True, meta=False):
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(Block(), Block())
    policy = CPUOffloadPolicy(pin_memory=pin) if offload else OffloadPolicy()
    for module in (*model, model):
        fully_shard(
            module, offload_policy=policy, mp_policy=BF16 if low else MixedPrecisionPolicy()
        )
    if meta:
        model.to_empty(device="cpu")
    options = {"fused": True} if fused else {}
    return model, optimizer(model.parameters(), **options)


def inputs(batch=4096) -> Tensor:
    return torch.randn(batch, WIDTH)


def planned(step=train, machine=H100, **keys):
    return fz.plan(build, step, inputs=inputs, world=RANKS, machine=machine, **keys)


def clipped(model, optimizer, x):
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model, optimizer, x):
    for _ in range(2):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def both():
    return planned(grid={"offload": [False, True]})


def test_the_device_is_left_with_the_same_bytes_but_those_that_are_offloaded(both) -> None:
    plain, offloaded = (each.memory.by_category(EAGER) for each in both.plans)
    parameters = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4 // RANKS
    assert plain[Category.SHARDED_PARAMETERS] == parameters
    assert not GONE & {c for c, nbytes in offloaded.items() if nbytes > 64}  # numbers of AdamW
    rest = {c: n for c, n in plain.items() if c not in GONE}
    assert {c: n for c, n in offloaded.items() if c not in GONE} == rest
    peaks = [each.memory.levels(EAGER).requested for each in both.plans]
    gone = sum(n for c, n in plain.items() if c in GONE) - sum(
        n for c, n in offloaded.items() if c in GONE
    )
    assert peaks[0] - peaks[1] == gone >= 3 * parameters
    steps = 4 * 8  # an int of AdamW for each parameter
    assert both.plans[0].memory.host_peak == 0
    assert both.plans[1].memory.host_peak == 4 * parameters + steps


def test_storages_of_the_device_are_those_without_the_offloaded(both) -> None:
    plain, offloaded = (
        sorted(a.nbytes for a in each.memory.eager.allocations if a.category not in GONE)
        for each in both.plans
    )
    shards = [WIDTH * n * 4 // RANKS for n in (1, 4, 4 * WIDTH, 4 * WIDTH)]  # of one block
    added, removed = Counter(offloaded) - Counter(plain), Counter(plain) - Counter(offloaded)
    # Four times (two blocks, forward and backward): a copy of each shard and its cast, and no buffer for all casts.
    assert added == Counter(4 * [n for each in shards for n in (each, each // 2)])
    assert removed == Counter({sum(shards) // 2: 4})


def test_parameters_are_copied_before_each_gather_and_gradients_after_each_reduction(both) -> None:
    program = both.plans[1].figures.program
    sides = [
        (node.all_input_nodes[0].meta["val"].device.type, node.meta["val"].device.type)
        for node in program.graph.nodes
        if node.target is torch.ops.aten._to_copy.default
    ]
    assert sides.count((HOST.type, "cpu")) == 16  # four parameters of two blocks, twice
    assert sides.count(("cpu", HOST.type)) == 8
    (update,) = (n for n in program.graph.nodes if "_fused_adamw" in str(n.target))
    made = pytree.tree_leaves(update.meta["val"])
    assert len(made) >= 3 * 8 and {t.device for t in made} == {HOST}


def test_the_time_has_both_bandwidths_of_the_host(both) -> None:
    times = [each.figures.time for each in both.plans]
    phases = [{phase.phase: phase for phase in time.phases} for time in times]
    parameters = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4 // RANKS
    moved = 7 * parameters / H100.host_memory_bandwidth  # reads 4, writes 3
    assert moved < phases[1]["optimizer"].seconds < 1.2 * moved + 20e-6
    slow = replace(H100, host_bandwidth=H100.host_bandwidth / 1e3)
    (slower,) = planned(machine=slow).plans
    gathers = [s for s in slower.figures.time.spans if "copy-in" in s.stream]
    assert sum(s.end - s.start for s in gathers) > parameters / slow.host_bandwidth
    assert slower.figures.time.seconds > times[1].seconds + parameters / slow.host_bandwidth


def test_the_optimizer_in_place_takes_the_same_time(both) -> None:
    (plan,) = planned(passes="default").plans
    found = [
        {phase.phase: phase.seconds for phase in each.figures.time.phases}["optimizer"]
        for each in (both.plans[1], plan)
    ]
    assert any("_fused_adamw_" in str(n.target) for n in plan.figures.program.graph.nodes)
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_the_table_and_the_report_have_the_bytes_of_the_host(both) -> None:
    row, without = both.rows()[1], both.rows()[0]
    assert row["host"] == both.plans[1].memory.host_peak and "host" not in without
    heads = both.cells()[0]
    assert heads.index("host") == heads.index("device") + 1
    assert "host" not in planned(offload=False).cells()[0]
    assert "offloaded to host memory, which has no limit here" in both.text()
    assert "unpinned" not in both.text()
    assert "host memory (requested)" in both.plans[1].memory.text()
    assert both.plans[1].memory.to_json()["host"] == row["host"]


def test_without_fused_the_optimizer_loops_over_parameters_as_on_a_cpu() -> None:
    (plan,) = planned(fused=False).plans
    names = [str(n.target) for n in plan.figures.program.graph.nodes]
    assert not any("_foreach" in name for name in names)
    assert sum("addcdiv" in name for name in names) == 8


def test_a_gradient_is_summed_on_the_host_before_more_kernels_are_issued() -> None:
    once, twice = (planned(step).plans[0] for step in (train, accumulated))
    adds = [
        n
        for n in twice.figures.program.graph.nodes
        if n.target is torch.ops.aten.add.Tensor and n.meta["val"].device.type == HOST.type
    ]
    assert len(adds) == 8
    spans = {s.name: s for s in twice.figures.time.spans}
    assert {spans[n.name].stream for n in adds} == {"compute"}
    assert twice.memory.host_peak > once.memory.host_peak - 1


@pytest.mark.parametrize("pin", [False, True])
def test_parameters_that_are_made_after_fully_shard_are_refused(pin) -> None:
    with pytest.raises(TargetError, match=r"CPUOffloadPolicy: the parameter `0\.a\.weight` was re"):
        planned(meta=True, pin=pin)


def test_copies_of_unpinned_memory_are_named() -> None:
    assert "copies of unpinned memory are modelled as of pinned memory" in planned(pin=False).text()


def test_the_norm_of_offloaded_gradients_is_a_collective_of_a_few_bytes() -> None:
    (plan,) = planned(clipped).plans
    assert plan.error is None
    reduces = [t for t in plan.figures.traffic if t.kind == "all-reduce"]
    assert sum(t.count for t in reduces) == 1


def test_what_the_host_is_not_modelled_for_is_refused() -> None:
    def gathered(model, optimizer, x):
        train(model, optimizer, x)
        return [p.full_tensor().sum() for p in model.parameters()]

    with pytest.raises(PlanError, match=r"p\.full_tensor\(\).*\) sends .* of offloaded tensors"):
        planned(gathered)
    with pytest.raises(
        PlanError, match=r"aten\.mm.*in multiplied: return local\.t\(\) @ local\) computes"
    ):
        planned(multiplied)
    unknown = replace(H100, host_memory_bandwidth=None)
    with pytest.raises(PlanError, match="the machine has no `host_memory_bandwidth`: set it"):
        planned(machine=unknown)
    assert fz.plan(build, train, inputs=inputs, world=2, machine=unknown, offload=False).plans


def multiplied(model, optimizer, x):
    train(model, optimizer, x)
    local = model[0].a.weight.detach().to_local()
    return local.t() @ local


def test_mixing_host_and_device_is_eagers_error() -> None:
    def mixed(model, optimizer, x):
        train(model, optimizer, x)
        return model[0].a.weight.detach().to_local() + x[: 4 * WIDTH // RANKS]

    with pytest.raises((RuntimeError, FunctionalizeError), match="same device"):
        planned(mixed)


def test_on_a_cpu_there_is_one_memory() -> None:
    plans = fz.plan(
        build,
        train,
        inputs=inputs,
        world=RANKS,
        target="cpu",
        grid={"offload": [False, True]},
        low=False,
        pin=False,
    ).plans
    assert plans[0].memory.levels(EAGER) == plans[1].memory.levels(EAGER)
    assert plans[1].memory.host_peak == 0
    assert plans[0].figures.time.seconds == plans[1].figures.time.seconds


def test_torch_is_as_before() -> None:
    before = torch.Tensor.cpu, torch.Tensor.is_pinned, torch.Tensor.to
    planned()
    assert before == (torch.Tensor.cpu, torch.Tensor.is_pinned, torch.Tensor.to)
