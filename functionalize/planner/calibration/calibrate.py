"""`fz.planner.calibrate`: a `Machine` with the rates that are measured on this machine, with every rank busy.

    machine = fz.planner.calibrate("here.json")            two processes over gloo, one thread each: 60 to 90 s
    fz.plan(build, step, inputs=inputs, machine="here.json", target="cpu", world=2)

On a machine with CUDA: one process for each GPU, over NCCL (`device="cuda"`).

    overhead                     an op on four floats, called from Python as a method
    curves, peaks                probes: each kind of kernel at several sizes; the peak is the largest rate of a kind
    host_memory_bandwidth        a sum of two tensors of the host, of the size of the largest probe
    link_bandwidth, latency      all-gather, reduce-scatter, all-reduce of several sizes, of buffers that take turns
    host                         `tiny_steps.py`; on a GPU the host is taken as never late

A probe is calls of one kind and about one size, with their FLOPs or bytes:

    matmul       x @ w.t(), g @ w, g.t() @ x of m rows and width 4 m, as a linear layer has them in a training step
    attention    causal, of 4 heads, 512 rows in all, by length; forward and backward
    others       the bytes that the op reads and writes, as `costs.moved` counts them

The calls of a probe take turns at tensors of `largest` bytes together (of at most 512 sets), so that no cache has what
a call reads, as for most values of a training step. Lookups share a table. Every call runs an ATen op alone: no
autograd, no module.
A rate is after the overhead of a call, and a share is a rate by the peak. Where a larger sample took less time than a
smaller one, as noise has it, it counts as just as long: time never falls with size.

The measured link is that between these ranks: on several nodes add what connects them by `dataclasses.replace`. Memory,
capability and constants of a GPU are those of the device; a preset of the same name gives its other numbers.
Refuses (`PlanError`): a device that is not there, no pass, fewer than two ranks, a process that has a process group.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COLLECTIVE,
    COPY,
    COSTLY,
    LOOKUP,
    MATMUL,
    MEMORY,
    NORM,
    OPTIMIZER,
    POINTWISE,
    RANDOM,
    REDUCTION,
    Curve,
    Efficiency,
)
from functionalize.cost.machines.machine import HOPPER, Machine
from functionalize.ctrl_c import held_back, let_through
from functionalize.errors import PlanError
from functionalize.planner.calibration.timing import Clock
from functionalize.planner.calibration.tiny_steps import DEPTHS, STEPS, TinySteps, host_of
from functionalize.planner.machines.files import read_machine, write_machine

aten = torch.ops.aten

_BY_FLOPS = (MATMUL, ATTENTION, ATTENTION_BACKWARD)
_LARGEST = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes of the tensors of a probe
Progress = Callable[[int, int, str], None]
_MEASUREMENTS = 100  # of a pass, about: the number is known after the first one
_LOOK_EVERY = 0.2  # seconds between looks at how far the ranks are
_Call = Callable[[], Any]


def calibrate(
    path: str | Path | None = None,
    *,
    ranks: int | None = None,
    device: str | None = None,
    each: float = 0.1,
    passes: int = 3,
    largest: int | None = None,
    progress: Progress = lambda done, of, text: None,
) -> Machine:
    """Measure this machine; write the result to a file for `machine=` and `--machine`.

    ranks: processes that measure together; None: two on a CPU, one for each GPU. device: "cpu" or "cuda"; None: CUDA
    where there is one. each: seconds of one measurement, of some 100, in all passes. passes: over all measurements,
    of which the medians count, as the speed of a machine varies from minute to minute. largest: bytes of the largest
    probe. progress: called with (measurements made, measurements, where); their number is known after the first pass.
    Raises `PlanError`; `SaveError` if the file cannot be written.

        >>> machine = fz.planner.calibrate("here.json")  # two idle cores for a minute  # doctest: +SKIP
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in _LARGEST:
        raise PlanError(f"`device` is cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("there is no CUDA device here: calibrate with device cpu")
    count = ranks if ranks is not None else torch.cuda.device_count() if device == "cuda" else 2
    if passes < 1:
        raise PlanError(f"`passes` is 1 or more, not {passes}")
    if count < 2:
        raise PlanError(f"a calibration needs two ranks to measure their link, not {count}")
    if dist.is_available() and dist.is_initialized():
        raise PlanError("this process has a process group: calibrate in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/machine.json"
        options = (count, folder, device, each, passes, largest, result)
        _run(options, count, progress)
        machine = read_machine(result)
    if path is not None:
        write_machine(path, machine)
    return machine


def _run(options: tuple[Any, ...], count: int, progress: Progress) -> None:
    """Run the ranks to their end; if one fails, or at Ctrl-C, none is left."""
    told, where = "", f"measuring with {count} ranks on {options[2]}"
    with held_back():
        ranks = mp.spawn(_rank, options, nprocs=count, join=False, daemon=True)
    assert ranks is not None
    try:
        while not ranks.join(_LOOK_EVERY):
            with contextlib.suppress(OSError):
                now = _made(options[1]).read_text()
                if now not in ("", told):
                    told = now
                    done, of = map(int, now.split())
                    progress(done, of, where)
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


def _made(folder: str) -> Path:
    """The file in which the first rank writes how many measurements it has made, and of how many."""
    return Path(folder) / "made"


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    device: str,
    each: float,
    passes: int,
    largest: int | None,
    result: str,
) -> None:
    """One rank of the calibration; the first writes the result."""
    let_through()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks
    )
    try:
        calibration = Calibration(device, each, passes, largest)
        if rank == 0:
            made, replaced = _made(folder), _made(folder).with_suffix(".new")

            def told(done: int, of_pass: int) -> None:
                replaced.write_text(f"{done} {passes * max(of_pass, _MEASUREMENTS)}")
                replaced.replace(made)

            calibration.clock.tell = told
        for _ in range(passes):
            machine = calibration.measure()
        if rank == 0:
            write_machine(result, machine)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Calibration:
    """The measurements of a machine by all ranks of the process group, in passes over all of them.

    each: seconds of one measurement in all passes. passes: how many there will be. largest: bytes of the largest probe;
    None: those of the device. depths: of the tiny steps.
    """

    def __init__(
        self,
        device: str,
        each: float,
        passes: int,
        largest: int | None = None,
        depths: tuple[int, int] = DEPTHS,
    ) -> None:
        self.clock, self._largest = Clock(device, each / passes), largest or _LARGEST[device]
        self._tiny = TinySteps.made(device, depths) if device == "cpu" else None
        self._steps = max(STEPS // passes, 1)

    def measure(self) -> Machine:
        """Make one more pass: the machine by the medians of all passes so far."""
        clock = self.clock
        clock.begin()
        with torch.no_grad():
            machine = self._kernels_and_links()
        if self._tiny is not None:
            machine = replace(machine, host=host_of(clock, machine, self._tiny, self._steps))
        return machine

    def _kernels_and_links(self) -> Machine:
        clock, device, largest = self.clock, self.clock.device, self._largest
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        few = torch.ones(4, device=device)
        overhead = clock.seconds([lambda: few + few])
        call = clock.seconds([lambda: aten.add(few, few)])  # as the probes call their ops
        by_kind: dict[str, list[Sample]] = {}
        for probe in probes(device, dtype, largest):
            seconds = clock.seconds(probe.calls) / len(probe.calls)
            sample = Sample(probe.size, probe.work / len(probe.calls), seconds)
            by_kind.setdefault(probe.kind, []).append(sample)
        other = torch.bfloat16 if device == "cpu" else torch.float32
        matrices = max(
            rate
            for probe in matmuls(device, other, largest, most=2)
            for _, rate in rates(
                [Sample(probe.size, probe.size, clock.seconds(probe.calls) / len(probe.calls))],
                overhead,
            )
        )
        buffers = [torch.ones(largest // 4) for _ in range(2)]
        host_memory = 3.0 * largest / clock.seconds([partial(aten.add, *buffers)])
        del buffers
        with warnings.catch_warnings():
            # deprecations of c10d's functions, which FSDP2 calls too
            warnings.simplefilter("ignore")
            latency, link, sending = _collectives(clock, largest)
        found = {kind: rates(samples, call) for kind, samples in by_kind.items()}
        machine = _machine(found, sending, overhead, latency, link, device)
        return replace(
            machine,
            host_memory_bandwidth=host_memory,
            **_rates(machine.flops, matrices, dtype, other),
        )


def _rates(own: float, others: float, dtype: torch.dtype, other: torch.dtype) -> dict[str, Any]:
    """`flops` is the rate of float32; 16-bit types have one of their own."""
    by = {dtype: own, other: others}
    half = by[torch.bfloat16]
    return {
        "flops": by[torch.float32],
        "matrix_flops": ((torch.bfloat16, half), (torch.float16, half)),
    }


def _collectives(
    clock: Clock, largest: int
) -> tuple[float, float, dict[str, list[tuple[float, float]]]]:
    """The latency, and the rates of each collective by the bytes that a rank sends, with the largest of them."""
    ranks, device = dist.get_world_size(), clock.device
    samples: dict[str, list[Sample]] = {}
    count = 256
    while 4 * count * ranks <= largest // 2:
        buffers = [
            (torch.zeros(count, device=device), torch.zeros(count * ranks, device=device))
            for _ in range(_sets_of(largest, 4 * count * ranks, most=16))
        ]
        sent = 4.0 * count * (ranks - 1)
        calls: dict[str, tuple[float, list[_Call]]] = {
            "all-gather": (
                sent,
                [partial(dist.all_gather_into_tensor, whole, part) for part, whole in buffers],
            ),
            "reduce-scatter": (
                sent,
                [partial(dist.reduce_scatter_tensor, part, whole) for part, whole in buffers],
            ),
            "all-reduce": (
                2 * sent / ranks,
                [partial(dist.all_reduce, part) for part, _ in buffers],
            ),
        }
        for kind, (nbytes, each) in calls.items():
            seconds = clock.seconds(each, most=400 // len(each)) / len(each)
            samples.setdefault(kind, []).append(Sample(nbytes, nbytes, seconds))
        count *= 4
    latency = min(each.seconds for found in samples.values() for each in found)
    found = {kind: rates(each, latency) for kind, each in samples.items()}
    return latency, max(rate for each in found.values() for _, rate in each), found


def _machine(
    found: dict[str, list[tuple[float, float]]],
    sending: dict[str, list[tuple[float, float]]],
    overhead: float,
    latency: float,
    link: float,
    device: str,
) -> Machine:
    peaks = {
        True: max(rate for kind in _BY_FLOPS for _, rate in found[kind]),
        False: max(
            rate for kind, each in found.items() if kind not in _BY_FLOPS for _, rate in each
        ),
    }
    today = datetime.now(UTC).date()
    about = f"measured on {_name(device)} on {today}, {dist.get_world_size()} ranks"
    curves: list[tuple[str, Curve]] = [
        (kind, curve_of(each, peaks[kind in _BY_FLOPS], about)) for kind, each in found.items()
    ]
    curves.append((MEMORY, curve_of(found[POINTWISE], peaks[False], about)))
    curves += [(kind, curve_of(each, link, about)) for kind, each in sending.items()]
    curves.append((COLLECTIVE, dict(curves)["all-gather"]))
    gpu = device == "cuda"
    return Machine(
        peaks[True],
        peaks[False],
        link,
        latency,
        overhead,
        host_bandwidth=25e9 if gpu else peaks[False],
        streams=gpu,
        memory=torch.cuda.get_device_properties(0).total_memory if gpu else None,
        capability=torch.cuda.get_device_capability() if gpu else None,
        outside=HOPPER if gpu else None,
        efficiency=Efficiency(tuple(curves), about),
    )


def _name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# -- curves ----------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A measurement. size: what the curve is looked up by. work: FLOPs or bytes, done in so many seconds."""

    size: float
    work: float
    seconds: float


def rates(samples: Sequence[Sample], overhead: float) -> list[tuple[float, float]]:
    """(size, work per second) of samples after the overhead of one call, by size; seconds per size never fall."""
    found: list[tuple[float, float]] = []
    least = 0.0
    for each in sorted(samples):
        seconds = max(each.seconds - overhead, each.seconds / 20)
        per_size = each.work / each.size
        least = max(least, seconds / per_size)  # of work that is equal to the size
        found.append((each.size, each.size / least))
    return found


def curve_of(found: Sequence[tuple[float, float]], peak: float, source: str) -> Curve:
    """The curve of (size, rate) pairs under a peak."""
    return Curve(tuple((size, min(rate / peak, 1.0)) for size, rate in found), source=source)


# -- what is run -----------------------------------------------------------------------------------

_ROWS, _WIDTH = 512, 32  # of the attention probes: rows in all, channels of a head
_ROW = 256  # elements of a row in norms, reductions and lookups
_MOST_SETS = 512  # of tensors of a probe: a run of small calls would take too long


@dataclass(frozen=True)
class Probe:
    """Calls of one kind and size. work: FLOPs, or bytes, of all calls; size: by which the curve is looked up."""

    kind: str
    size: float
    work: float
    calls: Sequence[_Call]
    dtype: torch.dtype


def probes(device: str, dtype: torch.dtype, largest: int) -> Iterator[Probe]:
    """Every probe whose tensors have at most `largest` bytes together, small ones first within a kind."""
    yield from matmuls(device, dtype, largest)
    yield from _attention(device, dtype, largest)
    for kind, make in _BY_BYTES.items():
        count = 1 << 10
        while 8 * count * dtype.itemsize <= largest:
            sets = 1 if kind == LOOKUP else _sets_of(largest, count * dtype.itemsize)
            made = [make(count, device, dtype) for _ in range(sets)]
            calls, nbytes = [call for each, _ in made for call in each], sum(n for _, n in made)
            yield Probe(kind, nbytes / len(calls), nbytes, calls, dtype)
            count *= 4


def _sets_of(largest: int, nbytes: int, most: int = _MOST_SETS) -> int:
    """How many sets of tensors a probe takes turns at. nbytes: of one of them."""
    return min(max(largest // nbytes, 1), most)


def matmuls(device: str, dtype: torch.dtype, largest: int, most: int = 99) -> Iterator[Probe]:
    """The products of a linear layer, by FLOPs. most: how many sizes, of the largest."""
    sizes, rows = [], 8
    while 48 * rows * rows * dtype.itemsize <= largest and rows <= (
        384 if device == "cpu" else 4096
    ):
        sizes.append(rows)
        rows = rows * 2 if rows < 256 else rows * 3 // 2
    for rows in sizes[-most:]:
        wide = 4 * rows
        calls: list[_Call] = []
        for _ in range(_sets_of(largest, 24 * rows * rows * dtype.itemsize)):
            x, g = _random(device, dtype, rows, wide), _random(device, dtype, rows, wide)
            w = _random(device, dtype, wide, wide)
            calls += (
                partial(aten.mm, x, w.t()),
                partial(aten.mm, g, w),
                partial(aten.mm, g.t(), x),
            )
        flops = 2.0 * rows * wide**2
        yield Probe(MATMUL, flops, len(calls) * flops, calls, dtype)


def _attention(device: str, dtype: torch.dtype, largest: int) -> Iterator[Probe]:
    cpu = device == "cpu"
    heads, width = (4, _WIDTH) if cpu else (16, 128)
    rows = _ROWS if cpu else 16_384
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if cpu else "")
    forward, backward = getattr(aten, name), getattr(aten, name + "_backward")
    length = 16 if cpu else 512
    while length <= rows and rows * heads * width * dtype.itemsize * 8 <= max(largest, 1 << 21):
        shape = (rows // length, heads, length, width)
        forwards: list[_Call] = []
        backwards: list[_Call] = []
        for _ in range(_sets_of(largest, 8 * rows * heads * width * dtype.itemsize)):
            q, k, v, g = (_random(device, dtype, *shape) for _ in range(4))
            out = forward(q, k, v, 0.0, True)
            arguments = (g, q, k, v, out[0], out[1])
            if not cpu:  # cum_seq_q, cum_seq_k, max_q, max_k
                arguments = (*arguments, *out[2:6])
            last = (0.0, True) if cpu else (0.0, True, out[6], out[7])
            forwards.append(partial(forward, q, k, v, 0.0, True))
            backwards.append(partial(backward, *arguments, *last))
        flops = 4.0 * rows * length * heads * width / 2  # a causal mask hides half
        yield Probe(ATTENTION, length, len(forwards) * flops, forwards, dtype)
        flops *= 2.5
        yield Probe(ATTENTION_BACKWARD, length, len(backwards) * flops, backwards, dtype)
        length *= 2 if cpu else 4


def _pointwise(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x, y = _random(device, dtype, count), _random(device, dtype, count)
    return [lambda: aten.add(x, y), lambda: aten.mul(x, y)], 6.0 * _bytes(x)


def _costly(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x, y = _random(device, dtype, count), _random(device, dtype, count)
    return [lambda: aten.gelu(x), lambda: aten.gelu_backward(y, x)], 5.0 * _bytes(x)


def _random_numbers(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x = _random(device, dtype, count)
    return [lambda: aten.bernoulli_(x, 0.9)], 2.0 * _bytes(x)


def _reduction(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x = _random(device, dtype, count // _ROW, _ROW)
    calls: list[_Call] = [lambda: aten._log_softmax(x, 1, False), lambda: aten.sum(x, [0])]
    return calls, 3.0 * _bytes(x)


def _norm(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x, g = (_random(device, dtype, count // _ROW, _ROW) for _ in range(2))
    w, b = (_random(device, dtype, _ROW) for _ in range(2))
    _, mean, rstd = aten.native_layer_norm(x, [_ROW], w, b, 1e-5)
    calls: list[_Call] = [
        lambda: aten.native_layer_norm(x, [_ROW], w, b, 1e-5),
        lambda: aten.native_layer_norm_backward(g, x, [_ROW], mean, rstd, w, b, [True] * 3),
    ]
    return calls, 5.0 * _bytes(x) + 6.0 * _bytes(w)


def _copy(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    x = _random(device, dtype, count)
    halves = list(x.chunk(2))
    return [lambda: aten.clone(x), lambda: aten.cat(halves)], 4.0 * _bytes(x)


def _lookup(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    rows = max(count // _ROW, 1)
    table, g = _random(device, dtype, 1024, _ROW), _random(device, dtype, rows, _ROW)
    index = torch.randint(0, 1024, (rows,), device=device)
    calls: list[_Call] = [lambda: aten.embedding(table, index)]
    return calls, 2.0 * _bytes(g) + _bytes(index)


def _optimizer(count: int, device: str, dtype: torch.dtype) -> tuple[list[_Call], float]:
    lists = [[_random(device, dtype, count // 4).abs_() for _ in range(4)] for _ in range(4)]
    steps = [torch.ones((), device=device) for _ in range(4)]
    numbers = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    p, g, m, v = lists

    def update() -> None:
        aten._fused_adamw_(p, g, m, v, [], steps, **numbers, amsgrad=False, maximize=False)

    return [update], 7.0 * sum(map(_bytes, p))


_BY_BYTES: dict[str, Callable[[int, str, torch.dtype], tuple[list[_Call], float]]] = {
    POINTWISE: _pointwise,
    COSTLY: _costly,
    RANDOM: _random_numbers,
    REDUCTION: _reduction,
    NORM: _norm,
    COPY: _copy,
    LOOKUP: _lookup,
    OPTIMIZER: _optimizer,
}


def _random(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Copied from one vector: drawing numbers would take most of a calibration."""
    count = math.prod(shape)
    drawn = _drawn(device, dtype, 1 << max(count - 1, 1).bit_length())
    return drawn[:count].clone().reshape(shape)


@lru_cache(maxsize=2)  # a probe has tensors of two sizes
def _drawn(device: str, dtype: torch.dtype, count: int) -> Tensor:
    return torch.randn(count, device=device).to(dtype)


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
