"""What no test without a GPU can show, on one GPU: predicted on a CPU, measured once, compared in one table.

    python -m benchmarks.gpu predict --out predicted.json                          needs no GPU
    python -m benchmarks.gpu run --predicted predicted.json --out measured.json    [--part steps ...]
    python -m benchmarks.gpu table measured.json                                   [--all]

    tests       the tests whose files name CUDA
    steps       FSDP2 steps, eager and replayed: time, memory, bits; one rank, and two ranks on the one device
    kernels     which attention kernels, autograd nodes and dtypes calls have
    facts       bytes of single calls, workspaces, the allocator's events, the streams of FSDP2

A part takes at most nine minutes. Every section of a part is a process of its own with a limit: what it has measured
before it crashes or is stopped is kept, and each prediction that it did not reach becomes a row that says so.
`--device cpu` runs what a CPU can, `--small` a few facts of each section; `predict` and `run` need the same two. `run`
writes measured.json and, with every row, measured.txt. Nothing here has been run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels, peaks, reserved, steps, suite, workspaces
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Row, Rows, read_rows, table, words
from benchmarks.machine import machine
from benchmarks.step_time import SUBJECTS

Predict = Callable[[Options], dict[str, Prediction]]
Measure = Callable[[Options, Rows], None]


@dataclass(frozen=True)
class Section:
    """A process of a part. seconds: its limit. on_cpu, small: whether it is part of such runs. env: of the process."""

    part: str
    seconds: int
    predict: Predict
    measure: Measure
    on_cpu: bool = True
    small: bool = True
    env: Mapping[str, str] = field(default_factory=dict)


def _release() -> str:
    return torch.__version__.partition("+")[0]


def _predict_machine(options: Options) -> dict[str, Prediction]:
    found = {"release of torch": Prediction(_release())}
    if options.device == "cuda":
        found["compute capability"] = Prediction(list(options.capability))
    return found


def _measure_machine(options: Options, rows: Rows) -> None:
    rows.add("release of torch", _release(), note=machine())
    if options.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        rows.add("compute capability", [found.major, found.minor], note=found.name)


def _requests(label: str, conf: str) -> Section:
    return Section(
        "facts",
        90,
        partial(reserved.predict_requests, label=label, conf=conf),
        partial(reserved.measure_requests, label=label, conf=conf),
        on_cpu=False,
        env={"PYTORCH_ALLOC_CONF": conf} if conf else {},
    )


def _steps(at: int) -> Section:
    return Section(
        "steps", 100, partial(steps.predict, at=at), partial(steps.measure, at=at), small=at == 0
    )


def _two_ranks(backend: str | None, on_cpu: bool) -> Section:
    return Section(
        "steps",
        70,
        partial(steps.predict, ranks=2),
        partial(steps.measure, ranks=2, backend=backend),
        on_cpu=on_cpu,
    )


MACHINE = "machine"
SECTIONS: dict[str, Section] = {
    MACHINE: Section(MACHINE, 60, _predict_machine, _measure_machine),
    "tests": Section("tests", 530, suite.predict, suite.measure),
    **{f"steps, {name}": _steps(at) for at, name in enumerate(SUBJECTS)},
    "steps, two ranks": _two_ranks(None, on_cpu=True),
    "steps, two ranks on gloo": _two_ranks("gloo", on_cpu=False),
    "kernels": Section("kernels", 400, kernels.predict, kernels.measure),
    "peaks": Section("facts", 120, peaks.predict, peaks.measure),
    "workspaces": Section("facts", 60, workspaces.predict, workspaces.measure, on_cpu=False),
    "requests": _requests("default", ""),
    "requests, expandable": _requests("expandable segments", "expandable_segments:True"),
    "streams": Section(
        "facts", 90, reserved.predict_streams, reserved.measure_streams, on_cpu=False
    ),
}
PARTS = [part for part in dict.fromkeys(s.part for s in SECTIONS.values()) if part != MACHINE]


def sections(options: Options, parts: list[str]) -> dict[str, Section]:
    """Those that the device can run: the machine's, and those of the parts."""
    return {
        name: section
        for name, section in SECTIONS.items()
        if section.part in (MACHINE, *parts)
        and (section.on_cpu or options.device == "cuda")
        and (section.small or not options.small)
    }


