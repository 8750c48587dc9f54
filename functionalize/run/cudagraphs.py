"""`capture(step, compile="cudagraphs")`: the whole graph is recorded by the device once, and launched as one.

    call 1      the boxed runner: a real step, in which libraries set themselves up
    call 2      batch -> static copy; graph recorded (nothing runs), launched; results handed out are copied
    call 3      batch -> static copy; launched; ...

Parameters, buffers and optimizer states are read, and at stage INPLACE written, where they are: if one has moved, the
graph is recorded again. Arguments are copied into memory of the graph's own. A number that Python reads of an
input in host memory (a learning rate) is part of a recording: there is one for each value, the last few are kept.
The default generator of a device is registered with every recording by torch, so that a launch draws what eager
would draw. What may be recorded at all: see `recordable.py`.

Invariant: a launch writes nothing before `commit` has passed; what the caller is handed no launch overwrites.
Refusals: `CompileError`, with every reason and the node concerned, before anything ran.
Note [Not run on a device]: written and tested with a stand-in for the device on the CPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functionalize.analysis.aliases import results_of
from functionalize.errors import CompileError
from functionalize.ir.commit import Commit, commit
from functionalize.ir.epilogue import Set
from functionalize.ir.inputs import Argument
from functionalize.program.program import Program
from functionalize.run.boxed import Runner, boxed
from functionalize.run.recordable import is_host_number, reasons

log = logging.getLogger("functionalize")
Launch = Callable[[], None]
_KEPT = 4  # recordings, each for other numbers
_WARN_AFTER = 16  # recordings in all


def record_on_cuda(body: Callable[[], Sequence[Any]]) -> tuple[Launch, Sequence[Any]]:
    """Record what `body` puts on the device; what launches it again, and the results, which it overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = body()
    return graph.replay, results


@dataclass(frozen=True)
class Device:
    """What records. kind: of the tensors it computes on; backends: of process groups that it can record."""

    kind: str = "cuda"
    backends: tuple[str, ...] = ("nccl",)
    record: Callable[[Callable[[], Sequence[Any]]], tuple[Launch, Sequence[Any]]] = record_on_cuda


def cudagraphs(program: Program, device: Device = Device()) -> Runner:
    """The runner; raises `CompileError` with every reason why the program cannot be recorded."""
    program.describe()
    found = reasons(program, device.kind, device.backends)
    if found:
        numbered = "\n".join(f"  {i}. {reason}" for i, reason in enumerate(found, 1))
        raise CompileError(
            f"compile='cudagraphs' cannot take this step, for {len(found)} reasons:\n{numbered}\n"
            "  run it without `compile`, or with compile='inductor'"
        )
    return Recordings(program, device)


@dataclass(slots=True, eq=False)
class Recording:
    """One graph of the device. static: by input, the memory that it reads arguments from."""

    launch: Launch
    results: Sequence[Any]
    static: dict[int, Tensor]
    committed: tuple[Any, ...]


class Recordings:
    """Runs a program by its recordings: one for each set of addresses and host numbers."""

    def __init__(self, program: Program, device: Device) -> None:
        self._device, self._stage = device, program.stage
        self._boxed = boxed(program)
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._numbers = [
            i for i, spec in enumerate(program.inputs) if is_host_number(spec, device.kind)
        ]
        self._arguments = [
            i
            for i, spec in enumerate(program.inputs)
            if isinstance(spec.source, Argument)
            and i not in self._numbers
            and i not in program.writes
        ]
        others = {*self._numbers, *self._arguments}
        self._fixed = [i for i in range(len(program.inputs)) if i not in others]
        self._handed = _handed(program)
        self._ran, self._made = False, 0

    def __call__(self, inputs: list[Any], check: Commit = commit) -> Sequence[Any]:
        if not self._ran:
            results = self._run(inputs, check)
            self._ran = True
            return results
        given = list(inputs)
        inputs.clear()
        key = self._key(given)
        recording = self._kept.get(key)
        if recording is None:
            recording = self._kept[key] = self._record(given)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        for i, static in recording.static.items():
            static.copy_(given[i])
        check(*recording.committed)
        recording.launch()
        return own(recording.results, self._handed)

    def _run(self, inputs: list[Any], check: Commit) -> Sequence[Any]:
        return self._boxed(inputs, check) if self._stage == "INPLACE" else self._boxed(inputs)

    def _key(self, given: Sequence[Any]) -> Hashable:
        """What a recording holds for: where the inputs that it uses in place are, and the host's numbers."""
        addresses = tuple(given[i].data_ptr() for i in self._fixed)
        return addresses, tuple(repr(given[i].item()) for i in self._numbers)

    def _record(self, given: Sequence[Any]) -> Recording:
        self._made += 1
        if self._made == _WARN_AFTER:
            log.warning(
                "compile='cudagraphs' has recorded a step %d times: parameters move, or a number that Python "
                "reads (a learning rate) changes at every call; make it a tensor on the device",
                self._made,
            )
        static = {i: given[i].detach().clone() for i in self._arguments}
        used = [static.get(i, tensor) for i, tensor in enumerate(given)]
        committed: list[Any] = []

        def note(*values: Any) -> None:
            committed.extend(values)

        launch, results = self._device.record(lambda: self._run(list(used), note))
        return Recording(launch, results, static, tuple(committed))


def _handed(program: Program) -> tuple[int, ...]:
    """The slots that somebody sees after the epilogue, which only copies from all others."""
    seen = {result.slot for role in program.outputs for result in results_of(role)}
    seen |= {a.slot for a in program.epilogue if isinstance(a, Set) and a.slot is not None}
    return tuple(sorted(seen))


def own(results: Sequence[Any], handed: Sequence[int]) -> list[Any]:
    """The results; those `handed` out in memory of their own, which they share among themselves as before."""
    copies: dict[int, torch.UntypedStorage] = {}
    mine = list(results)
    for slot in handed:
        t = mine[slot]
        if isinstance(t, Tensor):
            storage = t.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            mine[slot] = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                copies[storage.data_ptr()], t.storage_offset(), t.size(), t.stride()
            )
    return mine
