"""A context, and decorator, in which captured steps may cost what they like.

    @ample_allowance()
    def on_a_rank(kind): ...

For tests of what is recorded and compared, within a few calls, and not of how often: what a step may cost is tested in
`tests/laws/test_bound.py` and `tests/step/test_policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from functionalize.step.policy import ALLOWANCE, Ledger

_AMPLE = 10_000.0


@contextmanager
def ample_allowance() -> Iterator[None]:
    begin = Ledger.__init__

    def begin_with_more(self: Any, allowance: float = ALLOWANCE, is_bounded: bool = True) -> None:
        begin(self, max(allowance, _AMPLE), is_bounded)

    with mock.patch.object(Ledger, "__init__", begin_with_more):
        yield
