"""`order`: what a collective of a backward depends on goes first; on real ranks equal bit for bit to eager."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functionalize as fz
from functionalize import passes
from functionalize._compat.distributed import fake_process_group
from functionalize.errors import PassError
from functionalize.ir.phases import in_backward
from functionalize.passes.order import Order
from functionalize.passes.patterns import WAIT, is_collective
from functionalize.program.collective_order import sequences
from tests.passes import experts
from tests.passes.helpers import count
from tests.ranks import run_on_ranks

aten = torch.ops.aten
ALL_TO_ALL = ("all_to_all",)


def ordered(program: fz.Program, **options: Any) -> tuple[int, fz.Program]:
    """The nodes that moved, and the program after it; a second run finds nothing."""
    after = passes.run(program, [Order(**options)])
    again = passes.run(after, [Order(**options)])
    assert count(again) == 0, again.history
    assert set(node_names(after)) == set(node_names(program))
    return count(after), after


def node_names(program: fz.Program) -> list[str]:
    return [node.name for node in program.graph.nodes]


def beside(program: fz.Program, kind: str = "all_to_all") -> list[int]:
    """For each such collective of a backward, how many products run while it is in flight."""
    nodes, found = list(program.graph.nodes), []
    for at, node in enumerate(nodes):
        if is_collective(node) and in_backward(node) and kind in node.name:
            end = next(i for i, n in enumerate(nodes) if n.target is WAIT and node in n.args)
            found.append(sum(n.target is aten.mm.default for n in nodes[at:end]))
    return found


@pytest.fixture(scope="module")
def program() -> fz.Program:
    return experts.program()


# -- fires -----------------------------------------------------------------------------------------


def test_gradients_of_weights_run_beside_a_collective(program: fz.Program) -> None:
    assert beside(program) == [0, 0, 0, 0]
    moved, after = ordered(program, first=ALL_TO_ALL)
    assert moved > 0 and beside(after) == [0, 2, 0, 2]
    assert sequences(after.graph) == sequences(program.graph)


def test_of_all_collectives(program: fz.Program) -> None:
    """The first reduction starts before a product that it does not need."""
    assert beside(program, "reduce_scatter") == [5, 0]
    assert beside(ordered(program)[1], "reduce_scatter") == [6, 0]


def test_of_a_module(program: fz.Program) -> None:
    for module in ("model.1.moe", "1.moe", "*.1.*"):
        assert beside(ordered(program, module=module)[1]) == [0, 2, 0, 0]
    assert ordered(program, module="oe")[0] == 0


def test_by_a_function(program: fz.Program) -> None:
    last = [n.name for n in program.graph.nodes if "all_to_all" in n.name][-1]
    chosen = Order(first=lambda node: node.name == last)
    assert beside(passes.run(program, [chosen])) == [0, 0, 0, 4]  # also those of the layer before
    assert "<lambda>" in str(chosen)


def test_a_chosen_collective_passes_others_if_it_may(program: fz.Program) -> None:
    """The third one depends on no gradient that is reduced before it."""
    _, after = ordered(program, first=ALL_TO_ALL, reorder=True)
    assert beside(after) == [0, 2, 1, 2]
    assert Order(ALL_TO_ALL, reorder=True).changes_collectives
    assert not Order(ALL_TO_ALL).changes_collectives


def test_two_collectives_are_in_flight_at_once() -> None:
    """Neither depends on the other: both start before the products that depend on neither, two of the six."""

    def loss_of(x: Tensor) -> Tensor:
        one, two = (experts.exchanged((x * each) @ x.t()).sum() for each in (2, 3))
        return one + two + (x @ x.t()).sum()

    after = ordered(traced_backward(loss_of), first=ALL_TO_ALL)[1]
    assert beside(after) == [2, 4]


def traced_backward(loss_of: Any) -> fz.Program:
    """The program of the gradient of a function of one tensor, on the first of two ranks that do not exist."""

    def train(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss_of(x).backward()
        return x.grad

    with fake_process_group(0, 2):
        step = fz.capture(train)
        for _ in range(3):
            step(torch.ones(4, 4))
        assert step.program is not None
        step.program.describe()
        return step.program


def branches(by_hand: bool) -> Any:
    """A collective, and a branch of products that the engine runs before it, as it was made later."""

    def loss_of(x: Tensor) -> Tensor:
        sent = experts.exchanged(x.sin()).sum()
        if by_hand:
            node = sent.grad_fn
            while node.name() != "SinBackward0":
                node._set_sequence_nr(2**40)
                ((node, _), *_) = node.next_functions
        return sent + ((x @ x.t()) @ x).sum()

    return loss_of


def test_an_order_by_hand_is_kept_and_is_what_the_pass_finds() -> None:
    by_engine, by_hand = (traced_backward(branches(each)) for each in (False, True))
    assert beside(by_engine) == [0] and beside(by_hand) == [4]
    moved, after = ordered(by_engine, first=ALL_TO_ALL)
    assert moved > 0 and beside(after) == [4]
    assert ordered(by_hand, first=ALL_TO_ALL)[0] == 0


def test_on_a_graph_module(program: fz.Program) -> None:
    gm = passes.run(program, "verify").graph_module
    assert passes.on_graph_module(Order(first=ALL_TO_ALL))(gm) is gm
    assert beside(passes.run(program, "order{first=all_to_all}")) == [0, 2, 0, 2]


# -- keeps -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_chosen(data: st.DataObject) -> None:
    """Passes are verified, so every order has each value before its readers; the second run finds nothing."""
    program = three_layers()
    names = [n.name for n in program.graph.nodes if is_collective(n) and in_backward(n)]
    chosen = data.draw(st.sets(st.sampled_from(names), min_size=1))
    reorder = data.draw(st.booleans())
    _, after = ordered(program, first=lambda node: node.name in chosen, reorder=reorder)
    assert reorder or sequences(after.graph) == sequences(program.graph)
    for kept in (chosen, set(names) - chosen):
        orders = [[n.name for n in p.graph.nodes if n.name in kept] for p in (program, after)]
        assert orders[0] == orders[1]


@functools.cache
def three_layers() -> fz.Program:
    return experts.program(3)


def test_the_forward_and_the_optimizer_stay(program: fz.Program) -> None:
    def others(of: fz.Program) -> list[str]:
        return [n.name for n in of.graph.nodes if not in_backward(n)]

    assert others(ordered(program, first=ALL_TO_ALL)[1]) == others(program)


def test_random_ops_keep_their_order(program: fz.Program) -> None:
    def draws(of: fz.Program) -> list[str]:
        return [n.name for n in of.graph.nodes if "bernoulli" in n.name]

    after = ordered(program, first=ALL_TO_ALL, reorder=True)[1]
    assert draws(after) == draws(program) and len(draws(program)) == 2


def test_a_program_without_such_a_collective_stays(program: fz.Program) -> None:
    assert ordered(program, first=("all_reduce",))[0] == 0
    assert ordered(fz.functions.trace(torch.sin, torch.ones(3)), first=ALL_TO_ALL)[0] == 0


def test_refuses_wrong_options() -> None:
    with pytest.raises(
        PassError, match=r"^`order`: no collective `alltoall`; there are all_to_all, all_gather"
    ):
        Order(first=("alltoall",))
    with pytest.raises(PassError, match=r"`first` is words joined by \+ or a function, not ''"):
        passes.parse("order{first=}")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "pipeline",
    [
        "order{first=all_to_all}",
        "default,order{first=all_to_all+reduce_scatter}",
        "default,order{first=all_to_all, reorder=true}",
    ],
)
def test_on_ranks(pipeline: str, checkpointed: bool) -> None:
    before = "default" if pipeline.startswith("default") else "verify"
    first, second = run_on_ranks(experts.trained, pipeline, checkpointed)
    assert first[0] == second[0] == [] and first[1] == second[1] >= 3
    assert first[2] != experts.trained_program(before, checkpointed)
