"""`schedule_memory`: which nodes move, which must not, and that no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import functionalize as fz
from functionalize import passes
from functionalize.cost.decide.ordering import Constraints, Schedule, Uses
from functionalize.cost.liveness import Liveness
from functionalize.ir.commit import commit, is_commit
from functionalize.passes.metadata import set_value
from functionalize.passes.schedule_memory import ScheduleMemory
from tests.laws.counting import SLACK, calls
from tests.passes.chains import feature, reduce, traced, unshard
from tests.passes.helpers import rewrite
from tests.ranks import run_on_ranks

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def four() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.rand(8, 8, generator=g) for _ in range(4))


def peak(program: fz.Program) -> int:
    return Liveness(program.graph).peak


def names(program: fz.Program) -> list[str]:
    return [n.name for n in program.graph.nodes]


def both(fn: Callable[..., Any]) -> tuple[int, fz.Program, fz.Program]:
    """The nodes that moved in `fn`, and its programs before and after; checked by `rewrite`."""
    before = fz.functions.trace(fn, *four())
    before.describe()
    moved, after = rewrite(fn, four, ScheduleMemory())
    return moved, before, after


# -- fires -----------------------------------------------------------------------------------------


def test_what_frees_more_than_it_makes_runs_earlier(expect):
    def f(a, b, c, d):
        early = torch.cat([a, b])
        one = (c @ d).sum()
        two = (d @ c).sum()
        return one + two + early.sum()

    moved, before, after = both(f)
    assert moved and peak(after) < peak(before)
    expect(
        "earlier",
        f"{before.print_readable(False)}-- {after.history[0]}\n{after.print_readable(False)}",
    )


def test_what_makes_more_than_it_frees_runs_later(expect):
    def f(a, b, c, d):
        one, two, three = a @ b, b @ c, c @ d
        rows = torch.cat([a, b, c]).relu()
        return one.sum() + two.sum() + three.sum() + rows.sum(), rows

    moved, before, after = both(f)
    assert moved and peak(after) < peak(before)
    expect("later", after.print_readable(False))


def test_parts_of_a_list_are_taken_out_at_once():
    def f(a, b, c, d):
        parts = torch._foreach_mul([a, b, c], 2.0)
        other = d @ d
        sums = [(p @ other).sum() for p in parts]
        return sums[0] + sums[1] + sums[2]

    moved, before, after = both(f)
    assert peak(after) <= peak(before)
    assert bool(moved) == (peak(after) < peak(before))


def two_layers(a, b, x, y):
    """Two gathers issued ahead, two reductions that the end waits for."""
    (first,) = unshard(a)
    (second,) = unshard(b)
    x = x @ y
    one = (x @ first.t()).relu()
    (grad_one,) = reduce(one.t() @ x)
    two = (x @ second.t()).relu()
    (grad_two,) = reduce(two.t() @ x)
    return a - grad_one, b - grad_two


def test_collectives_are_waited_for_at_once(expect):
    args = four()
    before = fz.functions.trace(two_layers, *args)
    before.describe()
    moved, after = traced(two_layers, *args, each=ScheduleMemory(overlap=False))
    assert moved and peak(after) < peak(before)
    assert starts(after) == starts(before)
    expect("at_once", after.print_readable(False))


def starts(program: fz.Program) -> list[str]:
    return [n for n in names(program) if n.startswith(("all_gather", "reduce_scatter"))]


def reductions(overlap: bool | None, kind: str = "meta") -> list[str]:
    """Packs, reductions and waits of three layers, all waited for at the end, as they are ordered."""

    def f(*grads):
        packed = []
        for grad in grads:
            pack = aten._chunk_cat.default([grad * 2], 0, 2)
            packed.append(functional.reduce_scatter_tensor(pack, "avg", 2, "0"))
        return [functional.wait_tensor(p) for p in packed]

    args = [torch.empty(64, 64, device=kind) for _ in range(3)]
    _, after = traced(f, *args, each=ScheduleMemory(overlap=overlap))
    short = {"_chunk_cat": "pack", "reduce_scatter_tensor": "start", "wait_tensor": "wait"}
    found = []
    for name in names(after):
        stem, _, number = name.rpartition("_")
        stem, number = (stem, number) if number.isdigit() else (name, "0")
        found += [f"{short[stem]} {number}"] if stem in short else []
    return found


def test_one_reduction_is_in_flight_beside_compute():
    order = reductions(True)
    assert order[:5] == ["pack 0", "start 0", "wait 0", "pack 1", "start 1"]
    assert order.index("wait 1") < order.index("pack 2")


def test_by_default_communication_overlaps_on_a_device_only():
    assert reductions(None, "cpu") == reductions(False, "cpu")
    assert reductions(None, "meta") == reductions(True, "meta")


@pytest.mark.parametrize("middle", [lambda big: big, lambda big: (big * 2).relu()])
def test_a_gather_waits_for_memory_that_its_backend_needs(middle):
    """Its result would fit, but not the copy that gloo makes; ops that write temporaries in place do not hold it."""

    def f(a, b, x, y):
        big = torch.cat([x, y, x, y]) @ y
        (whole,) = unshard(a)
        (grad,) = reduce(middle(big).view(4, 8, 8).sum(0))
        return whole.sum(), grad

    before = passes.run(fz.functions.trace(f, *four()), "reinplace")
    after = passes.run(before, "schedule_memory{overlap=false}")
    assert names(before).index("all_gather_into_tensor") < names(before).index("sum_1")
    assert names(after).index("all_gather_into_tensor") > names(after).index("sum_1")


# -- refuses ---------------------------------------------------------------------------------------


def test_refuses_where_the_peak_would_not_fall():
    moved, before, after = both(lambda a, b, c, d: ((a @ b).relu() @ c).sum())
    assert moved == 0
    assert names(after) == names(before)


def test_refuses_for_a_trifle():
    def f(a, b, c, d):
        late = a[0, 0] + 1
        big = torch.cat([torch.cat([a, b, c, d])] * 5)
        return big.sum() + late

    moved, before, after = both(f)
    assert moved == 0 and names(after) == names(before)


def test_random_ops_keep_their_order():
    def f(a, b, c, d):
        noise = torch.rand_like(torch.cat([a, b]))
        second = torch.rand_like(a)
        one, two = (c @ d).sum(), (d @ c).sum()
        return one + two + (second @ a).sum() + noise.sum()

    _, before, after = both(f)
    draws = [n for n in names(before) if "rand" in n]
    assert len(draws) == 2 and [n for n in names(after) if n in draws] == draws


def in_place() -> fx.Graph:
    """A graph that writes an input after its `commit`, and could run with less memory."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    old = graph.call_function(aten.mul.Tensor, (w, 3))
    big = graph.call_function(aten.cat.default, ([x, x],))
    small = graph.call_function(aten.sum.default, (old,))
    other = graph.call_function(aten.mm.default, (x, x))
    total = graph.call_function(aten.sum.default, (other,))
    graph.call_function(commit, ())
    read = graph.call_function(aten.mul.Tensor, (w, 2))
    graph.call_function(aten.add_.Tensor, (w, x))
    new = graph.call_function(aten.sum.default, (w,))
    late = graph.call_function(aten.sum.default, (big,))
    seen = graph.call_function(aten.sum.default, (read,))
    graph.output((small, total, new, late, seen))
    with FakeTensorMode() as mode:
        for node in (w, x):
            node.meta["val"] = mode.from_tensor(torch.ones(16, 16))
    for node in graph.nodes:
        if node.op == "call_function":
            set_value(node)
    return graph


