"""`capture(step, compile="cudagraphs")`: the whole graph is recorded by the device once, and launched as one.

    call 1      the boxed runner: a real step, in which libraries set themselves up
    call 2      batch -> static copy; graph recorded (nothing runs), launched; returned results are cloned
    call 3      batch -> static copy; launched; ...

Parameters, buffers and optimizer states are read, and at stage INPLACE written, at their addresses; if an address
changes, the graph is recorded again. Arguments are copied into static memory. A number that Python reads from an
input in host memory (a learning rate) is fixed in a recording: each value needs its own, and the last few are cached.
torch registers the default generator of a device with every recording, so that a launch draws the same random
numbers as eager. `recordable.py` lists what cannot be recorded.

Invariant: nothing is launched before `commit` has passed; no launch overwrites a result that the caller has.
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
_MAX_RECORDINGS = 4  # cached at a time
_WARN_AFTER = 16  # recordings made in total


def record_on_cuda(body: Callable[[], Sequence[Any]]) -> tuple[Launch, Sequence[Any]]:
    """Record the work that `body` enqueues; returns a function that launches it, and the results.

    Each launch overwrites the results.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = body()
    return graph.replay, results


@dataclass(frozen=True)
class Device:
    """A device that can record graphs.

    kind: the device type of its tensors.
    backends: the process group backends whose collectives it can record.
    record: records a function, see `record_on_cuda`.
    """

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
    """One recorded graph.

    static: for each argument, by the number of its input, the memory that the graph reads it from.
    committed: the values that the graph passes to `commit`.
    """

    launch: Launch
    results: Sequence[Any]
    static: dict[int, Tensor]
    committed: tuple[Any, ...]


class Recordings:
    """Runs a program by launching a recording: there is one for each set of addresses and host numbers."""

    def __init__(self, program: Program, device: Device) -> None:
        self._device, self._stage = device, program.stage
        self._boxed = boxed(program)
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._host_numbers = [
            i for i, spec in enumerate(program.inputs) if is_host_number(spec, device.kind)
        ]
        self._arguments = [
            i
            for i, spec in enumerate(program.inputs)
            if isinstance(spec.source, Argument)
            and i not in self._host_numbers
            and i not in program.writes
        ]
        others = {*self._host_numbers, *self._arguments}
        self._fixed = [i for i in range(len(program.inputs)) if i not in others]
        self._returned_slots = _returned_slots(program)
        self._ran, self._made = False, 0

    def __call__(self, inputs: list[Any], check: Commit = commit) -> Sequence[Any]:
        if not self._ran:
            results = self._run(inputs, check)
            self._ran = True
            return results
        values = list(inputs)
        inputs.clear()
        key = self._key(values)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._record(values)
            if len(self._recordings) > _MAX_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        for i, static in recording.static.items():
            static.copy_(values[i])
        check(*recording.committed)
        recording.launch()
        return own(recording.results, self._returned_slots)

    def _run(self, inputs: list[Any], check: Commit) -> Sequence[Any]:
        return self._boxed(inputs, check) if self._stage == "INPLACE" else self._boxed(inputs)

    def _key(self, values: Sequence[Any]) -> Hashable:
        """The cache key of a recording: the addresses of the inputs read in place, and the host numbers."""
        addresses = tuple(values[i].data_ptr() for i in self._fixed)
        return addresses, tuple(repr(values[i].item()) for i in self._host_numbers)

    def _record(self, values: Sequence[Any]) -> Recording:
        self._made += 1
        if self._made == _WARN_AFTER:
            log.warning(
                "compile='cudagraphs' has recorded a step %d times: parameters move, or a number that Python "
                "reads (a learning rate) changes at every call; make it a tensor on the device",
                self._made,
            )
        static = {i: values[i].detach().clone() for i in self._arguments}
        used = [static.get(i, tensor) for i, tensor in enumerate(values)]
        committed: list[Any] = []

        def note(*values: Any) -> None:
            committed.extend(values)

        launch, results = self._device.record(lambda: self._run(list(used), note))
        return Recording(launch, results, static, tuple(committed))


def _returned_slots(program: Program) -> tuple[int, ...]:
    """The results that the caller can hold after the epilogue; it copies from all others."""
    seen = {result.slot for role in program.outputs for result in results_of(role)}
    seen |= {a.slot for a in program.epilogue if isinstance(a, Set) and a.slot is not None}
    return tuple(sorted(seen))


def own(results: Sequence[Any], returned: Sequence[int]) -> list[Any]:
    """The results, with those in the slots `returned` cloned; clones preserve aliasing among them."""
    copies: dict[int, torch.UntypedStorage] = {}
    cloned = list(results)
    for slot in returned:
        t = cloned[slot]
        if isinstance(t, Tensor):
            storage = t.untyped_storage()
            if storage.data_ptr() not in copies:
                copies[storage.data_ptr()] = storage.clone()
            cloned[slot] = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                copies[storage.data_ptr()], t.storage_offset(), t.size(), t.stride()
            )
    return cloned
