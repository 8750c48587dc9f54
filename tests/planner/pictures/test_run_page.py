"""The report on a run: what two ranks log, one of them killed, the figures of the page, a disk that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from functionalize.errors import PictureError
from functionalize.planner.pictures.run_page import Run, read_run, run_figure, write_run_page
from tests.planner.browser import Browser, executable
from tests.planner.cli.entry import Command, command
from tests.ports import free_port

__all__ = ["command"]  # a fixture
ROOT = Path(__file__).parents[3]
TRAIN = """
import os, signal, torch, torch.distributed as dist, functionalize as fz
dist.init_process_group("gloo")
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
inner = fz.capture(lambda x: x * 2)
@fz.capture(audit=False)
def train_step(x):
    loss = (weight * inner(x)).sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
for i in range(30):
    train_step(torch.ones(3 if i < 12 else (2, 3)))
print(train_step.stats.calls, train_step.stats.replays)
dist.barrier()
if dist.get_rank() == 1:
    train_step._call_log.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The folder of a run on two ranks, the second of which is killed, and what each rank counted."""
    folder = tmp_path_factory.mktemp("run") / "logs"
    ranks = []
    port = str(free_port())
    for rank in "01":
        environment = {
            **os.environ,
            **{"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            **{"FUNCTIONALIZE_REPORT": str(folder), "PYTHONPATH": str(ROOT)},
        }
        start = [sys.executable, "-W", "ignore", "-c", TRAIN]
        ranks.append(subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, -9]
    return folder, [[int(number) for number in text.split()] for text in printed]


@pytest.fixture(scope="module")
def run(logged: tuple[Path, list[list[int]]]) -> Run:
    return read_run(logged[0])


def test_every_call_of_every_rank_is_in_it(run: Run, logged: Any) -> None:
    assert [(step.name, step.rank) for step in run.steps] == [("train_step", 0), ("train_step", 1)]
    for step, (calls, replays) in zip(run.steps, logged[1], strict=True):
        assert (step.calls(), step.calls("replay")) == (calls, replays)
        assert replays > 5 and step.calls("record") == len(step.programs) == 2
        assert step.first_replay is not None and step.first_replay > 0
        assert step.calls_before == next(
            row["first"] - 1 for row in step.rows if row["what"] == "replay"
        )
    assert not run.unread and not run.is_full
    assert all(resident > 1 << 20 for _, resident, _ in run.memory())


def test_misses_have_their_text_and_their_ranks(run: Run) -> None:
    (found,) = (row for row in run.misses() if "float32[2, 3], was float32[3]" in row[-1])
    log, times, ranks, seconds, _ = found
    assert (log, ranks) == ("misses", 2) and times >= 2 and seconds > 0


def test_the_figure_has_replays_durations_and_memory(run: Run) -> None:
    traces = run_figure(run)["data"]
    shares = [trace for trace in traces if "yaxis" not in trace]
    assert [trace["name"] for trace in shares] == ["train_step, rank 0", "train_step, rank 1"]
    assert all(0 <= share <= 1 for trace in shares for share in trace["y"])
    replayed = next(trace for trace in traces if trace["name"] == "replay")
    rows = [row for step in run.steps for row in step.rows if row["what"] == "replay"]
    assert replayed["y"] == [row["seconds"] / row["calls"] for row in rows]
    assert sum(trace.get("yaxis") == "y3" for trace in traces) == 2


def test_the_command_prints_a_row_for_each_rank(logged: Any, command: Command) -> None:
    ran = command("report", logged[0], columns=200)
    assert ran.code == 0 and ran.out.count("train_step ") >= 2
    assert "was float32[3]" in ran.out
    found = command("report", logged[0], "--json").json
    assert [row["replayed"] for row in found["steps"]] == [replays for _, replays in logged[1]]
    assert command("report", logged[0] / "none").code == 2


def test_the_page_in_a_browser(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "run.html"
    write_run_page(path, run)
    text = path.read_text()
    assert "was float32[3]" in text and "replays per call" in text
    if executable() is None:
        pytest.skip("no browser on the PATH")
    with Browser(tmp_path) as browser:
        browser.open(path)
        assert browser.run("document.querySelectorAll('.plotly-graph-div .ytitle').length") == 1
        assert browser.run("document.querySelector('.plotly-graph-div').data.length") == len(
            run_figure(run)["data"]
        )
        assert not browser.complaints


def test_a_line_that_is_not_whole_is_counted(logged: Any, tmp_path: Path) -> None:
    (file,) = logged[0].glob("rank0.*.jsonl")
    text = file.read_text()
    (tmp_path / file.name).write_text(text[: text.rindex("\n") - 9])
    assert read_run(tmp_path).unread == 1
    with pytest.raises(PictureError, match="has no calls of a run: set FUNCTIONALIZE_REPORT="):
        read_run(tmp_path / "none")


LIMITED = """
import os, sys, torch, functionalize as fz
from functionalize.util import run_log
run_log.MOST = 900
step = fz.capture(lambda x: x.sin())
for _ in range(3000):
    step._call_log.flush()
    step(torch.ones(3))
log = run_log.run_log()
if sys.argv[1:]:
    log._left, log._file = 100, os.open("/dev/full", os.O_WRONLY)
    log.write("log")
"""


def test_a_file_ends_at_its_limit_and_a_full_disk_ends_it_too(tmp_path: Path) -> None:
    environment = {**os.environ, "FUNCTIONALIZE_REPORT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    start = [sys.executable, "-c", LIMITED, "full disk"]
    ran = subprocess.run(start, env=environment, capture_output=True, text=True, check=True)
    (file,) = tmp_path.glob("*.jsonl")
    lines = file.read_text().splitlines()
    assert file.stat().st_size < 1000 and json.loads(lines[-1]) == {"kind": "full"}
    assert read_run(tmp_path).is_full
    assert "ends here: [Errno 28] No space left on device" in ran.stderr
