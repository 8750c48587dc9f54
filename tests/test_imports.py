"""Imports point one way: the folders of `functionalize` and `passes` stand in one order, and no files form a circle.

Every import counts: those inside functions and those under `TYPE_CHECKING`, too.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A folder imports only what stands before it. `docs/architecture.md` says what each holds.
ORDER = [
    "ctrl_c",
    "errors",
    "_compat",
    "util",
    "ir",
    "repeats",
    "tape",
    "discharge",
    "program",
    "templates",
    "analysis",
    "run",
    "cost.machines",
    "cost",
    "cost.decide",
    "passes",
    "scalars",
    "calls",
    "recorder",
    "fsdp",
    "walk",
    "state",
    "saving",
    "audit",
    "lengths",
    "step",
    "late_sizes",
    "step_backward",
    "functions",
    "entry",
    "deferral",
    "integrations",
    "planner.machines",
    "planner.scratch",
    "planner.timeline",
    "planner.allocator",
    "planner.report",
    "planner.time",
    "planner.pictures",
    "planner.fake_world",
    "planner.lifetimes",
    "planner.sweep",
    "planner.configs",
    "planner.calibration",
    "planner.tuning",
    "planner",
    "functionalize",
    "planner.cli",
    "__main__",
]


def modules() -> dict[str, Path]:
    """The modules of the package by dotted name; a package is its `__init__.py`. `passes` stands beside it."""
    found = {}
    for folder, above in (("functionalize", ROOT), ("passes", ROOT / "functionalize")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = (above / path.relative_to(ROOT)).relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file as a list."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> list[str]:
    """The modules of ours that a file imports, wherever in the file it does."""
    found = []
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            owner = name if name in MODULES else name.rpartition(".")[0]
            if owner in MODULES:
                found.append(owner)
    return found


def folder_of(module: str) -> str:
    """The entry of ORDER that a module belongs to: the longest that its name starts with."""
    if module == "functionalize":
        return module
    inside = module.removeprefix("functionalize.")
    fits = [entry for entry in ORDER if inside == entry or inside.startswith(f"{entry}.")]
    assert fits, f"{module} is in no folder of ORDER: add it where its imports allow"
    return max(fits, key=len)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_folder_imports_only_folders_that_stand_before_it(module: str) -> None:
    own = ORDER.index(folder_of(module))
    for name in imported(MODULES[module]):
        other = folder_of(name)
        assert ORDER.index(other) <= own, (
            f"{module} imports {name}: `{other}` stands after `{ORDER[own]}`"
        )


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, directly or through others (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_files_import_each_other() -> None:
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    assert circles(graph) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_importing_functionalize_imports_no_pass() -> None:
    """Passes are imported when a pipeline or a partitioner is first used."""
    for module, path in MODULES.items():
        if not module.startswith("functionalize.passes"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ImportFrom):
                    assert not (node.module or "").startswith("functionalize.passes"), module


def test_nothing_below_the_planner_imports_it() -> None:
    """Only the package itself does: for `capture(memory=True)`, and for the types of its names."""
    found = {
        module
        for module, path in MODULES.items()
        if not module.startswith("functionalize.planner")
        and any(name.startswith("functionalize.planner") for name in imported(path))
    }
    assert found == {"functionalize", "functionalize.__main__"}


def test_the_map_for_contributors_lists_every_folder_in_this_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page.partition("\n## Folders\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)/?` \|", text, re.MULTILINE)
    folders = [entry for entry in ORDER if entry not in ("functionalize", "__main__", "planner")]
    assert listed == folders


def test_no_test_module_is_imported_by_another() -> None:
    """Helpers stand in modules of their own, so that a test module can move or go."""
    pattern = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT)): pattern.findall(path.read_text())
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
