"""A process of its own that need not import torch: a fork of the server of `tests.ranks`, which has done so.

    done = run_module("tests.step.persisted", str(folder), flags=("error",))     # python -W error -m ...
    assert done.returncode == 0, done.stderr

It has imported torch and this library and nothing else, and hashes strings otherwise than this process does.
"""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from functionalize.step import pace
from tests.ranks import fork_server

SECONDS = 570.0  # for a process; machines of CI are slow


class Fork:
    """Calls `function(*args)`. environment: what is changed of this process's; folder: where it runs."""

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._texts = tempfile.TemporaryDirectory(prefix="fork-")
        changes = {**os.environ, **(environment or {})}
        given = (function, args, changes, folder or Path.cwd(), self._texts.name)
        self._process = fork_server().Process(target=_call, args=given)
        self._process.start()

    def done(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; returns what `subprocess.run` would."""
        self._process.join(SECONDS)
        self._process.kill()
        self._process.join()
        texts = [Path(self._texts.name, name).read_text() for name in ("out", "err")]
        code = self._process.exitcode
        self._texts.cleanup()
        return subprocess.CompletedProcess([], -1 if code is None else code, *texts)


def run_module(
    name: str,
    *args: str,
    flags: Sequence[Any] = (),
    environment: dict[str, str] | None = None,
    path: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """`python -m name args`. flags: actions of warnings; path: folders where Python looks for modules first."""
    return Fork(_module, name, args, flags, path, environment=environment).done()


def _module(name: str, args: Sequence[str], flags: Sequence[Any], path: Sequence[str]) -> None:
    for action in flags:
        warnings.simplefilter(action)
    sys.path[:0] = path
    sys.argv = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _call(
    function: Callable[..., Any],
    args: Sequence[Any],
    environment: dict[str, str],
    folder: Path,
    texts: str,
) -> None:
    pace.most_seconds = math.inf  # as in `settle_process`
    for number, name in ((1, "out"), (2, "err")):
        with open(f"{texts}/{name}", "w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    function(*args)
