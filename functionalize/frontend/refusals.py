"""What is refused before an op runs: on data that is not there, or with a meaning that no rule knows.

    w.untyped_storage().resize_(0); w + 1     EmptyStorageError, where eager would read freed memory
    x.expand(2, 3).add_(1)                    OverlappingMutationError

Invariant: an op that is refused has not run, so that nothing segfaults and nothing was changed.
"""

from __future__ import annotations

import torch

from functionalize.core.extent import check_bounds, check_overlap
from functionalize.core.ops import OpRecord, TensorRef, refs_in
from functionalize.core.resize import checked_nbytes
from functionalize.core.rules.collectives import check_known_collective
from functionalize.core.rules.mutations import written_arguments
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.frontend.op_kinds import OpKind, more_than_strided
from functionalize.frontend.unrepeatable import Unrepeatable

aten = torch.ops.aten


class Refusals(Unrepeatable):
    """The checks of a recording. Skipped for ops that no `OpKind` says may be refused, far from any resize."""

    def check(self, op: OpKind, record: OpRecord) -> None:
        """Refuse, before it runs, an op on data that is not there."""
        func = record.target
        if func is RESIZE_STORAGE:
            checked_nbytes(record.args[1], self.infos[record.args[0].storage].name)
            return
        if op.makes:
            raise more_than_strided(f"makes a {op.makes} tensor")
        if op.refused_collective:
            check_known_collective(func)
        if op.same_reach:
            ref = record.args[0]
            if len(ref.geometry.size) > 1 or func is not aten.t_.default:
                self._check_bounds(ref, "takes a view of")
        if self._near_resize and not op.looks:
            for ref in refs_in([record.args, record.kwargs]):
                self._check_bounds(ref, "uses")
        if op.mutating and not op.looks:
            for at, name in written_arguments(func):
                inside = at is not None and at < len(record.args)
                written = record.args[at or 0] if inside else record.kwargs.get(name)
                for ref in refs_in(written):
                    check_overlap(self.infos[ref.storage].name, ref.geometry)

    def _check_bounds(self, ref: TensorRef, verb: str) -> None:
        info = self.infos[ref.storage]
        if info.resized:
            check_bounds(info.name, ref.geometry, info.nbytes, info.original_nbytes, verb)
