"""Random numbers under `capture`: one stream from step to step, generators set inside the step, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import functionalize as fz
from functionalize import passes
from functionalize.errors import FunctionalizeError, UncapturableError
from functionalize.ir.generators import GET_STATE, SEED, SET_STATE

pytestmark = pytest.mark.usefixtures("ample_allowance")

aten = torch.ops.aten
STEPS = 8
Step = Callable[[Tensor], Tensor]


def batch(i: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(i))


class Net(nn.Module):
    """Two blocks with dropout; `run(block, x)` runs one of them."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4), nn.Tanh()) for _ in range(2)
        )
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return F.dropout(x, 0.2, self.training)


def training(run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Net, Step]:
    torch.manual_seed(0)
    model = Net(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x.clone().requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def follow(eager: Step, step: Step, steps: int = STEPS) -> Any:
    """Run both, each with a stream of its own; what they return and their streams must be equal."""
    captured = fz.capture(step)
    torch.manual_seed(7)
    mine = its = torch.get_rng_state()
    for i in range(steps):
        torch.set_rng_state(its)
        expected = eager(batch(i))
        its = torch.get_rng_state()
        torch.set_rng_state(mine)
        actual = captured(batch(i))
        mine = torch.get_rng_state()
        assert torch.equal(actual, expected), i
        assert torch.equal(mine, its), i
    assert captured.stats.captures == 1
    assert captured.stats.guard_failures == []
    assert captured.stats.replays == steps - captured.stats.warmups - 1 >= steps - 3
    return captured


def train_twins(run: Callable[[nn.Module, Tensor], Tensor]) -> Any:
    (eager_model, eager), (model, step) = training(run), training(run)
    captured = follow(eager, step)
    for mine, its in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(mine, its)
    return captured


def targets(captured: Any) -> list[Any]:
    return [n.target for n in captured.program.graph.nodes]


# -- what is captured --------------------------------------------------------------------------------


def test_a_stream_of_dropout_masks() -> None:
    captured = train_twins(lambda block, x: block(x))
    assert not {GET_STATE, SET_STATE, SEED} & set(targets(captured))


def saved_tanh(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that saves what `tanh` makes, and nothing else."""
    saved = op is aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SAVED_PRODUCTS = [aten.mm.default, aten.addmm.default]
CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "non_reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "to_the_end": partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False) * 2, x, use_reentrant=False
    ),
    "sequential": lambda block, x: checkpoint_sequential(block, 2, x, use_reentrant=False),
    "selective": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, SAVED_PRODUCTS),
    ),
    "selective_by_policy": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, saved_tanh),
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_recomputation_draws_the_masks_of_the_forward(kind: str) -> None:
    captured = train_twins(CHECKPOINTS[kind])
    assert targets(captured).count(SET_STATE) >= 4  # two for each block


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_does_not_preserve_draws_other_masks(reentrant: bool) -> None:
    run = partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = train_twins(run)
    assert SET_STATE not in targets(captured)


def test_the_mask_of_the_forward_is_a_value_of_the_program(expect: Any) -> None:
    layer = nn.Linear(6, 6)

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = checkpoint(lambda x: F.dropout(layer(x), 0.5), x, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sin().sum(), x)
        return grad

    captured = follow(step, step)
    expect("checkpointed_dropout", captured.program.print_readable(print_output=False))


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(6)


def seeded_by_the_module(x: Tensor) -> Tensor:
    noise = torch.rand(6)
    torch.random.manual_seed(-1)
    same = torch.rand(6)
    torch.random.manual_seed(2**64 - 1)
    return x + noise * (same - torch.rand(6))


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        noise = torch.rand(6)
    return x * noise + torch.rand(6)


def forked_without_a_seed(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        first = torch.rand(6)
    return x + first - 2 * torch.rand(6)


def drawn_twice(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(6)
    torch.set_rng_state(state)
    return x + first * torch.rand(6)


def state_written(x: Tensor) -> Tensor:
    """The state is a tensor like any other: it may be copied, and the copy written to."""
    state = torch.get_rng_state()
    noise = torch.rand(6)
    kept = torch.zeros_like(state)
    kept.copy_(state)
    torch.set_rng_state(kept.clone())
    return x + noise - torch.rand(6)


def seeded_last(x: Tensor) -> Tensor:
    out = x + torch.rand(6)
    torch.manual_seed(11)
    return out


def returned_state(x: Tensor) -> Tensor:
    torch.rand(6)
    return torch.get_rng_state()


@pytest.mark.parametrize(
    "step",
    [
        seeded,
        seeded_by_the_module,
        forked,
        forked_without_a_seed,
        drawn_twice,
        state_written,
        seeded_last,
        returned_state,
    ],
)
def test_a_generator_set_or_read_inside_the_step(step: Step) -> None:
    follow(step, step)


def test_seeds_are_those_of_eager() -> None:
    for seed in (0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 3.7):

        def step(x: Tensor, seed: Any = seed) -> Tensor:
            generator = torch.manual_seed(seed)
            return x + torch.rand(6) * (generator is torch.default_generator)

        follow(step, step, 4)


def test_a_seed_that_eager_refuses_raises_as_eager_does() -> None:
    def step(x: Tensor) -> Tensor:
        torch.manual_seed(2**64)
        return x

    with pytest.raises(Exception) as eager:
        step(batch(0))
    with pytest.raises(type(eager.value)) as ours:
        fz.capture(step)(batch(0))
    assert str(ours.value) == str(eager.value)


def test_a_state_kept_from_outside_is_an_input() -> None:
    class Kept:
        def __init__(self) -> None:
            torch.manual_seed(4)
            self.state = torch.get_rng_state()

        def step(self, x: Tensor) -> Tensor:
            torch.set_rng_state(self.state)
            noise = torch.rand(6)
            self.state.copy_(torch.get_rng_state())
            return x + noise

    follow(Kept().step, Kept().step)


def test_a_state_given_as_an_argument_is_an_input() -> None:
    def step(x: Tensor, state: Tensor) -> Tensor:
        torch.set_rng_state(state)
        return x + torch.rand(6)

    captured = fz.capture(step)
    for i in range(5):
        torch.manual_seed(i)
        state = torch.get_rng_state()
        expected = step(batch(i), state)
        torch.manual_seed(100)
        assert torch.equal(captured(batch(i), state), expected)
    assert (captured.stats.captures, captured.stats.replays) == (1, 4)


def test_a_state_that_nobody_reads_is_dead() -> None:
    def step(x: Tensor) -> Tensor:
        torch.get_rng_state()
        torch.rand(6)
        return x + torch.rand(6)

    found = targets(follow(step, step))
    assert GET_STATE not in found
    assert found.count(aten.rand.default) == 2


def test_passes_keep_random_ops_and_generators_in_order() -> None:
    captured = train_twins(CHECKPOINTS["non_reentrant"])

    def order(program: fz.Program) -> list[str]:
        nodes = program.graph.nodes
        return [
            n.name
            for n in nodes
            if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        ]

    before = order(captured.program)
    for pipeline in ("default", "verify,elide_copies,recompute_views,verify"):
        assert order(passes.run(captured.program, pipeline)) == before
    module = captured.program.graph_module
    module.graph.eliminate_dead_code()
    assert order(captured.program) == before


def test_passes_on_a_checkpointed_step_change_no_bit() -> None:
    (_, eager), (_, step) = training(CHECKPOINTS["reentrant"]), training(CHECKPOINTS["reentrant"])
    captured = fz.capture(step, passes="default")
    torch.manual_seed(1)
    expected = [eager(batch(i)) for i in range(STEPS)]
    torch.manual_seed(1)
    for i in range(STEPS):
        assert torch.equal(captured(batch(i)), expected[i])
    assert captured.stats.replays >= STEPS - 3


def test_a_failed_replay_leaves_the_generators_as_they_were() -> None:
    """The number differs in the fifth step, after the replay has set the generator."""

    def step(x: Tensor) -> Tensor:
        noise = torch.rand(6)
        with torch.random.fork_rng():
            torch.manual_seed(2)
            noise = noise + torch.rand(6)
        return x + noise * (2.0 if bool((x.sum() > 50).item()) else 1.0)

    captured = fz.capture(step)
    for i in range(7):
        x = batch(i) + (100 if i == 4 else 0)
        torch.manual_seed(i)
        expected, after = step(x), torch.get_rng_state()
        torch.manual_seed(i)
        assert torch.equal(captured(x), expected)
        assert torch.equal(torch.get_rng_state(), after)
    assert len(captured.stats.guard_failures) == 1  # the sixth call replays the first program


def test_a_capture_inside_a_capture_records_what_the_inner_one_does() -> None:
    run = CHECKPOINTS["non_reentrant"]
    (_, eager), (_, step) = training(run), training(run)
    inner = fz.capture(step)
    torch.manual_seed(1)
    expected = [eager(batch(i)) for i in range(STEPS)]
    torch.manual_seed(1)
    for i in range(3):
        assert torch.equal(inner(batch(i)), expected[i])
    outer = fz.capture(lambda x: inner(x) + 0)
    for i in range(3, STEPS):
        assert torch.equal(outer(batch(i)), expected[i])


# -- trace: fake tensors draw nothing ----------------------------------------------------------------


@pytest.mark.parametrize("step", [seeded, forked, drawn_twice, seeded_last])
def test_trace_leaves_the_generators_alone_and_the_program_sets_them(step: Step) -> None:
    before = torch.get_rng_state()
    program = fz.functions.trace(step, batch(0))
    assert torch.equal(torch.get_rng_state(), before)
    expected, after = step(batch(1)), torch.get_rng_state()
    torch.set_rng_state(before)
    assert torch.equal(program(batch(1)), expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)
    assert torch.equal(program.graph_module(batch(1))[0], expected)
    assert torch.equal(torch.get_rng_state(), after)
    passes.run(program, "verify")


def test_trace_refuses_what_no_program_can_repeat() -> None:
    with pytest.raises(UncapturableError, match=r"torch.seed\(\) is called inside the step at "):
        fz.functions.trace(lambda x: (torch.seed(), x + torch.rand(6))[1], batch(0))


def test_cuda_functions_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: the calls are ops, and what eager takes from the current device is resolved."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def step(x: Tensor) -> Tensor:
        states = [
            torch.cuda.get_rng_state(),
            torch.cuda.random.get_rng_state(torch.device("cuda:3")),
        ]
        torch.cuda.manual_seed(3)
        torch.cuda.random.manual_seed_all(4)
        for device, state in zip((0, "cuda"), states, strict=True):
            torch.cuda.set_rng_state(state, device)
        torch.manual_seed(5)
        return x + states[0].size(0)

    graph = fz.functions.trace(step, batch(0)).graph
    calls = [(n.target, n.args) for n in graph.nodes if n.op == "call_function"]
    first, last = (torch.device("cuda", i) for i in (1, 3))
    got = [n for n in graph.nodes if n.target is GET_STATE]
    assert [n.meta.get("val") for n in got] == [None, None]  # nobody asked for the module
    assert calls[:-1] == [
        (GET_STATE, (first,)),
        (GET_STATE, (last,)),
        (SEED, (3, first)),
        (SEED, (4, torch.device("cuda"))),
        (SET_STATE, (got[0], torch.device("cuda", 0))),
        (SET_STATE, (got[1], first)),
        (SEED, (5,)),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_seeding_cuda_where_there_is_none_does_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        torch.cuda.manual_seed(3)
        torch.cuda.manual_seed_all(3)
        return x + torch.rand(6)

    assert SEED not in targets(follow(step, step))


# -- what is refused ---------------------------------------------------------------------------------


def refusal(step: Callable[..., Any]) -> str:
    """The error of a step that is refused; no call of it may have been replayed."""
    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(FunctionalizeError) as raised:
        for i in range(8):
            captured(batch(i))
    assert captured.stats.replays == 0
    return str(raised.value)


@pytest.mark.parametrize("name", ["seed", "initial_seed"])
def test_seeds_that_no_replay_can_repeat_are_refused_by_name(name: str) -> None:
    def step(x: Tensor) -> Tensor:
        getattr(torch, name)()
        return x + torch.rand(6)

    message = refusal(step)
    assert message.startswith(f"torch.{name}() is called inside the step at ")
    assert message.endswith("which a replay cannot repeat: call it outside the step")


@pytest.mark.parametrize("draws", [True, False])
def test_a_generator_set_past_torchs_functions_is_refused(draws: bool) -> None:
    def step(x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)
        return x + torch.rand(6) if draws else x + 1

    torch.manual_seed(0)
    message = refusal(step)
    where = "before aten.rand.default at " if draws else "after its last random op"
    assert message.startswith(f"a random generator is set inside the step, {where}")
    assert "torch.manual_seed, torch.set_rng_state or torch.random.fork_rng" in message


def test_a_state_read_past_torchs_functions_is_never_frozen() -> None:
    """Every step makes the state anew, where nobody can find it: the step is refused, or equal to eager."""

    def step(x: Tensor) -> Tensor:
        state = torch.default_generator.get_state()
        first = torch.rand(6)
        torch.set_rng_state(state)
        return x + first - 2 * torch.rand(6)

    assert "reads a tensor (uint8[5056]) that no module or optimizer holds" in refusal(step)


def test_torchs_functions_are_put_back() -> None:
    names = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")
    before = [(getattr(torch, n), getattr(torch.random, n)) for n in names]
    follow(forked, forked)
    with pytest.raises(ZeroDivisionError):
        fz.capture(lambda x: 1 / 0)(batch(0))
    assert [(getattr(torch, n), getattr(torch.random, n)) for n in names] == before


# -- layers that look at the gradient mode ------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "dropout": 0.3, "bidirectional": True}])
def test_recurrent_layers(kind: Any, options: dict[str, Any]) -> None:
    def make() -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = kind(6, 5, batch_first=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(x: Tensor) -> Tensor:
            out, hidden = model(x.view(2, 2, 6))
            loss = out.square().mean() + torch.cat([*hidden]).sin().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, step

    (eager_model, eager), (model, step) = make(), make()
    captured = follow(eager, step)
    for mine, its in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(mine, its)
    found = targets(captured)
    assert aten.mkldnn_rnn_layer.default not in found
    layers = found.count(torch.ops.functionalize.mkldnn_rnn_layer.default)
    assert layers == (0 if kind is not nn.LSTM else 4 if options else 1)


@pytest.mark.parametrize("gradients", [True, False])
def test_an_lstm_that_is_not_trained_keeps_its_gradient_mode(gradients: bool) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(6, 5)

    def step(x: Tensor) -> Tensor:
        with nullcontext() if gradients else torch.no_grad():
            return model(x)[0].detach()

    found = targets(follow(step, step))
    assert (aten.mkldnn_rnn_layer.default in found) is not gradients
    assert (torch.ops.functionalize.mkldnn_rnn_layer.default in found) is gradients
