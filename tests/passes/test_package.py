"""The package of passes is found as `functionalize.passes`, whatever else is called `passes`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from functionalize.passes.order import Order

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch, functionalize as fz, passes
assert passes.LIMIT == 3
model = torch.nn.Linear(4, 4)
def step(x):
    loss = model(x).square().mean(); loss.backward(); model.zero_grad(); return loss.detach()
captured = fz.capture(step, passes="default")
for _ in range(4): captured(torch.ones(2, 4))
print(captured.stats.replays)
"""


def test_a_module_passes_beside_the_script_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("LIMIT = 3\n")
    (tmp_path / "train.py").write_text(TRAIN)
    env = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "3"


def test_in_a_checkout_the_name_of_the_folder_gives_the_same_modules() -> None:
    assert importlib.import_module("passes.order").Order is Order
    assert importlib.import_module("passes") is sys.modules["functionalize.passes"]
