"""`capture(step, compile="cudagraphs")`: the whole graph is recorded by the device once, and launched as one.

    call 1      the boxed runner: a real step, in which libraries set themselves up
    call 2      batch -> static copy; graph recorded (nothing runs), launched; returned results are cloned
    call 3      batch -> static copy; launched; ...

Parameters, buffers and optimizer states are read, and at stage INPLACE written, at their addresses; if an address
changes, the graph is recorded again. Arguments are copied into static memory. torch registers the default generator of
a device with every recording, so that a launch draws the same random numbers as eager.

A recording fixes addresses, sizes and everything that the host computes; a launch repeats only the device's work. So
all tensors must be on the device. The exceptions are numbers: a zero-dimensional input in host memory is read at every
call, and values computed from such inputs alone are computed while recording. A number that Python reads from such an
input (a learning rate) is fixed in a recording: each value needs its own, and the last few are cached.

Invariant: nothing is launched before `commit` has passed; no launch overwrites a result that the caller has.
Refusals: `CompileError`, with every reason and the node concerned, before anything ran:

    `item` reads a number of a tensor on cuda:0, which waits for the device: ...
    `opt_0_0_step` (float32[]) is in host memory: ...

Note [Not run on a device]: written and tested with a stand-in for the device on the CPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from functionalize._compat.distributed import group_of_name
from functionalize.analysis.aliases import results_of
from functionalize.errors import CompileError
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import Commit, commit, is_commit
from functionalize.ir.epilogue import Set
from functionalize.ir.generators import GET_STATE, SEED, SET_STATE
from functionalize.ir.inputs import Argument, InputSpec
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program
from functionalize.run.boxed import Runner, boxed

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
            i for i, spec in enumerate(program.inputs) if _is_host_number(spec, device.kind)
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


# -- what cannot be recorded -----------------------------------------------------------------------


def _is_host_number(spec: InputSpec, kind: str) -> bool:
    """Whether an input is a zero-dimensional tensor in host memory, such as a learning rate.

    kind: the type of the device that records.
    """
    return kind != "cpu" and spec.device.type == "cpu" and spec.geometry.size == ()


def reasons(program: Program, kind: str, backends: Sequence[str]) -> list[str]:
    """Every reason why a device cannot record a program; empty if it can.

    kind: the device type. backends: the process group backends whose collectives it can record.
    Every node needs its `val`. Linear in nodes.
    """
    found = list(_reasons_of_inputs(program, kind))
    written = {program.inputs[a.input].name for a in program.epilogue if hasattr(a, "nbytes")}
    found += [f"`{name}` is grown or freed at the end of every step" for name in sorted(written)]
    host: set[fx.Node] = set()  # host numbers, and values computed from them alone
    reported: set[fx.Node] = set()  # values on another device whose reason is already in `found`
    specs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = next(specs)
            if _is_host_number(spec, kind):
                host.add(node)
            elif spec.device.type != kind:
                reported.add(node)
        elif node.op == "get_attr":
            if _is_host_scalar(node):
                host.add(node)
        elif node.op == "call_function" and not is_commit(node):
            found += _reasons_of_node(node, kind, backends, host, reported)
    return found


def _reasons_of_inputs(program: Program, kind: str) -> Iterator[str]:
    for spec in program.inputs:
        if spec.device.type != kind and not _is_host_number(spec, kind):
            yield f"`{spec.name}` ({spec.geometry}) is on {spec.device}: move it to the device"


def _reasons_of_node(
    node: fx.Node,
    kind: str,
    backends: Sequence[str],
    host: set[fx.Node],
    reported: set[fx.Node],
) -> Iterator[str]:
    if node.target is BARRIER:
        yield f"`{node.name}` is a barrier, at which the host waits"
    elif node.target in (GET_STATE, SET_STATE, SEED):
        reported.add(node)
        yield f"`{node.name}` reads or sets a generator, which the host does: draw other numbers without that"
    elif getattr(node.target, "namespace", "") == "_c10d_functional":
        yield from _reasons_of_collective(node, backends)
    elif _is_number(node.meta.get("val")):
        if all(n in host for n in node.all_input_nodes):
            host.add(node)
        else:
            source = node.all_input_nodes[0].name
            yield f"`{node.name}` reads a number from `{source}`, for which the host waits: keep it a tensor"
    elif any(t.device.type != kind for t in tensors_of(node.meta.get("val"))):
        if reported.isdisjoint(node.all_input_nodes):
            device = next(tensors_of(node.meta["val"])).device
            yield (
                f"`{node.name}` ({node.target}) computes on {device}, which no launch repeats: an optimizer's "
                "step count moves to the device with `capturable=True` or `fused=True`"
            )
        reported.add(node)


def _reasons_of_collective(node: fx.Node, backends: Sequence[str]) -> Iterator[str]:
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.name == "group_name":
            backend = str(dist.get_backend(group_of_name(str(value))))
            if backend not in backends:
                yield f"`{node.name}` communicates by {backend}, which only the host can do"


def _is_host_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() == 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))
