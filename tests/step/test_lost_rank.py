"""A rank that ends while ranks vote is reported as lost, with the error of the connection as the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from functionalize.errors import LostRankError, UncapturableError
from functionalize.step import vote
from tests.ports import free_port

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
import functionalize as fz

rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Linear(4, 2)

def train(x):
    loss = model(x).square().sum()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    if loss.item() > 1e9:
        return None
    model.zero_grad()
    return loss.detach()

step = fz.capture(train, audit=False)
for i in range(9):
    if rank == 1 and i == 6:
        os._exit(0)
    try:
        step(torch.ones(3, 4))
    except RuntimeError as error:
        print(type(error).__name__, "|", error, "|", type(error.__cause__).__name__, "|", i)
        os._exit(0)
print("ended")
"""


def test_a_rank_that_ends_is_reported_as_lost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said, _ = (rank.communicate(timeout=60)[0] for rank in ranks)
    kind, message, cause, call = (part.strip() for part in said.splitlines()[-1].split("|"))
    assert kind == "LostRankError"
    assert message.startswith("a rank of process group '0' has ended or cannot be reached")
    assert "must read numbers" not in message
    assert "closed" in message.lower() or "reset" in message.lower()
    assert cause != "NoneType" and call == "6"


class Failing:
    """Work, or a store, of which `wait` raises."""

    def __init__(self, error: RuntimeError) -> None:
        self.error = error

    def wait(self, *args: object) -> None:
        raise self.error


def test_a_rank_that_is_silent_is_told_from_one_that_is_lost() -> None:
    late = RuntimeError("Timed out waiting 300000ms for recv operation to complete")
    with pytest.raises(UncapturableError, match="every rank must read numbers"):
        vote._await(Failing(late), "7")  # type: ignore[arg-type]
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:41234")
    told = pytest.raises(LostRankError, match="Connection closed by peer")
    with told as raised, vote._explaining_lost_ranks("7"):
        vote._await(Failing(lost), "7")  # type: ignore[arg-type]
    assert raised.value.__cause__ is lost


def test_a_store_that_is_gone_is_told_from_a_recording_that_does_not_end() -> None:
    lost = dist.DistNetworkError("Connection was likely closed. Did the remote server shutdown?")
    with pytest.raises(LostRankError, match="Connection was likely closed"):
        vote._Room("7", Failing(lost), 2, "key").wait(["numbers"])
    late = dist.DistStoreError("wait timeout after 300000ms, keys: /key/all")
    with pytest.raises(UncapturableError, match="began to record this call"):
        vote._Room("7", Failing(late), 2, "key").wait(["numbers"])
