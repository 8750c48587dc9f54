"""`step.stats`: what a captured step has done so far, and what its latest program was made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from functionalize.core.program import Program
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.frontend.agreement import collectives

if TYPE_CHECKING:
    from functionalize.frontend.dispatch import Recorder

_FAILURES_KEPT = 100


@dataclass(slots=True)
class Stats:
    """What happened so far, and what the latest program was made from.

    calls = warmups + captures + replays + eager (a warm-up ran eagerly and was not kept; `eager` ran without
    being recorded). ops, resizes: recorded. guard_failures: the last hundred. nodes_recorded, nodes: in the graph
    before and after the passes. Of a captured forward: backwards that were replayed, and forwards that were run
    again for a backward that was not recorded.
    """

    warmups: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    guard_failures: list[str] = field(default_factory=list)
    ops: int = 0
    resizes: int = 0
    nodes_recorded: int = 0
    nodes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    inputs: int = 0
    guards: int = 0
    backwards: int = 0
    reruns: int = 0

    def missed(self, reason: str) -> None:
        """A guard did not hold."""
        self.guard_failures.append(reason)
        del self.guard_failures[:-_FAILURES_KEPT]

    def count(self, recorder: Recorder, recorded: int, program: Program) -> None:
        """A program was made, from `recorded` nodes before the passes."""
        self.nodes_recorded, self.nodes = recorded, program.nodes()
        self.ops = len(recorder.records)
        self.resizes = sum(r.target is RESIZE_STORAGE for r in recorder.records)
        self.collectives = collectives(program)
        self.inputs = len(program.inputs)
        self.guards = len(program.facts) + len(program.guards) + len(program.value_guards)
