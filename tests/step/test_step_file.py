"""Programs are saved here and loaded in another process, where they replay from the first call."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import LoadError, SaveError
from functionalize.fsdp import objects as fsdp
from functionalize.ir import guards as core_guards
from functionalize.ir import inputs as core_inputs
from functionalize.program import program_file as persist
from functionalize.saving import step_codecs as forms
from functionalize.saving.object_names import Names
from functionalize.state import hyperparameters as lifted
from functionalize.state import sources
from functionalize.state import step_guards as guards
from functionalize.walk import walker as reach
from tests.allowance import ample_allowance
from tests.forks import run_module
from tests.step import persisted
from tests.step.persisted import AFTER, BEFORE, KINDS, LEARNED

pytestmark = pytest.mark.usefixtures("ample_allowance")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of files, and what this process saw when it went on."""
    folder, seen = tmp_path_factory.mktemp("saved"), {}
    for kind in KINDS:
        made = persisted.twin(kind)
        step = fz.capture(made.step)
        torch.manual_seed(2)
        persisted.train(made, step, 0, BEFORE)
        assert step.stats.captures == 1
        step.save(folder / f"{kind}.fzp")
        torch.save(persisted.checkpoint(made), folder / f"{kind}.pt")
        assert step.program is not None
        text = persisted.digest(step.program.print_readable(print_output=False))
        seen[kind] = persisted.train(made, step, BEFORE, BEFORE + AFTER), text
    made = persisted.twin("lengths")
    with ample_allowance():
        step = fz.capture(made.step, dynamic=True, audit=False)
    persisted.train_at(made, step, [n for n in LEARNED for _ in range(3)])
    step.save(folder / "lengths.fzp")
    torch.save(persisted.checkpoint(made), folder / "lengths.pt")
    return folder, seen


@pytest.fixture(scope="module")
def report(saved: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """What another process saw."""
    folder, _ = saved
    done = run_module("tests.step.persisted", str(folder), flags=("error",))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


# -- another process -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_bitwise(
    kind: str, saved: tuple[Path, dict[str, Any]], report: dict[str, Any]
) -> None:
    there, (here, text) = report["kinds"][kind], saved[1][kind]
    assert there["actual"] == there["expected"] == here
    assert len(set(here)) == AFTER  # every step changed something
    assert kind == "gradients stay" or there["text"] == text


@pytest.mark.parametrize("kind", ["adamw", "sgd", "number", "counts"])
def test_the_first_call_replays(kind: str, report: dict[str, Any]) -> None:
    assert report["kinds"][kind]["calls"] == [0, 0, AFTER]
    assert report["kinds"][kind]["missed"] == []


def test_a_step_whose_gradients_are_gone_on_entry_is_recorded_again(
    report: dict[str, Any],
) -> None:
    there = report["kinds"]["gradients stay"]
    assert there["calls"][2] == AFTER - 1
    assert there["missed"] == ["`model.0.weight.grad` is missing, was there"]


def test_another_process_replays_lengths_that_were_never_recorded(report: dict[str, Any]) -> None:
    there = report["lengths"]
    assert there["actual"] == there["expected"]
    # All but 21, where the step decides by the length: that call is no replay. Of the recorded programs the file holds
    # that of 7 rows alone.
    assert there["calls"] == [0, 3, 4, 0, 4]


def test_what_was_changed_before_the_first_call_is_noticed(report: dict[str, Any]) -> None:
    changed = report["changed"]
    assert changed["lr"] == []  # looked up at every call
    assert changed["betas"] == ["`optimizer` group 0 has betas = (0.5, 0.5), had (0.9, 0.999)"]
    assert changed["dropout"] == ["`model.2` has p = 0.1, had 0.3"]
    assert changed["eval"] == ["`model` has training = False, had True"]
    assert changed["scale"] == ["`settings.scale` is 3.0, was 2.0"]
    assert changed["parameter"] == ["`model.0.weight` is another parameter"]
    assert changed["requires_grad"] == ["`model.0.bias` no longer requires a gradient"]
    assert len(changed["hook"]) == 1 and "_forward_hooks" in changed["hook"][0]


