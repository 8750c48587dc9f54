"""A step that is recorded on real tensors, on the CPU's allocator, beside its plan in a fake world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import MemoryReportError
from functionalize.planner.report.text import _SEARCHED, AllocatingOp, Memory, _blocks, _ends


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)], nn.ReLU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def careless(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    kept = model(x).pow(2)
    copy = kept.detach().clone()
    kept.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    del copy


def planned(batch: int) -> Memory:
    with fz.world(1, target="cpu"):
        captured, args = fz.capture(step, memory=True), build()
        while captured.program is None:
            captured(*args, torch.empty(batch, 16))
    assert captured.memory is not None
    return captured.memory


def recorded(run: Any, batch: int) -> Memory:
    noted, args = fz.record_memory(run), build()
    for _ in range(3):
        noted(*args, torch.ones(batch, 16))
    assert noted.memory is not None
    return noted.memory


def test_a_step_that_runs_as_planned_parts_nowhere():
    found = planned(8).against(recorded(step, 8))
    assert found.partings == [] and found.alike > 20
    assert found.before[0] == found.before[1] and found.planned.peak == found.recorded.peak
    assert "parted" not in found.text() and f"{found.alike} ops allocate as planned" in str(found)


def test_an_op_that_was_not_planned_is_named_with_its_line():
    found = planned(8).against(recorded(careless, 8))
    size = 8 * 16 * 4
    first, last = found.partings
    assert [op.name for op in first.planned] == ["sum"]  # after which the squares are freed
    assert [op.name for op in first.recorded] == ["clone", "sum"]
    assert first.nbytes == found.recorded.peak - found.planned.peak == 2 * size
    assert last.nbytes == -2 * size  # both are freed at the end
    text = found.text()
    assert (
        "parted: +1.00 KiB" in text
        and "clone allocates 512 B; forward" in text
        and "copy = kept.detach().clone()" in text
    )


def test_another_batch_parts_at_the_ops_whose_results_have_its_size():
    found = planned(8).against(recorded(step, 4))
    names = {op.name for each in found.partings for op in each.recorded}
    assert {"addmm", "relu", "pow.Tensor_Scalar"} <= names
    phases = {found.recorded.ops[op.at].phase for each in found.partings for op in each.recorded}
    assert phases == {"forward", "backward"} and found.alike > 0
    assert found.before[0] - found.before[1] == 4 * 16 * 4  # the batch itself
    short = found.text(k=1)
    assert short.count("parted: ") == 1 and f"and {len(found.partings) - 1} partings more" in short


def test_long_runs_are_compared_op_by_op():
    one = [AllocatingOp("mm", (i % 7,), (), i) for i in range(_SEARCHED + 50)]
    other = [*one[:10], AllocatingOp("mm", (99,), (), 10), *one[11:-1]]
    start, end = _ends(one, other)
    cut, last = one[start:], other[start:]
    assert (start, end) == (10, 0)
    assert list(_blocks(cut, last)) == [(one[10:11], other[10:11]), (one[-1:], [])]


def test_a_report_without_eager_cannot_be_compared():
    with pytest.raises(MemoryReportError, match="no timeline `eager`"):
        Memory(None, planned(8).program).against(planned(8))
