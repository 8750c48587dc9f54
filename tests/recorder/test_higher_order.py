"""Higher-order ops, scripted modules, settings and ops of other libraries in a step: captured or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch.library import custom_op
from torch.nn.attention.flex_attention import flex_attention

import functionalize as fz
from functionalize.errors import UncapturableError, UnsupportedOpError
from tests.steps import make_loss_step

CALLS = 6


@custom_op("functionalize_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("functionalize_tests::add_noise", mutates_args={"x"})
def add_noise(x: Tensor) -> None:
    x.add_(torch.rand(x.shape))


@custom_op("functionalize_tests::tagged", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def tagged(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape)


@custom_op("functionalize_tests::seeded", mutates_args=())
def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.rand(x.shape)


@custom_op("functionalize_tests::total", mutates_args=())
def total(x: Tensor) -> float:
    return float(x.sum())


@custom_op("functionalize_tests::squared", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return (x @ x).float()


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.n = nn.Linear(4, 4), nn.Dropout(0.3), 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.n):
            x = self.drop(self.linear(x)).relu()
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scripted = torch.jit.script(Looped())


def by_cond(m: Any, x: Tensor) -> Tensor:
    """Eager gives the parameters of the branch that is not taken gradients of zeros, which decays the weights."""
    taken: Tensor = torch.cond(x.sum() > 0, lambda t: m.a(t).sin(), lambda t: m.b(t).cos(), (x,))
    return taken.sum()


def by_constant_cond(m: Any, x: Tensor) -> Tensor:
    taken: Tensor = torch.cond(True, lambda t: m.a(t).sin(), lambda t: m.b(t).cos(), (x,))
    return taken.sum()


def by_while_loop(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        (y,) = while_loop(lambda t: t.sum().abs() < 30, lambda t: (t * 1.5,), (x,))
    return m.a(y).sum()


def by_scan(m: Any, x: Tensor) -> Tensor:
    carry, rows = scan(lambda c, t: (c + t, c * t), torch.zeros(4), x)
    return m.a(rows).sum() + carry.sum()


def by_flex_attention(m: Any, x: Tensor) -> Tensor:
    """On CPUs it has no backward."""
    with torch.no_grad():
        q, scale = F.pad(x, (0, 12))[None, None], x.mean()
        out = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * scale)
    return (m.a(x) * out[0, 0, :, :4]).sum()


def with_noise(m: Any, x: Tensor) -> Tensor:
    return (m.a(x) * noise(x)).sum()


def with_noise_in_place(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    add_noise(y)
    return (m.a(x) * y).sum()


def by_traced_code(m: Any, x: Tensor) -> Tensor:
    """torch's check of a trace fails while any dispatch mode is active."""
    traced = torch.jit.trace(lambda t: t * 2 + 1, (x,))
    return traced(m.a(x)).sum()


def by_an_op_that_autocast_changes(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = squared(x[:4])
    return (m.a(x[:4]) * y).sum()


def by_bilinear_under_autocast(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.bilinear(x, x, m.b.weight.expand(3, 4, 4))
    return (y.sum(1, keepdim=True) * z).sum()


def with_setting(name: str, value: Any) -> Callable[[Any, Tensor], Tensor]:
    def body(m: Any, x: Tensor) -> Tensor:
        before = getattr(torch, f"get_{name}")()
        getattr(torch, f"set_{name}")(value)
        try:
            return (m.a(x) * (torch.arange(5)[:, None] / 3)).sum()
        finally:
            getattr(torch, f"set_{name}")(before)

    return body


def without_onednn(m: Any, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return F.conv1d(m.a(x)[None], torch.ones(3, 5, 2) / 3).sum()


def with_the_same_setting(m: Any, x: Tensor) -> Tensor:
    torch.set_num_threads(torch.get_num_threads())
    return m.a(x).sum()


Body = Callable[[Any, Tensor], Tensor]
REFUSED: dict[str, tuple[Body, str]] = {
    "cond": (by_cond, "runs the higher-order op `cond`"),
    "while_loop": (by_while_loop, "runs the higher-order op `while_loop`"),
    "scan": (by_scan, "runs the higher-order op `scan`"),
    "flex_attention": (by_flex_attention, "runs the higher-order op `flex_attention`"),
    "jit.trace": (by_traced_code, "traces code for TorchScript"),
    "noise": (with_noise, "functionalize_tests.noise.default draws random numbers"),
    "add_noise": (with_noise_in_place, "functionalize_tests.add_noise.default draws random"),
    "squared": (
        by_an_op_that_autocast_changes,
        "squared.default calls other ops under autocast",
    ),
    "bilinear": (by_bilinear_under_autocast, "_trilinear.default calls other ops under autocast"),
    "default_dtype": (
        with_setting("default_dtype", torch.float64),
        "torch's setting `default_dtype`",
    ),
    "num_threads": (with_setting("num_threads", 3), "torch's setting `num_threads`"),
    "precision": (
        with_setting("float32_matmul_precision", "medium"),
        "torch's setting `float32_matmul_precision`",
    ),
    "onednn": (without_onednn, "torch's setting `mkldnn_enabled`"),
    "total": (lambda m, x: m.a(x).sum() * total(x), "total.default returns a number to Python"),
}
CAPTURED: dict[str, Body] = {
    "same_setting": with_the_same_setting,
    "constant_cond": by_constant_cond,
    "scripted": lambda m, x: m.scripted(m.a(x)).sum(),
    "tagged": lambda m, x: (m.a(x) * tagged(x)).sum(),
    "seeded": lambda m, x: (m.a(x) * seeded(x)).sum(),
    "new_tensor": lambda m, x: (m.a(x) * x.new_tensor([1.0, 2.0, 3.0, 4.0]) * x.new_tensor(2.5)).sum(),
    "new_tensor_of_number": lambda m, x: (m.a(x) * x.new_tensor(x.shape[0] / 3)).sum(),
}  # fmt: skip


def trained(body: Body, wrap: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """The step, and the losses, parameters and generator states of a model that it trained."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, seen = wrap(make_loss_step(lambda x: body(model, x), optimizer)), []
    for i in range(CALLS):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(i))
        loss = step(x)
        found = [loss, *model.parameters(), torch.get_rng_state()]
        seen.append([t.detach().clone() for t in found])
    return step, seen


def compared(body: Body) -> Any:
    """The captured step, after it did what its eager twin did."""
    _, expected = trained(body, lambda fn: fn)
    step, seen = trained(body, lambda fn: fz.capture(fn, on_uncapturable="eager"))
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    return step


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore:Pred is a Python constant")
@pytest.mark.parametrize("name", CAPTURED)
def test_captured(name: str) -> None:
    assert compared(CAPTURED[name]).stats.replays >= 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_never_broken(name: str) -> None:
    body, why = REFUSED[name]
    step = compared(body)
    assert (step.stats.captures, step.stats.replays) == (0, 0) and why in step.explain()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
def test_the_call_after_the_recorded_one_raises() -> None:
    with pytest.raises(UncapturableError, match=r"higher-order op `cond`.*by_cond"):
        trained(by_cond, lambda fn: fz.capture(fn, on_uncapturable="raise"))


def test_a_trace_refuses_higher_order_ops() -> None:
    with pytest.raises(UnsupportedOpError, match="higher-order op `cond`"):
        fz.functions.trace(
            lambda x: torch.cond(x.sum() > 0, F.relu, torch.sin, (x,)), torch.ones(2)
        )
