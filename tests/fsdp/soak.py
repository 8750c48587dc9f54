"""Many steps of `Schedule1F1B` under FSDP2, with evaluations and short batches in between, compared with eager.

python -m tests.fsdp.soak           500 steps on four gloo ranks; prints the replays of each rank
python -m tests.fsdp.soak 2000      as many steps
"""

import sys

from tests.fsdp.pipelines import ForLong, trained
from tests.ranks import run_on_ranks


def soaked(steps: int) -> list[tuple[list[float], str]]:
    """For each rank, the share of calls that replayed of each captured function, and what it explains."""
    return run_on_ranks(
        trained, "Schedule1F1B", True, ForLong, steps, world=4, timeout=60 + 5 * steps
    )


if __name__ == "__main__":
    for rank, (shares, text) in enumerate(soaked(int(sys.argv[1]) if len(sys.argv) > 1 else 500)):
        print(f"rank {rank}: {' and '.join(f'{each:.0%}' for each in shares)} replayed\n{text}")
