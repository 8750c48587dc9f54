"""`examples/training.py` under torchrun: as in eager, after a worker's failure, and resumed from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.run import main as torchrun

from examples import training
from tests.forks import Fork
from tests.ports import free_port
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

SCRIPT = Path(training.__file__)


def launched(folder: Path, *script: str, launch: tuple[str, ...] = (), nodes: int = 1) -> list[str]:
    """What the first rank of two prints, on this node or on two nodes of this machine.

    torch is imported already where agents run: they are forks of the server of `tests.ranks`, and workers of them.
    """
    arguments = [
        "--run-path",
        "--start-method",
        "fork",
        "--nproc-per-node",
        str(2 // nodes),
        *launch,
    ]
    if nodes == 1:
        arguments += ["--standalone"]
    else:
        arguments += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "example"]
        arguments += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    arguments += [str(SCRIPT), "--folder", str(folder), *script]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    agents = [Fork(torchrun, arguments, environment=environment) for _ in range(nodes)]
    done = [agent.done() for agent in agents]
    assert not any(each.returncode for each in done), done
    return [line for each in done for line in (each.stdout + each.stderr).splitlines()]


def eager(folder: str) -> list[str]:
    return training.run(Path(folder), 15, eager=True)


def test_the_example_trains_as_in_eager_survives_a_failure_and_resumes(tmp_path: Path):
    """torchrun starts all workers again; they resume from the checkpoint of step 5, as does a run on two nodes."""
    expected, _ = run_on_ranks(eager, str(tmp_path / "eager"))
    assert len(expected) == 15 and expected[0].startswith("step 1: loss ")
    ours = tmp_path / "ours"
    failing = launched(ours, "--steps", "10", "--fail-at", "7", launch=("--max-restarts", "1"))
    assert any("this worker fails once" in line for line in failing)
    for printed, lines in (
        (failing, expected[5:10]),
        (launched(ours, "--steps", "15", nodes=2), expected[10:]),
    ):
        assert [line for line in printed if line.startswith("step ")] == lines, printed
        counts = [re.match(r"<captured microbatch: .* (\d+) replays>", line) for line in printed]
        (found,) = filter(None, counts)
        assert int(found[1]) >= 10, printed
