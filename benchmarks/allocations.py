"""Every CPU allocation and free of a piece of code, by `torch.profiler`, with the count that c10 keeps of all.

    with counted() as count:
        step(batch)
    count.before, count.peak     bytes live at the start; the most live at one moment, minus `before`
    count.where                  the ops running at that moment, outermost first

The count includes every allocation of the process since `count_everything()`, on any thread: those of gloo's threads
for a collective too, for eager and replay alike.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def count_everything(on: bool = True) -> None:
    """Have c10 count every CPU allocation of this process from here on, or no more.

    Its flag has no Python name. Without it c10 counts on the threads that a profiler watches only, and what another
    one frees stays counted.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = on


@dataclass
class Count:
    """Bytes; filled when the code has run. tree: the profiler's events."""

    before: int = 0
    peak: int = 0
    where: tuple[str, ...] = ()
    tree: Sequence[Any] = field(default=(), repr=False)


@contextmanager
def counted() -> Iterator[Count]:
    """Count what the body allocates; garbage stays until it is over, in every variant alike."""
    count = Count()
    gc.collect()
    gc.disable()
    try:
        with profile(  # torch 2.11 and 2.12 warn of what an unaccumulated profile would forget
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler:
            first = torch.empty(64, dtype=torch.uint8)  # an event whose record has the total so far
            yield count
    finally:
        gc.enable()
    results: Any = profiler.profiler
    count.tree = results.kineto_results.experimental_event_tree()
    found = allocations(count.tree)
    counts = [event.typed[1].total_allocated for event, _ in found]
    most = max(counts)
    count.before, count.peak = counts[0] - first.numel(), most - counts[0]
    count.where = found[counts.index(most)][1]


def allocations(tree: Sequence[Any]) -> list[tuple[Any, tuple[str, ...]]]:
    """Every allocation and free of CPU memory in order, with the names of the events that it is inside of."""
    found = []
    stack: list[tuple[Any, tuple[str, ...]]] = [(event, ()) for event in tree]
    while stack:
        event, above = stack.pop()
        if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
            found.append((event, above))
        stack += [(child, (*above, event.name)) for child in event.children]
    return sorted(found, key=lambda pair: pair[0].start_time_ns)
