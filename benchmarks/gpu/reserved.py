"""The simulated allocator against the device's: the same requests event by event, and the streams of an FSDP2 step.

    default: events with the same reserved and allocated bytes        400        400
    streams: reserved on the default stream                           104,857,600 bytes

The requests are those of `benchmarks.allocator_truth`: random sizes on three streams. Segments are compared without
their order: the driver chooses addresses. Streams: eager FSDP2 in a fresh process, six steps; the plan has all-gather
buffers on one stream and reduced gradients on another (`fsdp2_streams`).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.allocator_truth import planned, requests, segments_of
from benchmarks.capture import VOCABULARY
from benchmarks.gpu import steps
from benchmarks.gpu.device import Device
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows
from benchmarks.step_time import SUBJECTS, Subject
from functionalize.planner.allocator.allocator import Settings, fsdp2_streams, simulate

_SEED, _EVENTS = 5, 400  # of three streams; sizes of a few kinds, so that blocks are used again
DEFAULT = "streams: reserved on the default stream"
OTHERS = "streams: reserved on others, largest first"


def _requests(options: Options) -> list[list[int]]:
    return requests(_SEED, False, 40 if options.small else _EVENTS)


def predict_requests(options: Options, label: str, conf: str) -> dict[str, Prediction]:
    """The simulation of the requests. conf: in the syntax of `PYTORCH_ALLOC_CONF`."""
    found = planned(_requests(options), conf, None)
    return {
        f"{label}: peak reserved": Prediction(found.peak, "bytes"),
        f"{label}: peak allocated": Prediction(found.peak_allocated, "bytes"),
        f"{label}: events with the same reserved and allocated bytes": Prediction(
            len(found.timeline.events)
        ),
        f"{label}: segments at the end": Prediction(len(found.segments)),
        f"{label}: segments that are the same": Prediction(len(found.segments)),
    }


def measure_requests(options: Options, rows: Rows, label: str, conf: str) -> None:
    """Make the requests of torch's allocator; `PYTORCH_ALLOC_CONF` must be `conf` in this process."""
    Device(options.device)
    requested = _requests(options)
    simulated = planned(requested, conf, None)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    live: dict[int, torch.Tensor] = {}
    reserved, allocated, made = [], [], 0
    for step in requested:
        if step[0] > 0:
            with torch.cuda.stream(streams[step[1]]):
                live[made] = torch.empty(step[0], dtype=torch.uint8, device=options.device)
            made += 1
        else:
            del live[-step[0] - 1]
        reserved.append(torch.cuda.memory_reserved())
        allocated.append(torch.cuda.memory_allocated())
    ours = zip(simulated.bytes, simulated.allocated, strict=True)
    same = [a == b for a, b in zip(ours, zip(reserved, allocated, strict=True), strict=True)]
    first = "" if all(same) else f"the first that differs: {same.index(False)}"
    number = {stream.cuda_stream: i for i, stream in enumerate(streams)}
    segments = [_segment(each, number) for each in torch.cuda.memory_snapshot()]
    common = Counter(map(json.dumps, segments)) & Counter(
        map(json.dumps, segments_of(simulated))
    )  # fmt: skip
    rows.add(f"{label}: peak reserved", max(reserved))
    rows.add(f"{label}: peak allocated", max(allocated))
    rows.add(
        f"{label}: events with the same reserved and allocated bytes", sum(same), note=first
    )  # fmt: skip
    rows.add(f"{label}: segments at the end", len(segments))
    rows.add(f"{label}: segments that are the same", common.total())


def _segment(segment: dict[str, Any], number: dict[int, int]) -> list[Any]:
    """A segment of torch's snapshot in the form of `segments_of`."""
    blocks = [[b["size"], b["state"] == "active_allocated"] for b in segment["blocks"]]
    small = segment["segment_type"] == "small"
    stream = number.get(segment["stream"], -1)
    return [segment["total_size"], stream, small, segment["is_expandable"], blocks]


# -- the streams of a step ---------------------------------------------------------------------------


def _subject(options: Options) -> Subject:
    return steps.subject_of(options, 0)[1] if options.small else SUBJECTS["compute, width 512"]


def predict_streams(options: Options) -> dict[str, Prediction]:
    """The bytes that each stream of eager FSDP2 reserves."""
    memory = steps.figures(_subject(options), options, 1)["boxed"].memory
    found = simulate(memory.timeline("eager"), Settings(), fsdp2_streams)
    by_stream: Counter[int] = Counter()
    for segment in found.segments:
        by_stream[segment.stream] += segment.nbytes
    return _of_streams(by_stream)


def _of_streams(by_stream: Counter[int]) -> dict[str, Prediction]:
    others = sorted((n for stream, n in by_stream.items() if stream), reverse=True)
    return {DEFAULT: Prediction(by_stream[0], "bytes"), OTHERS: Prediction(others, "bytes")}


def measure_streams(options: Options, rows: Rows) -> None:
    """The bytes that torch's allocator has reserved on each stream after six steps."""
    Device(options.device)
    subject = _subject(options)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", f"file://{folder}/rendezvous", rank=0, world_size=1)
        step = subject.step(options.device, False)
        for _ in range(6):
            tokens = torch.randint(VOCABULARY, (subject.batch, subject.sequence))
            step(tokens.to(options.device))
        torch.cuda.synchronize()
        by_stream: Counter[int] = Counter()
        for segment in torch.cuda.memory_snapshot():
            by_stream[segment["stream"]] += segment["total_size"]
        for fact, found in _of_streams(by_stream).items():
            rows.add(fact, found.value, note="with cuBLAS workspaces, which the plan declares")
        dist.destroy_process_group()
