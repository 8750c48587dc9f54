"""A live number becomes plain with its guard, or as a part of a record: one function for each, and no other way."""

from __future__ import annotations

import ast
import json
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, lr_scheduler

import functionalize as fz
from tests.scalars.bits import bits

PACKAGE = Path(fz.__file__).parent
# Who takes the value of a number other than with a guard, and why no guard is needed: Note [Exits of a number].
EXITS = {
    "_hint": {
        "scalars/scalar_log.py": "the value is private there",
    },
    "carried": {
        "scalars/scalar_arguments.py": "the kernel receives the `hint` of the number in the record of its op",
        "audit/signature.py": "an output of the step, compared by its expression",
    },
    "shown_by": {
        "scalars/live_scalars.py": "C code formats the number for a text that is pending",
        "scalars/live_text.py": "a text that is pending, or a fact",
    },
    "left_behind": {
        "scalars/live_scalars.py": "the function of that name; results, of which the program computes the number",
        "scalars/escaped_numbers.py": "places of numbers after the recording",
        "scalars/scalar_arguments.py": "a number of another recording: this one is refused",
        "scalars/scalar_patches.py": "the bytes of a wrapped number, whose attribute keeps the expression",
        "calls/call_arguments.py": "arguments of a call that a replay makes with the number of then",
        "calls/schedulers.py": "an attribute of a scheduler, whose reads give the number of the recording",
        "lengths/observed_sizes.py": "a size, whose formula is noted beside it",
        "state/moving_state.py": "places of numbers after the recording, which an effect assigns",
        "state/carried_containers.py": "containers at such places",
        "walk/walker.py": "a fact about a number that an object of C code holds still",
        "walk/live_places.py": "the type of what a place holds",
    },
}


def _uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in EXITS:
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXITS:
            yield node.func.id
        if isinstance(node, (ast.ImportFrom,)):
            yield from (alias.name for alias in node.names if alias.name in EXITS)


def test_a_number_is_made_plain_by_its_own_methods_alone():
    found: dict[str, set[str]] = {name: set() for name in EXITS}
    for file in PACKAGE.rglob("*.py"):
        for name in _uses(ast.parse(file.read_text())):
            found[name].add(file.relative_to(PACKAGE).as_posix())
    assert found == {name: set(users) for name, users in EXITS.items()}


# -- several live numbers in one call --------------------------------------------------------------

Make = Callable[[], Callable[..., Any]]
FACTORS = [0.5, 0.3, 0.2, 0.1, 0.4, 0.25, 0.15]


