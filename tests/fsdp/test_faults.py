"""A fault in an FSDP2 step on two gloo ranks: whatever state eager is left in, the captured model is in it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import functionalize as fz
from functionalize.fsdp.objects import fsdp_states
from functionalize.fsdp.python_state import FSDPState
from tests.allowance import ample_allowance
from tests.faults import Trap, Tripwire, fault_of, interrupt, ops_of_replay, raising, surroundings
from tests.fsdp.models import Net, wrapped
from tests.fsdp.twins import (
    differences,
    flat,
    grown_storages,
    hidden_of,
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

    def step(self, x: Tensor, y: Tensor) -> Tensor:
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
        return loss.detach()

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
        f"{i}: {place.name}": str(value)
        if isinstance(value, (bool, int, str))
        else type(value).__name__
        for i, (place, value) in enumerate(zip(state.places, state.values, strict=True))
    }


class Pair:
    """A model that is trained eagerly, and its captured twin."""

    def __init__(self, passes: str | None = None, **options: Any) -> None:
        self.eager, self.ours = Twin(**options), Twin(**options)
        self.step = fz.capture(self.ours.step, passes=passes)
        self.found: list[str] = []

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        rows = 6 if i >= OTHER else 4
        g = torch.Generator().manual_seed(100 * i + dist.get_rank())
        return torch.randn(rows, 8, generator=g), torch.randn(rows, 4, generator=g)

    def call(self, i: int) -> str | None:
        """Step `i` of both; what differs goes to `found`. Returns what both raised."""
        raised, results = [], []
        for twin, step in ((self.eager, self.eager.step), (self.ours, self.step)):
            torch.set_rng_state(twin.drawn)
            args = self.batch(i)
            with surroundings(self.eager.optimizer, self.ours.optimizer):
                raised.append(fault_of(lambda: results.append(step(*args))))  # noqa: B023
            twin.drawn = torch.get_rng_state()
        if raised[0] != raised[1]:
            self.found.append(f"step {i}: raised {raised[1]}, eager raised {raised[0]}")
        elif raised[0] is None:
            self.found += differences(i, flat(results[1]), flat(results[0]))
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


@ample_allowance()
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


@ample_allowance()
def faults_in_replays() -> tuple[list[str], int, int]:
    """Memory runs out at every fourth op of the program in turn, on both ranks; nothing was changed.

    Of a program that writes nothing in place.
    """
    pair = Pair(passes="")
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
    ops = ops_of_replay(program) + 1
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


def _forward_without_gradients(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 8))


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "no gradient sync": (
        lambda m: m.set_requires_gradient_sync(False),
        lambda m: m.set_requires_gradient_sync(True),
        "reduce_grads is False, was True",
    ),
    "no reshard": (
        lambda m: m.set_reshard_after_backward(False),
        lambda m: (m.set_reshard_after_backward(True), m.reshard()),
        "reshard_after_backward is False, was True",
    ),
    "unsharded": (lambda m: m.unshard(), lambda m: None, "_sharded_state is UNSHARDED"),
    "evaluated": (_forward_without_gradients, lambda m: None, "_sharded_state is UNSHARDED"),
}


@ample_allowance()
def changes() -> tuple[list[str], list[tuple[str, str, bool]]]:
    """FSDP2's state is another one for one call, then as it was again."""
    pair, seen = Pair(), []
    for i in range(3):
        pair.call(i)
    for name, (change, undo, text) in CHANGES.items():
        replays, failures = pair.step.stats.replays, len(pair.step.stats.guard_failures)
        for twin in (pair.eager, pair.ours):
            change(twin.model)
        assert (name, pair.call(3)) == (name, None)
        told = " ".join(pair.step.stats.guard_failures[failures:])
        seen.append((name, told if text not in told else text, pair.step.stats.replays == replays))
        for twin in (pair.eager, pair.ours):
            undo(twin.model)
        for i in range(3):
            assert pair.call(i) is None
    return pair.found, seen


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


def test_fsdp_in_another_state() -> None:
    """The guard says what differs, nothing is replayed, and the call is right."""
    for found, seen in run_on_ranks(changes):
        assert found == []
        assert seen == [(name, text, True) for name, (_, _, text) in CHANGES.items()]
