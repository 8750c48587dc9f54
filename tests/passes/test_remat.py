"""`remat`: what is computed again, what stays saved, every refusal; the same bits on real ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize import passes
from functionalize.cost.liveness import Liveness
from functionalize.errors import PassError
from functionalize.ir.generators import is_random
from functionalize.passes.remat import Remat
from tests.fsdp.twins import Verdict, compare_twins
from tests.passes.helpers import count, rewrite, seen
from tests.ranks import run_on_ranks

DEPTH = 6


def inputs(rows: int = 64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, 8, generator=generator) for n in (rows, *[8] * 2 * DEPTH))


def gradients(x: Tensor, *given: Tensor, dropout: float = 0.0) -> list[Tensor]:
    """Residual blocks, forward and backward."""
    ws = [w.detach().requires_grad_() for w in given]
    for up, down in zip(ws[::2], ws[1::2], strict=True):
        x = x + F.dropout(F.gelu(x @ up) @ down, dropout)
    return list(torch.autograd.grad(x.pow(2).mean(), ws))


def with_dropout(x: Tensor, *given: Tensor) -> list[Tensor]:
    return gradients(x, *given, dropout=0.5)


def microbatches(x: Tensor, *given: Tensor) -> list[Tensor]:
    parts = [gradients(part, *given) for part in x.chunk(2)]
    return [a + b for a, b in zip(*parts, strict=True)]


def peak_mb(program: fz.Program) -> float:
    program.describe()
    return Liveness(program.graph).peak / 2**20


def random_ops(program: fz.Program) -> list[str]:
    return [n.name for n in program.graph.nodes if is_random(n)]


# -- fires -----------------------------------------------------------------------------------------


def test_fires_on_every_layer(expect):
    n, after = rewrite(gradients, inputs, Remat())
    assert n
    assert peak_mb(after) < 0.8 * peak_mb(fz.functions.trace(gradients, *inputs()))
    expect("every_layer", after.print_readable(False))


def test_a_dropout_keeps_its_mask(expect):
    before = fz.functions.trace(with_dropout, *inputs())
    n, after = rewrite(with_dropout, inputs, Remat())
    assert n
    assert random_ops(after) == random_ops(before)
    expect("dropout", after.print_readable(False))


def test_every_microbatch_has_its_own_backward():
    n, after = rewrite(microbatches, inputs, Remat())
    assert n
    assert peak_mb(after) < peak_mb(fz.functions.trace(microbatches, *inputs()))


def test_chosen_layers_only():
    copies = [rewrite(gradients, inputs, Remat("layer", (w,)))[0] for w in ("0", "1", "0-1")]
    assert all(copies)
    assert copies[0] + copies[1] == copies[2] < rewrite(gradients, inputs, Remat())[0]


def test_a_budget_is_met_with_the_least_recomputation():
    before = fz.functions.trace(gradients, *inputs())
    everything, lowest = rewrite(gradients, inputs, Remat())
    budget = (peak_mb(before) + peak_mb(lowest)) / 2
    n, after = rewrite(gradients, inputs, Remat("budget", budget_mb=budget))
    assert 0 < n < everything
    assert peak_mb(after) <= budget
    assert seen(after, inputs) == seen(before, inputs)


def test_a_budget_out_of_reach_gives_the_lowest_peak_found():
    _, lowest = rewrite(gradients, inputs, Remat())
    _, after = rewrite(gradients, inputs, Remat("budget", budget_mb=0.0))
    assert peak_mb(after) <= peak_mb(lowest)


def test_options_as_text():
    text = "remat{select=layer, layers=0+2-5},remat{select=budget, budget_mb=1.5, machine=h100}"
    parsed = passes.parse(text)
    assert parsed == (Remat("layer", ("0", "2-5")), Remat("budget", (), 1.5, "h100"))
    assert passes.pipeline_text(parsed) == text


# -- refuses ---------------------------------------------------------------------------------------


def refused(fn, make=inputs, each: Remat | None = None) -> None:
    n, after = rewrite(fn, make, each or Remat())
    assert n == 0
    assert after.print_readable(False) == fz.functions.trace(fn, *make()).print_readable(False)


def test_refuses_a_budget_that_is_kept():
    refused(gradients, each=Remat("budget", budget_mb=1e3))


def test_refuses_where_nothing_is_saved():
    refused(lambda x, *ws: F.gelu(x @ ws[0]))


def test_refuses_what_would_not_lower_the_peak():
    def peak_elsewhere(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.gelu(x @ w).pow(2).sum(), [w])
        return grad.expand(1000, *grad.shape).clone().sum(0)

    refused(peak_elsewhere, lambda: inputs()[:2])


def test_refuses_what_the_caller_is_handed():
    def handed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        w = w.detach().requires_grad_()
        h = x @ w
        g = F.gelu(h)
        (grad,) = torch.autograd.grad(g.sum(), [w])
        return grad, h.detach(), g.detach()

    refused(handed, lambda: inputs()[:2])


def test_refuses_to_draw_again():
    def only_random(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad((F.dropout(w, 0.5) @ x.t()).sum(), [w])
        return grad

    refused(only_random, lambda: inputs()[:2])


def test_refuses_a_graph_without_phases():
    gm = fz.functions.trace(gradients, *inputs()).graph_module
    for node in gm.graph.nodes:
        node.meta.pop("phase", None)
    before = gm.code
    assert passes.on_graph_module("remat")(gm) is gm
    assert gm.code == before


def test_a_graph_module_with_phases():
    gm = fz.functions.trace(gradients, *inputs()).graph_module
    expected = gm(*inputs())
    assert "gelu_6" not in gm.code
    passes.on_graph_module("remat")(gm)
    assert "gelu_6" in gm.code
    assert all(torch.equal(a, b) for a, b in zip(gm(*inputs()), expected, strict=True))


def message(each: Remat) -> str:
    with pytest.raises(PassError) as error:
        passes.run(fz.functions.trace(gradients, *inputs()), [each])
    return str(error.value)


def test_options_that_make_no_sense():
    assert_expected_inline(
        message(Remat("some")), """`remat`: select is one of all, layer, budget, not 'some'"""
    )
    words = """`remat`: select=budget and budget_mb go together; give both or neither"""
    assert message(Remat("budget")) == message(Remat(budget_mb=1.0)) == words
    words = """`remat`: select=layer and layers go together; give both or neither"""
    assert message(Remat("layer")) == message(Remat(layers=("1",))) == words
    assert_expected_inline(
        message(Remat("layer", ("first",))),
        """`remat`: layers are numbers and ranges such as 0+2-5, not 'first'""",
    )
    assert_expected_inline(
        message(Remat("layer", ("1-9",))),
        """`remat`: no layer 1-9; this program has layers 0 to 3""",
    )
    assert_expected_inline(
        message(Remat(machine="abacus")),
        """no machine `abacus`; there are auto, 4090, a100, b200, cpu, h100, h200, l40s, mi300x""",
    )


# -- on two ranks ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).movedim(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.movedim(-3, -2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *[Block(8) for _ in range(3)], nn.Linear(8, 4))
    for block in list(model)[1:-1]:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1):
    def step(x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in x.chunk(parts):
            loss = F.mse_loss(model(part), part)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer):
    return make_step(model, optimizer, 2)


STEPS = {"plain": make_step, "accumulating": accumulating}


@functools.cache
def plain(step: str) -> Any:
    """On a rank: the step captured without passes."""
    captured = fz.capture(STEPS[step](*build()))
    for _ in range(4):
        captured(torch.randn(8, 16, 4))
    return captured


def train(step: str, pipeline: str) -> tuple[Verdict, list[str], list[int]]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    batches = [(torch.randn(8, 16, 4, generator=generator),) for _ in range(6)]
    options = {"passes": pipeline, "allowance": None}  # at once, also for a large program
    verdict = compare_twins(build, STEPS[step], batches, reseed=False, **options)
    before = plain(step).program
    after = passes.run(before, pipeline)
    order = [[str(n.target) for n in p.graph.nodes if _talks_or_draws(n)] for p in (before, after)]
    assert order[0] == order[1]
    peaks = [Liveness(p.graph).peak for p in (before, after)]
    return verdict, [str(count(after)), *passes.run(after, pipeline).history[-1:]], peaks


def _talks_or_draws(node) -> bool:
    return is_random(node) or getattr(node.target, "namespace", "") == "_c10d_functional"


@pytest.mark.long
@pytest.mark.parametrize(
    ("step", "pipeline"),
    [
        ("plain", "remat"),
        ("accumulating", "remat"),
        ("plain", "remat{select=layer, layers=1-2}"),
        ("plain", "remat{select=budget, budget_mb=0.1}"),
        ("accumulating", "elide_copies,remat"),
    ],
)
def test_a_captured_step_stays_bitwise_eager(step, pipeline):
    for verdict, (rewrites, again), (before, after) in run_on_ranks(train, step, pipeline):
        assert verdict.differences == []
        assert verdict.replays >= 3
        assert verdict.guard_failures == []
        assert int(rewrites) > 0
        assert again.endswith(": 0")
        assert after < before
