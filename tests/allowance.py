"""A context, and decorator, in which captured steps may cost what they like.

    @ample_allowance()
    def on_a_rank(kind): ...

For tests of what is recorded and compared, within a few calls, and not of how often: what a step may cost is tested in
`tests/laws/test_bound.py` and `tests/step/test_policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from functionalize.step import policy

_NAMES = ("_ALLOWANCE", "_MOST_SAVED")


@contextmanager
def ample_allowance() -> Iterator[None]:
    before = {name: getattr(policy, name) for name in _NAMES}
    for name in _NAMES:
        setattr(policy, name, 10_000.0)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(policy, name, value)
