"""Curves of efficiency: shares between 0 and 1, more work takes more time; collectives as rings and trees."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functionalize.cost.costs import kind_of_kernel
from functionalize.cost.machines.efficiency import (
    ATTENTION,
    COLLECTIVES,
    CUDNN,
    KINDS,
    MATMUL,
    MEMORY,
    NETWORK,
    NORM,
    PEAK,
    Curve,
    Efficiency,
)
from functionalize.cost.machines.machine import Algorithm, Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PlanError

GPUS = sorted(set(MACHINES) - {"cpu"})


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """A curve: sizes ascend, and the time of each point is at least that of the one before."""
    sizes = sorted(draw(st.sets(st.floats(1, 1e15), min_size=1, max_size=8)))
    shares: list[float] = []
    for i, size in enumerate(sizes):
        most = min(1.0, shares[-1] * size / sizes[i - 1]) if shares else 1.0
        shares.append(most * draw(st.floats(0.01, 1.0)))
    return Curve(tuple(zip(sizes, shares, strict=True)))


@given(curves(), st.floats(0.5, 1e16), st.floats(1, 100))
def test_more_work_takes_more_time_at_a_share_of_at_most_one(
    curve: Curve, size: float, factor: float
) -> None:
    less, more = curve.share(size), curve.share(size * factor)
    assert 0 < less <= 1 and 0 < more <= 1
    assert size * factor / more >= size / less * (1 - 1e-6)


def test_a_curve_goes_through_its_points_and_no_further() -> None:
    curve = Curve(((1e3, 0.1), (1e5, 0.4)), low=0.5, high=2.0)
    assert [curve.share(size) for size in (0, 1, 1e5, 1e9)] == [0.1, 0.1, 0.4, 0.4]
    assert math.isclose(curve.share(1e4), 0.2)  # half-way in the logarithm: the geometric mean
    assert curve.scaled(curve.high).points == ((1e3, 0.2), (1e5, 0.8))
    assert curve.scaled(10).share(1e5) == 1


@pytest.mark.parametrize(
    ("points", "ends", "text"),
    [
        ((), (1, 1), "positive numbers"),
        (((1, 0.0),), (1, 1), "positive numbers"),
        (((1, math.nan),), (1, 1), "positive numbers"),
        (((2, 0.5), (1, 0.5)), (1, 1), "ascend"),
        (((1, 1.5),), (1, 1), "at most 1"),
        (((1, 0.1), (2, 0.9)), (1, 1), "more work takes less time"),
        (((1, 0.5),), (1.1, 1.2), "low <= 1 <= high"),
    ],
)
def test_what_is_no_curve(points: object, ends: tuple[float, float], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Curve(points, *ends)  # type: ignore[arg-type]


def test_a_kind_without_a_curve_has_that_of_its_family() -> None:
    curve = Curve(((1, 0.5),))
    memory = Efficiency(((MEMORY, curve),))
    assert memory.share(NORM, 1) == 0.5 and memory.share(MATMUL, 1) == 1
    matmul = Efficiency(((MATMUL, curve),))
    assert matmul.share(CUDNN, 1) == 0.5 and matmul.share(NORM, 1) == 1
    assert all(PEAK.share(kind, 1) == 1 for kind in KINDS)
    with pytest.raises(PlanError, match="no kind of kernel `mamtul`"):
        Efficiency((("mamtul", curve),))


def test_names_of_ops_have_kinds() -> None:
    names = {
        "mm": MATMUL,
        "_scaled_dot_product_flash_attention": ATTENTION,
        "_scaled_dot_product_cudnn_attention_backward": "cudnn attention backward",
        "native_layer_norm_backward": NORM,
        "_fused_adamw_": "optimizer",
        "_foreach_add_": "optimizer",
        "mul_": "pointwise",
        "silu": "costly pointwise",
        "split_with_sizes_copy": "copy",
        "embedding": "lookup",
        "sum": "reduction",
    }
    assert {n: kind_of_kernel(n, 8 if n == "mm" else 0) for n in names} == names
    assert kind_of_kernel("a_product_of_mine", flops=8) == MATMUL
    assert set(names.values()) <= KINDS


@pytest.mark.parametrize("name", GPUS)
def test_presets_have_ranges_around_their_shares(name: str) -> None:
    machine = MACHINES[name]
    for kind, curve in machine.efficiency.curves:
        assert curve.source, kind
        for size in (1.0, 1e6, 1e12):
            middle = machine.efficiency.share(kind, size)
            ends = machine.at("low").efficiency, machine.at("high").efficiency
            assert ends[0].share(kind, size) <= middle <= ends[1].share(kind, size) <= 1
    assert machine.efficiency.ranges and not machine.at("low").efficiency.ranges


# -- collectives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("name", sorted(MACHINES))
def test_more_bytes_and_more_nodes_take_more_time(name: str, kind: str) -> None:
    machine = MACHINES[name]

    def seconds(sent: float, size: int) -> float:
        return machine.collective_seconds(kind, sent, size, min(size, 8))

    for size in (2, 8, 64, 1024):
        times = [seconds(sent, size) for sent in (0, 1e3, 1e6, 1e9)]
        assert times == sorted(times) and times[0] > 0
        on_the_wire = 1e9 / machine.link_bandwidth
        assert times[-1] >= on_the_wire
    assert seconds(1e6, 8) <= seconds(1e6, 64) <= seconds(1e6, 1024)


def test_rings_and_trees_by_hand() -> None:
    ring, tree = Algorithm(1.0, 2.0, 8.0), Algorithm(1.0, 2.0, 8.0, tree=True)
    machine = Machine(
        1, 1, 100.0, 0, 0, ranks_per_node=4, internode_bandwidth=10.0, algorithms=(ring, tree)
    )
    # 16 ranks on 4 nodes: 12 steps on nodes and 3 between; 4 adapters carry 40 bytes/s
    assert machine.collective_seconds("all-gather", 80, 16, 4) == 1 + 12 * 2 + 3 * 8 + 2
    # an all-reduce goes round twice; the tree: 3 steps up and down a node, log2(4) levels up and down
    assert machine.collective_seconds("all-reduce", 80, 16, 4) == 1 + 6 * 2 + 4 * 8 + 2
    only_ring = replace(machine, algorithms=(ring,))
    assert only_ring.collective_seconds("all-reduce", 80, 16, 4) == 1 + 24 * 2 + 6 * 8 + 2
    slow = ring._replace(share=0.5, base=0.0)
    both = replace(machine, algorithms=(ring, slow))
    assert both.collective_seconds("broadcast", 0, 4, 4) == 6  # the fastest for so few bytes


def test_rails_pods_and_the_efficiency_of_the_network() -> None:
    machine = Machine(1, 1, 1000.0, 0, 0, ranks_per_node=8, internode_bandwidth=16.0)
    assert machine.collective_seconds("broadcast", 128, 64, 8) == 1
    assert replace(machine, rails=2).collective_seconds("broadcast", 32, 64, 8) == 1
    pods = replace(machine, ranks_per_pod=64, oversubscription=4.0)
    assert pods.collective_seconds("broadcast", 128, 64, 8) == 1
    assert pods.collective_seconds("broadcast", 32, 128, 8, True) == 1
    half = replace(machine, efficiency=Efficiency(((NETWORK, Curve(((1, 0.5),))),)))
    assert half.collective_seconds("all-gather", 128, 64, 8) == 2
    assert half.collective_seconds("all-gather", 1000, 8, 8) == 1
    # of an all-to-all of 64 ranks, 56 of 63 parts leave the node, by the rank's own adapter
    assert math.isclose(machine.collective_seconds("all-to-all", 63, 64, 8), 56 / 16)


def test_a_group_may_cross_pods() -> None:
    from functionalize.planner.time.communication import RankGroup

    assert RankGroup("0", 16, tuple(range(16))).across(8)
    assert not RankGroup("0", 8, tuple(range(8, 16))).across(8)
    assert RankGroup("0", 2, (0, 8)).across(8) and not RankGroup("0", 2, (0, 8)).across(None)
    assert RankGroup("0", 16).across(8) and not RankGroup("0", 8).across(8)
