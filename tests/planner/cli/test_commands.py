"""Every command through its entry point: what is printed, as text and as JSON, what is written, how it ends."""

from __future__ import annotations

import csv
import json
import pickle
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from functionalize.cost.machines.presets import MACHINES
from functionalize.program import archive
from functionalize.util.text import human_bytes
from tests.forks import run_module
from tests.planner.cli.entry import TRAINING, Command, command
from tests.planner.trace_format import checked, counters
from tests.planner.tuning import training as offloaded

__all__ = ["command"]
ROOT = Path(__file__).parents[3]
OFFLOADED = offloaded.__file__
COMMANDS = ("capture", "show", "opt", "memory", "plan", "tune")


@pytest.fixture
def file(command: Command, tmp_path: Path) -> str:
    """A recorded graph of the script's step."""
    path = str(tmp_path / "step.fzp")
    assert command("capture", TRAINING, "--world", 4, "-o", path).code == 0
    return path


# -- help and usage --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(command: Command, name: str) -> None:
    ran = command(name, "--help")
    assert ran.code == 0 and f"Example: functionalize {name}" in " ".join(ran.out.split())


def test_wrong_usage(command: Command) -> None:
    for args in (
        (),
        ("fly",),
        ("capture",),
        ("opt", TRAINING),
        ("memory", TRAINING, "--world", "0"),
    ):
        assert command(*args).code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("capture", "nothere.py"), "nothere.py is not there: give the path of a Python file"),
        (
            ("capture", TRAINING, "--step", "fly"),
            "has no function `fly`: it has build, inputs, step",
        ),
        (
            ("capture", TRAINING, "--set", "layer=3"),
            "no function accepts `layer`: give `build`, `inputs`",
        ),
        (
            ("capture", TRAINING, "--set", "layers"),
            "--set 'layers' cannot be read: write --set key=v",
        ),
        (("capture", TRAINING, "--mesh", "3y"), "--mesh '3y' cannot be read: write 64x8, or dp=64"),
        (
            ("capture", TRAINING, "--mesh", "4x2", "--world", 7),
            "a mesh of shape (4, 2) has 8 ranks",
        ),
        (("capture", TRAINING, "--rank", 8), "rank 8 is not in a world of 8 ranks"),
        (("capture", TRAINING, "--target", "abacus"), "there is no target 'abacus'"),
        (("memory", TRAINING, "--target", "abacus"), "there is no target 'abacus'"),
        (("memory", TRAINING, "--set", "reshard=3"), "`reshard` 3: a number of ranks is a factor"),
        (("capture", TRAINING, "--set", "checkpoint=3"), "`checkpoint` is True or False, not 3"),
        (("memory", "step.fzp"), "step.fzp is not there: `functionalize capture -o` writes such"),
        (("memory", TRAINING, "--limit", "0"), "the size '0' is no number of bytes of a device"),
        (("plan", TRAINING, "--rank", 9), "rank 9 is not in a world of 8 ranks"),
        (("plan", TRAINING, "--target", "abacus"), "there is no target 'abacus'"),
        (("plan", TRAINING, "--mesh", "4x2", "--world", 7), "a mesh of shape (4, 2) has 8 ranks"),
        (("plan", TRAINING, "--grid", "world=8,0"), "the sizes of a mesh are positive whole"),
        (("plan", TRAINING, "--grid", "reshard=True,yes"), "`reshard` is True, False or a number"),
        (("plan", TRAINING, "--alloc-conf", "fly:1"), "option `fly` cannot be used"),
        (("capture", TRAINING, "-o", "step.txt"), "the file of a recorded graph ends in .fzp"),
        (("capture", "step.fzp"), "step.fzp is recorded already: capture takes a script"),
        (("opt", TRAINING, "fly"), "no pass `fly`; there are bucket_gathers"),
        (("show", TRAINING, "--passes", "fly"), "no pass `fly`"),
        (("memory", TRAINING, "--limit", "80G"), "the size '80G' cannot be read: write 80GB"),
        (
            ("memory", TRAINING, "--alloc-conf", "fly:1"),
            "option `fly` cannot be used: torch has no",
        ),
        (("memory", TRAINING, "--machine", "abacus"), "no machine `abacus`; there are 4090"),
        (("memory", TRAINING, "--png", "a.gif"), "--png a.gif: the file of a picture ends in .png"),
        (("memory", TRAINING, "--time-axis"), "--time-axis is of the picture: add --png"),
        (("memory", TRAINING, "--of", "both"), "--of both: write eager or program"),
        (("plan", TRAINING, "--grid", "batch="), "a value is empty"),
        (("plan", TRAINING, "--grid", "batches=1"), "no function accepts `batches`"),
        (("plan", TRAINING, "--grid", "machine=h100,abacus"), "no machine `abacus`"),
        (("plan", TRAINING, "--grid", "passes=default,fly"), "no pass `fly`"),
        (
            ("plan", TRAINING, "--passes", "default,offload"),
            "the pass `offload` cannot be planned: it moves values of an accelerator",
        ),
        (("memory", TRAINING, "--passes", "offload{min_mb=4}"), "`offload` cannot be planned"),
        (("plan", TRAINING, "--largest", "batch"), "--largest needs --limit"),
        (
            ("plan", TRAINING, "--grid", "world=1,2", "--world", 4),
            "`world` has one value and is in",
        ),
        (("plan", TRAINING, "--grid", "a=1", "--grid", "a=2"), "--grid a appears twice"),
        (("plan", "step.fzp"), "step.fzp is one recorded graph: plan takes a script"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    command: Command, args: tuple[str, ...], message: str
) -> None:
    ran = command(*args)
    assert ran.code == 2 and ran.words.startswith("error: ") and message in ran.words
    assert "a model is built" not in ran.out and "Traceback" not in ran.err