def test_programs_of_another_step_are_refused(report: dict[str, Any]) -> None:
    said = {
        kind: text.partition("cannot be loaded: it ")[2]
        for kind, text in report["refusals"].items()
    }
    assert said == {
        "fewer layers": "was saved for other modules: `model.5` (a torch.nn.modules.linear.Linear) is "
        "not there",
        "other class": "was saved for other modules: `model.1` is a "
        "torch.nn.modules.normalization.LayerNorm, was a torch.nn.modules.batchnorm.BatchNorm1d",
        "other shape": "was saved for other parameters or buffers: `model.5.weight` is float32[3, 8] on "
        "cpu, was float32[2, 8] on cpu",
        "other dtype": "was saved for other parameters or buffers: `model.0.weight` is float64[8, 4] on "
        "cpu, was float32[8, 4] on cpu",
        "other optimizer": "was saved for other optimizers: `optimizer` is a torch.optim.sgd.SGD, was a "
        "torch.optim.adamw.AdamW",
        "other groups": "was saved for other optimizers: `optimizer group 0` is model.0.weight, "
        "model.0.bias, model.1.weight, model.1.bias, model.5.weight, was model.0.weight, model.0.bias, model.1.weight, "
        "model.1.bias, model.5.weight, model.5.bias",
        "other code": "was saved before the step's code changed: step_of.<locals>.train_step",
        "a hook of the user": "was saved before the step's code changed: twin.<locals>.<lambda>",
        "another hook": "needs the forward_hooks of `model` to be [], they are ['print']",
    }


# -- the same process ------------------------------------------------------------------------------


def a_step(kind: str = "adamw", steps: int = 3) -> tuple[persisted.Twin, Any]:
    made = persisted.twin(kind)
    step = fz.capture(made.step)
    persisted.train(made, step, 0, steps)
    return made, step


def test_train_and_eval_programs_come_back_together(tmp_path: Path) -> None:
    made, step = a_step()
    made.model.eval()
    persisted.train(made, step, 3, 6)
    made.model.train()
    step.save(tmp_path / "both.fzp")
    again = fz.capture(made.step)
    again.load(tmp_path / "both.fzp")
    assert len(again.programs) == 2
    for training in (True, False, True):
        made.model.train(training)
        again(persisted.batch(0))
    assert (again.stats.replays, again.stats.captures) == (3, 0)
    assert "program 2" in again.explain()


def test_a_program_for_objects_that_are_gone_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, step = a_step()
    made.model[2] = nn.Dropout(0.3)
    persisted.train(made, step, 3, 6)
    assert len(step.programs) == 2
    step.save(tmp_path / "one.fzp")
    assert (
        "program 1" in caplog.text
        and "is not saved: it is for other children of `model`" in caplog.text
    )
    again = fz.capture(made.step)
    again.load(tmp_path / "one.fzp")
    again(persisted.batch(0))
    assert len(again.programs) == 1 and again.stats.replays == 1


def test_a_step_without_a_program_is_not_saved(tmp_path: Path) -> None:
    step = fz.capture(persisted.twin("adamw").step)
    with pytest.raises(
        SaveError, match="it has no program yet: call the step until it is captured"
    ):
        step.save(tmp_path / "none.fzp")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_only_the_arguments_lead_to_is_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    step = fz.capture(lambda model, x: model(x).sum())
    for _ in range(3):
        step(model, torch.ones(1, 2))
    with pytest.raises(
        SaveError, match=r"holds a torch.nn.modules.linear.Linear .* which has no name"
    ):
        step.save(tmp_path / "argument.fzp")


