"""`step.stats`: counts of the calls of a captured step, and figures of its latest program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.step.vote import collectives

_FAILURES_KEPT = 100


@dataclass(frozen=True, slots=True)
class ProgramCounts:
    """Figures of one program and its recording; the fields are those of `Stats`."""

    ops: int
    resizes: int
    nodes_recorded: int
    nodes: int
    collectives: Counter[str]
    inputs: int
    guards: int

    @staticmethod
    def of(recorder: Recorder, nodes_recorded: int, program: Program) -> ProgramCounts:
        """program: after the passes. nodes_recorded: the number of nodes before the passes."""
        return ProgramCounts(
            ops=len(recorder.records),
            resizes=sum(r.target is RESIZE_STORAGE for r in recorder.records),
            nodes_recorded=nodes_recorded,
            nodes=program.nodes(),
            collectives=collectives(program),
            inputs=len(program.inputs),
            guards=len(program.facts) + len(program.guards) + len(program.value_guards),
        )


@dataclass(slots=True)
class Stats:
    """Counts of all calls so far, and figures of the latest program.

    calls = warmups + captures + replays + audits + eager (a warm-up was recorded and not kept; `eager` ran without
    being recorded). rare: those of `eager` whose kind came too seldom to be recorded, on this rank or on
    another. waiting: those of `eager` whose program waited for its passes.
    guard_failures: the last hundred messages.
    predictions: first calls of predicted programs that were as predicted, and whose programs are kept; mispredictions:
    those that were not. Both are among `audits`. instances: predicted programs that were replayed at their first call.
    audit_failures: the audits that found a difference; differences: their last hundred messages.
    ops, resizes: the numbers in the recording. nodes_recorded, nodes: in the graph before and after the passes.
    backwards: replayed backwards of a captured forward. reruns: forwards that ran again for a backward that was not
    recorded.
    """

    warmups: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    rare: int = 0
    waiting: int = 0
    audits: int = 0
    predictions: int = 0
    instances: int = 0
    mispredictions: int = 0
    audit_failures: int = 0
    differences: list[str] = field(default_factory=list)
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

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self.warmups + self.captures + self.replays + self.audits + self.eager

    def missed(self, reason: str) -> None:
        """A guard did not hold."""
        self.guard_failures.append(reason)
        del self.guard_failures[:-_FAILURES_KEPT]

    def differed(self, message: str) -> None:
        """An audit found a difference."""
        self.audit_failures += 1
        self.differences.append(message)
        del self.differences[:-_FAILURES_KEPT]

    def captured(self, counts: ProgramCounts) -> None:
        """A program was made and is kept."""
        self.captures += 1
        for each in fields(counts):
            setattr(self, each.name, getattr(counts, each.name))
