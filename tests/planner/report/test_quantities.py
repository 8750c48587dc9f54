"""What an op of a forward reads, makes and saves, and what its backward makes, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.cost.decide.saved import forwards, saved_values
from functionalize.cost.liveness import Liveness
from functionalize.planner.report.figures import Quantities, quantities
from tests.steps import make_step

X, W, H = 4 * 8 * 4, 8 * 16 * 4, 4 * 16 * 4  # bytes of the tensors below


def rows_of(fn: Callable[..., Any], *args: Tensor) -> list[Quantities]:
    return quantities(fz.functions.trace(fn, *args))


def gradients(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function that gives a loss, and its gradients by all but the first argument."""

    def step(x: Tensor, *given: Tensor) -> Any:
        leaves = [g.detach().requires_grad_() for g in given]
        value = loss(x, *leaves)
        value.backward()
        return value.detach(), [leaf.grad for leaf in leaves]

    return step


def test_a_layer():
    """`mm` saves nothing of its own, relu its result; the backward of `mm` makes the weight's gradient."""
    step = gradients(lambda x, w: torch.relu(x @ w).sum())
    mm, relu, total, seed = rows_of(step, torch.randn(4, 8), torch.randn(8, 16))
    assert seed.op == "aten.full.default"  # the gradient of the loss
    assert mm == Quantities("mm", "aten.mm.default", "", X + W, 0, H, 0, 0, W)
    assert relu == Quantities("relu", "aten.relu.default", "", H, 0, H, H, 0, H)
    assert (total.forward_in, total.forward_tmp, total.forward_out) == (H, 0, 4)


def test_what_is_saved_counts_once_however_many_views_are_saved():
    def loss(x: Tensor, w: Tensor) -> Tensor:
        h = torch.sigmoid(x @ w)
        return (h.t() @ h.view(4, 16)).sum()

    rows = rows_of(gradients(loss), torch.randn(4, 8), torch.randn(8, 16))
    assert [(row.op, row.saved) for row in rows if row.saved > 4] == [("aten.sigmoid.default", H)]


def test_what_only_a_backward_reads_of_itself_is_temporary():
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x @ w, [16]).square().sum()

    rows = {row.op: row for row in rows_of(gradients(loss), torch.randn(4, 8), torch.randn(8, 16))}
    square = rows["aten.pow.Tensor_Scalar"]
    assert square.backward_tmp >= H  # 2 * x, before it is multiplied by the gradient
    assert square.backward_out == H
    norm = rows["aten.native_layer_norm.default"]
    assert (norm.forward_out, norm.saved) == (H + 2 * 16, H + 2 * 16)


def test_rows_add_up_to_what_the_forwards_save():
    def loss(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for part in x.chunk(2):
            x = part + F.gelu(part @ up) @ down
        return x.square().sum()

    args = torch.randn(4, 8), torch.randn(8, 16), torch.randn(16, 8)
    program = fz.functions.trace(gradients(loss), *args)
    rows = quantities(program)
    live = Liveness(program.graph)
    saved = saved_values(live, forwards(live))
    assert sum(row.saved for row in rows) == sum(s.storage.nbytes for s in saved) > 0
    made = [s for s in live.storages if live.nodes[s.first].meta.get("phase") == "forward"]
    assert sum(r.forward_tmp + r.forward_out for r in rows) == sum(s.nbytes for s in made)


def test_what_runs_again_is_the_backwards():
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.sigmoid(x @ w), x, use_reentrant=False).sum()

    plain = rows_of(
        gradients(lambda x, w: torch.sigmoid(x @ w).sum()), torch.randn(4, 8), torch.randn(8, 16)
    )
    again = rows_of(gradients(loss), torch.randn(4, 8), torch.randn(8, 16))

    def saved(rows: list[Quantities]) -> int:
        return sum(row.saved for row in rows if "rng_state" not in row.op)

    assert saved(plain) - saved(again) == H
    back = [sum(r.backward_tmp + r.backward_out for r in rows) for rows in (plain, again)]
    assert back[1] >= back[0] + 2 * H


def test_a_step_of_a_model():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = fz.capture(make_step(model, optimizer))

    while not step.stats.replays:
        step(torch.randn(4, 8))
    rows = quantities(step.program)
    linears = [row for row in rows if row.op == "aten.addmm.default"]
    assert [row.saved for row in linears] == [H, 4 * 2 * 4]  # gelu and the square read them
    assert [row.backward_out for row in linears] == [W + 16 * 4, H + 16 * 2 * 4 + 2 * 4]
    assert not [row for row in rows if "foreach" in row.op]


def test_a_graph_without_phases_has_forwards_only():
    program = fz.functions.trace(lambda a: (a + 1).sum(), torch.randn(4, 8))
    for node in program.graph.nodes:
        node.meta.pop("phase", None)
        node.meta.pop("record", None)
    add, total = quantities(program)
    assert (add.forward_in, add.forward_out, add.saved, add.backward_out) == (X, X, 0, 0)
    assert (total.forward_in, total.forward_out) == (X, 4)
