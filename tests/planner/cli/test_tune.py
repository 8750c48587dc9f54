"""`tune` through its entry point: the answer as text and as JSON, the policy's file, usage errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from functionalize.planner.cli import console
from tests.planner.cli.entry import TRAINING, Command, command
from tests.planner.tuning import training

pytestmark = pytest.mark.long

__all__ = ["command"]
SCRIPT = training.__file__


def test_the_answer(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "policy.py"
    options = ("--mesh", "shard=2", "--target", "cpu", "--limit", "1200KB", "--batches", "2")
    tokens = ("--batch-tokens", "0.5k", "--set", "layers=2", "--tokens", "1B", "--price", "2")
    ran = command("tune", SCRIPT, *options, *tokens, "--code", file, columns=200)
    assert ran.code == 0, ran.err
    assert ran.out.startswith(f"{SCRIPT}: 512 tokens a step on 2 ranks of 1.14 MiB")
    assert "why the next ones lost" in ran.out and f"wrote {file}" in ran.out
    assert "modelled on cpu (every kernel at its peak)" in ran.out
    heads = ran.out.splitlines()[1].split()
    assert heads[-4:] == ["MFU", "tokens/s/rank", "days", "cost"] and "exposed" in heads
    assert "def apply(model: nn.Module)" in file.read_text() and "BATCH = 2" in file.read_text()


def test_json_and_progress_in_a_pipe(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_LINE_EVERY", 0.0)
    options = ("--world", 2, "--target", "cpu", "--limit", "1MB", "--batches", "4")
    ran = command("tune", TRAINING, *options, "--json")
    assert ran.code == 0, ran.err
    done = [int(part) for part in re.findall(r"^(\d+)% \(\d+ of \d+\): .", ran.err, re.MULTILINE)]
    assert len(done) >= 3 and done == sorted(done)
    assert done[0] == 0 and 50 < done[-1] < 100
    assert ran.json["best"]["fits"] and ran.json["best"]["mesh"] is None
    assert ran.json["script"] == TRAINING and ran.json["best"]["batch"] == 4
    assert any("mesh" in why for why in ran.json["search"]["left_out"])
    assert ran.json["items"] == "samples" and ran.json["notes"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "tune needs --limit: within how many bytes?"),
        (("--limit", "80GB", "--batch-tokens", "1T"), "--batch-tokens '1T' cannot be read: write"),
        (
            ("--limit", "80GB", "--price", "2"),
            "--price needs --tokens: the cost of training on how",
        ),
        (("--limit", "h1000"), "the size 'h1000' cannot be read: write 80GB, 74.5GiB, a number of"),
        (("--limit", "80GB", "--batches", "1,x"), "--batches '1,x' cannot be read: write 1,2,4"),
        (("--limit", "80GB", "--tp", "2,x"), "--tp '2,x' cannot be read: write 1,2,4"),
        (("--limit", "80GB", "--passes", "fly"), "no pass `fly`"),
        (("--limit", "80GB", "--machine", "abacus"), "abacus"),
        (("--limit", "80GB", "--code", "policy.txt"), "the policy is a Python file, which ends in"),
        (("--limit", "80GB", "--mesh", "2x4"), "tune needs the names of a mesh's dimensions"),
        (("--limit", "80GB", "--set", "layer=3"), "no function accepts `layer`"),
        (
            ("--limit", "80GB", "--set", "reshard=2"),
            "`reshard` is an axis of the search and has no",
        ),
        (("--limit", "80GB", "--no-offload"), "`offload` needs a parameter `offload`"),
        (("--limit", "80GB", "--rank", "9"), "rank 9 is not in a world of 8 ranks"),
        (("--limit", "80GB", "--target", "abacus"), "there is no target 'abacus'"),
        (
            ("--limit", "80GB", "--mesh", "shard=4"),
            "`meshes` needs a parameter `mesh` (a DeviceMesh) of `build`",
        ),
    ],
)
def test_usage_errors(command: Command, args: tuple[str, ...], message: str) -> None:
    ran = command("tune", TRAINING, *args)
    assert ran.code == 2 and message in ran.words


def test_offload(command: Command) -> None:
    options = (
        "--build",
        "build_offloaded",
        "--mesh",
        "shard=2",
        "--limit",
        "h100",
        "--batches",
        "2",
    )
    ran = command("tune", SCRIPT, *options, "--offload", columns=200)
    assert ran.code == 0, ran.err
    assert "host" in ran.out.splitlines()[1].split() and "batch 2, offloaded" in ran.out


def test_a_file_is_refused(command: Command) -> None:
    ran = command("tune", "step.fzp", "--limit", "80GB")
    assert ran.code == 2 and "tune takes a script, to record others" in ran.words


def test_nothing_fits(command: Command) -> None:
    options = ("--world", 2, "--target", "cpu", "--batches", "4")
    ran = command("tune", TRAINING, *options, "--limit", "1KB")
    assert ran.code == 1 and "nothing fits in 0.98 KiB" in ran.words
