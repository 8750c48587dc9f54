"""State of the process that cases change is as before after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.walk.cases import same_process


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    with same_process():
        yield
