"""How true `planner.allocator` is: against torch's own caching allocator, run without a GPU.

    pip download torch==2.13.0 nvidia-cuda-runtime nvidia-cuda-crt --no-deps -d DIR     (the CUDA build: 0.5 GB)
    python -m benchmarks.allocator_truth DIR [--runs N] [--record tests/planner/allocator/allocator_runs.json]

The allocator is in `libc10_cuda.so` of the CUDA build; `benchmarks/cuda_runtime` stands in for CUDA under it and counts
bytes. Both serve the same random requests: bytes reserved and allocated after every event, releases of the cache,
requests that fail, and the blocks at the end must be equal. Needs g++; the installed torch must be of the same version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from functionalize.cost.categories import Category
from functionalize.errors import PlannedOutOfMemoryError
from functionalize.planner.allocator.alloc_conf import MIB
from functionalize.planner.allocator.allocator import Reserved, Settings, simulate
from functionalize.planner.timeline.timeline import Allocation, Event, Op, Timeline

HERE = Path(__file__).parent / "cuda_runtime"
STUBS = """
cudaDeviceCanAccessPeer cudaDeviceEnablePeerAccess cudaDeviceGetDefaultMemPool cudaDeviceSynchronize
cudaDeviceGetStreamPriorityRange cudaEventCreateWithFlags cudaEventDestroy cudaEventElapsedTime cudaEventQuery
cudaEventRecord cudaEventSynchronize cudaFreeAsync cudaGetLastError cudaGraphNodeGetDependencies cudaIpcCloseMemHandle
cudaIpcGetMemHandle cudaIpcOpenMemHandle cudaMallocAsync cudaMemPoolGetAttribute cudaMemPoolSetAccess cudaMemcpy
cudaMemPoolSetAttribute cudaMemPoolTrimTo cudaMemcpyAsync cudaMemcpyPeerAsync cudaSetDevice cudaStreamSynchronize
cudaStreamCreateWithPriority cudaStreamGetCaptureInfo cudaStreamQuery cudaStreamWaitEvent
cudaThreadExchangeStreamCaptureMode
"""
# options, MiB of the device (0: unlimited), memory fraction (0: unset)
CASES = [
    ("", 0, 0),
    ("expandable_segments:True", 0, 0),
    ("", 200, 0),
    ("expandable_segments:True", 140, 0),
    ("expandable_segments:True", 240, 0.5),
    ("max_split_size_mb:20", 200, 0),
    ("max_split_size_mb:32,max_non_split_rounding_mb:40", 0, 0),
    ("large_segment_size_mb:15,max_split_size_mb:16", 200, 0),
    ("roundup_power2_divisions:4", 0, 0),
    ("roundup_power2_divisions:[1:8,8:2,>:4]", 200, 0),
    ("garbage_collection_threshold:0.4", 600, 0.5),
    ("garbage_collection_threshold:0.3,max_split_size_mb:20", 600, 0.5),
    ("large_segment_size_mb:32,expandable_segments:True", 140, 0),
    ("max_split_size_mb:24,expandable_segments:True", 140, 0),
]


def build(wheels: Path, folder: Path) -> Path:
    """The driver, linked with the allocator of the CUDA build and with the stand-in CUDA runtime."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            libraries = ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so")
            wanted = [
                n
                for n in archive.namelist()
                if n in libraries or (n.startswith("nvidia/") and "/include/" in n)
            ]
            archive.extractall(folder, wanted)
    lib, headers = folder / "torch/lib", next(folder.glob("nvidia/*/include/cuda.h")).parent
    (folder / "stubs.c").write_text(
        "".join(f"int {name}(void) {{ return 0; }}\n" for name in STUBS.split())
    )
    (folder / "versions").write_text("libcudart.so.13 { global: *; };\n")
    config = folder / "c10/cuda/impl/cuda_cmake_macros.h"
    config.parent.mkdir(parents=True)
    config.write_text("#pragma once\n")
    shared = [
        "g++",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{headers}",
        str(HERE / "runtime.cpp"),
        "-include",
        "string",
    ]
    subprocess.run(["gcc", "-c", "-fPIC", "stubs.c"], cwd=folder, check=True)
    for name, script in (
        ("libcudart.so.13", ["-Wl,--version-script=versions", "stubs.o"]),
        ("libnvidia-ml.so.1", []),
    ):
        subprocess.run(
            [*shared, *script, f"-Wl,-soname,{name}", "-o", str(lib / name)], cwd=folder, check=True
        )
    include = [f"-I{folder}", f"-I{Path(torch.__file__).parent / 'include'}", f"-I{headers}"]
    link = [
        f"-L{lib}",
        "-lc10_cuda",
        "-lc10",
        "-l:libcudart.so.13",
        f"-Wl,-rpath,{lib}",
        "-o",
        "drive",
    ]
    subprocess.run(
        ["g++", "-O1", "-std=c++20", *include, str(HERE / "drive.cpp"), *link],
        cwd=folder,
        check=True,
    )
    return folder / "drive"


