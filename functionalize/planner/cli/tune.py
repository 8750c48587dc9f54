"""`tune`: the fastest configuration that fits, the frontier, why others lost; the policy as a Python file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import functionalize as fz
from functionalize.errors import UsageError
from functionalize.planner.cli.console import Out, plain
from functionalize.planner.cli.recorded import Job
from functionalize.planner.cli.scripts import DEFAULT_WORLD, as_usage, check_files, opened, writing
from functionalize.planner.sweep.training import Training
from functionalize.planner.tuning.tune import asked_for

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command.

    limit: bytes of a device. tokens: of a step, as text. batches, tp: lists as text. pipelines: to run on the best's
    program. top: settings that are planned whole. training: a run whose days and cost are shown. code: a file.
    offload: its only value to try.
    """

    limit: int | None
    tokens: str | None = None
    batches: str | None = None
    pipelines: Sequence[str] | None = None
    top: int = 1
    machine: str | None = None
    alloc_conf: str | None = None
    tp: str | None = None
    training: Training | None = None
    code: str | None = None
    offload: bool | None = None

    def check(self, job: Job) -> None:
        """Raises `UsageError` for options that are invalid or contradict each other."""
        if job.is_file:
            raise UsageError(
                f"{job.source} is one recorded graph: tune takes a script, to record others"
            )
        if self.limit is None:
            raise UsageError("tune needs --limit: within how many bytes?")
        if self.code is not None and Path(self.code).suffix != ".py":
            raise UsageError(f"--code {self.code}: the policy is a Python file, which ends in .py")
        check_files(self.code)
        if isinstance(job.mesh, tuple):
            raise UsageError(
                "tune needs the names of a mesh's dimensions: --mesh replicate=8,shard=8"
            )


def count(text: str) -> int:
    """Parse a number of tokens: `1M` (10**6), `512k`, `1_048_576`."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kKmMgG]?)", text.strip())
    number = round(float(found[1].replace("_", "")) * _UNITS[found[2].lower()]) if found else 0
    if number < 1:
        raise UsageError(
            f"--batch-tokens {text!r} cannot be read: write 1M, 512k, or a number of tokens"
        )
    return number


def number_list(text: str | None, option: str) -> list[int] | None:
    """Parse `1,2,4`."""
    parts = text.split(",") if text is not None else []
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"--{option} {text!r} cannot be read: write 1,2,4")
    return [int(part) for part in parts] or None


def tune(out: Out, job: Job, options: TuneOptions) -> None:
    """Search, print the answer, write its policy."""
    options.check(job)
    tokens = count(options.tokens) if options.tokens is not None else None
    fixed: dict[str, Any] = {**job.parameters}
    if options.alloc_conf is not None:
        fixed["alloc_conf"] = options.alloc_conf
    if job.rank:
        fixed["rank"] = job.rank
    sizes = job.mesh if isinstance(job.mesh, dict) else None
    world = math.prod(sizes.values()) if sizes and job.world is None else job.ranks
    search: dict[str, Any] = {
        "world": world or DEFAULT_WORLD,
        "limit": options.limit,
        "batch_tokens": tokens,
        "meshes": [sizes] if sizes else None,
        "batches": number_list(options.batches, "batches"),
        "tp": number_list(options.tp, "tp"),
        "offload": options.offload,
        "pipelines": ("default",) if options.pipelines is None else options.pipelines,
        "top": options.top,
        "target": job.target,
        "machine": options.machine,
        **fixed,
    }
    with opened(job.source, job.names) as script:
        with as_usage():
            asked_for((script.build, script.inputs, script.step), **search)
        with out.counting() as count_stages:
            found = fz.tune(
                script.build, script.step, inputs=script.inputs, progress=count_stages, **search
            )
    if options.training is not None:
        found = found.over(options.training)
    if options.code is not None:
        with writing(options.code):
            Path(options.code).write_text(found.policy.code(), encoding="utf-8")

    def show(console: Console) -> None:
        plain(console, f"{job.source}: {found.text(console.width)}")
        if options.code is not None:
            plain(console, f"wrote {options.code}")

    out.emit(lambda: {"script": job.source, **json.loads(found.to_json())}, show)
