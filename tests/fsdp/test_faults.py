"""A fault in an FSDP2 step on two gloo ranks: whatever state eager is left in, the captured model is in it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import functionalize as fz
from functionalize.frontend.fsdp import FSDPState, fsdp_states
from tests.faults import Trap, Tripwire, fault_of, interrupt, raising, surroundings
from tests.fsdp.models import Net, wrapped
from tests.fsdp.twins import (
    differences,
    flat,
    grown_storages,
    hidden_of,
    plain_parts,
    state_of,
    unequal,
)
from tests.ranks import run_on_ranks

WARM_UP, LIVE, AGAIN, OTHER = 0, 1, 6, 6  # calls; from OTHER on, batches have other rows


def even() -> Net:
    """Of sizes that divide, so that the ranks run the same ops."""
    return Net(classes=4)


class Twin:
    """One of two equal models under FSDP2, with a place for every fault."""

    def __init__(self, **options: Any) -> None:
        self.trap, self.drawn = Trap(), torch.get_rng_state()
        self.model, self.optimizer = wrapped(make=even, **options)()
        trap, block = self.trap, self.model.blocks[1]
        block.a.register_forward_hook(lambda module, args, out: trap("module hook"))
        block.register_forward_hook(lambda module, args, out: self._watch(out))
        self.model.head.register_full_backward_hook(lambda *given: trap("head backward hook"))
        self.optimizer.register_step_pre_hook(lambda *given: trap("optimizer"))

    def _watch(self, out: Tensor) -> None:
        """Before FSDP2's own hooks of the backward, in the block's forward."""
        self.trap("after a block")
        if out.requires_grad:
            out.register_hook(lambda grad: self.trap("tensor hook"))

    def step(self, x: Tensor, y: Tensor, reads: bool = False) -> Any:
        out = self.model(x)
        self.trap("between")
        if out.requires_grad:
            out.register_hook(lambda grad: self._queue())
        loss = F.mse_loss(out, y)
        loss.backward()
        self.trap("after the backward")
        self.optimizer.step()
        self.trap("end")
        self.optimizer.zero_grad()
        return loss.item() if reads else loss.detach()

    def _queue(self) -> None:
        Variable._execution_engine.queue_callback(lambda: self.trap("callback"))

    def recover(self) -> None:
        """What a user can do: forget the gradients, and let FSDP2 forget the step."""
        self.optimizer.zero_grad()
        for state in fsdp_states(self.model):
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None and hasattr(group, "_reset_iter_state"):
                    group._reset_iter_state()
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()


PLACES = (
    "module hook",
    "after a block",
    "between",
    "head backward hook",
    "tensor hook",
    "callback",
    "after the backward",
    "optimizer",
    "end",
)


def python_state(model: nn.Module) -> dict[str, str]:
    """FSDP2's flags; objects by their types."""
    state = FSDPState.now([model])
    return {
        f"{i}: {place.name}": str(value) if isinstance(value, (bool, int, str)) else type(value).__name__
        for i, (place, value) in enumerate(zip(state.places, state.values, strict=True))
    }


