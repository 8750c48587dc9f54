"""README and docs are true: their code runs and prints what they say, and every link, file and error exists."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import functionalize as fz
from functionalize import errors
from functionalize.functions import resize_storage_bytes_
from tests.fsdp.table import PART, table
from tests.page_code import blocks_of, shape, shells_of, unfenced
from tests.planner.cli.entry import Command, command

__all__ = ["command"]  # a fixture
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


def printed_by(code: str, names: dict[str, object], source: str = "README.md") -> str:
    """What a block of code prints; it reads and defines `names`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, source, "exec"), names)
    return printed.getvalue().strip()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_every_block_of_code_is_run_by_a_test_here() -> None:
    assert re.findall(r"^```(\w*)$", README, re.MULTILINE) == [
        *("", ""),  # before and after
        *("python", "", "", ""),  # the example and its output; "" closes a block, too
        *("python", ""),  # `capture`
    ]


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*deprecated:FutureWarning")
def test_the_layer_before_and_after() -> None:
    head, *lines = README.partition("```\n")[2].partition("```")[0].splitlines()
    column = head.index("the program")
    eager = [line[:column].rstrip() for line in lines]
    after = [line[column:] for line in lines if line[column:]]
    names: dict[str, Any] = {"resize_storage_bytes_": resize_storage_bytes_, "dist": dist}
    printed_by("\n    ".join(["def layer(p, shard, x, dy):", *eager]), names)
    with fz.world(2, target="cpu"):
        p, shard, x, dy = (torch.ones(rows, 4) for rows in (4, 2, 3, 3))
        p.untyped_storage().resize_(0)
        program = fz.functions.trace(names["layer"], p, shard, x, dy)
    body = printed_by("program.print_readable()", {"program": program}).partition("):\n")[2]
    for left_out in ("aten.", "_c10d_functional.", ".default"):
        body = body.replace(left_out, "")
    assert [line.strip() for line in body.splitlines()] == after


def test_the_example_prints_what_the_readme_says() -> None:
    code, output = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL)[0]
    assert len(code.splitlines()) <= 20
    assert printed_by(code, {}) == output.strip()


def test_the_lines_about_capture_record_replay_and_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "capture(" in c)
    assert len(code.splitlines()) == 6
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    names: dict[str, Any] = {"fz": fz, "train_step": train_step}
    names["batches"] = [torch.randn(2, 4) for _ in range(6)]
    monkeypatch.chdir(tmp_path)
    assert "program(" in printed_by(code, names)
    assert names["step"].stats.replays > 0
    assert (tmp_path / "step.fzp").exists()


def test_the_command_of_the_plan_draws_its_picture(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("matplotlib")
    (line,) = re.findall(r"^    functionalize (memory .*)$", README, re.MULTILINE)
    assert f"]({line.split()[-1]})" in README
    picture = tmp_path / "picture.png"
    ran = command(*line.split()[:-1], picture, "--set", "layers=1")  # 32 take ten times as long
    assert ran.code == 0
    assert picture.exists()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"), ids=lambda page: page.name
)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


