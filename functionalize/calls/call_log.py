"""What a recording keeps about the calls that a replay makes again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from typing import Any, NamedTuple, Protocol

from functionalize.calls.own_generators import OwnGenerators
from functionalize.ir.guards import Guard
from functionalize.scalars.scalar_log import ScalarLog


class CallTarget(NamedTuple):
    """An object that a call reads or changes. what: for messages. is_still: whether what the call read is there now."""

    found: Any
    what: str
    is_still: Callable[[], bool] | None = None


class CallLog:
    """The calls of one recording.

    facts: guards of the calls. targets: the objects that they read or change: the search must find them.
    stepped: ids of those that are schedulers and were stepped. quiet_ops: how many ops were not recorded.
    communicates: whether one of the calls communicates with other ranks.
    assigned: numbers that the step has assigned to schedulers, by id of the scheduler and name.
    draws: see `draws.py`; None if generators of Python are not looked at.
    hyperparameters: the live ones, see `state/hyperparameters.py`; None where optimizers were not searched for.
    streams: `sys.stdout` and `sys.stderr` when the step began.
    own_generators: the `torch.Generator`s from which the step may draw.
    were_made: whether a replay of this call has made its calls already, which this run of it only notes.
    """

    __slots__ = (
        "assigned",
        "communicates",
        "draws",
        "facts",
        "hyperparameters",
        "own_generators",
        "quiet_ops",
        "stepped",
        "streams",
        "targets",
        "were_made",
    )

    def __init__(self) -> None:
        self.facts: list[Guard] = []
        self.targets: list[CallTarget] = []
        self.stepped: set[int] = set()
        self.assigned: dict[tuple[int, str], Any] = {}
        self.quiet_ops = 0
        self.communicates = self.were_made = False
        self.draws: Any = None
        self.own_generators = OwnGenerators()
        self.hyperparameters: Any = None
        self.streams = (sys.stdout, sys.stderr)

    def refusal(self, known: Container[int]) -> str | None:
        """Why a call at the end of a replay would not do what it does in eager, or None.

        known: ids of the objects that the search has found. The step is over.
        """
        for target in self.targets:
            if id(target.found) not in known:
                return (
                    f"{target.what} that the search for the objects of the step does not find: pass it as an "
                    "argument"
                )
            if target.is_still is not None and not target.is_still():
                return f"{target.what}, whose value the step changes after that: do it at its end"
        return None

    def guard(self, fact: Guard) -> None:
        """Add a guard, if an equal one is not there yet."""
        if fact not in self.facts:
            self.facts.append(fact)


class CallRecorder(Protocol):
    """What a repeated call needs of the recorder."""

    checks: Any
    scalar_log: ScalarLog | None
    calls: CallLog
    python_effects: list[tuple[Any, Any]]

    def quiet(self) -> Any:
        """A context in which nothing is recorded."""
        ...
