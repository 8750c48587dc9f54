"""Each framework's own loop, by eager and with its integration: the same numbers, shards and optimizer states."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from functionalize import integrations

ROOT = Path(__file__).parents[2]
LOOPS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "transformers": "accelerate",
    "torchtitan": "torchtitan",
}


def outcomes(framework: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    out = folder / "out.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(world)] if world > 1 else []
    command = launch if world > 1 else [sys.executable]
    command += ["-m", "tests.integrations.loops", framework, str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("framework", LOOPS)
def test_a_framework_trains_as_in_eager(framework: str, world: int, tmp_path: Path):
    package = LOOPS[framework]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'functionalize[{package}]'")
    for found in outcomes(framework, world, tmp_path):
        assert found["same_numbers"] and found["numbers"] >= 30, found
        assert not found["differ"] and found["tensors"] > 20, found
        assert found["calls"] and found["replays"] >= 0.9 * found["calls"], found
        assert ("boundary: " in found["text"]) is (framework != "torchtitan"), found["text"]


def test_nothing_is_imported_unless_asked_for():
    code = (
        "import sys, functionalize as fz; fz.integrations; "
        "assert not {'accelerate', 'lightning', 'torchtitan', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_framework_that_there_is_no_integration_for():
    with pytest.raises(AttributeError, match="has no attribute 'megatron'"):
        _ = integrations.megatron
