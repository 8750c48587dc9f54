"""The time and the peak of a configuration, composed of pieces, and the best policy of its layers.

    numbers = whole(short, longer, runs)         two short models tell what a layer adds
    solved(options, counts, budget)              how many layers of each run take which option: exactly

    peak     = P + sum of the bytes of the layers' options      P: every layer recomputed and resharded
    seconds  = optimizer + accumulate * (S + sum of the seconds of the options)

Recomputation hides what communication of the backward is exposed beside it: an option costs what is more than that.
The model is linear on purpose, so that the choice is an integer program; `tune.py` plans for real what is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from functionalize.tuning.choices import Choice
from functionalize.tuning.policy import LayerPolicy
from functionalize.tuning.solver import Row, solve


@dataclass(frozen=True)
class Numbers:
    """The figures of a planned step: requested bytes of eager's peak, modelled seconds.

    backward: seconds of the backward in which communication is exposed inside layers, not before the first or after
    the last. optimizer: seconds of the optimizer.
    """

    peak: float
    seconds: float
    exposed: float
    backward: float
    optimizer: float

    def plus(self, other: Numbers, times: float = 1.0) -> Numbers:
        """The sum, the other one taken so many times."""
        return Numbers(*(a + times * b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def between(self, other: Numbers, share: float) -> Numbers:
        """The numbers at a share of the way to the other ones."""
        return self.plus(other, share).plus(self, -share)


@dataclass(frozen=True)
class Option:
    """What one layer can do: bytes and seconds beyond a layer that is recomputed and resharded, and saves all."""

    policy: LayerPolicy
    nbytes: float
    seconds: float
    recompute: float


def options(
    choices: Sequence[Choice],
    reshards: Mapping[bool | int, tuple[float, float]],
    hidden: float,
    times: int = 1,
) -> list[Option]:
    """The options of a layer that none betters in both: each choice with each resharding.

    reshards: value -> (bytes, seconds) beyond `True`. hidden: seconds of recomputation that cost nothing.
    times: how often a step runs the layer.
    """
    found = [
        Option(
            LayerPolicy(choice.saved, reshard),
            choice.nbytes + nbytes,
            times * (max(choice.seconds - hidden, 0.0) + seconds),
            times * choice.seconds,
        )
        for choice in choices
        for reshard, (nbytes, seconds) in reshards.items()
    ]
    best: list[Option] = []
    for each in sorted(found, key=lambda o: (o.nbytes, o.seconds, o.recompute)):
        if not best or each.seconds < best[-1].seconds:
            best.append(each)
    return best


@dataclass(frozen=True)
class Assigned:
    """The options of the layers of each run, in their order. gap: how far from the best at most, as a fraction."""

    runs: tuple[tuple[Option, ...], ...]
    gap: float

    @property
    def nbytes(self) -> float:
        """The bytes of all."""
        return sum(o.nbytes for run in self.runs for o in run)

    @property
    def seconds(self) -> float:
        """The seconds of all."""
        return sum(o.seconds for run in self.runs for o in run)

    @property
    def recompute(self) -> float:
        """The seconds in which ops run again, hidden ones included."""
        return sum(o.recompute for run in self.runs for o in run)


def solved(
    found: Sequence[Sequence[Option]], counts: Sequence[int], budget: float
) -> Assigned | None:
    """The options with the least seconds within a budget of bytes; None: nothing fits.

    found: the options of each run. counts: its layers. Layers that hold less come first: what they do not hold, no
    later layer has beside it.
    """
    flat = [(run, option) for run, each in enumerate(found) for option in each]
    if not flat:
        return Assigned((), 0.0) if budget >= 0 else None
    rows = [
        Row([float(run == i) for run, _ in flat], counts[i], counts[i]) for i in range(len(found))
    ]
    rows.append(Row([option.nbytes for _, option in flat], -float("inf"), budget))
    solution = solve([option.seconds for _, option in flat], rows, [counts[run] for run, _ in flat])
    if solution is None:
        return None
    chosen: list[list[Option]] = [[] for _ in found]
    for (run, option), count in zip(flat, solution.values, strict=True):
        chosen[run] += [option] * count
    for run in chosen:
        run.sort(key=lambda option: (option.nbytes, -option.recompute))
    return Assigned(tuple(map(tuple, chosen)), solution.gap)

