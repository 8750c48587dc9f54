"""Private names of torch are imported in one place, `functionalize/_compat/`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for package in ("functionalize", "passes")
    for path in (ROOT / package).rglob("*.py")
    if path.parent.name != "_compat"
)
# Ops that are documented or that autograd's own code writes with an underscore: no import is involved.
PUBLIC = {"_foreach_copy_", "_unsafe_preserve_version_counter"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part not in PUBLIC


def private_names(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and parts[1:2] != ["ops"]:
                found += [name for p in parts[1:] if is_private(p)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_name_of_torch_outside_compat(path: Path) -> None:
    assert private_names(ast.parse(path.read_text())) == []
