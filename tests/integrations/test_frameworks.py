"""Each framework's own loop, by eager and with its integration: the same numbers, shards and optimizer states."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from functionalize import integrations
from tests.forks import Fork, run_module
from tests.integrations.loops import EPOCHS

pytestmark = pytest.mark.long

LOOPS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "transformers": "accelerate",
    "torchtitan": "torchtitan",
}
WORLDS = (1, 2)
CALLS = "calls of `{}`, forward with hooks, and their backward"
BOUNDARIES = {
    **dict.fromkeys(("accelerate", "lightning", "fabric"), CALLS.format("(FSDP)?Net")),
    "transformers": CALLS.format("(FSDP)?LlamaForCausalLM"),
    "torchtitan": "`trainer.fwd_bwd_fn`, forward, loss and backward of a microbatch",
}

INSTALLED = [loop for loop, package in LOOPS.items() if importlib.util.find_spec(package)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what every rank of every loop found, on one rank and on two."""
    folder = tmp_path_factory.mktemp("trained")
    cases = [f"{loop}.{world}" for loop in INSTALLED for world in WORLDS]
    cases += [f"{case}.resumed" for case in cases]
    cases += ["metrics.1"] * ("lightning" in INSTALLED)
    cases += ["torchtitan-main.1"] * ("torchtitan" in INSTALLED)
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    done = run_module("tests.integrations.loops", str(folder), *cases, environment=environment)
    (folder / "log").write_text(done.stdout + done.stderr)
    return folder


def answers(folder: Path, loop: str, case: str, world: int) -> list[dict[str, Any]]:
    """What each rank found."""
    if loop not in INSTALLED:
        package = LOOPS[loop]
        pytest.skip(f"{package} is not installed: pip install 'functionalize[{package}]'")
    files = [folder / f"{case}.{rank}" for rank in range(world)]
    texts = [file.read_text() if file.exists() else "no answer" for file in files]
    assert all(text.startswith("{") for text in texts), [*texts, (folder / "log").read_text()]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_new_process_resumes_from_a_checkpoint_of_the_framework(
    loop: str, world: int, trained: Path
):
    for found in answers(trained, loop, f"{loop}.{world}.resumed", world):
        assert found["same_numbers"] and 15 <= found["numbers"] < 15 * EPOCHS, found
        assert not found["differ"] and found["tensors"] > 20, found
        assert found["replays"] >= 0.5 * found["calls"] > 0, found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_framework_trains_as_in_eager(loop: str, world: int, trained: Path):
    for found in answers(trained, loop, f"{loop}.{world}", world):
        assert found["same_numbers"] and found["numbers"] >= 30, found
        assert not found["differ"] and found["tensors"] > 20, found
        assert found["calls"] and found["replays"] >= 0.9 * found["calls"], found
        assert not found["differences"], found
        assert re.match(
            rf"boundary: {BOUNDARIES[loop]}: \d+ of \d+ calls replayed\n", found["text"]
        )


def test_torchtitan_trains_as_in_eager_by_the_entry_that_captures(trained: Path):
    (found,) = answers(trained, "torchtitan", "torchtitan-main.1", 1)
    assert found["same_numbers"] and found["numbers"] >= 30 and not found["differences"], found
    assert not found["differ"] and found["tensors"] > 20, found
    assert found["replays"] >= 0.7 * found["calls"] > 0, found


def test_a_step_logs_metrics_as_objects(trained: Path):
    (found,) = answers(trained, "lightning", "metrics.1", 1)
    assert found["same_numbers"] and found["numbers"] >= 60 and not found["differences"], found
    assert not found["differ"] and found["tensors"] > 20, found
    assert found["replays"] >= 0.8 * found["calls"] > 0, (
        found
    )  # `reset` ends each epoch: its first call is eager


class Pipelined:
    """What `torchtitan.capture` needs of a trainer with pipeline parallelism."""

    parallel_dims = SimpleNamespace(pp_enabled=True)
    config = SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=True))

    def pp_forward_backward_step(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_torchtitan_under_pipeline_parallelism():
    trainer = Pipelined()
    step = integrations.torchtitan.capture(trainer)
    for i in range(6):
        assert torch.equal(
            trainer.pp_forward_backward_step(torch.full((2,), i)), torch.full((2,), 2 * i)
        )
    assert step.stats.replays >= 3 and "pp_forward_backward_step" in step.explain()


def modules() -> None:
    assert integrations
    print(*sys.modules)


def test_nothing_is_imported_unless_asked_for():
    done = Fork(modules).done()
    found = {*done.stdout.split()}
    assert {"functionalize.integrations", "passes"} <= found, done.stderr
    assert not {"accelerate", "lightning", "torchtitan", "transformers"} & found


def test_a_framework_that_there_is_no_integration_for():
    with pytest.raises(AttributeError, match="has no attribute 'megatron'"):
        _ = integrations.megatron
