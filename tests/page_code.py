"""The code of a page: each fenced block runs, in the order of the page, and prints the block of text after it.

    ```python            runs; names are shared by the blocks of a page
    <!-- fragment -->    on the line before a block: it is read alone, and does not run
    <!-- setup           runs, up to `-->`: what the blocks need, and a reader does not
    ```console           each line after `$` runs, and prints the lines up to the next one, in shape: figures vary
    <!-- 130 columns --> on the line before: the width of the terminal; without it 100

for block in blocks_of(text):
    block.code, block.output            the text after it, or None
for shell in shells_of(text):
    shell.command, shell.output, shell.columns, shell.runs
shape(output)                           lines without figures
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


_SHELLS = re.compile(
    r"^(?P<fragment><!-- fragment -->\n)?(?:<!-- (?P<columns>\d+) columns -->\n)?```console\n(?P<lines>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_FIGURE = re.compile(
    r"[-+~]*\d[\d,.]*(?:e[-+]?\d+)?%?(?:\s(?:[KMGT]?i?B|[nmµ]?s|days)\b)?|\s-(?=\s|$)"
)


class Shell(NamedTuple):
    """A command and what it prints. runs: not of a fragment. columns: of the terminal."""

    command: str
    output: str
    columns: int
    runs: bool


def shells_of(text: str) -> Iterator[Shell]:
    """The commands of a page."""
    for found in _SHELLS.finditer(text):
        columns, runs = int(found["columns"] or 100), not found["fragment"]
        for command, output in _COMMAND.findall(found["lines"]):
            yield Shell(re.sub(r"\s*\\\n\s*", " ", command), output, columns, runs)


def shape(output: str) -> list[str]:
    """The lines of what a command prints, with # for each figure and its unit, and one space for several."""
    lines = (" ".join(_FIGURE.sub(" # ", line).split()) for line in output.splitlines())
    return [line for line in lines if line]


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
