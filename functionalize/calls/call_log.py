"""What a recording keeps about the calls that a replay makes again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Iterable
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize._compat.references import address
from functionalize.calls.own_generators import OwnGenerators
from functionalize.ir.guards import Guard
from functionalize.scalars.scalar_log import ScalarLog
from functionalize.util.tensor_wrappers import plain_tensors


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
    streams: `sys.stdout` and `sys.stderr` when the step began. filters: those of `warnings`, and what shows one.
    own_generators: the `torch.Generator`s from which the step may draw.
    were_made: whether a replay of this call has made its calls already, which this run of it only notes.
    read_state: what the step reads in Python now, with a method `change`; None where nothing was searched.
    """

    __slots__ = (
        "_before",
        "_computes",
        "_passed",
        "assigned",
        "communicates",
        "draws",
        "facts",
        "filters",
        "hyperparameters",
        "own_generators",
        "quiet_ops",
        "read_state",
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
        self.filters = (warnings.filters, warnings.showwarning)
        self.read_state: Callable[[], Any] | None = None
        self._before: Any = None
        self._passed: set[int] | None = None
        self._computes: str | None = None

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

    # -- calls whose code is not searched ----------------------------------------------------------

    def begin_apart(self, passed: Iterable[Tensor]) -> None:
        """A call begins that may change nothing which the step reads. passed: the tensors among its arguments."""
        self._computes = None
        self._passed = {address(tensor.untyped_storage()) for tensor in passed}
        self._before = self.read_state() if self.read_state is not None else None

    def note_op(self, op: Any, arguments: Any, info_of: Callable[[Tensor], Any]) -> None:
        """An op runs that is not recorded. info_of: what the recording knows of a tensor of the step, else None."""
        self.quiet_ops += 1
        if self._passed is None:
            return
        if torch.Tag.nondeterministic_seeded in op.tags:
            self._computes = f"it draws random numbers, by {op}"
        for tensor in chain.from_iterable(map(plain_tensors, pytree.tree_iter(arguments))):
            if (
                address(tensor.untyped_storage()) not in self._passed
                and info_of(tensor) is not None
            ):
                self._computes = f"it computes with a tensor of the step that it was not passed, by {op}: pass it"

    def end_apart(self) -> str | None:
        """The call has ended: what it has done that comes too late at the end of a replay, or None."""
        before, self._before, self._passed = self._before, None, None
        if self._computes is not None or before is None or self.read_state is None:
            return self._computes
        change: str | None = before.change(self.read_state())
        return change

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
