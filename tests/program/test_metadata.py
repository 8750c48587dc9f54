"""`node.meta`: modules in FX's forms, what FSDP2 does, in forward, backward and recomputation; passes keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize import passes
from functionalize._compat.autograd import SEES_FUNCTIONS
from functionalize._compat.distributed import fake_process_group
from functionalize.ir.commit import is_commit
from tests.steps import program_of

aten = torch.ops.aten
PROVENANCE = (
    "stack_trace",
    "forward_stack_trace",
    "autograd_node",
    "seq_nr",
    "module",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "fsdp",
    "ranges",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def inner(self, x: Tensor) -> Tensor:
        return self.up(x).sin()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).tanh()


@pytest.fixture(scope="module")
def program() -> fz.Program:
    """A step of two sharded blocks with checkpoints, on two ranks."""
    with fake_process_group(0, 2):
        model = nn.Sequential(Block(), Block(), nn.Linear(4, 4))
        for block in list(model)[:2]:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        found = program_of(model, optimizer, torch.randn(3, 4))
        found.describe()
        return found


def ops(program: fz.Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.op == "call_function"]


OPTIONS = {"bucket_gathers": "{mb=1}", "bucket_reduces": "{mb=1, rounding=true}"}


@pytest.mark.parametrize("name", passes.PASSES)
def test_every_pass_keeps_it(program: fz.Program, name: str) -> None:
    before = {n.name: n.meta for n in ops(program)}
    after = passes.run(program, name + OPTIONS.get(name, ""))
    for node in ops(after):
        if is_commit(node):
            continue
        old = before.get(node.name)
        if old is not None:
            assert [node.meta.get(k) for k in PROVENANCE] == [old.get(k) for k in PROVENANCE]
        assert node.meta["phase"] and node.meta["stack_trace"], node
        if "autograd_node" in node.meta and SEES_FUNCTIONS:
            assert node.meta["forward_stack_trace"], node
        if "_c10d_functional" in str(node.target):
            assert "fsdp" in node.meta, node


def the(program: fz.Program, target: Any, phase: str, module: str) -> fx.Node:
    (found,) = (
        n
        for n in ops(program)
        if n.target is target and n.meta["phase"] == phase and n.meta["module"] == module
    )
    return found


def test_modules_are_in_the_form_of_fx(program: fz.Program) -> None:
    block, up = f"{__name__}.Block", "torch.nn.modules.linear.Linear"
    stack = {
        "model": ("model", "torch.nn.modules.container.Sequential"),
        "model.1": ("model.1", block),
        "model.1.up": ("model.1.up", up),
    }
    forward = the(program, aten.addmm.default, "forward", "model.1.up").meta
    assert forward["nn_module_stack"] == stack and "fwd_nn_module_stack" not in forward
    again = the(program, aten.addmm.default, "recompute", "model.1.up").meta
    assert again["nn_module_stack"]["model.1.up"] == ("model.1.up", up)
    backward = the(program, aten.tanh_backward.default, "backward", "model.1").meta
    del stack["model.1.up"]
    assert backward["fwd_nn_module_stack"] == stack and "nn_module_stack" not in backward


def test_what_fsdp_does_has_its_group_and_role(program: fz.Program) -> None:
    roles: dict[str, set[tuple[str, str]]] = {}
    for n in ops(program):
        if "fsdp" in n.meta:
            name = n.target.__name__.partition(".")[0]
            roles.setdefault(name, set()).add(n.meta["fsdp"])
    groups = ("0", "1", "")
    assert roles["all_gather_into_tensor"] == {(group, "unshard") for group in groups}
    assert roles["reduce_scatter_tensor"] == {(group, "reduce") for group in groups}
    assert roles["wait_tensor"] == {(group, "wait") for group in groups}
    assert roles["split_with_sizes_copy"] == {(group, "copy-out") for group in groups}
    assert roles["cat"] == roles["_chunk_cat"] == {(group, "pack") for group in groups}
    communicates = [n for n in ops(program) if "_c10d_functional" in str(n.target)]
    assert communicates and all("fsdp" in n.meta for n in communicates)


def test_a_merged_collective_has_all_groups(program: fz.Program) -> None:
    after = passes.run(program, "bucket_gathers{mb=1}")
    merged = [n.meta["fsdp"] for n in ops(after) if "0+1" in n.meta.get("fsdp", ("",))[0]]
    assert {role for _, role in merged} == {"pack", "unshard", "wait", "copy-out"}


def test_the_text_says_where_ops_come_from(program: fz.Program) -> None:
    text = program.print_readable(print_output=False, provenance=True)
    assert "    # forward, model.1.up\n" in text
    assert "    # recompute, model.0.up\n" in text
    assert "    # backward, model.2, FSDP unshard of 1\n" in text
    if SEES_FUNCTIONS:  # FSDP2 reduces in the node of one
        assert "    # backward, model.1, FSDP reduce of 1\n" in text
    assert "#" not in program.print_readable(print_output=False)


def test_its_repr_reads_no_tensor(program: fz.Program) -> None:
    """The text of a tensor whose storage FSDP2 has emptied ends the process."""
    found = f"<Program: {len(ops(program))} ops, {len(program.inputs)} inputs, {len(program.outputs)} outputs>"
    assert repr(program) == found
