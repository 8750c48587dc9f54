"""State of the process that cases change is as before after each test."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.walk.cases import KEPT, PROXIED, SETTINGS, VARIABLE, Meta


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    SETTINGS.scale = SETTINGS.kl = SETTINGS.l1 = 1.0


@pytest.fixture
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(Meta, "scale", 1.0)
    monkeypatch.delenv("FZ_TEST_SCALE", raising=False)
    threads, level = torch.get_num_threads(), logging.getLogger("tests.hidden").level
    KEPT[1].scale, PROXIED.scale = 2.0, 1.0
    yield
    os.environ.pop("FZ_TEST_SCALE", None)
    torch.set_num_threads(threads)
    logging.getLogger("tests.hidden").setLevel(level)
    VARIABLE.set(1.0)
