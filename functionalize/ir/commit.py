"""`commit(*values)`: the place in a graph from which on its ops may write inputs. A function without a value.

    pow_1 = 0.9 ** item                          nothing of the caller's has changed
    commit = commit(item_1)                      the guards on values are checked, the ranks agree
    mul_ = aten.mul_.Tensor(weight, sub)         from here on, as in eager, a step that fails is half done

A program at stage INPLACE has one such node, whose arguments are the values of its value guards, in their order. A
runner calls the `commit` that a replay gives it (`Program.replay`), which raises `GuardError` if a guard fails
on any rank. By itself, in a graph module that is called directly, it does nothing.

Invariant: before it, ops write nothing but memory that the graph itself has made; after it there is no
random op, no collective and no number, each of which may make a replay end, or wait for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import has_side_effect

Commit = Callable[..., None]


@has_side_effect
def commit(*values: Any) -> None:
    """Nothing, unless a runner puts a replay's own check in its place."""


def is_commit(node: fx.Node) -> bool:
    """Whether a node is the place from which on ops may write inputs."""
    return node.target is commit
