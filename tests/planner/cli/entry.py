"""The command line as a shell calls it: arguments in, exit code, stdout and stderr out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from functionalize.planner.cli import console, main

TRAINING = str(Path(__file__).with_name("training.py"))


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, parsed."""
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """Its stderr on one line."""
        return " ".join(self.err.split())


Command = Callable[..., Ran]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `functionalize` with some arguments; without lines of progress, which depend on the time that it takes."""
    monkeypatch.setattr(console, "_LINE_EVERY", math.inf)

    def run(*args: object, columns: int = 100) -> Ran:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["functionalize", *map(str, args)])
        capsys.readouterr()
        try:
            code = main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        return Ran(code, *capsys.readouterr())

    return run
