"""A captured forward of an FSDP2 model on two gloo ranks: its backward is replayed, too, the optimizer is eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.fsdp.checkpointed import Model, sharded
from tests.fsdp.models import nested, root_only
from tests.fsdp.sharded import build_llama, build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import (
    differences,
    flat,
    grown_storages,
    hidden_of,
    layouts_of,
    local,
    run,
    state_of,
    unequal,
)
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

Forward = Callable[..., Any]
STEPS = 8


@dataclass
class Seen:
    """What one rank saw: how eager and captured differ, and the counts."""

    differences: list[str]
    replays: int
    backwards: int
    captures: int
    reruns: int
    guard_failures: list[str]


def mse(model: nn.Module) -> Forward:
    return lambda x, y: F.mse_loss(model(x), y)


def with_logits(model: nn.Module) -> Forward:
    """Several outputs; some are never gone backward from."""

    def forward(x: Tensor, y: Tensor) -> dict[str, Any]:
        out = model(x)
        loss = F.mse_loss(out.to(y.dtype), y)  # torch 2.11 has no backward for two dtypes
        return {"loss": loss, "logits": out, "rows": len(x), "seen": out.detach()}

    return forward


def outputs_only(model: nn.Module) -> Forward:
    return lambda x, y: model(x)


def language(model: nn.Module) -> Forward:
    return lambda tokens: model(input_ids=tokens, labels=tokens)


def loss_backward(out: Any, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    loss = out if isinstance(out, Tensor) else out["loss"]
    loss.backward()
    return loss.detach()


def outside_loss(out: Any, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    """The loss is computed eagerly from a captured forward's output."""
    loss = F.mse_loss(out, batch[1]) + out.square().mean()
    loss.backward()
    return loss.detach()


