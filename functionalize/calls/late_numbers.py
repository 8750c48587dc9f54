"""Numbers that a repeated call changes: later calls of the step read them, and a replay has them after that call alone.

    scheduler.step()
    print(optimizer.param_groups[0]["lr"])      a late number: a replay reads it when it prints
    return loss, scheduler.get_last_lr()[0]     `LateRead` after the call, `LateValue` in the result

Invariant: an op or a guard that needs a late number is refused by name, since it would run before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from functionalize._compat.graphs import pytree
from functionalize._compat.stacks import CapturedTraceback
from functionalize.cost.categories import Category
from functionalize.errors import UncapturableError
from functionalize.ir.guards import NumberGuard
from functionalize.ir.inputs import Call
from functionalize.ir.scalars import Applied, ScalarInput, bottom_up, evaluated
from functionalize.scalars.live_scalars import is_live
from functionalize.util.structure import of_leaves, with_others
from functionalize.util.user_stack import line_of


@dataclass(frozen=True, slots=True, eq=False)
class LateNumber:
    """The source of a number that a repeated call has set. what: for messages. now: reads it. after: the call.

    read: the stack that has read it first, or has set it.
    """

    what: str
    now: Callable[[], Any]
    after: Any = None
    read: CapturedTraceback | None = None
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


# -- in the result of a step -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LateRead:
    """An effect: a replay reads a late number, after the call that has set it and before another one sets it again."""

    leaf: ScalarInput
    what: ClassVar[str] = "returns a number that it has set"

    def repeat(self, call: Call, value: Any) -> None:
        """Read it, for `filled`."""
        source: Any = self.leaf.source
        call.memo[self.leaf] = source.now()


@dataclass(frozen=True, slots=True, eq=False)
class LateValue:
    """In the place of a number in a step's result: its expression of late numbers."""

    expression: Any


Effects = Sequence[tuple[Any, Any]]


def with_late_values(result: Any, effects: Effects) -> tuple[Any, list[tuple[Any, Any]]]:
    """A result with `LateValue`s in the places of numbers that are late, and the effects with the reads of those.

    Numbers within objects that pytree does not open stay: they are refused.
    """
    found = list(effects)
    leaves, spec = pytree.tree_flatten(result)
    late = [at for at, leaf in enumerate(leaves) if is_live(leaf) and is_late(leaf.node.expression)]
    if not late:
        return result, found
    read: dict[Any, None] = {}
    for at in late:
        expression = leaves[at].node.expression
        read |= dict.fromkeys(_leaves(expression))
        leaves[at] = LateValue(expression)
    for leaf in read:
        after = next((i for i, (e, _) in enumerate(found) if e is leaf.source.after), None)
        if after is None:
            return result, list(effects)
        found.insert(after + 1, (LateRead(leaf), None))
    return of_leaves(leaves, spec), found


def reads_late(effects: Iterable[Any]) -> bool:
    """Whether results of a program with these effects hold `LateValue`s."""
    return any(type(each) is LateRead for each in effects)


def filled(result: Any, call: Call) -> Any:
    """The result of a replay with its late numbers, after the effects of the replay."""

    late = [leaf for leaf in pytree.tree_leaves(result) if type(leaf) is LateValue]
    return with_others(
        result, {id(each): evaluated(each.expression, call.memo.__getitem__) for each in late}
    )


def check_not_needed(sources: Iterable[Any], guards: Iterable[Any]) -> None:
    """Raise `UncapturableError` if a program needs a late number.

    sources: of its inputs. guards: those before the graph.
    """
    late_sources = [source for source in sources if isinstance(source, LateNumber)]
    found = [(source.what, f", {line_of(source.read)}") for source in late_sources]
    for guard in guards:
        if isinstance(guard, NumberGuard):
            late = filter(_is_late, _leaves(guard.expression))
            found += [(leaf.source.what, f", {guard.where}") for leaf in late]
    for what, where in found:
        raise UncapturableError(
            f"reads {what} after a call that sets it{where}: a replay makes that call at the end of the step, so "
            "make it there, and return or print the number as it is"
        )
