"""What `trace` takes: containers, constants, parameters, closures, modes, threads, other traces."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import functionalize as fz
from examples.resize_program import R, values, z
from functionalize._compat.fakes import FakeTensorMode
from tests.leftovers import leftovers


def assert_replays(fn: Callable[..., Any], make_args: Callable[[], tuple[Any, ...]]) -> None:
    """Outputs and arguments of a replay, compared with eager's."""
    replay = fz.functions.trace(fn, *make_args())
    expected_args, actual_args = make_args(), make_args()
    with torch.no_grad():
        expected = fn(*expected_args)
    actual = replay(*actual_args)
    pairs = pytree.tree_leaves((expected_args, expected)), pytree.tree_leaves((actual_args, actual))
    for e, a in zip(*pairs, strict=True):
        if isinstance(e, Tensor):
            assert (a.dtype, a.shape, a.stride()) == (e.dtype, e.shape, e.stride())
            assert torch.equal(a, e)
        else:
            assert a == e


# -- arguments -------------------------------------------------------------------------------------


def turned(a: Tensor) -> Tensor:
    a.t_()
    a.mul_(2)
    a.unsqueeze_(0)
    return a[0]


def grown(a: Tensor) -> Tensor:
    a.resize_(8)
    a[4:].fill_(3)
    return a + 1


def cut(a: Tensor) -> Tensor:
    a.resize_(2)
    return a.add_(1) + 1


def moved(a: Tensor, b: Tensor) -> Tensor:
    a.data = b
    a.add_(1)
    return a * 2


def moved_onto_new(a: Tensor, b: Tensor) -> Tensor:
    a.data = b * 2
    a.add_(1)
    return a * 2


def doubled(a: Tensor) -> Tensor:
    return a.mul_(2) + 1


ARGUMENTS: list[tuple[str, Callable[..., Any], Callable[[], tuple[Any, ...]]]] = [
    ("turned", turned, lambda: (values(2, 3),)),
    ("grown", grown, lambda: (values(4),)),
    ("cut", cut, lambda: (values(4),)),
    ("moved", moved, lambda: (values(4), values(3))),
    ("moved_onto_new", moved_onto_new, lambda: (values(4), values(3))),
    ("no_elements", doubled, lambda: (torch.zeros(0, 3),)),
    ("no_dimensions", doubled, lambda: (torch.tensor(3.0),)),
    ("requires_grad", torch.no_grad()(doubled), lambda: (torch.ones(3, requires_grad=True),)),
    ("parameter", torch.no_grad()(doubled), lambda: (nn.Parameter(torch.ones(3)),)),
    (
        "inference_inside",
        torch.inference_mode()(lambda a: a.view(-1)[1:] * 2),
        lambda: (values(2, 3),),
    ),
]


@pytest.mark.parametrize("name, fn, make_args", ARGUMENTS, ids=[name for name, _, _ in ARGUMENTS])
def test_argument(name: str, fn: Callable[..., Any], make_args: Any) -> None:
    assert_replays(fn, make_args)


def test_inference_around() -> None:
    with torch.inference_mode():
        assert_replays(lambda a: (a.mul_(2), a[1:]), lambda: (values(2, 3),))


def test_containers_and_constants() -> None:
    def fn(a: Tensor, *, b: dict[str, list[Tensor]], c: int = 0) -> dict[str, Any]:
        a.add_(b["x"][0])
        return {"o": [a * c, (b["x"][1], None, 3)]}

    def make() -> tuple[Tensor, dict[str, Any]]:
        return torch.ones(3), {"x": [torch.ones(3), torch.zeros(2)]}

    a, b = make()
    replay = fz.functions.trace(fn, a, b=b, c=5)
    assert [spec.name for spec in replay.inputs] == ["a", "b_x_0", "b_x_1"]
    a, b = make()
    out = replay(a, b=b, c=5)
    assert torch.equal(a, torch.full((3,), 2.0)) and torch.equal(
        out["o"][0], torch.full((3,), 10.0)
    )
    assert out["o"][1][0] is b["x"][1] and out["o"][1][1:] == (None, 3)


