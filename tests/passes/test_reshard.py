"""`reshard`: parameters kept for backward or gathered again, under a budget; on real ranks, bit for bit like eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functionalize as fz
from functionalize import passes
from functionalize.cost.decide.ordering import Schedule, Uses
from functionalize.cost.liveness import Liveness
from functionalize.errors import PassError
from functionalize.ir.phases import phase_of
from functionalize.passes.overlap import scratch_in
from functionalize.passes.patterns import gathers
from functionalize.passes.reshard import Reshard
from tests.fsdp import steps
from tests.fsdp.features import FEATURES
from tests.fsdp.models import Net, wrapped
from tests.fsdp.twins import compare_twins
from tests.passes.chains import unshard
from tests.passes.helpers import count
from tests.passes.layers import MB, peak, sent, traced_step
from tests.ranks import run_on_ranks


def resharded(program: fz.Program, **options: Any) -> tuple[int, fz.Program]:
    """The rewrites, and the program after them; a second run finds nothing."""
    after = passes.run(program, [Reshard(**options)])
    again = passes.run(after, [Reshard(**options)])
    assert count(again) == 0, again.history
    return count(after), after


# -- fires -----------------------------------------------------------------------------------------


def test_keeps_the_forwards_gathers(expect):
    n, after = resharded(traced_step(2, twice=True))
    assert (n, sent(after)) == (2, ["g", "g", "r", "r"])
    expect("keep_all", after.print_readable(False))


def test_gathers_again_in_backward(expect):
    n, after = resharded(traced_step(2, twice=False), keep="none")
    assert (n, sent(after)) == (2, ["g", "g", "r", "g", "r", "g"])
    expect("keep_none", after.print_readable(False))


def test_there_and_back_again():
    before = traced_step(3, twice=False)
    _, apart = resharded(before, keep="none")
    assert len(gathers(apart.graph)) == 6
    _, kept = resharded(apart, keep="all")
    assert (sent(kept), peak(kept)) == (sent(before), peak(before))


def test_a_repeated_gather_is_of_the_backward():
    _, after = resharded(traced_step(2, twice=False), keep="none")
    phases = [phase_of(g.start) for g in gathers(after.graph)]
    assert phases == ["forward", "forward", "backward", "backward"]
    assert all("val" in node.meta for node in after.graph.nodes if node.op != "output")


def test_microbatches_have_a_gap_each():
    before = traced_step(2, twice=True, microbatches=2)
    assert sent(before).count("g") == 8
    assert resharded(before)[0] == 6
    once = traced_step(2, twice=False, microbatches=2)
    n, after = resharded(once, keep="none")
    assert (n, sent(after).count("g")) == (6, 8)


def test_a_gather_that_nobody_reads_goes():
    def fn(w):
        read = unshard(w)[0].sum()
        unshard(w)
        return read

    program = fz.functions.trace(fn, torch.ones(4, 8))
    n, after = resharded(program)
    assert (n, len(gathers(after.graph))) == (1, 1)


def test_a_part_that_only_the_later_gather_reads():
    def fn(w, b):
        first, _ = unshard(w, b)
        both = unshard(w, b)
        return first.sum(), both[0] + 1, both[1] + 1

    n, after = resharded(fz.functions.trace(fn, torch.ones(4, 8), torch.ones(4)))
    assert (n, len(gathers(after.graph))) == (1, 1)


def test_on_a_graph_module():
    gm = traced_step(2, twice=True).graph_module
    assert passes.on_graph_module("reshard")(gm) is gm
    assert len(gathers(gm.graph)) == 2


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_peak_is_within_the_budget(twice, microbatches):
    before = traced_step(6, twice=twice, microbatches=microbatches)
    low, high = (peak(resharded(before, keep=k)[1]) for k in ("none", "all"))
    assert low < high
    kept = []
    for budget in range(low, high + 256, 128):
        _, after = resharded(before, keep="budget", budget_mb=budget * MB)
        assert peak(after) <= budget
        assert not any("above" in line for line in after.history)
        kept.append(-len(gathers(after.graph)))
    assert kept == sorted(kept) and len(set(kept)) > 3
    assert -kept[-1] == 6


def test_a_budget_for_what_is_kept():
    before = traced_step(4, twice=True)  # every parameter has 256 bytes
    for n in range(5):
        _, after = resharded(before, keep="budget", kept_mb=(256 * n + 100) * MB)
        assert len(gathers(after.graph)) == 8 - n
    once = traced_step(4, twice=False)
    n, after = resharded(once, keep="budget", kept_mb=600 * MB)
    assert len(gathers(after.graph)) == 6


def test_keeps_what_fits_into_a_multiple_of_the_peak_of_eager():
    before = traced_step(8, twice=True)

    def needs(pipeline):
        live = Liveness(passes.run(before, f"{pipeline},reinplace,schedule_memory").graph)
        return Schedule(Uses.among(live, scratch_in(live)), range(len(live.nodes))).peak

    low, high = needs("reshard{keep=budget,growth=1}"), needs("reshard")
    assert low == needs("verify") < high
    for growth in (1.1, 1.2, 1.3):
        after = passes.run(before, [Reshard("budget", growth=growth)])
        assert 0 < 16 - len(gathers(after.graph)) < 8
        assert low <= needs(f"reshard{{keep=budget,growth={growth}}}") <= growth * low
    assert needs(f"reshard{{keep=budget,growth={high / low + 1:.1f}}}") == high


def test_a_budget_that_cannot_be_met_is_told():
    n, after = resharded(traced_step(4, twice=False), keep="budget", budget_mb=MB)
    assert n > 0
    told = f"reshard: a peak of {peak(after) * MB:.3f} MiB, above the budget of {MB:.3f} MiB"
    assert after.history[0] == told


# -- refuses ---------------------------------------------------------------------------------------


def test_refuses_shards_that_changed():
    before = traced_step(2, twice=True, microbatches=2, between=lambda w: w + 1)
    n, after = resharded(before)
    assert (n, sent(after).count("g")) == (5, 3)  # the changed one: within each microbatch alone


def test_refuses_another_cast():
    def fn(w):
        return unshard(w.half().float())[0].sum() + unshard(w)[0].sum()

    assert resharded(fz.functions.trace(fn, torch.ones(4, 8)))[0] == 0


def test_refuses_other_pieces_ranks_and_groups():
    def fn(w, b):
        one, _ = unshard(w, b)
        other, _ = unshard(b, w)
        ranks, _ = unshard(w, b, world=4)
        group, _ = unshard(w, b, group="1")
        return [t.sum() for t in (one, other, ranks, group)]

    assert resharded(fz.functions.trace(fn, torch.ones(4, 8), torch.ones(4, 8)))[0] == 0


def test_refuses_what_the_caller_is_handed():
    def fn(w):
        return unshard(w)[0], unshard(w)[0]

    assert resharded(fz.functions.trace(fn, torch.ones(4, 8)))[0] == 0
    before = traced_step(1, twice=False)
    (part,) = (p for g in gathers(before.graph) for p in g.parts if p is not None)
    (output,) = before.graph.find_nodes(op="output")
    output.args = ((*output.args[0], part),)
    assert Reshard("none").apply(before) == 0


def test_refuses_unknown_readers():
    def fn(w, b):
        cat = torch.cat([w.view(-1), b])
        functional = torch.ops._c10d_functional
        whole = functional.wait_tensor(functional.all_gather_into_tensor(cat, 2, "0"))
        return whole.sum(), unshard(w, b)[0].sum()

    assert resharded(fz.functions.trace(fn, torch.ones(4, 8), torch.ones(4)))[0] == 0


def test_refuses_wrong_options():
    with pytest.raises(PassError, match=r"^`reshard`: keep is all, none or budget, not 'some'$"):
        Reshard("some")
    wrong = r"^`reshard`: budget_mb, kept_mb and growth go with keep=budget, which needs one$"
    with pytest.raises(PassError, match=wrong):
        Reshard("budget")
    with pytest.raises(PassError, match=wrong):
        Reshard("all", budget_mb=1.0)
    with pytest.raises(PassError, match=wrong):
        Reshard("none", growth=1.0)
    with pytest.raises(PassError, match="growth is a limit of its own, without budget_mb"):
        Reshard("budget", budget_mb=1.0, growth=1.2)
    with pytest.raises(PassError, match=r"^no machine `abacus`"):
        resharded(traced_step(1, twice=True), keep="budget", budget_mb=1.0, machine="abacus")


# -- on ranks --------------------------------------------------------------------------------------


def against_eager(name: str, pipeline: str) -> tuple[list[str], int, int]:
    row = FEATURES[name]
    verdict = compare_twins(row.build, row.make_step, row.batches(), passes=pipeline)
    return verdict.differences, verdict.replays, verdict.collectives["all_gather_into_tensor"]


@pytest.mark.parametrize(
    "name, pipeline, left",
    [
        ("blocks_and_root", "reshard", 3),
        ("keep_unsharded", "reshard{keep=none}", 6),
        ("keep_unsharded", "reshard", 3),
        ("frozen_weights", "reshard", 3),
        ("frozen_block", "reshard", 3),
        ("tied_in_a_group", "reshard", 3),
        ("bf16", "reshard", 3),
        ("bf16", "reshard{keep=none}", 6),
        ("blocks_and_root", "reshard{keep=budget, kept_mb=0.0012}", 4),
        ("blocks_and_root", "fast", 3),
    ],
)
def test_a_feature(name, pipeline, left):
    for differences, replays, gathered in run_on_ranks(against_eager, name, pipeline):
        assert differences == []
        assert replays >= 5
        assert gathered == left


def within_a_budget(reshard_after_forward: bool) -> tuple[list[str], list[int], list[str]]:
    """Differences from eager; gathers before and after; what the history says."""

    def net() -> nn.Module:
        return Net(blocks=4, hidden=64)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, foreach=False)

    build = wrapped(make=net, optimizer=sgd, reshard_after_forward=reshard_after_forward)
    captured = fz.capture(steps.accumulating()(*build()))
    for batch in steps.pairs(3):
        captured(*batch)
    program = captured.program
    low, high = (peak(passes.run(program, [Reshard(k)])) for k in ("none", "all"))
    each = Reshard("budget", budget_mb=(low + high) / 2 * MB)
    after = passes.run(program, [each])
    assert peak(after) <= (low + high) / 2
    assert count(passes.run(after, [each])) == 0
    verdict = compare_twins(build, steps.accumulating(), steps.pairs(), passes=[each])
    found = [len(gathers(p.graph)) for p in (program, after)]
    return verdict.differences, found, [line for line in after.history if "above" in line]


@pytest.mark.parametrize("again", [True, False])
def test_microbatches_under_a_budget(again):
    first, second = run_on_ranks(within_a_budget, again)
    assert first == second
    differences, (before, after), told = first
    assert differences == told == []
    assert 5 < after < (20 if again else 15) and before == (20 if again else 10)
