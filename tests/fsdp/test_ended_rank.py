"""A rank that ends while another one waits for its message in a replay."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import functionalize as fz

CALLS, TIMEOUT = 8, 5


def main(rank: int, folder: str) -> None:
    """Rank 1 is killed before its last call; rank 0 prints the error of its own one."""
    store = dist.FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)

    def step(x):
        got = torch.empty_like(x)
        if rank == 0:
            sent = dist.isend(x, 1)
            dist.recv(got, 1)
            sent.wait()
        else:
            dist.recv(got, 0)
            dist.send(got * 2, 0)
        return got.sum()

    captured = fz.capture(step, on_uncapturable="raise", audit=False)
    for call in range(CALLS):
        if rank == 1 and call == CALLS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            captured(torch.ones(4))
        except RuntimeError as error:
            print(captured.stats.replays, *error.__notes__, error)
            os._exit(0)


def test_a_rank_that_is_killed(tmp_path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=120)
        assert ranks[1].wait(timeout=120) == -signal.SIGKILL
    finally:
        for each in ranks:
            each.kill()
    assert int(out.split()[0]) >= CALLS - 4, out
    assert re.search("at the message that (sends to|receives from) rank 1 of the process", out), out


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
