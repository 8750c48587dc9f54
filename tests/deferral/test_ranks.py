"""A Llama under FSDP2 on two ranks, trained in `fz.lazy` by a loop without a step function: bit for bit as eager."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import functionalize as fz
from functionalize.deferral.lazy import Lazy
from functionalize.deferral.runs import Runs
from tests.deferral.eagerly import image, poisoned
from tests.fsdp.sharded import build_llama
from tests.fsdp.twins import state_of
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long


class Run(NamedTuple):
    """What a training run leaves."""

    losses: list[Any]
    state: Any
    generator: Any


def batches(rank: int, steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for i in range(steps):
        yield torch.randint(0, 64, (2, 8 if i % 7 else 6), generator=generator)


INTERRUPTED = 5  # the step that Ctrl-C ends


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is Python's own inside, whatever it does in these processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(context: Any) -> None:
    """Ctrl-C on both ranks: on the first between two lines, on the second while what waits runs."""
    if isinstance(context, Lazy) and dist.get_rank():
        run = Runs.run

        def interrupted(self: Runs, stream: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return run(self, stream)

        with mock.patch.object(Runs, "run", interrupted):
            context.barrier()
    signal.raise_signal(signal.SIGINT)


def trained(
    context: AbstractContextManager[Any], looks: int | None, steps: int, by_calls: Any = None
) -> Run:
    """Train, with Ctrl-C in between. looks: a seed of the places at which this rank reads a loss; None: it reads none.

    by_calls: the `fz.lazy` of which the model and the optimizer are calls.
    """
    model, optimizer = build_llama()
    call: Any = model if by_calls is None else by_calls.module(model)
    steps_of: Any = optimizer if by_calls is None else by_calls.optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    chance = random.Random(looks)
    losses = []
    stream = enumerate(batches(dist.get_rank(), steps))

    def train() -> None:
        for i, tokens in stream:
            try:
                loss = call(input_ids=tokens, labels=tokens).loss
                if looks is not None and chance.random() < 0.3:
                    loss.item()
                if i == 4:
                    raise ValueError("between the forward and the backward")
                loss.backward()
                if i == INTERRUPTED:
                    interrupt(context)
                if looks is not None and chance.random() < 0.3:
                    str(next(model.parameters()).grad)
                if i % 3 == 2:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps_of.step()
            except ValueError:
                model.zero_grad()
                losses.append(loss.detach())
                # As in eager, FSDP2 needs a backward to reshard.
                call(input_ids=tokens, labels=tokens).loss.backward()
            steps_of.zero_grad()
            scheduler.step()
            losses.append(loss.detach())
            if i % 6 == 3:
                model.eval()
                with torch.no_grad():
                    losses.append(call(input_ids=tokens, labels=tokens).loss)
                model.train()

    with ctrl_c(), contextlib.suppress(KeyboardInterrupt), context:
        train()
    optimizer.step()
    optimizer.zero_grad()
    with context:
        train()
    found = [image(loss) for loss in losses]
    state = {name: image(t) for name, t in state_of(model, optimizer).items()}
    return Run(found, state, image(torch.get_rng_state()))


class Verdict(NamedTuple):
    """What one rank saw. wrong: what differs from eager. compiles: programs made, after each run."""

    wrong: list[str]
    compiles: list[int]
    text: str


def lazy_and_eager(runs: int, steps: int) -> Verdict:
    """Compare `runs` lazy runs with an eager one; the ranks look at different places, in each run at the same."""
    eager = trained(nullcontext(), None, steps)
    lazy, wrong, compiles = fz.lazy(), [], []
    for run in range(runs):
        with poisoned():
            mine = trained(lazy, 1 + dist.get_rank(), steps)
        wrong += [f"{run}: {n}" for n in Run._fields if getattr(mine, n) != getattr(eager, n)]
        compiles.append(lazy._runs.compiles)
    return Verdict(wrong, compiles, lazy.explain())


def test_a_loop_without_a_step_function(request: pytest.FixtureRequest) -> None:
    """With exceptions and evaluation in between, whichever rank looks where; no program is made twice."""
    every = request.config.getoption("--fuzz-long")
    for wrong, compiles, text in run_on_ranks(lazy_and_eager, *((3, 20) if every else (1, 8))):
        assert wrong == [], text
        assert compiles[0] > 5, text
        assert compiles[2:] == compiles[1:2], text


def by_calls_and_eager(steps: int) -> tuple[list[str], list[Any], int, int, str]:
    """Compare a run by calls with an eager one; the ranks look at different places.

    What differs; the looks by kind; iterations that ran as one captured step; programs made; the text.
    """
    eager = trained(nullcontext(), None, steps)
    lazy = fz.lazy(passes="default")
    with poisoned():
        mine = trained(lazy, 1 + dist.get_rank(), steps, lazy)
    wrong = [name for name in Run._fields if getattr(mine, name) != getattr(eager, name)]
    module, optimizer = lazy._calls
    joint = optimizer._joint(module._forward)[0].step.stats
    made = joint.captures + module._captured.stats.captures + optimizer._alone.stats.captures
    return wrong, sorted(lazy._mode.looked.items()), joint.replays, made, lazy.explain()


def test_a_loop_by_calls(request: pytest.FixtureRequest) -> None:
    """The same with the model and the optimizer as calls; some ranks run them apart while others run them together."""
    every = request.config.getoption("--fuzz-long")
    first, second = run_on_ranks(by_calls_and_eager, 20 if every else 14)
    for wrong, _, replays, made, text in (first, second):
        assert wrong == [], text
        assert replays >= 1, text
        # two lengths in training and one in evaluation, each once alone and once with the step; the step alone
        assert made <= 8, text
    assert first[1] != second[1] or first[2] != second[2]
