"""What the host adds to a step: measured on tiny models, whose kernels take little time.

    host = host_of(clock, machine)      a `Host`, from the seconds of tiny steps less what the model says of them

    forward, backward     an eager tiny transformer without FSDP2: what a phase takes longer than its kernels
    gather, reduce        the same under `fully_shard`: what a phase takes longer than that
    optimizer             AdamW (fused) on its sharded parameters
    node, call            replays of captures of two depths, with `passes="default"`: the seconds that each node adds,
                          and what is left of the shallow one

Each is divided by what the model counts of it: how much longer the modelled phase is, if one costs a second more.

The models are wide enough that parameters and optimizer state displace what Python needs from the caches, as in
training: from models of width 32, whose data stay there, the host's part came out too small on a CPU.

Must be called by all ranks of the process group. Ops, phases and collectives are those of the captured programs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from functionalize._compat.autograd import BACKWARD
from functionalize.calibration.timing import Clock
from functionalize.entry import capture
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planning.machines.efficiency import Host
from functionalize.planning.machines.machine import Machine
from functionalize.planning.time.step_time import step_time
from functionalize.program.program import Program

_WIDTH, _HEADS, _TOKENS = 160, 4, 32
DEPTHS = (2, 6)
_ROUNDS = 100  # a second or two of steps: how long ranks wait for each other varies from one tenth to the next


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


class _Parts(NamedTuple):
    """Seconds of the phases of an eager step, and the program that was captured of it."""

    seconds: Mapping[str, float]
    program: Program


def host_of(clock: Clock, machine: Machine, depths: tuple[int, int] = DEPTHS) -> Host:
    """The seconds that the host adds, on a machine whose kernels and collectives are measured already.

    depths: layers of the shallow and of the deep step.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, sharded = (_parts(clock, depths[0], shards) for shards in (False, True))
        replays = [_replayed(clock, layers) for layers in depths]
    host = Host()
    for field, parts, phase in (
        ("forward", plain, FORWARD),
        ("backward", plain, BACKWARD),
        ("gather", sharded, FORWARD),
        ("reduce", sharded, BACKWARD),
        ("optimizer", sharded, OPTIMIZER),
    ):
        known = _phase(parts.program, phase, machine, host)
        count = _phase(parts.program, phase, machine, _one_more(host, field)) - known
        seconds = max(parts.seconds[phase] - known, 0.0) / count if count else 0.0
        host = host._replace(**{field: seconds})
    left, nodes = [], []
    for seconds, program in replays:
        known = _replay(program, machine, Host())
        left.append(seconds - known)
        nodes.append(_replay(program, machine, Host(node=1.0)) - known)
    call, node = line_of(nodes, left)
    return host._replace(node=node, call=call)


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


def _parts(clock: Clock, layers: int, shards: bool) -> _Parts:
    step = _step(clock.device, layers, shards)
    found: dict[str, list[float]] = {FORWARD: [], BACKWARD: [], OPTIMIZER: []}
    for i in range(-3, _ROUNDS):
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
    seconds = {phase: clock.agreed(median(each)) for phase, each in found.items()}
    return _Parts(seconds, _program(_step(clock.device, layers, shards)))


def _program(step: _Step) -> Program:
    captured = capture(_train, audit=False)
    _settle(captured, step)
    assert captured.program is not None
    captured.program.describe()
    return captured.program


def _replayed(clock: Clock, layers: int) -> tuple[float, Program]:
    """Seconds of a replay, and its program."""
    step = _step(clock.device, layers, True)
    captured = capture(_train, passes="default", audit=False, record_after=1)
    _settle(captured, step)
    found = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        captured(*step)
        found.append(time.perf_counter() - start)
    assert captured.program is not None
    captured.program.describe()
    return clock.agreed(median(found)), captured.program


def _settle(captured: Any, step: _Step) -> None:
    for _ in range(8):
        captured(*step)


def _one_more(host: Host, field: str) -> Host:
    """The same host, slower by a second for each of what `field` counts: the model is linear in it."""
    return host._replace(**{field: getattr(host, field) + 1.0})


def _phase(program: Program, phase: str, machine: Machine, host: Host) -> float:
    """Modelled seconds of a phase of an eager step."""
    modelled = step_time(program, replace(machine, host=host), streams="serial")
    return sum(each.seconds for each in modelled.phases if each.phase == phase)


def _replay(program: Program, machine: Machine, host: Host) -> float:
    """Modelled seconds of a replay."""
    return step_time(program, replace(machine, host=host), streams="serial", replay=True).seconds
