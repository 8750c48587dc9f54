"""The factor of PREMUL_SUM, which the dispatcher does not pass: a record has `PremulSum(0.5)` for the reduce op.

    dist.reduce_scatter_tensor(out, x, PREMUL_SUM(0.5))
        -> ProcessGroup.reduce_scatter_single(out, x, options)      the reduce op has its factor
        -> c10d._reduce_scatter_base_(out, x, group, reduce_op, ..)  its kind only

The method of the process group is watched. Without the factor, as in a collective of several tensors, or where it is a
tensor, the op is refused by its rule (`util/process_groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from functionalize.util.patching import Patch
from functionalize.util.process_groups import PremulSum

# Which of the two that scatter `dist.reduce_scatter_tensor` calls depends on the release of torch.
_METHODS = ("allreduce", "_reduce_scatter_base", "reduce_scatter_single")


def patches(recorders: Callable[[], Iterable[Any]]) -> Iterator[Patch]:
    """The replaced methods. recorders: those of the current thread."""
    if dist.is_available():
        for name in _METHODS:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                yield dist.ProcessGroup, name, _noted(original, recorders)


def _noted(original: Any, recorders: Callable[[], Iterable[Any]]) -> Any:
    def reduce(self: Any, *args: Any, **kwargs: Any) -> Any:
        factor = _factor(args[-1] if args else None)
        if factor is None:
            return original(self, *args, **kwargs)
        places = [(recorder, len(recorder.records)) for recorder in recorders()]
        try:
            return original(self, *args, **kwargs)
        finally:
            for recorder, start in places:
                for record in recorder.records[start:]:
                    if getattr(record.target, "namespace", "") == "c10d":
                        record.args = tuple(_with_factor(a, factor) for a in record.args)

    reduce.__doc__ = original.__doc__
    return reduce


def _factor(options: Any) -> float | None:
    op = getattr(options, "reduceOp", None)
    if op is None or op != dist.ReduceOp.PREMUL_SUM:
        return None
    factor = op.__getstate__()[1]
    return factor if isinstance(factor, float) else None


def _with_factor(argument: Any, factor: float) -> Any:
    is_op = isinstance(argument, torch.ScriptObject) and hasattr(argument, "op")
    return PremulSum(factor) if is_op else argument