def predict(options: Options, parts: list[str]) -> dict[str, dict[str, Any]]:
    """The predictions of each section, as plain values."""
    found = {}
    for name, section in sections(options, parts).items():
        try:
            claims = section.predict(options)
        except Exception as error:
            claims = {f"{name}: predictions": Prediction(None, error=words(error))}
        found[name] = {fact: asdict(claim) for fact, claim in claims.items()}
    return found


def run(options: Options, parts: list[str], predicted: Path) -> list[Row]:
    """The rows of all sections, each in a process of its own."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, section) in enumerate(sections(options, parts).items()):
            path, rest = Path(folder, f"{i}.jsonl"), Path(folder, f"{i}.rest.jsonl")
            print(f"{name}: at most {section.seconds} s", file=sys.stderr, flush=True)
            why = _process(name, section, options, predicted, path)
            known = read_rows(path)
            claims = claims_of(predicted, name)
            missing = claims.keys() - {row.fact for row in known}
            rows = Rows(section.part, claims, rest)
            for fact in (each for each in claims if each in missing):
                rows.failed(fact, why or "not measured by this run")
            if why and not missing:
                rows.failed(name, why)
            found += known + read_rows(rest)
    return found


def claims_of(predicted: Path, name: str) -> dict[str, Prediction]:
    """The predictions of a section; none if the file has no such section."""
    stored = json.loads(predicted.read_text())["sections"].get(name, {})
    return {fact: Prediction(**claim) for fact, claim in stored.items()}


def _process(name: str, section: Section, options: Options, predicted: Path, path: Path) -> str:
    """Run a section. Returns why it ended early, or nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", "section", "--only", name]
    command += ["--predicted", str(predicted.absolute()), "--out", str(path)]
    command += ["--device", options.device, *["--small"] * options.small]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env={**os.environ, **section.env},
            stderr=errors,
            start_new_session=True,
            cwd=suite.ROOT,
        )
        try:
            code = process.wait(section.seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {section.seconds} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks and tests that it started
                process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    last = (raised or lines or [""])[-1][:300]  # libraries write to it after the error, too
    return f"ended with {code}: {last}" if code else ""


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("predict", "run", "section"):
        each = commands.add_parser(name)
        each.add_argument("--out", type=Path, required=True)
        each.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
        each.add_argument("--small", action="store_true")
        each.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
        if name == "predict":
            each.add_argument("--capability", default="9.0", help="of the GPU, as 9.0")
        else:
            each.add_argument("--predicted", type=Path, required=True)
        if name == "section":
            each.add_argument("--only", choices=list(SECTIONS), required=True)
    shown = commands.add_parser("table")
    shown.add_argument("measured", type=Path)
    shown.add_argument("--all", action="store_true", help="rows that agree, too")
    _COMMANDS[(args := parser.parse_args(arguments)).command](args)


def _predict(args: argparse.Namespace) -> None:
    major, minor = map(int, args.capability.split("."))
    options = Options(args.device, args.small, (major, minor))
    about = {"machine": machine(), "target": str(options.target)}
    found = {"about": about, "sections": predict(options, args.part)}
    args.out.write_text(json.dumps(found, indent=1))


def _run(args: argparse.Namespace) -> None:
    rows = run(Options(args.device, args.small), args.part, args.predicted)
    about = {"machine": machine(), "predicted": json.loads(args.predicted.read_text())["about"]}
    text = json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1)
    args.out.write_text(text)
    args.out.with_suffix(".txt").write_text(table(rows, every=True) + "\n")
    print(table(rows))


def _section(args: argparse.Namespace) -> None:
    section = SECTIONS[args.only]
    rows = Rows(section.part, claims_of(args.predicted, args.only), args.out)
    section.measure(Options(args.device, args.small), rows)


def _table(args: argparse.Namespace) -> None:
    stored = json.loads(args.measured.read_text())
    print(json.dumps(stored["about"]))
    print(table([Row(**row) for row in stored["rows"]], args.all))


_COMMANDS = {"predict": _predict, "run": _run, "section": _section, "table": _table}

if __name__ == "__main__":
    main()
