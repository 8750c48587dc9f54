"""What torch computes otherwise under a dispatch mode: captured, audited and recorded steps have eager's bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, matmul, nn
from torch.linalg import svdvals
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import UncapturableError, UnsupportedOpError
from functionalize.planner.lifetimes.record_memory import MemoryRecorder
from functionalize.recorder.eager_formulas import EagerFormulas
from functionalize.recorder.recorder import Recorder
from tests.discharge.eager import same_as_eager
from tests.op_database import OPS, function_of, plain_runs

Body = Callable[[Tensor], Any]


def gradient_of(function: Body, scale: float = 1.0) -> Body:
    """A step: the gradient of `function`, whose result has the gradient `scale`."""

    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            out = function(x)
            return torch.autograd.grad(out, x, torch.full_like(out, scale))[0]

    return step


def ranks(x: Tensor) -> Tensor:
    out = torch.zeros((), dtype=torch.int64)
    torch.linalg.matrix_rank(x, out=out)
    return out


def in_double(x: Tensor) -> Tensor:
    return x.prod(1, keepdim=True, dtype=torch.float64)


def under_hooks(function: Body, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return function(x)


def several(x: Tensor) -> Tensor:
    return torch.stack([x * i for i in range(1, 8)])


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return several(x) @ x[None].cos()


def needing_a_gradient(x: Tensor) -> Tensor:
    """Without gradients, where autocast's copy of an operand needs none."""
    with torch.enable_grad():
        weight = x.clone().requires_grad_()[None].cos()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return several(x) @ weight


VALUES: dict[str, Body] = {
    "a @ b": lambda x: several(x) @ x[None].cos(),
    "b @ a": lambda x: x[None].cos() @ several(x),
    "b @ a, of parameters": lambda x: nn.Parameter(x[None].cos(), False) @ several(x),
    "a @ transposed b": lambda x: several(x).mT @ x.t()[None].cos(),
    "matmul": lambda x: torch.matmul(several(x), x[None].cos()),
    "Tensor.matmul": lambda x: several(x).matmul(x[None].cos()),
    "linalg.matmul": lambda x: torch.linalg.matmul(several(x), x[None].cos()),
    "a product under autocast": under_autocast,
    "a product under autocast without gradients": needing_a_gradient,
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "cond": lambda x: torch.linalg.cond(x),
    "norm": lambda x: torch.linalg.norm(x, 2),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "torch.norm": lambda x: torch.norm(x, "nuc"),
    "matrix_rank": ranks,
    "values and vectors": lambda x: torch.linalg.svd(x),
}
GRADIENTS: dict[str, Body] = {
    "max": gradient_of(lambda x: x.max(), -1.0),
    "max of inf": gradient_of(lambda x: x.max(), float("inf")),
    "min": gradient_of(lambda x: x.min(), -1.0),
    "median": gradient_of(lambda x: x.median(), -1.0),
    "nanmedian": gradient_of(lambda x: x.nanmedian(), -1.0),
    "prod": gradient_of(lambda x: x.prod()),
    "prod of a transposed": gradient_of(lambda x: x.t().prod()),
    "prod of rows": gradient_of(lambda x: x.prod(1)),
    "prod of columns in float64": gradient_of(in_double),
    "prod under hooks": gradient_of(lambda x: under_hooks(torch.prod, x)),
    "a @ b, by a": gradient_of(lambda x: several(x) @ x.detach()[None].cos()),
    "b @ a, by a": gradient_of(lambda x: x.detach()[None].cos() @ several(x)),
    "a @ b, by b": gradient_of(lambda x: several(x.detach()) @ x[None].cos()),
    "prod in a checkpoint": gradient_of(
        lambda x: checkpoint(torch.prod, x * 1, use_reentrant=False)
    ),
}
BODIES = VALUES | GRADIENTS