def _norm(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
    mean, var = torch.zeros(6), torch.ones(6)
    y = F.batch_norm(x, mean, var, training=True, momentum=a, eps=b)
    return y * c + mean.sum() + var.sum()


CALLS: dict[str, Callable[..., Any]] = {
    "batch_norm": _norm,
    "batch_norm_by_keyword": lambda x, a, b, c: torch.batch_norm(
        x, None, None, torch.zeros(6), torch.ones(6), True, momentum=a, eps=b, cudnn_enabled=False
    ),
    "batch_norm_in_evaluation": lambda x, a, b, c: F.batch_norm(
        x, torch.zeros(6), torch.ones(6), momentum=a, eps=b
    )
    * c,
    "instance_norm": lambda x, a, b, c: F.instance_norm(
        x.view(2, 2, 6), torch.zeros(2), torch.ones(2), momentum=a, eps=b
    ),
    "layer_norm": lambda x, a, b, c: F.layer_norm(x, (6,), eps=a) * b + c,
    "group_norm": lambda x, a, b, c: F.group_norm(x, 2, eps=a).add(x, alpha=b) / c,
    "normalize": lambda x, a, b, c: F.normalize(x, p=2.0 + a, eps=b) * c,
    "addcmul": lambda x, a, b, c: torch.addcmul(x, x, x, value=a).addcdiv(x, x + 2, value=b) * c,
    "addmm": lambda x, a, b, c: torch.addmm(x, x, torch.eye(6), beta=a, alpha=b) - c,
    "lerp": lambda x, a, b, c: torch.lerp(x, x * b, a) + c,
    "clamp": lambda x, a, b, c: torch.clamp(x, min=-a, max=b) * c,
    "hardtanh": lambda x, a, b, c: F.hardtanh(x, -a, b) * c,
    "elu": lambda x, a, b, c: torch.ops.aten.elu(x, a, b, c),
    "celu": lambda x, a, b, c: F.celu(x, a) + F.leaky_relu(x, b) + F.softplus(x, c),
    "threshold": lambda x, a, b, c: F.threshold(x, a, b) * c,
    "sub": lambda x, a, b, c: torch.sub(x, b, alpha=a) + torch.rsub(x, c, alpha=b),
    "losses": lambda x, a, b, c: F.huber_loss(x, x * a, delta=b) + F.smooth_l1_loss(x, -x, beta=c),
    "margins": lambda x, a, b, c: F.triplet_margin_loss(x, x * c, -x, margin=a, eps=b),
    "pad": lambda x, a, b, c: F.pad(x, (1, 1), value=a) * b - c,
    "full": lambda x, a, b, c: torch.full((6,), a) * x + torch.full_like(x, b).fill_(c) * x,
    "where": lambda x, a, b, c: torch.where(x > a, x * b, c).masked_fill(x < -b, a),
    "arange": lambda x, a, b, c: torch.arange(a, a + 6 * b, b)[:6] * x * c,
    "linspace": lambda x, a, b, c: torch.linspace(a, b, 6) * x * c,
    "dropout": lambda x, a, b, c: F.dropout(x * b, p=a) * c,
    "foreach": lambda x, a, b, c: sum(torch._foreach_mul(torch._foreach_add([x, x, x], [a, b, c]), a)),
    "foreach_tensors": lambda x, a, b, c: sum(torch._foreach_addcmul([x, x], [x, x], [x, x], [a, b])),
    "interpolate": lambda x, a, b, c: F.interpolate(x.view(1, 4, 6), scale_factor=1 + a) * b + c,
    "tensor": lambda x, a, b, c: x * torch.tensor([a, b, c]).sum() + torch.tensor(a),
    "tensor_of_lists": lambda x, a, b, c: x * torch.tensor([[a, b], [c, 1]]).prod() * torch.as_tensor([a, 2]).sum(),
    "zeta": lambda x, a, b, c: torch.special.zeta(2 + a, x.abs() + b) * c,
    "pow": lambda x, a, b, c: (x.abs() + a) ** b * torch.pow(c, x),
    "math": lambda x, a, b, c: x * math.atan2(a, b) + math.hypot(a, b, c) + math.fsum([a, b, c]),
    "math_of_kinds": lambda x, a, b, c: x * math.fmod(a, b) + math.copysign(b, -c) + max(a, b, c),
    "json": lambda x, a, b, c: x * len(json.dumps({"a": a, "b": [b, c]})),
    "statistics": lambda x, a, b, c: x * statistics.mean([a, b, c]) + statistics.pstdev([a, b, c]),
    "text": lambda x, a, b, c: x * float("%.1f" % a) * len(f"{b:.3f} {c}"),  # noqa: UP031
    "sums": lambda x, a, b, c: x * sum([a, b, c]) * round(a + b, 2) * divmod(c, a)[1],
    "powers": lambda x, a, b, c: x * a**b * abs(-c),
}  # fmt: skip


def _of_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    """The numbers are read from arguments."""

    def step(x: Tensor, numbers: Tensor) -> Any:
        return _results(call, x, [n.item() for n in numbers])

    return step


def _of_config(call: Callable[..., Any]) -> Callable[..., Any]:
    """The numbers are those of an object, which the step moves."""
    config = SimpleNamespace(a=0.25, b=0.5, c=0.75, calls=0)

    def step(x: Tensor, numbers: Tensor) -> Any:
        result = _results(call, x, [config.a, config.b, config.c])
        config.calls += 1
        config.a = 0.1 + config.calls % 3 * 0.2
        config.b = config.a * 0.5 + 0.1 * (config.calls % 2)
        config.c = config.b + config.a
        return result

    return step


def _results(call: Callable[..., Any], x: Tensor, numbers: list[Any]) -> Any:
    w = x.clone().requires_grad_()
    loss = call(w, *numbers).square().sum()
    loss.backward()
    return loss.detach(), w.grad


def _run(step: Callable[..., Any], calls: int) -> list[Any]:
    results = []
    torch.manual_seed(0)
    for at in range(calls):
        x = 0.5 * torch.randn(4, 6, generator=torch.Generator().manual_seed(at))
        f = FACTORS[at * at % 7]  # numbers of their own course, and of the same
        numbers = torch.tensor([f, FACTORS[at % 7], 0.3 + f * f])
        try:
            results.append(bits(step(x, numbers)))
        except fz.errors.FunctionalizeError as refused:
            return [*results, refused]
    return results


def _same(make: Make, calls: int = 14) -> Any:
    """The captured step gives eager's bits at every call, until it is refused by name."""
    step = fz.capture(make(), audit=False)
    found, expected = _run(step, calls), _run(make(), calls)
    if isinstance(found[-1], Exception):
        expected[len(found) - 1 :] = [found[-1]]
    assert found == expected
    return step


@pytest.mark.parametrize("source", [_of_arguments, _of_config])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_one_call_are_live_or_guarded(name, source):
    _same(lambda: source(CALLS[name]))


LIVE = ("addcmul", "addmm", "clamp", "foreach", "full", "where", "elu", "tensor_of_lists")


@pytest.mark.parametrize("name", LIVE)
def test_numbers_of_one_call_stay_live_where_the_op_takes_them(name):
    step = _same(partial(_of_arguments, CALLS[name]))
    assert step.stats.captures == 1 and step.stats.replays > 10


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_the_eps_of_a_batch_norm_is_guarded_beside_its_momentum(momentum):
    def make() -> Callable[..., Any]:
        torch.manual_seed(0)
        norm, config = nn.BatchNorm1d(6, momentum=momentum), SimpleNamespace(calls=0)

        def step(x: Tensor, numbers: Tensor) -> Any:
            config.calls += 1
            norm.eps = 0.1 * FACTORS[config.calls % 7]
            norm.zero_grad()
            w = x.clone().requires_grad_()
            loss = norm(w).pow(3).sum()
            loss.backward()
            return loss.detach(), w.grad, norm.running_mean.clone(), norm.weight.grad

        return step

    _same(make, 40)


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw_fused": lambda p: AdamW(p, fused=True),
    "adam_fused": lambda p: Adam(p, fused=True, weight_decay=0.1, amsgrad=True),
    "adam_fused_tensor": lambda p: Adam(p, lr=torch.tensor(0.001), fused=True),
    "sgd_fused": lambda p: SGD(p, fused=True, momentum=0.9, weight_decay=0.1),
    "adagrad_fused": lambda p: Adagrad(p, fused=True, lr_decay=0.1),
    "adamw_foreach": lambda p: AdamW(p, foreach=True),
    "sgd_foreach": lambda p: SGD(p, foreach=True, momentum=0.9, weight_decay=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scaled", [False, True])
def test_several_live_hyperparameters_of_an_optimizer(name, scaled):
    if scaled and "fused" not in name:
        pytest.skip("only fused optimizers take `grad_scale`")

    def make() -> Callable[..., Any]:
        torch.manual_seed(0)
        model, config = nn.Linear(6, 2), SimpleNamespace(calls=0)
        optimizer = OPTIMIZERS[name](model.parameters())
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)

        def step(x: Tensor, numbers: Tensor) -> Any:
            config.calls += 1
            group = optimizer.param_groups[0]
            first, second = FACTORS[config.calls % 7], FACTORS[config.calls * config.calls % 7]
            group["weight_decay"] = first * 0.1
            if not isinstance(group["lr"], Tensor):
                group["lr"] = second * 0.01
            if "eps" in group:
                group["eps"] = first * 1e-3
            if "momentum" in group:
                group["momentum"] = 0.5 + second * 0.1
            if "betas" in group:
                group["betas"] = (0.8 + first * 0.1, 0.9 + second * 0.1)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach(), [p.detach().clone() for p in model.parameters()]

        return step

    _same(make, 20)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=0.001),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 50, 2.0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n / (1 + n)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_with_several_live_numbers(name):
    def make() -> Callable[..., Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        scheduler = SCHEDULERS[name](optimizer)

        def step(x: Tensor, numbers: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach(), [p.detach().clone() for p in model.parameters()]

        return step

    _same(make, 40)