class Pair:
    """A model that is trained eagerly, and its captured twin."""

    def __init__(self, **options: Any) -> None:
        self.eager, self.ours = Twin(**options), Twin(**options)
        self.step = fz.capture(self.ours.step)
        self.found: list[str] = []

    def batch(self, i: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
        rows = rows or (6 if i >= OTHER else 4)
        g = torch.Generator().manual_seed(100 * i + dist.get_rank())
        return torch.randn(rows, 8, generator=g), torch.randn(rows, 4, generator=g)

    def call(self, i: int, rows: int | None = None, reads: bool = False) -> str | None:
        """Step `i` of both; what differs goes to `found`. Returns what both raised."""
        raised, results = [], []
        for twin, step in ((self.eager, self.eager.step), (self.ours, self.step)):
            torch.set_rng_state(twin.drawn)
            args = (*self.batch(i, rows), *([True] if reads else []))
            with surroundings(self.eager.optimizer, self.ours.optimizer):
                raised.append(fault_of(lambda: results.append(step(*args))))  # noqa: B023
            twin.drawn = torch.get_rng_state()
        if raised[0] != raised[1]:
            self.found.append(f"step {i}: raised {raised[1]}, eager raised {raised[0]}")
        elif raised[0] is None:
            self.found += differences(i, flat(results[1]), flat(results[0]))
            self.found += unequal(i, plain_parts(results[1]), plain_parts(results[0]))
        self.compare(i)
        return raised[0]

    def compare(self, i: int) -> None:
        mine, eager = self.ours, self.eager
        self.found += differences(
            i, state_of(mine.model, mine.optimizer), state_of(eager.model, eager.optimizer)
        )
        self.found += differences(i, hidden_of(mine.model), hidden_of(eager.model))
        self.found += unequal(i, python_state(mine.model), python_state(eager.model))
        if grown_storages(mine.model) != grown_storages(eager.model):
            self.found.append(f"step {i}: {grown_storages(mine.model)} are grown")


# -- on the ranks ----------------------------------------------------------------------------------


def faults(where: str, how: str, recovers: bool) -> tuple[list[str], list[str | None], int]:
    """The same fault on both ranks in the warm-up, in the recording to keep, and in one more."""
    pair, raised = Pair(), []
    error = interrupt if how == "interrupt" else raising(ValueError("no"))
    for i in range(AGAIN + 5):
        faulty = i in (WARM_UP, LIVE, AGAIN)
        for twin in (pair.eager, pair.ours):
            if faulty:
                twin.trap.arm(where, error)
        raised.append(pair.call(i))
        if faulty:
            for twin in (pair.eager, pair.ours):
                twin.trap.disarm()
                if recovers:
                    twin.recover()
            pair.compare(i)
    return pair.found, raised, pair.step.stats.replays


def faults_in_replays() -> tuple[list[str], int, int]:
    """Memory runs out at every fourth op of the program in turn, on both ranks; nothing was changed."""
    pair = Pair()
    for i in range(3):
        pair.call(i)
    world, step = pair.ours, pair.step
    program = step.program
    assert program is not None

    def state() -> dict[str, Tensor]:
        held = {**state_of(world.model, world.optimizer), **hidden_of(world.model)}
        return {**held, "rng": torch.get_rng_state()}

    before = {name: tensor.clone() for name, tensor in state().items()}
    flags, x = python_state(world.model), pair.batch(3)
    ops = sum(isinstance(n.target, torch._ops.OpOverload) for n in program.graph.nodes) + 1
    failed = 0
    for position in [*range(0, ops, 4), ops - 1]:
        error = torch.OutOfMemoryError("no")
        with surroundings(world.optimizer), Tripwire(position, raising(error)):
            failed += fault_of(step, *x) == "OutOfMemoryError: no"
        pair.found += differences(position, state(), before)
        pair.found += unequal(position, python_state(world.model), flags)
        assert grown_storages(world.model) == []
    for i in range(3, 9):
        assert pair.call(i) is None
    return pair.found, failed - len(range(0, ops, 4)) - 1, step.stats.replays


def other_shapes_on_one_rank(reads: bool) -> tuple[list[str], int, int]:
    """From call 4 on, the second rank's batches have other rows at every other call."""
    pair = Pair()
    for i in range(10):
        other = dist.get_rank() == 1 and i in (4, 6, 7)
        pair.call(i, rows=5 if other else 4, reads=reads)
    return pair.found, pair.step.stats.replays, pair.step.stats.captures


# -- the tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", PLACES)
def test_a_fault_while_recording(where: str) -> None:
    """After it, the user lets FSDP2 forget the step."""
    for found, raised, replays in run_on_ranks(faults, where, "error", True):
        assert found == []
        assert [raised[i] for i in (WARM_UP, LIVE, AGAIN)] == ["ValueError: no"] * 3
        assert replays >= 2, raised


@pytest.mark.parametrize("where", ["after a block", "tensor hook"])
def test_a_fault_that_nobody_clears_up_after(where: str) -> None:
    """What eager does from then on, errors included, the captured step does."""
    for found, raised, _ in run_on_ranks(faults, where, "error", False):
        assert found == []
        assert raised[WARM_UP] == "ValueError: no"


def test_ctrl_c_while_recording() -> None:
    for found, raised, replays in run_on_ranks(faults, "tensor hook", "interrupt", True):
        assert found == []
        assert raised[LIVE] == "KeyboardInterrupt: "
        assert replays >= 2


def test_an_op_that_fails_in_a_replay() -> None:
    for found, missing, replays in run_on_ranks(faults_in_replays):
        assert found == []
        assert missing == 0
        assert replays >= 4


@pytest.mark.parametrize("reads", [False, True], ids=["", "reading numbers"])
def test_one_rank_replays_and_the_other_records(reads: bool) -> None:
    (first, replays, captures), (second, others, more) = run_on_ranks(
        other_shapes_on_one_rank, reads
    )
    assert first == second == []
    assert replays >= others >= 3
    assert more == 2
