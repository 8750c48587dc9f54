"""`prefetch`: collectives issued early and waited for late; on real ranks equal bit for bit to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize import passes
from functionalize.errors import PassError
from functionalize.passes.patterns import WAIT, is_collective
from functionalize.passes.prefetch import Prefetch
from functionalize.program.collective_order import sequences
from tests.passes.chains import aten, feature, functional, reduce, unshard
from tests.passes.helpers import count
from tests.passes.layers import MB, peak, traced_step
from tests.ranks import run_on_ranks


def prefetched(program: fz.Program, **options: Any) -> tuple[int, fz.Program]:
    """The collectives and waits that moved, and the program after it; a second run finds nothing."""
    after = passes.run(program, [Prefetch(**options)])
    again = passes.run(after, [Prefetch(**options)])
    assert count(again) == 0, again.history
    assert again.print_readable(False) == after.print_readable(False)
    return count(after), after


def order(program: fz.Program) -> str:
    """g0 w0: a gather and its wait; r0 v0: a reduce-scatter and its; *: a product."""
    letters: dict[Any, str] = {}
    words = []
    for node in program.graph.nodes:
        if node.target is WAIT:
            start = letters[node.all_input_nodes[0]]
            words.append(start.replace("g", "w").replace("r", "v"))
        elif is_collective(node):
            letter = "g" if "gather" in node.name else "r"
            letters[node] = f"{letter}{sum(w[0] == letter for w in letters.values())}"
            words.append(letters[node])
        elif node.target is aten.mm.default:
            words.append("*")
    return " ".join(words)


# -- fires -----------------------------------------------------------------------------------------


def test_a_gather_is_issued_before_the_wait_of_the_one_before_it(expect):
    before = traced_step(2, twice=True)
    assert order(before) == "g0 w0 * g1 w1 * g2 w2 * r0 v0 * g3 w3 * r1 v1 *"
    n, after = prefetched(before)
    assert order(after) == "g0 g1 w0 * g2 w1 * w2 * r0 g3 v0 * w3 * r1 v1 *"
    assert n > 0
    expect("depth_1", after.print_readable(False))


def test_depth():
    before = traced_step(4, twice=False)
    assert order(prefetched(before)[1]).startswith("g0 g1 w0 * g2 w1 * g3 w2 * w3 *")
    assert order(prefetched(before, depth=2)[1]).startswith("g0 g1 g2 w0 * g3 w1 * w2 * w3 *")
    assert order(prefetched(before, depth=9)[1]).startswith("g0 g1 g2 g3 w0 * w1 * w2 * w3 *")


def test_gathers_pass_reduces_if_they_may():
    before = traced_step(2, twice=True)
    _, after = prefetched(before, reorder=True)
    assert order(after) == "g0 g1 w0 * g2 w1 * g3 w2 * r0 v0 * w3 * r1 v1 *"
    assert Prefetch(reorder=True).changes_collectives and not Prefetch().changes_collectives


def test_a_reduce_is_issued_when_its_gradients_are_there():
    def fn(a, b):
        x, y = a.exp(), b.exp()
        for _ in range(3):
            y = y @ y
        (shard,) = reduce(x)
        return y, shard + 1

    program = fz.functions.trace(fn, torch.ones(8, 8), torch.ones(8, 8))
    assert order(program) == "* * * r0 v0"
    n, after = prefetched(program)
    assert (n, order(after)) == (1, "r0 * * * v0")


def test_waits_move_down():
    def fn(a, b):
        whole = functional.wait_tensor(functional.all_reduce(a, "sum", "0"))
        return b @ b, whole + 1

    program = fz.functions.trace(fn, torch.ones(8, 8), torch.ones(8, 8))
    program.describe()
    (wait,) = program.graph.find_nodes(op="call_function", target=WAIT)
    wait.all_input_nodes[0].append(wait)
    assert order(program) == "r0 v0 *"
    assert order(prefetched(program)[1]) == "r0 * v0"


def test_so_many_reduces_are_under_way():
    def fn(a, b):
        shards = []
        for _ in range(3):
            a = a @ b
            shards += reduce(a)
        return [shard + 1 for shard in shards]

    program = fz.functions.trace(fn, torch.ones(8, 8), torch.ones(8, 8))
    assert order(prefetched(program)[1]) == "* r0 * r1 * r2 v0 v1 v2"
    assert order(prefetched(program, reduces=2)[1]) == "* r0 * r1 * v0 r2 v1 v2"
    _, after = prefetched(program, reduces=1)
    assert order(after) == "* r0 * v0 r1 * v1 r2 v2"
    assert order(prefetched(after)[1]) == "* r0 * r1 * r2 v0 v1 v2"
    low, high = peak(after), peak(prefetched(program)[1])
    assert low < high
    assert peak(prefetched(program, budget_mb=low * MB)[1]) == low


def test_on_a_graph_module():
    gm = traced_step(2, twice=True).graph_module
    assert passes.on_graph_module("prefetch")(gm) is gm


# -- budgets ---------------------------------------------------------------------------------------


def test_the_peak_is_within_the_budget():
    before = traced_step(6, twice=True, microbatches=2)
    low = peak(prefetched(before, reduces=1, budget_mb=0.0)[1])
    high = peak(prefetched(before, depth=4, reorder=True)[1])
    orders = set()
    for budget in range(low, high + 512, 256):
        _, after = prefetched(before, depth=4, reorder=True, budget_mb=budget * MB)
        assert peak(after) <= budget
        assert not any("above" in line for line in after.history)
        orders.add(order(after))
    assert len(orders) > 3
    assert order(after) == order(prefetched(before, depth=4, reorder=True)[1])


def test_a_budget_that_cannot_be_met_is_told():
    _, after = prefetched(traced_step(2, twice=True), budget_mb=MB)
    told = f"prefetch: a peak of {peak(after) * MB:.3f} MiB, above the budget of {MB:.3f} MiB"
    assert after.history[0] == told


# -- refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("twice", [True, False])
def test_collectives_keep_their_order(depth, twice):
    before = traced_step(3, twice=twice, microbatches=2)
    after = prefetched(before, depth=depth)[1]
    assert sequences(after.graph) == sequences(before.graph)


def test_refuses_to_pass_what_shards_are_computed_from():
    def fn(a, b, c):
        y = a @ unshard(b)[0]
        return unshard((y @ y) @ c)[0] + 1

    program = fz.functions.trace(fn, torch.ones(8, 8), torch.ones(4, 8), torch.ones(8, 8))
    assert order(program) == "g0 w0 * * * g1 w1"
    assert prefetched(program)[0] == 0


def test_refuses_to_pass_what_it_does_not_know():
    def fn(a, b, c):
        y = a @ unshard(b)[0]
        total = functional.wait_tensor(functional.all_reduce(y, "sum", "0"))
        return total @ unshard(c)[0]

    program = fz.functions.trace(fn, torch.ones(8, 8), torch.ones(4, 8), torch.ones(4, 8))
    for reorder in (True, False):
        found = order(prefetched(program, reorder=reorder)[1])
        assert found == "g0 w0 * r0 g1 w1 v0 *"


def test_refuses_wrong_options():
    wrong = r"^`prefetch`: {} says how many are under way, at least 1, not 0$"
    with pytest.raises(PassError, match=wrong.format("depth")):
        Prefetch(depth=0)
    with pytest.raises(PassError, match=wrong.format("reduces")):
        Prefetch(reduces=0)


# -- on ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, pipeline",
    [
        ("blocks_and_root", "prefetch"),
        ("blocks_and_root", "prefetch{depth=3, reorder=true}"),
        ("accumulation", "prefetch{depth=2, reduces=1}"),
        ("keep_unsharded", "reshard{keep=none},prefetch{depth=2, reorder=true}"),
        ("blocks_and_root", "reshard,prefetch{budget_mb=0.006}"),
        ("bf16", "prefetch{depth=2}"),
        ("clip_grad_norm", "prefetch{depth=2}"),
        ("optimizer_in_backward", "prefetch{depth=2, reorder=true}"),
    ],
)
def test_a_feature(name, pipeline):
    first, second = run_on_ranks(feature, name, pipeline)
    assert first[0] == second[0] == []
    assert first[1] >= 5
    assert first[2] == second[2]
