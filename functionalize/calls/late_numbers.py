"""Numbers that a repeated call changes: later calls of the step read them, and a replay has them after that call alone.

    scheduler.step()
    print(optimizer.param_groups[0]["lr"])      a late number: a replay reads it when it prints

Invariant: an op or a guard that needs a late number is refused by name, since it would run before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from functionalize.errors import UncapturableError
from functionalize.ir.guards import NumberGuard
from functionalize.ir.inputs import Call
from functionalize.ir.scalars import Applied, ScalarInput, bottom_up, evaluated
from functionalize.planning.timeline.timeline import Category


@dataclass(frozen=True, slots=True, eq=False)
class LateNumber:
    """The source of a number that a repeated call has set. what: for messages. now: reads it."""

    what: str
    now: Callable[[], Any]
    category: ClassVar[Category] = Category.OPTIMIZER_STATE

    def resolve(self, call: Call) -> Any:
        raise LookupError(f"{self.what} is set by a call that the step makes")


def _leaves(expression: Any) -> list[Any]:
    done: dict[Any, None] = {}
    for part in bottom_up(expression, done):
        done[part] = None
    return [part for part in done if not isinstance(part, Applied)]


def is_late(expression: Any) -> bool:
    """Whether an expression depends on late numbers alone, so that it can be computed when a call is repeated."""
    leaves = _leaves(expression)
    return bool(leaves) and all(map(_is_late, leaves))


def _is_late(leaf: Any) -> bool:
    return isinstance(leaf, ScalarInput) and isinstance(leaf.source, LateNumber)


def late_value(expression: Any) -> Any:
    """The value of such an expression now."""
    return evaluated(expression, lambda leaf: leaf.source.now())


def check_not_needed(sources: Iterable[Any], guards: Iterable[Any]) -> None:
    """Raise `UncapturableError` if a program needs a late number.

    sources: of its inputs. guards: those before the graph.
    """
    found = [(source.what, "") for source in sources if isinstance(source, LateNumber)]
    for guard in guards:
        if isinstance(guard, NumberGuard):
            late = filter(_is_late, _leaves(guard.expression))
            found += [(leaf.source.what, f" {guard.where}") for leaf in late]
    for what, where in found:
        raise UncapturableError(
            f"reads {what} after a call that sets it{where}: a replay makes that call at the end of the step, so "
            "make it there"
        )