def requests(seed: int, limited: bool, events: int = 220) -> list[list[int]]:
    """[bytes, stream] allocates, [-n] frees the n-th allocation; sizes all different, or of a few kinds."""
    draw = random.Random(seed)
    kinds = [int(2 ** draw.uniform(0, 25.5)) for _ in range(10)]
    steps: list[list[int]] = []
    live: list[int] = []
    made = 0
    for _ in range(events):
        if live and (draw.random() < 0.45 or (limited and len(live) > 16)):
            steps.append([-live.pop(draw.randrange(len(live))) - 1])
        else:
            size = draw.choice(kinds) if seed % 2 else int(2 ** draw.uniform(0, 25.5))
            steps.append([size, draw.randrange(1 + seed % 3)])
            live.append(made)
            made += 1
    return steps


def of_torch(
    drive: Path, steps: list[list[int]], options: str, mib: int, fraction: float
) -> dict[str, Any]:
    """The result of torch's allocator for the requests."""
    lines, made = [options, str(fraction)], 0
    for step in steps:
        lines.append(f"a {made} {step[0]} {step[1]}" if step[0] > 0 else f"f {-step[0] - 1}")
        made += step[0] > 0
    environment = {**os.environ, "LD_LIBRARY_PATH": str(drive.parent / "torch/lib")}
    if mib:
        environment["FAKE_CAPACITY"] = str(mib * MIB)
    done = subprocess.run(
        [drive], input="\n".join(lines), env=environment, capture_output=True, text=True, check=True
    )
    words = [line.split() for line in done.stdout.splitlines()]
    rows = [[int(word) for word in line] for line in words if line[0].isdigit()]
    segments = []
    for line in (line for line in words if line[0] == "S"):
        blocks = [word.split(":") for word in line[5:]]
        pieces = [[int(size), used == "1"] for size, used in blocks]
        segments.append([int(line[1]), int(line[2]), line[3] == "1", line[4] == "1", pieces])
    return {
        "options": ",".join(
            filter(None, [options, f"per_process_memory_fraction:{fraction}" if fraction else ""])
        ),
        "limit": mib * MIB or None,
        "events": steps,
        "reserved": [row[0] for row in rows],
        "allocated": [row[1] for row in rows],
        "retries": next(int(line[1]) for line in words if line[0] == "retries"),
        "out_of_memory": ["oom"] in words,
        "segments": segments,
    }


def planned(steps: list[list[int]], options: str, limit: int | None) -> Reserved:
    """The simulation of the requests. Raises `PlannedOutOfMemoryError`."""
    made: list[Allocation] = []
    streams: dict[int, int] = {}
    events = []
    for i, step in enumerate(steps):
        if step[0] > 0:
            made.append(Allocation(step[0], Category.TEMPORARIES, "t", i, None, i))
            streams[id(made[-1])] = step[1]
        events.append(Event(i, made[-1] if step[0] > 0 else made[-step[0] - 1], step[0] > 0))
    ops = [Op(f"op{i}", "") for i, _ in enumerate(events)]
    conf = Settings.parse(options, limit)
    return simulate(Timeline("", ops, made, events), conf, lambda each: streams[id(each)])


def segments_of(found: Reserved) -> list[list[Any]]:
    """The segments after the last event: bytes, stream, small, expandable, [bytes, in use] of each block."""
    return [
        [
            s.nbytes,
            s.stream,
            s.small,
            s.expandable,
            [[b.nbytes, b.owner is not None] for b in s.blocks],
        ]
        for s in found.segments
    ]


def agrees(truth: dict[str, Any]) -> bool:
    """Whether the simulation has the same result."""
    try:
        found = planned(truth["events"], truth["options"], truth["limit"])
    except PlannedOutOfMemoryError as error:
        return truth["out_of_memory"] and f" op {len(truth['reserved'])}," in str(error)
    numbers = (found.bytes, found.allocated, found.retries, segments_of(found))
    return numbers == tuple(
        truth[name] for name in ("reserved", "allocated", "retries", "segments")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("--runs", type=int, default=50, help="of each case")
    parser.add_argument(
        "--record", type=Path, help="write the most telling run of each case to a file"
    )
    options = parser.parse_args()
    recorded = []
    with tempfile.TemporaryDirectory() as folder:
        drive = build(options.wheels, Path(folder))
        for case, (options, mib, fraction) in enumerate(CASES):
            seeds = range(1000 * case, 1000 * case + options.runs)
            runs = [
                of_torch(drive, requests(seed, mib > 0), options, mib, fraction) for seed in seeds
            ]
            refused = [run for run in runs if run["out_of_memory"]]
            retried = [run for run in runs if run["retries"] and not run["out_of_memory"]]
            print(f"{runs[0]['options'] or 'defaults'}, {mib or 'endless'} MiB:")
            print(f"    {sum(map(agrees, runs))} of {len(runs)} agree; ", end="")
            print(
                f"{len(retried)} had to release the cache, {len(refused)} ran out of memory",
                flush=True,
            )
            recorded.append(max(retried or runs, key=lambda run: len(set(run["reserved"]))))
            recorded += refused[:1] if case < 4 else []
    if options.record:
        text = ",\n".join(json.dumps(run, separators=(",", ":")) for run in recorded)
        options.record.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
