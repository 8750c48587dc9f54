"""Whatever changes around a step between its calls: where the fast test holds, every guard holds, for the same inputs.

Two twins are changed alike at random before every call; one is captured. Every step also equals eager bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.ir.guards import Miss
from functionalize.ir.inputs import Call
from functionalize.program.executable import Executable
from tests.fsdp.twins import differences, local, state_of
from tests.ranks import run_on_ranks

CALLS = 40
Change = Callable[["Script"], Any]


class Script:
    """A model, its optimizer and a step that keeps gradients until the next one."""

    def __init__(self, is_sharded: bool) -> None:
        torch.manual_seed(0)
        self.model = Model()
        if is_sharded:
            for block in (self.model.a, self.model.b):
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=True)
        self.rows = 4
        self.handle: Any = None

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out, self.factor = nn.Linear(6, 4), 1.5
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.a(x).relu(), 0.1, self.training)
        return (self.out(self.b(x).tanh()) * self.factor + self.shift).float()


def nothing(script: Script) -> None: ...


def new_float(script: Script) -> None:
    script.model.factor = float(repr(script.model.factor))


def set_factor(script: Script) -> None:
    script.model.factor = 4.0 - script.model.factor


def evaluate(script: Script) -> None:
    script.model.train(not script.model.training)


def freeze(script: Script) -> None:
    script.model.out.bias.requires_grad_(not script.model.out.bias.requires_grad)


def hook(script: Script) -> None:
    script.model.out.register_forward_hook(lambda module, args, out: out * 0.5)


def rate(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] *= 0.9


def decay(script: Script) -> None:
    script.optimizer.param_groups[0]["weight_decay"] += 0.01


def decay_renewed(script: Script) -> None:
    group = script.optimizer.param_groups[0]
    group["weight_decay"] = float(repr(group["weight_decay"]))


def load_optimizer(script: Script) -> None:
    script.optimizer.load_state_dict(copy.deepcopy(script.optimizer.state_dict()))


def load_model(script: Script) -> None:
    script.model.load_state_dict(copy.deepcopy(script.model.state_dict()))


def forget_gradients(script: Script) -> None:
    script.optimizer.zero_grad()


def new_gradients(script: Script) -> None:
    for p in script.model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()


def replace_state(script: Script) -> None:
    state = script.optimizer.state.get(script.model.out.weight)
    if state:
        state["exp_avg"] = state["exp_avg"].clone()


def move_state(script: Script) -> None:
    state = script.optimizer.state.get(script.model.out.weight)
    if state:
        data = local(state["exp_avg_sq"])
        data.data = data.data.clone()


def replace_buffer(script: Script) -> None:
    script.model.shift = script.model.shift.clone()


def change_dtype(script: Script) -> None:
    shift: Any = script.model.shift
    shift.data = shift.data.to(torch.float32 if shift.dtype is torch.float64 else torch.float64)


def change_length(script: Script) -> None:
    script.rows = 9 - script.rows


EVERYWHERE: list[Change] = [
    nothing, new_float, set_factor, evaluate, hook, rate, decay, decay_renewed, load_optimizer, load_model,
    forget_gradients, new_gradients, replace_state, move_state, replace_buffer, change_dtype, change_length,
]  # fmt: skip


# -- without shards: what a user may do to plain parameters ------------------------------------------


def replace_parameter(script: Script) -> None:
    script.model.a.bias = nn.Parameter(script.model.a.bias.detach() + 1)


def move_data(script: Script) -> None:
    script.model.a.weight.data = script.model.a.weight.data.clone()


def change_stride(script: Script) -> None:
    weight = script.model.b.weight
    weight.data = (
        weight.data.t().contiguous().t() if weight.is_contiguous() else weight.data.clone()
    )


def change_offset(script: Script) -> None:
    weight = script.model.b.weight
    weight.data = torch.cat([torch.zeros(3), weight.data.flatten()])[3:].view(6, 6)


def grow_storage(script: Script) -> None:
    storage = script.model.b.bias.untyped_storage()
    storage.resize_(storage.nbytes() + 64)


def share_storage(script: Script) -> None:
    a, b = script.model.a.weight, script.model.b.weight
    b.data = a.data if b.data_ptr() != a.data_ptr() else b.data.clone()


def tie(script: Script) -> None:
    script.model.b.weight = script.model.a.weight


def swap_modules(script: Script) -> None:
    script.model.a, script.model.b = script.model.b, script.model.a


def swap_in_table(script: Script) -> None:
    modules = script.model._modules
    modules["a"], modules["b"] = modules["b"], modules["a"]


def hook_a_parameter(script: Script) -> None:
    if script.handle is None:
        script.handle = script.model.out.weight.register_hook(lambda gradient: gradient * 2)
    else:
        script.handle.remove()
        script.handle = None


def reorder_group(script: Script) -> None:
    script.optimizer.param_groups[0]["params"].reverse()


PLAIN: list[Change] = [
    freeze, replace_parameter, move_data, change_stride, change_offset, grow_storage, share_storage, tie,
    swap_modules, swap_in_table, reorder_group, hook_a_parameter,
]  # fmt: skip


# -- with shards: what FSDP2 has methods for ---------------------------------------------------------


def keep_unsharded(script: Script) -> None:
    script.model.a.set_reshard_after_backward(False)  # type: ignore[operator]


def reshard(script: Script) -> None:
    script.model.a.set_reshard_after_backward(True)  # type: ignore[operator]
    script.model.a.reshard()  # type: ignore[operator]


def unshard(script: Script) -> None:
    script.model.b.unshard()  # type: ignore[operator]


def prefetch(script: Script) -> None:
    script.model.a.set_modules_to_forward_prefetch([script.model.b])  # type: ignore[operator]


def divide(script: Script) -> None:
    script.model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    script.model.set_gradient_divide_factor(3.0)  # type: ignore[operator]


def move_shards(script: Script) -> None:
    script.model._apply(torch.clone)


SHARDED: list[Change] = [keep_unsharded, reshard, unshard, prefetch, divide, move_shards]


# -- the law -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked(seen: Counter[str]) -> Iterator[None]:
    """Whenever a program looks for its inputs, compare the fast way with the slow one."""
    known = Executable.known

    def both(program: Executable, leaves: Any, asks_numbers_first: bool = False) -> Any:
        last = program._known._last
        fast = last.repeated(leaves) if last is not None else None
        slow = program.resolve_slowly(leaves)
        seen["fast"] += isinstance(fast, Call)
        seen["slow"] += fast is None and isinstance(slow, Call)
        if isinstance(fast, Miss):
            assert isinstance(slow, str), f"a number is another one by the fast test: {fast}"
        elif fast is not None:
            assert isinstance(slow, Call), f"the fast test holds, but {slow}"
            for spec, a, b in zip(program.inputs, fast.inputs, slow.inputs, strict=True):
                is_number = type(spec.source).__name__ in ("HyperparameterNumber", "PlaceNumber")
                same = a is b or (is_number and a.dtype == b.dtype and a.equal(b))
                assert same, f"another {spec.name}"
        found = known(program, leaves, asks_numbers_first)
        if asks_numbers_first and isinstance(found, Miss):
            assert isinstance(slow, str), f"a number alone is asked: {found}"
        return found

    Executable.known = both  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executable.known = known  # type: ignore[method-assign]


def check(seed: int, is_sharded: bool) -> Counter[str]:
    """Train two twins, one captured, under the changes of this seed; what was seen."""
    chosen, seen = random.Random(seed), Counter[str]()
    eager, ours = Script(is_sharded), Script(is_sharded)
    captured = fz.capture(ours.step, on_uncapturable="eager", audit=False, allowance=None)
    changes = EVERYWHERE + (SHARDED if is_sharded else PLAIN)
    with checked(seen):
        for call in range(CALLS):
            change = chosen.choice(changes) if call > 4 and chosen.random() < 0.4 else nothing
            change(eager), change(ours)
            rank = dist.get_rank() if is_sharded else 0
            generator = torch.Generator().manual_seed(call * 2 + rank)
            x = torch.randn(eager.rows, 6, generator=generator)
            torch.manual_seed(call)
            expected = eager.step(x)
            torch.manual_seed(call)
            actual = captured(x)
            where = f"seed {seed}, call {call}, after {change.__name__}"
            assert torch.equal(expected, actual), where
            before, after = (state_of(s.model, s.optimizer) for s in (eager, ours))
            assert not differences(call, after, before), where
    seen["replays"] += captured.stats.replays
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_the_fast_test_is_sound_without_shards(seed: int) -> None:
    seen = check(seed, False)
    assert seen["fast"] > CALLS / 4 and seen["slow"], seen


def _on_a_rank(seeds: range) -> list[Counter[str]]:
    return [check(seed, True) for seed in seeds]


@pytest.mark.long
def test_the_fast_test_is_sound_with_shards() -> None:
    for seen in run_on_ranks(_on_a_rank, range(3), world=2)[0]:
        assert seen["fast"] > CALLS / 4 and seen["slow"], seen