# -- errors of a step ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("wrong_shape", "error: RuntimeError: "),
        ("reads_data", "error: aten.equal.default decides by data"),
        ("prints", "error: the step cannot be recorded: writes to sys.stdout at"),
        ("stops", "error: SystemExit: no data left"),
    ],
)
def test_a_step_that_fails(command: Command, tmp_path: Path, step: str, message: str) -> None:
    for name, *more in (("capture",), ("show",), ("opt", "default"), ("memory",), ("plan",)):
        if name == "plan" and step == "prints":  # planned by the memory that eager has
            ran = command(name, TRAINING, *more, "--step", step, columns=500)
            assert ran.code == 0 and "no program was made" in ran.out
        elif name == "memory" and step == "prints":
            files = ("--png", tmp_path / "m.png", "--html", tmp_path / "m.html", "--time-axis")
            ran = command(name, TRAINING, "--step", step, *files, "--limit", "80GB", columns=500)
            assert ran.code == 0 and "fits: " in ran.out and "program  " not in ran.out, ran.err
            assert "no program was made, so its time is not known" in ran.out
            assert "cannot be captured: writes to sys.stdout at" in ran.out
            plain = command(name, TRAINING, "--limit", "80GB", "--json").json["timelines"]["eager"]
            alone = command(name, TRAINING, "--step", step, "--json").json["timelines"]
            assert alone.keys() == {"eager"} and alone["eager"]["levels"] == plain["levels"]
            whole = command(name, TRAINING, "--step", step, "--of", "program")
            assert whole.code == 1 and "the step cannot be recorded: writes to" in whole.err
        elif name in ("capture", "plan") or step == "reads_data":
            ran = command(name, TRAINING, *more, "--step", step, columns=500)
            assert ran.code == 1 and ran.words.startswith(message), name
            assert "Traceback" not in ran.err and "a warning" not in ran.err
    if step == "wrong_shape":
        assert "training.py:" in ran.err and "in forward: return x + self.down" in ran.err


def test_tracebacks_are_for_those_who_debug(command: Command) -> None:
    with pytest.warns(UserWarning, match="a warning of the script's"):
        ran = command("capture", TRAINING, "--step", "wrong_shape", "--debug")
    assert ran.code == 1 and "Traceback (most recent call last)" in ran.err
    assert "error: RuntimeError: " in ran.words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef build(:\n", "error: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", "error: SystemExit: 3"),
    ],
)
def test_a_script_that_cannot_be_read(
    command: Command, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(text)
    ran = command("capture", tmp_path / "broken.py", columns=500)
    assert ran.code == 1 and ran.words.startswith(message) and "broken.py:" in ran.err
    assert "a bug of functionalize" not in ran.err


def with_first(lines: str) -> str:
    """The script with these lines at its beginning."""
    return Path(TRAINING).read_text().replace("import warnings\n", f"import warnings\n{lines}", 1)


def test_a_script_that_reads_its_own_arguments(command: Command, tmp_path: Path) -> None:
    parses = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "parses.py").write_text(with_first(parses))
    assert command("capture", tmp_path / "parses.py").code == 0