def test_writes_stay_in_place_and_nothing_passes_the_commit():
    gm = fx.GraphModule(torch.nn.Module(), in_place())
    before = list(gm.graph.nodes)
    place = {n: i for i, n in enumerate(before)}
    (wall,) = [n for n in before if is_commit(n)]
    expected = gm(torch.ones(16, 16), torch.full((16, 16), 2.0))
    passes.on_graph_module("schedule_memory")(gm)
    after = list(gm.graph.nodes)
    assert after != before
    assert set(after[: after.index(wall)]) == set(before[: place[wall]])
    on_w = [n.name for n in before if n.name in ("mul_tensor_1", "add__tensor", "sum_default_2")]
    assert [n.name for n in after if n.name in on_w] == on_w
    for got, want in zip(gm(torch.ones(16, 16), torch.full((16, 16), 2.0)), expected, strict=True):
        assert torch.equal(got, want)


# -- on steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["true", "false"])
@pytest.mark.parametrize("name", ["transformer", "bf16"])
def test_a_step_in_another_order_is_eagers(name, option):
    pipeline = f"elide_copies,reinplace,schedule_memory{{overlap={option}}}"
    for differences, replays, _, _ in run_on_ranks(feature, name, pipeline):
        assert differences == [] and replays >= 3


@pytest.mark.parametrize("sweep", [Constraints.later, Constraints.earlier])
def test_an_orders_peak_is_what_liveness_finds_for_it(sweep):
    def f(a, b, c, d):
        one, two = torch.cat([a, b]).split(8)
        early = (c @ d).t()
        return (one * two).sum() + early.sum(), torch.cat([b, c]).relu()

    program = fz.functions.trace(f, *four())
    program.describe()
    live = Liveness(program.graph)
    now = Schedule(Uses.among(live), range(len(live.nodes)))
    after = Schedule(now.uses, sweep(Constraints(now), now))
    assert sorted(after.order) == list(now.order) and list(after.order) != list(now.order)
    for schedule in (now, after):
        known = Liveness(program.graph, [live.nodes[i] for i in schedule.order])
        assert (schedule.peak, schedule.total) == (known.peak, sum(known.timeline))


# -- linear ----------------------------------------------------------------------------------------


def chain(layers: int) -> fx.Graph:
    """Layers of a matmul whose result waits for the end, and of what the next one needs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    kept, value = [], x
    for _ in range(layers):
        value = graph.call_function(aten.mm.default, (value, x))
        kept.append(graph.call_function(aten.mul.Tensor, (value, 2)))
        value = graph.call_function(aten.relu.default, (value,))
    graph.output(tuple(graph.call_function(aten.sum.default, (k,)) for k in kept))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(8, 8, device="meta")
    return graph


def test_work_per_node_does_not_grow():
    def per_node(layers: int) -> float:
        live = Liveness(chain(layers))

        def work() -> None:
            now = Schedule(Uses.among(live), range(len(live.nodes)))
            order = Constraints(now)
            assert len(order.later(now)) == len(order.earlier(now)) == len(live.nodes)

        return calls(work) / len(live.nodes)

    assert per_node(1000) < SLACK * per_node(100)
