"""README and docs tell the truth: their examples print what they say, their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from tests.fsdp.table import written

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_prints_what_the_readme_says() -> None:
    part = README.partition("<!-- example: begin")[2].partition("<!-- example: end -->")[0]
    code, output = re.findall(r"```(?:python)?\n(.*?)```", part, re.DOTALL)
    assert len(code.splitlines()) <= 20
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue().strip() == output.strip()


def test_every_relative_link_exists() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


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
