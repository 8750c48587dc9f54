"""Draws from a `torch.Generator` of the step's own: replays draw the same numbers, and leave the same state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import SaveError
from tests.calls import trainers
from tests.calls.trainers import CALLS, Between, Drawer, compare, nothing

pytestmark = pytest.mark.usefixtures("ample_allowance")

shared = torch.Generator()


class Langevin(torch.optim.SGD):
    """Adds noise to every step, from a generator of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.g, self.scale, self.steps = torch.Generator().manual_seed(6), 0.0, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        if self.scale:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p += torch.randn(p.shape, generator=self.g) * (self.scale / self.steps)


def noise_of_a_layer(self: Any, x: Tensor) -> Tensor:
    x = x + torch.randn(x.shape, generator=self.g)
    return x * torch.rand(3, generator=self.several[0])


class Trainer(trainers.Trainer):
    """A script with generators of torch's class."""

    def __init__(self, augment: Callable[[Trainer, Tensor], Tensor]) -> None:
        super().__init__(augment)
        self.g, self.held = torch.Generator().manual_seed(3), {"g": torch.Generator()}
        self.layer = Drawer(noise_of_a_layer, g=torch.Generator(), several=[torch.Generator()])
        self.optimizer = Langevin(self.model.parameters(), lr=0.1)

    def generators(self) -> list[torch.Generator]:
        of_layer = [self.layer.g, *self.layer.several]
        of_objects = [self.g, self.held["g"], *of_layer, self.optimizer.g]
        return [*of_objects, shared, torch.default_generator]

    def state(self) -> list[Any]:
        return [*super().state(), *(g.get_state().numpy().tobytes() for g in self.generators())]


def shared_states() -> list[Tensor]:
    return [shared.get_state(), torch.default_generator.get_state()]


def set_shared_states(states: list[Tensor]) -> None:
    shared.set_state(states[0])
    torch.default_generator.set_state(states[1])


def compared(augment: Any, between: Between = nothing, calls: int = CALLS, **options: Any) -> Any:
    """The captured step, after calls that left all that eager leaves. between: called before each call."""
    return compare(
        lambda: Trainer(augment), shared_states, set_shared_states, between, calls, **options
    )


def noise(self: Trainer, x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=self.g) * 0.1


def in_place(self: Trainer, x: Tensor) -> Tensor:
    mask = torch.empty_like(x).bernoulli_(0.5, generator=self.g)
    return x * mask + torch.empty(3).uniform_(generator=self.held["g"])


def of_many_kinds(self: Trainer, x: Tensor) -> Tensor:
    x = x[torch.randperm(4, generator=self.g)] + torch.randint(5, (3,), generator=self.g)
    x = x + torch.normal(0.0, 0.1, (3,), generator=shared) + torch.rand(1, generator=shared)
    x = x[torch.multinomial(torch.ones(4), 4, True, generator=self.g)]
    return x + torch.poisson(torch.ones(3), generator=self.g)


def beside_torchs(self: Trainer, x: Tensor) -> Tensor:
    x = nn.functional.dropout(x, 0.3)
    x = x * torch.rand(4, 3, generator=self.g)
    return nn.functional.dropout(x, 0.3) + torch.randn(1, generator=torch.default_generator)


def one_number(self: Trainer, x: Tensor) -> Tensor:
    """A normal number is one of a pair: the generator keeps the other one."""
    return x * torch.randn((), generator=self.g)


def as_python(self: Trainer, x: Tensor) -> Tensor:
    return x * torch.rand((), generator=self.g).item()


def in_a_recomputation(self: Trainer, x: Tensor) -> Tensor:
    x = x + torch.rand(4, 3, generator=self.g)
    return checkpoint(lambda x: nn.functional.dropout(self.model(x), 0.5), x, use_reentrant=False)


def in_a_forward(self: Trainer, x: Tensor) -> Tensor:
    return self.layer(x)  # type: ignore[no-any-return]


def in_an_optimizer(self: Trainer, x: Tensor) -> Tensor:
    self.optimizer.scale = 0.1
    return x


def unused(self: Trainer, x: Tensor) -> Tensor:
    torch.rand(2, generator=self.g)
    return x


ALL = [noise, in_place, of_many_kinds, beside_torchs, one_number, as_python, in_a_recomputation]
ALL += [in_a_forward, in_an_optimizer]


@pytest.mark.parametrize("augment", [*ALL, unused])
def test_replays_draw_what_eager_draws(augment: Any) -> None:
    captured = compared(augment)
    assert captured.stats.captures == 1, captured.explain()
    assert captured.stats.replays >= CALLS - 4


@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("augment", ALL)
def test_replays_after_passes_draw_what_eager_draws(augment: Any, passes: str) -> None:
    """In an optimizer the state of its generator is read between draws, beside the writes of parameters."""
    assert compared(augment, passes=passes).stats.replays >= 1


@pytest.mark.parametrize("augment", ALL)
def test_audited_calls_draw_once(augment: Any) -> None:
    assert compared(augment, audit=1).stats.audits >= CALLS - 3


@pytest.mark.parametrize("passes", ["cleanup", "default", "fast"])
def test_passes_keep_draws(passes: str) -> None:
    assert compared(beside_torchs, passes=passes).stats.replays >= CALLS - 4


def test_the_state_is_an_input_with_a_name() -> None:
    assert "the state of the generator `self.g`" in compared(noise).explain(verbose=True)


