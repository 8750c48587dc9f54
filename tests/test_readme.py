"""The README tells the truth: its example prints what it says, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

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
