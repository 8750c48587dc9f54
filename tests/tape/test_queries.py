"""`program.forward_of` and `program.backward_of`, also after passes and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.fx.traceback import annotate
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize import passes
from functionalize._compat.distributed import fake_process_group
from tests.steps import make_loss_step, program_of

aten = torch.ops.aten


@pytest.fixture
def program() -> fz.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.cos()
        return (model(x) * scale)[:, :2].square().mean()

    step = fz.capture(make_loss_step(loss_of, optimizer))
    for _ in range(3):
        step(torch.randn(2, 3))
    assert step.program is not None
    return step.program


def the(program: fz.Program, target: Any) -> Any:
    return next(n for n in program.graph.nodes if n.target is target)


def test_a_backward_op_has_its_forward_op(program: fz.Program) -> None:
    backward = the(program, aten.tanh_backward.default)
    assert [n.target for n in program.forward_of(backward)] == [aten.tanh.default]
    assert backward in program.backward_of(the(program, aten.tanh.default))
    assert program.forward_of(the(program, aten.tanh.default)) == []
    assert program.backward_of(the(program, aten.cos.default)) == []
    assert program.forward_of(backward.name) == program.forward_of(backward)
    with pytest.raises(LookupError, match="no node `none`"):
        program.forward_of("none")


def test_the_backward_of_a_view_belongs_to_the_reader_of_the_view(program: fz.Program) -> None:
    """A slice is made where `square` reads it: `slice_backward` has no other op of the graph as its forward."""
    program.describe()
    (backward,) = (
        n for n in program.graph.nodes if n.meta.get("autograd_node") == "SliceBackward0"
    )
    assert aten.pow.Tensor_Scalar in [n.target for n in program.forward_of(backward)]
    assert "[:, :2].square()" in backward.meta["forward_stack_trace"]


def test_every_pass_keeps_the_line_of_the_forward(program: fz.Program) -> None:
    def with_lines(of: fz.Program) -> int:
        of.describe()
        return sum("forward_stack_trace" in n.meta for n in of.graph.nodes)

    before = with_lines(program)
    assert before > 8
    after = passes.run(program, "default")
    inside = [n for n in after.graph.nodes if n.meta.get("autograd_node")]
    assert inside and all("forward_stack_trace" in n.meta for n in inside)


def test_a_file_keeps_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: Tensor) -> Tensor:
        with annotate({"stage": 1}), record_function("loss"):
            return model(x).tanh().sum()

    train = make_loss_step(loss_of, optimizer)
    step = fz.capture(train)
    for _ in range(3):
        step(torch.randn(2, 3))
    step.save(tmp_path / "step.fzp")
    again = fz.capture(train)
    again.load(tmp_path / "step.fzp")
    for each in (step.program, again.programs[0]):
        backward = the(each, aten.tanh_backward.default)
        assert [n.name for n in each.forward_of(backward)] == [the(each, aten.tanh.default).name]
        assert "model(x).tanh()" in backward.meta["forward_stack_trace"]
        assert backward.meta["custom"] == {"stage": 1}
        assert the(each, aten.tanh.default).meta["ranges"] == (("loss", 0, None),)
        linear = {"model": ("model", "torch.nn.modules.linear.Linear")}
        assert the(each, aten.addmm.default).meta["nn_module_stack"] == linear
        assert each.gradient_of("weight").meta["gradient_of"] == ["model.weight"]


def test_annotations_reach_backward_and_recomputation() -> None:
    net = nn.Linear(3, 3)

    def block(x: Tensor) -> Tensor:
        return net(x).sin()

    def train(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        with annotate({"stage": 1}):
            y = checkpoint(block, x, use_reentrant=False)
        y.exp().sum().backward()
        return x.grad

    step = fz.capture(train)
    for _ in range(3):
        step(torch.randn(2, 3))
    step.program.describe()
    found: dict[str, set[Any]] = {}
    for n in step.program.graph.nodes:
        if n.target in (aten.sin.default, aten.cos.default, aten.addmm.default, aten.exp.default):
            key = f"{n.target} {n.meta['phase']}"
            found.setdefault(key, set()).add(str(n.meta.get("custom")))
    stage = {"{'stage': 1}"}
    assert found["aten.sin.default forward"] == found["aten.cos.default backward"] == stage
    assert found["aten.addmm.default forward"] == found["aten.addmm.default recompute"] == stage
    assert found["aten.exp.default forward"] == {"None"}


def test_a_gradient_is_found_by_the_name_of_its_parameter(program: fz.Program) -> None:
    gradient = program.gradient_of("0.weight")
    assert gradient.target is aten.mm.default and gradient.meta["gradient_of"] == ["model.0.weight"]
    assert program.gradient_of("model.2.bias").meta["autograd_node"] == "AddmmBackward0"
    with pytest.raises(LookupError, match=r"`weight` may be model\.2\.weight or model\.0\.weight"):
        program.gradient_of("weight")
    with pytest.raises(LookupError, match=r"no gradient of `1\.weight`: it has those of model\.2"):
        program.gradient_of("1.weight")


def test_fsdp_reduces_what_a_gradient_is() -> None:
    with fake_process_group(0, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        gradient = program_of(model, optimizer, torch.randn(3, 4)).gradient_of("1.weight")
        assert gradient.target is aten.mm.default and gradient.meta["module"] == "model.1"
