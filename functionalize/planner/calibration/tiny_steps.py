"""What the host adds to a step: measured on tiny models, whose kernels take little time.

    steps = TinySteps.made("cpu", DEPTHS)      built and captured once
    host = host_of(clock, machine, steps)      a `Host`, from their seconds less what the model says of them

    forward, backward     an eager tiny transformer without FSDP2: what a phase takes longer than its kernels
    gather, reduce        the same under `fully_shard`: what a phase takes longer than that
    optimizer             AdamW (fused) on its sharded parameters
    node, call            replays of small views and sums, a few and many: the seconds that each node adds, and what is
                          left of the few
    collective            replays of the deep transformer, with `passes="default"`: what that under `fully_shard` takes
                          longer than that without, so that what the model misses of kernels cancels out

Each is divided by what the model counts of it: how much longer the modelled phase is, if one costs a second more.

The models are wide enough that parameters and optimizer state displace what Python needs from the caches, as in
training: from models of width 32, whose data stay there, the host's part came out too small on a CPU.

Must be called by all ranks of the process group. Ops, phases and collectives are those of the captured programs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from functionalize._compat.autograd import BACKWARD
from functionalize.cost.machines.efficiency import Host
from functionalize.cost.machines.machine import Machine
from functionalize.entry import capture
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.calibration.timing import Clock
from functionalize.planner.time.step_time import step_time
from functionalize.program.program import Program

_WIDTH, _HEADS, _TOKENS = 160, 4, 32
DEPTHS = (4, 6)
_FEW = 40  # of the few views
STEPS = 100  # a second or two: how long ranks wait for each other varies from one tenth to the next


class _Block(nn.Module):
    """A transformer block, small enough that its kernels take a small part of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mixing, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixing(self.norm1(x)).unflatten(-1, (3, _HEADS, _WIDTH // _HEADS))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        hidden = nn.functional.gelu(self.up(self.norm2(x)))
        found: Tensor = x + self.down(hidden)
        return found


class _Step(NamedTuple):
    """What a tiny step is called with. They are arguments, since the closures of this package are not searched."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    x: Tensor


class _Tiny(NamedTuple):
    """A tiny step, its program, and the captured step if replays are measured."""

    step: tuple[Any, ...]
    program: Program
    captured: Any = None


class TinySteps(NamedTuple):
    """The tiny steps of a calibration.

    plain, sharded: eager, of a transformer without FSDP2 and with it. deep, deep_sharded: replays of the same, deeper.
    few, many: replays of views.
    """

    plain: _Tiny
    sharded: _Tiny
    deep: _Tiny
    deep_sharded: _Tiny
    few: _Tiny
    many: _Tiny

    @staticmethod
    def made(device: str, depths: tuple[int, int]) -> TinySteps:
        """Build and capture them. depths: layers of the eager and of the replayed transformers."""
        x = torch.zeros(4, 4, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TinySteps(
                _eager(device, depths[0], shards=False),
                _eager(device, depths[0], shards=True),
                _replay(_train, _step(device, depths[1], shards=False)),
                _replay(_train, _step(device, depths[1], shards=True)),
                _replay(_look, (x, _FEW)),
                _replay(_look, (x, 4 * _FEW)),
            )


def host_of(clock: Clock, machine: Machine, steps: TinySteps, runs: int = STEPS) -> Host:
    """The seconds that the host adds, on a machine whose kernels and collectives are measured already.

    runs: of each step.
    """
    plain, sharded = (_phase_seconds(clock, tiny, runs) for tiny in (steps.plain, steps.sharded))
    host = Host()
    for field, tiny, measured, phase in (
        ("forward", steps.plain, plain, FORWARD),
        ("backward", steps.plain, plain, BACKWARD),
        ("gather", steps.sharded, sharded, FORWARD),
        ("reduce", steps.sharded, sharded, BACKWARD),
        ("optimizer", steps.sharded, sharded, OPTIMIZER),
    ):
        known = _phase(tiny.program, phase, machine, host)
        count = _phase(tiny.program, phase, machine, _one_more(host, field)) - known
        seconds = max(measured[phase] - known, 0.0) / count if count else 0.0
        host = host._replace(**{field: seconds})
    left, nodes = [], []
    for tiny in (steps.few, steps.many):
        known = _modelled_replay(tiny.program, machine, host)
        left.append(_replay_seconds(clock, tiny, runs) - known)
        nodes.append(_modelled_replay(tiny.program, machine, _one_more(host, "node")) - known)
    call, node = line_of(nodes, left)
    host = host._replace(node=node, call=call)
    alone, together = (
        _replay_seconds(clock, tiny, runs) - _modelled_replay(tiny.program, machine, host)
        for tiny in (steps.deep, steps.deep_sharded)
    )
    program = steps.deep_sharded.program
    known = _modelled_replay(program, machine, host)
    count = _modelled_replay(program, machine, _one_more(host, "collective")) - known
    return host._replace(collective=max(together - alone, 0.0) / count)


def line_of(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(summand, slope) of the line nearest to two points, of those of which neither is negative."""
    slope = (ys[1] - ys[0]) / (xs[1] - xs[0])
    summand = ys[0] - slope * xs[0]
    if slope >= 0 and summand >= 0:
        return summand, slope
    if slope < 0:
        return max(sum(ys) / 2, 0.0), 0.0
    return 0.0, max(sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs), 0.0)


def _step(device: str, layers: int, shards: bool) -> _Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(layers))).to(device)
    if shards:
        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    x = torch.randn(1, _TOKENS, _WIDTH, device=device)
    return _Step(model, optimizer, x)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _eager(device: str, layers: int, shards: bool) -> _Tiny:
    captured, other = (
        capture(_train, passes=(), audit=False, on_uncapturable="raise"),
        _step(device, layers, shards),
    )
    _settle(captured, other)
    return _Tiny(_step(device, layers, shards), _program_of(captured))


