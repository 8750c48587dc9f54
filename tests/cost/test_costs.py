"""The roofline: FLOPs are those that `FlopCounterMode` counts, and each kind of node is priced as its table says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import functionalize as fz
from functionalize._compat.fakes import FakeTensorMode
from functionalize.cost.costs import flops, moved, seconds
from functionalize.cost.machines.efficiency import Curve, Efficiency
from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES, machine_named
from functionalize.errors import PassError
from tests.planner.nodes import node_of

MACHINE = Machine(100.0, 10.0, 5.0, 3.0, 1.0, 2.0, ((torch.bfloat16, 400.0),))


def captured(step, *args):
    """The program of a step, and the FLOPs that torch counts while it runs."""
    step = fz.capture(step)
    for _ in range(3):
        step(*args)
    assert step.stats.replays
    program = step.program
    program.describe()
    return program


def test_flops_of_a_whole_step_are_what_torch_counts():
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.Flatten(),
        nn.Linear(32, 64),
        nn.GELU(),
        nn.Unflatten(1, (4, 16)),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x):
        with sdpa_kernel(SDPBackend.MATH):  # the other one of CPUs counts as nothing in torch
            loss = model(x).pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(5, 8)
    program = captured(step, x)
    with FlopCounterMode(display=False) as counter:
        step(x)
    assert sum(map(flops, program.graph.nodes)) == counter.get_total_flops() > 0


def test_attention_on_cpus_counts_as_two_matmuls():
    q = torch.empty(2, 3, 16, 8)
    program = fz.functions.trace(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    program.describe()
    assert sum(map(flops, program.graph.nodes)) == 2 * (2 * 2 * 3 * 16 * 16 * 8)


def test_an_op_takes_as_long_as_the_slower_of_compute_and_memory():
    mm = node_of(torch.ops.aten.mm.default, torch.empty(10, 10), torch.empty(10, 10))
    assert (flops(mm), moved(mm)) == (2000, 1200)
    assert seconds(mm, MACHINE) == 1 + 120
    assert seconds(mm, Machine(1.0, 10.0, 5.0, 3.0, 1.0)) == 1 + 2000
    half = node_of(torch.ops.aten.mm.default, *(torch.empty(50, 50).bfloat16(),) * 2)
    assert seconds(half, Machine(1.0, 1e9, 5.0, 3.0, 0.0, matrix_flops=MACHINE.matrix_flops)) == (
        250_000 / 400
    )


def test_views_parts_and_waits_cost_nothing():
    t = node_of(torch.ops.aten.t.default, torch.empty(3, 4))
    split = node_of(torch.ops.aten.split.Tensor, torch.empty(4), 2)
    wait = node_of(torch.ops._c10d_functional.wait_tensor.default, torch.empty(4))
    for node in (t, split, wait, *t.all_input_nodes):
        assert (moved(node), flops(node), seconds(node, MACHINE)) == (0, 0, 0)


def test_an_expanded_tensor_is_read_once():
    expanded = torch.empty(()).expand(100)
    graph = fx.Graph()
    with FakeTensorMode():
        x = torch.empty(()).expand(100)
    a = graph.placeholder("a")
    a.meta["val"] = x
    node = graph.call_function(torch.ops.aten.add.Tensor, (a, 1))
    node.meta["val"] = torch.empty_like(expanded)
    assert moved(node) == 4 + node.meta["val"].untyped_storage().nbytes()


def test_collectives_cost_latency_and_what_a_ring_sends():
    ops, x = torch.ops._c10d_functional, torch.empty(8)
    gather = node_of(ops.all_gather_into_tensor.default, x, 4, "0")
    scatter = node_of(ops.reduce_scatter_tensor.default, x, "sum", 4, "0")
    reduce = node_of(ops.all_reduce.default, x, "sum", "0")
    assert [moved(n) for n in (gather, scatter, reduce)] == [96, 24, 64]
    assert seconds(gather, MACHINE) == 3 + 96 / 5


def test_a_copy_to_the_host_goes_over_its_link():
    graph = fx.Graph()
    a = graph.placeholder("a")
    with FakeTensorMode():
        a.meta["val"] = torch.empty(100, device="cuda")
        to_host = graph.call_function(torch.ops.aten._to_copy.default, (a,), {"device": "cpu"})
        to_host.meta["val"] = torch.empty(100)
    assert seconds(to_host, MACHINE) == 1 + 400 / 2


def test_machines_have_names():
    graph = node_of(torch.ops.aten.t.default, torch.empty(3, 4)).graph
    assert machine_named("auto") is machine_named("auto", graph) is MACHINES["cpu"]
    with FakeTensorMode():
        next(iter(graph.nodes)).meta["val"] = torch.empty(1, device="cuda")
    assert machine_named("auto", graph) is MACHINES["h100"]
    with pytest.raises(PassError) as error:
        machine_named("abacus")
    assert_expected_inline(
        str(error.value),
        """no machine `abacus`; there are auto, 4090, a100, b200, cpu, h100, h200, l40s, mi300x""",
    )


def test_a_lookup_reads_what_it_gives():
    table = torch.empty(100, 4)
    rows = node_of(torch.ops.aten.embedding.default, table, torch.zeros(3, dtype=torch.int64))
    assert moved(rows) == 3 * 8 + 2 * 3 * 16
    whole = node_of(torch.ops.aten.index_select.default, table, 0, torch.arange(100).repeat(2))
    assert moved(whole) == 200 * 8 + 100 * 16 + 200 * 16


def test_what_is_not_written_moves_nothing():
    empty = node_of(torch.ops.aten.new_empty.default, torch.empty(3), [100])
    assert (moved(empty), seconds(empty, MACHINE)) == (0, 1)


def test_an_op_in_place_moves_what_it_writes():
    add = node_of(torch.ops.aten.add_.Tensor, torch.empty(5), torch.empty(5))
    assert moved(add) == 3 * 20
    assert seconds(add, MACHINE) == 1 + 60 / 10
    foreach = torch.ops.aten._foreach_mul_.Scalar
    graph = fx.Graph()
    a = graph.placeholder("a")
    with FakeTensorMode():
        a.meta["val"] = torch.empty(7)
    node = graph.call_function(foreach, ([a], 2.0))
    node.meta["val"] = None
    assert moved(node) == 2 * 28


def test_a_fused_step_does_not_write_its_gradients():
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def step(x):
        (parameter * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = captured(step, torch.ones(10))
    (node,) = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._fused_adamw.default
    )
    # reads the parameter, its gradient, two moments and the count of steps; writes three of them
    assert moved(node) == 4 * 40 + 4 + 3 * 40


def test_matrices_of_8_bits_have_a_rate_of_their_own():
    ops, kind = torch.ops.aten, torch.float8_e4m3fn
    one = torch.ones(())
    a, b = torch.empty(16, 32).to(kind), torch.empty(64, 32).to(kind).t()
    node = node_of(ops._scaled_mm.default, a, b, one, one, out_dtype=torch.bfloat16)
    assert flops(node) == 2 * 16 * 32 * 64
    machine = Machine(1.0, 1e12, 1.0, 0.0, 0.0, matrix_flops=((kind, 1024.0),))
    assert seconds(node, machine) == 64


def test_presets_of_gpus_have_nodes():
    for name, machine in MACHINES.items():
        assert machine.streams == (name != "cpu")
        assert machine.ranks_per_node == (None if name == "cpu" else 8)
        assert name == "cpu" or machine.adapter_bandwidth() < machine.link_bandwidth


def test_kernels_reach_the_share_of_their_kind() -> None:
    half = Curve(((1.0, 0.5),))
    machine = Machine(
        1e3, 1e30, 1.0, 0.0, 0.0, efficiency=Efficiency((("matmul", half), ("sustained", half)))
    )
    a = torch.empty(10, 10)
    assert seconds(node_of(torch.ops.aten.mm.default, a, a), machine) == 4 * 2  # 2,000 FLOPs
    slow_memory = replace(machine, flops=1e30, memory_bandwidth=100.0)
    assert seconds(node_of(torch.ops.aten.mul.Tensor, a, a), slow_memory) == 2 * 12


def test_a_causal_mask_hides_half_of_the_work() -> None:
    q = torch.empty(1, 2, 64, 16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    machine = Machine(1e3, 1e30, 1.0, 0.0, 0.0)
    whole, masked = (node_of(attention, q, q, q, 0.0, causal) for causal in (False, True))
    assert flops(whole) == flops(masked)
    assert seconds(whole, machine) == 2 * seconds(masked, machine)