def batches(zeros: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(5, 5, generator=generator) for _ in range(6)]
    for x in found:
        x.view(-1)[:zeros] = 0
    return found


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("name", BODIES)
def test_captured_steps_have_the_bits_of_eager(name: str, zeros: int) -> None:
    body = BODIES[name]
    step = fz.capture(body)
    for x in batches(zeros if "prod" in name else 0):
        want, got = pytree.tree_leaves(body(x)), pytree.tree_leaves(step(x))
        for a, b in zip(want, got, strict=True):
            assert bytes_of(a) == bytes_of(b)
    assert step.stats.replays >= 2, step.explain()


def test_products_of_which_some_have_zeros() -> None:
    body = GRADIENTS["prod of rows"]
    step = fz.capture(body)
    for zeros in (0, 0, 0, 1, 1, 0, 3, 3, 1, 0):
        x = batches(zeros)[0]
        assert bytes_of(step(x)) == bytes_of(body(x))


@pytest.mark.parametrize("name", BODIES)
def test_audits_and_records_of_memory_have_the_bits_of_eager(name: str) -> None:
    body = BODIES[name]
    audited, recorded = fz.capture(body, audit=1), fz.record_memory(body)
    for x in batches():
        want = [bytes_of(t) for t in pytree.tree_leaves(body(x))]
        for step in (audited, recorded):
            assert [bytes_of(t) for t in pytree.tree_leaves(step(x))] == want
    assert audited.stats.audits and not audited.stats.audit_failures, audited.explain()


@pytest.mark.parametrize("name", [*VALUES, "max", "max of inf", "min", "median"])
def test_traced_programs_have_the_bits_of_eager(name: str) -> None:
    same_as_eager(BODIES[name], batches()[0])


def refused(body: Body, match: str) -> Tensor:
    """The result of the first call of a captured body; the next one must be refused."""
    step, x = fz.capture(body, dynamic=False, on_uncapturable="raise"), batches()[0]
    out = step(x)
    with pytest.raises(UncapturableError, match=match):
        step(x)
    return out  # type: ignore[no-any-return]


def test_singular_values_by_another_name_are_refused() -> None:
    refused(lambda x: svdvals(x), r"frees its singular or eigenvectors unread at .*svdvals")
    with pytest.raises(UncapturableError, match=r"torch\.linalg\.svdvals"):
        fz.functions.trace(lambda x: svdvals(x), batches()[0])


def test_a_product_by_another_name_is_refused() -> None:
    refused(
        lambda x: matmul(several(x), x[None].cos()), r"multiplies a batch.*at .*matmul\(several"
    )
    own = fz.capture(
        lambda x: matmul(several(x), x[None]) * 2 if x.requires_grad else matmul(x, x),
        on_uncapturable="raise",
    )
    for x in batches():
        assert torch.equal(own(x), x @ x)


def test_a_product_of_a_parameter_under_autocast_is_refused() -> None:
    """Autocast may have made its copy before, whose gradient is summed before it is cast."""
    weight = nn.Parameter(several(batches()[0]))

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return weight @ x[None]

    refused(step, r"multiplies a parameter by one .* at .*weight @ x")


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.bmm:
            return out * 5
        return out * 2 if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) else out


def test_a_function_mode_sees_one_product() -> None:
    def body(x: Tensor) -> Tensor:
        a, b = several(x), x[None].cos()
        with Doubling():
            return a @ b

    step = fz.capture(body)
    for x in batches():
        assert bytes_of(step(x)) == bytes_of(body(x))
    assert step.stats.replays


def test_the_gradient_of_what_fills_a_mask_of_a_known_size() -> None:
    """Eager selects from the gradient by the mask; its size is known before the call."""
    body = gradient_of(lambda v: torch.ones(5, 5).masked_fill(torch.eye(5) > 0, v.sum()))
    step = fz.capture(body)
    for x in batches():
        assert bytes_of(step(x)) == bytes_of(body(x))
    assert step.stats.replays >= 2, step.explain()


