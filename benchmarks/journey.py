"""How far one call goes through the code: files entered, calls, and switches between files.

    python -m benchmarks.journey [--layers 4] [--top N]

    files       of functionalize that any call enters
    calls       of functions of these files, generators' resumptions included
    switches    calls from a function of one file to one of another

A capture that is kept, a replay, `trace` of four ops, and the second `fz.plan` of a model, each after calls of its
kind, so that imports are not counted. The model is a Llama of `examples.llama` of width 64 under FSDP2 on a gloo mesh
of one rank. Counted by a profile function, which calls that of recordings, too. `--top`: the files with most calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from benchmarks.around import VOCABULARY, model_of, step_of
from benchmarks.machine import machine

ROOTS = (str(Path(fz.__file__).parent), str(Path(fz.__file__).parents[1] / "passes"))


class Journey:
    """What was entered while it counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.switches = 0
        self._files: dict[Any, str | None] = {}

    def file_of(self, code: Any) -> str | None:
        """The file of a code object; None if it is not ours."""
        if code not in self._files:
            file = os.path.realpath(code.co_filename)
            self._files[code] = file if file.startswith(ROOTS) else None
        return self._files[code]

    def note(self, frame: FrameType, event: str) -> None:
        """Count a call of a function of ours."""
        file = self.file_of(frame.f_code) if event == "call" else None
        if file is None:
            return
        self.calls[file] += 1
        above = frame.f_back
        while above is not None and self.file_of(above.f_code) is None:
            above = above.f_back
        self.switches += above is not None and self.file_of(above.f_code) != file


@contextmanager
def counted() -> Iterator[Journey]:
    """Count the calls of a block. A recording sets a profile function itself: both are called."""
    journey, original, theirs = Journey(), (sys.setprofile, sys.getprofile), [None]

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        journey.note(frame, event)
        if theirs[0] is not None:
            theirs[0](frame, event, argument)

    sys.setprofile = lambda function: theirs.__setitem__(0, function)  # type: ignore[assignment]
    sys.getprofile = lambda: theirs[0]
    original[0](profile)
    try:
        yield journey
    finally:
        original[0](None)
        sys.setprofile, sys.getprofile = original


def of_four_ops(x: Tensor, y: Tensor) -> Tensor:
    """Four ops."""
    return (x @ y).relu().sum() + 1


def planned(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and optimizer of the plan."""
    model = model_of(layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def tokens_of() -> tuple[Tensor]:
    """The input of the plan."""
    return (torch.randint(VOCABULARY, (2, 16)),)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """The step of the plan."""
    optimizer.zero_grad()
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def journeys(layers: int) -> dict[str, Journey]:
    """By the name of the call."""
    found: dict[str, Journey] = {}

    def count(name: str, call: Callable[[], Any]) -> None:
        with counted() as found[name]:
            call()

    model = model_of(layers)
    step = fz.capture(step_of(model, model, None), audit=False, passes="")
    tokens = torch.randint(VOCABULARY, (2, 16))
    kept = None
    for _ in range(6):
        captures, programs = step.stats.captures, len(step.programs)
        with counted() as journey:
            step(tokens)
        if step.stats.captures > captures and len(step.programs) > programs:
            kept = journey
        last = journey
    assert kept is not None and step.stats.replays, step.explain()
    found["capture, kept call"], found["replay"] = kept, last

    x = torch.randn(4, 4)
    fz.functions.trace(of_four_ops, x, x)
    count("fz.functions.trace of 4 ops", lambda: fz.functions.trace(of_four_ops, x, x))

    dist.destroy_process_group()
    plan = partial(
        fz.plan,
        partial(planned, layers),
        trained,
        inputs=tokens_of,
        world=8,
        target=fz.planner.Target("cpu"),
    )
    plan()
    count("fz.plan, second call", plan)
    return found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--top", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        found = journeys(args.layers)
    print(machine())
    print(f"{f'{args.layers} layers':<24} {'files':>6} {'calls':>8} {'switches':>9}")
    for name, each in found.items():
        print(f"{name:<24} {len(each.calls):6} {each.calls.total():8,} {each.switches:9,}")
        for file, calls in each.calls.most_common(args.top):
            print(f"    {calls:8,} {Path(file).relative_to(Path(fz.__file__).parents[1])}")


if __name__ == "__main__":
    main()
