"""What a captured step costs beyond eager, over streams of calls that it cannot, or need not, settle for.

    python -m benchmarks.bound [--only NAME ...] [--calls 400] [--ranks 1 2] [--layers 6] [--width 64] [--unsharded]

    beyond       the time of all captured calls less 1.05 of eager's, in eager steps: promised is at most 30
    last third   of the calls: captured to eager; promised is at most 1.03
    recorded     how many calls were recorded: as warm-ups, and as programs

Each stream is a step that does one thing which keeps a program from being replayed, on a stack of blocks under FSDP2
(`--unsharded`: without it, so that eager does little in Python), trained by AdamW, on gloo. The eager and the captured
step are twins and run in turn; their results are compared at every call. CPU time of the thread, on rank 0. The promise
is kept in units, see Note [The ledger] in `functionalize/step/policy.py`: these are the times that it means.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.machine import machine

now = time.thread_time


class Trainer:
    """A stack of blocks, its optimizer, and state that streams move. `losses` turns the mean square into the loss."""

    def __init__(self, layers: int, width: int, is_sharded: bool = True) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        for block in blocks if is_sharded else ():
            fully_shard(block)
        self.model.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.model.register_buffer("average", torch.zeros(()))
        if is_sharded:
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.n, self.mode, self.kept, self.table = 0, "a", {}, {}  # type: ignore[var-annotated]
        self.ring = torch.zeros(12, width)

    def update(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss_of(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


Step = Callable[[Trainer, Tensor], Tensor]
STREAMS: dict[str, Step] = {}
INPUTS: dict[str, Callable[[int, int], Tensor]] = {}


def stream(step: Step) -> Step:
    """Add a stream by the name of its step."""
    STREAMS[step.__name__] = step
    return step


def batch(i: int, width: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(i))


@stream
def plain(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x))


@stream
def counter_as_key(t: Trainer, x: Tensor) -> Tensor:
    t.n += 1
    return t.update(t.table.get(t.n, 1.0) * t.loss_of(x))


@stream
def counter_in_buffer_as_key(t: Trainer, x: Tensor) -> Tensor:
    t.model.pointer += 1
    return t.update(t.table.get(int(t.model.pointer), 1.0) * t.loss_of(x))


def _at_pointer(t: Trainer, x: Tensor, positions: int) -> Tensor:
    at = int(t.model.pointer)
    t.ring[at] = x[0]
    t.model.pointer += 1
    t.model.pointer %= positions
    return t.update(t.loss_of(x) + t.ring.square().mean())


@stream
def pointer_of_12_positions(t: Trainer, x: Tensor) -> Tensor:
    return _at_pointer(t, x, 12)


@stream
def pointer_of_2_positions(t: Trainer, x: Tensor) -> Tensor:
    return _at_pointer(t, x, 2)


@stream
def branch_that_flips(t: Trainer, x: Tensor) -> Tensor:
    loss = t.loss_of(x)
    if x.sum() * (1 + 0 * loss.detach()) > 0:
        loss = loss * 2
    return t.update(loss)


@stream
def value_of_a_loss_as_key(t: Trainer, x: Tensor) -> Tensor:
    loss = t.loss_of(x)
    return t.update(loss * t.table.get(loss.item(), 1.0))


@stream
def float_of_a_draw(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x) * float(np.random.beta(0.8, 0.8)))


@stream
def batch_drawn_inside(t: Trainer, x: Tensor) -> Tensor:
    rows = torch.randint(len(x), (4,), generator=t.table.setdefault("g", torch.Generator()))
    return t.update(t.loss_of(torch.stack([x[i] for i in rows])))


@stream
def width_drawn(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x[: random.randint(1, len(x))]))


@stream
def seed_of_each_call(t: Trainer, x: Tensor) -> Tensor:
    torch.manual_seed(t.n)
    t.n += 1
    return t.update(t.loss_of(x + torch.randn_like(x)))


@stream
def running_id_as_key(t: Trainer, x: Tensor) -> Tensor:
    t.n += 1
    t.kept[t.n] = x.mean()
    return t.update(t.loss_of(x) + t.kept.pop(t.n))


@stream
def text_of_a_counter(t: Trainer, x: Tensor) -> Tensor:
    t.n += 1
    return t.update(t.loss_of(x) * t.table.get(f"step {t.n}", 1.0))


@stream
def mode_that_is_another_text(t: Trainer, x: Tensor) -> Tensor:
    t.n += 1
    t.mode = f"call {t.n}"
    return t.update(t.loss_of(x) * len(t.mode[:4]))


@stream
def number_of_the_caller(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x) * t.kept["weight"])


@stream
def type_of_a_number(t: Trainer, x: Tensor) -> Tensor:
    t.n += 1
    scale = t.n if type(t.n) is float else 1
    return t.update(t.loss_of(x) * scale)


@stream
def clock_as_key(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x) * t.table.get(time.time(), 1.0))


@stream
def eight_lengths(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x))


@stream
def a_length_per_call(t: Trainer, x: Tensor) -> Tensor:
    return t.update(t.loss_of(x))


@stream
def train_and_evaluate(t: Trainer, x: Tensor) -> Tensor:
    t.n = (t.n + 1) % 8
    if t.n == 0:
        with torch.no_grad():
            return t.loss_of(x)
    return t.update(t.loss_of(x))


@stream
def exception_at_every_fifth_call(t: Trainer, x: Tensor) -> Tensor:
    t.n = (t.n + 1) % 5
    if t.n == 0:
        raise KeyError("no such batch")
    return t.update(t.loss_of(x))


INPUTS["eight_lengths"] = lambda i, width: batch(i, width, 4 + i * 5 % 8)
INPUTS["a_length_per_call"] = lambda i, width: batch(i, width, 4 + i)


@dataclass
class Measured:
    """Times of twins, call by call, in seconds."""

    eager: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    recorded: str = ""
    replays: int = 0

    @property
    def step(self) -> float:
        return statistics.median(self.eager)

    @property
    def beyond(self) -> float:
        """The most that the captured step was behind at the end of any call, in eager steps."""
        pairs = zip(self.captured, self.eager, strict=True)
        behind = itertools.accumulate(ours - 1.05 * eager for ours, eager in pairs)
        return max(behind) / self.step

    @property
    def last_third(self) -> float:
        start = len(self.eager) * 2 // 3
        return sum(self.captured[start:]) / sum(self.eager[start:])


@dataclass
class Draws:
    """The generators of a twin, put in place for its calls: both draw the same numbers."""

    python: Any = field(default_factory=lambda: random.Random(0).getstate())
    numpy: Any = field(default_factory=lambda: np.random.RandomState(0).get_state())
    torch: Tensor = field(default_factory=lambda: torch.Generator().get_state())

    def timed(self, call: Callable[[], Tensor]) -> tuple[Tensor | None, float]:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        begin, result = now(), None
        try:
            result = call()
        except KeyError:
            pass
        seconds = now() - begin
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch = torch.get_rng_state()
        return result, seconds


def measured(name: str, calls: int, layers: int, width: int, is_sharded: bool = True) -> Measured:
    function, found = STREAMS[name], Measured()
    twins = [Trainer(layers, width, is_sharded) for _ in range(2)]
    eagerly, step = (
        partial(function, twins[0]),
        fz.capture(partial(function, twins[1]), on_uncapturable="eager"),
    )
    draws = [Draws(), Draws()]
    for i in range(calls):
        x = INPUTS.get(name, batch)(i, width)
        for twin in twins:
            twin.kept["weight"] = 1 + i
        expected, eager = draws[0].timed(partial(eagerly, x))
        result, captured = draws[1].timed(partial(step, x))
        if (expected is None) != (result is None) or not (
            expected is None or torch.equal(expected, result)  # type: ignore[arg-type]
        ):
            raise AssertionError(f"call {i} of {name}: {result} is not {expected}")
        found.eager.append(eager)
        found.captured.append(captured)
    stats = step.stats
    found.recorded, found.replays = f"{stats.warmups} + {stats.captures}", stats.replays
    return found


def lines_of(options: argparse.Namespace) -> Iterator[str]:
    world = dist.get_world_size()
    for name in options.only or STREAMS:
        is_sharded = not options.unsharded
        found = measured(name, options.calls, options.layers, options.width, is_sharded)
        yield (
            f"{name:32} {world:5} {found.step * 1e3:7.2f} {found.beyond:8.1f} {found.last_third:10.2f} "
            f"{found.recorded:>9} {found.replays:8}"
        )


def run(rank: int, world: int, path: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=world)
    measured("plain", 8, 1, 8)  # what is imported and made once is no step's
    for line in lines_of(options):
        if rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STREAMS)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--unsharded", action="store_true")
    options = parser.parse_args()
    print(machine())
    print(f"{'stream':32} ranks  eager ms   beyond last third  recorded  replays")
    for world in options.ranks:
        path = tempfile.mktemp()
        mp.spawn(run, (world, path, options), nprocs=world)


if __name__ == "__main__":
    main()
