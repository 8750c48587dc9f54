"""How a stream runs: one by one when it is new, as a program from its second time on.

    runs = Runs(passes)
    runs.run(stream)          computes what is pending; returns what it was: a `Kind`

    x.mul_(0.9); p.addcdiv_(m, v, value=-0.1)       the first time: 0.9 and -0.1 are constants
    x.mul_(0.9); p.addcdiv_(m, v, value=-0.053)     the second time: the second one is an input of the program

Two streams are of one kind if their ops, constants, sizes and aliases are equal, and the same results are held: one
dictionary of keys finds it, which compares the keys on a hit. The program of a kind has the storages from outside as
inputs, and those that are held as results. A loop computes some floats anew in each iteration (a learning rate, the
bias correction of Adam), and most never change. So each is a constant until it was another one. Floats that decide the
size of a result are part of the kind.
Invariants: each stream runs once. What the program writes it writes after all that may fail. Two numbers are equal if
they have the same bits, so 0.0 is not -0.0.
Refusals: a stream that the engine refuses, which then runs op by op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functionalize.deferral.interpreted import fill, run_one_by_one, window_on
from functionalize.deferral.stream import OutsideStorage, PendingOp, Stream
from functionalize.discharge.epilogue_actions import actions_of
from functionalize.errors import FunctionalizeError
from functionalize.ir.epilogue import Copy
from functionalize.ir.guards import AliasGuard
from functionalize.ir.inputs import Argument, Call
from functionalize.ir.ops import Geometry, OpRecord, TensorRef
from functionalize.ir.outputs import Result
from functionalize.ir.scalars import LiveNumber, ScalarInput
from functionalize.program.program import Program
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.recorder import Recorder
from functionalize.run.boxed import boxed
from functionalize.util.structure import flatten
from functionalize.util.user_stack import line_of

_MOST_PROGRAMS = 256  # that are kept
_KINDS_PER_PROGRAM = 4  # kinds without a program that are remembered


@dataclass(slots=True, eq=False)
class Kind:
    """Streams that are alike. number: in the order of discovery. ops: of one stream. line: of its first op.

    runs: how many streams there were. replays: those that a program ran. refused: why no program can be made.
    differs: how it differs from the kind found before it that it shares most with. numbers: its floats.
    """

    number: int
    ops: int
    line: str
    differs: str
    numbers: _Numbers
    runs: int = 0
    replays: int = 0
    refused: str | None = None
    compiled: _Compiled | None = None


class Runs:
    """The kinds of streams met so far, and the program of each that came twice. compiles: programs made."""

    def __init__(self, pipeline: Sequence[Any]) -> None:
        self.compiles = 0
        self._pipeline = pipeline
        self._kinds: OrderedDict[Any, Kind] = OrderedDict()
        self._found = 0

    def kinds(self) -> list[Kind]:
        """Those that are remembered, in the order of discovery."""
        return sorted(self._kinds.values(), key=lambda kind: kind.number)

    def run(self, stream: Stream) -> Kind | None:
        """Run a stream. None: nobody held what it computes, so nothing ran."""
        living = stream.living()
        if not living:
            return None
        key = self._key(stream, living)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._new(key, stream)
        self._kinds.move_to_end(key)
        kind.runs += 1
        if kind.runs > 1 and kind.numbers.compare(stream.entries):
            kind.compiled = None
        if kind.runs > 1 and kind.compiled is None and kind.refused is None:
            self._compile(kind, stream, living)
        if kind.compiled is not None:
            try:
                kind.compiled.run(stream)
                kind.replays += 1
                return kind
            except _NotRun:
                pass  # the op that raised raises again below, with everything before it done
        run_one_by_one(stream, living)
        return kind

    def _key(self, stream: Stream, living: tuple[int, ...]) -> Any:
        elements = tuple([entry.element for entry in stream.entries])
        return elements, tuple(stream.externals()), living, stream.settings

    def _new(self, key: Any, stream: Stream) -> Kind:
        line = line_of(stream.entries[0].record.traceback)
        differs, numbers = self._difference(key, stream), _Numbers(stream.entries)
        kind = Kind(self._found, stream.ops, line, differs, numbers)
        self._found += 1
        self._kinds[key] = kind
        if len(self._kinds) > _MOST_PROGRAMS * _KINDS_PER_PROGRAM:
            self._kinds.popitem(last=False)
        return kind

    def _compile(self, kind: Kind, stream: Stream, living: tuple[int, ...]) -> None:
        try:
            kind.compiled = _Compiled.of(stream, living, kind.numbers, self._pipeline)
        except FunctionalizeError as error:
            kind.refused = str(error)
            return
        self.compiles += 1
        programs = [each for each in self._kinds.values() if each.compiled is not None]
        for each in programs[: len(programs) - _MOST_PROGRAMS]:
            each.compiled = None

    def _difference(self, key: Any, stream: Stream) -> str:
        """How a new stream differs from the known one with which it has most ops in common."""
        best, kind = -1, None
        for other, known in self._kinds.items():
            same = _common(key[0], other[0])
            if same > best:
                best, kind, found = same, known, other
        if kind is None or best == 0:
            return "the first that begins so"
        if best < min(len(key[0]), len(found[0])):
            record = stream.entries[best].record
            return (
                f"differs from {kind.number} from {record.target} on, {line_of(record.traceback)}"
            )
        if len(key[0]) != len(found[0]):
            longer = "longer" if len(key[0]) > len(found[0]) else "shorter"
            return f"is {kind.number} and {longer}"
        for part, text in ((1, "other storages from outside"), (2, "other results are held")):
            if key[part] != found[part]:
                return f"is {kind.number}, but {text}"
        return f"is {kind.number} under other settings of torch"


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# -- the program of a stream -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A program and where its inputs and results are.

    externals: by number of the input. numbers: the floats, of which some are further inputs.
    homes: for each result, its storage and its geometry there.
    """

    program: Program
    externals: tuple[OutsideStorage, ...]
    numbers: _Numbers
    homes: tuple[tuple[int, Geometry], ...]

    @staticmethod
    def of(
        stream: Stream, living: Sequence[int], numbers: _Numbers, pipeline: Sequence[Any]
    ) -> _Compiled:
        """The program of a stream; raises a `FunctionalizeError` if there is none."""
        recorder = Recorder()
        recorder.storages = stream.table
        builder = Builder(recorder)
        externals = tuple(stream.externals())
        builder.add_inputs(
            [
                TensorInput(f"input_{i}", TensorRef(each.serial, each.base), Argument(i))
                for i, each in enumerate(externals)
            ]
        )
        builder.run(numbers.records(stream.entries, len(externals)))
        epilogue = builder.epilogue()
        homes, roles = [], []
        for serial in living:
            if stream.is_born(serial):
                geometry, slot = _result(builder, serial)
                homes.append((serial, geometry))
                roles.append(Result(slot))
        _, out_spec = flatten(tuple([0] * len(roles)))
        names = tuple(spec.name for spec in builder.inputs)
        aliases = AliasGuard(tuple(builder.storage_of_input), names)  # which passes read
        program = builder.program(roles, epilogue, (aliases,), None, out_spec, boxed)
        program.notes = None
        if pipeline:
            from functionalize import passes  # here, as `passes` imports `functionalize`

            program = passes.run(program, pipeline)
        return _Compiled(program, externals, numbers, tuple(homes))

    def run(self, stream: Stream) -> None:
        """Compute, and write every result into its storage."""
        inputs = [self._input(stream, each) for each in self.externals]
        call = Call([*inputs, *self.numbers.tensors(stream.entries)], [])
        for spec in self.program.inputs:
            call.inputs.append(spec.source.resolve(call))
        try:
            results = self.program.replay(call)
        except BaseException as error:
            if not call.committed:
                raise _NotRun from error
            for serial, geometry in self.homes:
                home = stream.storage(serial)
                if home is not None:
                    fill(window_on(home, geometry))
            raise
        for (serial, geometry), result in zip(self.homes, results, strict=True):
            home = stream.storage(serial)
            if home is not None:
                window_on(home, geometry).copy_(result)

    @staticmethod
    def _input(stream: Stream, external: OutsideStorage) -> Tensor:
        storage = stream.storage(external.serial)
        assert storage is not None
        return window_on(storage, external.base)