def decides_late(self: Trainer, x: Tensor) -> Tensor:
    y = x * torch.rand((), generator=self.g)
    if torch.rand((), generator=self.g).item() > 0.5:  # known after the graph has run
        y = y + torch.rand(3, generator=self.g)
    return y


def test_no_failed_guard_moves_a_generator() -> None:
    captured = compared(decides_late, calls=24)
    assert captured.stats.captures == 2
    assert captured.stats.replays >= 12, captured.explain()


def test_an_op_that_fails_leaves_what_eager_leaves() -> None:
    def looked_up(self: Trainer, x: Tensor) -> Tensor:
        at = torch.randint(2, (4,), generator=self.g) + self.index  # type: ignore[attr-defined]
        return x[at] + torch.rand(3, generator=self.g)

    eager, ours = Trainer(looked_up), Trainer(looked_up)
    captured = fz.capture(ours.step)
    for i in range(8):
        states = []
        for step, each in ((eager.step, eager), (captured, ours)):
            each.index = torch.tensor(9 if i == 5 else 1)  # type: ignore[attr-defined]
            if i == 5:
                with pytest.raises(IndexError):
                    step(torch.ones(4, 3))
            else:
                step(torch.ones(4, 3))
            states.append(each.g.get_state())
        assert torch.equal(*states), i
    assert captured.stats.replays >= 3


# -- generators that change between calls ----------------------------------------------------------


def reseeds(self: Trainer, i: int) -> None:
    if i % 4 == 3:
        self.g.manual_seed(i)
    if i % 5 == 4:
        self.g.set_state(torch.Generator().manual_seed(i).get_state())


def test_a_seed_between_calls_needs_no_other_program() -> None:
    assert compared(noise, reseeds).stats.captures == 1


@pytest.mark.parametrize(
    ("augment", "name"),
    [(noise, "self.g"), (in_a_forward, "layer.g"), (in_an_optimizer, "optimizer.g")],
)
def test_another_generator_is_noticed(augment: Any, name: str) -> None:
    def replaces(self: Trainer, i: int) -> None:
        if i == 8:
            for each in (self, self.layer, self.optimizer):
                each.g = torch.Generator().manual_seed(30)

    captured = compared(augment, replaces)
    assert captured.stats.captures == 2
    (missed,) = captured.stats.guard_failures
    assert missed == f"`{name}` is another generator"


def test_another_generator_in_a_list_of_a_module_is_noticed() -> None:
    def replaces(self: Trainer, i: int) -> None:
        if i == 8:
            self.layer.several[0] = torch.Generator().manual_seed(30)

    captured = compared(in_a_forward, replaces)
    assert captured.stats.captures == 2
    assert "`layer.several.0` is another generator" in captured.stats.guard_failures


# -- refusals --------------------------------------------------------------------------------------


def seeds_first(self: Trainer, x: Tensor) -> Tensor:
    self.g.manual_seed(7)
    return noise(self, x)


def seeds_after(self: Trainer, x: Tensor) -> Tensor:
    x = noise(self, x)
    self.g.manual_seed(int(self.g.initial_seed()) + 1)
    return x


def seeds_between(self: Trainer, x: Tensor) -> Tensor:
    x = noise(self, x)
    self.g.set_state(shared.get_state())
    return noise(self, x)


def makes_one(self: Trainer, x: Tensor) -> Tensor:
    return x + torch.rand(3, generator=torch.Generator().manual_seed(4))


def reads_the_state(self: Trainer, x: Tensor) -> Tensor:
    return noise(self, x) + self.g.get_state()[:3]


@pytest.mark.parametrize(
    ("augment", "what"),
    [
        (seeds_first, "seed it outside of the step"),
        (seeds_after, "`self.g.state` is "),
        (seeds_between, "seed it outside of the step"),
        (makes_one, "draws from a torch.Generator argument"),
        (reads_the_state, "`self.g.state` is "),
    ],
)
def test_what_no_replay_repeats_is_refused(augment: Any, what: str) -> None:
    captured = compared(augment, on_uncapturable="eager")
    assert captured.stats.replays == 0
    (error,) = captured.core.refused.values()
    assert what in str(error)


def test_a_generator_of_two_places_is_refused() -> None:
    def twice(self: Trainer, x: Tensor) -> Tensor:
        return noise(self, x) + torch.rand(3, generator=self.other)  # type: ignore[attr-defined]

    def between(self: Trainer, i: int) -> None:
        self.other = self.g  # type: ignore[attr-defined]

    captured = compared(twice, between, on_uncapturable="eager")
    assert captured.stats.replays == 0
    assert "draws from `self.g`" in captured.explain()


def test_a_captured_forward_refuses_draws_with_owner_and_line() -> None:
    model = nn.Sequential(Drawer(noise_of_a_layer, g=torch.Generator()), nn.Linear(3, 3))
    model[0].several = [torch.Generator()]
    captured = fz.capture(lambda x: model(x).sum(), backward=True, on_uncapturable="eager")
    for _ in range(4):
        captured(torch.ones(2, 3)).backward()
    assert captured.stats.replays == 0
    message = captured.explain()
    assert "draws from `model.0.g`" in message
    assert "`g` of a Drawer" in message
    assert "used at " in message
    assert "in noise_of_a_layer: x = x + torch.randn(x.shape, generator=self.g)" in message


def test_a_program_that_draws_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(SaveError, match=r"draws from `self\.g`"):
        compared(noise).save(tmp_path / "step.fzp")
