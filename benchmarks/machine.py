"""One line that says what a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Processor, cores, Python and torch."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