def clipped(out: Tensor, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    out.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return out.detach()


def resharded(out: Tensor, batch: Sequence[Tensor], model: Any) -> Tensor:
    """By hand, between forward and backward."""
    model.reshard()
    out.backward()
    return out.detach()


def twice(out: Tensor, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    out.backward(retain_graph=True)
    (2 * out).backward()
    return out.detach()


def of_the_input(out: Tensor, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    """No gradient of a parameter is wanted, so none is reduced."""
    (gradient,) = torch.autograd.grad(out, batch[0])
    return gradient


def with_the_input(out: Tensor, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    batch[0].grad = None
    out.backward()
    assert batch[0].grad is not None
    return batch[0].grad


def compare(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    make: Callable[[nn.Module], Forward],
    batches: Sequence[Any],
    go_back: Callable[..., Tensor] = loss_backward,
    micro: int = 1,
    before: Callable[[nn.Module, int], None] = lambda model, i: None,
    clear: str = "after",
    **options: Any,
) -> Seen:
    """Train two twins, one with a captured forward; both must be equal, bit for bit, after every backward.

    micro: backwards per optimizer step. before: what is done before each forward. clear: when gradients are.
    """
    (eager_model, eager_optimizer), (model, optimizer) = build(), build()
    captured = fz.capture(make(model), backward=True, **options)
    twins = [
        (eager_model, eager_optimizer, make(eager_model)),
        (model, optimizer, captured),
    ]
    found: list[str] = []
    drawn = [torch.get_rng_state()] * 2
    for i, batch in enumerate(batches):
        results = []
        for which, (m, o, forward) in enumerate(twins):
            torch.set_rng_state(drawn[which])
            before(m, i)
            out = run(forward, batch)
            if clear == "between":
                o.zero_grad()
            loss = go_back(out, batch, m)
            results.append((flat(out), {"loss": local(loss)}, state_of(m, o), hidden_of(m)))
            results[-1] += (layouts_of(m), grown_storages(m))
            if (i + 1) % micro == 0:
                o.step()
                if clear == "after":
                    o.zero_grad()
            drawn[which] = torch.get_rng_state()
        theirs, mine = results
        for a, b in list(zip(mine, theirs, strict=True))[:4]:
            found += differences(i, a, b)
        found += unequal(i, mine[4], theirs[4])
        found += [] if mine[5] == theirs[5] else [f"step {i}: left grown {mine[5]}"]
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
        found += differences(i, {"rng": drawn[1]}, {"rng": drawn[0]})
    stats = captured.stats
    return Seen(
        found, stats.replays, stats.backwards, stats.captures, stats.reruns, stats.guard_failures
    )


# -- on the ranks ----------------------------------------------------------------------------------


def tokens() -> list[tuple[Tensor]]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randint(0, 64, (2, 8), generator=g),) for _ in range(STEPS)]


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build_checkpointed(reentrant: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharded(Model(partial(checkpoint, use_reentrant=reentrant)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def with_gradients(n: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    return [(x.requires_grad_(), y) for x, y in pairs(n)]


def from_time_to_time(out: Tensor, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    """A backward that comes late, once replays have begun, and once more."""
    step = int(batch[1].flatten()[0])
    return of_the_input(out, batch, model) if step in (5, 7) else with_the_input(out, batch, model)


def numbered() -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.full_like(y, i)) for i, (x, y) in enumerate(with_gradients(10))]


def evaluate(model: nn.Module, i: int) -> None:
    if i % 3 == 2:
        with torch.no_grad():
            model(torch.ones(2, 8))


def no_sync(model: nn.Module, i: int) -> None:
    model.set_requires_gradient_sync(i % 2 == 1)  # type: ignore[operator]


CASES: dict[str, Callable[[], Seen]] = {
    "mlp": lambda: compare(build_mlp, mse, pairs(STEPS)),
    "nested": lambda: compare(nested, mse, pairs(STEPS)),
    "root only": lambda: compare(root_only, mse, pairs(STEPS)),
    "mixed precision": lambda: compare(
        lambda: build_mlp(mp_policy=BF16), with_logits, pairs(STEPS)
    ),
    "without reshard": lambda: compare(
        lambda: build_mlp(reshard_after_forward=False), mse, pairs(STEPS)
    ),
    "several outputs": lambda: compare(build_mlp, with_logits, pairs(STEPS)),
    "loss outside": lambda: compare(nested, outputs_only, pairs(STEPS), outside_loss),
    "llama": lambda: compare(build_llama, language, tokens()),
    "through passes": lambda: compare(build_mlp, mse, pairs(STEPS), passes="default"),
    "checkpointed": lambda: compare(lambda: build_checkpointed(False), mse, pairs(STEPS)),
    "reentrant checkpoints": lambda: compare(lambda: build_checkpointed(True), mse, pairs(STEPS)),
    "accumulation": lambda: compare(build_mlp, mse, pairs(2 * STEPS), micro=2),
    "accumulation without sync": lambda: compare(
        build_mlp, mse, pairs(2 * STEPS), micro=2, before=no_sync
    ),
    "clipped outside": lambda: compare(build_mlp, mse, pairs(STEPS), clipped),
    "gradient of the input": lambda: compare(build_mlp, mse, with_gradients(), of_the_input),
    "gradients of the input, too": lambda: compare(nested, mse, with_gradients(), with_the_input),
    "resharded between": lambda: compare(build_mlp, mse, pairs(STEPS), resharded),
    "evaluated in between": lambda: compare(build_mlp, mse, pairs(12), before=evaluate),
    "cleared between": lambda: compare(build_mlp, mse, pairs(STEPS), clear="between"),
}


def case(name: str) -> Seen:
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    for seen in run_on_ranks(case, name):
        assert seen.differences == []
        assert seen.replays >= 4, seen
        assert seen.backwards == seen.replays, seen
        assert seen.reruns == 0


def two_backwards() -> Seen:
    return compare(build_mlp, mse, pairs(STEPS), twice)


def other_backwards() -> Seen:
    return compare(build_mlp, mse, numbered(), from_time_to_time)


@pytest.mark.parametrize("fn", [two_backwards, other_backwards])
def test_a_backward_of_another_kind_runs_the_forward_again(fn: Callable[[], Seen]) -> None:
    for seen in run_on_ranks(fn):
        assert seen.differences == []
        assert seen.reruns == 1, seen
        assert seen.backwards >= 5, seen


def forwards_apart() -> list[str]:
    """Forwards that nobody goes backward from, and two before their backwards, in the reverse order."""
    (eager_model, _), (model, _) = build_mlp(), build_mlp()
    eager, captured = mse(eager_model), fz.capture(mse(model), backward=True)
    found: list[str] = []
    batches = pairs(30)
    for i in range(6):
        first, second, dropped = batches[3 * i : 3 * i + 3]
        for m, forward in ((eager_model, eager), (model, captured)):
            m.zero_grad()
            if i > 2:
                forward(*dropped)
            a, b = forward(*first), forward(*second)
            b.backward()
            a.backward()
        mine, theirs = (
            {n: local(p.grad) for n, p in m.named_parameters()} for m in (model, eager_model)
        )
        found += differences(i, mine, theirs)
    if captured.stats.backwards < 6:
        found.append(f"{captured.stats}")
    return found


def test_forwards_before_their_backwards() -> None:
    assert run_on_ranks(forwards_apart) == [[], []]


def programs() -> tuple[str, str]:
    model, optimizer = build_mlp()
    forward = fz.capture(mse(model), backward=True)
    for batch in pairs(3):
        forward(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    (backward,) = forward.backward_programs
    return forward.program.print_readable(False), backward.print_readable(False)


def test_the_two_graphs(expect: Callable[[str, str], None]) -> None:
    """No unsharded parameter of a block is saved: the backward gathers it again."""
    (forward, backward), _ = run_on_ranks(programs)
    expect("forward", forward)
    expect("backward", backward)
    gathers, scatters = (
        f"_c10d_functional.{name}.default("
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor")
    )
    assert forward.count(gathers) == 3
    assert (backward.count(gathers), backward.count(scatters)) == (2, 3)


def two_forwards_at_once(record: bool) -> tuple[str, bool]:
    """What `(a + b).backward()` says, with recorded or replayed forwards, and whether anything was changed."""
    model, optimizer = build_mlp()
    forward = fz.capture(mse(model), backward=True)
    batches = pairs(8)
    for batch in batches[: 0 if record else 5]:
        forward(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool(forward.stats.replays) is not record
    before = state_of(model, optimizer)
    with pytest.raises(UncapturableError) as raised:
        (forward(*batches[5]) + forward(*batches[6])).backward()
    model.reshard()  # type: ignore[operator]  # the root, after a forward that ran for real
    after = state_of(model, optimizer)
    same = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return str(raised.value), same


@pytest.mark.parametrize("record", [True, False])
def test_two_forwards_that_eager_reduces_together_are_refused(record: bool) -> None:
    for message, same in run_on_ranks(two_forwards_at_once, record):
        assert message.startswith(
            "runs one backward through several captured forwards of an FSDP2 model"
        )
        assert same
