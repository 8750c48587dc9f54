"""Two models from the same state on every rank, one trained eagerly, one captured; compared bit for bit.

`compare_twins(build, make_step, batches)` runs on one rank and returns a `Verdict` that travels by value.
After every step: outputs, shards, gradients, buffers, optimizer state, what FSDP2 keeps between microbatches
and in Python, RNG, storages left grown. At the end: both `state_dict()`s.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import functionalize as fz
from functionalize.fsdp.contract import Handling, handling_of
from functionalize.fsdp.objects import (
    fsdp_contexts,
    fsdp_groups,
    fsdp_params,
    fsdp_states,
)
from functionalize.fsdp.python_state import FSDPState
from functionalize.util.structure import flatten

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
    predictions: int
    mispredictions: int


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor, NaNs included."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def local(t: Any) -> Tensor:
    """The plain tensor inside a DTensor or another wrapper with one inner tensor."""
    t = t.to_local() if hasattr(t, "to_local") else t
    if hasattr(t, "__tensor_flatten__"):
        (name,) = t.__tensor_flatten__()[0]
        return local(getattr(t, name))
    return t


def layout(t: Any) -> Any:
    """What a DTensor says of its local part."""
    return (t.shape, t.stride(), t.placements, t.device_mesh) if isinstance(t, DTensor) else type(t)


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


def layouts_of(model: nn.Module) -> dict[str, Any]:
    """Placements of parameters and gradients, and which of them require a gradient."""
    found = {n: (layout(p), p.requires_grad) for n, p in model.named_parameters()}
    grads = {f"{n}.grad": layout(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {**found, **grads}


def hidden_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients that FSDP2 keeps unreduced or half reduced from one microbatch to the next."""
    found: dict[str, Tensor | None] = {}
    for name, param in fsdp_params(model):
        found[f"{name}.accumulated"] = param.unsharded_accumulated_grad
        unsharded = getattr(param, "_unsharded_param", None)  # not there before its first unshard
        found[f"{name}.unsharded.grad"] = None if unsharded is None else unsharded.grad
    for i, group in enumerate(fsdp_groups(model)):
        found[f"group {i}.partial"] = group._partial_reduce_output
    return {name: local(t) for name, t in found.items() if t is not None}


def python_state_of(model: nn.Module) -> dict[str, Any]:
    """Every attribute of FSDP2's objects that is not irrelevant by the contract, and the order of the forwards."""
    params = [param for _, param in fsdp_params(model)]
    objects = [*fsdp_states(model), *fsdp_contexts(model), *fsdp_groups(model), *params]
    found = {
        f"{type(each).__name__} {n}: {name}": described(value)
        for n, each in enumerate(objects)
        for name, value in vars(each).items()
        if handling_of(each, name) is not Handling.IGNORED
    }
    for n, param in enumerate(params):
        if hasattr(param, "_unsharded_param"):
            found[f"{n}: grad_dtype"] = param._unsharded_param.grad_dtype
    state = FSDPState.now([model])
    order = [[group._module_fqn for group in groups] for groups in state.orders]
    return {**found, "order of the forwards": order, "places in it": state.indices}


