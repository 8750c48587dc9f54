"""Ops whose backward computes with a number in C++, which torch does for plain ones only: asked of torch, op by op."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.ir.scalars import ScalarInput
from functionalize.scalars.live_scalars import was_refused
from functionalize.scalars.scalar_log import Number, ScalarLog
from functionalize.scalars.scalar_patches import numbers_in_formulas
from functionalize.util.torch_release import minor_of
from tests.scalars.bits import bits

SHAPES = ((3, 3), (3,), (3, 3, 3), ())
BY_TYPE = {"float": 1.0, "int": 1, "List[int]": [0], "bool": False}


def _live(value: float) -> Any:
    source: Any = None
    number = Number(ScalarInput(source, "n", value), value, ScalarLog(print))
    return torch.SymFloat(number)


def _argument(argument: Any, shape: tuple[int, ...], number: Callable[[float], Any]) -> Any:
    kind = str(argument.type)
    if argument.name in ("mask", "condition"):
        return torch.rand(shape) > 0.5
    if argument.name == "index":
        return torch.zeros(shape if len(shape) > 1 else 3, dtype=torch.long)
    made = 3 if argument.name in ("vec", "vec1", "vec2") else shape
    if kind in ("Tensor", "Optional[Tensor]"):
        return (torch.rand(made, dtype=torch.double) * 0.5 + 0.25).requires_grad_()
    if kind.startswith("List[") and "Tensor" in kind:
        return [torch.rand(shape, dtype=torch.double).add(0.25).requires_grad_() for _ in "ab"]
    if "number" in kind:
        return [number(1.5), number(1.5)] if kind.startswith("List") else number(1.5)
    return argument.default_value if argument.has_default_value() else BY_TYPE.get(kind)


def _differentiate(op: Any, shape: tuple[int, ...], number: Callable[[float], Any]) -> bool:
    """Run an op, its backward, and the backward of that; False: the op has no gradient."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = _argument(argument, shape, number)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    given = [*args, *kwargs.values()]
    tensors = [t for a in given for t in (a if isinstance(a, list) else [a])]
    leaves = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
    if op._schema.is_mutable:
        args[0] = [t.clone() for t in args[0]] if isinstance(args[0], list) else args[0].clone()
    out = op(*args, **kwargs)
    out = args[0] if out is None else out
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    outs = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
    if not outs:
        return False
    loss = sum(o.sum() for o in outs)
    found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    twice = [g for g in found if g is not None and g.requires_grad]
    if twice:
        sum(g.square().sum() for g in twice).backward()
    return True


def _refuses_live_numbers(op: Any) -> bool | None:
    """Whether torch differentiates an op of plain numbers only; None: not asked, as no call of it was found."""
    asked = None
    for shape in SHAPES:
        try:
            if not _differentiate(op, shape, float):
                continue
        except Exception:  # not of this shape, or not at all
            continue
        asked = False
        try:
            _differentiate(op, shape, _live)
        except RuntimeError:
            return True
    return asked


def test_the_table_has_every_op_that_torch_differentiates_for_plain_numbers_only():
    answers: dict[str, bool] = {}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            op = getattr(packet, overload)
            kinds = [str(a.type) for a in op._schema.arguments]
            if "out" in overload or not any("number" in kind for kind in kinds):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = _refuses_live_numbers(op)
            if answer is not None:
                answers[str(op)] = answer
    assert len(answers) > 120  # of some 280 overloads
    refused = {
        op.split(".")[1].removeprefix("special_") for op, answer in answers.items() if answer
    }
    # Else the table has rows that are not needed. `pow` takes symbolic exponents since 2.15, and rounds otherwise.
    needed = {"sub", "rsub", "zeta"} | ({"pow"} if minor_of(torch.__version__) < (2, 15) else set())
    assert needed <= refused
    assert refused <= {name for _, name, _ in numbers_in_formulas()}


CALLS: dict[str, Callable[..., Tensor]] = {
    "zeta": lambda x, n: torch.special.zeta(n, x + 1),
    "sub": lambda x, n: torch.sub(x, x * x, alpha=n),
    "subtract": lambda x, n: torch.subtract(x, x * x, alpha=n),
    "method": lambda x, n: x.sub(x * x, alpha=n).subtract(x, alpha=n),
    "in_place": lambda x, n: (x * 2).sub_(x * x, alpha=n).subtract_(x, alpha=n),
    "number": lambda x, n: torch.sub(x, n, alpha=n),
    "rsub": lambda x, n: torch.rsub(x, x * x, alpha=n),
    "rsub_of_number": lambda x, n: torch.rsub(x, n, alpha=n),
    "rsub_by_position": lambda x, n: torch.rsub(x, 2.0, n),
    "foreach": lambda x, n: torch._foreach_sub([x], [x * x], alpha=n)[0],
    "exponent": lambda x, n: x**n + torch.pow(n, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_in_a_formula_of_autograd_is_a_constant_with_a_guard(name):
    call = CALLS[name]

    def fn(x: Tensor, number: Tensor) -> Any:
        w = x.clone().requires_grad_()
        loss = call(w, number.item()).square().sum()
        loss.backward()
        return loss.detach(), w.grad

    step = fz.capture(fn, audit=False)
    for at in range(9):
        given = 0.5 + torch.rand(4), torch.tensor(2.5 if at < 5 else 2.5 + at)
        assert bits(step(*given)) == bits(fn(*given))
    assert step.stats.replays >= 3


@pytest.mark.parametrize("name", ["sub", "rsub", "method", "in_place", "foreach"])
def test_the_number_is_live_where_nothing_is_differentiated(name):
    call = CALLS[name]

    def fn(x: Tensor, number: Tensor) -> Any:
        return call(x, number.item()) * 2

    step = fz.capture(fn, audit=False)
    for at in range(6):
        given = torch.rand(4), torch.tensor(2.5 + at)
        assert bits(step(*given)) == bits(fn(*given))
    assert step.stats.captures == 1 and step.stats.replays >= 4


def test_the_subtrahend_is_live_beside_a_gradient():
    def fn(x: Tensor, number: Tensor) -> Any:
        w = x.clone().requires_grad_()
        loss = torch.sub(w, number.item(), alpha=2).square().sum()
        loss.backward()
        return loss.detach(), w.grad

    step = fz.capture(fn, audit=False)
    for at in range(6):
        given = torch.rand(4), torch.tensor(2.5 + at)
        assert bits(step(*given)) == bits(fn(*given))
    assert step.stats.captures == 1 and step.stats.replays >= 4


def test_numbers_are_plain_after_torch_had_no_function_of_a_symbolic_one():
    assert was_refused(RuntimeError("NYI negate symbolic float"))
    assert not was_refused(RuntimeError("NYI: a feature"))
