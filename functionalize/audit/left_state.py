"""What an audited step leaves beside ops, results and gradients, compared with what a replay of the program leaves.

    audited.also = LeftState(before, cached.effects).difference      before: the state when the step began

A count that no op reads, a metric that a helper keeps, a tensor that a hook keeps: replays move them as the program
says, or not at all. Compared are the modes of modules, and that the step changed nothing that is guarded and that no
replay moves, as for a recording (`step/step_state.py`).
Invariant: it reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from functionalize.fsdp.python_state import FSDPEffects
from functionalize.recorder.recorder import Recorder
from functionalize.state.step_guards import ModuleGuard


class GuardedBefore(Protocol):
    """The state when the step began: `EntryState`."""

    @property
    def modules(self) -> ModuleGuard: ...

    def changed(self, modes: bool = True, explained: Container[int] = ()) -> str | None:
        """A change that the step made and that a replay would not repeat; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class LeftState:
    """One call. before: the state when it began. effects: what the program does to FSDP2's state and to modes."""

    before: GuardedBefore
    effects: FSDPEffects

    def difference(
        self, recorder: Recorder, effects: Sequence[Any], explained: Container[int]
    ) -> str | None:
        """The first difference, as text. explained: ids of the generators from which the program draws, too."""
        changed = self.before.changed(modes=False, explained=explained)
        if changed is not None:
            return f"the step {changed}"
        modes = FSDPEffects().with_modes(self.before.modules.changed_modes())
        return difference_of_modes(modes, self.effects)


def difference_of_modes(now: FSDPEffects, program: FSDPEffects) -> str | None:
    """Text if a step has left modules in other modes than its program leaves them, or None."""
    if _modes(now.assigned) == _modes(program.assigned):
        return None
    return "the step leaves modules in another mode, training or evaluation, than the program"


def _modes(assigned: Sequence[tuple[Any, Any]]) -> set[tuple[int, bool]]:
    return {(id(place.table), mode) for place, mode in assigned if place.key == "training"}
