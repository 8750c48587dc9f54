"""`examples/training.py` under torchrun: as in eager, after a worker's failure, and resumed from a checkpoint."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    folder: Path, steps: int, *arguments: str, launch: tuple[str, ...] = (), nodes: int = 1
) -> list[str]:
    """What the first rank of two prints, on this node or on two nodes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch]
    if nodes == 1:
        command += ["--standalone"]
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        command += ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "example"]
    command += ["--nproc-per-node", str(2 // nodes), "examples/training.py"]
    command += ["--folder", str(folder), "--steps", str(steps), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(nodes)
    ]
    texts = [process.communicate(timeout=300) for process in started]
    assert not any(process.returncode for process in started), texts
    return "".join(printed for printed, _ in texts).splitlines()


def test_the_example_trains_as_in_eager_survives_a_failure_and_resumes(tmp_path: Path):
    """torchrun starts all workers again; they resume from the checkpoint of step 5, as does a run on two nodes."""
    eager = run(tmp_path / "eager", 15, "--eager")
    assert len(eager) == 15 and eager[0].startswith("step 1: loss ")
    failing = run(tmp_path / "ours", 10, "--fail-at", "7", launch=("--max-restarts", "1"))
    for (*lines, counts), expected in (
        (failing, eager[5:10]),
        (run(tmp_path / "ours", 15, nodes=2), eager[10:]),
    ):
        assert lines == expected, counts
        found = re.match(r"microbatch: .* (\d+) replays", counts)
        assert found is not None and int(found[1]) >= 10, counts
