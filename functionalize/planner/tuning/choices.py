"""What one layer can save and what it can recompute: the best choices, from all to nothing.

    choices = frontier(piece)
    choices[0], choices[-1]           as autograd saves it; all recomputed (plain checkpointing)
    choice.nbytes, choice.seconds     kept beyond what plain checkpointing keeps; spent on recomputation

Under selective checkpointing every op that is not saved runs again, whether its result is needed or not, so seconds and
bytes are sums over ops: a knapsack, solved exactly for each budget. Budgets are 1/32 of the largest apart at least.
Random ops are all saved or all recomputed: one that was saved alone would shift the numbers of the others.
Invariant: bytes fall and seconds rise from one choice to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from functionalize.planner.tuning.pieces import LayerPiece, PieceOp
from functionalize.planner.tuning.solver import LinearRow, solve

_STEPS = 32
Saved = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class LayerChoice:
    """A choice for one layer.

    saved: as in `LayerPolicy`. nbytes: kept beyond what plain checkpointing keeps. seconds: of recomputation.
    """

    saved: Saved | None
    nbytes: int
    seconds: float


def frontier(piece: LayerPiece) -> list[LayerChoice]:
    """The choices for a layer that no other one betters in both bytes and seconds."""
    found = [LayerChoice(None, piece.saved - piece.held, 0.0)]
    ops = [op for op in piece.ops if op.seconds and not op.fixed]
    if any(op.random and op.fixed and op.seconds for op in piece.ops):
        ops = [op for op in ops if not op.random]
    step = max(piece.saved // _STEPS, 1)
    budget = (
        piece.saved - piece.held - step
    )  # closer ones differ by less than the tolerance of the solver
    while ops and budget >= 0:
        kept = _kept(ops, budget)
        nbytes = sum(op.nbytes for op in kept)
        if not kept:
            break
        left = piece.recompute - sum(op.seconds for op in kept)
        if left < found[-1].seconds or nbytes >= found[-1].nbytes:  # by rounding alone
            break
        found.append(LayerChoice(_named(kept), nbytes, left))
        budget = nbytes - step
    if found[-1].nbytes > 0:
        found.append(LayerChoice((), 0, piece.recompute))
    return found


def _kept(ops: list[PieceOp], budget: int) -> list[PieceOp]:
    """The ops to save that spare most seconds within a budget of bytes."""
    rows = [LinearRow([op.nbytes for op in ops], 0, budget)]
    random = [i for i, op in enumerate(ops) if op.random]
    for first, second in pairwise(random):
        rows.append(LinearRow([(i == first) - (i == second) for i in range(len(ops))], 0, 0))
    solved = solve([-op.seconds for op in ops], rows, [1] * len(ops))
    return [] if solved is None else [op for op, x in zip(ops, solved.values, strict=True) if x]


def _named(ops: list[PieceOp]) -> Saved:
    calls: dict[str, list[int]] = {}
    for op in ops:
        calls.setdefault(op.name, []).append(op.call)
    return tuple((name, tuple(found)) for name, found in calls.items())
