"""What type checkers say of code that uses the package: no misspelt name or wrong argument passes for `Any`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT, CODE = Path(__file__).parents[2], Path(__file__).with_name("user_code.py")
LINES = dict(enumerate(CODE.read_text().splitlines(), start=1))
WRONG = {number for number, line in LINES.items() if line.endswith("  # error")}
SHOWN = {n: line.partition("  # shows ")[2] for n, line in LINES.items() if "  # shows " in line}
Said = tuple[set[int], dict[int, str]]  # the lines with errors, and the types that it revealed


# As a user checks their own code; what frameworks say of themselves is not read, which takes long.
MYPY = """
[mypy]
strict = true
allow_untyped_calls = true
follow_imports = silent
[mypy-accelerate.*,lightning.*,torchtitan.*,transformers.*]
follow_imports = skip
ignore_missing_imports = true
"""


def said_by_mypy(folder: Path) -> Said:
    (folder / "mypy.ini").write_text(MYPY)
    options = [f"--config-file={folder / 'mypy.ini'}", "--cache-dir=.mypy_cache/of_users"]
    command = [sys.executable, "-m", "mypy", *options, str(CODE)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    found = re.findall(r"user_code\.py:(\d+): (error|note): (.*)", text)
    assert found, text
    shown = {int(n): message for n, _, message in found if message.startswith("Revealed type is")}
    return {int(number) for number, kind, _ in found if kind == "error"}, shown


def said_by_pyright(folder: Path) -> Said:
    program = Path(sys.executable).with_name("basedpyright")
    if not program.exists():
        pytest.skip("basedpyright is not installed: pip install 'functionalize[test]'")
    command = [program, "--pythonpath", sys.executable, "--outputjson", CODE]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    wrong, shown = set(), {}
    for each in json.loads(text)["generalDiagnostics"]:
        number = each["range"]["start"]["line"] + 1
        if each["severity"] == "error":
            wrong.add(number)
        elif re.match(r'Type of ".*" is "', each["message"]):
            shown[number] = each["message"]
    return wrong, shown


@pytest.mark.parametrize("said", [said_by_mypy, said_by_pyright])
def test_what_a_type_checker_says(said: Callable[[Path], Said], tmp_path: Path) -> None:
    assert len(WRONG) >= 10 and len(SHOWN) >= 8
    wrong, shown = said(tmp_path)
    assert wrong == WRONG, sorted(wrong ^ WRONG)
    assert shown.keys() == SHOWN.keys()
    for number, kind in SHOWN.items():
        text = re.sub(r"\b\w+\.", "", shown[number])  # without the names of modules
        assert f'is "{kind}"' in text, (LINES[number], shown[number])
