"""The package: names that are found when they are first used, and what an import of it costs."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import functionalize as fz

ROOT = Path(__file__).parents[1]
CPU_SECONDS = 0.35  # of the import of `capture` after `import torch`, with bytecode
OF_TORCH = 0.4  # or, on a slow or busy machine, this part of what `import torch` needs
SLOW = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")


def output(code: str) -> str:
    """What a new process prints, which uses and writes bytecode."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, check=True, **options).stdout.strip()


def test_an_import_is_cheap() -> None:
    code = (
        "from time import process_time as now; start = now(); import torch; middle = now(); "
        "import functionalize; functionalize.capture; print(now() - middle, middle - start)"
    )
    found = []
    for _ in range(6):  # the first may compile; other processes of the machine slow some down
        took, of_torch = map(float, output(code).split())
        if took <= max(CPU_SECONDS, OF_TORCH * of_torch):
            return
        found.append((took, of_torch))
    raise AssertionError(f"CPU seconds of an import, and of torch's: {found}")


def test_an_import_loads_nothing_of_torch_that_is_slow() -> None:
    code = "import sys, torch; was = {*sys.modules}; from functionalize import capture; print(*{*sys.modules} - was)"
    loaded = output(code).split()
    assert not [name for name in loaded if name.startswith(SLOW)]


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, functionalize; print(len(dir(functionalize)) > 15, *({'torch', 'numpy'} & set(sys.modules)))"
    assert output(code) == "True"


def test_the_planner_is_loaded_by_those_who_ask_for_it() -> None:
    """Not by a step with passes; by `memory=True`, and by the names of the planner."""
    code = """
import sys, torch, functionalize as fz, functionalize.passes
planner = lambda: any(name.startswith("functionalize.planner") for name in sys.modules)
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.AdamW([weight])
def train_step(x):
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
step = fz.capture(train_step, passes="default")
for _ in range(5):
    step(torch.ones(3))
print(step.stats.replays > 0, planner(), fz.functions.trace(torch.sin, torch.ones(3)) is not None, planner())
step = fz.capture(train_step, memory=True)
print(planner())
for _ in range(4):
    step(torch.ones(3))
print(type(step.memory).__name__)
"""
    assert output(code).split("\n") == ["True False True False", "True", "StepMemory"]


def test_the_import_of_dynamo_by_a_recording_is_no_change_of_torch() -> None:
    """It replaces `torch.manual_seed`, and a recorder of memory puts its own function there."""
    code = """
import torch, functionalize as fz
step = fz.capture(lambda x: x.sin().sum())
for _ in range(4):
    step(torch.ones(3))
before = step.stats.replays
fz.record_memory(step)(torch.ones(3))
print(step.stats.replays - before)
"""
    assert output(code) == "1"


def test_every_name_is_found() -> None:
    packages = ("errors", "functions", "integrations", "passes", "planner")
    for package, names in (
        (fz, (*fz.__all__, *packages)),
        (fz.functions, fz.functions.__all__),
        (fz.planner, fz.planner.__all__),
        (fz.passes, fz.passes.__all__),
    ):
        for name in names:
            assert getattr(package, name) is getattr(package, name)
            assert name in dir(package)
    assert fz.plan.__module__.startswith("functionalize.")


def test_a_name_has_one_place() -> None:
    packages = (fz, fz.functions, fz.planner, fz.passes)
    names = [name for package in packages for name in package.__all__]
    assert len(names) == len({*names}) and len(fz.__all__) <= 9


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'functionalize' has no attribute 'capure'"):
        getattr(fz, "capure")  # noqa: B009
    with pytest.raises(ImportError, match="capure"):
        exec("from functionalize import capure")


def test_help_describes_names_that_were_not_used() -> None:
    text = pydoc.plain(pydoc.render_doc(fz))
    assert re.search(r"\bplan\(\s*build", text)  # since Python 3.13 on a line of its own


def test_no_module_shadows_a_name() -> None:
    """The import of `functionalize.x` sets the attribute `x` of the package, whatever it was."""
    modules = {path.stem for path in (ROOT / "functionalize").iterdir()}
    assert not modules & set(fz.__all__)
    for package in (fz.functions, fz.planner):
        stems = {path.stem for path in Path(package.__file__).parent.iterdir()}
        assert not stems & set(package.__all__)
    code = (
        "import functionalize as fz; plan, lazy = fz.plan, fz.lazy; "
        "import functionalize.deferral.lazy, functionalize.planner.sweep.plan; "
        "print(fz.plan is plan, fz.lazy is lazy, callable(plan), callable(lazy))"
    )
    assert output(code) == "True True True True"


@pytest.mark.parametrize("name", ["functionalize", "functionalize_inductor"])
def test_entry_points_declare_the_backends(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["entry-points"]["torch_dynamo_backends"][name].partition(":")
    assert callable(getattr(import_module(module), attribute))


@pytest.mark.skipif(
    "functionalize" not in entry_points(group="torch_dynamo_backends").names,
    reason="this package is not installed",
)
def test_torch_finds_the_backends_without_an_import() -> None:
    code = "import torch; print(torch.compile(lambda x: x + 1, backend='functionalize')(torch.ones(2)))"
    assert output(code) == "tensor([2., 2.])"
