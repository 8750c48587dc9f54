"""TRL's trainers, and adapters of PEFT, by the integration of transformers: the numbers and parameters of eager."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.forks import run_module

pytestmark = pytest.mark.long
for package in ("accelerate", "trl", "peft"):
    pytest.importorskip(package, reason="pip install 'functionalize[trl,peft]'")

CASES = [
    *[(kind, world) for kind in ("sft", "sft-lora") for world in (1, 2)],
    *[("dpo", 2), ("dpo-lora", 1), ("grpo", 2), ("grpo-lora", 1)],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what every rank of every training found."""
    folder = tmp_path_factory.mktemp("trained")
    cases = [f"trl-{kind}.{world}" for kind, world in CASES]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = run_module("tests.integrations.loops", str(folder), *cases, environment=environment)
    (folder / "log").write_text(done.stdout + done.stderr)
    return folder


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_a_trainer_of_trl_trains_as_in_eager(kind: str, world: int, trained: Path):
    for rank in range(world):
        file = trained / f"trl-{kind}.{world}.{rank}"
        text = file.read_text() if file.exists() else "no answer"
        assert text.startswith("{"), [text, (trained / "log").read_text()]
        found = json.loads(text)
        assert found["same_numbers"] and found["numbers"] >= 20, found
        assert not found["differ"] and found["tensors"] > 20, found
        assert found["replays"] >= 0.8 * found["calls"] > 0, found
        refused = re.findall("cannot be captured: .*", found["text"])
        assert not found["differences"], found
        # GRPO generates by the same model, whose calls then write to a cache.
        assert all(kind == "grpo" and "kwargs['cache']" in text for text in refused), found
        model = "PeftModel" if kind.endswith("lora") else "Llama"
        assert re.match(rf"boundary: calls of `(FSDP)?{model}ForCausalLM`", found["text"]), found
