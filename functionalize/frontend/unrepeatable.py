"""What runs while a step is recorded and no replay could repeat: noted, the step goes on, no program is kept.

    recorder.unfaithful      what ran, in words with its line

Invariant: a step that eager can run is never stopped. Where nothing runs for real (`trace`), what no program can
hold is raised at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functionalize._compat import CapturedTraceback, FakeTensor, disable_current_modes
from functionalize.core.generators import generator_states
from functionalize.core.ops import OpRecord, refs_in
from functionalize.core.where import line_of
from functionalize.errors import (
    ForeignStorageError,
    FunctionalizeError,
    UncapturableError,
    UnsupportedOpError,
    UnsupportedTensorError,
)
from functionalize.frontend.known_storages import KnownStorages
from functionalize.frontend.op_kinds import OpKind

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_NOT_IN_A_PROGRAM = (UnsupportedOpError, UnsupportedTensorError, ForeignStorageError)


class Unrepeatable(KnownStorages):
    """The notes of one recording. for_real: whether the step runs on the user's tensors, and must run to its end."""

    def __init__(self, for_real: bool) -> None:
        super().__init__()
        self.for_real = for_real
        self.unfaithful: list[str] = []
        self.drawn: tuple[Tensor, ...] | None = None  # the generators after the last random op

    def check_repeatable(self, op: OpKind, record: OpRecord) -> None:
        if op.random:
            self.check_generators(f"before {record.target} {line_of(record.traceback)}")
        masks = [r for r in refs_in(record.args)[1:] if r.geometry.dtype in _MASKS]
        if op.sized_by_data and (record.target is not aten.index.Tensor or masks):
            self.unfaithful.append(
                f"{record.target} gives a result whose size depends on data {line_of(record.traceback)}"
            )

    def note_or_raise(self, error: FunctionalizeError) -> None:
        """What eager cannot do either is raised; what only a program cannot hold, after the step has run."""
        if not (self.for_real and isinstance(error, _NOT_IN_A_PROGRAM)):
            raise error from None
        if str(error) not in self.unfaithful:
            self.unfaithful.append(str(error))

    def check_generators(self, where: str) -> None:
        """Note a generator that was set past torch's functions: no op says so, a replay would not."""
        now = generator_states()
        with disable_current_modes():  # of a recording around this one, or of the user
            same = self.drawn is None or all(map(torch.equal, now, self.drawn))
        if not same:
            self.unfaithful.append(
                f"a random generator is set inside the step, {where}, by something else than "
                "torch.manual_seed, torch.set_rng_state or torch.random.fork_rng: use these"
            )
        self.drawn = now

    def unrepeatable(self, what: str) -> None:
        """`what` happened, which comes out otherwise at every step: no replay could repeat it."""
        text = f"{what} {line_of(CapturedTraceback.extract())}, which a replay cannot repeat"
        if not self.for_real:
            raise UncapturableError(text)
        self.unfaithful.append(text)
        self.drawn = None

    def side_effect(self, what: str) -> None:
        """The step did something beside its tensors that a replay would not do again."""
        if self.for_real:
            where = line_of(CapturedTraceback.extract())
            self.unfaithful.append(f"{what} {where}, which a replay would not")

    def read_by_python(self, tensor: Tensor, how: str) -> None:
        """`tensor.numpy()` or `.tolist()` was called: Python sees numbers that no guard knows."""
        if not self.suspended and not isinstance(tensor, FakeTensor):
            where = line_of(CapturedTraceback.extract())
            self.unfaithful.append(f"Python reads a tensor by .{how}() {where}: use .item()")
