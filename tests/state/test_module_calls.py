"""Which module an op belongs to: in forward, in backward, in a recomputation; kept by programs and files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize._compat.autograd import SEES_FUNCTIONS
from functionalize._compat.distributed import fake_process_group

# What FSDP2 copies gradients into the buffer of a reduce-scatter with; torch 2.15 has another op than its predecessors.
COPY_IN = (
    "chunk_cat_mixed_dtype" if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype") else "chunk_cat"
)


# Reentrant checkpointing and FSDP2's hooks in a backward are nodes of an `autograd.Function`: see docs/limits.md.
needs_functions = pytest.mark.skipif(
    not SEES_FUNCTIONS, reason="`Function.apply` is C++ in this release"
)


class Gate(nn.Module):
    """Ops of its own around those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first, self.down, self.how = Gate(), nn.Linear(6, 4), how

    def forward(self, x: Tensor) -> Tensor:
        reentrant = self.how == "reentrant"
        x = checkpoint(self.first, x, use_reentrant=reentrant) if self.how else self.first(x)
        return self.down(x).square().mean()


def captured(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(x: Tensor) -> Tensor:
        loss = model(x)
        (loss * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = fz.capture(train, memory=True)
    for _ in range(4):
        step(torch.randn(3, 4, requires_grad=True))
    assert step.memory is not None, step.explain()
    return step


def modules_of(step: Any, *names: str) -> dict[tuple[str, str], set[str]]:
    """The modules of these ops, by name and phase."""
    found = defaultdict(set)
    for op in step.memory.eager.ops:
        name = op.name.split(".")[1]
        if name in names:
            found[name, op.phase].add(op.module)
    return dict(found)


def test_forward_and_backward() -> None:
    step = captured(Model())
    assert modules_of(step, "addmm", "mm", "silu", "silu_backward", "pow") == {
        ("addmm", "forward"): {"model.first.up", "model.first.gate", "model.down"},
        ("silu", "forward"): {"model.first"},
        ("pow", "forward"): {"model"},
        ("pow", "backward"): {"model"},
        ("silu_backward", "backward"): {"model.first"},
        ("mm", "backward"): {"model.first.up", "model.first.gate", "model.down"},
    }
    assert modules_of(step, "_fused_adamw_") == {("_fused_adamw_", "optimizer"): {""}}
    # `loss * 2` is outside every module, and so is what goes backward through it.
    muls = modules_of(step, "mul")
    assert "" in muls["mul", "forward"] and "" in muls["mul", "backward"]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_a_recomputation_is_a_call(how: str) -> None:
    step = captured(Model(how))
    found = modules_of(step, "addmm", "silu", "silu_backward", "mm")
    # What is left out is not run again: nobody needs the result of the last op.
    assert found["addmm", "recompute"] == {"model.first.up", "model.first.gate"}
    assert found["silu", "recompute"] == {"model.first"}
    assert found["silu_backward", "backward"] == {"model.first"}
    assert found["mm", "backward"] == {"model.first.up", "model.first.gate", "model.down"}


def test_hooks_of_fsdp_belong_to_their_module() -> None:
    with fake_process_group(0, 2):
        model = Model()
        fully_shard(model.first)
        fully_shard(model)
        step = captured(model)
        found = modules_of(step, "_allgather_base_", "_reduce_scatter_base_", COPY_IN)
        resizes = {
            op.module
            for op in step.memory.eager.ops
            if op.name.startswith("inductor.resize") and op.phase == "forward"
        }
    assert found["_allgather_base_", "forward"] == {"model", "model.first"}
    assert "model.first" in found[COPY_IN, "backward"]
    assert resizes == {"model", "model.first"}


def test_a_gradient_that_is_accumulated_belongs_to_its_parameter() -> None:
    model = Model()

    def train(x: Tensor) -> Tensor:
        model.zero_grad()
        model(x).backward()
        model(x).backward()
        return x.sum()

    step = fz.capture(train, memory=True)
    for _ in range(4):
        step(torch.randn(3, 4))
    found = modules_of(step, "add_")
    assert found == {
        ("add_", "backward"): {"model.first.up", "model.first.gate", "model.down"},
    }


def test_programs_and_files_know_the_modules(tmp_path: Path) -> None:
    model = Model()

    def train(x: Tensor) -> Tensor:
        return model(x)

    step = fz.capture(train, memory=True)
    for _ in range(4):
        step(torch.randn(3, 4))
    step.save(tmp_path / "step.fzp")
    again = fz.capture(train)
    again.load(tmp_path / "step.fzp")
    for program in (step.program, again.programs[0]):
        program.describe()
        found = {n.meta.get("module") for n in program.graph.nodes if n.op == "call_function"}
        assert {"model.first", "model.first.up", "model.down"} <= found


def modules_in_graph(step: Any) -> dict[str, str]:
    step.program.describe()
    ops = (n for n in step.program.graph.nodes if n.op == "call_function")
    return {n.name: n.meta.get("module", "") for n in ops}


@pytest.mark.parametrize(
    "how", ["", pytest.param("reentrant", marks=needs_functions), "not reentrant"]
)
def test_a_program_has_the_same_modules_without_memory(how: str) -> None:
    found = []
    for memory in (True, False):
        torch.manual_seed(0)
        model = Model(how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def train(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x)
            (loss * 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = fz.capture(train, memory=memory)
        for _ in range(4):
            step(torch.randn(3, 4, requires_grad=True))
        found.append(modules_in_graph(step))
        assert "model.first.gate" in found[-1].values()
    assert found[0] == found[1]


@needs_functions
def test_hooks_of_fsdp_belong_to_their_module_without_memory() -> None:
    def train(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with fake_process_group(0, 2):
        model = Model()
        fully_shard(model.first)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = fz.capture(train)
        for _ in range(4):
            step(torch.randn(3, 4, requires_grad=True))
        modules_in_graph(step)
        reduces = {
            (n.meta.get("module"), n.meta["phase"])
            for n in step.program.graph.nodes
            if "reduce_scatter" in str(n.target)
        }
    # The root's reduction runs in a callback at the end of the backward, outside of every node.
    assert ("model.first", "backward") in reduces


def test_a_module_that_raises_is_left() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4))
    broken = Sometimes()

    def train(x: Tensor) -> Tensor:
        try:
            broken(x)
        except ValueError:
            pass
        return model(x.cos())

    step = fz.capture(train, memory=True)
    for _ in range(4):
        step(torch.randn(3, 4))
    found = modules_of(step, "sin", "cos", "addmm")
    assert found["sin", "forward"] == {"broken"}
    assert found["cos", "forward"] == {""}
    assert found["addmm", "forward"] == {"model.0"}


def test_a_module_whose_hash_changes_in_the_step() -> None:
    """As that of a metric of torchmetrics."""

    class Meter(nn.Module):
        total, count = torch.zeros(()), 0

        def __hash__(self) -> int:
            return self.count

    def train(meter: Meter, x: Tensor) -> Tensor:
        meter.count += 1
        meter.total = meter.total + x.detach().sum()
        return x.cos()

    ours, eager = Meter(), Meter()
    step = fz.capture(lambda x: train(ours, x), on_uncapturable="eager")
    for i in range(6):
        x = torch.full((3,), float(i))
        assert torch.equal(step(x), train(eager, x))
        assert torch.equal(ours.total, eager.total) and ours.count == eager.count
