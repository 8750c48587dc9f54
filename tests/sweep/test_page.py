"""The page of a sweep: the fastest point that fits, the frontier, all points at a click, two of them side by side."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.planning.report.display import human_bytes
from functionalize.sweep import page
from functionalize.sweep.page import write_sweep_page
from functionalize.sweep.summary import Sweep

pytest.importorskip("plotly")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch: Any = 4) -> Tensor:
    return torch.ones(batch, 64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    """Three points, of which the larger are faster and need more memory, and one that fails."""
    return fz.plan(build, step, {"batch": [64, 4096, 65536, "x"]}, inputs=inputs, world=2)


def written(sweep: Sweep, path: Path) -> str:
    write_sweep_page(path / "plan.html", sweep, "A plan")
    return (path / "plan.html").read_text()


def heads(text: str) -> list[str]:
    """The titles of the page, those of cards and of what is folded included."""
    return re.findall(r"<(?:h1|h2|summary)>(.*?)</", text)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a title."""
    table = text.partition(f">{title}</")[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]


def test_without_a_limit_the_fastest_is_shown(sweep: Sweep, tmp_path: Path) -> None:
    text = written(sweep, tmp_path)
    assert heads(text)[:8] == [
        "A plan",
        "Which point?",
        "Does it fit?",
        "How fast?",
        "What holds the memory?",
        "What would help?",
        "Frontier",
        "Points",
    ]
    assert "<b>batch 65536</b><p>the fastest of 4, as modelled</p>" in text
    assert "Side by side" in text and "modelled time" in text
    assert "<h2>Memory of batch 65536</h2>" in text
    found = rows(text, "Points")
    assert [row[0] for row in found] == ["64", "4096", "65536", "x"]
    assert [row[1] for row in found[:3]] == ["frontier"] * 3 and "TypeError" in found[3][1]
    assert found[0][2] == human_bytes(sweep.rows()[0]["peak"])


def test_at_a_limit_the_fastest_that_fits(sweep: Sweep, tmp_path: Path) -> None:
    limit = sweep.rows()[1]["device"]
    text = written(sweep.within(limit), tmp_path)
    assert "<b>batch 4096</b><p>the fastest that fits of 4, as modelled</p>" in text
    marks = [row[1] for row in rows(text, "Points")]
    assert marks[:3] == ["fits, frontier", "fits, frontier", "does not fit"]
    text = written(sweep.within(1e6), tmp_path)  # none fits
    assert "<b>batch 65536</b><p>the fastest of 4, as modelled</p>" in text and "card bad" in text


def test_of_many_points_the_frontier_is_first(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_FEW", 3)
    text = written(sweep.within(sweep.rows()[1]["device"]), tmp_path)
    assert "Speed and memory" in heads(text) and "Points" not in heads(text)
    assert [row[0] for row in rows(text, "Frontier")] == ["64", "4096"]
    assert len(rows(text, "All 4 points")) == 4
    assert "<details><summary>All 4 points</summary>" in text
    assert text.count('"visible":"legendonly"') == 1  # the other one of the frontier, at a click


def test_a_step_without_a_program(tmp_path: Path) -> None:
    def prints(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        sys.stdout.write("a step\n")
        step(model, optimizer, x)

    sweep = fz.plan(build, prints, {"batch": [64, 4096]}, inputs=inputs, world=2)
    assert sweep.plans[0].figures is None
    text = written(sweep, tmp_path)
    assert "How fast?" not in text and "no program was made" in text and "What holds" in text
