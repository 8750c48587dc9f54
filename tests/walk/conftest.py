"""State of the process that cases change is as before after each test."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from tests.walk.cases import same_process


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    with same_process():
        yield


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """An installed package, by its file: the test module's `SOURCE`, which is imported as its `LIBRARY`."""
    name = request.module.LIBRARY
    module = types.ModuleType(name)
    module.__file__ = f"/venv/lib/site-packages/{name}.py"
    sys.modules[name] = module
    exec(compile(request.module.SOURCE, module.__file__, "exec"), vars(module))
    yield module
    del sys.modules[name]
