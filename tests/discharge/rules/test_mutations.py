"""In-place, foreach and fused ops against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.discharge.rules.mutations import functional_form, is_mutating
from functionalize.errors import EagerError, OverlappingMutationError, UnsupportedOpError
from tests.discharge.eager import same_as_eager, text_of

aten = torch.ops.aten
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some(n: int = 3) -> list[Tensor]:
    return [torch.randn(2, 3) for _ in range(n)]


def steps(n: int = 3) -> list[Tensor]:
    return [torch.tensor(1.0) for _ in range(n)]


FOREACH: dict[str, Fn] = {
    "add of a number": lambda x, y: torch._foreach_add_(x, 2),
    "add of a list": lambda x, y: torch._foreach_add_(x, y, alpha=0.5),
    "add of numbers": lambda x, y: torch._foreach_add_(x, [1.0, 2.0, 3.0]),
    "sub": lambda x, y: torch._foreach_sub_(x, y),
    "mul": lambda x, y: torch._foreach_mul_(x, y),
    "mul of a tensor": lambda x, y: torch._foreach_mul_(x, y[0].sum()),
    "div": lambda x, y: torch._foreach_div_(x, y),
    "pow": lambda x, y: torch._foreach_pow_(x, 2),
    "maximum": lambda x, y: torch._foreach_maximum_(x, y),
    "clamp_min": lambda x, y: torch._foreach_clamp_min_(x, 0.1),
    "clamp_max": lambda x, y: torch._foreach_clamp_max_(x, y),
    "lerp": lambda x, y: torch._foreach_lerp_(x, y, 0.3),
    "lerp of a list": lambda x, y: torch._foreach_lerp_(x, y, y),
    "addcmul": lambda x, y: torch._foreach_addcmul_(x, y, y, value=2),
    "addcdiv": lambda x, y: torch._foreach_addcdiv_(x, y, y, [1.0, 2.0, 3.0]),
    "sqrt": lambda x, y: torch._foreach_sqrt_(torch._foreach_abs(x)),
    "neg": lambda x, y: torch._foreach_neg_(x),
    "exp": lambda x, y: torch._foreach_exp_(x),
    "reciprocal": lambda x, y: torch._foreach_reciprocal_(x),
    "abs": lambda x, y: torch._foreach_abs_(x),
    "zero": lambda x, y: torch._foreach_zero_(x),
    "copy": lambda x, y: torch._foreach_copy_(x, y),
    "copy and cast": lambda x, y: torch._foreach_copy_(x, [t.double() for t in y]),
    "copy to views": lambda x, y: torch._foreach_copy_(
        [x[0][:, 1], x[1].t()], [y[0][:, 0], y[1].t()]
    ),
    "mul of views of one": lambda x, y: torch._foreach_mul_(
        [x[0][:, 1], x[1].t(), x[0][:, 2]], 3.0
    ),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach(name: str) -> None:
    same_as_eager(FOREACH[name], some(), some(), times=2)


def sgd(params: list[Tensor], grads: list[Tensor]) -> None:
    options = {"weight_decay": 0.1, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_(params, grads, [], **options, **flags)


# In eager, an element of a list sees what the elements before it have written.
IN_TURN: dict[str, Fn] = {
    "one tensor twice": lambda a, b: torch._foreach_add_([a, a], 1),
    "numbers for one tensor": lambda a, b: torch._foreach_mul_([a, b, a], [2.0, 3.0, 5.0]),
    "addcdiv with numbers": lambda a, b: torch._foreach_addcdiv_(
        [a, a], [b, b], [b, b], [2.0, 3.0]
    ),
    "parts that overlap": lambda a, b: torch._foreach_mul_([a[:4], b, a[2:]], 2),
    "crossed": lambda a, b: torch._foreach_add_([a, b], [b, a], alpha=0.5),
    "crossed copies": lambda a, b: torch._foreach_copy_([a, b], [b, a]),
    "lerp": lambda a, b: torch._foreach_lerp_([a, b], [b, a], 0.25),
    "lerp of lists": lambda a, b: torch._foreach_lerp_([a, b], [b, b], [a, a]),
    "addcmul": lambda a, b: torch._foreach_addcmul_([a, b], [b, a], [a, a], value=0.5),
    "a number of the list": lambda a, b: torch._foreach_mul_([a[0], b], a[0]),
    "fused": lambda a, b: sgd([a, b], [b, a]),
    "fused, with what lies across": lambda a, b: sgd([a[:3], a[3:]], [b[:3], a[:3]]),
    "unscale": lambda a, b: torch._amp_foreach_non_finite_check_and_unscale_(
        [a, a], b[0], torch.tensor(0.5)
    ),
}


@pytest.mark.parametrize("name", IN_TURN)
def test_lists_that_share_memory(name: str) -> None:
    same_as_eager(
        lambda a, b: IN_TURN[name](a, b), torch.randn(6), torch.randn(6).clamp_(min=0.1), times=2
    )


@pytest.mark.parametrize("name", sorted({*IN_TURN} - {"fused", "fused, with what lies across"}))
@pytest.mark.parametrize("grown", [False, True])
def test_lists_that_share_memory_under_aot_function(name: str, grown: bool) -> None:
    """Torch's functionalization does all elements at once; fused ops have no kernel for fakes there."""

    def fn(a: Tensor, b: Tensor) -> Tensor:
        if grown:
            fz.functions.resize_storage_bytes_(a, 48)
        IN_TURN[name](a, b)
        return a + b

    args = [torch.randn(6), torch.randn(6).clamp_(min=0.1)]
    want, got = ([t.clone() for t in args] for _ in range(2))
    expected = fn(*want)
    assert torch.equal(fz.functions.aot_function(fn, lambda graph, _: graph)(*got), expected)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch._foreach_mul_(x, x),
        lambda x, y: torch._foreach_add_(x, [y[0]] * 3),
        lambda x, y: torch._foreach_mul_(list(x[0]), list(x[0])),
        lambda x, y: torch._foreach_add_(list(x[0]), list(x[1])),
    ],
    ids=["with itself", "one tensor read by all", "parts with themselves", "parts"],
)
def test_lists_that_can_be_done_at_once(fn: Fn) -> None:
    program = same_as_eager(fn, some(), some(), times=2)
    ops = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert sum("_foreach_" in op for op in ops) == 1