def test_modes_and_returned_tensors_of_a_loaded_program(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

        def step(x: Tensor) -> Any:
            model.train()
            out = model(x).detach()
            return out, model[0].weight, {"mean": model[1].running_mean}

        return model, fz.capture(step)

    x, (model, step) = torch.randn(4, 2), make()
    model.eval()
    for _ in range(3):
        step(x)
        model.eval()
    step.save(tmp_path / "modes.fzp")
    other, loaded = make()
    other.eval()
    loaded.load(tmp_path / "modes.fzp")
    out, weight, kept = loaded(x)
    assert loaded.stats.replays == 1
    assert weight is other[0].weight and kept["mean"] is other[1].running_mean
    assert all(m.training for m in other.modules())
    assert torch.equal(out, make()[0](x))


def test_a_forward_without_its_backward_is_neither_saved_nor_loaded(
    whole: Path, tmp_path: Path
) -> None:
    forward = fz.capture(lambda x: x.sin().sum(), backward=True)
    said = "is for a forward whose backward runs outside of it"
    with pytest.raises(SaveError, match=said):
        forward.save(tmp_path / "forward.fzp")
    with pytest.raises(LoadError, match=said):
        forward.load(whole)


def test_a_set_of_modules_is_not_saved(tmp_path: Path) -> None:
    models = {nn.Linear(2, 2), nn.Linear(2, 2)}

    def fn(x: Tensor) -> Tensor:
        return sum((model(x) for model in models), torch.zeros(())).sum()

    step = fz.capture(fn)
    for _ in range(3):
        step(torch.ones(1, 2))
    with pytest.raises(
        SaveError, match="uses the set `models`, whose order is another one in every process"
    ):
        step.save(tmp_path / "set.fzp")


def test_a_result_of_a_type_made_in_a_function_is_not_saved(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Local:
        loss: Tensor

    step = fz.capture(lambda x: Local(x.sum()))
    for _ in range(3):
        step(torch.ones(2))
    with pytest.raises(
        SaveError, match=r"holds the type .*Local, which is defined inside a function"
    ):
        step.save(tmp_path / "local.fzp")


# -- damaged and foreign files ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(saved: tuple[Path, dict[str, Any]]) -> Path:
    return saved[0] / "adamw.fzp"


def rewritten(path: Path, to: Path, **entries: Callable[[bytes], bytes]) -> Path:
    """The file with some of its entries changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            change = entries.get(name.partition(".")[0], lambda data: data)
            new.writestr(name, change(old.read(name)))
    return to


def with_values(**values: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **values}).encode()


def refused(path: Path, kind: str = "adamw") -> str:
    step = fz.capture(persisted.twin(kind).step)
    with pytest.raises(LoadError) as error:
        step.load(path)
    assert len(step.programs) == 0
    text = str(error.value)
    assert text.startswith(f"{path} cannot be loaded: it ")
    return text.partition("cannot be loaded: it ")[2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"format": 99}, "has format 99, this library reads format 3"),
        ({"torch": "2.11.0"}, f"was saved with torch 2.11.0, this is torch {torch.__version__}"),
        ({"python": "3.99"}, "was saved with python 3.99, this is python 3."),
        ({"functionalize": "9.9"}, "was saved with functionalize 9.9, this is functionalize "),
        ({"world size": 4}, "was saved for world size 4, this is world size 1"),
        ({"rank": 1}, "was saved for rank 1, this is rank 0"),
        ({"devices": ["cuda"]}, "was saved for cuda, of which there is none here"),
        (
            {"packages": {"pytest": "1.0"}},
            f"was saved with pytest 1.0, this is pytest {pytest.__version__}",
        ),
        ({"kind": "program"}, "holds one program: load it with `functionalize.load`"),
    ],
)
def test_a_file_of_another_world_is_refused(
    values: dict[str, Any], said: str, whole: Path, tmp_path: Path
) -> None:
    if "cuda" in said and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    path = rewritten(whole, tmp_path / "other.fzp", metadata=with_values(**values))
    assert refused(path).startswith(said)


def test_a_file_that_is_not_there_or_damaged_is_refused(whole: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing.fzp") == "is not there"
    data, path = whole.read_bytes(), tmp_path / "damaged.fzp"
    for part in (data[: len(data) // 2], b"", b"not a zip", data[:-30]):
        path.write_bytes(part)
        assert refused(path).startswith("is no saved program, or is damaged: ")
    with zipfile.ZipFile(whole) as archive:
        info = archive.getinfo("programs.json")
    at = info.header_offset + 60
    path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    assert "damaged" in refused(path)


def first_op(content: bytes, change: Callable[[list[Any]], None]) -> bytes:
    code = json.loads(content)
    change(next(n for n in code["programs"][0]["program"]["graph"] if n[0] == "call_function"))
    return json.dumps(code).encode()


def put(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda node: node.__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            put(2, {"type": "subprocess:Popen"}),
            "needs the type Popen of the module subprocess, which nothing here hands over",
        ),
        (
            put(2, {"function": "os.system"}),
            "names the function os.system, which programs do not call: damaged",
        ),
        (
            put(2, {"op": "aten.nothing.default"}),
            "needs the op aten.nothing.default, which is not registered here",
        ),
        (put(4, {"x=print()": 1}), "has a node that is none"),
        (put(1, "a b"), "has a node that is none"),
        (put(3, [{"node": 10_000}]), "refers to number 10000 of "),
        (
            put(3, [{"type": "no_such_module:Thing"}]),
            "needs the type Thing of the module no_such_module",
        ),
    ],
)
def test_a_file_that_was_tampered_with_runs_nothing(
    change: Callable[[list[Any]], None], said: str, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tampered.fzp"
    rewritten(whole, path, programs=lambda data: first_op(data, change))
    assert refused(path).startswith(said)


def test_functions_of_sizes_that_were_tampered_with_run_nothing(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    def changed(content: bytes) -> bytes:
        data = json.loads(content)
        of_sizes = [r for r in data["classes"][0]["records"] if r["is"] == "Formula"]
        of_sizes[0]["with"][2] = "+ print()"
        return json.dumps(data).encode()

    path = rewritten(saved[0] / "lengths.fzp", tmp_path / "tampered.fzp", programs=changed)
    assert "which is no function of sizes: damaged" in refused(path, "lengths")


class Exploit:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/functionalize-exploit"),))


def test_constants_are_not_unpickled(whole: Path, tmp_path: Path) -> None:
    path = rewritten(whole, tmp_path / "x.fzp", constants=lambda data: pickle.dumps(Exploit()))
    assert refused(path) == "has constants of other sizes than it says: it is damaged"
    assert not Path("/tmp/functionalize-exploit").exists()


def test_a_name_that_leads_nowhere_is_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "name.fzp"
    rewritten(whole, path, programs=lambda data: data.replace(b"module model.5", b"module model.7"))
    assert refused(path) == "needs the module model.7, which is not there"


# -- programs of trace -----------------------------------------------------------------------------


def test_a_traced_program_is_saved_and_replays(tmp_path: Path) -> None:
    def fn(x: Tensor, y: dict[str, Any], *, k: float) -> Any:
        x[1:].add_(y["a"])
        return {"sin": x.sin() * k, "both": (x, torch.tensor([1.0, 2.0]) + k), "k": k}

    def arguments() -> Any:
        made = torch.Generator().manual_seed(0)
        return torch.randn(3, 4, generator=made), {"a": torch.randn(4, generator=made)}

    x, y = arguments()
    program = fz.functions.trace(fn, x, y, k=-0.0)
    program.save(tmp_path / "fn.fzp")
    loaded = fz.load(tmp_path / "fn.fzp")
    assert loaded.print_readable(print_output=False) == program.print_readable(print_output=False)
    eager_x, eager_y = arguments()
    expected, actual = fn(eager_x, eager_y, k=-0.0), loaded(x, y, k=-0.0)
    assert persisted.digest([expected, eager_x]) == persisted.digest([actual, x])
    assert actual["both"][0] is x
    with pytest.raises(fz.errors.FunctionalizeError, match=r"`k` is 0.0, was -0.0"):
        loaded(x, y, k=0.0)
    with pytest.raises(LoadError, match=r"holds one program: load it with `functionalize.load`"):
        fz.capture(fn).load(tmp_path / "fn.fzp")


def test_a_traced_program_that_holds_a_tensor_is_not_saved(tmp_path: Path) -> None:
    weight = torch.ones(3)
    program = fz.functions.trace(lambda x: x * weight, torch.ones(3))
    with pytest.raises(
        SaveError, match=r"holds the tensor `weight` \(float32\[3\]\), which no module"
    ):
        program.save(tmp_path / "fn.fzp")


def test_a_captured_step_is_not_loaded_as_one_program(whole: Path) -> None:
    with pytest.raises(
        LoadError, match=r"holds the programs of a captured step: load them with `step.load`"
    ):
        fz.load(whole)


# -- every class has a form ------------------------------------------------------------------------


def test_every_guard_and_source_has_a_form() -> None:
    known = {form.kind for form in forms.forms(Names(reach.walked(lambda: None)), lambda: None)}
    missing = {
        kind.__name__
        for module in (core_guards, core_inputs, guards, sources, fsdp, lifted, reach)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and dataclasses.is_dataclass(kind)
        if any(hasattr(kind, name) for name in ("failure", "failure_of", "resolve", "assign"))
    } - {kind.__name__ for kind in known}
    assert missing == {"Captured"}  # what no name leads to
    assert {form.kind for form in persist.FORMS} <= known


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x * 2 if mask.all() else torch.where(mask, x, 0.0)


def test_what_is_known_from_the_arguments_is_guarded_after_load_too(tmp_path: Path) -> None:
    full = torch.ones(4, dtype=torch.bool)
    padded = torch.tensor([True, False, True, True])
    step = fz.capture(masked)
    for _ in range(3):
        step(torch.rand(4), full)
    step.save(tmp_path / "step.fzp")
    loaded, x = fz.capture(masked), torch.rand(4)
    loaded.load(tmp_path / "step.fzp")
    assert torch.equal(loaded(x, full), x * 2)
    assert (loaded.stats.replays, loaded.stats.captures) == (1, 0)
    assert torch.equal(loaded(x, padded), masked(x, padded))
    assert "in masked: return x * 2 if mask.all()" in loaded.stats.guard_failures[0]


def test_a_gradient_scaler_is_found_again(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    step = fz.capture(train_step)
    for _ in range(4):
        step(torch.rand(2, 3))
    assert "sc" in step.explain(True) and "`_scale`" in step.explain(True)
    step.save(tmp_path / "step.fzp")
    loaded = fz.capture(train_step)
    loaded.load(tmp_path / "step.fzp")
    loaded(torch.rand(2, 3))
    assert (loaded.stats.replays, loaded.stats.captures) == (1, 0)


SCRIPT = """
import sys, torch, functionalize as fz, torch.multiprocessing as mp
from dataclasses import dataclass
from torch import nn

@dataclass
class Output:
    loss: torch.Tensor

class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 3), Doubled())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)

    def step(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Output(loss.detach())

class Doubled(nn.Module):
    def forward(self, x):
        return x * 2

def go_on(rank, path):
    trainer, x = Trainer(), torch.ones(2, 6)
    trainer.step(x)
    step = fz.capture(trainer.step)
    step.load(path)
    found = step(x)
    print(__name__, type(found) is Output, step.stats.replays, step.stats.guard_failures, flush=True)

if __name__ == "__main__":
    trainer = Trainer()
    step = fz.capture(trainer.step)
    for _ in range(4):
        step(torch.ones(2, 6))
    step.save(sys.argv[1])
    mp.spawn(go_on, (sys.argv[1],), 1)
"""


def test_a_step_of_a_script_loads_where_the_script_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "training_script.py").write_text(SCRIPT)
    path = str(tmp_path / "step.fzp")
    imported = f"import training_script; training_script.go_on(0, {path!r})"
    for command, name in (
        ([str(tmp_path / "training_script.py"), path], "__mp_main__"),
        (["-c", imported], "training_script"),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.stdout == f"{name} True 1 []\n", done.stderr


def test_a_script_that_changed_is_refused(tmp_path: Path) -> None:
    script, path = tmp_path / "training_script.py", str(tmp_path / "step.fzp")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    imported = f"import training_script; training_script.go_on(0, {path!r})"
    said = []
    for text, command in (
        (SCRIPT.replace("mp.spawn(", "print("), [str(script), path]),
        (SCRIPT.replace(".square()", ".abs()"), ["-c", imported]),
    ):
        script.write_text(text)
        command = [sys.executable, "-B", "-W", "ignore", *command]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        said.append(done.stderr)
    assert "it was saved before the step's code changed: Trainer.step" in said[1]
