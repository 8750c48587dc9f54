"""Numbers that Python reads in a capture: live where it computes with them, guarded where it learns them."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, RMSprop, lr_scheduler

import functionalize as fz
from functionalize import passes
from functionalize.errors import GuardError
from functionalize.ir.scalars import expression_text
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.live_scalars import is_live
from functionalize.state.hyperparameters import liftable, lifted
from functionalize.state.step_guards import HyperparameterGuard
from tests.scalars.bits import bits
from tests.steps import make_step

pytestmark = pytest.mark.usefixtures("ample_allowance")


def replayed(fn: Callable[..., Any], values: list[Any], captures: int = 1) -> Any:
    """`fn` of tensors made of `values`, captured: equal to eager at every call, in so many captures."""
    step = fz.capture(fn)
    for value in values:
        expected = fn(torch.tensor(value))
        assert bits(step(torch.tensor(value))) == bits(expected)
    assert step.stats.captures == captures, step.stats.guard_failures
    assert step.stats.replays >= len(values) - 1 - captures
    return step


# -- arithmetic ------------------------------------------------------------------------------------

FLOATS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda n: n,
    "linear": lambda n: 1 - n * 0.1 + 3,
    "bias_correction": lambda n: 0.001 / (1 - 0.9**n),
    "root": lambda n: n**0.5,
    "floors": lambda n: (n // 2, n % 2, 7 // n, 7 % n),
    "divmod": lambda n: divmod(n, 2) + divmod(7, n),
    "unary": lambda n: (-n, +n, abs(-n)),
    "rounded": lambda n: (round(n, 2), round(n), math.floor(n), math.ceil(n), math.trunc(n)),
    "sum": lambda n: sum([n, n, 1]),
    "largest": lambda n: max(n, 0.001) - min(n, 1e9),
    "complex_result_of_a_constant": lambda n: n * 2j if n < 0 else n,
    "nested": lambda n: {"loss": [n, (n * n,)]},
}


@pytest.mark.parametrize("name", FLOATS)
def test_arithmetic_of_floats_is_replayed(name: str) -> None:
    def fn(x: Tensor) -> Any:
        return FLOATS[name]((x * x).item())

    replayed(fn, [1.5, 2.25, 3.1, 4.7, 1.1])


INTS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda n: n,
    "linear": lambda n: 3 - 2 * n,
    "true_division": lambda n: (n / 3, 3 / n, 0.5 / n),
    "floors": lambda n: (n // 2, n % 2, 7 // n, 7 % n),
    "powers": lambda n: (2**n, n**2, n**0.5, 1.5**n),
    "bits": lambda n: (n & 6, n | 1, n ^ 3, n << 2, n >> 1, ~n),
    "mixed": lambda n: n * 1.5 + round(n / 3, 1),
}


@pytest.mark.parametrize("name", INTS)
def test_arithmetic_of_ints_is_replayed(name: str) -> None:
    def fn(x: Tensor) -> Any:
        return INTS[name](x.sum().item())

    replayed(fn, [[1, 2], [3, 4], [5, 6], [2, 3], [9, 1]])


OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda x, n: x * n,
    "rmul": lambda x, n: n * x,
    "div": lambda x, n: x / n,
    "rdiv": lambda x, n: n / x,
    "sub": lambda x, n: n - x,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "pow": lambda x, n: x**n,
    "clamp": lambda x, n: x.clamp(max=n),
    "lerp": lambda x, n: torch.lerp(x, x * x, n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x + 1, value=n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n) * x,
    "where": lambda x, n: torch.where(x > 1, x, n),
    "fill": lambda x, n: torch.empty(2).fill_(n) * x,
    "full": lambda x, n: torch.full((2,), n) * x,
    "in_place": lambda x, n: (x * 1).mul_(n).add_(n),
    "foreach": lambda x, n: torch._foreach_mul([x, x], [n, 2 * n])[1],
    "tensor": lambda x, n: torch.tensor(n) * torch.as_tensor(n, dtype=torch.float32) * x,
    "compared": lambda x, n: (x > n) * x,
    "leaky_relu": lambda x, n: F.leaky_relu(-x, n),
    "threshold": lambda x, n: F.threshold(x, n, n),
    "elu": lambda x, n: F.elu(-x, n),
}


# Autograd computes with their numbers in C++ (`exponent - 1`), which is guarded.
DERIVED_BY_VALUE = {"pow", "lerp"}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_ops_are_given_live_numbers(name: str, grad: bool) -> None:
    """In the forward, and in the backward that autograd makes with the numbers that it saved."""

    def fn(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_(grad)
        out = OPS[name](leaf, (x * x).mean().item())
        return torch.autograd.grad(out.sum(), leaf)[0] if grad else out

    values = [[0.5, 2.0], [1.5, 3.0], [0.25, 1.25], [2.5, 0.5], [1.0, 4.0]]
    replayed(fn, values, captures=4 if grad and name in DERIVED_BY_VALUE else 1)


POWERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x ** n": lambda x, n: x**n,
    "x **= n": lambda x, n: (x * 1).__ipow__(n),
    "pow": lambda x, n: torch.pow(x, exponent=n),
    "pow_": lambda x, n: (x * 1).pow_(n),
    "float_power": lambda x, n: x.float_power(n),
    "foreach": lambda x, n: torch._foreach_pow([x, x], [n, 2 * n])[1],
}


def derived(x: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(power(leaf).sum(), leaf)[0]


def derived_forward(x: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
    tangent: Tensor = torch.func.jvp(power, (x,), (torch.ones_like(x),))[1]
    return tangent


# The first use of forward mode makes torch script its decompositions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("derivative", [derived, derived_forward])
@pytest.mark.parametrize("name", POWERS)
def test_exponents_that_float32_cannot_hold(name: str, derivative: Any) -> None:
    """Autograd of torch 2.15 has a formula for symbolic exponents that rounds them to the dtype of the base."""
    if name == "foreach" and derivative is derived_forward:
        pytest.skip("torch has no forward mode for it")

    def fn(x: Tensor) -> Tensor:
        exponent = 0.1 * (x * x).mean().item()
        return derivative(x, lambda base: POWERS[name](base, exponent))

    draw = torch.Generator().manual_seed(0)
    values = [torch.rand(50, generator=draw).tolist() for _ in range(5)]
    step = fz.capture(fn)
    for value in values:
        assert bits(step(torch.tensor(value))) == bits(fn(torch.tensor(value)))
    assert step.stats.captures == 4 and not step.stats.eager  # the first call warms up


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_torch_script_knows_the_functions_that_are_replaced() -> None:
    """Forward mode scripts its decompositions when it is first used, and these call `torch.pow`."""

    def powers(x: Tensor) -> Tensor:
        return torch.pow(x, 2) + x.pow(2) + torch.tensor(1)

    def fn(x: Tensor) -> Tensor:
        result: Tensor = torch.jit.script(powers)(x)
        return result

    assert torch.equal(fz.functions.trace(fn, torch.ones(2))(torch.ones(2)), torch.full((2,), 3.0))


def test_a_live_base_is_plain_where_autograd_needs_its_logarithm() -> None:
    def fn(x: Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((x.mean().item() ** leaf).sum(), leaf)[0]

    step = fz.capture(fn)
    for value in ([0.5, 2.0], [0.5, 2.0], [0.5, 2.0], [1.5, 3.0]):
        x = torch.tensor(value)
        assert torch.equal(step(x), fn(x))
    assert (step.stats.captures, step.stats.replays) == (2, 1)


def halves(x: Tensor) -> list[float]:
    return [each.item() / 3 for each in x]


_held, _by_name = sum, {"sum": sum}
SUMS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: sum(halves(x)),
    "generator": lambda x: sum(each.item() for each in x),
    "start": lambda x: sum(halves(x), 0.1),
    "live start": lambda x: sum([0.1, 1e16, -1e16], x[0].item()),
    "integers": lambda x: sum([x[0].item(), 3, True, x[1].item(), 10**17, x[2].item()]),
    "two": lambda x: sum(halves(x)[:2]),
    "tensors": lambda x: sum([*halves(x), x, 2.0, x[0].item()]),
    "tensors alone": lambda x: sum(each * each.item() for each in x),
    "numpy's": lambda x: sum([*halves(x), numpy.float64(1e16), 0.1, -1e16]),
    "complex": lambda x: complex(sum([*halves(x), 1e16j, 0.1])).real,
    "nested": lambda x: sum(sum(halves(x)) * k for k in (1.1, 1e16, -1e16)),
    "of nothing": lambda x: sum([]) + x[0].item(),
    "mapped": lambda x: sum(map(sum, [halves(x), halves(x * 1e16), halves(-x * 1e16)])),
    "held": lambda x: _held(halves(x)),
    "in a dict": lambda x: _by_name["sum"](halves(x)),
    "products": lambda x: math.sumprod(halves(x), halves(x)) if sys.version_info >= (3, 12) else 0,
    "lists": lambda x: sum([[x[0].item()], halves(x)], [])[-1],  # noqa: RUF017
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_this_python(name: str) -> None:
    """Since 3.12 `sum` rounds floats once, where 3.11 rounds each addition."""
    found: list[list[Any]] = [[], []]

    def fn(x: Tensor, to: list[Any]) -> Tensor:
        number = SUMS[name](x)
        to.append(number)
        return x.to(torch.float64) * number

    step = fz.capture(fn, on_uncapturable="eager")
    for k in range(6):
        x = torch.randn(7, generator=torch.Generator().manual_seed(k)) * 10**k
        assert torch.equal(step(x.clone(), found[0]), fn(x.clone(), found[1]))
    for ours, eager in zip(*found, strict=True):
        assert repr(ours) == repr(eager) and type(ours) is type(eager)


_least = min
EXTREMES: dict[str, Callable[[Any, Any], Any]] = {
    "two": lambda n, m: min(n, m) - max(n, m),
    "a constant": lambda n, m: max(0.25, min(1.0, n * m)),
    "several": lambda n, m: (min(n, m, 0.5, -n), max(-m, 0.5, n)),
    "a list": lambda n, m: (min([n, m, 0.5]), max((n, m))),
    "a generator": lambda n, m: max(k * n for k in (1, -1)),
    "zeros": lambda n, m: (min(0.0 * n, -0.0 * n), max(-0.0 * n, 0.0 * n), min(-0.0 * n, 0.0)),
    "not a number": lambda n, m: (min(n, math.nan), min(math.nan, n), max([math.nan, n, m])),
    "an integer and a float": lambda n, m: (min(1, n), max(0, n), max(n, 0), max(True, n)),
    "a key": lambda n, m: max(n, m, key=lambda each: -each),
    "a default": lambda n, m: max([], default=n) + min([m], default=0.0),
    "held": lambda n, m: _least(n, m),
    "numpy's": lambda n, m: float(max(n, numpy.float64(0.5))),
    "texts": lambda n, m: (max("a", "b"), n),
    "nothing live": lambda n, m: (max(1, 2), min(n, n)),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_least_and_the_greatest(name: str) -> None:
    found: list[list[Any]] = [[], []]

    def fn(x: Tensor, to: list[Any]) -> Tensor:
        to.append(EXTREMES[name](x[0].item(), x[1].item()))
        return x * 2

    step = fz.capture(fn, on_uncapturable="eager")
    for k in range(12):
        x = torch.randn(2, generator=torch.Generator().manual_seed(k))
        assert torch.equal(step(x.clone(), found[0]), fn(x.clone(), found[1]))
    for ours, eager in zip(*found, strict=True):
        assert repr(ours) == repr(eager), name


def test_which_is_the_least_is_no_branch() -> None:
    step = replayed(lambda x: x * min(x.item(), 2.0), [1.0, 3.0, 0.5, 7.0, 2.0])
    assert step.stats.captures == 1


def test_a_min_that_a_script_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original, asked = min, []

    def own(*args: Any, **keywords: Any) -> Any:
        asked.append(args)
        return original(*args, **keywords)

    monkeypatch.setattr("builtins.min", own)
    step = fz.capture(lambda x: x * min(x.item(), 2.0), on_uncapturable="eager")
    for value in (1.0, 3.0):
        assert step(torch.tensor(value)).item() == value * original(value, 2.0)
    assert min is own and asked


# -- what is learned -------------------------------------------------------------------------------


def test_a_comparison_is_guarded_and_not_the_number() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 10 else x * 3

    step = replayed(fn, [1.0, 2.0, 3.0, 4.0], captures=1)
    assert torch.equal(step(torch.tensor(11.0)), torch.tensor(22.0))
    assert "`item > 10` read at " in step.stats.guard_failures[0]
    assert step.stats.guard_failures[0].endswith("is True, was False")


def test_a_text_is_guarded_and_not_the_number() -> None:
    def fn(x: Tensor) -> tuple[Tensor, str]:
        return x * 2, f"{x.item():.1f}"

    step = replayed(fn, [1.51, 1.52, 1.53, 1.49])
    assert step(torch.tensor(2.0))[1] == "2.0"
    assert "`format(item, '.1f')`" in step.stats.guard_failures[0]


def test_an_error_that_the_step_raises_passes_through() -> None:
    def fn(x: Tensor) -> Tensor:
        if x.item() > 1e9:
            raise ValueError("diverged")
        return x * 2

    step = replayed(fn, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="diverged"):
        step(torch.tensor(1e10))
    assert torch.equal(step(torch.tensor(4.0)), torch.tensor(8.0))


def test_a_division_by_zero_at_replay_is_what_it_is_in_eager() -> None:
    weight = torch.ones(2)

    def fn(x: Tensor) -> Tensor:
        rate = 1 / x.item()
        return weight.mul_(rate).clone()

    step = fz.capture(fn)
    for value in (1.0, 2.0, 4.0):
        step(torch.tensor(value))
    before = weight.clone()
    with pytest.raises(ZeroDivisionError) as raised:
        step(torch.tensor(0.0))
    assert torch.equal(weight, before)
    assert step.stats.guard_failures == [f"a number cannot be computed: {raised.value}"]


def test_sizes_and_bools_are_constants_with_a_guard() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        n = x.sum().item()
        rows = torch.zeros(n, 2) if (x > 0).all().item() else torch.ones(1)
        return rows, torch.ones(8)[:n] * torch.arange(n)

    step = fz.capture(fn)
    for value in ([1, 2], [1, 2], [2, 1], [3, 1], [-1, 4]):
        x = torch.tensor(value)
        assert bits(step(x)) == bits(fn(x))
    assert (step.stats.captures, step.stats.replays) == (3, 1)


def learned(fn: Callable[[Any, Any], Any]) -> tuple[Any, list[str]]:
    """What `fn` of a live 2.5 and a live 7 gives, and what the recording learned by that."""
    x, y = torch.tensor(2.5), torch.tensor(7)
    with Recorder(ignore_fake=True, live=True) as recorder:
        number, count = x.item(), y.item()
        assert is_live(number) and is_live(count)
        result = fn(number, count)
    assert recorder.scalar_log is not None
    facts = recorder.scalar_log.facts.values()
    return result, [f"{expression_text(f.expression)} -> {f.value!r}" for f in facts]


LEARNED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "types": (lambda n, k: (isinstance(n, float), isinstance(k, int), isinstance(k, float)), []),
    "equal": (lambda n, k: (n == n, n == "text", n is None), ["item == item -> True"]),
    "finite": (lambda n, k: math.isfinite(n), ["isfinite(item) -> True"]),
    "key": (lambda n, k: {n: 1}[2.5], ["item -> 2.5", "item == 2.5 -> True"]),
    "text": (lambda n, k: (str(n), f"{k}"), ["repr(item) -> '2.5'", "format(item, '') -> '7'"]),
    "percent": (lambda n, k: "%.2f" % (n,), ["item -> 2.5"]),  # noqa: UP031
    "int": (lambda n, k: int(n), ["int(item) -> 2"]),
    "truth": (lambda n, k: not n, ["truth(item) -> True"]),
    "index": (lambda n, k: list(range(k))[-1], ["item -> 7"]),
    "in": (lambda n, k: n in (1, 2.5), ["item == 1 -> False", "item == 2.5 -> True"]),
    "whole": (lambda n, k: n.is_integer(), ["is_integer(item) -> False"]),
    "hex": (lambda n, k: n.hex(), ["item -> 2.5"]),
    "bits": (lambda n, k: k.bit_count(), ["item -> 7"]),
    "json": (lambda n, k: json.dumps({"a": n}), ["item -> 2.5"]),
    "pickle": (lambda n, k: pickle.loads(pickle.dumps(n)), ["item -> 2.5"]),
    "copies": (lambda n, k: copy.deepcopy(n) is n and copy.copy(k) is k, []),
    "int_power": (lambda n, k: 2**k == 1, ["item >= 0 -> True", "(2 ** item) == 1 -> False"]),
    "list": (lambda n, k: torch.tensor([n, 1.0]).sum() > 0, []),
    "listed": (lambda n, k: torch.tensor([n], requires_grad=False) > 0, ["item -> 2.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_what_python_learns_of_a_number_is_a_fact(name: str) -> None:
    fn, facts = LEARNED[name]
    result, found = learned(fn)
    assert bits(result) == bits(fn(2.5, 7))
    assert found == facts


def test_an_error_in_arithmetic_is_a_fact_of_its_operands() -> None:
    def fn(n: Any, k: Any) -> str:
        try:
            return str(1 / (n - 2.5))
        except ZeroDivisionError:
            return "caught"

    assert learned(fn) == ("caught", ["item - 2.5 -> 0.0"])


# -- when the recording has ended ------------------------------------------------------------------


def test_after_its_recording_a_number_is_a_constant() -> None:
    with Recorder(ignore_fake=True, live=True) as recorder:
        number = torch.tensor(2.5).item()
    assert number + 1 == 3.5 and not is_live(float(number)) and bool(number)
    assert torch.equal(torch.ones(2) * float(number), torch.full((2,), 2.5))
    assert recorder.scalar_log is not None and not recorder.scalar_log.facts


@pytest.mark.parametrize("name", ["mul", "div", "rdiv", "sub", "pow", "clamp", "tensor"])
def test_a_backward_after_the_recording_has_the_numbers(name: str) -> None:
    """Torch puts a NaN in the place of a symbolic number and looks behind it only under a mode."""
    leaf, twin = (torch.tensor([0.5, 2.0], requires_grad=True) for _ in range(2))
    read = torch.tensor(2.5)
    with Recorder(ignore_fake=True, live=True):
        out = OPS[name](leaf, read.item())
    out.sum().backward()
    OPS[name](twin, 2.5).sum().backward()
    assert bits(leaf.grad) == bits(twin.grad)


def test_the_user_gets_plain_numbers() -> None:
    step = fz.capture(lambda x: {"loss": x.item(), "all": [x.sum().item() * 2]})
    for i in range(5):
        out = step(torch.tensor(float(i)))
        assert [type(out["loss"]), type(out["all"][0])] == [float, float]
        assert out == {"loss": float(i), "all": [2.0 * i]}


def test_a_number_of_a_recording_around_this_one_is_refused() -> None:
    inner = fz.capture(lambda x, n: x * n)
    with Recorder(ignore_fake=True, live=True):
        number = torch.tensor(2.5).item()
        inner(torch.ones(2), 1.0)
        with Recorder(ignore_fake=True, live=True) as recorder:
            torch.ones(2) * number
    assert recorder.checks.unrepeatable == [
        "a number that another recording reads is used in this one: pass it to the inner step as a tensor"
    ]


# -- optimizers ------------------------------------------------------------------------------------


def twins(make: Callable[[Any], torch.optim.Optimizer]) -> list[tuple[nn.Module, Any]]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        found.append((model, make(model.parameters())))
    return found


def make_reading_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), loss.item()

    return step


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    schedule: Callable[[Any], Any] | None = None,
    steps: int = 8,
    **options: Any,
) -> Any:
    """The captured step, after both twins were trained and found equal at every step."""
    (a, theirs), (b, mine) = twins(make)
    eager, step = make_reading_step(a, theirs), fz.capture(make_reading_step(b, mine), **options)
    schedulers = [schedule(o) for o in (theirs, mine)] if schedule is not None else []
    for i in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        assert bits(step(x)) == bits(eager(x))
        assert bits(list(b.parameters())) == bits(list(a.parameters()))
        for each in schedulers:
            each.step()
    return step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_fused": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adam_foreach": lambda p: Adam(p, foreach=True, amsgrad=True),
    "adamw": lambda p: AdamW(p),
    "adamw_foreach": lambda p: AdamW(p, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),  # the weight decay is the same number
    "nadam": lambda p: NAdam(p),
    "asgd": lambda p: ASGD(p, foreach=False),
    "adamax": lambda p: Adamax(p, foreach=True),
    "rmsprop": lambda p: RMSprop(p, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, lr_decay=0.1),
    "adagrad_fused": lambda p: Adagrad(p, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_default_arguments_are_captured_once(name: str) -> None:
    step = trained(OPTIMIZERS[name], lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    assert (step.stats.captures, step.stats.guard_failures) == (1, [])
    assert step.stats.replays >= 5


def test_hyperparameters_that_change_become_live() -> None:
    step = trained(
        OPTIMIZERS["adamw"], lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20), steps=12
    )
    assert step.stats.captures == 2
    assert "`optimizer` group 0 has betas = (" in step.stats.guard_failures[0]
    names = {spec.name for spec in step.program.inputs}
    assert {"optimizer_lr_0", "optimizer_betas_0_0"} <= names


def test_the_program_of_default_adamw(expect: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    step = fz.capture(make_reading_step(model, AdamW(model.parameters())))
    for i in range(4):
        step(torch.ones(3, 4) * i)
    expect("adamw", step.program.print_readable(False))
    passes.run(step.program, "default,verify")


def test_passes_leave_live_numbers_as_they_are() -> None:
    step = trained(OPTIMIZERS["adamw"], lambda o: lr_scheduler.StepLR(o, 2), passes="default")
    assert (step.stats.captures, step.stats.guard_failures) == (1, [])


def test_a_branch_on_the_learning_rate_is_guarded_before_anything_runs() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)

    def step() -> Tensor:
        weight.grad = torch.ones(2)
        if optimizer.param_groups[0]["lr"] > 0.05:
            optimizer.step()
        weight.grad = None
        return weight.detach().clone()

    captured = fz.capture(step)
    for rate in (0.1, 0.1, 0.1, 0.08, 0.06):
        optimizer.param_groups[0]["lr"] = rate
        before = weight.detach().clone()
        assert torch.equal(captured(), before - rate * torch.ones(2))
    assert captured.stats.guard_failures == []
    assert (
        "guards on numbers:\n    optimizer.lr_0 > 0.05 is True"
        in captured.program.print_readable(False)
    )
    optimizer.param_groups[0]["lr"] = 0.01
    before = weight.detach().clone()
    assert torch.equal(captured(), before)
    assert "`optimizer.lr_0 > 0.05` at " in captured.stats.guard_failures[0]


def test_a_learning_rate_of_another_type_is_noticed() -> None:
    (_, _), (model, optimizer) = twins(OPTIMIZERS["sgd"])
    step = fz.capture(make_reading_step(model, optimizer))
    for _ in range(3):
        step(torch.ones(3, 4))
    optimizer.param_groups[0]["lr"] = 1
    step(torch.ones(3, 4))
    assert step.stats.captures + step.stats.warmups == 3
    assert len(step.stats.guard_failures) == 1


def test_a_scheduler_inside_the_step_leaves_plain_numbers() -> None:
    (_, _), (model, optimizer) = twins(OPTIMIZERS["sgd"])
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain = make_reading_step(model, optimizer)

    def step(x: Tensor) -> Any:
        out = plain(x)
        scheduler.step()
        return out

    captured = fz.capture(step)
    for i in range(12):
        captured(torch.ones(3, 4))
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert scheduler.last_epoch == i + 1
    assert captured.stats.replays >= 6


# -- lifted hyperparameters --------------------------------------------------------------------------


def test_what_was_lifted_is_put_back_whatever_happens() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    group, betas = optimizer.param_groups[0], optimizer.param_groups[0]["betas"]
    keys = liftable({"o": optimizer}, ("lr", "betas", "eps", "foreach"))
    assert keys == {("o", 0, "lr"), ("o", 0, "betas"), ("o", 0, "eps")}
    recorder = Recorder(ignore_fake=True, live=True)
    with pytest.raises(KeyError), lifted({"o": optimizer}, keys, recorder), recorder:
        assert is_live(group["lr"]) and is_live(group["betas"][1])
        raise KeyError
    assert type(group["lr"]) is float and group["betas"] is betas


def test_what_the_step_assigned_to_a_lifted_key_stays_and_is_told() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    group, keys = optimizer.param_groups[0], liftable({"o": optimizer})
    with lifted({"o": optimizer}, keys, Recorder(ignore_fake=True, live=True)) as hyper:
        group["lr"], group["dampening"] = group["lr"] * 0.5, 1
    assert bits(group["lr"]) == bits(0.05) and hyper.changed is None
    ((effect, value),) = hyper.effects
    assert effect.what == "sets `o` group 0: lr" and value.node.left_behind() == 0.05
    assert hyper.wanted == {("o", 0, "dampening")}
    with lifted({"o": optimizer}, keys, Recorder(ignore_fake=True, live=True)) as hyper:
        group["lr"] = 0.1
    assert group["lr"] == 0.1 and not hyper.effects and hyper.changed is not None
    assert hyper.changed.startswith("sets `o` group 0: lr to 0.1 (it was 0.05), which a replay")


def test_a_recording_without_live_numbers_lifts_nothing() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    recorder = Recorder(ignore_fake=True)
    with lifted({"o": optimizer}, liftable({"o": optimizer}), recorder), recorder:
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert not is_live(torch.tensor(1.0).item())
    assert [s.value for s in recorder.scalars] == [1.0]


def test_a_guard_names_the_hyperparameters_that_changed() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    guard = HyperparameterGuard.of("o", optimizer, {("o", 0, "lr")})
    group = optimizer.param_groups[0]
    group["lr"] = 0.2
    assert not guard.changed_keys()
    group["betas"], group["eps"], group["amsgrad"] = (0.8, 0.9), 1e-6, True
    assert guard.changed_keys() == {("o", 0, "betas"), ("o", 0, "eps")}


# -- gradient scalers, clipping, lowering ------------------------------------------------------------


def test_a_gradient_scaler_with_overflows() -> None:
    (a, theirs), (b, mine) = twins(OPTIMIZERS["adamw"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]

    def scaled(model: nn.Module, optimizer: Any, scaler: Any) -> Callable[..., Any]:
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager, step = scaled(a, theirs, scalers[0]), fz.capture(scaled(b, mine, scalers[1]))
    for i in range(14):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        x = x * math.inf if i in (5, 9) else x
        assert bits(step(x)) == bits(eager(x))
        assert bits(list(b.parameters())) == bits(list(a.parameters()))
        assert scalers[1].get_scale() == scalers[0].get_scale()
    assert scalers[1].get_scale() < 64
    assert step.stats.replays >= 8


def test_clipping_by_a_norm_that_is_read() -> None:
    weight = nn.Parameter(torch.ones(3))

    def fn(x: Tensor) -> Tensor:
        weight.grad = x * 1.0
        nn.utils.clip_grad_norm_([weight], x.mean().item())
        nn.utils.clip_grad_value_([weight], x.amax().item() / 2)
        gradient, weight.grad = weight.grad, None
        return gradient

    replayed(fn, [[1.0, 2.0, 3.0], [2.0, 5.0, 9.0], [0.5, 0.25, 1.0], [3.0, 3.0, 4.0]])


def test_a_program_with_live_numbers_is_lowered() -> None:
    step = replayed(lambda x: (x * (1 - 0.5 ** x.sum().item()), x.max().item()), [1.0, 2.0, 3.0])
    lowered = step.program.lower()
    x = torch.tensor(5.0)
    assert bits(lowered(x)) == bits((x * (1 - 0.5**5.0), 5.0))


def test_a_program_says_why_a_number_no_longer_fits() -> None:
    step = replayed(lambda x: x * 2 if x.item() < 3 else x, [1.0, 2.0, 2.5])
    with pytest.raises(GuardError, match=r"`item < 3` read at .* is False, was True"):
        step.program(torch.tensor(4.0))


@pytest.mark.parametrize("pipeline", ["", "default"])
def test_nothing_keeps_a_captured_step_that_was_dropped(pipeline: str) -> None:
    """A rate leads to its optimizer, and so to the model: no cache may keep it. Sizes that no other test has."""

    def run() -> list[weakref.ref[Any]]:
        model = nn.Linear(37, 41 + len(pipeline))
        optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)

        captured = fz.capture(make_step(model, optimizer), passes=pipeline)
        for _ in range(4):
            captured(torch.randn(3, 37))
        assert captured.stats.replays
        kept = (model, optimizer, captured, captured.program, *model.parameters())
        return [weakref.ref(each) for each in kept]

    left = run()
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def test_labels_of_one_hot_may_be_any_in_range() -> None:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        return -(F.one_hot(labels, 8) * x.log_softmax(-1)).sum()

    captured = fz.capture(step)
    for i in range(6):
        x, labels = torch.randn(3, 8), torch.arange(i % 3, i % 3 + 3)
        assert bits(captured(x, labels)) == bits(step(x, labels))
    assert (captured.stats.captures, captured.stats.replays) == (1, 4), captured.explain()
    for bad, why in ((8, "smaller than num_classes"), (-1, "non-negative")):
        with pytest.raises(RuntimeError, match=why):
            captured(x, torch.tensor([0, 1, bad]))