HYPER: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "maximize": False,
}


@pytest.mark.parametrize("op", [torch._fused_adam_, torch._fused_adamw_])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("given", ["lr", "lr tensor", "grad_scale"])
def test_fused_adam(op: Fn, amsgrad: bool, given: str) -> None:
    def fn(p: Any, g: Any, m: Any, v: Any, top: Any, step: Any, lr: Any, scale: Any) -> None:
        op(p, g, m, v, top, step, lr=lr, amsgrad=amsgrad, **HYPER, **scale)

    zeros = [torch.zeros(2, 3) for _ in range(3)]
    top = [z.clone() for z in zeros] if amsgrad else []
    lr = torch.tensor(0.1) if given == "lr tensor" else 0.1
    scale = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)}
    m, v = zeros, [z.clone() for z in zeros]
    scale = scale if given == "grad_scale" else {}
    same_as_eager(fn, some(), some(), m, v, top, steps(), lr, scale, times=3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd(momentum: float) -> None:
    def fn(p: Any, g: Any, m: Any) -> None:
        torch._fused_sgd_(
            p,
            g,
            m,
            weight_decay=0.1,
            momentum=momentum,
            lr=0.1,
            dampening=0.0,
            nesterov=momentum > 0,
            maximize=False,
            is_first_step=False,
        )

    same_as_eager(fn, some(), some(), some() if momentum else [], times=3)


def test_fused_adagrad() -> None:
    def fn(p: Any, g: Any, m: Any, step: Any) -> None:
        options = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
        torch._fused_adagrad_(p, g, m, step, **options)

    m = [torch.zeros(2, 3) for _ in range(3)]
    same_as_eager(fn, some(), some(), m, steps(), times=3)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_written_by_a_step_that_unscales_them_alone(scaled: bool) -> None:
    def fn(p: Any, g: Any, m: Any, v: Any, step: Any, scale: Any) -> None:
        torch._fused_adamw_(p, g, m, v, [], step, lr=0.1, amsgrad=False, **HYPER, **scale)

    scale = {"grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0)} if scaled else {}
    args = (some(), some(), some(), [t.square() for t in some()], steps())
    program = fz.functions.trace(fn, *args, scale)
    gradients = {i for i, spec in enumerate(program.inputs) if spec.name.startswith("g_")}
    written = {action.input for action in program.epilogue}
    assert len(gradients) == 3 and written & gradients == (gradients if scaled else set())


def test_gradient_scaler() -> None:
    def fn(grads: Any, found: Tensor, scale: Tensor, growth: Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal())
        torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 3)

    growth = torch.tensor(2, dtype=torch.int32)
    bad = some()
    bad[1][0, 0] = float("inf")
    for grads in (some(), bad):
        same_as_eager(fn, grads, torch.zeros(()), torch.tensor(4.0), growth, times=3)


def put(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


IN_PLACE: dict[str, Fn] = {
    "index_put": lambda x, y: x.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), y[0, :2]),
    "index_put, adding": lambda x, y: x.index_put_((torch.tensor([0, 0]),), y[:2], accumulate=True),
    "x[mask] = number": lambda x, y: put(x, x > 0, 1.5),
    "x[mask] = tensor": lambda x, y: put(x, y > 0, y[0, 0]),
    "x[index] = tensor": lambda x, y: put(x, torch.tensor([2, 0]), y[:2]),
    "x[slices] = tensor": lambda x, y: put(x, (slice(1, 3), slice(None, None, 2)), y[:2, :2]),
    "x[0, None] = number": lambda x, y: put(x, (0, None), 5.0),
    "x[...] = cast": lambda x, y: put(x, ..., y.double()),
    "x += y": lambda x, y: x.__iadd__(y),
    "masked_fill": lambda x, y: x.masked_fill_(y > 0, -1),
    "masked_fill of a tensor": lambda x, y: x.masked_fill_(y > 0, y[0, 0]),
    "masked_scatter": lambda x, y: x.masked_scatter_(y > 0, y),
    "scatter": lambda x, y: x.scatter_(1, (y > 0).long(), y),
    "scatter, multiplying": lambda x, y: x.scatter_(1, (y > 0).long(), 2.0, reduce="multiply"),
    "scatter_add": lambda x, y: x.scatter_add_(0, (y > 0).long(), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce_(0, (y > 0).long(), y, "amax"),
    "index_add": lambda x, y: x.index_add_(0, torch.tensor([1, 1]), y[:2]),
    "index_copy": lambda x, y: x.index_copy_(1, torch.tensor([3, 0]), y[:, :2]),
    "index_fill": lambda x, y: x.index_fill_(0, torch.tensor([1]), 9.0),
    "put": lambda x, y: x.put_(torch.tensor([1, 5]), y[0, :2]),
    "addmm": lambda x, y: x.addmm_(y, torch.ones(4, 4), beta=0.5),
    "clamp": lambda x, y: x.clamp_(-0.5, 0.5),
    "clamp by a tensor": lambda x, y: x.clamp_(min=y),
    "cumsum": lambda x, y: x.cumsum_(1),
    "cumsum of columns": lambda x, y: x.t().cumsum_(0),
    "cumprod": lambda x, y: x.cumprod_(0),
    "tril": lambda x, y: x.tril_(),
    "renorm": lambda x, y: x.renorm_(2, 0, 0.5),
    "polygamma, arguments swapped": lambda x, y: x.abs_().add_(1).polygamma_(1),
    "comparison": lambda x, y: x.eq_(y),
    "where, out is read": lambda x, y: torch.where(x > 0, x, y, out=x),
    "relu": lambda x, y: torch.relu_(x),
    "silu": lambda x, y: torch.nn.functional.silu(x, inplace=True),
    "embedding_renorm": lambda x, y: torch.embedding_renorm_(x, torch.tensor([0, 1]), 0.1, 2.0),
    "x.data.mul_": lambda x, y: x.data.mul_(2),
    "expand of nothing": lambda x, y: x[:1].expand(1, 4).add_(1),
    "one row from another": lambda x, y: x[0].add_(x[1]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    same_as_eager(IN_PLACE[name], torch.randn(3, 4), torch.randn(3, 4), times=2)


def test_products_into_dense_columns() -> None:
    """All arguments alike, and yet the functional op makes rows: `mm` is not element-wise."""

    def fn(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        torch.cumsum(a.t(), 0, out=out.t())
        torch.bmm(a.t()[None], b.t()[None], out=out.t()[None])
        return out.t().view(-1) if out.t().is_contiguous() else out.view(-1)

    same_as_eager(fn, *(torch.randn(4, 4) for _ in range(3)))


def test_an_overlapping_view() -> None:
    def fn(x: Tensor) -> None:
        x[0].expand(3, 4).add_(1)

    with pytest.raises(
        OverlappingMutationError, match="several elements share one memory location"
    ):
        fz.functions.trace(fn, torch.randn(3, 4))


def test_an_op_without_a_functional_form() -> None:
    with pytest.raises(UnsupportedOpError) as error:
        functional_form(aten._sobol_engine_ff_.default)
    assert str(error.value) == (
        "writes `self` and has no functional form: use an op that returns its result, or give it one "
        "with torch.library"
    )


def test_what_eager_refuses() -> None:
    with pytest.raises(EagerError, match=r"aten.add_.Tensor failed on `x` \(float32\[3\]\)"):
        fz.functions.trace(lambda x: x.add_(torch.ones(4)), torch.ones(3))


def test_an_out_that_fakes_do_not_resize() -> None:
    def fn(x: Tensor) -> Any:
        return torch.geqrf(x, out=(torch.empty(0), torch.empty(0)))

    with pytest.raises(
        UnsupportedOpError, match=r"fits no `out` of size \[0\], which eager resizes"
    ):
        fz.functions.trace(fn, torch.randn(3, 3))


def test_most_of_aten_has_a_functional_form() -> None:
    """The list of what has none is short, and changes only by a decision."""
    without = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if name.startswith("aten::") and op is not None and is_mutating(op):
            try:
                functional_form(op)
            except UnsupportedOpError:
                without.add(packet)
    assert without <= {
        # have rules: refused, or composite and never seen
        *("fill_diagonal_", "set_", "record_stream", "requires_grad_", "retain_grad", "set_data"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "rrelu_with_noise"),
        *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
        # private helpers, and out= forms of ops that mutate already
        *("_cummax_helper", "_cummin_helper", "_fill_mem_eff_dropout_mask_", "_amp_update_scale"),
        *(
            "_amp_foreach_non_finite_check_and_unscale",
            "_flash_attention_forward_no_dropout_inplace",
        ),
        *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"),
        *("_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"),
        *("_slow_conv2d_backward", "adaptive_avg_pool3d_backward"),
        *("_sobol_engine_ff_", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_"),
        # new in torch 2.14: what compiled code does for `x.data = y`; in 2.15: inside cuDNN's attention
        *("shallow_copy_data_", "_cudnn_attention_forward_no_dropout_inplace"),
    }


def test_graphs(expect: Callable[[str, str], None]) -> None:
    def optimizer(p: list[Tensor], g: list[Tensor]) -> None:
        torch._foreach_mul_(p, 0.9)
        torch._foreach_addcdiv_(p, g, g, value=-0.1)

    def out(a: Tensor, b: Tensor, o: Tensor) -> Tensor:
        torch.mm(a, b, out=o)
        return torch.sum(a, 0, out=o[0])

    a, b = torch.randn(2, 2).bfloat16(), torch.randn(2, 2).bfloat16()
    expect("foreach", text_of(same_as_eager(optimizer, some(2), some(2))))
    expect("out", text_of(same_as_eager(out, a, b, torch.zeros(2, 2, dtype=torch.bfloat16))))
    expect(
        "out_cast",
        text_of(same_as_eager(lambda a, o: torch.cat([a, a], out=o), a, torch.zeros(4, 2))),
    )


def test_long_lists_of_dense_floats_need_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(target: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError(f"the meta kernel of {target} ran")

    def step(a: torch.Tensor, b: torch.Tensor) -> None:
        torch._foreach_add_([a, b], 1)
        torch._foreach_mul_([a, b], 0.5)

    def counts(a: torch.Tensor) -> None:
        torch._foreach_add_([a], 1)  # an integer could become a float

    program = None
    with monkeypatch.context() as patched:
        patched.setattr("functionalize.discharge.layout._run", run)
        program = fz.functions.trace(
            step, torch.ones(4, 3).t(), torch.ones(2, dtype=torch.bfloat16)
        )
        with pytest.raises(AssertionError, match="_foreach_add"):
            fz.functions.trace(counts, torch.ones(3, dtype=torch.int64))
    ours = torch.rand(4, 3).t(), torch.rand(2).bfloat16()
    eager = tuple(each.clone() for each in ours)
    program(*ours)
    step(*eager)
    assert all(map(torch.equal, ours, eager))
