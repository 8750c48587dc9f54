"""README and docs tell the truth: examples print what they say, links lead somewhere, every error is told of."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from functionalize import errors
from tests.fsdp.table import written

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def test_the_example_prints_what_the_readme_says() -> None:
    part = README.partition("<!-- example: begin")[2].partition("<!-- example: end -->")[0]
    code, output = re.findall(r"```(?:python)?\n(.*?)```", part, re.DOTALL)
    assert len(code.splitlines()) <= 20
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue().strip() == output.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target


def test_every_error_has_a_line_on_its_page() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    bases = {"FunctionalizeError", "StorageError", "InvariantError"}  # told of in words
    assert sorted(told) == sorted(kinds - bases)


def test_the_functions_print_what_their_page_says() -> None:
    text = (ROOT / "docs" / "functions.md").read_text()
    parts = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(parts) == text.count("```python")
    names: dict[str, object] = {}
    for code, output in parts:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/functions.md", "exec"), names)
        assert printed.getvalue().strip() == output.strip()


def test_the_table_of_features_is_that_of_the_tests() -> None:
    assert written(README) == README, "python -m tests.fsdp.table --write"