def test_functions_that_do_not_fit_each_other(command: Command, tmp_path: Path) -> None:
    text = Path(TRAINING).read_text().replace("def inputs(", "def batches(")
    (tmp_path / "lacks.py").write_text(text)
    for name in ("capture", "plan"):
        ran = command(name, tmp_path / "lacks.py", columns=500)
        assert ran.code == 2 and "cannot be called: missing a required argument: 'x'" in ran.words
        assert "a bug of functionalize" not in ran.err


def test_what_a_file_can_no_longer_be_asked(command: Command, file: str) -> None:
    for option, value in (("--world", 8), ("--set", "layers=4"), ("--target", "cpu")):
        ran = command("memory", file, option, value)
        assert ran.code == 2 and f"is recorded already: {option} is for a script" in ran.words


@pytest.mark.parametrize("args", [("capture", TRAINING, "--bogus"), ("fly",), ("capture",)])
def test_wrong_usage_as_json(command: Command, args: tuple[str, ...]) -> None:
    ran = command(*args, "--json")
    assert ran.code == 2 and ran.json["error"]["kind"] == "UsageError" and ran.err


def test_json_is_alone_on_the_descriptor(tmp_path: Path) -> None:
    noise = "import os, sys\nos.write(1, b'from C\\n')\nsys.__stdout__.write('past Python\\n')\n"
    (tmp_path / "noisy.py").write_text(with_first(noise))
    ran = run_module("functionalize", "capture", str(tmp_path / "noisy.py"), "--json")
    assert ran.returncode == 0 and json.loads(ran.stdout)["nodes"] > 100
    assert "from C" in ran.stderr and "past Python" in ran.stderr


