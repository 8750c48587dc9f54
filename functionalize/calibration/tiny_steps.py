"""What the host adds to a step: measured on tiny models, whose kernels take next to no time.

    host = host_of(clock, machine)      a `Host`, from the seconds of tiny steps less those of their modelled kernels

    forward, backward     an eager tiny transformer without FSDP2: seconds of a phase by the ops in it
    gather, reduce        the same under `fully_shard`: what a phase takes longer, by its collectives of that kind
    optimizer             AdamW (fused) on its sharded parameters, by tensors
    node, call            replays of captures of two depths, with `passes="default"`: the seconds that each node adds,
                          and what is left of the shallow one

Must be called by all ranks of the process group. Ops, phases and collectives are those of the captured programs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
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
from functionalize.ir.phases import FORWARD, OPTIMIZER, phase_of
from functionalize.planning.machines.efficiency import Host
from functionalize.planning.machines.machine import Machine
from functionalize.planning.time.communication import ALL_GATHER, REDUCE_SCATTER, kind_of
from functionalize.planning.time.costs import is_collective
from functionalize.planning.time.step_time import step_time
from functionalize.program.program import Program

_WIDTH, _HEADS, _TOKENS = 32, 2, 4
DEPTHS = (2, 6)
_ROUNDS = 12


class _Block(nn.Module):
    """A transformer block, small enough that only its ops count."""

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
    kernels = replace(machine, host=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, sharded = (_parts(clock, depths[0], shards) for shards in (False, True))
        replays = [_replayed(clock, layers) for layers in depths]
    forward = _per(plain, FORWARD, kernels, Host(), _nodes(plain, FORWARD))
    backward = _per(plain, BACKWARD, kernels, Host(), _nodes(plain, BACKWARD))
    host = Host(forward, backward)
    gathers = _collectives(sharded, FORWARD, ALL_GATHER)
    host = host._replace(gather=_per(sharded, FORWARD, kernels, host, gathers))
    reduces = _collectives(sharded, BACKWARD, REDUCE_SCATTER)
    host = host._replace(reduce=_per(sharded, BACKWARD, kernels, host, reduces))
    host = host._replace(optimizer=_per(sharded, OPTIMIZER, kernels, Host(), _tensors(sharded)))
    left = [seconds - step_time(program, kernels).seconds for seconds, program in replays]
    nodes = [sum(n.op == "call_function" for n in program.graph.nodes) for _, program in replays]
    node = max((left[1] - left[0]) / (nodes[1] - nodes[0]), 0.0)
    return host._replace(node=node, call=max(left[0] - node * nodes[0], 0.0))


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


def _per(parts: _Parts, phase: str, kernels: Machine, host: Host, count: int) -> float:
    """What a phase takes beyond its kernels and what the host is known to add, by `count`."""
    known = step_time(parts.program, replace(kernels, host=host), streams="serial")
    seconds = sum(each.seconds for each in known.phases if each.phase == phase)
    return max(parts.seconds[phase] - seconds, 0.0) / max(count, 1)


def _nodes(parts: _Parts, phase: str) -> int:
    return sum(phase_of(n) == phase and n.op == "call_function" for n in parts.program.graph.nodes)


def _collectives(parts: _Parts, phase: str, kind: str) -> int:
    nodes = (n for n in parts.program.graph.nodes if is_collective(n) and phase_of(n) == phase)
    return sum(kind_of(n) == kind for n in nodes)


def _tensors(parts: _Parts) -> int:
    """The tensors that the optimizer updates."""
    lists = (n.args[0] for n in parts.program.graph.nodes if phase_of(n) == OPTIMIZER and n.args)
    return max((len(each) for each in lists if isinstance(each, (list, tuple))), default=1)