ROOTS = "functionalize|passes|tests|docs|examples|benchmarks|expect"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(rf"`((?:{ROOTS})/[\w./-]*)", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`((?:functionalize|passes|benchmarks|tests)\.[\w.]+)", text):
        module, _, rest = name.rpartition(".")
        found = importlib.util.find_spec(module) if rest else None
        assert found is not None, name
        known = hasattr(importlib.import_module(module), rest)
        assert known or importlib.util.find_spec(name) is not None, name


def test_the_page_about_use_is_short_and_leads_to_every_page_of_the_reference() -> None:
    text = (ROOT / "docs" / "capture.md").read_text()
    assert len(text.splitlines()) <= 200
    listed = re.findall(r"\]\((capture/\w+\.md)\)", text.partition("## Reference\n")[2])
    pages = (ROOT / "docs" / "capture").glob("*.md")
    assert sorted(listed) == sorted(f"capture/{page.name}" for page in pages)


def test_every_public_name_is_in_the_reference_of_the_site() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^::: functionalize\.([\w.]+)$", text, re.MULTILINE)
    packages = {"functions.": fz.functions, "planner.": fz.planner, "": fz}
    names = [f"{prefix}{name}" for prefix, package in packages.items() for name in package.__all__]
    classes = [f"passes.{name}.{kind.__name__}" for name, kind in fz.passes.PASSES.items()]
    in_modules = ["errors", "passes"]  # listed as modules, with every name of theirs
    of_frameworks = [name for name in listed if name.startswith("integrations.")]
    returned = ["step.captured_step.CapturedStep"]
    expected = [*names, *classes, *in_modules, *of_frameworks, *returned]
    assert sorted(listed) == sorted(expected)


def test_every_error_has_a_line_on_its_page() -> None:
    described = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    bases = {"FunctionalizeError", "StorageError", "InvariantError"}  # described in prose
    assert sorted(described) == sorted(kinds - bases)


WITH_CODE = [page for page in PAGES[1:] if [*blocks_of(page.read_text())]]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks_of(page.read_text()):
        at = f"{page.relative_to(ROOT)}:{block.line}"
        printed = printed_by(block.code, names, at)
        assert block.output is None or printed == block.output.strip(), at


def own_commands(page: Path) -> list[Any]:
    return [
        each for each in shells_of(page.read_text()) if each.command.startswith("functionalize ")
    ]


WITH_COMMANDS = [page for page in PAGES if own_commands(page)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_have_the_options_that_they_name(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from functionalize.planner.cli.app import app

    group = typer.main.get_command(app)
    for shell in own_commands(page):
        name, *arguments = shlex.split(shell.command.partition(" > ")[0])[1:]
        group.commands[name].make_context(name, arguments)  # raises for an option that is not there


def test_a_command_on_two_pages_prints_the_same() -> None:
    said: dict[str, str] = {}
    for page in WITH_COMMANDS:
        for shell in own_commands(page):
            assert said.setdefault(shell.command, shell.output) == shell.output, shell.command


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    for shell in own_commands(page):
        if not shell.runs:
            continue
        text, _, file = shell.command.partition(" > ")
        ran = command(*shlex.split(text)[1:], columns=shell.columns)
        if file:
            Path(file).write_text(ran.out)
        assert_same_shape(shape("" if file else ran.out), shape(shell.output), shell.command)


def assert_same_shape(printed: list[str], said: list[str], where: str) -> None:
    """Lines are equal, but that `...` on a page stands for any."""
    at = 0
    for i, line in enumerate(said):
        if line == "...":
            assert said[i + 1] in printed[at:], (where, said[i + 1], printed[at:])
            at = printed.index(said[i + 1], at)
        else:
            assert printed[at : at + 1] == [line], (where, printed)
            at += 1
    assert printed[at:] == [], where


def test_shapes() -> None:
    page = "<!-- 90 columns -->\n```console\n$ a \\\n  b\nx 1.5 GiB  -3%\n...\ny\n$ c > d\n```\n"
    first, second = shells_of(page)
    assert first == ("a b", "x 1.5 GiB  -3%\n...\ny\n", 90, True)
    assert second == ("c > d", "", 90, True)
    assert shape(first.output) == ["x # #", "...", "y"]
    assert_same_shape(["x # #", "z", "y"], shape(first.output), "")
    for wrong in (["x # #", "y", "z"], ["x #", "y"], ["x # #"]):
        with pytest.raises(AssertionError):
            assert_same_shape(wrong, shape(first.output), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_code_of_a_page_stands_in_blocks_that_run(page: Path) -> None:
    assert [*unfenced(page.read_text())] == []


def test_what_a_page_marks() -> None:
    text = "<!-- fragment -->\n```python\na\n```\n\n<!-- setup\nb = 1\n-->\n\n```python\nc\n```\n\n```\nd\n```\n"
    assert [*blocks_of(text)] == [("b = 1\n", None, 7), ("c\n", "d\n", 11)]
    assert [*unfenced("text\n\n    f(1)\n    g(2)\n\n    make test  # no Python\n")] == []
    assert [*unfenced("text\n\n    f(1)\n    g(2)\n\ntext\n")] == ["f(1)\ng(2)\n"]


def test_the_list_of_features_is_that_of_the_tests() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    assert PART.put_into(text, table()) == text, "python -m tests.fsdp.table --write"
