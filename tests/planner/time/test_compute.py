"""FLOPs of captured steps are those that `FlopCounterMode` counts in eager, in total and by op."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

import functionalize as fz
from benchmarks.capture import VOCABULARY
from functionalize.planner.time.compute import Work, compute, summed
from functionalize.program import metadata as metas
from functionalize.util.torch_release import minor_of
from tests.planner.captured import COUNTED_BY_TORCH, LAYERS, TOKENS, WIDTH, recorded

aten = torch.ops.aten


def planned(rows: list[Work]) -> Counter[str]:
    return Counter({row.op: row.flops for row in summed(rows, "op") if row.flops})


@pytest.mark.parametrize("name", ["transformer", "hsdp", "llama"])
def test_flops_of_a_step(name: str) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    step = recorded(name)
    found = planned(compute(step.program))
    assert found == step.all_flops
    attention = [op for op in found if "scaled_dot_product" in op]
    assert len(attention) == 2
    for op in attention:  # before 2.15 torch counts nothing for those of CPUs
        if not COUNTED_BY_TORCH:
            del found[op]
    assert found == step.flops and found["aten.mm"] > 0


def test_torch_counts_the_attention_of_cpus_from_2_15_on() -> None:
    assert (minor_of(torch.__version__) >= (2, 15)) == COUNTED_BY_TORCH


def test_flops_with_the_other_attention_need_no_formula_of_ours() -> None:
    step = recorded("checkpointed")
    found = planned(compute(step.program))
    assert found == step.flops == step.all_flops
    assert found["aten.bmm"] > 0


def test_what_is_run_again_is_a_phase() -> None:
    phases = {row.phase: row for row in summed(compute(recorded("checkpointed").program), "phase")}
    assert list(phases) == ["forward", "backward", "recompute", "optimizer"]
    head = 2 * TOKENS * WIDTH * VOCABULARY  # outside of the blocks
    last = LAYERS * 2 * TOKENS * 4 * WIDTH * WIDTH  # what ends a block is not needed again
    assert phases["recompute"].flops == phases["forward"].flops - head - last
    assert phases["optimizer"].flops == 0 < phases["optimizer"].nbytes


def test_a_program_by_hand() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).t() * 2

    program = fz.functions.trace(fn, torch.ones(2, 3), torch.ones(3, 5))
    program.describe()
    for node in program.graph.nodes:
        node.meta.update(module="layers.0" if node.target is aten.mm.default else "", phase="")
    assert compute(program) == [
        Work("aten.mm", "", "layers.0", 1, 2 * 2 * 3 * 5, 4 * (6 + 15 + 10)),
        Work("aten.mul", "", "", 1, 0, 4 * (10 + 10)),
    ]
    assert summed(compute(program)) == [Work("", "", "", 2, 60, 204)]


def looks(count: int) -> int:
    """How often the plan of an op on so many tensors looks for tensors."""
    tensors = [torch.ones(2) for _ in range(count)]
    program = fz.functions.trace(lambda *ts: torch._foreach_add(list(ts), 1.0), *tensors)
    program.describe()
    seen = 0

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code is metas.tensors_of.__code__

    sys.setprofile(watch)
    try:
        compute(program)
    finally:
        sys.setprofile(None)
    return seen


def test_a_list_is_not_looked_through_for_each_of_its_parts() -> None:
    few, many = looks(20), looks(80)
    assert 0 < many < 5 * few
