"""The resize rule, cell by cell: `o` bytes on entry, `c` now, `n` asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from functionalize.discharge.resize import checked_nbytes, resize
from functionalize.discharge.storage import FunctionalStorage
from functionalize.errors import (
    EmptyStorageError,
    OutOfBoundsError,
    ResizeError,
    UndefinedContentsError,
)
from tests.discharge.words import Words, floats, storage_of

ROOT = floats(8)


def state(storage: FunctionalStorage) -> Any:
    return storage.nbytes, storage.base, storage.version, storage.written, storage.valid.spans


def emptied() -> FunctionalStorage:
    """`o == 0`: the parameter of FSDP2, between two layers."""
    return storage_of(ROOT, nbytes=0)


@pytest.mark.parametrize("nbytes", [0, 32, 16, 64])
def test_to_the_same_size(nbytes: int) -> None:
    storage = storage_of(ROOT, nbytes=nbytes)
    before = state(storage)
    resize(storage, nbytes)
    assert state(storage) == before


def test_to_nothing() -> None:
    """`n == 0 < o`: contents gone."""
    storage, emit = storage_of(ROOT), Words()
    resize(storage, 0)
    assert storage.entry_lost and not storage.valid.spans
    with pytest.raises(EmptyStorageError, match="whose storage holds 0 bytes here"):
        storage.read(ROOT, emit)
    with pytest.raises(EmptyStorageError, match="writes `a`"):
        storage.write(ROOT, "b", emit)


def test_to_nothing_as_on_entry() -> None:
    """`n == 0 == o`: the base is the original base again, not the second version of it."""
    storage, emit = emptied(), Words()
    resize(storage, 32)
    storage.write(ROOT, "b", emit)
    assert (storage.base, storage.written) == ("b", True)
    resize(storage, 0)
    assert (storage.base, storage.views[ROOT].value) == ("a", "a")
    assert not storage.written
    with pytest.raises(EmptyStorageError):
        storage.read(ROOT, emit)


def test_from_nothing() -> None:
    """`0 == c < n`: undefined until written; a full write never reads the old base."""
    storage, emit = emptied(), Words()
    resize(storage, 32)
    with pytest.raises(UndefinedContentsError, match="was grown to 32 bytes and some of these"):
        storage.read(ROOT, emit)
    storage.write(ROOT, "b", emit)
    assert storage.read(ROOT, emit) == "b"


def test_from_nothing_in_parts() -> None:
    storage, emit = emptied(), Words()
    resize(storage, 32)
    storage.write(floats(4), "b", emit)
    with pytest.raises(UndefinedContentsError):
        storage.read(ROOT, emit)
    storage.write(floats(4, offset=4), "c", emit)
    assert storage.read(ROOT, emit) == "cat(['b', 'c'])"


def test_from_nothing_with_a_read_in_between() -> None:
    storage, emit = emptied(), Words()
    resize(storage, 32)
    storage.write(floats(4), "b", emit)
    want = "slice_scatter(empty([8]), b, 0, 0, 4)"
    assert storage.whole(emit) == want
    storage.write(floats(4, offset=4), "c", emit)
    assert storage.read(ROOT, emit) == f"slice_scatter({want}, c, 0, 4, 8)"


def test_from_nothing_to_less_than_the_tensor() -> None:
    storage, emit = emptied(), Words()
    resize(storage, 16)
    with pytest.raises(OutOfBoundsError, match="reaches to byte 32 of a storage that holds 16"):
        storage.write(ROOT, "b", emit)
    storage.write(floats(4), "b", emit)
    assert storage.read(floats(4), emit) == "b"


def test_to_less() -> None:
    """`0 < n < c`: the prefix survives; what reaches past it is an error."""
    storage, emit = storage_of(ROOT), Words()
    resize(storage, 16)
    assert storage.read(floats(4), emit) == "slice(a, 0, 0, 4)"
    with pytest.raises(OutOfBoundsError, match="reaches to byte 32 of a storage that holds 16"):
        storage.read(ROOT, emit)


def test_to_more() -> None:
    """`0 < c < n`: what was there survives; what was added is undefined until written."""
    storage, emit = storage_of(ROOT), Words()
    resize(storage, 64)
    assert storage.read(ROOT, emit) == "a"
    with pytest.raises(UndefinedContentsError):
        storage.read(floats(16), emit)
    storage.write(floats(8, offset=8), "b", emit)
    assert "b" in storage.read(floats(16), emit)


def test_to_less_and_back() -> None:
    storage, emit = storage_of(ROOT), Words()
    resize(storage, 16)
    resize(storage, 32)
    assert storage.read(floats(4), emit) == "slice(a, 0, 0, 4)"
    with pytest.raises(UndefinedContentsError):
        storage.read(ROOT, emit)


def test_many_rounds() -> None:
    """What FSDP2 does to a parameter, step after step."""
    storage, emit = emptied(), Words()
    for i in range(3):
        resize(storage, 32)
        storage.write(ROOT, f"gathered_{i}", emit)
        assert storage.read(ROOT, emit) == f"gathered_{i}"
        resize(storage, 0)
        assert storage.base == "a"
    assert emit.calls == 0


def test_sizes() -> None:
    assert checked_nbytes(0, "a") == 0
    assert checked_nbytes(12, "a") == 12
    for wrong, text in ((-1, "to -1 bytes, a negative size"), (1.5, "to 1.5, which is no integer")):
        with pytest.raises(ResizeError) as error:
            checked_nbytes(wrong, "a")
        assert str(error.value).startswith(f"resizes the storage of `a` {text}")
    for odd in (True, torch.tensor(4), "4"):
        with pytest.raises(ResizeError, match="which is no integer: sizes are whole bytes"):
            checked_nbytes(odd, "a")