def described(value: Any) -> Any:
    """A value that is equal in two twins: numbers and names as they are, objects by their type."""
    if isinstance(value, dict):
        return [(described(k), described(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, set):
        return sorted(str(described(each)) for each in value)
    if value is None or isinstance(value, (bool, int, float, str, enum.Enum, torch.dtype)):
        return value
    return getattr(value, "_param_fqn", None) or type(value).__name__


def grown_storages(model: nn.Module) -> list[str]:
    """Names of unsharded parameters whose storage is not empty."""
    return [
        f"{name}: {t.untyped_storage().nbytes()} bytes"
        for name, param in fsdp_params(model)
        for t in (*param.all_gather_outputs, *getattr(param, "_unsharded_inner_tensors", ()))
        if t.untyped_storage().nbytes()
    ]


def differences(step: int | str, mine: dict[str, Tensor], eager: dict[str, Tensor]) -> list[str]:
    found = [f"step {step}: {n} is there only once" for n in mine.keys() ^ eager.keys()]
    for name in mine.keys() & eager.keys():
        a, b = mine[name], eager[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            found.append(f"step {step}: {name}")
    return found


def call_differences(
    call: int, steps: Sequence[Callable[[Any], Any]], twins: Sequence[Any], batch: Any
) -> list[str]:
    """One call of two steps that return a loss, with equal random numbers. twins: (model, optimizer) of each."""
    losses = []
    for step in steps:
        torch.manual_seed(call)
        losses.append(step(batch))
    found = differences(call, {"loss": losses[0]}, {"loss": losses[1]})
    return found + differences(call, *(state_of(*twin) for twin in twins))


def unequal(step: int | str, mine: dict[str, Any], eager: dict[str, Any]) -> list[str]:
    return [
        f"step {step}: {n} is {mine.get(n)}, eager has {eager.get(n)}"
        for n in mine.keys() | eager.keys()
        if mine.get(n) != eager.get(n)
    ]


def flat(out: Any) -> dict[str, Tensor]:
    """The tensors a step returned, by place."""
    leaves, _ = flatten(out, result=True)
    return {f"output {i}": local(t) for i, t in enumerate(leaves) if isinstance(t, Tensor)}


def plain_parts(out: Any) -> dict[str, Any]:
    """The rest of what a step returned, and its structure."""
    leaves, spec = flatten(out, result=True)
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return {"structure": str(spec), **{f"output {i}": leaf for i, leaf in enumerate(rest)}}


def entries(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of a state dict with the keys that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from entries(f"{where}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from entries(f"{where}.{i}", each)
    else:
        yield where, value


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every entry of both state dicts."""
    return dict(
        (*entries("model", model.state_dict()), *entries("optimizer", optimizer.state_dict()))
    )


def checkpoints_differ(mine: dict[str, Any], eager: dict[str, Any]) -> list[str]:
    """Entries that are not the same: shards by bit, placements, and everything that is no tensor."""
    tensors = [{k: local(v) for k, v in d.items() if isinstance(v, Tensor)} for d in (mine, eager)]
    words = [
        {k: layout(v) if isinstance(v, Tensor) else v for k, v in d.items()} for d in (mine, eager)
    ]
    return differences("state_dict", *tensors) + unequal("state_dict", *words)


def run(step: Callable[..., Any], batch: Any) -> Any:
    """A batch is the positional arguments of a step, or its keyword arguments."""
    return step(**batch) if isinstance(batch, dict) else step(*batch)


def models_differ(
    step: int | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    eager_model: nn.Module,
    eager_optimizer: torch.optim.Optimizer,
) -> list[str]:
    """Everything but outputs in which the twins differ now."""
    found = differences(step, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
    found += differences(step, hidden_of(model), hidden_of(eager_model))
    found += unequal(step, layouts_of(model), layouts_of(eager_model))
    found += unequal(step, python_state_of(model), python_state_of(eager_model))
    if grown_storages(model) != grown_storages(eager_model):
        found.append(f"step {step}: left grown {grown_storages(model)}")
    return found


def compare_twins(
    build: Build,
    make_step: MakeStep,
    batches: Sequence[Any],
    reseed: bool = True,
    after: MakeStep | None = None,
    **options: Any,
) -> Verdict:
    """Run every batch through both twins, each drawing the same random numbers.

    reseed: before every step; else each twin goes on with its own stream, from the same beginning.
    after: makes what runs eagerly after every step of both, outside of what is captured.
    """
    eager_model, eager_optimizer = build()
    model, optimizer = build()
    eager = make_step(eager_model, eager_optimizer)
    captured = fz.capture(make_step(model, optimizer), **options)
    found: list[str] = []
    drawn = eager_drawn = torch.get_rng_state()
    for i, batch in enumerate(batches):
        if reseed:
            torch.manual_seed(i)
            drawn = eager_drawn = torch.get_rng_state()
        torch.set_rng_state(eager_drawn)
        expected = run(eager, batch)
        eager_drawn = torch.get_rng_state()
        torch.set_rng_state(drawn)
        actual = run(captured, batch)
        drawn = torch.get_rng_state()
        found += differences(i, flat(actual), flat(expected))
        found += unequal(i, plain_parts(actual), plain_parts(expected))
        found += differences(i, {"rng": drawn}, {"rng": eager_drawn})
        found += models_differ(i, model, optimizer, eager_model, eager_optimizer)
        if after is not None:
            run(after(model, optimizer), batch)
            run(after(eager_model, eager_optimizer), batch)
            found += models_differ(f"{i}, after", model, optimizer, eager_model, eager_optimizer)
    mine = checkpoint_of(model, optimizer)
    found += checkpoints_differ(mine, checkpoint_of(eager_model, eager_optimizer))
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
        stats.predictions,
        stats.mispredictions,
    )