def test_what_fails_late(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = command("plan", TRAINING, "--csv", "/dev/full")
    assert ran.code == 1 and ran.words == (
        "error: /dev/full cannot be written: No space left on device"
    )
    archive.write(str(tmp_path / "a.fzp"), {**archive.versions(), "kind": "graph"}, {}, {})
    ran = command("show", tmp_path / "a.fzp", columns=500)
    assert ran.code == 1 and "a.fzp cannot be loaded: it is damaged" in ran.words
    monkeypatch.setattr("functionalize.planner.sweep.plan._MOST_CALLS", 1)
    ran = command("capture", TRAINING)
    assert ran.code == 1 and "the step did not settle in 1 calls" in ran.words
    monkeypatch.setattr("os.access", lambda path, mode: False)
    ran = command("capture", TRAINING, "-o", tmp_path / "b.fzp", columns=500)
    assert ran.code == 2 and "b.fzp cannot be written: permission denied" in ran.words


def test_errors_as_json(command: Command) -> None:
    ran = command("capture", TRAINING, "--step", "reads_data", "--json")
    assert ran.code == 1 and ran.json["error"]["kind"] == "WorldError"
    assert "decides by data" in ran.json["error"]["message"] and "error: " in ran.err
    ran = command("memory", TRAINING, "--limit", "much", "--json")
    assert ran.code == 2 and ran.json["error"]["kind"] == "UsageError"


def test_an_interrupted_step(command: Command) -> None:
    ran = command("capture", TRAINING, "--step", "interrupted")
    assert ran.code == 130 and ran.words == "interrupted"


def test_a_bug_of_ours_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functionalize.planner.cli.graphs.headline", None)
    ran = command("capture", TRAINING)
    assert ran.code == 1 and "error: TypeError" in ran.words
    assert "a bug of functionalize, please report it with what --debug shows" in ran.words


# -- capture ---------------------------------------------------------------------------------------


def test_capture(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "step.fzp"
    args = ("capture", TRAINING, "--mesh", "dp=4", "--set", "layers=3", "-o", path)
    ran = command(*args)
    assert ran.code == 0 and "training.py, layers 3: 4 ranks, mesh dp 4, target cuda" in ran.out
    assert "of them resizes of storages" in ran.out and path.exists() and not ran.err
    found = command(*args, "--json").json
    assert found["collectives"] == {"all_gather_into_tensor": 7, "reduce_scatter_tensor": 4}
    assert found["nodes"] > 100 and found["resizes"] > 10 and found["file"] == str(path)
    assert found["world"] == "4 ranks, mesh dp 4" and found["seconds"] > 0


def test_json_is_alone_on_stdout(command: Command) -> None:
    ran = command("capture", TRAINING, "--json")
    assert ran.json["world"] == "8 ranks" and "a model is built" in ran.err
    assert "a model is built" in command("capture", TRAINING).out


def test_what_any_model_can_be_asked_for(command: Command) -> None:
    def gathers(*more: str) -> int:
        found = command("capture", TRAINING, "--json", *more).json
        return int(found["collectives"]["all_gather_into_tensor"])

    assert gathers() == 5 and gathers("--set", "reshard=false") == 3


# -- show ------------------------------------------------------------------------------------------


def test_show_is_the_same_from_a_file(command: Command, file: str) -> None:
    ran = command("show", file)
    assert ran.code == 0 and ran.out.startswith("program(\n") and "epilogue:" in ran.out
    assert "    # forward, model.blocks.0.up\n" in ran.out
    script = command("show", TRAINING, "--world", 4).out
    assert script.removeprefix("a model is built\n") == ran.out


def test_a_part_of_a_graph(command: Command, file: str) -> None:
    def shown(*args: str) -> list[dict[str, str]]:
        nodes = command("show", file, "--json", *args).json["nodes"]
        assert nodes
        return list(nodes)

    every = shown()
    inside = shown("--module", "blocks.1", "--phase", "backward")
    assert inside == [
        node
        for node in every
        if node["module"].startswith("model.blocks.1") and node["phase"] == "backward"
    ]
    up = shown("--module", "*.up")
    assert {node["module"] for node in up} == {"model.blocks.0.up", "model.blocks.1.up"}
    matrices = shown("--grep", "ATEN.mm")
    assert {node["op"] for node in matrices} == {"aten.mm.default"}
    assert all(node["value"].startswith("float32[") for node in matrices)
    ran = command("show", file, "--module", "head", "--phase", "forward")
    assert "epilogue" not in ran.out and "# backward" not in ran.out and "ops)" in ran.out
    ran = command("show", file, "--module", "tail")
    assert ran.code == 2 and "no op fits --module tail; there are the phases forward" in ran.words


def test_the_backward_of_an_op(command: Command, file: str) -> None:
    """The first `mm` of the forward leads to its gradients, which name its line as their forward."""
    every = command("show", file, "--json", "--phase", "forward").json["nodes"]
    forward = next(node for node in every if node["op"] == "aten.addmm.default")
    found = command("show", file, "--json", "--backward-of", forward["name"]).json["nodes"]
    assert found and {node["phase"] for node in found} == {"backward"}
    assert {node["module"] for node in found} == {forward["module"]}
    assert forward["line"] in {node["forward"] for node in found}
    ran = command("show", file, "--backward-of", "fly")
    assert ran.code == 2 and "--backward-of fly: the graph has no node `fly`" in ran.words


def test_show_the_tape(command: Command, file: str, tmp_path: Path) -> None:
    ran = command("show", file, "--tape")
    assert "loss.backward()" in ran.out.splitlines()[0] and "AddmmBackward0 ->" in ran.out
    (backward,) = command("show", file, "--tape", "--json").json["backwards"]
    assert any(node["parameter"] for node in backward["nodes"])
    picture = tmp_path / "tape.svg"
    assert command("show", file, "--tape", "--png", picture).code == 0 and picture.exists()
    assert "add --tape" in command("show", file, "--png", picture).words
    assert "leave out --module" in command("show", file, "--tape", "--module", "head").words


def test_show_after_passes(command: Command, file: str) -> None:
    before, after = (
        command("show", file, *more, "--json").json["of"] for more in ((), ("--passes", "default"))
    )
    assert after < before


# -- opt -------------------------------------------------------------------------------------------


def test_opt(command: Command, file: str) -> None:
    ran = command("opt", file, "default")
    assert ran.code == 0 and "schedule_memory" in ran.out and "as recorded" in ran.out
    found = command("opt", file, "default", "--json").json
    assert [each["pass"] for each in found["passes"]][-2:] == ["reinplace", "schedule_memory"]
    assert found["nodes"][0] > found["nodes"][1] == found["passes"][-1]["nodes"]
    assert (
        found["peak"][1] < found["peak"][0] and found["stage"] == "INPLACE" and "diff" not in found
    )


def test_opt_with_a_diff(command: Command, file: str) -> None:
    ran = command("opt", file, "fold_views", "--diff")
    lines = ran.out.splitlines()
    at = lines.index("--- as recorded")
    assert lines[at + 1] == "+++ after the passes" and any(
        line.startswith("-  ") for line in lines[at:]
    )
    assert command("opt", file, "verify", "--diff").out.splitlines()[-1] == "no difference"
    assert command("opt", file, "fold_views", "--diff", "--json").json["diff"] == lines[at:]


def test_a_pass_at_a_wrong_stage(command: Command, file: str) -> None:
    ran = command("opt", file, "reinplace,partition")
    assert ran.code == 1 and "accepts a program at stage FUNCTIONAL" in ran.words


# -- memory ----------------------------------------------------------------------------------------


def test_memory(command: Command) -> None:
    args = ("memory", TRAINING, "--world", 4, "--set", "batch=64", "--top", 3)
    ran = command(*args, columns=80)
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 80 and not ran.err
    for text in ("CUDA context", "unsharded parameters", "Peak of eager: ", "The largest of it"):
        assert text in ran.out
    assert "by module" in ran.out and "model.blocks." in ran.out
    found = command(*args, "--json").json
    levels = found["timelines"]["eager"]["levels"]
    assert levels["device"] == levels["reserved"] + levels["constants"]
    assert sum(found["timelines"]["eager"]["by_category"].values()) == levels["requested"]
    assert len(found["timelines"]["program"]["top"]) == 3 and found["limit"]["fits"]
    cpu = command(*args, "--target", "cpu", "--json").json
    assert cpu["constants"] == []


def test_a_program_that_needs_more_than_eager_is_named(command: Command) -> None:
    """Reductions stay in flight until the optimizer waits; `default` waits at once."""
    args = ("memory", TRAINING, "--world", 4, "--target", "cpu", "--set", "width=256")
    ran = command(*args, "--set", "layers=6")
    found = command(*args, "--set", "layers=6", "--json").json["timelines"]
    more = [found[name]["levels"]["device"] for name in ("program", "eager")]
    assert more[0] > more[1]
    text = f"The program as recorded needs {human_bytes(more[0])}, {human_bytes(more[0] - more[1])}"
    assert f"{text} more than eager" in " ".join(ran.out.split())
    assert "more than eager" not in command(*args, "--set", "layers=6", "--passes", "default").out
    assert "more than eager" not in command(*args, "--set", "layers=1").out


def test_the_memory_of_the_host(command: Command) -> None:
    args = ("memory", OFFLOADED, "--build", "build_offloaded", "--mesh", "shard=2")
    ran = command(*args, "--set", "offload=True")
    assert ran.code == 0, ran.err
    (line,) = (line for line in ran.out.splitlines() if line.startswith("host "))
    assert line.split()[-1] == "requested"
    assert "offloaded to host memory, which has no limit here" in ran.out
    assert command(*args, "--set", "offload=True", "--json").json["host"] > 0
    assert "host " not in command(*args).out


def test_memory_of_a_file_is_the_programs(command: Command, file: str) -> None:
    found = command("memory", file, "--json").json
    script = command("memory", TRAINING, "--world", 4, "--json").json
    assert (
        list(found["timelines"]) == ["program"] and "Peak of program" in command("memory", file).out
    )
    assert found["timelines"]["program"] == script["timelines"]["program"] or (
        found["timelines"]["program"]["by_category"]
        == script["timelines"]["program"]["by_category"]
    )
    assert found["constants"] == script["constants"]
    ran = command("memory", file, "--of", "eager")
    assert ran.code == 1 and "no timeline `eager` in this report" in ran.words


def test_a_limit(command: Command) -> None:
    ran = command("memory", TRAINING, "--limit", "80GB")
    assert ran.code == 0 and "fits: " in ran.out and "of 74.5 GiB (eager)" in ran.out
    ran = command("memory", TRAINING, "--limit", "500MiB", "--json")
    assert ran.code == 1 and not ran.json["limit"]["fits"]
    assert "does not fit: context and workspaces alone need 852 MiB of 500 MiB" in ran.words
    ran = command(
        "memory", TRAINING, "--limit", "853MiB", "--alloc-conf", "expandable_segments:True"
    )
    assert (
        ran.code == 1 and "does not fit: Out of memory" in ran.words and "Peak of eager" in ran.out
    )


def test_files_of_memory(command: Command, tmp_path: Path) -> None:
    names = ("m.png", "m.html", "m.pickle", "m.json")
    png, html, snapshot, trace = (tmp_path / name for name in names)
    files = ("--png", png, "--html", html, "--snapshot", snapshot, "--trace", trace)
    ran = command("memory", TRAINING, "--passes", "default", "--json", *files)
    assert ran.code == 0 and ran.json["files"] == [str(tmp_path / name) for name in names]
    assert png.read_bytes().startswith(b"\x89PNG") and "</html>" in html.read_text()
    assert pickle.loads(snapshot.read_bytes())["device_traces"][0]
    found = counters(checked(json.loads(trace.read_text())))
    over_events = png.read_bytes()
    assert command("memory", TRAINING, "--png", png, "--time-axis").code == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.read_bytes() != over_events
    for name, timeline in ran.json["timelines"].items():
        peak = max(nbytes for _, nbytes in found[f"memory of {name}", "all"])
        assert peak == timeline["levels"]["requested"]
    ran = command("memory", TRAINING, "--png", tmp_path / "no" / "m.png")
    assert ran.code == 2 and "cannot be written: there is no folder" in ran.words


# -- plan ------------------------------------------------------------------------------------------


def test_plan(command: Command, tmp_path: Path) -> None:
    files = {name: tmp_path / f"p.{name}" for name in ("csv", "trace")}
    args = ("plan", TRAINING, "--grid", "batch=1,64", "--grid", "world=2,4", "--set", "layers=1")
    ran = command(*args, *(part for kind, path in files.items() for part in (f"--{kind}", path)))
    assert ran.code == 0 and "training.py, layers 1" in ran.out and not ran.err
    heads, *rows = (line.split() for line in ran.out.splitlines() if "iB" in line or "MFU" in line)
    assert heads[:2] == ["batch", "world"] and [row[:2] for row in rows] == [
        ["1", "2"],
        ["1", "4"],
        ["64", "2"],
        ["64", "4"],
    ]
    table = list(csv.DictReader(files["csv"].read_text().splitlines()))
    points = command(*args, "--json").json["points"]
    assert [int(row["peak"]) for row in table] == [point["peak"] for point in points]
    assert points[2]["peak"] > points[0]["peak"]
    assert all(sum(point["categories"].values()) == point["peak"] for point in points)
    found = counters(checked(json.loads(files["trace"].read_text())))
    peaks = [
        max(nbytes for _, nbytes in each)
        for (process, name), each in found.items()
        if process.startswith("memory of eager batch ") and name == "all"
    ]
    assert peaks == [point["peak"] for point in points]


def test_what_cannot_be_drawn_without_a_time_is_said_below_the_table(
    command: Command, tmp_path: Path
) -> None:
    trace, table = tmp_path / "plan.json", tmp_path / "plan.csv"
    files = ("--csv", table, "--trace", trace)
    ran = command("plan", TRAINING, "--step", "prints", *files, columns=500)
    assert ran.code == 1 and table.exists() and not trace.exists()
    assert "the step cannot be captured: writes to sys.stdout" in ran.out
    assert f"wrote {table}" in ran.out and f"wrote {trace}" not in ran.out
    assert f"no point has a time, so {trace}" in ran.err
    assert "cannot be drawn: not written" in ran.words


def test_columns_that_have_no_room(command: Command) -> None:
    args = ("plan", TRAINING, "--grid", "batch=1,64", "--grid", "world=2,4")
    narrow, wide = command(*args, columns=72), command(*args, columns=200)
    assert "(no room for planned in, exposed" in narrow.out and "no room" not in wide.out
    assert "planned in" in wide.out.splitlines()[0] + wide.out
    lines = [line for line in narrow.out.splitlines() if "iB" in line]
    assert lines and max(map(len, lines)) <= 72 and "…" not in narrow.out


def test_a_mesh_in_words(command: Command) -> None:
    ran = command("plan", TRAINING, "--grid", "batch=1,2", "--mesh", "dp=4", "--set", "layers=1")
    assert "training.py, layers 1, mesh dp 4\n" in ran.out
    ran = command("plan", TRAINING, "--grid", "mesh=2,4", "--set", "layers=1")
    assert re.search(r"^ *mesh ", ran.out, re.M) and "(" not in ran.out.splitlines()[1]


def test_the_largest_that_fits(command: Command) -> None:
    model = ("plan", TRAINING, "--set", "layers=1", "--set", "width=256")
    args = (*model, "--largest", "batch", "--limit", "910MiB")
    found = command(*args, "--json").json
    largest = found["largest"]["value"]
    assert found["largest"]["key"] == "batch" and largest > 4
    near = command(
        *model, "--grid", f"batch={largest},{largest + 1}", "--limit", "910MiB", "--json"
    )
    fits, more = (point["device"] for point in near.json["points"])
    assert fits <= 910 * 2**20 < more
    assert found["points"] and found["points"][0]["batch"] == 4  # what `inputs` has by default


def test_the_largest_for_people(command: Command) -> None:
    args = ("plan", TRAINING, "--grid", "layers=1,2", "--largest", "batch", "--set", "width=256")
    ran = command(*args, "--limit", "10MB")
    assert ran.code == 1 and "error: batch 1 does not fit in 9.54 MiB" in ran.words
    ran = command(*args, "--limit", "910MiB")
    assert (
        "the largest batch that fits in 910 MiB: " in ran.out and "as in the first row" in ran.out
    )


def test_points_that_fail_and_points_that_are_too_large(command: Command) -> None:
    ran = command("plan", TRAINING, "--grid", "batch=1,x", "--limit", "100MB")
    assert ran.code == 1 and "1 of 2 points could not be planned" in ran.err
    assert "batch x: TypeError: randn()" in ran.out and "more than 95.4 MiB: batch 1" in ran.out
    assert command("plan", TRAINING, "--grid", "batch=x,y").code == 1
    assert command("plan", TRAINING, "--grid", "batch=1,x", "--limit", "80GB").code == 0


def test_a_point_that_failed_says_what_to_do(command: Command, tmp_path: Path) -> None:
    reads = "    if x.size(0) > 2:\n        torch.equal(x, x)\n"
    text = Path(TRAINING).read_text()
    at = text.index("    loss = model(x)")
    (tmp_path / "reads.py").write_text(text[:at] + reads + text[at:])
    ran = command("plan", tmp_path / "reads.py", "--grid", "batch=2,4,8", columns=500)
    assert ran.code == 0 and ran.out.count("Give the step a form whose shapes follow") == 1
    assert "reads.py:" in ran.out and ran.out.count("aten.equal.default decides by data") == 2


# -- other ways in --------------------------------------------------------------------------------


def test_as_a_process_nothing_clutters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "functionalize", "capture", TRAINING, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and json.loads(ran.stdout)["nodes"] > 100
    assert ran.stderr == "a model is built\n"


def test_without_typer(tmp_path: Path) -> None:
    text = 'raise ModuleNotFoundError("no typer", name="typer")'
    (tmp_path / "typer.py").write_text(text)
    ran = run_module("functionalize", "plan", TRAINING, path=[str(tmp_path)])
    assert ran.returncode == 2 and not ran.stdout
    assert 'there is no typer here: pip install "functionalize[cli]"' in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_the_version(command: Command) -> None:
    ran = command("--version")
    assert ran.code == 0 and ran.out.split() == [
        *("functionalize", f"{version('functionalize')},", "torch", version("torch"))
    ]


WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Missing())
from functionalize.planner.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--version",), 0, "functionalize"),
        (("plan", "--help"), 0, "Example: functionalize plan"),
        (("plan", "train.py"), 2, "this command needs torch, and there is none here"),
        (("plan",), 2, "Missing argument"),
    ],
)
def test_without_torch_there_is_help(args: tuple[str, ...], code: int, text: str) -> None:
    """So it answers at once where there is torch, too, which takes seconds to import."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *args]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == code and text in " ".join((ran.stdout + ran.stderr).split()), ran


def test_a_limit_by_the_name_of_a_machine(command: Command) -> None:
    memory = command("memory", TRAINING, "--limit", "h100", "--json").json["limit"]
    plan = command("plan", TRAINING, "--largest", "batch", "--limit", "4090", "--json").json
    assert memory["bytes"] == MACHINES["h100"].memory and memory["fits"]
    assert plan["largest"]["limit"] == MACHINES["4090"].memory
    assert (
        "--limit cpu: this machine has no memory of its own"
        in command("plan", TRAINING, "--limit", "cpu").words
    )
