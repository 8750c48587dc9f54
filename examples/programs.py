"""The catalogue of small programs that resize, mutate and alias storages.

    from examples.programs import PROGRAMS, by_name

Each runs in plain eager PyTorch, forward and (with `grad`) backward, and says what a functional
program must reproduce bit for bit: outputs, input contents, storage sizes, aliasing, gradients.

| section | programs | file |
| --- | --- | --- |
| 1 | down: the data of an input is freed | `resizing.py` |
| 2 | up: an empty input is grown and written | `resizing.py` |
| 3 | up, then down: no mutation is left at exit | `resizing.py` |
| 4 | up and down around a matmul, FSDP style | `resizing.py` |
| 5 | the same, filled through views, `out=` ops, one flat buffer | `unsharding.py` |
| 6 | several cycles on one storage, with different data | `unsharding.py` |
| 7 | cycles across a graph break | `unsharding.py` |
| 8 | mutated then freed, other sizes, `set_`, DTensor | `other_sizes.py` |
| 9 | `untyped_storage().resize_` in plain Python | `other_sizes.py` |
| 10 | no resize: aliased inputs and outputs | `aliasing.py` |
"""

from __future__ import annotations

from examples import aliasing, other_sizes, resizing, unsharding
from examples.resize_program import ResizeProgram

__all__ = ["PROGRAMS", "ResizeProgram", "by_name"]

PROGRAMS: tuple[ResizeProgram, ...] = (
    resizing.PROGRAMS + unsharding.PROGRAMS + other_sizes.PROGRAMS + aliasing.PROGRAMS
)


def by_name(name: str) -> ResizeProgram:
    """The program of this name; `KeyError` names the closest ones."""
    found = {p.name: p for p in PROGRAMS}
    if name not in found:
        import difflib

        raise KeyError(f"no program {name!r}; closest: {difflib.get_close_matches(name, found)}")
    return found[name]
