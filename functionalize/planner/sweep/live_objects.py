"""A model, an optimizer and a batch of this process as the functions of a plan, which work on copies without data.

    build, step, inputs = functions_of(model, optimizer, batch)     for `fz.plan`, inside whose worlds they run
    with untouched(model): ...                                      around all that calls them

        model, optimizer ──deepcopy, each tensor a fake one──▶ copies ──shard──▶ optimizer of what is sharded

A model that `fully_shard` has sharded is copied as it was before, and its copy sharded alike (`live_shards.py`), or by
`shard`.

Invariant: the objects are as before, also after an error. Copies are made inside a fake world: each of their tensors
has the geometry of its original, which may be on any device or `meta`; views of one storage stay views of one storage.
Gradients are not copied: the step begins and ends without.
Refuses (`PlanError`): shardings that cannot be done again, tensors of classes with a behaviour of their own, objects
that `copy.deepcopy` cannot copy, a forward that computes with the parameters of the original.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from functionalize._compat.graphs import pytree
from functionalize.errors import PlanError
from functionalize.fsdp.objects import fsdp_params
from functionalize.planner.sweep.live_shards import LiveShards, Memo
from functionalize.planner.sweep.points import arguments
from functionalize.util.patching import Patch, Patches

Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
_PLAIN = (Tensor, nn.Parameter)


def functions_of(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    step: Callable[..., Any] | None = None,
    shard: Callable[[Any], Any] | None = None,
) -> Functions:
    """`build`, `step` and `inputs` of a plan; see `fz.plan`."""
    _check(model, optimizer, step, shard)
    shards = LiveShards.of(model)

    def build() -> tuple[nn.Module, Optimizer]:
        memo: Memo = {}
        begin = functools.partial(shards.begin, optimizer) if shards is not None else None
        made, its_optimizer = _copied((model, optimizer), memo, begin)
        if shard is not None or shards is not None:
            before = dict(made.named_parameters(remove_duplicate=False))
            if shard is not None:
                shard(made)
            elif shards is not None:
                shards.again(memo)
            after = dict(made.named_parameters(remove_duplicate=False))
            _rebind(its_optimizer, {before[name]: after[name] for name in before})
        return made, its_optimizer

    make = batch if _is_function(batch) else lambda: _copied(batch)

    @functools.wraps(make)
    def inputs(**given: Any) -> Any:
        return make(**given) if step is not None else {"batch": make(**given)}

    return build, step or train, inputs


def train(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    """The step that is planned without another one: forward, backward of the loss, optimizer, no gradients."""
    loss = _loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns: as `.loss`, as `["loss"]`, or alone."""
    args, kwargs = arguments(batch)
    out = model(*args, **kwargs)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise PlanError(
        f"{type(model).__name__} returns {what}, which has no loss: give the step that trains it, as "
        "`step=lambda model, optimizer, x, y: ...`"
    )


def _is_function(batch: Any) -> bool:
    return inspect.isroutine(batch) or isinstance(batch, functools.partial)


# -- what is refused -------------------------------------------------------------------------------


def _check(model: Any, optimizer: Any, step: Any, shard: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"after a model comes its optimizer, of torch.optim, not {type(optimizer).__name__}: "
            "fz.plan(model, optimizer, batch)"
        )
    for name, function in (("step", step), ("shard", shard)):
        if function is not None and not callable(function):
            raise PlanError(f"`{name}` is a function, not {type(function).__name__}")
    trained = {id(p) for p in model.parameters()}
    trained |= {id(each.sharded_param) for _, each in fsdp_params(model)}  # registered or not
    if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
        raise PlanError(
            f"{type(optimizer).__name__} has none of the parameters of {type(model).__name__}: give the optimizer "
            "that trains it"
        )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Raises `PlanError` if gradients reach the original, whose forward a copy calls; they are taken back."""
    before = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        reached = [p for p, grad in before if p.grad is not grad]
        for parameter, grad in before:
            parameter.grad = grad
    if reached:
        raise PlanError(
            f"a copy of {type(model).__name__} computes with the parameters of the original, as where a function in "
            "the place of `forward` holds it (accelerate's `prepare`): give the model before that"
        )


# -- copies ----------------------------------------------------------------------------------------


def _copied(
    objects: Any, memo: Memo | None = None, begin: Callable[[Memo], None] | None = None
) -> Any:
    """Copies of objects whose tensors are fake. To be called inside a fake world.

    memo: is filled by `copy.deepcopy`, after `begin`.
    """
    patches = Patches(_copying)
    patches.install()
    try:
        memo = {} if memo is None else memo
        if begin is not None:
            begin(memo)
        return copy.deepcopy(objects, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(
            f"what is planned cannot be copied: {error}. Give functions that make it: fz.plan(build, step)"
        ) from error
    finally:
        patches.remove()


def _copying() -> Iterator[Patch]:
    for kind in _PLAIN:
        yield kind, "__deepcopy__", _without_data


def _without_data(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """A fake tensor of the same geometry, on the storage of which the copies of the other views are."""
    if id(tensor) in memo:
        found: Tensor = memo[id(tensor)]
        return found
    if type(tensor) not in _PLAIN:
        raise PlanError(
            f"a {type(tensor).__name__} cannot be copied without its data: give functions that make the model, "
            "fz.plan(build, step)"
        )
    storage = tensor.untyped_storage()
    key = "storage", storage._cdata
    if key not in memo:
        memo[key] = torch.empty(storage.nbytes(), dtype=torch.uint8)
    held = memo[key][: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    with torch.no_grad():
        view = held.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()
    if isinstance(tensor, nn.Parameter):
        view = nn.Parameter(view, requires_grad=tensor.requires_grad)
    elif tensor.is_leaf:
        view.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = view
    return view


def _rebind(optimizer: Optimizer, sharded: Mapping[Tensor, Tensor]) -> None:
    """Let an optimizer have sharded parameters, and its state their shards, in the place of what they were made of."""

    def of_state(value: Any, old: Tensor, new: Tensor) -> Any:
        is_alike = isinstance(value, Tensor) and value.dim() and value.shape == old.shape
        return torch.empty_like(new, dtype=value.dtype) if is_alike else value

    for group in optimizer.param_groups:
        group["params"] = [sharded.get(each, each) for each in group["params"]]
    for old in list(optimizer.state):
        if (new := sharded.get(old)) is not None and new is not old:
            kept = optimizer.state.pop(old)
            optimizer.state[new] = pytree.tree_map(lambda v, o=old, n=new: of_state(v, o, n), kept)
