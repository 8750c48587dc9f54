"""`offload`: what travels, what stays, every refusal. Values of a GPU are fake here, but for one test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx

import functionalize as fz
from functionalize import passes
from functionalize._compat.fakes import FakeTensorMode
from functionalize.cost.decide.saved import forwards, saved_values
from functionalize.cost.liveness import Liveness
from functionalize.errors import PassError
from functionalize.passes.metadata import set_value
from functionalize.passes.offload import Journeys, Offload, send
from tests.passes.helpers import count, seen

aten = torch.ops.aten
ALL = Offload(min_mb=0.0)


def inputs(device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 8), *[(8, 8)] * 6)
    return tuple(torch.randn(*shape, generator=generator).to(device) for shape in shapes)


def gradients(x: Tensor, *given: Tensor) -> list[Tensor]:
    ws = [w.detach().requires_grad_() for w in given]
    for w in ws:
        left, right = (x @ w).split(4, 1)
        x = x + F.gelu(torch.cat([left * right, right], 1))
    return list(torch.autograd.grad(x.pow(2).mean(), ws))


def on_cuda(fn, *args: Tensor) -> fz.Program:
    """The program of `fn` as it would be on a GPU: autograd cannot run there on fakes, fake values can."""
    program = fz.functions.trace(fn, *args)
    program.describe()
    cuda = torch.device("cuda", 0)
    program.inputs = tuple(replace(spec, device=cuda) for spec in program.inputs)
    with FakeTensorMode():
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if "device" in node.kwargs or node.target is aten.full.default:
                node.kwargs = {**node.kwargs, "device": cuda}
            if node.op == "placeholder":
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), device=cuda)
            elif node.op == "call_function":
                set_value(node)
    return program


def device_peak(program: fz.Program) -> int:
    return Journeys(Liveness(program.graph), [], 0).without([]).peak


def copies(program: fz.Program) -> list[fx.Node]:
    found = program.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    return [n for n in found if "non_blocking" in n.kwargs]


def places(program: fz.Program) -> dict[str, int]:
    return {n.name: i for i, n in enumerate(program.graph.nodes)}


# -- fires -----------------------------------------------------------------------------------------


def test_fires_on_what_forward_saves(expect):
    before = on_cuda(gradients, *inputs())
    after = passes.run(before, [ALL])
    n = count(after)
    assert n > 0
    assert len(copies(after)) == 2 * n
    assert device_peak(after) < device_peak(before)
    assert {c.meta["val"].device.type for c in copies(after)} == {"cpu", "cuda"}
    again = passes.run(after, [ALL])
    assert count(again) == 0
    expect("everything", after.print_readable(False))


def test_views_are_taken_again_of_what_came_back():
    after = passes.run(on_cuda(gradients, *inputs()), [ALL])
    live = Liveness(after.graph)
    for back in copies(after)[1::2]:
        (storage,) = live.of[back]
        readers = {u.name for n in storage.nodes for u in n.users}
        assert readers, back
        assert storage.first == live.place[back]


def test_a_value_is_fetched_ahead():
    near, far = (passes.run(on_cuda(gradients, *inputs()), [Offload(0.0, ahead=n)]) for n in (0, 5))
    names = {c.name for c in copies(near) if c.name.endswith("_back")} & set(places(far))
    assert names
    moved = [places(near)[name] - places(far)[name] for name in names]
    assert max(moved) > 0
    assert min(moved) >= 0


def test_a_budget_sends_what_is_needed_last():
    before = on_cuda(gradients, *inputs())
    everything = passes.run(before, [ALL])
    budget = (device_peak(before) + device_peak(everything)) / 2 / 2**20
    after = passes.run(before, [Offload(0.0, budget)])
    assert 0 < count(after) < count(everything)
    assert device_peak(after) <= budget * 2**20
    assert count(passes.run(after, [Offload(0.0, budget)])) == 0
    assert copies(after)[0].name in {c.name for c in copies(everything)}


def test_the_bits_are_those_that_left():
    """On the host the same rewrite copies from the host to the host, which a replay can run."""
    before = fz.functions.trace(gradients, *inputs())
    before.describe()
    after = before.copy()
    live = Liveness(after.graph)
    regions = forwards(live)
    plan = Journeys(live, regions, 0)
    journeys = [j for s in saved_values(live, regions) if (j := plan.of(s)) is not None]
    assert len(journeys) > 10
    send(after.graph, live, journeys)
    after.graph.lint()
    after.graph_module.recompile()
    passes.run(after, "verify")
    assert len(copies(after)) == 2 * len(journeys)
    assert seen(after, inputs) == seen(before, inputs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_on_a_gpu_is_bitwise_the_same_in_less_memory():
    def wide() -> tuple[Tensor, ...]:
        x, *ws = inputs("cuda")
        return (x.repeat(4096, 1), *ws)

    before = fz.functions.trace(gradients, *wide())
    after = passes.run(before, "offload")
    assert count(after) > 0
    peaks = []
    results = []
    for program in (before, after):
        args = wide()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        results.append(program(*args))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[1] < peaks[0]


# -- refuses ---------------------------------------------------------------------------------------


def refused(before: fz.Program, each: Offload = ALL) -> None:
    after = passes.run(before, [each])
    assert count(after) == 0
    assert after.print_readable(False) == before.print_readable(False)


def test_refuses_a_program_on_the_host():
    refused(fz.functions.trace(gradients, *inputs()))


def test_refuses_what_is_small():
    refused(on_cuda(gradients, *inputs()), Offload(min_mb=1.0))


def test_refuses_a_budget_that_is_kept():
    refused(on_cuda(gradients, *inputs()), Offload(0.0, budget_mb=100.0))


def test_refuses_what_is_fetched_too_early_to_leave():
    refused(on_cuda(gradients, *inputs()), Offload(0.0, ahead=10_000))


def test_refuses_where_nothing_is_saved():
    refused(on_cuda(lambda x, *ws: F.gelu(x @ ws[0]), *inputs()))


def test_refuses_what_the_caller_is_handed():
    def handed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        w = w.detach().requires_grad_()
        h = x @ w
        g = F.gelu(h)
        (grad,) = torch.autograd.grad(g.sum(), [w])
        return grad, h.detach(), g.detach()

    refused(on_cuda(handed, *inputs()[:2]))


def test_refuses_a_part_of_a_storage():
    """A window on a larger storage would come back as a smaller one."""

    def window(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        g = torch.empty_strided((64, 8), (16, 1), device=x.device).copy_(x)
        (grad,) = torch.autograd.grad((g @ w).sum(), [w])
        return grad

    program = on_cuda(window, *inputs()[:2])
    live = Liveness(program.graph)
    regions = forwards(live)
    plan = Journeys(live, regions, 0)
    saved = saved_values(live, regions)
    odd = [s for s in saved if s.storage.nbytes != 64 * 8 * 4 and s.storage.nbytes > 2048]
    assert odd
    assert all(plan.of(s) is None for s in odd)


def test_refuses_a_graph_without_phases():
    program = on_cuda(gradients, *inputs())
    gm = program.graph_module
    for node in gm.graph.nodes:
        node.meta.pop("phase", None)
    before = gm.code
    assert passes.on_graph_module("offload{min_mb=0.0}")(gm) is gm
    assert gm.code == before


def test_options():
    text = "offload{min_mb=4.0, budget_mb=2000.0, ahead=10}"
    assert passes.parse(text) == (Offload(4.0, 2000.0, 10),)
    assert passes.pipeline_text(passes.parse(text)) == text
    with pytest.raises(PassError) as error:
        passes.run(fz.functions.trace(gradients, *inputs()), [Offload(ahead=-1)])
    assert_expected_inline(str(error.value), """`offload`: ahead is at least 0, not -1""")
