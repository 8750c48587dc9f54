"""The registry from op to rule, filled at import time and never changed after.

A rule is `fn(engine, record) -> outputs`. It reads with `engine.read(ref)`, writes with
`engine.write(ref, value)`, emits with `engine.emit.call(op, ...)`, and returns the values of the outputs in
the structure of `record.outputs` (None where the output is a tensor the op was given).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functionalize.core.discharge import Functionalizer
    from functionalize.core.ops import OpRecord

    Rule = Callable[[Functionalizer, OpRecord], Any]

RULES: dict[Any, Rule] = {}
RuleT = TypeVar("RuleT", bound="Callable[..., Any]")


def rule(*targets: Any) -> Callable[[RuleT], RuleT]:
    """Register a rule for each of `targets` (an `OpOverload`, or a sentinel of ours)."""

    def register(fn: RuleT) -> RuleT:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has a rule already")
            RULES[target] = fn
        return fn

    return register