def test_one_tensor_twice() -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, bool]:
        a.add_(1)
        return a + b, a is b

    a = torch.ones(3)
    out = fz.functions.trace(fn, a, a)(b := torch.ones(3), b)
    assert torch.equal(out[0], torch.full((3,), 4.0)) and out[1] is True


def test_gradient_of_an_argument() -> None:
    @torch.no_grad()
    def sgd(p: Tensor) -> None:
        assert p.grad is not None
        p.sub_(p.grad * 0.5)
        p.grad.zero_()

    def make() -> Tensor:
        p = torch.ones(3, requires_grad=True)
        p.grad = torch.full((3,), 2.0)
        return p

    traced = make()
    replay = fz.functions.trace(sgd, traced)
    assert torch.equal(traced.grad, torch.full((3,), 2.0)) and torch.equal(traced, torch.ones(3))
    p = make()
    replay(p)
    assert torch.equal(p, torch.zeros(3)) and torch.equal(p.grad, torch.zeros(3))


# -- what the function finds by itself -------------------------------------------------------------


def test_module_of_the_closure() -> None:
    """Parameters are read, running statistics written, dropout draws as eager does."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    replay = fz.functions.trace(lambda x: model(x), torch.ones(5, 3))
    assert [spec.name for spec in replay.inputs][1:3] == ["model_0_weight", "model_0_bias"]
    for seed in range(2):
        x = values(5, 3, seed=seed)
        torch.manual_seed(seed)
        out = replay(x)
        torch.manual_seed(seed)
        assert torch.equal(out, twin(x))
    for ours, eager in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, eager)


def test_outsider_returned_untouched() -> None:
    outsider = torch.ones(3)
    assert fz.functions.trace(lambda a: outsider, torch.ones(2))(torch.ones(2)) is outsider


# -- modes, threads, other traces ------------------------------------------------------------------


def test_nothing_is_left_when_the_function_raises() -> None:
    def fn(a: Tensor) -> None:
        R(a, 0)
        raise ValueError("mine")

    a = values(8)
    with pytest.raises(ValueError, match="mine"):
        fz.functions.trace(fn, a)
    assert not leftovers() and torch.equal(a, values(8))


def test_threads() -> None:
    failed: list[BaseException] = []

    def work(scale: int) -> None:
        def fn(a: Tensor, b: Tensor) -> Tensor:
            R(a, 32)
            a.copy_(b)
            out = a.sin() * scale
            a.untyped_storage().resize_(0)
            return out

        try:
            for _ in range(10):
                replay = fz.functions.trace(fn, z(8), torch.ones(8))
                assert torch.equal(replay(z(8), torch.ones(8)), torch.ones(8).sin() * scale)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed and not leftovers()


def test_trace_inside_a_trace() -> None:
    def fn(a: Tensor) -> Tensor:
        replay = fz.functions.trace(lambda b: b * 2, a)
        return replay(a) + 1

    program = fz.functions.trace(fn, torch.ones(3))
    assert [spec.name for spec in program.inputs] == ["a"] and program.nodes() == 2
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 3.0))


def test_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        program = fz.functions.trace(lambda a: a.add_(1) * 2, torch.ones(3))
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 4.0))


def test_fake_arguments() -> None:
    fake = FakeTensorMode().from_tensor(torch.ones(3))
    program = fz.functions.trace(lambda a: a.add_(1) * 2, fake)
    assert torch.equal(program(torch.ones(3)), torch.full((3,), 4.0))


def test_inputs_and_outputs_have_names() -> None:
    def fn(a, *, pair):
        return {"sum": a + pair[0], "both": (a, pair[1] * 2)}

    program = fz.functions.trace(fn, torch.ones(2), pair=[torch.ones(2), torch.ones(2)])
    assert [spec.name for spec in program.inputs] == ["a", "pair_0", "pair_1"]
    assert program.output_names == ("out['sum']", "out['both'][0]", "out['both'][1]")
    assert fz.functions.trace(torch.sin, torch.ones(2)).output_names == ("out",)
