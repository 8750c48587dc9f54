"""Random state in Python that a step moves: holders, what the step does to each, what happens between calls.

example = MovingExample(("counts", "appends a loss"), ("object", "dict"), resets=(None, 1, None))
world = MovingWorld(example)
world.step(x)          moves `world.held[i]` by the move number i
world.reset(1)         sets the numbers of holder 1 back, from outside
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.laws.python_worlds import SPECIAL


class Holder:
    """Numbers, a tensor, lists, a dict and generators, in attributes."""

    def __init__(self) -> None:
        self.count, self.total, self.phase = 0, 0.0, 0
        self.last: Any = None
        self.switch: Any = None
        self.losses: list[Any] = []
        self.kept: list[Any] = []
        self.read: list[Any] = []
        self.by_name: dict[str, Any] = {"count": 0, "loss": 0.0}
        self.numbers = [0, 0.0]
        self.g, self.rng = torch.Generator().manual_seed(5), random.Random(5)
        self.specials = [make() for make in SPECIAL.values()]
        for each in self.specials:
            each.count, each.total = 0, 0.0

    @property
    def drawn(self) -> Any:
        """The states of its generators, and what it counts in special objects."""
        counts = [(each.count, each.total) for each in self.specials]
        return self.g.get_state(), self.rng.getstate(), counts


def counts(h: Holder, x: Tensor) -> Any:
    h.count += 1


def counts_and_reads(h: Holder, x: Tensor) -> Any:
    h.count += 3
    return x * h.count


def adds(h: Holder, x: Tensor) -> Any:
    h.total += x.sum().item()


def averages(h: Holder, x: Tensor) -> Any:
    h.total = h.total * 0.5 + x.sum().item() * 0.25
    return x + h.total


def takes_turns(h: Holder, x: Tensor) -> Any:
    h.phase = (h.phase + 1) % 2
    return x * 2 if h.phase else x * 3


def starts_again(h: Holder, x: Tensor) -> Any:
    h.phase += 1
    if h.phase == 3:
        h.phase = 0


def keeps(h: Holder, x: Tensor) -> Any:
    h.last = x.detach() * 2


def keeps_and_reads(h: Holder, x: Tensor) -> Any:
    was = h.last
    h.last = x.detach() + 1
    return x if was is None else x - was


def appends_a_loss(h: Holder, x: Tensor) -> Any:
    h.losses.append(x.mean().item())


def appends_a_tensor(h: Holder, x: Tensor) -> Any:
    h.kept.append(x.mean())


def appends_a_record(h: Holder, x: Tensor) -> Any:
    h.count += 1
    h.losses.append({"loss": x.mean().item(), "count": h.count, "x": [x.sum(), "a"]})


def appends_and_reads(h: Holder, x: Tensor) -> Any:
    h.read.append(x.mean().item())
    return x * len(h.read)


def enters(h: Holder, x: Tensor) -> Any:
    h.by_name["loss"] = x.mean().item()
    h.by_name["x"] = x * 1
    h.by_name["count"] += 1


def changes_elements(h: Holder, x: Tensor) -> Any:
    h.numbers[0] += 2
    h.numbers[1] -= h.numbers[0] / 3


def toggles(h: Holder, x: Tensor) -> Any:
    h.switch = None if h.switch else True


def exchanges(h: Holder, x: Tensor) -> Any:
    h.total, h.numbers[1] = h.numbers[1] + 0.5, h.total


def draws_noise(h: Holder, x: Tensor) -> Any:
    return x + torch.randn(x.shape, generator=h.g) * torch.rand((), generator=h.g).item()


def draws_in_place(h: Holder, x: Tensor) -> Any:
    return x * torch.empty_like(x).bernoulli_(0.5, generator=h.g)[torch.randperm(3, generator=h.g)]


def draws_a_number(h: Holder, x: Tensor) -> Any:
    h.total += h.rng.gauss(0, 1)
    return x * h.rng.uniform(0.5, 1.5)


def draws_and_decides(h: Holder, x: Tensor) -> Any:
    return x * 2 if torch.rand((), generator=h.g).item() < 0.5 else x * 3


def counts_in_special_objects(h: Holder, x: Tensor) -> Any:
    for each in h.specials:
        each.count += 1
        each.total += x.sum().item()
    return x * h.specials[-1].count


MOVES: dict[str, Callable[[Holder, Tensor], Any]] = {
    each.__name__: each
    for each in (
        *(counts, counts_and_reads, adds, averages, takes_turns, starts_again, keeps, keeps_and_reads),
        *(appends_a_loss, appends_a_tensor, appends_a_record, appends_and_reads, enters, changes_elements),
        *(toggles, exchanges, draws_noise, draws_in_place, draws_a_number, draws_and_decides),
        counts_in_special_objects,
    )
}  # fmt: skip
_HARD = frozenset({"appends_and_reads", "toggles"})  # no program repeats them


@dataclass(frozen=True)
class MovingExample:
    """moves: by name, and the number of the holder that each moves. resets: for each call, a holder set back before."""

    moves: tuple[tuple[str, int], ...]
    resets: tuple[int | None, ...]
    trains: bool

    @property
    def is_hard(self) -> bool:
        """Whether no program can repeat the moves. Two toggles of one holder leave it as it was."""
        return any(
            name in _HARD and not (name == "toggles" and self.moves.count((name, at)) == 2)
            for name, at in self.moves
        )


class MovingWorld:
    """One copy of an example's state, and its step."""

    def __init__(self, example: MovingExample) -> None:
        torch.manual_seed(0)
        self.held = [Holder(), Holder()]
        self.layer = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        moves = [(MOVES[name], self.held[at]) for name, at in example.moves]
        layer = self.layer

        def step(x: Tensor) -> Tensor:
            out = layer(x)
            if example.trains:
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            out = out.detach()
            for move, holder in moves:
                moved = move(holder, out)
                out = out if moved is None else moved
            return out  # type: ignore[no-any-return]

        self.step = step

    def reset(self, at: int | None) -> None:
        """Set the numbers of a holder back."""
        if at is not None:
            self.held[at].count, self.held[at].total, self.held[at].phase = 0, 0.0, 0
            self.held[at].losses.append("reset")
            self.held[at].g.manual_seed(7)
            self.held[at].rng.seed(7)
            for each in self.held[at].specials:
                each.count = 0

    @property
    def state(self) -> list[Any]:
        """All that the step may move."""
        weights = self.layer.state_dict().values()
        return [*map(vars, self.held), *weights, *(each.drawn for each in self.held)]


@st.composite
def moving_examples(draw: st.DrawFn) -> MovingExample:
    """Any example."""
    move = st.tuples(st.sampled_from([*MOVES]), st.integers(0, 1))
    moves = draw(st.lists(move, min_size=1, max_size=3))
    resets = draw(st.lists(st.sampled_from([None, None, None, 0, 1]), min_size=8, max_size=10))
    return MovingExample(tuple(moves), tuple(resets), draw(st.booleans()))
