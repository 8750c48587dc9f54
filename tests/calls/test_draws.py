"""Numbers that a step draws from generators of Python and numpy: replays draw them anew, and leave eager's states."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.calls.draws import state_of
from functionalize.errors import SaveError
from functionalize.step import cache
from tests.calls import trainers
from tests.calls.trainers import CALLS, Between, Drawer, compare, nothing

pytestmark = pytest.mark.usefixtures("ample_allowance")

shared = np.random.default_rng(9)


def scaled(self: Any, x: Tensor) -> Tensor:
    """The forward of a module."""
    x = x * self.rng.uniform(0.5, 1.5) + self.python.gauss(0, 1)
    return x * self.old[0].normal()


class Trainer(trainers.Trainer):
    """A script with generators of Python and numpy."""

    def __init__(self, augment: Callable[[Trainer, Tensor], Tensor]) -> None:
        super().__init__(augment)
        self.rng, self.python = np.random.default_rng(3), random.Random(4)
        self.legacy = np.random.RandomState(5)
        self.kept, self.seeds = 0.0, methodcaller("".join(("se", "ed")), 3)
        held = {"rng": np.random.default_rng(6), "old": [np.random.RandomState(7)]}
        self.layer = Drawer(scaled, **held, python=random.Random(8))

    def state(self) -> list[Any]:
        layer = self.layer
        of_layer = [layer.rng, layer.python, *layer.old]
        generators = [self.rng, self.python, self.legacy, shared, *of_layer]
        of_process = random.getstate(), repr(np.random.get_state())
        return [*super().state(), *map(state_of, generators), self.kept, *of_process]


def shared_states() -> Any:
    return random.getstate(), np.random.get_state(), shared.bit_generator.state


def set_shared_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    shared.bit_generator.state = states[2]


def compared(augment: Any, between: Between = nothing, calls: int = CALLS, **options: Any) -> Any:
    """The captured step, after calls that left all that eager leaves. between: called before each call."""
    random.seed(1)
    np.random.seed(2)
    return compare(
        lambda: Trainer(augment), shared_states, set_shared_states, between, calls, **options
    )


def mixup(self: Trainer, x: Tensor) -> Tensor:
    share = self.rng.beta(0.2, 0.2)
    self.kept = share
    return share * x + (1 - share) * x.flip(0)


def of_all_generators(self: Trainer, x: Tensor) -> Tensor:
    x = x * self.python.uniform(0.5, 1.5) + self.legacy.normal() * shared.normal(scale=0.1)
    return x * np.random.rand() + random.gauss(0, 1) * self.python.gauss(0, 1)


def with_helper(self: Trainer, x: Tensor) -> Tensor:
    def scale(low: float, high: float) -> float:
        return random.uniform(low, high)

    return sum((x * scale(0, k) for k in (1, 2)), x)


def in_a_forward(self: Trainer, x: Tensor) -> Tensor:
    return self.layer(x)  # type: ignore[no-any-return]


def unused(self: Trainer, x: Tensor) -> Tensor:
    self.rng.random()
    self.legacy.randint(10)
    return x


@pytest.mark.parametrize("augment", [mixup, of_all_generators, with_helper, in_a_forward, unused])
def test_replays_draw_what_eager_draws(augment: Any) -> None:
    captured = compared(augment)
    assert captured.stats.captures == 1
    assert captured.stats.replays >= CALLS - 4


def test_a_drawn_number_is_explained() -> None:
    assert "a number drawn by self.rng.beta(0.2, 0.2)" in compared(mixup).explain(verbose=True)


def test_audited_calls_draw_once() -> None:
    for augment in (of_all_generators, in_a_forward):
        assert compared(augment, audit=1).stats.audits >= CALLS - 3


def test_passes_keep_draws() -> None:
    assert compared(mixup, passes="default").stats.replays >= CALLS - 4


# -- draws that decide -----------------------------------------------------------------------------


def hashes(own: random.Random) -> None:
    hash(own.random())


def keys(own: random.Random) -> None:
    {own.uniform(0.5, 1.5): 1}


def converts(own: random.Random) -> None:
    float(np.float32(own.gauss(0, 1)))


@pytest.mark.parametrize("use", [hashes, keys, converts])
def test_a_drawn_float_that_is_made_plain_is_known_at_its_first_recording(use: Any) -> None:
    own = random.Random(0)

    def step(x: Tensor) -> Tensor:
        use(own)
        return x.sin()

    captured = fz.capture(step)
    x = torch.ones(3)
    with pytest.warns(
        fz.errors.UncapturableWarning, match=r"`draw_1` at .*own.*, a text, a key or an"
    ):
        while not captured.stats.captures:
            captured(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            assert torch.equal(captured(x), x.sin())
    assert (captured.stats.captures, captured.stats.replays) == (1, 0)


def test_a_drawn_choice_may_return() -> None:
    own, scales = random.Random(0), {0.5: 1.0, 0.25: 2.0}

    def step(x: Tensor) -> Tensor:
        return x * scales[own.choice([0.5, 0.25])]

    captured = fz.capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            captured(torch.ones(3))
    assert captured.stats.captures == 2 and captured.stats.replays > 20


def branches(self: Trainer, x: Tensor) -> Tensor:
    if random.random() < 0.5:
        x = x * self.rng.normal()
    return x


def chooses(self: Trainer, x: Tensor) -> Tensor:
    name = self.python.choice(["flip", "keep"])
    return x.flip(0) if name == "flip" else x


def picks(self: Trainer, x: Tensor) -> Tensor:
    return x + x[self.rng.integers(2)] + x[self.legacy.randint(2)]


def stops_late(self: Trainer, x: Tensor) -> Tensor:
    y = x * self.rng.normal()
    if y.sum().item() > 0:  # known after the graph has run
        y = y * 2
    return y


@pytest.mark.parametrize(
    ("augment", "programs"), [(branches, 2), (chooses, 2), (picks, 4), (stops_late, 2)]
)
def test_each_outcome_has_a_program_and_no_failed_guard_moves_a_generator(
    augment: Any, programs: int
) -> None:
    captured = compared(augment, calls=24)
    assert captured.stats.captures == programs
    assert captured.stats.replays >= 12, captured.explain()


def as_a_rate(self: Trainer, x: Tensor) -> Tensor:
    return nn.functional.dropout(x, self.rng.uniform(0, 0.5), training=False)


def test_a_number_that_c_code_takes_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 2)
    captured = compared(as_a_rate)
    assert captured.stats.replays == 0
    assert any("draw_1" in text for text in captured.stats.guard_failures)


# -- generators that change between calls ----------------------------------------------------------


def reseeds(self: Trainer, i: int) -> None:
    if i % 4 == 3:
        random.seed(i)
        np.random.seed(i)
        self.python.seed(i)


def replaces(self: Trainer, i: int) -> None:
    if i == 8:
        self.rng, self.python = np.random.default_rng(30), random.Random(40)
        self.layer.old[0] = np.random.RandomState(50)


def test_a_seed_between_calls_needs_no_other_program() -> None:
    assert compared(of_all_generators, reseeds).stats.captures == 1


@pytest.mark.parametrize(
    ("augment", "name"),
    [
        (lambda self, x: mixup(self, x) * self.python.random(), "self.rng"),
        (in_a_forward, "layer.old.0"),
    ],
)
def test_another_generator_is_noticed(augment: Any, name: str) -> None:
    captured = compared(augment, replaces)
    assert captured.stats.captures == 2
    (missed,) = captured.stats.guard_failures
    assert missed == f"`{name}` is another generator"


def test_an_exception_leaves_the_generator_in_its_place() -> None:
    def fails(self: Trainer, x: Tensor) -> Tensor:
        mixup(self, x)
        raise ValueError("no")

    trainer = Trainer(mixup)
    captured, rng = fz.capture(trainer.step), trainer.rng
    captured(torch.ones(4, 3))
    trainer.augment = fails
    with pytest.raises(ValueError, match="no"):
        captured(torch.ones(4, 3))
    assert trainer.rng is rng


# -- refusals --------------------------------------------------------------------------------------


def permutes(self: Trainer, x: Tensor) -> Tensor:
    return x[torch.from_numpy(self.rng.permutation(4))]


def fills(self: Trainer, x: Tensor) -> Tensor:
    return x + torch.tensor(self.legacy.normal(size=3)).float()


def shuffles(self: Trainer, x: Tensor) -> Tensor:
    order = [0, 1, 2, 3]
    self.python.shuffle(order)
    return x[order]


_beta = np.random.beta
_draw = random.random


def by_held_functions(self: Trainer, x: Tensor) -> Tensor:
    return x * _beta(1, 1)


def by_held_functions_of_python(self: Trainer, x: Tensor) -> Tensor:
    return x * _draw()


def draws_and_more(self: Trainer, x: Tensor) -> Tensor:
    return x * self.python.random() + len(self.python.randbytes(3))


def seeds_by_a_computed_name(self: Trainer, x: Tensor) -> Tensor:
    """From the second call on the step leaves the state that it has found."""
    self.seeds(random)
    return x * random.random()


def seeds_numpy_by_a_computed_name(self: Trainer, x: Tensor) -> Tensor:
    self.seeds(np.random)
    return x * np.random.rand()


def seeds_its_own_by_a_computed_name(self: Trainer, x: Tensor) -> Tensor:
    self.seeds(self.legacy)
    return x * self.legacy.normal()


def seeds_and_draws_nothing(self: Trainer, x: Tensor) -> Tensor:
    self.seeds(self.python)
    return x * 2


@pytest.mark.parametrize(
    ("augment", "name"),
    [
        (seeds_by_a_computed_name, "random"),
        (seeds_numpy_by_a_computed_name, "numpy.random"),
        (seeds_its_own_by_a_computed_name, "self.legacy"),
        (seeds_and_draws_nothing, "self.python"),
        (permutes, "self.rng"),
        (fills, "self.legacy"),
        (shuffles, "self.python"),
        (by_held_functions, "numpy.random"),
        (by_held_functions_of_python, "random"),
        (draws_and_more, "self.python"),
    ],
)
def test_what_moves_a_generator_otherwise_is_refused(augment: Any, name: str) -> None:
    captured = compared(augment, on_uncapturable="eager")
    assert captured.stats.replays == 0
    (error,) = captured.core.refused.values()
    assert str(error).startswith(
        f"draws from `{name}`, reads or writes it, which a replay would not"
    )


def test_a_generator_of_two_places_is_refused() -> None:
    def twice(self: Trainer, x: Tensor) -> Tensor:
        return x * self.rng.random() * self.other.random()  # type: ignore[attr-defined]

    def between(self: Trainer, i: int) -> None:
        self.other = self.rng  # type: ignore[attr-defined]

    captured = compared(twice, between, on_uncapturable="eager")
    assert captured.stats.replays == 0
    assert "draws from `self.rng`" in captured.explain()


def test_a_program_that_draws_is_not_saved(tmp_path: Any) -> None:
    with pytest.raises(SaveError, match=r"draws from `self\.rng`"):
        compared(mixup).save(tmp_path / "step.fzp")


class Seeding:
    """Seeds its generator in one kind of call; at its first one the generator has that state already."""

    def __init__(self) -> None:
        self.python = random.Random(4)

    def step(self, x: Tensor) -> Tensor:
        if x.shape[0] == 5:
            self.python.seed(4)
            return x * self.python.random()
        return x * 2


def test_a_seed_in_the_step_that_the_generator_has_already() -> None:
    eager, ours = Seeding(), Seeding()
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for n in (3, 3, 3, 5, 5, 5, 5):
        x = torch.ones(n)
        assert torch.equal(eager.step(x), captured(x))
