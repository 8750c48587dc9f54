"""What each op means to storages: one file per op family, and the registry from `OpOverload` to rule.

An op without a rule is handled by its schema: it makes a view if its output shares a storage with an
input, it mutates what its schema marks as written, else it is pure (see `functionalizer.py`).
"""

from functionalize.discharge.rules import (  # noqa: F401  (importing registers)
    collectives,
    copies,
    factories,
    op_quirks,
    out_rounding,
    random,
    resizes,
)
from functionalize.discharge.rules.registry import RULES, rule, rule_of

__all__ = ["RULES", "rule", "rule_of"]