def _look(x: Tensor, count: int) -> Tensor:
    """A sum and a view of it, so many times."""
    for _ in range(count):
        x = (x + x).t()
    return x


def _replay(function: Callable[..., Any], step: tuple[Any, ...]) -> _Tiny:
    captured = capture(
        function, passes="default", audit=False, allowance=None, on_uncapturable="raise"
    )
    _settle(captured, step)
    return _Tiny(step, _program_of(captured), captured)


def _program_of(captured: Any) -> Program:
    program: Program | None = captured.program
    assert program is not None
    program.describe()
    return program


def _phase_seconds(clock: Clock, tiny: _Tiny, runs: int) -> Mapping[str, float]:
    """Seconds of the phases of an eager step."""
    step = _Step(*tiny.step)
    found: dict[str, list[float]] = {FORWARD: [], BACKWARD: [], OPTIMIZER: []}
    for i in range(-3, runs):
        dist.barrier()
        times = [time.perf_counter()]
        loss = step.model(step.x).sum()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        step.optimizer.step()
        step.optimizer.zero_grad()
        times.append(time.perf_counter())
        if i >= 0:
            for n, phase in enumerate(found):
                found[phase].append(times[n + 1] - times[n])
    return {phase: clock.noted(median(each)) for phase, each in found.items()}


def _replay_seconds(clock: Clock, tiny: _Tiny, runs: int) -> float:
    """Seconds of a replay."""
    found = []
    for i in range(-3, runs):
        dist.barrier()
        start = time.perf_counter()
        tiny.captured(*tiny.step)
        if i >= 0:
            found.append(time.perf_counter() - start)
    return clock.noted(median(found))


def _settle(captured: Any, step: tuple[Any, ...]) -> None:
    for _ in range(8):
        captured(*step)


def _one_more(host: Host, field: str) -> Host:
    """The same host, slower by a second for each of what `field` counts: the model is linear in it."""
    return host._replace(**{field: getattr(host, field) + 1.0})


def _phase(program: Program, phase: str, machine: Machine, host: Host) -> float:
    """Modelled seconds of a phase of an eager step."""
    modelled = step_time(program, replace(machine, host=host), streams="serial")
    return sum(each.seconds for each in modelled.phases if each.phase == phase)


def _modelled_replay(program: Program, machine: Machine, host: Host) -> float:
    """Modelled seconds of a replay."""
    return step_time(program, replace(machine, host=host), streams="serial", replay=True).seconds
