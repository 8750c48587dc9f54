"""The collector's lists of objects are short here: a trace of a backward looks through them, and so do its tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def new_objects_only() -> Iterator[None]:
    """The collector knows no object from before the module's tests: a long run of the suite leaves a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
