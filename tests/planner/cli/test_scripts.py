"""Scripts by path and by name, and values as they are written on a command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from functionalize.errors import UsageError
from functionalize.planner.cli.scripts import (
    FunctionNames,
    assignments,
    axis,
    literal,
    mesh,
    nbytes,
    opened,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80_000_000_000),
        ("80GiB", 80 * 2**30),
        ("79.5 gib", int(79.5 * 2**30)),
        ("1.5MB", 1_500_000),
        ("2KiB", 2048),
        ("1TB", 10**12),
        ("80e9", 80_000_000_000),
        ("512", 512),
        ("512B", 512),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert nbytes(text) == expected


@pytest.mark.parametrize("text", ["80G", "GB", "", "-1GB", "80 GBs", "1..2GB"])
def test_sizes_that_could_be_two_things_or_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"write 80GB, 74\.5GiB, a number of bytes, or a machine"):
        nbytes(text)


def test_a_size_larger_than_any_number() -> None:
    with pytest.raises(UsageError, match="the size '1e400GB' is no number of bytes"):
        nbytes("1e400GB")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64x8", (64, 8)), ("8", (8,)), ("dp=64,tp=8", {"dp": 64, "tp": 8}), ("dp=2", {"dp": 2})],
)
def test_meshes(text: str, expected: Any) -> None:
    assert mesh(text) == expected


@pytest.mark.parametrize("text", ["", "64*8", "dp=64,tp", "dp=x", "dp=2,dp=3"])
def test_meshes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="write 64x8, or dp=64,tp=8"):
        mesh(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        ("1e-3", 1e-3),
        ("True", True),
        ("false", False),
        ("none", None),
        ("(1, 2)", (1, 2)),
        ("'4'", "4"),
        ("8B", "8B"),
        ("a b", "a b"),
    ],
)
def test_literals(text: str, expected: Any) -> None:
    found = literal(text)
    assert found == expected and type(found) is type(expected)


def test_assignments() -> None:
    assert assignments(["layers=4", "size=8B", "name=a=b"]) == {
        "layers": 4,
        "size": "8B",
        "name": "a=b",
    }
    for given in (["layers"], ["=4"], ["a b=4"]):
        with pytest.raises(UsageError, match="write --set key=value"):
            assignments(given)
    with pytest.raises(UsageError, match="--set layers appears twice"):
        assignments(["layers=4", "layers=5"])


def test_axes_of_a_grid() -> None:
    assert axis("batch=1,2, 4") == ("batch", [1, 2, 4])
    assert axis("size=8B,70B") == ("size", ["8B", "70B"])
    assert axis("mesh=64x8,512") == ("mesh", [(64, 8), (512,)])
    assert axis("passes=default,remat{select=budget, budget_mb=512}") == (
        "passes",
        ["default", "remat{select=budget, budget_mb=512}"],
    )
    assert axis("shape=(1,2),(3,4)") == ("shape", [(1, 2), (3, 4)])
    with pytest.raises(UsageError, match="a value is empty"):
        axis("batch=1,,2")


# -- scripts ---------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_and_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "neighbour_of_it.py", "SIZE = 3")
    text = "import neighbour_of_it\ndef build(): return neighbour_of_it.SIZE\ndef step(): pass\n"
    where = write(tmp_path, "script_of_it.py", text)
    before = list(sys.path)
    with opened(where, FunctionNames()) as script:
        assert script.build() == 3 and script.inputs is None
        assert sys.path[0] == str(tmp_path) and "script_of_it" in sys.modules
    assert sys.path == before and "script_of_it" not in sys.modules
    del sys.modules["neighbour_of_it"]


def test_nothing_is_left_of_a_script_that_fails(tmp_path: Path) -> None:
    where = write(tmp_path, "script_that_fails.py", "raise ZeroDivisionError\n")
    before = list(sys.path)
    with pytest.raises(ZeroDivisionError), opened(where, FunctionNames()):
        pass
    assert sys.path == before and "script_that_fails" not in sys.modules


def test_a_script_with_the_name_of_a_module_does_not_replace_it(tmp_path: Path) -> None:
    where = write(tmp_path, "torch.py", "def build(): pass\ndef step(): pass\n")
    with opened(where, FunctionNames()) as script:
        assert sys.modules["torch"] is torch and script.build.__module__ == "torch_script"


def test_a_module_and_other_names() -> None:
    with opened(
        "tests.planner.cli.training", FunctionNames(step="reads_data", inputs="constant_inputs")
    ) as script:
        assert script.step.__name__ == "reads_data" and script.inputs is not None
        assert script.inputs.__name__ == "constant_inputs"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "nothere.py",
            "nothere.py is not there: give the path of a Python file, or package.module",
        ),
        ("no_such.module", "no module `no_such.module` .there is no `no_such` on sys.path"),
        ("tests.planner.cli.nothing", "there is no `tests.planner.cli.nothing`"),
        ("..", "is not there"),
        (".training", "is no name of a module"),
        ("README.md", "README.md is no Python file"),
    ],
)
def test_scripts_that_are_not_there(where: str, message: str) -> None:
    with pytest.raises(UsageError, match=message), opened(where, FunctionNames()):
        pass


def test_what_a_script_itself_misses_is_its_own_error(tmp_path: Path) -> None:
    where = write(tmp_path, "imports.py", "import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError), opened(where, FunctionNames()):
        pass
    where = write(tmp_path, "fails_inside.py", "def build(): pass\ndef step(): pass\n")
    with pytest.raises(ModuleNotFoundError), opened("tests.planner.cli.training", FunctionNames()):
        raise ModuleNotFoundError("in the step", name="tests")


@pytest.mark.parametrize("name", ["nothing", "not_a_function"])
def test_a_function_that_is_not_there_and_those_that_are(name: str) -> None:
    message = f"has no function `{name}`: it has build, inputs, step, .*--step NAME"
    with (
        pytest.raises(UsageError, match=message),
        opened("tests.planner.cli.training", FunctionNames(step=name)),
    ):
        pass
