"""A recorded run is undone: contents, sizes and versions of tensors that were there before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functionalize.recorder.op_kinds import storage_of
from functionalize.step_backward.undo import UndoingRecorder


def in_place(x: Tensor) -> None:
    x.mul_(2)
    x[1:].zero_()


def out(x: Tensor) -> None:
    torch.sin(torch.ones(4), out=x)


def foreach(x: Tensor) -> None:
    torch._foreach_add_([x, x], [torch.ones(4)] * 2)


def emptied(x: Tensor) -> None:
    x.untyped_storage().resize_(0)


def grown(x: Tensor) -> None:
    x.untyped_storage().resize_(64)
    x.add_(1)


def running_statistics(x: Tensor) -> None:
    torch.native_batch_norm(torch.randn(3, 4), None, None, x, torch.ones(4), True, 0.1, 1e-5)


@pytest.mark.parametrize("write", [in_place, out, foreach, emptied, grown, running_statistics])
def test_what_was_written(write: Callable[[Tensor], None]) -> None:
    x = torch.arange(4.0)
    recorder = UndoingRecorder(for_real=True)
    with recorder:
        write(x)
    version = x._version
    recorder.undo()
    assert storage_of(x).nbytes() == 16
    assert x.tolist() == [0, 1, 2, 3]
    assert x._version == 0 <= version


def test_what_the_run_made_is_not_copied() -> None:
    recorder = UndoingRecorder()
    with recorder:
        made = torch.zeros(4) + 1
        made.mul_(3)
    recorder.undo()
    assert made.tolist() == [3, 3, 3, 3]


def test_a_change_of_geometry_is_noted() -> None:
    x = torch.zeros(2, 3)
    recorder = UndoingRecorder(for_real=True)
    with recorder:
        x.t_()
    assert recorder.checks.unrepeatable == [
        "aten.t_.default changes the size or strides of a tensor in place"
    ]
