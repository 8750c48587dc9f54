"""The README's table of features, made from the tables that the tests are parametrised with.

    python -m tests.fsdp.table            prints it
    python -m tests.fsdp.table --write    puts it into README.md; `tests/test_readme.py` fails if it is not there

A title is here because a test of that title is; a mark says what the test asserts: ✓ replayed bit for bit, ✗ eager
cannot run it on gloo, and the test shows eager's error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fsdp import (
    features,
    test_boundary,
    test_checkpointing,
    test_huggingface,
    test_microbatches,
    test_optimizers,
    test_persist,
)

README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- features: begin (written by `python -m tests.fsdp.table --write`) -->"
END = "<!-- features: end -->"
Row = tuple[str, list[str], str]


def rows() -> Iterator[Row]:
    """(group, features with their marks, the file of their tests)."""
    for group, found in features.GROUPS.items():
        titles = [
            f"✗ {r.title} (not on gloo)" if r.eager else f"✓ {r.title}" for r in found.values()
        ]
        yield group, titles, "test_features.py"
    proven = {
        "activation checkpointing, dropout on": (
            test_checkpointing.MODELS,
            "test_checkpointing.py",
        ),
        "a call per microbatch": (test_microbatches.WAYS, "test_microbatches.py"),
        "optimizers, default arguments": (test_optimizers.TITLES, "test_optimizers.py"),
        "Hugging Face, dropout by default": (test_huggingface.TITLES, "test_huggingface.py"),
        "a forward alone, its backward outside": (test_boundary.TITLES, "test_boundary.py"),
        "saved and loaded in another process": (test_persist.TITLES, "test_persist.py"),
    }
    for group, (titles, file) in proven.items():
        yield group, [f"✓ {title}" for title in titles], file


def table() -> str:
    """The rows as Markdown."""
    lines = ["| | `fz.capture` | tested in `tests/fsdp/` |", "| --- | --- | --- |"]
    lines += [f"| {group} | {'; '.join(titles)} | `{file}` |" for group, titles, file in rows()]
    return "\n".join(lines)


def written(text: str) -> str:
    """A README with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(written(README.read_text()))
    else:
        print(table())
