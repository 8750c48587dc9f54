"""Two models from the same state on every rank, one trained eagerly, one captured; compared bit for bit.

`compare_twins(build, make_step, batches)` runs on one rank and returns a `Verdict` that travels by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz

Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
MakeStep = Callable[[nn.Module, torch.optim.Optimizer], Callable[..., Any]]


@dataclass
class Verdict:
    """What one rank saw. differences: empty when every step was bitwise equal."""

    differences: list[str]
    warmups: int
    captures: int
    replays: int
    guard_failures: list[str]
    collectives: dict[str, int]
    resizes: int
    program: str


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor, NaNs included."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Shards, gradients kept, buffers, optimizer state and RNG state, by name."""
    found = {n: local(p.detach()) for n, p in model.named_parameters()}
    found |= {f"{n}.grad": local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    found |= {n: local(b) for n, b in model.named_buffers()}
    for i, p in enumerate(model.parameters()):
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[f"state.{i}.{key}"] = local(value)
    return found


def grown_storages(model: nn.Module) -> list[str]:
    """Names of unsharded parameters whose storage is not empty."""
    from functionalize.frontend.fsdp import fsdp_params

    return [
        f"{name}: {t.untyped_storage().nbytes()} bytes"
        for name, param in fsdp_params(model)
        for t in param.all_gather_outputs
        if t.untyped_storage().nbytes()
    ]


def differences(step: int, mine: dict[str, Tensor], eager: dict[str, Tensor]) -> list[str]:
    found = [f"step {step}: {n} is there only once" for n in mine.keys() ^ eager.keys()]
    for name in mine.keys() & eager.keys():
        a, b = mine[name], eager[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            found.append(f"step {step}: {name}")
    return found


def flat(out: Any) -> dict[str, Tensor]:
    """The tensors a step returned, by place."""
    leaves = torch.utils._pytree.tree_leaves(out)
    return {f"output {i}": local(t) for i, t in enumerate(leaves) if isinstance(t, Tensor)}


def compare_twins(
    build: Build, make_step: MakeStep, batches: Sequence[tuple[Any, ...]], **options: Any
) -> Verdict:
    """Run every batch through both twins, each drawing the same random numbers."""
    eager_model, eager_optimizer = build()
    model, optimizer = build()
    eager = make_step(eager_model, eager_optimizer)
    captured = fz.capture(make_step(model, optimizer), **options)
    found: list[str] = []
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        expected = flat(eager(*batch))
        after = torch.get_rng_state()
        torch.manual_seed(i)
        actual = flat(captured(*batch))
        found += differences(i, actual, expected)
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
        found += differences(i, {"rng": torch.get_rng_state()}, {"rng": after})
        if grown_storages(model) != grown_storages(eager_model):
            found.append(f"step {i}: left grown {grown_storages(model)}")
    stats, program = captured.stats, captured.program
    return Verdict(
        found,
        stats.warmups,
        stats.captures,
        stats.replays,
        stats.guard_failures,
        dict(stats.collectives),
        stats.resizes,
        program.print_readable(print_output=False) if program else "",
    )
