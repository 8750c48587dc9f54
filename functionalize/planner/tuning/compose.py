"""The time and the peak of a configuration, composed of pieces, and the best policy of its layers.

    numbers = whole(short, longer, runs)         two short models tell what a layer adds
    solved(options, counts, budget)              how many layers of each run take which option

    peak     = P + sum of the bytes of the layers' options      P: every layer recomputed and resharded; or, in the
                                                                backward of the last layer, more than P without its own
    seconds  = optimizer + accumulate * (S + sum of the seconds of the options)

Recomputation hides what communication of the backward is exposed beside it: an option costs what is more than that.
The model is linear on purpose, so that the choice is an integer program; `tune.py` plans for real what is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from functionalize.planner.tuning.choices import LayerChoice
from functionalize.planner.tuning.policy import LayerPolicy
from functionalize.planner.tuning.solver import LinearRow, solve


@dataclass(frozen=True)
class StepNumbers:
    """The figures of a planned step: requested bytes of eager's peak, modelled seconds.

    backward: seconds of the backward in which communication is exposed inside layers, not before the first or after
    the last. optimizer: seconds of the optimizer. host: bytes in host memory.
    """

    peak: float
    seconds: float
    exposed: float
    backward: float
    optimizer: float
    host: float = 0.0

    def plus(self, other: StepNumbers, times: float = 1.0) -> StepNumbers:
        """The sum, the other one taken so many times."""
        return StepNumbers(
            *(a + times * b for a, b in zip(astuple(self), astuple(other), strict=True))
        )

    def between(self, other: StepNumbers, share: float) -> StepNumbers:
        """The numbers at a share of the way to the other ones."""
        return self.plus(other, share).plus(self, -share)


@dataclass(frozen=True)
class Option:
    """What one layer can do.

    nbytes: beyond a layer that is recomputed and resharded. seconds: beyond one that is saved and resharded.
    recompute: seconds in which ops run again. gather: seconds beyond resharding (less than 0: not gathered again).
    """

    policy: LayerPolicy
    nbytes: float
    seconds: float
    recompute: float
    gather: float


def options(
    choices: Sequence[LayerChoice],
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
            times * seconds,
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
class LayerAssignment:
    """The options of the layers of each run, in their order. gap: how far from the best at most, as a fraction."""

    runs: tuple[tuple[Option, ...], ...]
    gap: float

    def peak(self, base: float, beside: float) -> float:
        """The peak. base: if every layer is recomputed. beside: as in `solved`."""
        nbytes = sum(o.nbytes for run in self.runs for o in run)
        return base + max(nbytes, nbytes - self.runs[-1][-1].nbytes + beside if self.runs else 0)

    @property
    def seconds(self) -> float:
        """The seconds of all."""
        return sum(o.seconds for run in self.runs for o in run)

    @property
    def recompute(self) -> float:
        """The seconds in which ops run again, hidden ones included."""
        return sum(o.recompute for run in self.runs for o in run)

    @property
    def gather(self) -> float:
        """The seconds of gathering again, beyond those of layers that are resharded."""
        return sum(o.gather for run in self.runs for o in run)


def solved(
    found: Sequence[Sequence[Option]], counts: Sequence[int], budget: float, beside: float
) -> LayerAssignment | None:
    """The options with the least seconds within a budget of bytes; None: nothing fits.

    found: the options of each run. counts: its layers. beside: bytes by which the peak is higher in the backward of the
    last layer, which does not hold its own bytes beside itself. Layers that hold less come first: what they do not
    hold, no later layer has beside it.
    """
    flat = [(run, option) for run, each in enumerate(found) for option in each]
    if not flat:
        return LayerAssignment((), 0.0) if budget >= 0 else None
    rest = [count - (run == len(counts) - 1) for run, count in enumerate(counts)]
    last = found[-1]  # the very last layer is a run of its own
    others, alone = [o.nbytes for _, o in flat], [o.nbytes for o in last]
    rows = [
        LinearRow([*(float(run == i) for run, _ in flat), *[0.0] * len(last)], count, count)
        for i, count in enumerate(rest)
    ]
    rows += [
        LinearRow([*[0.0] * len(flat), *[1.0] * len(last)], 1, 1),
        LinearRow([*others, *alone], -float("inf"), budget),
        LinearRow([*others, *[0.0] * len(last)], -float("inf"), budget - beside),
    ]
    costs = [option.seconds for _, option in flat] + [option.seconds for option in last]
    solution = solve(costs, rows, [*(rest[run] for run, _ in flat), *[1] * len(last)])
    if solution is None:
        return None
    chosen: list[list[Option]] = [[] for _ in found]
    for (run, option), count in zip(flat, solution.values, strict=False):
        chosen[run] += [option] * count
    for own in chosen:
        own.sort(key=lambda option: (option.nbytes, -option.recompute))
    chosen[-1] += [o for o, x in zip(last, solution.values[len(flat) :], strict=True) if x]
    return LayerAssignment(tuple(map(tuple, chosen)), solution.gap)
