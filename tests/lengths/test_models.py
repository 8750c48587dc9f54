"""`dynamic=True` with Hugging Face models under FSDP2 on two ranks: other lengths on each, bit for bit as eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.allowance import ample_allowance
from tests.fsdp.huggingface import (
    WORDS,
    Twin,
    build_bert_masked_lm,
    build_gpt2,
    build_llama,
    build_mixtral,
    build_t5,
    generator,
    train,
)
from tests.fsdp.twins import Verdict, compare_twins
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

LONGEST = 10
MODELS: dict[str, Callable[[], Twin]] = {
    "llama": build_llama,
    "gpt2": build_gpt2,
    "bert": build_bert_masked_lm,
    "mixtral": build_mixtral,
    "t5": build_t5,
}


def texts(calls: int) -> list[dict[str, Tensor]]:
    """Batches of random lengths, other ones on each rank; the first row is padded."""
    g, batches = generator(), []
    for _ in range(calls):
        length = int(torch.randint(3, LONGEST + 1, (1,), generator=g))
        ids = torch.randint(3, WORDS, (2, length), generator=g)
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, -1] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.clone()})
    return batches


def seeded(name: str) -> Twin:
    torch.manual_seed(0)
    return MODELS[name]()


@ample_allowance()
def trained(name: str, calls: int) -> Verdict:
    build = partial(seeded, name)
    return compare_twins(build, train, texts(calls), dynamic=True)


@pytest.mark.parametrize("name", MODELS)
def test_random_lengths_of_each_rank(name: str, pytestconfig: pytest.Config) -> None:
    is_long = pytestconfig.getoption("--fuzz-long")
    if not is_long and name != "mixtral":
        pytest.skip("run by --fuzz-long")
    calls = 200 if is_long else 24
    for verdict in run_on_ranks(trained, name, calls, world=2):
        assert verdict.differences == []
        assert verdict.mispredictions == 0
        assert verdict.captures <= 5
        assert verdict.predictions >= 1
