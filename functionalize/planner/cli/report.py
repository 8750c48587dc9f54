"""`report`: what the ranks of a run logged with `FUNCTIONALIZE_REPORT=DIR`, as tables and as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from functionalize.errors import PictureError, UsageError
from functionalize.planner.cli.console import Out, plain, table
from functionalize.planner.cli.scripts import as_usage, check_files
from functionalize.planner.pictures.run_page import (
    STEP_COLUMNS,
    read_run,
    step_rows,
    write_run_page,
)
from functionalize.util.text import human_bytes, human_seconds


def report(out: Out, folder: str, page: str | None) -> None:
    """Print the tables; write the page if a file is named. Raises `UsageError` for a folder without calls."""
    if not Path(folder).is_dir():
        raise UsageError(f"{folder} is no folder: run with FUNCTIONALIZE_REPORT={folder}")
    check_files(page)
    with as_usage(PictureError):
        run = read_run(folder)
    if page is not None:
        write_run_page(page, run, f"Run in {folder}")
    misses, memory = run.misses(), [*run.memory()]

    def data() -> dict[str, Any]:
        return {
            "steps": [dict(zip(STEP_COLUMNS, row, strict=True)) for row in step_rows(run)],
            "programs": [line for step in run.steps for line in step.programs],
            "misses": misses,
            "memory": memory,
            "unread": run.unread,
        }

    def show(console: Console) -> None:
        rows = [[_cell(name, value) for name, value in row.items()] for row in data()["steps"]]
        heads = [name.removeprefix("seconds of ").removeprefix("seconds ") for name in STEP_COLUMNS]
        table(console, heads, rows)
        for log, times, ranks, _, text in misses[:20]:
            plain(console, f"{log}: {times} on {ranks} of the ranks: {text}")
        for rank, resident, device in memory:
            of_device = f", {human_bytes(device)} on the device" if device is not None else ""
            plain(console, f"rank {rank}: at most {human_bytes(resident)} resident{of_device}")
        if page is not None:
            plain(console, f"wrote {page}")

    out.emit(data, show)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return human_seconds(value) if "seconds" in name else str(value)
