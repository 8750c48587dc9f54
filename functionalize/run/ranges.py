"""Ranges in the trace of a profiler: the parts of a step in its replay, which has no calls of modules.

    Optimizer.step#AdamW.step                             the step's own `record_function`s, those of torch.optim too
    forward / backward / recompute / optimizer            the phase; a recomputation is inside its backward
        model / model.layers.0 / model.layers.0.mlp       the modules that were called, by their full names
            FSDP::unshard (layers.0)                      what FSDP2 does for which group

Every range nests in those above it. Code without ranges has no trace of them: `boxed` compiles other code while a
profiler runs. Invariant: ranges change no value and no order of ops; an exception leaves none entered.
A range without an op in the graph is not shown; nor are ranges between two replays' graphs: guards, the epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.profiler import record_function

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize._compat.fsdp import FSDP_LABEL
from functionalize.ir.phases import phase_of
from functionalize.ir.waits import WAIT

# Names, outermost first; a number tells two ranges of one name apart that follow each other.
Path = tuple[tuple[str, int], ...]
_OF_OPTIMIZERS = "Optimizer."


def path_of(node: fx.Node, before: Path) -> Path:
    """The ranges of a node. before: those of the node before, in which a node without a phase runs.

    A wait was moved to the first read of the result: what has begun the collective may have ended.
    """
    phase, meta = phase_of(node), node.meta
    if phase is None:
        return before
    if node.target is WAIT:
        around = before[:-1] if before and before[-1][0].startswith(FSDP_LABEL) else before
        return (*around, *_of_fsdp(meta))
    modules = list(meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or ())
    path: list[tuple[str, int]] = []
    inner: list[list[tuple[str, int]]] = [[] for _ in range(len(modules) + 1)]
    for name, number, outer in meta.get("ranges", ()):
        if outer is None and not name.startswith(_OF_OPTIMIZERS):
            path.append((name, number))
        else:
            within = min(outer or 0, len(modules)) if "nn_module_stack" in meta else 0
            inner[within].append((name, number))
    path += [(each, 0) for each in ((BACKWARD, phase) if phase == RECOMPUTE else (phase,))]
    for at, own in enumerate(inner):
        path += [(modules[at - 1], 0), *own] if at else own
    return (*path, *_of_fsdp(meta))


def _of_fsdp(meta: Mapping[str, Any]) -> Path:
    group, role = meta.get("fsdp", ("", ""))
    return ((f"{FSDP_LABEL}{role}{f' ({group})' if group else ''}", 0),) if role else ()


def in_ranges(run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A function that calls `run(move, ...)`: `move(path)` leaves the current ranges and enters those of a path."""

    def run_in_ranges(*args: Any) -> Sequence[Any]:
        entered: list[record_function] = []
        current: Path = ()

        def move(path: Path) -> None:
            nonlocal current
            kept = 0
            while kept < min(len(path), len(current)) and path[kept] == current[kept]:
                kept += 1
            while len(entered) > kept:
                entered.pop().__exit__(None, None, None)
            for name, _ in path[kept:]:
                entered.append(record_function(name))
                entered[-1].__enter__()
            current = path

        try:
            return run(move, *args)
        finally:
            move(())

    return run_in_ranges
