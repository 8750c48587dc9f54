"""A dispatch mode that torch is patched for while it is active: what sees a step's ops, and what does not dispatch.

    class Recorder(..., Watcher)         with Recorder() as recorder: step(batch)

Invariant: leaving the context restores torch's methods and the mode stack, whatever happened.
"""

from __future__ import annotations

from typing import Any, Self

from functionalize._compat import TorchDispatchMode
from functionalize.frontend.patches import PATCHES


class Watcher(TorchDispatchMode):
    """May be entered again while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._entered = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that hides the handler from Dynamo costs as much as an op

    def __enter__(self) -> Self:
        PATCHES.install()
        try:
            super().__enter__()
        except BaseException:
            PATCHES.remove()
            raise
        self._entered += 1
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            PATCHES.remove()
            self._entered -= 1
