"""The ops that read and set generators: real and fake kernels, and what a graph may do with their nodes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from functionalize._compat.fakes import FakeTensorMode
from functionalize.analysis.dead_code import drop_dead_code, is_impure
from functionalize.ir.generators import (
    GET_STATE,
    SEED,
    SET_STATE,
    generator_states,
    generators_restored_on_error,
    is_random,
)

aten = torch.ops.aten
CPU = torch.device("cpu")


def test_a_state_is_the_generators_and_sets_it() -> None:
    torch.manual_seed(3)
    state = GET_STATE(CPU)
    assert torch.equal(state, torch.get_rng_state())
    first = torch.rand(5)
    SET_STATE(state, CPU)
    assert torch.equal(torch.rand(5), first)


@pytest.mark.parametrize("device", [(), (CPU,)])
def test_a_seed_is_torchs(device: tuple[torch.device, ...]) -> None:
    torch.manual_seed(-5)
    expected = torch.rand(5)
    SEED(-5, *device)
    assert torch.equal(torch.rand(5), expected)


def test_fake_kernels_know_the_size_and_set_nothing() -> None:
    real = torch.get_rng_state()
    with FakeTensorMode():
        state = GET_STATE(CPU)
        SET_STATE(state, CPU)
        SEED(3)
    assert (state.shape, state.dtype, state.device) == (real.shape, real.dtype, real.device)
    assert torch.equal(torch.get_rng_state(), real)


def graph_of_states() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    nodes = {
        "read": graph.call_function(GET_STATE, (CPU,)),
        "unread": graph.call_function(GET_STATE, (CPU,)),
        "seed": graph.call_function(SEED, (3,)),
        "drawn": graph.call_function(aten.rand.default, ([5],)),
    }
    nodes["set"] = graph.call_function(SET_STATE, (nodes["read"], CPU))
    graph.output(())
    return graph, nodes


def test_only_a_state_that_nobody_reads_is_dead() -> None:
    graph, nodes = graph_of_states()
    assert all(map(is_random, nodes.values()))
    assert [name for name, node in nodes.items() if not is_impure(node)] == ["read", "unread"]
    assert drop_dead_code(graph) == 1
    assert [n for n in graph.nodes if n.op != "output"] == [
        nodes[name] for name in ("read", "seed", "drawn", "set")
    ]


def test_torchs_own_dead_code_elimination_leaves_generators_set() -> None:
    graph, nodes = graph_of_states()
    graph.eliminate_dead_code(is_impure_node=lambda node: node.is_impure(impure_random=False))
    assert {nodes["seed"], nodes["set"]} <= set(graph.nodes)


def test_generators_are_restored_if_the_body_raises_only() -> None:
    def drawing(fails: bool) -> bool:
        before = torch.get_rng_state()
        try:
            with generators_restored_on_error():
                torch.rand(5)
                if fails:
                    raise ValueError
        except ValueError:
            pass
        return torch.equal(torch.get_rng_state(), before)

    assert drawing(True)
    assert not drawing(False)
    assert torch.equal(generator_states()[0], torch.get_rng_state())
