"""The notes of a recording: what is raised, what is noted, each once. The refusals themselves are in the laws."""

from __future__ import annotations

import pytest
import torch

from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import (
    EmptyStorageError,
    ForeignStorageError,
    UncapturableError,
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
        checks.note_changes_each_time("torch.seed() is called inside the step")
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
