"""The program of a stream of pending ops: its inputs are storages from outside, its results those that are held.

    made = Compiled.of(stream, living, numbers, passes)     discharged, rewritten by passes
    made.run(stream)                                        computes, then writes all results into their storages

Invariant: what the program writes it writes after all that may fail. Refusals: a stream that the engine refuses, which
then runs op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from functionalize.deferral.interpreted import fill, window_on
from functionalize.deferral.numbers import Numbers
from functionalize.deferral.stream import OutsideStorage, Stream
from functionalize.discharge.epilogue_actions import actions_of
from functionalize.ir.epilogue import Copy
from functionalize.ir.guards import AliasGuard
from functionalize.ir.inputs import Argument, Call
from functionalize.ir.ops import Geometry, TensorRef
from functionalize.ir.outputs import Result
from functionalize.program.program import Program
from functionalize.recorder.builder import Builder, TensorInput
from functionalize.recorder.recorder import Recorder
from functionalize.run.boxed import boxed
from functionalize.util.structure import flatten


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A program and where its inputs and results are.

    externals: by number of the input. numbers: the floats, of which some are further inputs.
    homes: for each result, its storage and its geometry there.
    """

    program: Program
    externals: tuple[OutsideStorage, ...]
    numbers: Numbers
    homes: tuple[tuple[int, Geometry], ...]

    @staticmethod
    def of(
        stream: Stream, living: Sequence[int], numbers: Numbers, pipeline: Sequence[Any]
    ) -> Compiled:
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
        return Compiled(program, externals, numbers, tuple(homes))

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
                raise NotRun from error
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


class NotRun(Exception):
    """The program has raised before it has written anything."""


def _result(builder: Builder, serial: int) -> tuple[Geometry, int]:
    """Where the contents of a storage that the stream has made go, and the slot of the result that holds them."""
    storage, emit = builder.engine.storages[serial], builder.emit
    if storage.written:
        for action in actions_of(storage, 0, emit, builder.slot):
            if isinstance(action, Copy):
                return action.geometry, action.slot
    return storage.root, builder.slot(storage.whole(emit))
