"""The ops that a recording refuses, and the effects it notes because a replay cannot repeat them.

    w.untyped_storage().resize_(0); w + 1     EmptyStorageError, where eager would read freed memory
    x.expand(2, 3).add_(1)                    OverlappingMutationError
    torch.seed()                              a note in `checks.unrepeatable`: the step continues, no program is kept

Invariants: a refused op has not run, so that nothing segfaults and no tensor has changed. A step that eager can run is
never interrupted: on real tensors, an op that a program cannot represent is noted; on fakes (`trace`) it raises at
once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import nodes_of
from functionalize._compat.dispatch import disable_current_modes, is_in_python
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.stacks import CapturedTraceback, stack_here
from functionalize.discharge.byte_ranges import check_bounds, check_order, check_overlap
from functionalize.discharge.resize import checked_nbytes
from functionalize.discharge.rules.collectives import check_known_collective
from functionalize.discharge.rules.mutations import is_mutating, written_arguments
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import (
    ForeignStorageError,
    FunctionalizeError,
    UncapturableError,
    UnorderedMutationError,
    UnsupportedOpError,
    UnsupportedTensorError,
)
from functionalize.ir.generators import generator_states
from functionalize.ir.ops import OpRecord, TensorRef, geometry_of, refs_in
from functionalize.ir.scalars import is_known_before_run
from functionalize.program.early_guard import is_early
from functionalize.recorder.eager_formulas import autocast_devices
from functionalize.recorder.op_kinds import (
    BLANK,
    CHECKED_INPLACE_VIEWS,
    MAY_GROW,
    UNCHECKED_VIEWS,
    OpKind,
    is_data_free,
    more_than_strided,
    storage_of,
    tensors_in,
)
from functionalize.recorder.storage_table import StorageTable
from functionalize.scalars.counted_sizes import CountedSizes, sizing_numbers
from functionalize.scalars.live_scalars import plain
from functionalize.util.other_threads import other_thread
from functionalize.util.packages import is_standard_file
from functionalize.util.user_stack import line_of, located, user_frames

aten = torch.ops.aten
c10d, FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
_NOT_IN_A_PROGRAM = (
    UnsupportedOpError,
    UnsupportedTensorError,
    ForeignStorageError,
    UnorderedMutationError,
)


_OF_KNOWN_SIZE = (
    "compute with a mask (`torch.where`), which needs no such size, or read it outside the step"
)
_OF_LOADERS = "torch/utils/data/"
_FETCHES = "fetches a batch by a sampler that draws the order,"


def _advice_on(size: str) -> str:
    """An edit for a step that relies on a size. size: what the step does, as text."""
    if size.startswith(_FETCHES):
        return "fetch it outside the step, and pass it as an argument"
    return _OF_KNOWN_SIZE


class Checks:
    """The checks of one recording.

    for_real: the step runs on the user's tensors and must run to its end.
    unrepeatable: reasons why a replay cannot repeat the step, as text with the user's line; no text twice.
    once: effects that a cached function had, which later calls of the step have not.
    has_exchanged: whether ranks exchanged Python objects, which is one of those reasons.
    in_effect: how many replaced functions have noted an effect and are running: what they do is the same effect.
    repeated: the calls that a replay makes again, as text with the user's line.
    clock: the first read of a clock, or of something else that changes by itself, as text with the user's line.
    outside: the name of each tensor that was found with an autograd history, by the node that made it.
    goes_outside: whether the program is that of a backward of the caller's graph, so that such histories are its own.
    own_clock: the first one in the user's code, not in that of a library.
    is_watched: whether all such reads were seen; None: they were not looked for.
    sizes: those of results that depend on data.
    """

    __slots__ = (
        "_drawn",
        "_lines",
        "_storages",
        "clock",
        "for_real",
        "goes_outside",
        "has_exchanged",
        "in_effect",
        "is_watched",
        "once",
        "outside",
        "own_clock",
        "repeated",
        "sizes",
        "unrepeatable",
    )

    def __init__(self, storages: StorageTable, for_real: bool) -> None:
        self.for_real = for_real
        self.unrepeatable: list[str] = []
        self.once: list[str] = []
        self.has_exchanged = False
        self.outside: dict[Any, str] = {}
        self.goes_outside = False
        self.in_effect = 0
        self.repeated: list[str] = []
        self.clock: str | None = None
        self.own_clock: str | None = None
        self.is_watched: bool | None = None
        self._lines: set[str] = set()
        self.sizes = CountedSizes()
        self._storages = storages
        self._drawn: tuple[Tensor, ...] | None = (
            None  # the generators' states after the last random op
        )

    # -- refusals ------------------------------------------------------------------------------

    def refuse(self, op: OpKind, record: OpRecord) -> None:
        """Raise, before an op runs, if eager would raise (or read freed memory) or if no rule supports the op.

        To be called for ops that may be refused (`op.may_be_refused`) and for those on a resized storage.
        """
        func = record.target
        if func is RESIZE_STORAGE:
            checked_nbytes(record.args[1], self._storages.infos[record.args[0].storage].name)
            return
        if op.makes:
            raise more_than_strided(f"makes a {op.makes} tensor")
        if op.refused_collective:
            check_known_collective(func)
        if op.checked_inplace_view:
            ref = record.args[0]
            if len(ref.geometry.size) > 1 or func is not aten.t_.default:
                self._check_bounds(ref, "takes a view of")
        if op.reads_no_data:
            return
        refs = refs_in([record.args, record.kwargs])
        if self._storages.met_resized:
            for ref in refs:
                self._check_bounds(ref, "uses")
        if op.mutating:
            expanded = [ref for ref in refs if ref.geometry.overlaps]
            for at, name in written_arguments(func) if expanded else ():
                inside = at is not None and at < len(record.args)
                written = record.args[at or 0] if inside else record.kwargs.get(name)
                for ref in refs_in(written):
                    name = self._storages.infos[ref.storage].name
                    check_overlap(name, ref.geometry)
                    for other in expanded:
                        if other.storage == ref.storage:
                            copies = func is aten.copy_.default
                            check_order(name, ref.geometry, other.geometry, copies)

    def after_view(self, record: OpRecord, args: tuple[Any, ...], out: Any) -> None:
        """Raise if a view extends past the end of its storage and eager raises; restore the storage's size.

        To be called after those that read and write no data, if on a resized storage or with strides of their own
        (`op.restrides`).
        """
        func = record.target
        if func in MAY_GROW or func in CHECKED_INPLACE_VIEWS:
            return
        for tensor in tensors_in(args):
            info = self._storages.info_of(tensor)
            if info is not None:
                self._storages.keep_size(info, storage_of(tensor))
        if func in UNCHECKED_VIEWS or (func is aten.t.default and out.dim() < 2):
            return
        for tensor in tensors_in(out):
            info = self._storages.info_of(tensor)
            if info is not None:
                try:
                    g = geometry_of(tensor)
                    check_bounds(info.name, g, info.nbytes, info.original_nbytes, "takes a view of")
                except FunctionalizeError as error:
                    raise located(error, record) from None

    def _check_bounds(self, ref: TensorRef, verb: str) -> None:
        info = self._storages.infos[ref.storage]
        if info.resized:
            check_bounds(info.name, ref.geometry, info.nbytes, info.original_nbytes, verb)

    def unwritten(self, records: Iterable[OpRecord]) -> str | None:
        """Why a replay would read memory with other contents: an op reads what `aten.empty` made and no op wrote.

        C++ code fills such a tensor without an op (`at::tensor` of a list of numbers).
        """
        blank: set[int] = set()
        for record in records:
            func = record.target
            if func in BLANK:
                blank |= {ref.storage for ref in refs_in(record.outputs)}
            elif blank and not is_data_free(func):
                read = refs_in([record.args, record.kwargs])
                used = {ref.storage for ref in read if ref.geometry.numel} & blank
                fills = func.namespace != "aten" or is_mutating(func)
                if used and not (fills or torch.Tag.nondeterministic_seeded in func.tags):
                    return (
                        f"{func} reads a tensor that was made without contents and that no op filled, "
                        f"{line_of(record.traceback)}: fill it, or make it by torch.zeros"
                    )
                blank -= used
        return None

    # -- notes ---------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Note a reason why a replay cannot repeat the step."""
        if text not in self.unrepeatable:
            self.unrepeatable.append(text)

    def backward_elsewhere(self, outputs: Iterable[Any]) -> None:
        """Note that a thread that records nothing runs the backward of these, if the step has seen one of them."""
        tensors = (t for t in outputs if type(t) is Tensor)
        if any(self._storages.info_of(t) is not None for t in tensors):
            thread, stack = threading.current_thread().name, stack_here()
            frames = user_frames(stack.summary() if stack is not None else [])
            is_users = bool(frames) and not is_standard_file(frames[-1].filename)
            where = f" {line_of(stack)}" if is_users else ""  # `Thread(target=loss.backward)`
            self.note(
                f"its backward runs in another thread ({thread}){where}: only ops of the thread that calls the step "
                "are recorded: call backward() in that thread"
            )

    def backward_outside(self, outputs: Iterable[Any]) -> None:
        """Note that a backward goes on into a graph that was made before the step, which no replay has."""
        met = self.outside.keys() & nodes_of(outputs).keys() if self.outside else ()
        for name in sorted(self.outside[node] for node in met):
            self.note(
                f"its backward goes through `{name}`, which was computed before the step, into ops that no replay "
                f"runs, {line_of(stack_here())}: compute `{name}` inside the step, or detach it"
            )

    def note_or_raise(self, error: FunctionalizeError) -> None:
        """Raise an error that eager would raise, too; note one about programs only, if the step runs for real."""
        if not (self.for_real and isinstance(error, _NOT_IN_A_PROGRAM)):
            raise error from None
        self.note(str(error))

    def refuse_here(self, what: str, instead: str = "do so outside the step") -> None:
        """Note, or raise on fakes, that the user's line does something that a program cannot represent.

        instead: what to do.
        """
        where = line_of(CapturedTraceback.extract())
        self.note_or_raise(UnsupportedOpError(f"the step {what}, {where}: {instead}"))

    def before(self, op: OpKind, record: OpRecord) -> None:
        """Before a random op runs: note a generator that was set without a record."""
        if self.for_real:
            self.check_generators(
                lambda: f"before {record.target} {line_of(record.traceback)}"
            )  # the user's line is looked up for a message only: that takes longer than the op

    def after_foreign(self, op: OpKind, record: OpRecord) -> None:
        """After an op of a library that is not torch's: note what its schema does not say, or what no guard checks."""
        if not self.for_real:
            return
        where = line_of(record.traceback)
        if autocast_devices() and (op.op.namespace == "aten" or is_in_python(op.op)):
            self.note(
                f"{record.target} calls other ops under autocast, which changes them and is off in a replay, {where}: "
                "switch autocast off around the call, and cast its arguments"
            )
        if op.returns_numbers:
            self.note(
                f"{record.target} returns a number to Python, which no guard checks, {where}: let it return a "
                "tensor, and call .item()"
            )
        if not op.random and self._moved():
            self.note(
                f"{record.target} draws random numbers, which its schema does not say, {where}: give it the tag "
                "torch.Tag.nondeterministic_seeded (torch.library.custom_op(..., tags=[...]))"
            )
            self.generators_moved()

    # -- sizes ---------------------------------------------------------------------------------

    def read_sizes(
        self, recorder: Any, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Before an op whose result has a size that depends on data: read the size, so that a guard checks it.

        The guard must be checked before the graph runs, see `unknown_sizes`, except where the op's rule sets the size.
        """
        if not self.for_real:
            return

        def text() -> str:
            where = line_of(record.traceback)
            return f"{record.target} gives a result whose size depends on data {where}"

        with recorder:
            found = sizing_numbers(record.target, args, kwargs)
            fake = any(isinstance(t, FakeTensor) for t in tensors_in([*args, *kwargs.values()]))
            if found is None or (found and fake):
                self.note(text())
                return
            for number, bound in found:
                count = plain(number.item())
                if count != bound and recorder.records:  # an audit keeps none
                    self.sizes.add(recorder.records[-1], text(), count)

    def sized_by(self, recorder: Any, what: str) -> None:
        """The sizes of results depend on the number that was read last. what: reads it, as text."""
        if recorder.records:  # an audit keeps none
            stack = CapturedTraceback.extract()
            fetches = any(_OF_LOADERS in frame.filename for frame in stack.summary())
            self.sizes.add(
                recorder.records[-1], f"{_FETCHES if fetches else what} {line_of(stack)}"
            )

    def unknown_sizes(self, recorder: Any) -> list[str]:
        """Why sizes that the step relies on are known neither before the graph runs nor when an op of it has run."""
        early = recorder.early_records()
        texts = [f"{text.rstrip(':')}: {_advice_on(text)}" for text in self.sizes.unknown(early)]
        if _learns_late_integers(recorder, early):
            texts += [
                f"{record.target} sends parts of different sizes {line_of(record.traceback)}, and the step relies on "
                "an integer that it reads; replays of other ranks may send parts of other sizes: pad the parts to one "
                "size"
                for record in recorder.records
                if _is_uneven_exchange(record)
            ]
        return list(dict.fromkeys(texts))

    def note_changes_each_time(self, what: str, instead: str) -> None:
        """Note a call whose result differs at every step; raise on fakes. instead: what to do."""
        where = line_of(CapturedTraceback.extract())
        text = f"{what} {where}, which a replay cannot repeat: {instead}"
        if not self.for_real:
            raise UncapturableError(text)
        self.note(text)
        self._drawn = None

    def note_effect(self, what: str, line: str, once: bool = False) -> None:
        """Note an effect outside tensors, which a replay would not have; of one line the first. See effects.py."""
        if not self.for_real or line in self._lines:
            return
        self._lines.add(line)
        if once:
            self.once.append(f"{what} {line}")
        else:
            self.note(f"{what} {line}, which a replay would not: do so outside the step")

    def unknown_arguments(self) -> str | None:
        """Why a call that is to be repeated may have arguments that change by themselves, or None."""
        if not self.repeated or (self.clock is None and self.is_watched is not False):
            return None
        why = f"the step reads {self.clock}"
        if self.clock is None:
            why = (
                "whether the step reads a clock cannot be seen, since it profiles or calls `locals`"
            )
        return (
            f"{self.repeated[0]}, which a replay would not: its arguments may change by themselves, since {why}; "
            "do so outside the step"
        )

    def note_exchange(self, collective: str) -> None:
        """Note that ranks exchange Python objects, whose numbers no guard checks."""
        if self.for_real:
            self.has_exchanged = True
            where = line_of(CapturedTraceback.extract())
            self.note(
                f"exchanges Python objects by {collective}() {where}: put numbers in a tensor, and call "
                "torch.distributed.all_reduce() or all_gather(); exchange other objects outside the step"
            )

    def note_python_read(self, tensor: Tensor, how: str, instead: str) -> None:
        """Note that Python reads the numbers of a tensor, which no guard checks. instead: what to do."""
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            where = line_of(CapturedTraceback.extract())
            self.note(f"Python reads a tensor {how} {where}: {instead}")

    # -- random generators ---------------------------------------------------------------------

    def begin(self) -> None:
        """A run begins: remember the states of the generators, unless they are known."""
        if self._drawn is None:
            self.generators_moved()

    def generators_moved(self) -> None:
        """A recorded op has changed the generators: remember their states."""
        if self.for_real:
            self._drawn = generator_states()

    def forget_generators(self) -> None:
        """Forget the generators' states: changes before the next run begins are not the step's."""
        self._drawn = None

    def check_generators(self, where: Callable[[], str]) -> None:
        """Note a generator that was set without a recorded op, which a replay would not set.

        where: returns the text for the message that says when.
        """
        if self._moved():
            thread = other_thread()
            if thread is not None:
                self.note(
                    f"a random generator moves while the step is recorded, {where()}, and {thread} runs beside it: "
                    "let it draw from a `torch.Generator` of its own"
                )
            else:
                self.note(
                    f"a random generator is set inside the step, {where()}, by something else than "
                    "torch.manual_seed, torch.set_rng_state or torch.random.fork_rng: use these"
                )
        self._drawn = generator_states()

    def _moved(self) -> bool:
        """Whether a generator has changed since its state was last remembered."""
        now = generator_states()
        with disable_current_modes():  # of a recording around this one, or of the user
            return self._drawn is not None and not all(map(torch.equal, now, self._drawn))


def _learns_late_integers(recorder: Any, early: frozenset[int]) -> bool:
    """Whether the step relies on an integer that is known only when the graph has run.

    If numbers are not live yet, the recording is not kept.
    """
    log = recorder.scalar_log
    return log is not None and any(
        type(fact.value) is int
        and not is_known_before_run(fact.expression)
        and not is_early(fact.expression, early)
        for fact in log.facts.values()
    )


def _is_uneven_exchange(record: OpRecord) -> bool:
    """Whether an op sends parts of different sizes to other ranks."""
    if record.target in (c10d.alltoall_base_.default, FUNCTIONAL.all_to_all_single.default):
        return any(len(set(each)) > 1 for each in record.args if type(each) is list)
    return False
