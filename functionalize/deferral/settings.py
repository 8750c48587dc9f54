"""The settings of the process that change what ops compute: pending ops run under those with which they were recorded.

    settings = read()
    with under(settings): ...       sets what is different now, and restores it

Invariant: on exit every setting is as on entry, also after an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from functionalize._compat.dispatch import mkldnn_is_on, set_mkldnn

Settings = tuple[Any, ...]


def _deterministic() -> Any:
    if not torch.are_deterministic_algorithms_enabled():
        return False
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else True


def _set_deterministic(mode: Any) -> None:
    torch.use_deterministic_algorithms(mode is not False, warn_only=mode == "warn")


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, _set_deterministic),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (mkldnn_is_on, set_mkldnn),
    (torch.get_default_dtype, torch.set_default_dtype),
)


def read() -> Settings:
    """The values now."""
    return tuple([getter() for getter, _ in _SETTINGS])


@contextmanager
def under(settings: Settings) -> Iterator[None]:
    """A context in which the settings have these values."""
    now = read()
    with ExitStack() as undo:
        if now != settings:
            for (_, setter), before, wanted in zip(_SETTINGS, now, settings, strict=True):
                if before != wanted:
                    undo.callback(setter, before)
                    setter(wanted)
        yield
