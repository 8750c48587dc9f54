"""The releases of torch and Python that are tested are the same ones everywhere that they are named."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from functionalize.fsdp.releases import TESTED
from functionalize.util.bytecode import VERSIONS
from functionalize.util.torch_release import minor_of
from tests.expect import NEWEST, PINNED

ROOT = Path(__file__).parents[1]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_they_are_in_order_and_one_for_each_minor_release() -> None:
    minors = [minor_of(version) for version in TESTED]
    assert minors == sorted(set(minors))


def test_the_makefile_and_the_snapshots() -> None:
    makefile = dict(re.findall(r"^(PINNED|NEWEST) := (\S+)$", text("Makefile"), re.MULTILINE))
    assert makefile["NEWEST"] == TESTED[-1]
    assert makefile["PINNED"] in TESTED
    assert makefile["PINNED"].startswith(f"{PINNED}.")
    assert makefile["NEWEST"].startswith(f"{NEWEST}.")
    assert "make newest" in text(".ci/run")


def test_the_bounds_of_the_package() -> None:
    (torch,) = tomllib.loads(text("pyproject.toml"))["project"]["dependencies"]
    first, last = minor_of(TESTED[0]), minor_of(TESTED[-1])
    assert torch == f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def test_the_table_for_readers() -> None:
    rows = re.findall(r"^\| (2\.[\d., ]+) \|", text("docs/limits.md"), re.MULTILINE)
    assert sorted(v for row in rows for v in row.split(", ")) == sorted(TESTED)


def test_the_line_of_the_readme() -> None:
    (row,) = re.findall(r"^\| torch (2\.[\d., ]+) \|", text("README.md"), re.MULTILINE)
    assert tuple(row.split(", ")) == TESTED
    (torch,) = tomllib.loads(text("pyproject.toml"))["project"]["dependencies"]
    assert torch in text("README.md")


NOT_TO_BE_HAD = "3.12"


def test_the_pythons() -> None:
    known = [".".join(map(str, version)) for version in VERSIONS]
    rows = re.findall(r"^\| (3\.\d+) \| (.*) \|$", text("docs/limits.md"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == known
    assert [name for name, said in rows if said.startswith("nothing")] == [NOT_TO_BE_HAD]
    classifiers = tomllib.loads(text("pyproject.toml"))["project"]["classifiers"]
    run = [each.rpartition(" ")[2] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    assert run == [name for name in known if name != NOT_TO_BE_HAD]
    assert f"Python {known[0]} to {known[-1]}" in text("README.md")
    assert 'make newest PYTHON="$python"' in text(".ci/run")
