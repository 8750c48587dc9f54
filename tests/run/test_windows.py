"""The geometry that the runner foretells is that of the real tensors; windows are seen by modes and never returned."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import functionalize as fz
from functionalize.errors import InvariantError
from functionalize.ir.guards import TensorGuard
from functionalize.ir.inputs import Argument, InputSpec
from functionalize.ir.ops import geometry_of
from functionalize.program.program import Program
from functionalize.run import windows as module
from functionalize.run.boxed import boxed
from functionalize.run.windows import ViewForm, windows

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row by row": lambda: torch.rand(2, 3, 4),
    "transposed": lambda: torch.rand(4, 3, 2).transpose(0, 2),
    "permuted": lambda: torch.rand(3, 4, 2).permute(2, 0, 1),
    "with gaps": lambda: torch.rand(2, 3, 8)[:, :, ::2],
    "from the middle": lambda: torch.rand(5, 3, 4)[2:4],
    "expanded": lambda: torch.rand(2, 1, 4).expand(2, 3, 4),
    "with ones": lambda: torch.rand(1, 3, 1, 4, 1),
    "of size one": lambda: torch.rand(1, 3, 1).transpose(0, 1),
    "one row": lambda: torch.rand(4, 1).t(),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "empty": lambda: torch.rand(2, 0, 4),
    "double": lambda: torch.rand(2, 3, 4, dtype=torch.float64),
}
# The arguments after the first one; `x` is the first one.
REST: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {
    aten._chunk_cat.default: lambda x: (0, 2),
    aten._log_softmax.default: lambda x: (-1, False),
    aten._softmax.default: lambda x: (0, False),
    aten._unsafe_view.default: lambda x: (x.shape,),
    aten.expand.default: lambda x: ([2, *x.shape],),
    aten.mean.dim: lambda x: ([-1], True),
    aten.permute.default: lambda x: ([*range(1, x.dim()), 0],),
    aten.pow.Tensor_Scalar: lambda x: (2,),
    aten.pow_.Scalar: lambda x: (2,),
    aten.select.int: lambda x: (-1, 0),
    aten.slice.Tensor: lambda x: (-1, 1, 4, 2),
    aten.split.Tensor: lambda x: (2, -1),
    aten.split_with_sizes.default: lambda x: ([1, x.shape[0] - 1], 0),
    aten.squeeze.dim: lambda x: (-1,),
    aten.sum.dim_IntList: lambda x: ([0],),
    aten.transpose.int: lambda x: (0, -1),
    aten.unbind.int: lambda x: (0,),
    aten.unsqueeze.default: lambda x: (1,),
    aten.view.default: lambda x: ([-1],),
    aten.clone.default: lambda x: (),
}
MATRICES = (aten.t.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
OPS = sorted(module._VIEWS | module._LISTS | module._COMPUTED | module._IN_PLACE, key=str)


def arguments(op: Any, x: Tensor) -> tuple[Any, ...]:
    """Arguments of an op, the first of this layout."""
    if op in MATRICES:
        matrix = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
        if op is aten.addmm.default:
            return torch.rand(len(matrix), dtype=x.dtype), matrix, matrix.t()
        if op is aten.bmm.default:
            return torch.stack([matrix, matrix]), torch.stack([matrix.t()] * 2)
        return (matrix, matrix.t()) if op is aten.mm.default else (matrix,)
    if op is aten.embedding.default:
        return torch.rand(6, 5).t(), (x * 4).long()
    if op is aten.cat.default:
        return [x, torch.rand(x.shape, dtype=x.dtype)], -1
    if op is aten._chunk_cat.default:
        return [x, torch.rand(3, 2, dtype=x.dtype)], 0, 2
    if op in REST:
        return x, *REST[op](x)
    schema = [str(each.type) for each in op._schema.arguments]
    if schema.count("Tensor") == 2:
        return x, torch.rand(x.shape[-1], dtype=x.dtype) if "backward" not in str(op) else x + 1
    return (x, 2) if "number" in schema else (x,)


def program_of(op: Any, args: Sequence[Any], parts: int = 0) -> Program:
    """A program that calls an op on its inputs, whose result has so many parts."""
    graph, inputs = fx.Graph(), []

    def placeholder(tensor: Tensor) -> fx.Node:
        spec = InputSpec(
            f"x{len(inputs)}",
            geometry_of(tensor),
            tensor.untyped_storage().nbytes(),
            tensor.device,
            Argument(len(inputs)),
        )
        inputs.append(spec)
        return graph.placeholder(spec.name)

    node = graph.call_function(op, tree_map_only(Tensor, placeholder, tuple(args)))
    for at in range(parts):
        graph.call_function(operator.getitem, (node, at))
    graph.output(())
    return Program(
        graph=graph,
        constants={},
        inputs=tuple(inputs),
        outputs=(),
        epilogue=(),
        guards=tuple(TensorGuard(i, spec) for i, spec in enumerate(inputs)),
        value_guards=(),
        in_spec=None,
        out_spec=tree_flatten(())[1],
    )


def foretold_and_real(op: Any, args: Sequence[Any]) -> list[tuple[Any, Any]]:
    """What is foretold of each result, and what it is; nothing if nothing is foretold."""
    real = op(*args)
    parts = [real] if isinstance(real, Tensor) else list(real)
    program = program_of(op, args, 0 if isinstance(real, Tensor) else len(parts))
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    forms = [windows(program).forms.get(node) for node in nodes[-len(parts) :]]
    first = next(each for each in tree_flatten(tuple(args))[0] if isinstance(each, Tensor))
    return [
        (form[1:], (tuple(t.shape), t.stride(), t.storage_offset() - _start(t, first), t.dtype))
        for form, t in zip(forms, parts, strict=True)
        if form is not None
    ]


def _start(tensor: Tensor, first: Tensor) -> int:
    """Where a view of the first argument counts its offset from."""
    is_view = tensor.untyped_storage()._cdata == first.untyped_storage()._cdata
    return first.storage_offset() if is_view else 0


@pytest.mark.parametrize("op", OPS, ids=str)
def test_what_is_foretold_of_a_result_is_what_it_is(op: Any) -> None:
    compared = 0
    for layout, make in LAYOUTS.items():
        x = make()
        if op in module._IN_PLACE and torch._debug_has_internal_overlap(x):
            continue
        try:
            op(*arguments(op, x.clone() if op in module._IN_PLACE else x))
        except (RuntimeError, IndexError):
            continue  # such a view does not exist
        for foretold, real in foretold_and_real(op, arguments(op, x)):
            compared += 1
            assert foretold == real, layout
    assert compared >= 3


def heads(x: Tensor, w: Tensor) -> Tensor:
    """The heads of an attention: chains of views, parts, views that are read twice."""
    rows = F.linear(x, w).view(2, 3, 2, 4).transpose(1, 2)
    first, second = rows.split(2, -1)
    turned = torch.cat([-second, first], -1) * rows
    return F.gelu(turned).transpose(1, 2).reshape(2, 3, 8) + x


def normalised(x: Tensor, w: Tensor) -> Tensor:
    """A norm, and a product of a value of which only the size is known."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    rows = torch.sort(x * scale).values.view(6, 8)
    return (rows @ w.t()).view(2, 3, 8) + (rows.t() @ rows).view(8, 2, 4).sum((0, 1))[0]


