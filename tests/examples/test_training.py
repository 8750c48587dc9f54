"""`examples/training.py` under torchrun: as in eager, after a worker's failure, and resumed from a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path, steps: int, *arguments: str, launch: tuple[str, ...] = ()) -> list[str]:
    """What the first rank of two prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *launch]
    command += ["--nproc-per-node", "2", "examples/training.py", "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--steps", str(steps), *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.splitlines()


def test_the_example_trains_as_in_eager_survives_a_failure_and_resumes(tmp_path: Path):
    """torchrun starts all workers again; they resume from the last checkpoint, of step 5, as does another run."""
    eager = run(tmp_path / "eager", 15, "--eager")
    assert len(eager) == 15 and eager[0].startswith("step 1: loss ")
    failing = run(tmp_path / "ours", 10, "--fail-at", "7", launch=("--max-restarts", "1"))
    for (*lines, counts), expected in (
        (failing, eager[5:10]),
        (run(tmp_path / "ours", 15), eager[10:]),
    ):
        assert lines == expected, counts
        found = re.match(r"microbatch: .* (\d+) replays", counts)
        assert found is not None and int(found[1]) >= 10, counts
