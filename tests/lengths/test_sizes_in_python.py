"""Python asks for a size and decides by it, in every way known: with `dynamic=True` all calls equal eager ones."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

import functionalize as fz
from tests.lengths.ways import SEEN, WAYS, stepped

pytestmark = pytest.mark.usefixtures("ample_allowance")

RECORDED, OTHERS = (8, 12, 20), (37, 16, 600, 13)


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_other_sizes_equal_eager(way: str) -> None:
    fn, fate = WAYS[way]
    SEEN.elements = 0
    captured, eager = fz.capture(stepped(fn), dynamic=True, audit=False), stepped(fn)
    for i, rows in enumerate([n for n in (*RECORDED, *OTHERS) for _ in range(4)]):
        x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(i))
        results, texts, counts = [], [], []
        for step in (captured, eager):
            before, text = SEEN.elements, io.StringIO()
            with contextlib.redirect_stdout(text):
                results.append(step(x.clone().requires_grad_()))
            texts.append(text.getvalue())
            counts.append(SEEN.elements - before)
        assert all(map(torch.equal, *results)), (i, rows)
        assert texts[0] == texts[1] and counts[0] == counts[1], (i, rows)
    stats = captured.stats
    assert stats.replays >= 7
    assert (stats.predictions > 0, stats.mispredictions > 0) == {
        "predicted": (True, False),
        "found": (True, True),
        "recorded": (False, False),
    }[fate], stats
