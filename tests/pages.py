"""The part of a page in `docs/` that a test module makes, between two comments of the page.

PART = Part("standard_types.md", "types", "tests.walk.standard_types")
PART.put_into(page, table())      the text of the page with the current table in its place
PART.is_written(table())          what `python -m <module> [--write]` does: print it, or write the page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"


class Part(NamedTuple):
    """The part of one page. name: in the comments around it. module: what makes it."""

    file: str
    name: str
    module: str

    @property
    def text(self) -> str:
        """The page as it is."""
        return (DOCS / self.file).read_text()

    def put_into(self, page: str, made: str) -> str:
        """The page with `made` in its place."""
        begin = f"<!-- {self.name}: begin (written by `python -m {self.module} --write`) -->"
        end = f"<!-- {self.name}: end -->"
        before, _, rest = page.partition(begin)
        return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"

    def is_written(self, made: str) -> bool:
        """Write the page if the process was started with `--write`, else print `made`."""
        if "--write" in sys.argv:
            (DOCS / self.file).write_text(self.put_into(self.text, made))
            return True
        print(made)
        return False
