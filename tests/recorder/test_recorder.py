"""Where the recorder says that an op came from: ops of one backward share one stack, those of hooks have their own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from functionalize.ir.ops import OpRecord
from functionalize.recorder.recorder import Recorder
from functionalize.util.user_stack import line_of

aten = torch.ops.aten


def recorded(fn: Callable[[Tensor], object], *targets: object) -> list[OpRecord]:
    with Recorder() as recorder:
        fn(torch.ones(3, requires_grad=True))
    return [r for r in recorder.records if r.target in targets]


def code_of(record: OpRecord) -> str:
    return line_of(record.traceback).partition(": ")[2]


def test_the_ops_of_a_backward_share_a_stack_and_no_other_op_has_it() -> None:
    def step(x: Tensor) -> None:
        a = (x.sin() * 2).exp().sum()
        b = x.cos().sum()
        a.backward(retain_graph=True)
        b.backward()
        a.backward()

    records = recorded(step, aten.mul.Tensor, aten.exp.default, aten.cos.default)
    backward = [r for r in records if r.phase == "backward"]
    assert len({id(r.traceback) for r in backward}) == 3
    assert [code_of(r) for r in backward if r.target is aten.cos.default] == [
        "a.backward(retain_graph=True)",
        "a.backward()",
    ]
    forward = [r for r in records if r.phase is None]
    assert len({id(r.traceback) for r in records}) == 3 + len(forward)


def test_an_op_in_a_hook_has_its_own_line() -> None:
    def step(x: Tensor) -> None:
        y = x.sin()
        y.register_hook(lambda grad: grad.floor())  # the hook
        y.exp().sum().backward()

    (floor,) = recorded(step, aten.floor.default)
    (cosine,) = recorded(step, aten.cos.default)
    assert code_of(floor) == "y.register_hook(lambda grad: grad.floor())  # the hook"
    assert code_of(cosine) == "y.exp().sum().backward()"


def test_a_backward_inside_a_backward_has_its_own_line() -> None:
    def step(x: Tensor) -> None:
        def inside(grad: Tensor) -> Tensor:
            with torch.enable_grad():
                z = x.detach().requires_grad_().tan().sum()
            z.backward()
            return grad

        y = x.sin()
        y.register_hook(inside)
        (y.exp().sum() + x.cos().sum()).backward()

    inner = recorded(step, aten.pow.Tensor_Scalar)  # the derivative of `tan`
    outer = recorded(step, aten.cos.default, aten.sin.default)
    assert {code_of(r) for r in inner} == {"z.backward()"}
    after = [code_of(r) for r in outer if r.phase == "backward"]
    assert set(after) == {"(y.exp().sum() + x.cos().sum()).backward()"}
