"""How much of a machine's peak a kernel reaches: a curve over its size, for each kind of kernel.

    matmul = Curve(((2e7, 0.05), (1e9, 0.4), (1e11, 0.75)), low=0.8, high=1.05, source="...")
    matmul.share(1e10), matmul.rate(1e10, peak=989e12)
    Efficiency((("matmul", matmul), ("memory", memory)), about="published figures of h100").curve("norm")

    kind                                             size                          share of
    matmul, convolution                              FLOPs                         FLOP/s of the dtype
    attention, cudnn attention, and their backwards  length of the keys            the same
    norm, pointwise, costly pointwise, random        bytes read and written        memory bandwidth
    numbers, reduction, copy, lookup, optimizer;
    memory: any of these
    all-gather, reduce-scatter, all-reduce,          bytes that a rank sends       link bandwidth, on one node
    all-to-all, broadcast; collective: any of these
    network: any of these                            the same                      adapter bandwidth, between nodes
    sustained                                        seconds                       the speed of any kernel alone

`sustained` is what is left of every kernel's speed in a training step, where the device is hot, collectives take a part
of it, caches are cold and kernels have gaps between them; it multiplies the shares above, not those of collectives.
A kind without a curve has that of its family, then the peak itself. Between two points the share follows a power of the
size, outside of them it is that of the nearest point. A share is at most 1, and more work never takes less time: a
`Curve` in which it would is refused. low and high are factors on the share: between them lies what was published.
Raises `PlanError`: points that are not such a curve.
"""

from __future__ import annotations

import bisect
import itertools
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from functionalize.errors import PlanError

MATMUL, CONVOLUTION = "matmul", "convolution"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention backward"
CUDNN, CUDNN_BACKWARD = "cudnn attention", "cudnn attention backward"
NORM, POINTWISE, COSTLY, REDUCTION = "norm", "pointwise", "costly pointwise", "reduction"
RANDOM = "random numbers"
COPY, LOOKUP, OPTIMIZER, MEMORY = "copy", "lookup", "optimizer", "memory"
COLLECTIVE, NETWORK = "collective", "network"
SUSTAINED = "sustained"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast")

# Kind -> the kind whose curve it has if it has none of its own.
_FAMILY: Mapping[str, str] = types.MappingProxyType(
    {
        CONVOLUTION: MATMUL,
        CUDNN_BACKWARD: CUDNN,
        CUDNN: ATTENTION,
        ATTENTION_BACKWARD: ATTENTION,
        ATTENTION: MATMUL,
        COSTLY: POINTWISE,
        RANDOM: COSTLY,
        NORM: REDUCTION,
        POINTWISE: MEMORY,
        REDUCTION: MEMORY,
        COPY: MEMORY,
        LOOKUP: COPY,
        OPTIMIZER: POINTWISE,
        **dict.fromkeys(COLLECTIVES, COLLECTIVE),
        NETWORK: COLLECTIVE,
    }
)
KINDS = frozenset((*_FAMILY, *_FAMILY.values(), SUSTAINED))


@dataclass(frozen=True)
class Curve:
    """The share of a peak that kernels of one kind reach, over their size.

    points: (size, share) with ascending sizes, 0 < share <= 1. low, high: factors on the share, low <= 1 <= high.
    source: of the figures.
    """

    points: tuple[tuple[float, float], ...]
    low: float = 1.0
    high: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        shares = [share for _, share in self.points]
        if not self.points or not all(math.isfinite(n) and n > 0 for n in (*sizes, *shares)):
            raise PlanError(f"a curve has points of positive numbers, not {self.points!r}")
        if any(a >= b for a, b in itertools.pairwise(sizes)):
            raise PlanError(f"the sizes of a curve ascend, and these do not: {sizes}")
        if max(shares) > 1:
            raise PlanError(f"a share is at most 1, and a curve has {max(shares)}")
        if not 0 < self.low <= 1 <= self.high < math.inf:
            raise PlanError(f"a range is low <= 1 <= high, not {self.low} and {self.high}")
        times = [size / share for size, share in self.points]
        if any(b < a * (1 - 1e-9) for a, b in itertools.pairwise(times)):
            raise PlanError(f"more work takes less time on the curve {self.points!r}")

    def __repr__(self) -> str:
        (small, first), (large, last) = self.points[0], self.points[-1]
        return f"<Curve: {first:.0%} at {small:.2g} to {last:.0%} at {large:.2g}>"

    def share(self, size: float) -> float:
        """The share at a size; of a size that is 0 or less, the first share."""
        sizes, logs = self._logs
        at = bisect.bisect_right(sizes, size)
        if at == 0 or at == len(sizes):
            return self.points[max(at - 1, 0)][1]
        (x0, y0), (x1, y1) = logs[at - 1], logs[at]
        return math.exp(y0 + (y1 - y0) * (math.log(size) - x0) / (x1 - x0))

    @cached_property
    def _logs(self) -> tuple[list[float], list[tuple[float, float]]]:
        logs = [(math.log(size), math.log(share)) for size, share in self.points]
        return [size for size, _ in self.points], logs

    def scaled(self, factor: float) -> Curve:
        """The same curve with every share multiplied, at most 1, and no range."""
        points = tuple((size, min(1.0, share * factor)) for size, share in self.points)
        return replace(self, points=points, low=1.0, high=1.0)


@dataclass(frozen=True)
class Efficiency:
    """The curves of a machine, by kind. about: where they come from, for reports."""

    curves: tuple[tuple[str, Curve], ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        for kind, _ in self.curves:
            if kind not in KINDS:
                raise PlanError(f"no kind of kernel `{kind}`; there are {', '.join(sorted(KINDS))}")

    def __repr__(self) -> str:
        return f"<Efficiency: {self.origin}, {len(self.curves)} curves>"

    @property
    def origin(self) -> str:
        """Where the curves come from."""
        return self.about or ("of an unnamed source" if self.curves else "every kernel at its peak")

    def curve(self, kind: str) -> Curve | None:
        """The curve of a kind, or of its family; None: such kernels run at the peak."""
        return self._found.get(kind)

    @cached_property
    def _found(self) -> dict[str, Curve]:
        own, found = dict(self.curves), {}
        for kind in KINDS:
            at: str | None = kind
            while at is not None and at not in own:
                at = _FAMILY.get(at)
            if at is not None:
                found[kind] = own[at]
        return found

    def share(self, kind: str, size: float) -> float:
        """The share of its peak that a kernel of a kind and size reaches."""
        curve = self.curve(kind)
        return 1.0 if curve is None else curve.share(size)

    @property
    def ranges(self) -> bool:
        """Whether any curve has a range."""
        return any((curve.low, curve.high) != (1.0, 1.0) for _, curve in self.curves)

    def at(self, end: str) -> Efficiency:
        """The efficiency at the `low` or at the `high` end of every range."""
        ends = ((kind, curve.scaled(getattr(curve, end))) for kind, curve in self.curves)
        return replace(self, curves=tuple(ends))


PEAK = Efficiency()


class Host(NamedTuple):
    """Seconds of the host for what it does beside the kernels, where these do not hide it (a CPU).

    forward, backward: of an op, views included, that eager dispatches in that phase. optimizer: of each tensor of it.
    gather, reduce: of FSDP2's hooks and buffers around an all-gather and a reduce-scatter.
    node: of a node of a replay, views included. call: of a replay, for its inputs, guards and epilogue. collective: of
    a collective of a replay, longer than it takes alone.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    node: float = 0.0
    call: float = 0.0
    collective: float = 0.0