def train(x: Tensor, w: Tensor) -> Tensor:
    """Forward and backward."""
    leaf = w.detach().requires_grad_()
    loss = (heads(x, leaf) * normalised(x, leaf)).sum()
    loss.backward()
    return leaf.grad.view(-1)[::2] + loss.detach()


ARGUMENTS = torch.rand(2, 3, 8), torch.rand(8, 8)


class Compared(fx.Interpreter):
    """Runs a graph, and compares each value with its form."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph_module)
        self.forms, self.values = windows(program).forms, {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.values[n] = super().run_node(n)
        if (form := self.forms.get(n)) is not None:
            start = self.values[form.of].storage_offset()
            offset = value.storage_offset() - start
            assert form[1:] == (tuple(value.shape), value.stride(), offset, value.dtype), n
        return value


@pytest.mark.parametrize("function", [heads, normalised, train])
def test_every_value_of_a_program_is_as_foretold(function: Callable[..., Tensor]) -> None:
    program = fz.functions.trace(function, *ARGUMENTS)
    assert len(windows(program).made) >= 2
    Compared(program).run(*ARGUMENTS)
    assert torch.equal(program(*ARGUMENTS), function(*ARGUMENTS))


def test_of_a_chain_of_views_only_the_last_is_made() -> None:
    program = fz.functions.trace(heads, *ARGUMENTS)
    found = windows(program)
    skipped = [n for n in found.skipped if n.target is aten.view.default]
    assert skipped
    for view in skipped:
        assert all(found.made[user].of is found.made[view].of is not view for user in view.users)


class Seen(TorchDispatchMode):
    """The ops that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def test_a_mode_sees_how_each_tensor_is_made() -> None:
    program = fz.functions.trace(heads, *ARGUMENTS)
    with Seen() as seen:
        result = program(*ARGUMENTS)
    assert seen.ops.count(aten.as_strided.default) == len(windows(program).made) - len(
        windows(program).skipped & windows(program).made.keys()
    )
    assert torch.equal(result, heads(*ARGUMENTS))


def test_fakes_and_transforms_go_through_the_dispatcher() -> None:
    program = fz.functions.trace(heads, *ARGUMENTS)
    run = boxed(program)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in ARGUMENTS]
    (result,) = run(list(fakes))
    assert isinstance(result, FakeTensor)
    assert result.shape == ARGUMENTS[0].shape
    many = torch.rand(5, *ARGUMENTS[0].shape)
    got = torch.func.vmap(lambda x: run([x, ARGUMENTS[1]])[0])(many)
    for one, expected in zip(got, many, strict=True):
        # `vmap` multiplies other matrices, in another order of the sums.
        torch.testing.assert_close(one, heads(expected, ARGUMENTS[1]), rtol=1e-4, atol=1e-4)


def test_a_view_that_is_returned_is_made_by_its_op() -> None:
    program = fz.functions.trace(lambda x: (x * 2).view(-1).unsqueeze(0), ARGUMENTS[0])
    (returned,) = (n for n in windows(program).forms if program.graph.output_node() in n.users)
    assert returned not in windows(program).made


def test_an_input_without_a_guard_is_unknown() -> None:
    program = program_of(aten.t.default, [torch.rand(2, 3)])
    assert windows(program).forms
    program.guards = ()
    assert not windows(program).forms


def test_a_tensor_that_is_not_as_foretold_is_named_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = (6, 8), (1, 6), 0, torch.float32
    monkeypatch.setattr(module._ViewForms, "_product", lambda forms, node: ViewForm(node, *wrong))
    program = fz.functions.trace(heads, *ARGUMENTS)
    with pytest.raises(
        InvariantError, match=r"`mm` has size \(6, 8\) and strides \(8, 1\), foretold"
    ):
        program(*ARGUMENTS)
