"""A recorder that also sees calls of C functions, in the first recording of each kind of call.

    recorder = WatchedRecorder(...)      `file.write(...)` of an open file in the step: `Checks.unrepeatable` names it

Note [The profile function] in `effects.py` says what that costs, and why other recordings are not watched.
Invariant: Python's profile function is off while an op is handled, and afterwards as before.
"""

from __future__ import annotations

import sys
from typing import Any, Self

from functionalize.recorder.effects import CallWatch
from functionalize.recorder.patches import recorded_checks
from functionalize.recorder.recorder import Recorder
from functionalize.util.patching import set_profile


class WatchedRecorder(Recorder):
    """See `Recorder`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = CallWatch(recorded_checks, type(self))
        self.tape.stacks.handlers = 2

    def __enter__(self) -> Self:
        super().__enter__()
        if self._entered == 1:  # not before: the profile function would see each patch
            self._watch()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._entered == 1:
            self.checks.is_watched = self._calls.stop()
        super().__exit__(*exc)

    def _watch(self) -> None:
        self._calls.start()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self._calls
        if not calls.paused:  # also inside an op that is handled
            return super().__torch_dispatch__(func, types, args, kwargs)
        calls.paused = False
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            try:  # directly: the profile function would see a call of `set_profile`, at every op
                sys.setprofile(calls.profile)
            except RuntimeError:
                set_profile(calls.profile)

    def resize_storage(self, storage: Any, size: Any, original: Any) -> Any:
        if not self._calls.is_on or not self._calls.pauses:
            return super().resize_storage(storage, size, original)
        set_profile(None)
        try:
            return super().resize_storage(storage, size, original)
        finally:
            set_profile(self._calls.profile)
