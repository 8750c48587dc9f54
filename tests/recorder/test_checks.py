"""The notes of a recording: what is raised, what is noted, each once. The refusals themselves are in the laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import (
    EmptyStorageError,
    ForeignStorageError,
    UncapturableError,
    UnorderedMutationError,
)
from functionalize.recorder.checks import Checks
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import StorageTable

aten = torch.ops.aten


def test_what_only_a_program_cannot_hold_is_noted_once_where_the_step_runs_for_real() -> None:
    checks = Checks(StorageTable(), for_real=True)
    for _ in range(2):
        checks.note_or_raise(ForeignStorageError("resizes a storage"))
    assert checks.unrepeatable == ["resizes a storage"]
    with pytest.raises(EmptyStorageError):
        checks.note_or_raise(EmptyStorageError("reads nothing"))


def test_what_only_a_program_cannot_hold_is_raised_where_nothing_runs_for_real() -> None:
    checks = Checks(StorageTable(), for_real=False)
    with pytest.raises(ForeignStorageError):
        checks.note_or_raise(ForeignStorageError("resizes a storage"))
    with pytest.raises(UncapturableError, match=r"torch.seed.*which a replay cannot repeat"):
        checks.note_changes_each_time("torch.seed() is called inside the step", "do so outside")
    checks.note_effect("prints", "at train.py:1")
    assert not checks.unrepeatable


def test_a_generator_that_is_set_unseen_is_noted_unless_the_recording_was_left() -> None:
    with Recorder(ignore_fake=True) as recorder:
        torch.rand(2)
        torch.default_generator.manual_seed(3)
        torch.rand(2)
    (note,) = recorder.checks.unrepeatable
    assert note.startswith("a random generator is set inside the step, before aten.rand.default")

    with Recorder(ignore_fake=True) as recorder:
        torch.rand(2)
    torch.default_generator.manual_seed(4)
    recorder.resume()
    with recorder:
        torch.rand(2)
    assert not recorder.checks.unrepeatable


def test_an_op_on_data_that_is_not_there_has_not_run() -> None:
    x = torch.ones(4)
    with Recorder(ignore_fake=True) as recorder:
        x.sin()
        x.untyped_storage().resize_(0)
        with pytest.raises(EmptyStorageError, match=r"aten.cos.default"):
            x.cos()
    assert [record.target for record in recorder.records] == [aten.sin.default, RESIZE_STORAGE]
    assert recorder.failed is None


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.add_(a[:1].expand(3, 3)),
        lambda a: torch._foreach_add_([a], [a[:1].expand(3, 3)]),
        lambda a: torch.mul(a, a[:, 1:2].expand(3, 3), out=a),
        lambda a: a.copy_(a[0].view(3, 1).expand(3, 3)),
    ],
)
def test_an_expanded_view_of_what_is_written_is_refused(write: Any) -> None:
    """Eager lets it pass, and its result depends on the order of the writes."""
    with pytest.raises(UnorderedMutationError, match="reads an expanded view of it"):
        fz.functions.trace(write, torch.arange(9.0).view(3, 3))


def test_a_row_that_is_copied_to_all_rows() -> None:
    a, b = torch.arange(9.0).view(3, 3), torch.arange(9.0).view(3, 3)
    fz.functions.trace(lambda a: a.copy_(a[1:2].expand(3, 3)), a)(a)
    b.copy_(b[1:2].expand(3, 3))
    assert torch.equal(a, b)


def test_an_expanded_view_of_what_is_written_does_not_stop_a_step() -> None:
    def step(a: torch.Tensor) -> torch.Tensor:
        return a.add_(a[:1].expand(3, 3))

    captured = fz.capture(step, on_uncapturable="eager")
    for _ in range(4):
        assert torch.equal(captured(torch.ones(3, 3)), step(torch.ones(3, 3)))
    assert captured.stats.replays == 0
