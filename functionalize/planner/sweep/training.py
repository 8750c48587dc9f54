"""What a step trains on, and what training on a number of tokens takes, at the modelled throughput of a point.

    Items(8192, "tokens").rate(seconds)      per second and rank
    run = Training(tokens=15e12, price=2.5)
    run.days(throughput, world)       days; throughput: tokens per second and rank
    run.cost(throughput)              in the currency of the price; None without a price

A price is for one GPU and one hour; there is none that is assumed. Time that is lost to failures, restarts, evaluation
and checkpoints is not modelled. Refuses (`PlanError`): numbers that are not above 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from functionalize.errors import PlanError


class Items(NamedTuple):
    """What a rank trains on in one step.

    kind: "tokens" or "samples". ranks: how many ranks train on the same ones. world: the number of all ranks.
    """

    number: int
    kind: str
    ranks: int = 1
    world: int = 1

    def rate(self, seconds: float) -> float | None:
        """Items per second and rank of a step of so many seconds."""
        return self.number / self.ranks / seconds if seconds else None


@dataclass(frozen=True)
class Training:
    """A training run. tokens: tokens or samples, what `inputs` has. price: of a GPU for an hour, in any currency.

    >>> run = fz.planner.Training(15e12, price=2.5)
    >>> round(run.days(6182, world=64)), round(run.cost(6182))  # at 6,182 tokens per second and rank
    (439, 1684999)
    """

    tokens: float
    price: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("price", self.price)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise PlanError(f"`{name}` is a number above 0, not {value!r}")

    def days(self, throughput: float | None, world: int) -> float | None:
        """Days of the run. throughput: items per second and rank; None if not known. world: the number of ranks."""
        return self.tokens / (throughput * world) / 86_400 if throughput else None

    def cost(self, throughput: float | None) -> float | None:
        """The price of the run: of all ranks for all its hours, so that their number does not matter."""
        if not throughput or self.price is None:
            return None
        return self.tokens / throughput / 3600 * self.price
