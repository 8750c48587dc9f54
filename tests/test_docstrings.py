"""Every public function and class has an example in its docstring, which runs and prints what it says."""

from __future__ import annotations

import doctest
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import functionalize as fz

PACKAGES = (fz, fz.functions, fz.planner, fz.passes)
NAMES = {f"{p.__name__}.{name}": getattr(p, name) for p in PACKAGES for name in p.__all__}
# Not numbers and tables, errors (`docs/errors.md`), and an op of torch, which has no docstring.
KINDS = (type, types.FunctionType)
SHOWN = {
    name: found
    for name, found in NAMES.items()
    if isinstance(found, KINDS) and not (isinstance(found, type) and issubclass(found, Exception))
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", SHOWN)
def test_the_example_of_a_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"fz": fz, "torch": torch}
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(SHOWN[name], name, module=False, globs=names)
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not runner.run(test, out=said.append).failed, "".join(said)