def test_the_gradient_of_what_fills_a_mask_of_an_unknown_size_is_refused() -> None:
    weight = torch.linspace(-1, 1, 25).reshape(5, 5)
    body = gradient_of(lambda v: torch.ones(5, 5).masked_fill(weight > 0, v.sum()))
    assert bytes_of(refused(body, "masked_select")) == bytes_of(body(batches()[0]))


def test_the_gradient_of_a_product_by_unknown_ops_is_refused() -> None:
    with mock.patch.object(EagerFormulas, "note", lambda *args: None):
        refused(GRADIENTS["prod"], "computes the gradient of a product by unknown ops")


def test_the_gradient_of_what_fills_a_mask_is_refused_on_fakes() -> None:
    body = gradient_of(lambda v: torch.ones(5, 5).masked_fill(torch.eye(5) > 0, v.sum()))
    with pytest.raises(UnsupportedOpError, match="the gradient of a tensor that `masked_fill`"):
        fz.functions.trace(body, batches()[0])


# -- every op --------------------------------------------------------------------------------------

NOT_DETERMINED = ("empty", "new_empty", "linalg.lstsq")  # in eager


def bytes_of(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return repr(value)
    flat = value.detach().resolve_conj().resolve_neg().flatten()
    found = (
        flat.new_empty(len(flat)).copy_(flat).view(torch.uint8)
    )  # strides of an empty tensor may be 0
    return value.dtype, value.shape, found.numpy().tobytes()


def results(op: Any, sample: Any, gradients: str) -> list[Any]:
    """The results of an op on a sample and its gradients, where it has some. gradients: of which arguments."""
    first = sample.input if isinstance(sample.input, Tensor) else None

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        needs = value.requires_grad and (gradients != "the first" or value is first)
        return value.detach().clone().requires_grad_(needs)

    x, args, kwargs = pytree.tree_map(copy, (sample.input, sample.args, sample.kwargs))
    leaves = [
        t
        for t in pytree.tree_leaves((x, args, kwargs))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    torch.default_generator.manual_seed(3)
    outs = pytree.tree_leaves(function_of(op)(x, *args, **kwargs))
    found = [t for t in outs if isinstance(t, Tensor) and t.requires_grad]
    if found and leaves:
        tangents = [torch.randn_like(t) for t in found]
        outs += torch.autograd.grad(found, leaves, tangents, allow_unused=True)
    return outs


def bytes_of_all(values: list[Any]) -> list[Any]:
    return [bytes_of(value) for value in values]


class Empty(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_every_op_has_the_bits_of_eager_while_it_is_recorded(pytestconfig: pytest.Config) -> None:
    """With an empty mode first, which costs less; an op that differs there must not differ in a recording."""
    differ, count = [], 0
    long = pytestconfig.getoption("--fuzz-long")
    with plain_runs():
        for op, gradients in itertools.product(OPS, ("all", "the first", "none")):
            if op.name.startswith(NOT_DETERMINED) or torch.float32 not in op.supported_dtypes(
                "cpu"
            ):
                continue
            torch.default_generator.manual_seed(0)
            samples = op.sample_inputs(
                "cpu", torch.float32, requires_grad=gradients != "none" and op.supports_autograd
            )
            for sample in itertools.islice(samples, 24 if long else 2):
                try:
                    want = bytes_of_all(results(op, sample, gradients))
                except Exception:  # the sample is of an error, or sparse
                    continue
                with Empty():
                    got = results(op, sample, gradients)
                is_as_eager = bytes_of_all(got) == want
                count += 1
                for recorder in (
                    (Recorder(True), MemoryRecorder()) if long or not is_as_eager else ()
                ):
                    with recorder:
                        got = results(op, sample, gradients)
                    if bytes_of_all(got) != want:
                        if recorder.checks and recorder.checks.unrepeatable:
                            break  # refused by name; what only records memory does not refuse
                        differ.append(op.name)
    assert count > 3500 and not differ