class _NotRun(Exception):
    """The program has raised before it has written anything."""


def _result(builder: Builder, serial: int) -> tuple[Geometry, int]:
    """Where the contents of a storage that the stream has made go, and the slot of the result that holds them."""
    storage, emit = builder.engine.storages[serial], builder.emit
    if storage.written:
        for action in actions_of(storage, 0, emit, builder.slot):
            if isinstance(action, Copy):
                return action.geometry, action.slot
    return storage.root, builder.slot(storage.whole(emit))


# -- floats among the arguments --------------------------------------------------------------------

# Changes of one kind, each with a program that has more inputs than the one before; the last has all floats as inputs.
_MOST_CHANGES = 3


class _Numbers:
    """The floats of the streams of one kind. inputs: the positions of those that have changed."""

    def __init__(self, entries: Iterable[PendingOp]) -> None:
        self.inputs: tuple[int, ...] = ()
        self._first = [repr(each) for each in _floats_of(entries)]
        self._changes = 0

    def compare(self, entries: Iterable[PendingOp]) -> bool:
        """Compare those of another stream; whether one has changed that is a constant so far."""
        found = [i for i, each in enumerate(_floats_of(entries)) if repr(each) != self._first[i]]
        if set(found) <= set(self.inputs):
            return False
        self._changes += 1
        every = self._changes >= _MOST_CHANGES
        self.inputs = tuple(range(len(self._first)) if every else sorted({*self.inputs, *found}))
        return True

    def tensors(self, entries: Iterable[PendingOp]) -> list[Tensor]:
        """What a program gets for its inputs."""
        numbers = _floats_of(entries)
        return [torch.tensor(numbers[i], dtype=torch.float64) for i in self.inputs]

    def records(self, entries: Iterable[PendingOp], inputs_before: int) -> Iterator[OpRecord]:
        """The ops of a stream, with live numbers for its inputs. inputs_before: how many storages come first."""
        leaf = {at: inputs_before + i for i, at in enumerate(self.inputs)}
        at = 0
        for entry in entries:
            first, at = at, at + len(entry.floats)
            if leaf.keys().isdisjoint(range(first, at)):
                yield entry.record
                continue
            numbers = iter(
                [
                    _input(leaf[i], each) if i in leaf else each
                    for i, each in enumerate(entry.floats, first)
                ]
            )
            record = entry.record
            args = tuple([_replaced(each, numbers) for each in record.args])
            kwargs = {k: _replaced(each, numbers) for k, each in record.kwargs.items()}
            yield replace(record, args=args, kwargs=kwargs, live=True)


def _floats_of(entries: Iterable[PendingOp]) -> list[float]:
    """Those of a stream, in order: derived, since an interruption leaves an entry in the stream or none of it."""
    return [each for entry in entries for each in entry.floats]


def _input(leaf: int, value: float) -> LiveNumber:
    return LiveNumber(ScalarInput(Argument(leaf), f"number_{leaf}", value), value)


def _replaced(arg: Any, numbers: Iterator[Any]) -> Any:
    """`arg` with the next one of `numbers` for every float, in the order of `Stream.refer`."""
    kind = type(arg)
    if kind is float:
        return next(numbers)
    if kind is list or kind is tuple:
        return kind([_replaced(each, numbers) for each in arg])
    return arg
