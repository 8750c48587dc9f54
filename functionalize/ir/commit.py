"""`commit(*values)`: the point in a graph after which its ops may write inputs. A function without a result.

    pow_1 = 0.9 ** item                          no input has changed yet
    commit = commit(item_1)                      the guards on values are checked, on all ranks
    mul_ = aten.mul_.Tensor(weight, sub)         an error after this point leaves inputs partly updated, as in eager

A program at stage INPLACE has one such node, whose arguments are the values of its value guards, in their order. A
runner calls the `commit` that a replay passes to it (`Program.replay`), which raises `GuardError` if a guard fails
on any rank. By itself, in a graph module that is called directly, it does nothing.

Invariant: before it, ops write only memory that the graph itself has allocated; after it there is no random op, no
collective and no number for Python, since each of these may fail or wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import has_side_effect

Commit = Callable[..., None]


@has_side_effect
def commit(*values: Any) -> None:
    """Does nothing; a runner replaces it by the replay's check of the value guards."""


def is_commit(node: fx.Node) -> bool:
    """Whether a node is the `commit` of its graph."""
    return node.target is commit
