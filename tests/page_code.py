"""The Python code of a page: each fenced block runs, in the order of the page, and prints the block of text after it.

    ```python            runs; names are shared by the blocks of a page
    <!-- fragment -->    on the line before a block: it is read alone, and does not run
    <!-- setup           runs, up to `-->`: what the blocks need, and a reader does not

for block in blocks_of(text):
    block.code, block.output            the text after it, or None
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^(?P<fragment><!-- fragment -->\n)?```python\n(?P<code>.*?)^```$(?:\n+^```\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block. output: what it must print; None: anything. line: of the page."""

    code: str
    output: str | None
    line: int


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page that run."""
    for found in _BLOCK.finditer(text):
        if not found["fragment"]:
            name = "setup" if found["setup"] is not None else "code"
            line = text.count("\n", 0, found.start(name)) + 1
            yield Block(found[name], found["output"], line)


def unfenced(text: str) -> Iterator[str]:
    """Indented blocks of a page that are Python statements: they would not run."""
    plain = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.findall(r"(?:^|\n\n)((?: {4}.*\n(?:\n(?= {4}))*)+)", plain):
        code = re.sub(r"^ {4}", "", block, flags=re.MULTILINE)
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        if any(isinstance(node, ast.Call | ast.FunctionDef) for node in ast.walk(tree)):
            yield code
